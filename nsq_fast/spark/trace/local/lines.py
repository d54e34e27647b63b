"""One line of a trace log as a record, by the rules of ``trace.records``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from nsq_fast.spark.trace.schema import BEGIN, LATEST_NS, LONGEST, MAX_ID
from nsq_fast.spark.trace.server_patterns import DELIVERED, MARK, PARTITION_SHIFT, STORED
from nsq_fast.spark.trace.settings import SECOND

_Time = Annotated[int, msgspec.Meta(ge=0, le=LATEST_NS)]
_Long = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Int = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
_Id = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=LONGEST)]


class Line(msgspec.Struct, gc=False):
    """What a line holds; None for what it does not say. Times are in nanoseconds, but for ``handling_time`` (s)."""

    event: str | None = None
    time: _Time | None = None
    topic: str | None = None
    partition: _Int | None = None
    channel: str | None = None
    nsqd: str | None = None
    local: str | None = None
    internal_id: _Id | None = None
    trace_id: _Id | None = None
    offset: _Long | None = None
    size: _Long | None = None
    timestamp: _Time | None = None
    attempts: _Int | None = None
    outcome: str | None = None
    handling_time: _Seconds | None = None

    @property
    def handling_ns(self) -> int | None:
        """The time of the handler, halves rounded up."""
        if self.handling_time is None:
            return None
        exact = self.handling_time * SECOND
        whole = math.floor(exact)
        return whole + (exact - whole >= 0.5)


_BEGIN = BEGIN.encode()
_MARK = MARK.encode()
_STORED, _DELIVERED = re.compile(STORED, re.ASCII), re.compile(DELIVERED, re.ASCII)
_TEXTS = {"event", "topic", "channel", "nsqd", "local", "outcome"}
_MOST_INT, _MOST_LONG = 2**31 - 1, 2**63 - 1
_OUTCOMES = {"FIN", "REQ", "TIMEOUT"}
_decode: Callable[[bytes], Line] = msgspec.json.Decoder(Line).decode


def record_of(text: bytes) -> Line | None:
    """The record of a line; None when it holds none."""
    if _MARK in text:
        found = _server_record(text.decode(errors="replace"))
        if found is not None:
            return found if _is_placed(found) and _has_window(found) else None
    begin = text.find(_BEGIN)
    if begin < 0:
        begin = max(text.find(b"{"), 0)
    try:
        line = _decode(text[begin:])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        lenient = _leniently(text[begin:])
        if lenient is None:
            return None
        line = lenient
    return line if _is_placed(line) and _is_of_client(line) else None


def _is_placed(line: Line) -> bool:
    return (
        line.time is not None
        and line.topic is not None
        and line.internal_id is not None
        and line.trace_id is not None
        and line.internal_id <= MAX_ID
        and line.trace_id <= MAX_ID
        and (line.timestamp is None or line.timestamp <= LATEST_NS)
    )


def _has_window(line: Line) -> bool:
    """Whether a server's line of a delivery says when the message was published."""
    return line.channel is None or line.timestamp is not None


def _is_of_client(line: Line) -> bool:
    if line.nsqd is None:
        return False
    if line.event == "publish":
        return True
    if line.event != "receive" and (line.event != "consume" or line.outcome not in _OUTCOMES):
        return False
    return None not in (line.channel, line.local, line.timestamp, line.attempts)


def _leniently(text: bytes) -> Line | None:
    """A line that something follows, or whose names are no strings."""
    try:
        found, _ = json.JSONDecoder().raw_decode(text.decode(errors="replace"))
        if not isinstance(found, dict):
            return None
        known = {name: found[name] for name in Line.__struct_fields__ if name in found}
        return msgspec.convert(
            {name: _as_text(value) if name in _TEXTS else value for name, value in known.items()}, Line
        )
    except (ValueError, RecursionError):  # msgspec.ValidationError is one
        return None


def _as_text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _server_record(text: str) -> Line | None:
    """The record of a redesigned nsqd's line; None for any other. A number that is out of range is missing."""
    found = _DELIVERED.search(text)
    if found is not None:
        internal_id = _number(found[4], _MOST_LONG)
        return Line(
            event="server",
            time=_number(found[9], LATEST_NS),
            topic=found[1],
            partition=None if internal_id is None else internal_id >> PARTITION_SHIFT,
            channel=found[2],
            local=found[8] if ":" in found[8] else None,
            internal_id=int(found[4]),
            trace_id=int(found[3]),
            offset=_number(found[6], _MOST_LONG),
            timestamp=_number(found[5], _MOST_LONG),
            attempts=_number(found[10], _MOST_INT),
            outcome=found[7],
        )
    found = _STORED.search(text)
    if found is None:
        return None
    return Line(
        event="server",
        time=_number(found[7], LATEST_NS),
        topic=found[1],
        partition=_number(found[2], _MOST_INT),
        internal_id=int(found[4]),
        trace_id=int(found[3]),
        offset=_number(found[6], _MOST_LONG),
        outcome="PUB_CLIENT" if found[5].startswith(" put success") else "PUB",
    )


def _number(text: str, most: int) -> int | None:
    found = int(text)
    return found if found <= most else None
