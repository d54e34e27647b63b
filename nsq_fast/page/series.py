"""Charts of what changes over time, of counts by kind, and of lives: lines, stacked bars, spans."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from html import escape

import msgspec

from .charts import microseconds
from .svg import OF_PAGE, WIDTH, Theme, drawing, text

_LEFT, _RIGHT, _TOP, _BOTTOM = 70, WIDTH - 80, 34, 300
_LABEL, _VALUE, _BAR = 230, 150, 24
_TICKS = 6


class Line(msgspec.Struct, frozen=True):
    """A named line through points of (seconds since the epoch, microseconds); a gap where the value is None."""

    label: str
    points: Sequence[tuple[float, float | None]]


class Stack(msgspec.Struct, frozen=True):
    """A bar of several counts, with what is written behind it."""

    label: str
    counts: Sequence[float]
    text: str


class Span(msgspec.Struct, frozen=True):
    """A piece of a life: ``colour`` is an index into the theme's, -1 for what is only waited."""

    start: float
    end: float
    colour: int
    about: str


class Life(msgspec.Struct, frozen=True):
    """A row of spans on a scale of its own, and the words behind it."""

    label: str
    spans: Sequence[Span]
    text: str


def over_time(title: str, lines: Sequence[Line], theme: Theme = OF_PAGE) -> str:
    """Lines over the time of day (UTC), the values logarithmic."""
    values = [value for line in lines for _, value in line.points if value is not None and value > 0]
    times = [time for line in lines for time, _ in line.points]
    if not values:
        return drawing(_TOP + 10, title, [], theme)
    axes = _Axes(min(times), max(times), min(values), max(values))
    parts = [*axes.grid(theme)]
    for number, line in enumerate(lines):
        colour = theme.colours[number % len(theme.colours)]
        parts += _line(line, axes, colour)
        parts.append(f'<rect x="{_RIGHT + 12}" y="{_TOP + number * 18}" width="12" height="4" fill="{colour}"/>')
        parts.append(text(_RIGHT + 30, _TOP + number * 18 + 6, line.label, "start"))
    return drawing(_BOTTOM + 36, title, parts, theme)


class _Axes:
    """Where times and values are."""

    def __init__(self, begin: float, end: float, low: float, high: float) -> None:
        self._begin, self._span = begin, max(end - begin, 1e-3)
        self._low, self._high = math.floor(math.log10(low)), math.ceil(math.log10(high))
        self._high = max(self._high, self._low + 1)

    def x(self, time: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (time - self._begin) / self._span

    def y(self, value: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * (math.log10(value) - self._low) / (self._high - self._low)

    def grid(self, theme: Theme) -> Iterator[str]:
        for exponent in range(self._low, self._high + 1):
            y = self.y(10.0**exponent)
            yield f'<path d="M{_LEFT} {y:.1f}H{_RIGHT}" stroke="{theme.grid}"/>'
            yield text(_LEFT - 8, y + 4, microseconds(10.0**exponent), "end")
        shown = set()
        for number in range(_TICKS):
            time = self._begin + self._span * number / (_TICKS - 1)
            words = self._moment(time)
            if words not in shown:
                yield text(self.x(time), _BOTTOM + 18, words, "middle")
            shown.add(words)

    def _moment(self, time: float) -> str:
        form = "%H:%M:%S" if self._span < 86_400 else "%d %b %H:%M"
        words = datetime.fromtimestamp(time, timezone.utc).strftime(form)
        return words if self._span >= _TICKS else f"{words}.{int(time * 10) % 10}"


def _line(line: Line, axes: _Axes, colour: str) -> Iterator[str]:
    piece: list[str] = []
    for time, value in [*line.points, (0.0, None)]:
        if value is not None and value > 0:
            piece.append(f"{axes.x(time):.1f} {axes.y(value):.1f}")
        elif piece:
            if len(piece) == 1:
                x, y = piece[0].split()
                yield f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>'
            else:
                yield f'<path d="M{"L".join(piece)}" fill="none" stroke="{colour}" stroke-width="2"/>'
            piece = []


def stacks(title: str, kinds: Sequence[str], rows: Sequence[Stack], theme: Theme = OF_PAGE) -> str:
    """Horizontal bars whose parts are counts of several kinds."""
    longest = max((sum(row.counts) for row in rows), default=0) or 1
    scale = (WIDTH - _LABEL - _VALUE) / longest
    parts = [*_legend(kinds, theme)]
    top = _TOP + 24
    for number, row in enumerate(rows):
        y = top + number * _BAR
        parts.append(text(_LABEL - 8, y + _BAR / 2 + 4, row.label, "end"))
        x = float(_LABEL)
        for kind, count in enumerate(row.counts):
            if count:
                width = max(count * scale, 2)
                about = f"<title>{escape(kinds[kind])}: {count:,.0f}</title>"
                fill = theme.colours[kind % len(theme.colours)]
                shape = f'x="{x:.1f}" y="{y + 4}" width="{width:.1f}" height="{_BAR - 8}" fill="{fill}"'
                parts.append(f"<rect {shape}>{about}</rect>")
                x += width
        parts.append(text(x + 8, y + _BAR / 2 + 4, row.text, "start"))
    return drawing(top + len(rows) * _BAR + 8, title, parts, theme)


def spans(title: str, kinds: Sequence[str], lives: Sequence[Life], theme: Theme = OF_PAGE) -> str:
    """Lives one below the other, each from its own begin to its own end."""
    parts = [*_legend(kinds, theme)]
    top = _TOP + 24
    for number, life in enumerate(lives):
        y = top + number * _BAR
        parts.append(text(_LABEL - 8, y + _BAR / 2 + 4, life.label, "end"))
        scale = (WIDTH - _LABEL - _VALUE) / (max((span.end for span in life.spans), default=0) or 1)
        end = float(_LABEL)
        for span in life.spans:
            x, width = _LABEL + span.start * scale, max((span.end - span.start) * scale, 1)
            fill = theme.colours[span.colour] if span.colour >= 0 else theme.grid
            shape = f'x="{x:.1f}" y="{y + 5}" width="{width:.1f}" height="{_BAR - 10}" fill="{fill}"'
            parts.append(f"<rect {shape}><title>{escape(span.about)}</title></rect>")
            end = max(end, x + width)
        parts.append(text(end + 8, y + _BAR / 2 + 4, life.text, "start"))
    return drawing(top + len(lives) * _BAR + 8, title, parts, theme)


def _legend(kinds: Sequence[str], theme: Theme) -> Iterator[str]:
    x = 8.0
    for number, kind in enumerate(kinds):
        fill = theme.colours[number] if number < len(theme.colours) else theme.grid
        yield f'<rect x="{x}" y="{_TOP}" width="12" height="12" fill="{fill}"/>'
        yield text(x + 18, _TOP + 10, kind, "start")
        x += 40 + 6.4 * len(kind)
