"""Lines over time as a file of their own, for pages of Markdown: light or dark as their reader prefers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from .curves import Line
from .style import DASHES, variables
from .svg import WIDTH, text

_LEFT, _RIGHT, _PLOT = 58, WIDTH - 14, 170
_TICKS = 4
_STEP = 20  # seconds: ticks are whole ones
_ROW = 18


def lines_over_seconds(title: str, unit: str, lines: Sequence[Line]) -> str:
    """An SVG of lines through points of (seconds, amount), both axes from 0; ``unit`` says what is drawn upwards.

    Wide enough for a telephone: its letters are to be read at a width of 400 pixels.
    """
    top = 46 + _ROW * len(lines)
    height = top + _PLOT + 40
    last = math.ceil(max((x for line in lines for x, _ in line.points), default=1.0) / _STEP) * _STEP or _STEP
    most = _round_up(max((y for line in lines for _, y in line.points if y is not None), default=1.0) or 1.0)

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + (_RIGHT - _LEFT) * x / last, top + _PLOT * (1 - y / most)

    parts = [*_grid(place(0, 0)[1], top, last, most)]
    for number, line in enumerate(lines):
        points = "L".join("{:.1f} {:.1f}".format(*place(x, y)) for x, y in line.points if y is not None)
        look = _look(number)
        y = 42 + _ROW * number
        parts.append(f'<path d="M8 {y}H40" {look}/>{text(46, y + 4, line.label, "start")}')
        parts.append(f'<path d="M{points}" {look}><title>{escape(line.label)}</title></path>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
            ' font-family="sans-serif" font-size="12" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{variables()}text{{fill:var(--ink)}}</style>",
            f'<rect width="{WIDTH}" height="{height}" fill="var(--card)"/>',
            text(8, 18, title, "start", is_bold=True),
            text(WIDTH - 14, top + _PLOT + 34, f"upwards: {unit}; across: seconds", "end"),
            *parts,
            "</svg>",
            "",
        ]
    )


def _look(number: int) -> str:
    return (
        f'fill="none" stroke="var(--colour{number % 4 + 1})" stroke-width="2"'
        f' stroke-dasharray="{DASHES[number % len(DASHES)]}"'
    )


def _grid(bottom: float, top: float, last: float, most: float) -> Iterator[str]:
    for number in range(_TICKS + 1):
        part = number / _TICKS
        y, x = bottom + (top - bottom) * part, _LEFT + (_RIGHT - _LEFT) * part
        yield f'<path d="M{_LEFT} {y:.1f}H{_RIGHT}" stroke="var(--grid)"/>'
        yield text(_LEFT - 6, y + 4, _short(most * part), "end")
        yield text(x, bottom + 16, f"{last * part:g}", "end" if number == _TICKS else "middle")


def _round_up(value: float) -> float:
    """The next number whose quarters are short: 1, 2, 4, 8 or 10 times a power of ten."""
    size = 10.0 ** math.floor(math.log10(value))
    return next(size * step for step in (1, 2, 4, 8, 10) if value <= size * step * (1 + 1e-9))


def _short(value: float) -> str:
    for size, name in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g} {name}"
    return f"{value:g}"
