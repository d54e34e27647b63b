"""The charts of the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from nsq_fast.page.bars import WORST, Bar, Piece, bars
from nsq_fast.page.curves import Line, by_share, over_time

from .shown import FAULTS, SHARES, Channel, TraceGroup
from .text import count, duration, place

_MOST_BARS = 24
_SERIES_NAMES = ("p50", "p95", "p99", "max")
_CURVE_NAMES = {"latency": "end to end", "in_queue": "in queue", "handling": "handling"}
_HANDLING, _QUEUE, _AGAIN, _PAUSE = 1, 2, 3, 4
_SPAN_NAMES = {
    _QUEUE: "in queue",
    _HANDLING: "handled, finished",
    _AGAIN: "handled, not finished",
    _PAUSE: "between deliveries",
}
_FAULT_KINDS = {"lost": WORST, "duplicates": 2, "violations": 3}
_FAULT_NAMES = {"lost": "lost", "duplicates": "duplicated", "violations": "out of order"}


def channel_charts(channel: Channel) -> Iterator[str]:
    """Latency over time, and the percentile curves."""
    lines = [
        Line(name, [(begin / 1e9, values[number] / 1000 if values else None) for begin, values in channel.times])
        for number, name in enumerate(_SERIES_NAMES)
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
    return bars(
        "Faults by topic, partition and channel",
        [Bar(_group_name(group), _fault_pieces(group), _fault_text(group)) for group in faulty],
        {_FAULT_KINDS[kind]: _FAULT_NAMES[kind] for kind in FAULTS},
    )


def _fault_pieces(group: TraceGroup) -> list[Piece]:
    return [
        Piece(_FAULT_KINDS[kind], group.counts[kind], f"{_FAULT_NAMES[kind]}: {count(group.counts[kind])}")
        for kind in FAULTS
    ]


def _faults(group: TraceGroup) -> int:
    return sum(group.counts[kind] for kind in FAULTS)


def _group_name(group: TraceGroup) -> str:
    partition = "" if group.partition is None else f"/{group.partition}"
    return f"{group.topic}{partition} {group.channel}"


def _fault_text(group: TraceGroup) -> str:
    return ", ".join(f"{count(group.counts[kind])} {_FAULT_NAMES[kind]}" for kind in FAULTS if group.counts[kind])


def life_chart(slowest: Sequence[dict[str, Any]]) -> str:
    """The lives of messages, each from its publish, all on one scale."""
    rows = [Bar(place(row), list(_pieces(row)), duration(row["latency_ns"])) for row in slowest]
    return bars("From publish to FIN, all on one scale", rows, _SPAN_NAMES)


def _pieces(row: dict[str, Any]) -> Iterator[Piece]:
    begin, end = row["published_ns"], 0
    for event in row["events"]:
        if event["event"] == "consume":
            received = event["received_ns"] if event["received_ns"] is not None else event["at_ns"]
            start, answered = max(0, received - begin), max(0, event["at_ns"] - begin)
            waiting = "waiting to be delivered again" if end else "in queue"
            yield Piece(_PAUSE if end else _QUEUE, start - end, f"{waiting}: {duration(start - end)}")
            outcome = f"attempt {event['attempts']}, {event['outcome']} after {duration(answered - start)}"
            yield Piece(_HANDLING if event["outcome"] == "FIN" else _AGAIN, answered - max(start, end), outcome)
            end = max(end, answered)
