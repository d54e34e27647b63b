"""The charts of the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from nsq_fast.page.charts import Curve, latency_curves
from nsq_fast.page.series import Life, Line, Span, Stack, over_time, spans, stacks
from nsq_fast.page.svg import OF_PAGE

from .figures import FAULTS, SHARES, Channel, TraceGroup
from .text import count, duration, place

_MOST_BARS = 24
_SERIES_NAMES = ("p50", "p95", "p99", "max")
_CURVE_NAMES = {"latency": "end to end", "in_queue": "in queue", "handling": "handling"}
_QUEUE, _HANDLING, _AGAIN, _PAUSE = 0, 1, 2, -1
_SPAN_NAMES = ("in queue", "handled, finished", "handled, not finished", "", "between deliveries")
_FAULT_NAMES = {"lost": "lost", "duplicates": "duplicated", "violations": "out of order"}


def channel_charts(channel: Channel) -> Iterator[str]:
    """Latency over time, and the percentile curves."""
    lines = [
        Line(name, [(begin / 1e9, values[number] / 1000 if values else None) for begin, values in channel.times])
        for number, name in enumerate(_SERIES_NAMES)
    ]
    yield over_time("End to end, by when it was published", lines)
    curves = [
        Curve(name, [(share, value / 1000) for share, value in zip(SHARES, channel.curves[kind], strict=True)])
        for kind, name in _CURVE_NAMES.items()
        if kind in channel.curves
    ]
    yield latency_curves("Share of messages that were as fast", curves, OF_PAGE)


def fault_chart(groups: Sequence[TraceGroup]) -> str:
    """Faults by group, those with most first; empty when there are none."""
    faulty = sorted((group for group in groups if _faults(group)), key=_faults, reverse=True)[:_MOST_BARS]
    if not faulty:
        return ""
    rows = [Stack(_group_name(group), [group.counts[kind] for kind in FAULTS], _fault_text(group)) for group in faulty]
    chart = stacks("Faults by topic, partition and channel", [_FAULT_NAMES[kind] for kind in FAULTS], rows)
    return f'<figure class="full">{chart}</figure>'


def _faults(group: TraceGroup) -> int:
    return sum(group.counts[kind] for kind in FAULTS)


def _group_name(group: TraceGroup) -> str:
    partition = "" if group.partition is None else f"/{group.partition}"
    return f"{group.topic}{partition} {group.channel}"[-34:]


def _fault_text(group: TraceGroup) -> str:
    return ", ".join(f"{count(group.counts[kind])} {_FAULT_NAMES[kind]}" for kind in FAULTS if group.counts[kind])


def life_chart(slowest: Sequence[dict[str, Any]]) -> str:
    """The lives of messages, each from its publish."""
    rows = [Life(place(row)[-34:], list(_spans(row)), duration(row["latency_ns"])) for row in slowest]
    return spans("From publish to FIN, each on its own scale", [name for name in _SPAN_NAMES if name], rows, OF_LIFE)


OF_LIFE = type(OF_PAGE)(OF_PAGE.paper, OF_PAGE.ink, OF_PAGE.grid, OF_PAGE.colours[:3])


def _spans(row: dict[str, Any]) -> Iterator[Span]:
    begin, end = row["published_ns"], 0
    for event in row["events"]:
        if event["event"] == "consume":
            received = event["received_ns"] if event["received_ns"] is not None else event["at_ns"]
            start, answered = max(0, received - begin), max(0, event["at_ns"] - begin)
            waiting = "in queue" if not end else "waiting to be delivered again"
            yield Span(end, start, _PAUSE if end else _QUEUE, f"{waiting}: {duration(start - end)}")
            outcome = f"attempt {event['attempts']}, {event['outcome']} after {duration(answered - start)}"
            yield Span(start, answered, _HANDLING if event["outcome"] == "FIN" else _AGAIN, outcome)
            end = answered
