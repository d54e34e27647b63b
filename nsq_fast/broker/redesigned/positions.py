"""The start position of a channel: ``type:value``, and the record that it names."""

from __future__ import annotations

from typing import NamedTuple

from nsq_fast.broker.go_integer import as_int64, parse_integer

from .log import PartitionLog

TIMESTAMP, OFFSET, COUNT, SPECIAL = "timestamp", "virtual_queue", "msgcount", "special"
_END = -1
_NANOSECONDS = 1_000_000_000
_SEGMENT = 500_000
"""Entries in a segment of the commit log (youzan/nsq: consistence/commitlog.go, LOGROTATE_NUM)."""


class Position(NamedTuple):
    """A position as it was written; a timestamp is in seconds."""

    kind: str
    value: int


def parse_position(text: str) -> Position:
    """Read ``type:value``; ValueError with the server's text."""
    kind, separator, value = text.partition(":")
    if not separator or ":" in value or kind not in (TIMESTAMP, OFFSET, COUNT, SPECIAL):
        raise ValueError(f"invalid consume offset:{text}")
    return Position(kind, parse_integer(value.encode(), "ParseInt"))


def sequence_of(position: Position, log: PartitionLog) -> int:
    """The record a position means; ValueError with the server's text when there is none.

    A position beyond the last record means the end. A log that nothing was ever written to has no position but its end
    (youzan/nsq: nsqdserver/context.go, SetChannelOffset; consistence/commitlog.go, SearchLogDataByComparator).
    """
    kind, value = position
    if kind == SPECIAL:
        if value != _END:
            raise ValueError("not supported offset type")
        return log.end
    if kind == TIMESTAMP:
        nanoseconds = as_int64(value * _NANOSECONDS)
        if nanoseconds < 0:
            raise ValueError(f"Invalid timestamp {value}")
    elif value <= -2 * _SEGMENT:
        raise ValueError("search commit log data not found")
    if not log.end:
        raise ValueError("commit log end of file")
    if kind == TIMESTAMP:
        return log.at_time(nanoseconds)
    # Messages are counted from 1.
    return log.at_offset(value) if kind == OFFSET else max(0, min(value - 1, log.end))
