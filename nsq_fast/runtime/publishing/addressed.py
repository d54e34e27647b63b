"""Publishes whose command is built when they are sent, because it depends on where they go.

A plain ``Publish`` is bytes from the start. An ``Addressed`` one may name a
partition, carry a trace id or a header, or belong to a topic of which it is not
known yet whether it has partitions; each attempt builds its command for the
partition and for the dialect of the server at hand. It is *pinned* when it must
go to one partition and no other: because of its key, or by its number.

Traced ones end with a ``Receipt`` where others end with ``b"OK"``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from nsq_fast import _codec
from nsq_fast._codec import TracedReply
from nsq_fast.errors import ConfigError
from nsq_fast.names import Address
from nsq_fast.protocol.dialect import Dialect
from nsq_fast.protocol.partitioner import Key
from nsq_fast.runtime.trace import TraceLog, split_receipt

from .publish import OK, Batch, Publish

if TYPE_CHECKING:
    from .lane import Lane
    from .routes import Route


class Receipt(NamedTuple):
    """Where a traced message was stored.

    Attributes:
        internal_id, trace_id: the two halves of its message id.
        offset, size: of its record in the partition's log, in bytes; None where the server did not say.
        partition: None when the server chose it.
        nsqd: the leader that stored it.
    """

    internal_id: int
    trace_id: int
    offset: int | None
    size: int | None
    partition: int | None
    nsqd: Address


class Saying(NamedTuple):
    """What a publish says besides its body.

    Attributes:
        kind: PUB, PUB_TRACE, PUB_EXT or DPUB.
        trace_id: for PUB_TRACE.
        header: JSON, for PUB_EXT.
        is_traced: the reply is to have a receipt.
        is_optional: it is traced because tracing is switched on; servers that cannot trace take it untraced.
    """

    kind: str = "PUB"
    trace_id: int = 0
    header: bytes = b""
    is_traced: bool = False
    is_optional: bool = False

    @property
    def overhead(self) -> int:
        """Bytes that it adds to a body."""
        if self.kind == "PUB_EXT":
            return 2 + len(self.header)
        return 8 if self.kind == "PUB_TRACE" else 0


PLAIN = Saying()


class Addressed(Publish):
    """One message.

    Attributes:
        body: the message.
        saying: what goes with it.
        key, pin: what its partition follows from; ``pin`` is the number once it is known, or was given.
        lane: the queue of its partition, when it is pinned.
        partition: where the last attempt went; None when the server was to choose.
        misses: attempts that met a stale or unready leader.
        is_alone: it must not share a command with others.
        receipt: what a traced one ended with.
    """

    __slots__ = ("body", "is_alone", "key", "lane", "misses", "partition", "pin", "receipt", "saying")

    def __init__(
        self, route: Route, topic: str, body: bytes, deadline: float, saying: Saying = PLAIN, weight: int = 1
    ) -> None:
        # Not by super(): this is made for every publish to a partition.
        self.done = False
        self.error = None
        self.waiter = None
        self.result = None
        self.route = route
        self.topic = topic
        self.command = saying.kind
        self.data = b""
        self.deadline = deadline
        self.weight = weight
        self.attempts = 0
        self.possibly_stored = False
        self.conn = None
        self.batch = None
        self.gather = None
        self.last_error = None
        self.body = body
        self.saying = saying
        self.key: Key | None = None
        self.pin: int | None = None
        self.lane: Lane | None = None
        self.partition: int | None = None
        self.misses = 0
        # A header with a trace id gets a receipt for a single publish only.
        self.is_alone = saying is not PLAIN and (
            saying.kind == "DPUB" or (saying.kind == "PUB_EXT" and saying.is_traced)
        )
        self.receipt: Receipt | None = None

    @property
    def is_pinned(self) -> bool:
        """Whether it may go to one partition only."""
        return self.pin is not None or self.key is not None

    @property
    def size(self) -> int:
        """Bytes that it takes in the body of a batch, without its length."""
        return len(self.body) + self.saying.overhead

    def value(self) -> Any:
        return OK if self.receipt is None else self.receipt

    def encode_for(self, partition: int | None, dialect: Dialect) -> None:
        """Build the command for a partition of a server. Raises ConfigError when it cannot have one."""
        check_partition(partition, dialect)
        self.partition = partition
        kind = self.command = kind_for(self.saying, dialect)
        if kind == "PUB":
            self.data = _codec.pub(self.topic, self.body, partition)
        elif kind == "PUB_TRACE":
            self.data = _codec.pub_trace(self.topic, self.saying.trace_id, self.body, partition)
        elif kind == "PUB_EXT":
            self.data = _codec.pub_ext(self.topic, self.saying.header, self.body, partition)
        else:
            self.data = self.body  # a DPUB comes as its command

    def take_receipt(self, reply: TracedReply, nsqd: Address, trace: TraceLog) -> None:
        """Keep, and write down, what the server said of the stored record."""
        self.receipt = Receipt(*reply, self.partition, nsqd)
        if trace.is_on(self.topic):
            trace.published(self.topic, reply, partition=self.partition, nsqd=nsqd)


class AddressedMany(Addressed):
    """What a caller published as one batch, or one part of it: it goes as it is, all or nothing.

    Attributes:
        bodies, sayings: one each for every message; ``saying`` is the first of them.
    """

    __slots__ = ("bodies", "receipts", "sayings")

    def __init__(
        self, route: Route, topic: str, bodies: list[bytes], sayings: list[Saying] | Saying, deadline: float
    ) -> None:
        first = sayings if isinstance(sayings, Saying) else sayings[0]
        super().__init__(route, topic, b"", deadline, first, len(bodies))
        self.bodies = bodies
        self.sayings = [sayings] * len(bodies) if isinstance(sayings, Saying) else sayings
        self.is_alone = True
        self.receipts: list[Receipt] | None = None

    def value(self) -> Any:
        return OK if self.receipts is None else self.receipts

    def encode_for(self, partition: int | None, dialect: Dialect) -> None:
        check_partition(partition, dialect)
        self.partition = partition
        kind = kind_for(self.saying, dialect)
        if kind == "PUB":
            self.command, self.data = "MPUB", _codec.mpub(self.topic, self.bodies, partition)
        else:
            pairs = zip(self.bodies, self.sayings, strict=True)
            self.command, self.data = encode_many(self.topic, kind, pairs, partition)

    def take_receipt(self, reply: TracedReply, nsqd: Address, trace: TraceLog) -> None:
        pairs = [(saying.trace_id, len(body)) for body, saying in zip(self.bodies, self.sayings, strict=True)]
        self.receipts = [Receipt(*each, self.partition, nsqd) for each in split_receipt(reply, pairs)]
        if trace.is_on(self.topic):
            trace.published_many(self.topic, reply, pairs, partition=self.partition, nsqd=nsqd)


class AddressedBatch(Batch):
    """Publishes of one kind that leave as one command, addressed when it is sent.

    They may be plain ones that gathered, which say nothing but their body.

    Attributes:
        saying: that of the first.
        sent: those that the last attempt held.
    """

    __slots__ = ("lane", "misses", "partition", "saying", "sent")

    def __init__(self, children: Sequence[Publish], bodies: list[bytes], lane: Lane | None = None) -> None:
        first = children[0]
        Publish.__init__(self, first.route, first.topic, "", b"", max([child.deadline for child in children]), 0)
        self.children = list(children)
        self.bodies = bodies
        self.saying = first.saying if isinstance(first, Addressed) else PLAIN
        self.sent = self.children
        self.lane = lane
        self.partition: int | None = None
        self.misses = 0
        for child in children:
            child.batch = self

    def encode_for(self, partition: int | None, dialect: Dialect) -> None:
        """Build the command from the children that still wait: there must be one. Raises ConfigError."""
        check_partition(partition, dialect)
        self.partition = partition
        bodies = self.bodies
        self.sent = self.live()
        if len(self.sent) < len(self.children):
            bodies = [body for child, body in zip(self.children, bodies, strict=True) if not child.done]
        kind = kind_for(self.saying, dialect)
        if kind != "PUB":
            self.command, self.data = encode_many(
                self.topic, kind, zip(bodies, self._sayings(), strict=True), partition
            )
        elif len(bodies) > 1:
            self.command, self.data = "MPUB", _codec.mpub(self.topic, bodies, partition)
        else:
            self.command, self.data = "PUB", _codec.pub(self.topic, bodies[0], partition)

    def _sayings(self) -> list[Saying]:
        return [child.saying for child in self.sent if isinstance(child, Addressed)]

    def take_receipt(self, reply: TracedReply, nsqd: Address, trace: TraceLog) -> None:
        """Give each child its own."""
        members = [child for child in self.sent if isinstance(child, Addressed)]
        pairs = [(child.saying.trace_id, len(child.body)) for child in members]
        for child, each in zip(members, split_receipt(reply, pairs), strict=True):
            child.receipt = Receipt(*each, self.partition, nsqd)
        if trace.is_on(self.topic):
            trace.published_many(self.topic, reply, pairs, partition=self.partition, nsqd=nsqd)


def encode_many(
    topic: str, kind: str, items: Iterable[tuple[bytes, Saying]], partition: int | None
) -> tuple[str, bytes]:
    """The command of several messages, and its bytes."""
    if kind == "PUB_TRACE":
        return "MPUB_TRACE", _codec.mpub_trace(topic, [(saying.trace_id, body) for body, saying in items], partition)
    if kind == "PUB_EXT":
        return "MPUB_EXT", _codec.mpub_ext(topic, [(saying.header, body) for body, saying in items], partition)
    return "MPUB", _codec.mpub(topic, [body for body, _ in items], partition)


def kind_for(saying: Saying, dialect: Dialect) -> str:
    """What a server of this dialect gets: tracing that nobody asked for by name is left out where it is unknown."""
    return "PUB" if saying.is_optional and not dialect.supports(saying.kind) else saying.kind


def check_partition(partition: int | None, dialect: Dialect) -> None:
    """Raise ConfigError when the server has no partitions."""
    if partition is not None and not dialect.has_partitions:
        raise ConfigError(f"partition={partition}: {dialect.name} servers have no partitions; leave it out")


def kind_of(publish: Publish) -> str:
    """What must be the same for publishes to share a command; empty for plain ones."""
    return publish.saying.kind if isinstance(publish, Addressed) else ""
