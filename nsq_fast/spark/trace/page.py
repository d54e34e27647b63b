"""The report: one page of HTML that stands alone, from the tables."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nsq_fast.errors import counted
from nsq_fast.page import DASHES
from nsq_fast.page import STYLE as PAGE_STYLE
from nsq_fast.page import duration as tick_duration

from .schema import COUNTS, FAULTS, POINTS, SHARES, Channel, Figures, TraceGroup

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


TITLE = "NSQ traces"
_COUNT_TITLES = ("messages", "finished", "pending", "lost", "duplicates", "order", "REQ", "timeout", "unknown")
_LANE_COUNTS = tuple(zip(COUNTS, _COUNT_TITLES, strict=True))
_LANE_DURATIONS = tuple(
    (f"{what}_{point}_ns", point)
    for what, points in {"latency": POINTS, "in_queue": ("p50", "p99"), "handling": ("p50", "p99")}.items()
    for point in points
)
_GROUPS = (
    ("", 3),
    ("messages", 3),
    ("faults", 3),
    ("delivered again after", 3),
    ("end to end", 4),
    ("in queue", 2),
    ("handling", 2),
)
_CONCLUSIONS = {"lost": "lost", "duplicates": "finished more than once", "violations": "finished out of order"}
_FAULT_TITLES = {
    "lost": "Lost messages",
    "duplicates": "Messages finished more than once",
    "violations": "Out of order",
}


def write_report(spark: SparkSession, tables: str | os.PathLike[str], path: str | os.PathLike[str]) -> Figures:
    """Write the report of the tables in a folder; return what it shows. Raises ConfigError when there are no tables."""
    from .queries import figures_of

    figures = figures_of(spark, tables)
    Path(path).write_text(html(figures), encoding="utf-8")
    return figures


def html(figures: Figures) -> str:
    parts = [
        f"<header><h1>{TITLE}</h1><p>{_about(figures)}</p></header>",
        _conclusion(figures),
        _tiles(figures),
        *_notes(figures),
        "<h2>By topic, channel and partition</h2>",
        _group_table(figures),
        fault_chart(figures.groups),
        *_channels(figures),
        _slowest(figures),
        *(_examples(figures, kind) for kind in FAULTS),
        _clocks(figures),
        _sources(figures),
        "<h2>What is counted how</h2>",
        DEFINITIONS,
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{TITLE}</title>\n<style>{PAGE_STYLE}{STYLE}</style>"
    )
    body = "\n".join(["<main>", *parts, "</main>"])
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _about(figures: Figures) -> str:
    begin, end = (_moment(each) for each in (figures.begin_ns, figures.end_ns))
    return escape(
        f"{begin} to {end} UTC, {duration(figures.end_ns - figures.begin_ns)}. {counted(figures.records, 'record')} of"
        f" {counted(figures.publishes, 'publish', 'publishes')} and"
        f" {counted(figures.records - figures.publishes, 'delivery', 'deliveries')}."
        f" Windows of {duration(figures.window_ns)}, lost after {duration(figures.grace_ns)}."
    )


def _conclusion(figures: Figures) -> str:
    """What became of the messages, in a sentence; and how long the worst group took."""
    totals = figures.totals
    found = [f"{count(totals[kind])} {words}" for kind, words in _CONCLUSIONS.items() if totals[kind]]
    pending = (
        f" {count(totals['pending'])} {'is' if totals['pending'] == 1 else 'are'} pending." if totals["pending"] else ""
    )
    of_all = counted(totals["messages"], "message")
    if not totals["messages"]:
        lines = ["No message can be judged: the logs have no publish with a channel."]
    elif found:
        lines = [f"Of {of_all}, {', '.join(found)}.{pending}"]
    else:
        lines = [f"Of {of_all} none was lost, finished twice or finished out of order.{pending}"]
    judged = [group for group in figures.groups if group.durations["latency_p99_ns"] is not None]
    if judged:
        worst = max(judged, key=lambda group: group.durations["latency_p99_ns"] or 0)
        lines.append(
            f"Slowest is {_lane(worst.topic, worst.partition, worst.channel)}: 99 % of its messages were finished"
            f" within {duration(worst.durations['latency_p99_ns'])} of their publish, half of them within"
            f" {duration(worst.durations['latency_p50_ns'])}."
        )
    kind = "conclusion bad" if found else "conclusion"
    content = "".join(element("p", escape(line)) for line in lines)
    return element("section", content, {"class": kind, "id": "conclusion"})


def _moment(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns // 10**9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def _tiles(figures: Figures) -> str:
    totals = figures.totals
    again = sum(totals[name] for name in ("redelivered_req", "redelivered_timeout", "redelivered_unknown"))
    tiles = [
        ("messages", totals["messages"], "in all channels", ""),
        ("finished", totals["finished"], percent(totals["finished"], totals["messages"]), ""),
        ("pending", totals["pending"], "within the grace period", ""),
        *((name, totals[name], note, "fault") for name, note in (
            ("lost", "never finished"), ("duplicates", "finished more than once"), ("violations", "out of order")
        )),
        ("redelivered", again, "delivered again", ""),
        ("problems", figures.problems, "lines that hold no record", "fault"),
    ]  # fmt: skip
    shown = []
    for name, value, note, kind in tiles:
        number = element("b", count(value), {"data-figure": name})
        marked = {"class": f"{kind} {'bad' if value else 'fine'}" if kind else "plain"}
        shown.append(element("div", f"<span>{escape(name)}</span>{number}<small>{escape(note)}</small>", marked))
    return element("section", "".join(shown), {"class": "tiles", "id": "totals"})


def _notes(figures: Figures) -> Iterator[str]:
    for topic, publishes in figures.unconsumed.items():
        yield _note(
            f"{counted(publishes, 'publish', 'publishes')} to {topic}, and no delivery was recorded: nothing of it is"
            " counted below."
        )
    if figures.unpublished:
        yield _note(f"Deliveries of {counted(figures.unpublished, 'message')} have no record of their producer.")
    if figures.late:
        yield _note(
            f"{counted(figures.late, 'message')} had a delivery after the stream had decided on them; see table late."
        )
    if figures.group_count > len(figures.groups):
        yield _note(f"{len(figures.groups):,} of {figures.group_count:,} rows are shown, those with faults first.")


def _note(words: str) -> str:
    return element("p", escape(words), {"class": "note"})


def _group_table(figures: Figures) -> str:
    groups = "".join(f'<th colspan="{width}">{escape(name)}</th>' for name, width in _GROUPS)
    names = ["topic", "channel", "part.", *(title for _, title in (*_LANE_COUNTS, *_LANE_DURATIONS))]
    head = f"<tr>{groups}</tr><tr>{''.join(f'<th>{escape(name)}</th>' for name in names)}</tr>"
    rows = "".join(_group_row(group) for group in figures.groups)
    inner = element("table", f"<thead>{head}</thead><tbody>{rows}</tbody>", {"id": "groups", "class": "named"})
    return element("div", inner, {"class": "wide"})


def _group_row(group: TraceGroup) -> str:
    partition = "" if group.partition is None else str(group.partition)
    cells = [element("td", escape(each), {"class": "name"}) for each in (group.topic, group.channel, partition or "-")]
    for name, _ in _LANE_COUNTS:
        value = group.counts[name]
        marked = "bad" if name in FAULTS and value else "zero" if not value else ""
        cells.append(element("td", count(value), {"data-figure": name, "class": marked}))
    for name, _ in _LANE_DURATIONS:
        cells.append(_duration_cell(name, group.durations[name]))
    return element("tr", "".join(cells), {"data-group": f"{group.topic}|{partition}|{group.channel}"})


def _duration_cell(name: str, value: int | None) -> str:
    exact = {} if value is None else {"title": f"{value:,} ns"}
    return element("td", escape(duration(value)), {"data-figure": name, **exact})


def _channels(figures: Figures) -> Iterator[str]:
    if figures.channels:
        yield "<h2>Latency</h2>"
    for channel in figures.channels:
        charts = "".join(channel_charts(channel))
        yield f"<h3>{escape(channel.topic)} / {escape(channel.channel)}</h3>{element('div', charts, {'class': 'pair'})}"


def _part(title: str, name: str, head: Sequence[str], rows: Sequence[Sequence[str]], above: str = "") -> str:
    """A table under its title; nothing without rows."""
    return f"<h2>{title}</h2>{above}{element('div', table(head, rows), {'id': name})}" if rows else ""


def _slowest(figures: Figures) -> str:
    head = ["message", "trace id", "latency", "in queue", "handling", "deliveries", "what happened"]
    rows = [_slow_row(row) for row in figures.slowest]
    return _part("The slowest messages", "slowest", head, rows, life_chart(figures.slowest))


def _slow_row(row: dict[str, Any]) -> list[str]:
    steps = [_step(event, row["published_ns"]) for event in row["events"]]
    return [
        place(row),
        str(row["trace_id"]),
        *(duration(row[name]) for name in ("latency_ns", "in_queue_ns", "handling_ns")),
        str(row["deliveries"]),
        ", ".join(steps),
    ]


def _step(event: dict[str, Any], published_ns: int) -> str:
    at = duration(event["at_ns"] - published_ns)
    if event["event"] == "publish":
        return f"stored by {event['nsqd']}, acknowledged after {at}"
    if event["event"] == "server":
        return f"{event['outcome']} in the server's log after {at}"
    if event["event"] == "receive":
        return f"attempt {event['attempts']} received after {at} by {event['consumer']}"
    return f"{event['outcome']} of attempt {event['attempts']} after {at} by {event['consumer']}"


def _examples(figures: Figures, kind: str) -> str:
    rows, total = figures.examples[kind], figures.totals[kind]
    shown = f" (the first {len(rows)} of {total:,})" if total > len(rows) else ""
    head, more = ["nsqd", "deliveries", "FINs", "last outcome"], _outcome
    if kind == "violations":
        head, more = ["finished", "after message"], _overtaken
    start = ([place(row), str(row["trace_id"]), _moment(row["window_ns"])] for row in rows)
    cells = [[*first, *more(row)] for first, row in zip(start, rows, strict=True)]
    return _part(_FAULT_TITLES[kind] + shown, kind, ["message", "trace id", "published from", *head], cells)


def _outcome(row: dict[str, Any]) -> list[str]:
    return [row["nsqd"], str(row["deliveries"]), str(row["finishes"]), row["last_outcome"] or "none"]


def _overtaken(row: dict[str, Any]) -> list[str]:
    return [_moment(row["finished_ns"]), str(row["after_internal_id"])]


def _clocks(figures: Figures) -> str:
    rows = [
        [
            f"consumer on {row['host']}" if row["side"] == "consumer" else "a producer",
            row["nsqd"],
            count(row["messages"]),
            duration(row["worst_ns"]),
        ]
        for row in figures.skews
    ]
    return _part("Clocks that contradict each other", "skews", ["behind", "nsqd", "messages", "at least"], rows)


def _sources(figures: Figures) -> str:
    rows = [
        [source.name or "stream", count(source.lines), count(source.problems), (source.example or "")[:120]]
        for source in figures.sources
    ]
    return _part("Logs", "sources", ["source", "lines", "without a record", "such as"], rows)


# The charts of the report.


_MOST_BARS = 24
_CURVE_NAMES = {"latency": "end to end", "in_queue": "in queue", "handling": "handling"}
_HANDLING, _QUEUE, _AGAIN, _PAUSE = 1, 2, 3, 4
_SPAN_NAMES = {
    _QUEUE: "in queue",
    _HANDLING: "handled, finished",
    _AGAIN: "handled, not finished",
    _PAUSE: "between deliveries",
}
WORST = 5
_FAULT_KINDS = {"lost": WORST, "duplicates": 2, "violations": 3}
_FAULT_NAMES = {"lost": "lost", "duplicates": "duplicated", "violations": "out of order"}


def channel_charts(channel: Channel) -> Iterator[str]:
    """Latency over time, and the percentile curves."""
    lines = [
        Line(name, [(begin / 1e9, values[number] / 1000 if values else None) for begin, values in channel.times])
        for number, name in enumerate(POINTS)
    ]
    yield over_time("End to end, by when it was published", lines)
    curves = [
        Line(name, [(share, value / 1000) for share, value in zip(SHARES, channel.curves[kind], strict=True)])
        for kind, name in _CURVE_NAMES.items()
        if kind in channel.curves
    ]
    yield by_share("Duration, by the share of messages that were as fast", curves)


def fault_chart(groups: Sequence[TraceGroup]) -> str:
    """Faults by group, those with most first; empty when there are none."""
    faulty = sorted((group for group in groups if _faults(group)), key=_faults, reverse=True)[:_MOST_BARS]
    if not faulty:
        return ""
    rows = [
        Bar(_lane(group.topic, group.partition, group.channel), _fault_pieces(group), _fault_text(group))
        for group in faulty
    ]
    names = {_FAULT_KINDS[kind]: _FAULT_NAMES[kind] for kind in FAULTS}
    return bars("Faults by topic, partition and channel", rows, names)


def _fault_pieces(group: TraceGroup) -> list[Piece]:
    return [
        Piece(_FAULT_KINDS[kind], group.counts[kind], f"{_FAULT_NAMES[kind]}: {count(group.counts[kind])}")
        for kind in FAULTS
    ]


def _faults(group: TraceGroup) -> int:
    return sum(group.counts[kind] for kind in FAULTS)


def _fault_text(group: TraceGroup) -> str:
    return ", ".join(f"{count(group.counts[kind])} {_FAULT_NAMES[kind]}" for kind in FAULTS if group.counts[kind])


def life_chart(slowest: Sequence[dict[str, Any]]) -> str:
    """The lives of messages, each from its publish, all on one scale."""
    rows = [Bar(place(row), list(_pieces(row)), duration(row["latency_ns"])) for row in slowest]
    return bars("From publish to FIN, all on one scale", rows, _SPAN_NAMES)


def _pieces(row: dict[str, Any]) -> Iterator[Piece]:
    """What happened one after the other. Of deliveries that overlap, the later one has what the earlier one left."""
    begin, end = row["published_ns"], 0
    for event in row["events"]:
        if event["event"] == "consume":
            received = event["received_ns"] if event["received_ns"] is not None else event["at_ns"]
            start, answered = max(0, received - begin), max(0, event["at_ns"] - begin)
            waiting = "waiting to be delivered again" if end else "in queue"
            yield Piece(_PAUSE if end else _QUEUE, max(0, start - end), f"{waiting}: {duration(start - end)}")
            outcome = f"attempt {event['attempts']}, {event['outcome']} after {duration(answered - start)}"
            kind = _HANDLING if event["outcome"] == "FIN" else _AGAIN
            yield Piece(kind, max(0, answered - max(start, end)), outcome)
            end = max(end, answered)


# What the page is made of: elements, tables, bars of HTML, and charts of SVG in the colours of ``nsq_fast.page``.


def element(name: str, content: str, attributes: Mapping[str, str] | None = None) -> str:
    """An element around content that is HTML already."""
    given = "".join(f' {key}="{escape(value)}"' for key, value in (attributes or {}).items())
    return f"<{name}{given}>{content}</{name}>"


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A table of texts in a box that scrolls where it is too narrow; the first column stays in view."""
    rows = [("th", head), *(("td", row) for row in body)]
    lines = ("".join(element(kind, escape(cell)) for cell in row) for kind, row in rows)
    inner = element("table", "".join(f"\n<tr>{line}</tr>" for line in lines), {"class": "named"})
    return element("div", inner, {"class": "wide"})


