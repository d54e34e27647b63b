"""Scripted redesigned nsqds and a lookup that says what a test wants: for consumers of partitions."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from time import monotonic
from types import MappingProxyType
from typing import Any, Protocol

import gevent

from nsq_fast.names import Address
from nsq_fast.protocol.topology import Meta, Nsqd, Topology
from support.scripted_nsqd import ScriptedConnection, ScriptedNsqd
from support.wire import OK, frame

VERSION = "0.3.7-HA.1.13.0"
SIZE = 40


class HasAddress(Protocol):
    """Any scripted nsqd."""

    address: Address


class PartitionNsqd(ScriptedNsqd):
    """A redesigned nsqd: agrees to every kind of subscription unless ``replies`` says otherwise."""

    has_binary_ids = True

    def __init__(self, info: dict[str, Any] | None = None, replies: dict[bytes, Any] | None = None) -> None:
        subs = dict.fromkeys((b"SUB", b"SUB_ORDERED", b"SUB_ADVANCED"), OK)
        super().__init__({"version": VERSION} | (info or {}), subs | (replies or {}))

    def live(self, partition: int | None) -> list[ScriptedConnection]:
        """Open connections that subscribed to a partition and have a RDY."""
        return [each for each in self.connections if each.is_open and each.rdy and partition_of(each) == partition]

    def subscriber(self, partition: int | None) -> ScriptedConnection:
        """The one connection of a partition, once it is ready."""
        found: ScriptedConnection = self.wait_for(lambda: self.live(partition))[0]
        return found


def subscription(connection: ScriptedConnection) -> tuple[bytes, ...] | None:
    """Its SUB command."""
    return next((each for each in connection.commands if each[0].startswith(b"SUB")), None)


def partition_of(connection: ScriptedConnection) -> int | None:
    sub = subscription(connection)
    return int(sub[3]) if sub is not None and len(sub) > 3 else None


def push_record(
    connection: ScriptedConnection,
    sequence: int,
    *,
    body: bytes = b"body",
    attempts: int = 1,
    timestamp: int = 1,
    ext: bytes | None = None,
) -> None:
    """Send one message in the layout of the subscription; ``ext`` for an ext topic (b"" for no header)."""
    partition = partition_of(connection) or 0
    data = struct.pack(">qHQQ", timestamp, attempts, (partition << 50) + sequence, 0)  # the id as a cluster makes it
    if ext is not None:
        data += struct.pack(">BH", 4, len(ext)) + ext if ext else b"\0"
    sub = subscription(connection)
    if sub is not None and sub[0] != b"SUB":
        data += struct.pack(">QI", sequence * SIZE, SIZE)
    connection.send(frame(2, data + body))


def answers(connection: ScriptedConnection, word: bytes) -> list[int]:
    """Sequence numbers of the FINs or REQs that came. Numbers 10 and 32 cannot be used: newline and space."""
    return [struct.unpack(">Q", each[1][:8])[0] & ((1 << 50) - 1) for each in connection.commands if each[0] == word]


def topology(leaders: Mapping[int, HasAddress], *old: HasAddress, partition_num: int = 0, **meta: Any) -> Topology:
    """A topology; by default with as many partitions as have leaders."""
    found = {number: Nsqd(nsqd.address, nsqd.address, VERSION) for number, nsqd in leaders.items()}
    producers = (*found.values(), *(Nsqd(nsqd.address) for nsqd in old))
    count = partition_num or len(found)
    known = Meta(partition_num=count, replica=1, **meta) if count else None
    return Topology(producers=tuple(dict.fromkeys(producers)), partitions=MappingProxyType(found), meta=known)


class ScriptedLookup:
    """Stands for LookupPoller: tells its listener what the test says; after ``answer`` was set, at each refresh."""

    def __init__(self, lookupds: Any, config: Any, access: str, listener: Any) -> None:
        self.listener = listener
        self.refreshed = 0
        self.listed_nodes: tuple[Nsqd, ...] = ()
        self.errors = 0
        self.answer: Topology | None = None
        self.topic = ""
        self.added: list[str] = []
        self.is_stopped = False

    def add_topic(self, topic: str, is_sought: bool = True) -> None:
        self.topic = topic
        self.added.append(topic)

    def remove_topic(self, topic: str) -> None:
        self.added.remove(topic)

    def start(self, *where: Any) -> None:
        pass

    async def nodes(self, timeout: float | None = None) -> tuple[Nsqd, ...]:
        return self.listed_nodes

    @property
    def is_blank(self) -> bool:
        return not self.listed_nodes

    def failure(self) -> str:
        return ""

    def answering(self) -> list[str]:
        return [] if self.answer is None else ["lookup"]

    def topology(self, topic: str) -> Topology | None:
        return self.answer

    def stop(self) -> None:
        self.is_stopped = True

    def refresh(self, topic: str | None = None, later: float = 0.0) -> None:
        self.refreshed += 1
        if self.answer is not None:
            gevent.spawn(lambda: self.is_stopped or self.listener(self.topic, self.answer))

    def asked_at(self, topic: str) -> float:
        return monotonic()

    def tell(self, answer: Topology, topic: str = "") -> None:
        self.answer = answer
        self.listener(topic or self.topic, answer)


def lookup_of(consumer: Any) -> ScriptedLookup:
    """That of a consumer whose lookup is scripted."""
    found: ScriptedLookup = consumer._subscriptions.lookup
    return found
