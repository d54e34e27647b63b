"""What a line of a trace log holds: a publish, the receipt of a delivery, or its outcome."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

Outcome = Literal["FIN", "REQ", "TIMEOUT"]
_U64 = Annotated[int, msgspec.Meta(ge=0)]

_encode = msgspec.json.Encoder().encode


class PublishRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="publish"):
    """One message was stored.

    Attributes:
        time: of the reply, nanoseconds since the epoch.
        nsqd: address of the leader that stored it.
        internal_id, trace_id: the two halves of the message id.
        offset, size: of its record in the partition's log, in bytes.
    """

    time: int
    topic: str
    partition: int | None
    nsqd: str
    internal_id: _U64
    trace_id: _U64
    offset: int | None
    size: int | None

    def __str__(self) -> str:
        return _encode(self).decode()


class _DeliveryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What both records of a delivery have; the attributes are those of ConsumeRecord."""

    time: int
    topic: str
    partition: int | None
    channel: str
    nsqd: str
    local: str
    internal_id: _U64
    trace_id: _U64
    offset: int | None
    size: int | None
    timestamp: int
    attempts: int

    def __str__(self) -> str:
        return _encode(self).decode()


class ReceiveRecord(_DeliveryRecord, frozen=True, kw_only=True, tag_field="event", tag="receive"):
    """One delivery of a message has arrived. What becomes of it is a ConsumeRecord; a handler that hangs leaves none.

    The attributes are those of ConsumeRecord; ``time`` is that of the receipt.
    """


class ConsumeRecord(_DeliveryRecord, frozen=True, kw_only=True, tag_field="event", tag="consume"):
    """One delivery of a message was answered, or its time ran out.

    Attributes:
        time: of the answer, nanoseconds since the epoch.
        nsqd, local: the two ends of the connection it came through.
        offset, size: None unless the subscription was ordered or advanced.
        timestamp: when the message was published, nanoseconds since the epoch.
        outcome: what became of this delivery.
        handling_time: seconds from receipt to answer; None when the receipt was not clocked.
    """

    outcome: Outcome
    handling_time: float | None


TraceRecord: TypeAlias = PublishRecord | ReceiveRecord | ConsumeRecord