def figure(title: str, content: str, name: str = "") -> str:
    """Content that is HTML already, under its title."""
    return element("figure", element("figcaption", escape(title)) + content, {"class": name} if name else None)


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Pairs of a mark, HTML already, and what it means."""
    items = "".join(f"<li>{mark}{escape(words)}</li>" for mark, words in entries)
    return element("ul", items, {"class": "legend"})


class Piece(NamedTuple):
    """A part of a bar. ``kind`` is 1 to 4, each with its colour and pattern; or WORST for what must not be."""

    kind: int
    size: float
    about: str


class Bar(NamedTuple):
    """A row: what it is of, its pieces one after the other, its figure as text."""

    label: str
    pieces: Sequence[Piece]
    text: str


def bars(title: str, rows: Sequence[Bar], kinds: Mapping[int, str]) -> str:
    """A figure of bars on one scale from 0. ``kinds`` says what each kind of piece is."""
    longest = max((sum(piece.size for piece in row.pieces) for row in rows), default=0.0) or 1.0
    marks = legend((f'<i class="kind{kind}"></i>', name) for kind, name in kinds.items())
    return figure(title, marks + "".join(_bar(row, 100 / longest) for row in rows), "bars")


def _bar(row: Bar, scale: float) -> str:
    pieces = "".join(
        element("i", "", {"class": f"kind{kind}", "style": f"width:max(2px,{size * scale:.2f}%)", "title": about})
        for kind, size, about in row.pieces
        if size > 0
    )
    parts = (("label", escape(row.label)), ("track", pieces), ("value", escape(row.text)))
    return element("div", "".join(element("span", each, {"class": name}) for name, each in parts), {"class": "bar"})


_WIDTH = 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, _WIDTH - 16, 16, 230
_HEIGHT = _BOTTOM + 32
_TICKS = 5
_FONT_SIZES = (11, 15)  # of the words below: on a wide screen and on a narrow one, see ``STYLE``
_LETTER = 0.6  # width of a letter at most, in its size: digits have less
_UNBROKEN = 'style="stroke-dasharray:none"'
_SHARES = (50.0, 90.0, 99.0, 99.9)
_Place = Callable[[float], float]


class Line(NamedTuple):
    """A named line through points of (x, microseconds); a gap where the value is None."""

    label: str
    points: Sequence[tuple[float, float | None]]


def over_time(title: str, lines: Sequence[Line]) -> str:
    """Lines over the time of day (UTC); x is in seconds since the epoch."""
    times = [time for line in lines for time, _ in line.points]
    begin, end = min(times, default=0.0), max(times, default=0.0)
    span = max(end - begin, 1e-3)
    ticks = {_time_of_day(begin + span * n / (_TICKS - 1), span): n / (_TICKS - 1) for n in reversed(range(_TICKS))}
    return _chart(title, lines, lambda time: (time - begin) / span, ticks)


def by_share(title: str, lines: Sequence[Line]) -> str:
    """Lines over the share of messages that were as fast, in percent, logarithmic to 100 %."""
    ticks = {f"{share:g} %": _nines(share) for share in _SHARES}
    return _chart(title, lines, _nines, {**ticks, "max": 1.0})


def _nines(share: float) -> float:
    return -math.log10(max(1 - share / 100, 1e-4)) / 4


def _time_of_day(time: float, span: float) -> str:
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
            f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}"'
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
            yield _text(_LEFT - 8, y + 4, tick_duration(10.0**exponent), "end")
        last = max(ticks.values())
        left = {size: float(_WIDTH) for size in _FONT_SIZES}
        # From the last on: those before it have their words where there is room, in each size of the letters.
        for words, share in sorted(ticks.items(), key=lambda tick: -tick[1]):
            x = self._across(share)
            yield f'<path d="M{x:.1f} {_TOP}V{_BOTTOM}" stroke="var(--grid)"/>'
            anchor = "end" if share == last and len(ticks) > 1 else "middle"
            x = x if anchor == "middle" else _RIGHT
            fits = [self._has_room(words, x, anchor, size, left) for size in _FONT_SIZES]
            if fits[0]:
                yield _text(x, _BOTTOM + 24, words, anchor, "" if fits[1] else ' class="every-other"')

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


def _text(x: float, y: float, words: str, anchor: str, named: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}>{escape(words)}</text>'


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


# The texts and the style of the report, and how its figures are written.


_UNITS = ((86_400_000_000_000, "d"), (3_600_000_000_000, "h"), (60_000_000_000, "min"))


def count(value: float) -> str:
    return f"{value:,.0f}"


def percent(part: float, whole: float) -> str:
    """A share that is 100 % only when nothing is missing."""
    if not whole:
        return "none"
    share = 100 * part / whole
    return "100 %" if part == whole else f"{min(share, 99.999):.3f} %"


def duration(value_ns: int | None) -> str:
    """A duration with three significant digits and the unit that suits it."""
    if value_ns is None:
        return "-"
    size = abs(value_ns)
    for unit, name in _UNITS:
        if size >= 2 * unit:
            return f"{value_ns / unit:.3g} {name}"
    for unit, name in ((10**9, "s"), (10**6, "ms"), (10**3, "µs")):
        if size >= unit * 0.9995:
            return f"{value_ns / unit:#.3g} {name}".replace(". ", " ")
    return f"{value_ns} ns"


def place(row: dict[str, Any]) -> str:
    """Where a message is, and its internal id."""
    return f"{_lane(row['topic'], row['partition'], row['channel'])} {row['internal_id']}"


def _lane(topic: str, partition: int | None, channel: str) -> str:
    return f"{topic}{'' if partition is None else f'/{partition}'} {channel}"


STYLE = """
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(138px,1fr));gap:10px}
.tiles div{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px}
.tiles span,.tiles small{display:block;color:var(--soft);font-size:12.5px}
.tiles b{font-size:22px;font-variant-numeric:tabular-nums}
.tiles .bad{background:var(--badpaper);border-color:var(--bad)}.tiles .bad b{color:var(--bad)}
.tiles .fine b{color:var(--fine)}
.note{border-left:3px solid var(--colour2);padding:2px 10px;margin:12px 0 0;color:var(--soft)}
td.zero{color:var(--soft)}
figcaption{font-weight:600;font-size:13.5px;margin-bottom:6px}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;list-style:none;margin:0 0 6px;padding:0;font-size:12.5px}
.legend li{display:flex;align-items:center;gap:6px}.legend svg{flex:none}.legend i{width:14px;height:14px;flex:none}
.bar{display:grid;grid-template-columns:minmax(0,15em) minmax(0,1fr) minmax(0,13em);gap:2px 12px;align-items:center;
margin:5px 0;font-size:13px}
.bar .value{font-variant-numeric:tabular-nums}
.track{display:flex;height:16px}
.track i{height:100%;flex:none}
.kind1{background:var(--colour1)}
.kind2{background:repeating-linear-gradient(45deg,var(--colour2) 0 5px,var(--card) 5px 7px)}
.kind3{background:repeating-linear-gradient(-45deg,var(--colour3) 0 3px,var(--card) 3px 6px)}
.kind4{background:repeating-linear-gradient(90deg,var(--colour4) 0 2px,var(--card) 2px 5px)}
.kind5{background:var(--bad)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:6px 16px;font-size:14px}dt{font-weight:600}
dd{margin:0;color:var(--soft)}
@media(max-width:640px){dl{display:block}dd{margin-bottom:8px}
.bar{grid-template-columns:minmax(0,1fr) auto}.bar .label,.bar .track{grid-column:1/-1}.bar .track{order:2}
.bar .label{grid-column:1/2}.bar .value{grid-column:2/3;text-align:right;max-width:55vw}
svg.chart text{font-size:15px}svg.chart .every-other{display:none}}
#groups td,#groups th{padding:4px 4.5px;font-size:11.5px}
thead tr:first-child th{text-align:center;border-bottom:0;padding-bottom:0}
td.name,#groups thead tr:last-child th:nth-child(-n+3),#slowest td:last-child,#slowest th:last-child,
#sources td:last-child,#sources th:last-child{text-align:left}
#slowest td:last-child{white-space:normal;min-width:340px}
"""

DEFINITIONS = """<dl>
<dt>message</dt><dd>A message is counted once for each channel that is known for its topic, in the window of time in
which it was published.</dd>
<dt>lost</dt><dd>Published, or delivered, and finished by no delivery, though the logs go on for the grace period after
it was published. Before that it is pending.</dd>
<dt>duplicates</dt><dd>Messages with more than one FIN in a channel.</dd>
<dt>order</dt><dd>Messages finished by their first delivery, after one with a higher internal id or offset in the same
partition and channel. Messages that were delivered again are neither judged nor compared with. Judged are
subscriptions that tell offsets, ordered and advanced ones, unless the report was asked for more or less.</dd>
<dt>delivered again</dt><dd>By what ended the delivery before: REQ, a timeout, or unknown, when no record says it: the
consumer died, or its connection did, or its FIN did not arrive.</dd>
<dt>end to end</dt><dd>From when the server stored the message, by its clock, to its first FIN, by the consumer's.</dd>
<dt>in queue</dt><dd>From then to the first recorded receipt by a consumer.</dd>
<dt>handling</dt><dd>From receipt to FIN, of the delivery that was finished first.</dd>
<dt>percentiles</dt><dd>Values that occurred, by rank: exact up to 10,000 messages, beyond that off by at most one rank
in 10,000.</dd>
<dt>clocks</dt><dd>A message that was received, or acknowledged, more than a millisecond before it was published shows
that a clock is behind that of the nsqd, by that much at least. Durations are shown as measured.</dd>
</dl>"""
