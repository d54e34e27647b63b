"""Charts as SVG text: bars with their spread, and curves. Each stands alone: nothing is taken from outside."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from .svg import LIGHT, WIDTH, Theme, drawing, text

_LABEL = 170
_VALUE = 110
_BAR = 22
_TOP = 34
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
    return drawing(height, title, [part for row, bar in enumerate(values) for part in _bar(row, bar, scale)])


def _bar(row: int, bar: Bar, scale: float) -> Iterator[str]:
    top = _TOP + row * _BAR
    middle = top + _BAR / 2
    low, high = _LABEL + bar.low * scale, _LABEL + bar.high * scale
    colour = _OURS if bar.is_ours else _OTHERS
    yield text(_LABEL - 8, middle + 4, bar.label, "end", bar.is_ours)
    width = max(bar.value * scale, 1)
    yield f'<rect x="{_LABEL}" y="{top + 3}" width="{width:.1f}" height="{_BAR - 6}" fill="{colour}"/>'
    yield f'<path d="M{low:.1f} {middle}H{high:.1f}M{low:.1f} {middle - 4}v8M{high:.1f} {middle - 4}v8" stroke="#222"/>'
    yield text(high + 8, middle + 4, bar.text, "start", bar.is_ours)


def latency_curves(title: str, curves: Sequence[Curve], theme: Theme = LIGHT) -> str:
    """Latency (microseconds, logarithmic) over the share of messages that were as fast (also logarithmic to 100 %)."""
    values = [value for curve in curves for _, value in curve.points if value > 0]
    if not values:
        return drawing(_TOP + 10, title, [], theme)
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    plot = _Plot(low, max(high, low + 1), theme)
    parts = [*plot.grid()]
    for number, curve in enumerate(curves):
        colour = theme.colours[number % len(theme.colours)]
        path = "L".join(f"{plot.x(share):.1f} {plot.y(value):.1f}" for share, value in curve.points if value > 0)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<rect x="{plot.right + 12}" y="{_TOP + number * 18}" width="12" height="4" fill="{colour}"/>')
        parts.append(text(plot.right + 30, _TOP + number * 18 + 6, curve.label, "start"))
    return drawing(plot.bottom + 36, title, parts, theme)


class _Plot:
    """The axes of latency curves."""

    left, right, bottom = 70, WIDTH - 170, 300
    shares = (0.0, 50.0, 90.0, 99.0, 99.9)

    def __init__(self, low: int, high: int, theme: Theme) -> None:
        self.low, self.high, self._grid = low, high, theme.grid

    def x(self, share: float) -> float:
        nines = -math.log10(max(1 - share / 100, 1e-4))
        return self.left + (self.right - self.left) * nines / 4

    def y(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return self.bottom - (self.bottom - _TOP) * share

    def grid(self) -> Iterator[str]:
        for exponent in range(self.low, self.high + 1):
            y = self.y(10.0**exponent)
            yield f'<path d="M{self.left} {y:.1f}H{self.right}" stroke="{self._grid}"/>'
            yield text(self.left - 8, y + 4, microseconds(10.0**exponent), "end")
        for share in self.shares:
            x = self.x(share)
            yield f'<path d="M{x:.1f} {_TOP}V{self.bottom}" stroke="{self._grid}"/>'
            yield text(x, self.bottom + 18, f"{share:g} %", "middle")
        yield text(self.right, self.bottom + 18, "max", "middle")


def microseconds(value: float) -> str:
    """A duration in microseconds with the unit that suits it."""
    return f"{value:g} us" if value < 1000 else f"{value / 1000:g} ms" if value < 1e6 else f"{value / 1e6:g} s"
