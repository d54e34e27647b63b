"""The start position of a channel: ``type:value``, and the record that it names."""

from __future__ import annotations

from typing import NamedTuple

from nsq_fast.broker.go_integer import parse_integer

from .log import PartitionLog

TIMESTAMP, OFFSET, COUNT, SPECIAL = "timestamp", "virtual_queue", "msgcount", "special"
_END = -1
_NANOSECONDS = 1_000_000_000


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
    """The record a position means; ValueError with the server's text when there is none."""
    kind, value = position
    if kind == SPECIAL:
        if value != _END:
            raise ValueError("not supported offset type")
        return log.end
    if kind == TIMESTAMP:
        if value < 0:
            raise ValueError(f"Invalid timestamp {value}")
        return log.at_time(value * _NANOSECONDS)
    # Messages are counted from 1.
    return log.at_offset(value) if kind == OFFSET else max(0, min(value - 1, log.end))
