"""Charts as SVG text: bars with their spread, and curves. Each stands alone: nothing is taken from outside."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

import msgspec

WIDTH = 760
_LABEL = 170
_VALUE = 110
_BAR = 22
_TOP = 34
_COLOURS = (
    "#1f77b4",
    "#ff7f0e",
    "#2ca02c",
    "#d62728",
    "#9467bd",
    "#8c564b",
    "#e377c2",
    "#7f7f7f",
    "#bcbd22",
    "#17becf",
)
_OURS = "#1f77b4"
_OTHERS = "#9aa7b4"


class Bar(msgspec.Struct, frozen=True):
    """A bar from 0 to ``value``, with a mark from ``low`` to ``high``, and its figure as text."""

    label: str
    value: float
    low: float
    high: float
    text: str
    is_ours: bool = False


class Curve(msgspec.Struct, frozen=True):
    """A named line through points."""

    label: str
    points: Sequence[tuple[float, float]]


def bars(title: str, values: Sequence[Bar]) -> str:
    """Horizontal bars, as long as their values."""
    height = _TOP + len(values) * _BAR + 10
    scale = (WIDTH - _LABEL - _VALUE) / (max((bar.high for bar in values), default=0) or 1)
    return _svg(height, title, [part for row, bar in enumerate(values) for part in _bar(row, bar, scale)])


def _bar(row: int, bar: Bar, scale: float) -> Iterator[str]:
    top = _TOP + row * _BAR
    middle = top + _BAR / 2
    low, high = _LABEL + bar.low * scale, _LABEL + bar.high * scale
    colour = _OURS if bar.is_ours else _OTHERS
    yield _text(_LABEL - 8, middle + 4, bar.label, "end", bar.is_ours)
    width = max(bar.value * scale, 1)
    yield f'<rect x="{_LABEL}" y="{top + 3}" width="{width:.1f}" height="{_BAR - 6}" fill="{colour}"/>'
    yield f'<path d="M{low:.1f} {middle}H{high:.1f}M{low:.1f} {middle - 4}v8M{high:.1f} {middle - 4}v8" stroke="#222"/>'
    yield _text(high + 8, middle + 4, bar.text, "start", bar.is_ours)


def latency_curves(title: str, curves: Sequence[Curve]) -> str:
    """Latency (microseconds, logarithmic) over the share of messages that were as fast (also logarithmic to 100 %)."""
    values = [value for curve in curves for _, value in curve.points if value > 0]
    if not values:
        return _svg(_TOP + 10, title, [])
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    plot = _Plot(low, max(high, low + 1))
    parts = [*plot.grid()]
    for number, curve in enumerate(curves):
        colour = _COLOURS[number % len(_COLOURS)]
        path = "L".join(f"{plot.x(share):.1f} {plot.y(value):.1f}" for share, value in curve.points if value > 0)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<rect x="{plot.right + 12}" y="{_TOP + number * 18}" width="12" height="4" fill="{colour}"/>')
        parts.append(_text(plot.right + 30, _TOP + number * 18 + 6, curve.label, "start"))
    return _svg(plot.bottom + 36, title, parts)


class _Plot:
    """The axes of latency curves."""

    left, right, bottom = 70, WIDTH - 170, 300
    shares = (0.0, 50.0, 90.0, 99.0, 99.9)

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high

    def x(self, share: float) -> float:
        nines = -math.log10(max(1 - share / 100, 1e-4))
        return self.left + (self.right - self.left) * nines / 4

    def y(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return self.bottom - (self.bottom - _TOP) * share

    def grid(self) -> Iterator[str]:
        for exponent in range(self.low, self.high + 1):
            y = self.y(10.0**exponent)
            yield f'<path d="M{self.left} {y:.1f}H{self.right}" stroke="#ddd"/>'
            yield _text(self.left - 8, y + 4, _microseconds(10.0**exponent), "end")
        for share in self.shares:
            x = self.x(share)
            yield f'<path d="M{x:.1f} {_TOP}V{self.bottom}" stroke="#ddd"/>'
            yield _text(x, self.bottom + 18, f"{share:g} %", "middle")
        yield _text(self.right, self.bottom + 18, "max", "middle")


def _microseconds(value: float) -> str:
    return f"{value:g} us" if value < 1000 else f"{value / 1000:g} ms" if value < 1e6 else f"{value / 1e6:g} s"


def _text(x: float, y: float, text: str, anchor: str, is_bold: bool = False) -> str:
    weight = ' font-weight="bold"' if is_bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'


def _svg(height: float, title: str, parts: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}"'
            f' viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif" font-size="12" role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{WIDTH}" height="{height:.0f}" fill="#fff"/>',
            f'<text x="8" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
            *parts,
            "</svg>",
        ]
    )
