"""The trace log: a structured record for each traced publish, and two for each delivery: its receipt and its outcome.

It is switched at run time, for all topics or for some. Producers and consumers
ask ``is_on(topic)`` before anything else is done, so that it costs a set
lookup while it is off. Records go to the logger ``nsq_fast.trace`` as the
message itself: its text is one line of JSON, and a handler that wants the
fields finds the record in ``LogRecord.msg``. ``read_records`` reads the lines
back. Joined by internal id, trace id,
topic and partition, they show the way of a message from its producer to the
consumers of every channel.
"""

from __future__ import annotations

import logging
import os
import time as clocks
from collections.abc import Callable, Iterable, Iterator
from random import SystemRandom
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec

from nsq_fast._codec import Message, TracedReply
from nsq_fast._lazy import get_logger
from nsq_fast.errors import ConfigError, TypeInvalid
from nsq_fast.log_events import TRACE_CONSUMED, TRACE_PUBLISHED, TRACE_RECEIVED
from nsq_fast.names import Address, check_topic
from nsq_fast.protocol.dialect import UNREADABLE

if TYPE_CHECKING:
    from logging.handlers import RotatingFileHandler

LOGGER_NAME = "nsq_fast.trace"
DEFAULT_MAX_BYTES = 64 * 1024 * 1024
DEFAULT_BACKUPS = 5

logger: logging.Logger = get_logger(LOGGER_NAME)
if logger.level == logging.NOTSET:
    # The switch is TraceLog, not the root logger's level.
    logger.setLevel(logging.INFO)


# What a line of the log holds: a publish, the receipt of a delivery, or its outcome

Outcome = Literal["FIN", "REQ", "TIMEOUT"]
_U64 = Annotated[int, msgspec.Meta(ge=0)]

_encode = msgspec.json.Encoder().encode


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    def __str__(self) -> str:
        return _encode(self).decode()


class PublishRecord(_Record, frozen=True, kw_only=True, tag_field="event", tag="publish"):
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


class _DeliveryRecord(_Record, frozen=True, kw_only=True):
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


# Who writes it

Stored: TypeAlias = tuple[int, int, int | None, int | None]
"""Internal id, trace id, offset, size."""


class TraceLog:
    """A switch per topic, and the writer of the records.

    Its methods may be called from any greenlet or thread. ``trace_log`` is the one that producers and consumers
    share unless they are given their own. What a document of dynamic configuration says of a topic stands above
    ``enable`` and ``disable``.

    Args:
        log: where the records go; ``nsq_fast.trace`` by default.
        clock: nanoseconds since the epoch.

    Attributes:
        is_active: whether any topic may be on. False costs a producer or consumer one attribute.
    """

    def __init__(self, log: logging.Logger = logger, *, clock: Callable[[], int] = clocks.time_ns) -> None:
        self.is_active: bool = False
        self._log = log
        self._clock = clock
        self._is_on_by_default = False
        self._exceptions: frozenset[str] = frozenset()
        self._share_of: Callable[[str], float | None] | None = None

    def enable(self, topic: str | None = None) -> None:
        """Switch on: one topic, or all (those that were switched off one by one included)."""
        self._switch(topic, True)

    def disable(self, topic: str | None = None) -> None:
        """Switch off: one topic (also while all others are on), or all."""
        self._switch(topic, False)

    def is_on(self, topic: str) -> bool:
        """Whether ``topic`` is traced now, if only a share of it."""
        share = None if self._share_of is None else self._share_of(topic)
        return (topic in self._exceptions) is not self._is_on_by_default if share is None else share > 0.0

    def takes(self, topic: str, number: int) -> bool:
        """Whether a message of a traced topic is in the share that is: the same for all who ask with its trace id.

        ``number`` is its trace id, or its internal id where it has none.
        """
        share = None if self._share_of is None else self._share_of(topic)
        return share is None or ((number * _SPREAD) & MAX_TRACE_ID) < share * (MAX_TRACE_ID + 1)

    def follow(self, share_of: Callable[[str], float | None] | None) -> None:
        """From now on ``share_of(topic)`` says how much of it is traced, 0 to 1; None leaves it to the switches.

        What is called before is forgotten; ``follow(None)`` leaves everything to the switches.
        """
        self._share_of = share_of
        self._update()

    def _switch(self, topic: str | None, is_on: bool) -> None:
        if topic is None:
            self._is_on_by_default, self._exceptions = is_on, frozenset()
        elif is_on is self._is_on_by_default:
            self._exceptions -= {topic}
        else:
            self._exceptions |= {check_topic(topic)}
        self._update()

    def _update(self) -> None:
        self.is_active = self._is_on_by_default or bool(self._exceptions) or self._share_of is not None

    def published(
        self, topic: str, receipt: TracedReply | Stored, *, partition: int | None, nsqd: Address | str
    ) -> None:
        """Record a PUB_TRACE, or a PUB_EXT with a trace id. Ask ``is_on`` before, as for the others below."""
        internal_id, trace_id, offset, size = receipt
        if not self.takes(topic, trace_id):
            return
        self._log.info(
            PublishRecord(
                time=self._clock(),
                topic=topic,
                partition=partition,
                nsqd=str(nsqd),
                internal_id=internal_id,
                trace_id=trace_id,
                offset=offset,
                size=size,
            ),
            extra=TRACE_PUBLISHED,
        )

    def received(
        self, topic: str, channel: str, message: Message, *, nsqd: Address | str, local: Address | str | None
    ) -> None:
        """Record that a delivery has arrived. ``nsqd`` and ``local`` are the two ends of the connection."""
        if not self.takes(topic, message.trace_id or message.internal_id):
            return
        self._log.info(
            ReceiveRecord(time=self._clock(), **_delivery(topic, channel, message, nsqd, local)), extra=TRACE_RECEIVED
        )

    def consumed(
        self,
        topic: str,
        channel: str,
        message: Message,
        outcome: Outcome,
        *,
        nsqd: Address | str,
        local: Address | str | None,
        handling_time: float | None = None,
    ) -> None:
        """Record what became of one delivery.

        Args:
            outcome: ``FIN`` or ``REQ`` once it is sent, ``TIMEOUT`` when the server has taken the message back.
            nsqd, local: ``address`` and ``local_address`` of the connection.
            handling_time: seconds.
        """
        if not self.takes(topic, message.trace_id or message.internal_id):
            return
        self._log.info(
            ConsumeRecord(
                time=self._clock(),
                outcome=outcome,
                handling_time=handling_time,
                **_delivery(topic, channel, message, nsqd, local),
            ),
            extra=TRACE_CONSUMED,
        )


