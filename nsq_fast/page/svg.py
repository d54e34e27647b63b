"""What drawings of SVG are made of: texts, durations; and bars as a file of their own, for pages of Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from .bars import Bar
from .style import variables

WIDTH = 440
_PICTURE = 760
_LABEL, _VALUE, _BAR, _TOP = 170, 110, 22, 34


def text(x: float, y: float, words: str, anchor: str, *, is_bold: bool = False, name: str = "") -> str:
    """A line of text at a point: ``anchor`` is start, middle or end; ``name`` is a class."""
    weight = ' font-weight="bold"' if is_bold else ""
    named = f' class="{name}"' if name else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}{named}>{escape(words)}</text>'


def duration(microseconds: float) -> str:
    """A duration with the unit that suits it."""
    if microseconds < 1:
        return f"{microseconds * 1000:g} ns"
    for size, unit in ((1e3, "µs"), (1e6, "ms")):
        if microseconds < size:
            return f"{microseconds / size * 1e3:g} {unit}"
    return f"{microseconds / 1e6:g} s"


def picture(title: str, rows: Sequence[Bar]) -> str:
    """Bars as a file of their own; light or dark as its reader prefers. The figures stand right of every mark."""
    height = _TOP + len(rows) * _BAR + 10
    scale = (_PICTURE - _LABEL - _VALUE) / (max((_reach(row) for row in rows), default=0) or 1)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_PICTURE}" height="{height}"'
            f' viewBox="0 0 {_PICTURE} {height}" font-family="sans-serif" font-size="12" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{variables()}text{{fill:var(--ink)}}</style>",
            f'<rect width="{_PICTURE}" height="{height}" fill="var(--card)"/>',
            f'<text x="8" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
            *(part for number, row in enumerate(rows) for part in _row(_TOP + number * _BAR, row, scale)),
            "</svg>",
        ]
    )


def _reach(row: Bar) -> float:
    return max(_size(row), row.high or 0.0)


def _size(row: Bar) -> float:
    return sum(piece.size for piece in row.pieces)


def _row(top: float, row: Bar, scale: float) -> Iterator[str]:
    middle = top + _BAR / 2
    yield text(_LABEL - 8, middle + 4, row.label, "end", is_bold=row.is_ours)
    width = max(_size(row) * scale, 1)
    fill = "colour1" if row.is_ours else "soft"
    yield f'<rect x="{_LABEL}" y="{top + 3}" width="{width:.1f}" height="{_BAR - 6}" fill="var(--{fill})"/>'
    if row.low is not None and row.high is not None and row.high > row.low:
        low, high = _LABEL + row.low * scale, _LABEL + row.high * scale
        ends = f"M{low:.1f} {middle - 4}v8M{high:.1f} {middle - 4}v8"
        yield f'<path d="M{low:.1f} {middle}H{high:.1f}{ends}" stroke="var(--ink)"/>'
    yield text(_LABEL + _reach(row) * scale + 8, middle + 4, row.text, "start", is_bold=row.is_ours)
