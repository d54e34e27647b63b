"""What pages for people are made of: tables and bars of HTML, drawings of SVG, light or dark as their reader prefers,
with nothing from outside. No I/O.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from html import escape

import msgspec

# Name -> (light, dark). ``colour1`` to ``colour4`` are those of series and of pieces of bars.
COLOURS = {
    "paper": ("#fbfbfa", "#14171c"),
    "card": ("#ffffff", "#1b2027"),
    "ink": ("#1d2430", "#e6e9ee"),
    "soft": ("#5b6472", "#a3acba"),
    "line": ("#dfe3e8", "#303743"),
    "grid": ("#c9cfd8", "#465061"),
    "bad": ("#a3271c", "#ff7b72"),
    "badpaper": ("#fef0ee", "#3a1f1f"),
    "fine": ("#146a47", "#6ccf9c"),
    "colour1": ("#0061a8", "#2f81f7"),
    "colour2": ("#c77700", "#e3b341"),
    "colour3": ("#8a3ffc", "#d2a8ff"),
    "colour4": ("#30363d", "#6e7681"),
}
# Lines are told apart by these as well; SVG's stroke-dasharray.
DASHES = ("none", "7 3", "2 3", "9 3 2 3", "1 5")


def variables() -> str:
    """The colours as CSS variables, light and dark."""

    def block(which: int) -> str:
        return "".join(f"--{name}:{shades[which]};" for name, shades in COLOURS.items())

    return f":root{{color-scheme:light dark;{block(0)}}}\n@media(prefers-color-scheme:dark){{:root{{{block(1)}}}}}\n"


_LAYOUT = """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;
overflow-wrap:anywhere}
main{max-width:1320px;margin:0 auto;padding:28px 24px 60px}
h1{font-size:26px;margin:0}header p{margin:4px 0 16px;color:var(--soft)}
h2{font-size:18px;margin:36px 0 10px}h3{font-size:15px;margin:18px 0 6px}
code{font-size:.92em}
.conclusion{background:var(--card);border:1px solid var(--line);border-left:6px solid var(--fine);border-radius:8px;
padding:12px 16px;margin:0 0 14px}
.conclusion p{margin:0 0 4px}.conclusion p:first-child{font-size:18px;font-weight:600}
.conclusion.bad{border-left-color:var(--bad)}.conclusion.bad p:first-child{color:var(--bad)}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(138px,1fr));gap:10px}
.tiles div{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px}
.tiles span,.tiles small{display:block;color:var(--soft);font-size:12.5px}
.tiles b{font-size:22px;font-variant-numeric:tabular-nums}
.tiles .bad{background:var(--badpaper);border-color:var(--bad)}.tiles .bad b{color:var(--bad)}
.tiles .fine b{color:var(--fine)}
.note{border-left:3px solid var(--colour2);padding:2px 10px;margin:12px 0 0;color:var(--soft)}
.wide{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:8px;margin:8px 0 16px}
table{border-collapse:collapse;font-size:12.5px;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:4px 7px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
tr:last-child td{border-bottom:0}th{color:var(--soft);font-weight:600}
td[colspan]{text-align:left;white-space:normal}
td.bad{color:var(--bad);background:var(--badpaper);font-weight:600}td.fine{color:var(--fine)}td.zero{color:var(--soft)}
table.named td:first-child,table.named th:first-child{text-align:left;position:sticky;left:0;background:var(--card)}
table{overflow-wrap:normal}table.words td,table.words th{text-align:left;white-space:normal}
figure{margin:0 0 10px;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px}
figcaption{font-weight:600;font-size:13.5px;margin-bottom:6px}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:12px;align-items:start}
svg{max-width:100%;height:auto;display:block}svg.chart{width:100%}
svg text{font-family:inherit;fill:var(--ink)}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;list-style:none;margin:0 0 6px;padding:0;font-size:12.5px}
.legend li{display:flex;align-items:center;gap:6px}.legend svg{flex:none}.legend i{width:14px;height:14px;flex:none}
.bar{display:grid;grid-template-columns:minmax(0,15em) minmax(0,1fr) minmax(0,13em);gap:2px 12px;align-items:center;
margin:5px 0;font-size:13px}
.bar b{font-weight:700}.bar .value{font-variant-numeric:tabular-nums}
.track{position:relative;display:flex;height:16px}
.track i{height:100%;flex:none}
.kind1{background:var(--colour1)}
.kind2{background:repeating-linear-gradient(45deg,var(--colour2) 0 5px,var(--card) 5px 7px)}
.kind3{background:repeating-linear-gradient(-45deg,var(--colour3) 0 3px,var(--card) 3px 6px)}
.kind4{background:repeating-linear-gradient(90deg,var(--colour4) 0 2px,var(--card) 2px 5px)}
.kind5{background:var(--bad)}
.track u{position:absolute;top:4px;height:8px;border:solid var(--ink);border-width:0 1.5px;opacity:.85}
.track u::after{content:"";position:absolute;left:0;right:0;top:3px;height:1.5px;background:var(--ink)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:6px 16px;font-size:14px}dt{font-weight:600}
dd{margin:0;color:var(--soft)}
@media(max-width:640px){main{padding:16px 12px 40px}dl{display:block}dd{margin-bottom:8px}
.bar{grid-template-columns:minmax(0,1fr) auto}.bar .label,.bar .track{grid-column:1/-1}.bar .track{order:2}
.bar .label{grid-column:1/2}.bar .value{grid-column:2/3;text-align:right;max-width:55vw}
svg.chart text{font-size:15px}svg.chart .every-other{display:none}}
@media print{body{background:#fff}.wide,figure{break-inside:avoid}}
"""
STYLE = variables() + _LAYOUT


def document(title: str, style: str, parts: Iterable[str]) -> str:
    """The whole document."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title>\n<style>{style}</style>"
    )
    body = "\n".join(parts)
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def table(head: Sequence[str], body: Iterable[Sequence[str]], name: str = "named") -> str:
    """A table of texts in a box that scrolls where it is too narrow; without a head where that is empty.

    Args:
        name: ``named`` where the first column names the rows and stays in view, ``words`` where all is prose.
    """
    lines = [f'<div class="wide"><table class="{name}">']
    if any(head):
        lines.append("<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>")
    lines += [f"<tr>{_cells(row)}</tr>" for row in body]
    return "\n".join([*lines, "</table></div>"])


def _cells(row: Sequence[str]) -> str:
    """The cells of a row; the last that is not empty takes the place of the empty ones behind it."""
    filled = max((place for place, cell in enumerate(row, 1) if cell), default=0)
    spanned = f' colspan="{len(row) - filled + 1}"' if 0 < filled < len(row) else ""
    cells = row[: filled or len(row)]
    return "".join(
        f"<td{spanned if place == filled else ''}>{escape(cell)}</td>" for place, cell in enumerate(cells, 1)
    )


def element(name: str, content: str, attributes: Mapping[str, str] | None = None) -> str:
    """An element around content that is HTML already."""
    given = "".join(f' {key}="{escape(value)}"' for key, value in (attributes or {}).items())
    return f"<{name}{given}>{content}</{name}>"


WORST = 5


class Piece(msgspec.Struct, frozen=True):
    """A part of a bar. ``kind`` is 1 to 4, each with its colour and pattern; or WORST for what must not be."""

    kind: int
    size: float
    about: str = ""


class Bar(msgspec.Struct, frozen=True):
    """A row: what it is of, its pieces one after the other, its figure as text, and the range that a mark shows."""

    label: str
    pieces: Sequence[Piece]
    text: str
    low: float | None = None
    high: float | None = None
    is_ours: bool = False


def bars(title: str, rows: Sequence[Bar], kinds: Mapping[int, str] | None = None) -> str:
    """A figure of bars on one scale from 0. ``kinds`` says what each kind of piece is, where there are several."""
    longest = max((_reach(row) for row in rows), default=0.0) or 1.0
    shown = "".join(_row(row, 100 / longest) for row in rows)
    return figure(title, (_legend(kinds) if kinds else "") + shown, "bars")


def figure(title: str, content: str, name: str = "") -> str:
    """Content that is HTML already, under its title."""
    return element("figure", element("figcaption", escape(title)) + content, {"class": name} if name else None)


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Pairs of a mark, HTML already, and what it means."""
    items = "".join(f"<li>{mark}{escape(words)}</li>" for mark, words in entries)
    return element("ul", items, {"class": "legend"})


def _legend(kinds: Mapping[int, str]) -> str:
    return legend((f'<i class="kind{kind}"></i>', name) for kind, name in kinds.items())


def _reach(row: Bar) -> float:
    return max(sum(piece.size for piece in row.pieces), row.high or 0.0)


def _row(row: Bar, scale: float) -> str:
    pieces = "".join(_piece(piece, scale) for piece in row.pieces if piece.size > 0)
    if row.low is not None and row.high is not None and row.high > row.low:
        pieces += f'<u style="left:{row.low * scale:.2f}%;width:{(row.high - row.low) * scale:.2f}%"></u>'
    weight = "b" if row.is_ours else "span"
    label = element(weight, escape(row.label), {"class": "label"})
    value = element(weight, escape(row.text), {"class": "value"})
    track = element("span", pieces, {"class": "track"})
    return element("div", label + track + value, {"class": "bar"})


def _piece(piece: Piece, scale: float) -> str:
    width = f"width:max(2px,{piece.size * scale:.2f}%)"
    about = {"title": piece.about} if piece.about else {}
    return element("i", "", {"class": f"kind{piece.kind}", "style": width, **about})


WIDTH = 440


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


_LEFT, _RIGHT, _TOP, _BOTTOM = 66, WIDTH - 16, 16, 230
_HEIGHT = _BOTTOM + 32
_TICKS = 5
_FONT_SIZES = (11, 15)  # of the words below: on a wide screen and on a narrow one, see ``style``
_LETTER = 0.6  # width of a letter at most, in its size: digits have less
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
        left = {size: float(WIDTH) for size in _FONT_SIZES}
        # From the last on: those before it have their words where there is room, in each size of the letters.
        for words, share in sorted(ticks.items(), key=lambda tick: -tick[1]):
            x = self._across(share)
            yield f'<path d="M{x:.1f} {_TOP}V{_BOTTOM}" stroke="var(--grid)"/>'
            anchor = "end" if share == last and len(ticks) > 1 else "middle"
            x = x if anchor == "middle" else _RIGHT
            fits = [self._has_room(words, x, anchor, size, left) for size in _FONT_SIZES]
            if fits[0]:
                yield text(x, _BOTTOM + 24, words, anchor, name="" if fits[1] else "every-other")

    @staticmethod
    def _has_room(words: str, x: float, anchor: str, size: int, left: dict[int, float]) -> bool:
        """Whether words end before the next ones begin; then those before them have to end before these."""
        width = _LETTER * size * len(words)
        end = x if anchor == "end" else x + width / 2
        if end + size / 2 > left[size] and anchor != "end":
            return False
        left[size] = end - width
        return True

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