trace_log: TraceLog = TraceLog()


def _delivery(
    topic: str, channel: str, message: Message, nsqd: Address | str, local: Address | str | None
) -> dict[str, Any]:
    """The fields that both records of a delivery have."""
    return {
        "topic": topic,
        "partition": message.partition,
        "channel": channel,
        "nsqd": str(nsqd),
        "local": "" if local is None else str(local),
        "internal_id": message.internal_id,
        "trace_id": message.trace_id,
        "offset": message.offset,
        "size": message.raw_size,
        "timestamp": message.timestamp,
        "attempts": message.attempts,
    }


def log_to_file(
    path: str | os.PathLike[str],
    max_bytes: int = DEFAULT_MAX_BYTES,
    backups: int = DEFAULT_BACKUPS,
    *,
    log: logging.Logger = logger,
) -> RotatingFileHandler:
    """Write the records to a file too, which is renamed to ``path.1`` and so on at ``max_bytes``.

    Returns the handler: give it to ``logger.removeHandler`` and close it to stop. Processes must not share a path.
    """
    from logging.handlers import RotatingFileHandler

    handler = RotatingFileHandler(path, maxBytes=max_bytes, backupCount=backups, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    return handler


def read_records(lines: Iterable[str | bytes]) -> Iterator[TraceRecord]:
    """Read the records back from the lines of a trace log: an open file, a list, anything that gives lines.

    Whatever a log format puts before the JSON is skipped, and so are blank lines. Raises ValueError, with the number
    of the line, for one that holds no record, and TypeError for a path.
    """
    if isinstance(lines, (str, bytes)):
        raise TypeInvalid(f"read_records wants lines, not {lines!r:.100}: give it open(path)")
    decode = msgspec.json.Decoder(TraceRecord).decode
    for number, line in enumerate(lines, 1):
        text = line.encode() if isinstance(line, str) else line
        if text.strip():
            try:
                yield decode(text[max(0, text.find(b"{")) :])
            except UNREADABLE as error:
                raise ValueError(f"line {number} is no trace record: {error}: {text[:100]!r}") from error


# Trace ids

MAX_TRACE_ID = 2**64 - 1
# Odd, and near 2**64 divided by the golden ratio: multiples of it, modulo 2**64, are spread evenly.
_SPREAD = 0x9E3779B97F4A7C15
_PREFIX_BITS = 43
_COUNTER_BITS = 20


class _TraceIds:
    """Ids of a random prefix and a counter; a new prefix when the counter is used up.

    63 bits in all, because Java and Spark read ids as signed. Prefixes are unlikely to meet: with 20,000 of them
    drawn (so many processes, or 20 billion ids) the odds are 1 in 40,000.
    """

    def __init__(self) -> None:
        self.draw()

    def draw(self) -> None:
        """Begin anew with another prefix, as a forked process must."""
        first = (1 + SystemRandom().randrange(2**_PREFIX_BITS - 1)) << _COUNTER_BITS
        self._left = iter(range(first, first + 2**_COUNTER_BITS))

    def next(self) -> int:
        """An id that was never given before."""
        while (trace_id := next(self._left, None)) is None:
            self.draw()
        return trace_id


_trace_ids = _TraceIds()
os.register_at_fork(after_in_child=_trace_ids.draw)


def new_trace_id() -> int:
    """A trace id that no other call gives, in this process or another: 1 to 2**63 - 1."""
    return _trace_ids.next()


def check_trace_id(trace_id: int) -> int:
    """Return ``trace_id``; raise ConfigError unless it is an unsigned 64-bit number. 0 means not traced."""
    if not isinstance(trace_id, int) or isinstance(trace_id, bool) or not 0 <= trace_id <= MAX_TRACE_ID:
        raise ConfigError(f"trace_id={trace_id!r}: must be a whole number, 0 to {MAX_TRACE_ID}")
    return trace_id
