"""Charts of lines: what changes over time, and how many messages were how fast. Logarithmic upwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from html import escape

import msgspec

from .bars import figure, legend
from .style import DASHES
from .svg import WIDTH, duration, text

_LEFT, _RIGHT, _TOP, _BOTTOM = 66, WIDTH - 16, 16, 230
_HEIGHT = _BOTTOM + 32
_TICKS = 5
_UNBROKEN = 'style="stroke-dasharray:none"'
_SHARES = (50.0, 90.0, 99.0, 99.9)
_Place = Callable[[float], float]


class Line(msgspec.Struct, frozen=True):
    """A named line through points of (x, microseconds); a gap where the value is None."""

    label: str
    points: Sequence[tuple[float, float | None]]


def over_time(title: str, lines: Sequence[Line]) -> str:
    """Lines over the time of day (UTC); x is in seconds since the epoch."""
    times = [time for line in lines for time, _ in line.points]
    begin, end = min(times, default=0.0), max(times, default=0.0)
    span = max(end - begin, 1e-3)
    ticks = {_moment(begin + span * n / (_TICKS - 1), span): n / (_TICKS - 1) for n in reversed(range(_TICKS))}
    return _chart(title, lines, lambda time: (time - begin) / span, ticks)


def by_share(title: str, lines: Sequence[Line]) -> str:
    """Lines over the share of messages that were as fast, in percent, logarithmic to 100 %."""
    ticks = {f"{share:g} %": _nines(share) for share in _SHARES}
    return _chart(title, lines, _nines, {**ticks, "max": 1.0})


def _nines(share: float) -> float:
    return -math.log10(max(1 - share / 100, 1e-4)) / 4


def _moment(time: float, span: float) -> str:
    words = datetime.fromtimestamp(time, timezone.utc).strftime("%H:%M:%S" if span < 86_400 else "%d %b %H:%M")
    return words if span >= _TICKS else f"{words}.{int(time * 10) % 10}"


def _chart(title: str, lines: Sequence[Line], place: _Place, ticks: dict[str, float]) -> str:
    values = [value for line in lines for _, value in line.points if value is not None and value > 0]
    if not values:
        return figure(title, "<p>nothing was measured</p>")
    low = math.floor(math.log10(min(values)))
    axes = _Axes(low, max(math.ceil(math.log10(max(values))), low + 1), place)
    parts = [*axes.grid(ticks)]
    for number, line in enumerate(lines):
        parts += _line(line, axes, number)
    svg = "\n".join(
        [
            f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {_HEIGHT}" width="{WIDTH}"'
            f' height="{_HEIGHT}" font-size="11" role="img">',
            f"<title>{escape(title)}</title>",
            *parts,
            "</svg>",
        ]
    )
    return figure(title, legend((_sample(number), line.label) for number, line in enumerate(lines)) + svg)


def _look(number: int) -> str:
    """The stroke of a line: its colour and its dashes, both its own as far as there are any."""
    return (
        f'fill="none" stroke="var(--colour{number % 4 + 1})" stroke-width="2"'
        f' stroke-dasharray="{DASHES[number % len(DASHES)]}"'
    )


def _sample(number: int) -> str:
    return (
        f'<svg width="34" height="10" viewBox="0 0 34 10" aria-hidden="true"><path d="M0 5H34" {_look(number)}/></svg>'
    )


class _Axes:
    """Where the points are."""

    def __init__(self, low: int, high: int, place: _Place) -> None:
        self._low, self._high, self._place = low, high, place

    def x(self, value: float) -> float:
        return self._across(self._place(value))

    def y(self, value: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * (math.log10(value) - self._low) / (self._high - self._low)

    def grid(self, ticks: dict[str, float]) -> Iterator[str]:
        for exponent in range(self._low, self._high + 1):
            y = self.y(10.0**exponent)
            yield f'<path d="M{_LEFT} {y:.1f}H{_RIGHT}" stroke="var(--grid)"/>'
            yield text(_LEFT - 8, y + 4, duration(10.0**exponent), "end")
        last = max(ticks.values())
        for number, (words, share) in enumerate(sorted(ticks.items(), key=lambda tick: tick[1])):
            x = self._across(share)
            yield f'<path d="M{x:.1f} {_TOP}V{_BOTTOM}" stroke="var(--grid)"/>'
            anchor = "end" if share == last and len(ticks) > 1 else "middle"
            name = "every-other" if number % 2 and share != last else ""
            yield text(x if anchor == "middle" else _RIGHT, _BOTTOM + 24, words, anchor, name=name)

    @staticmethod
    def _across(share: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * share


def _line(line: Line, axes: _Axes, number: int) -> Iterator[str]:
    """A path for each run of points; a ring for a point that stands alone, one around the other where several meet."""
    look = _look(number)
    piece: list[str] = []
    for x, value in [*line.points, (0.0, None)]:
        if value is not None and value > 0:
            piece.append(f"{axes.x(x):.1f} {axes.y(value):.1f}")
        elif piece:
            about = f"<title>{escape(line.label)}</title>"
            if len(piece) > 1:
                yield f'<path d="M{"L".join(piece)}" {look}>{about}</path>'
            else:
                cx, cy = piece[0].split()
                yield f'<circle cx="{cx}" cy="{cy}" r="{3 + 2 * number}" {look} {_UNBROKEN}>{about}</circle>'
            piece = []
