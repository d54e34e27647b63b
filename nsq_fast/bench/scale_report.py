"""What a run of `nsq-fast bench scale` shows: rows of a table, and a report that stands alone."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from nsq_fast.page.bars import OTHERS, Bar, Piece, bars
from nsq_fast.page.document import document, table
from nsq_fast.page.style import STYLE
from nsq_fast.page.svg import picture

from .scale import Curve, Point, ScaleRun, explained, knee_of, limit_of

HEADER = ["processes", "messages/s", "client CPU, µs", "server CPU, µs", "p99, µs"]
_TITLES = {"consume": "Consume", "publish": "Publish one at a time", "both": "Publish and consume"}


def title_of(curve: Curve) -> str:
    """What was measured, in words."""
    nsqds = "1 nsqd" if curve.nsqds == 1 else f"{curve.nsqds} nsqds"
    each = "1 connection" if curve.connections == 1 else f"{curve.connections} connections"
    return f"{_TITLES[curve.kind]}: {nsqds}, {each} a process, {curve.size:,} bytes"


def rows(curve: Curve) -> Iterator[list[str]]:
    """A row for each number of processes; CPU is of one message."""
    for point in curve.points:
        mark = " (knee)" if point is knee_of(curve) else ""
        yield [
            f"{point.processes}{mark}",
            f"{point.rate:,.0f}",
            f"{point.cpu_us:.3f}",
            _or_dash(point.server_cpu_us, 3),
            _or_dash(point.p99_us, 0),
        ]


def _or_dash(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def html(run: ScaleRun) -> str:
    """The report as one HTML document, without anything from outside."""
    title = "nsq_fast: many processes"
    about = run.about
    made = f"{about.date}, {about.cpu}, {about.cores} cores, {about.system}"
    parts = [f"<header><h1>{title}</h1><p>{escape(made)}</p></header>"]
    for curve in run.curves:
        parts.append(f"<h2>{escape(title_of(curve))}</h2>")
        said = "".join(f"<p>{escape(line)}</p>" for line in explained(curve, about.cores))
        parts.append(f'<section class="conclusion">{said}</section>')
        charts = [bars("messages/s (more is better)", _rates(curve)), bars(_CPU, _costs(curve))]
        latencies = _latencies(curve)
        if latencies:
            charts.append(bars("latency p99, µs (less is better)", latencies))
        parts.append(f'<div class="pair">{"".join(charts)}</div>')
        parts.append(table(HEADER, rows(curve)))
    return document(title, STYLE, ["<main>", *parts, "</main>"])


_CPU = "client CPU, µs/message (less is better)"


def picture_of(curve: Curve) -> str:
    """The rates as an SVG that stands alone, with the limit of the nsqds."""
    return picture(f"{title_of(curve)}: messages/s", _rates(curve))


def _rates(curve: Curve) -> list[Bar]:
    found = [_bar(point, point.rate, f"{point.rate:,.0f}") for point in curve.points]
    limit = limit_of(curve)
    if limit:
        found.append(Bar("limit: a core of each nsqd", [Piece(OTHERS, limit)], f"{limit:,.0f}"))
    return found


def _costs(curve: Curve) -> list[Bar]:
    return [_bar(point, point.cpu_us, f"{point.cpu_us:.3f}") for point in curve.points]


def _latencies(curve: Curve) -> list[Bar]:
    return [_bar(point, point.p99_us, f"{point.p99_us:,.0f}") for point in curve.points if point.p99_us is not None]


def _bar(point: Point, value: float, text: str) -> Bar:
    label = "1 process" if point.processes == 1 else f"{point.processes} processes"
    return Bar(label, [Piece(1, value)], text, is_ours=True)
