"""The redesigned dialect: an ordered topic on an embedded cluster while leaders move, nodes die and links misbehave.

Each key is published by a greenlet of its own, several messages at a time. Two channels are read; on each the messages
of a key must come in order, and of a partition one at a time.
"""

from __future__ import annotations

import signal
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from os import kill
from time import monotonic
from typing import Any

from gevent import sleep
from gevent.lock import Semaphore

from nsq_fast import Message
from nsq_fast.broker import ClusterProcess
from nsq_fast.errors import NsqError, RequeueMessage
from nsq_fast.names import Address
from nsq_fast.runtime import Consumer, NsqdHTTPClient

from .clients import Consumers, Publishers
from .invariants import KeyOrder, Ledger, Turns, encode_body
from .links import Links
from .original import FRONT, LOOKUPDS, MSG_TIMEOUT, NSQDS, held_by
from .schedule import Fault, Kind

TOPIC = "soak-ordered"
KEYS = 12
PARTITIONS = 3
_CHANNELS = ("billing", "shipping")
_LEADERS = tuple(f"partition{number}" for number in range(PARTITIONS))
_PIPELINE = 5
_SPECIAL = 1000

MENU = (
    (Kind("kill", 0.5, 6.0, 3), NSQDS),
    (Kind("move", 0.1, 0.1, 4), _LEADERS),
    (Kind("freeze", 0.5, 4.0), ("cluster",)),
    (Kind("delay", 2.0, 8.0), (*NSQDS, *LOOKUPDS)),
    (Kind("split", 2.0, 8.0), NSQDS),
    (Kind("blackhole", 1.0, 8.0, 2), (*NSQDS, *LOOKUPDS)),
    (Kind("refuse", 0.5, 5.0), (*NSQDS, *LOOKUPDS)),
    (Kind("cut", 0.1, 0.1, 2), NSQDS),
    (Kind("garble", 0.1, 0.1, 2), (*NSQDS, *LOOKUPDS)),
)


class Redesigned:
    """One run's cluster and work. Use it in a ``with``. ``rate``: messages a second."""

    menu: Sequence[tuple[Kind, Sequence[str]]] = MENU

    def __init__(self, rate: float) -> None:
        self.ledger = Ledger(_CHANNELS)
        self.consumers = Consumers(self.ledger)
        self.publishers = Publishers(self.ledger)
        self._rate = rate
        self._cluster = ClusterProcess(
            3,
            2,
            broadcast_address=FRONT,
            msg_timeout=MSG_TIMEOUT,
            tcp_address="127.0.0.1:0",
            http_address="127.0.0.1:0",
        )
        self.links = Links()
        self._fronts: dict[str, Address] = {}
        self._orders = {channel: KeyOrder() for channel in _CHANNELS}
        self._turns = {channel: Turns() for channel in _CHANNELS}
        self._key_of = array("H")
        self._sequence_of = array("Q")
        self._next = [0] * KEYS
        self._done_once: set[tuple[str, int]] = set()
        self._commands = Semaphore()  # one command at a time; a freeze is one that lasts

    @property
    def name(self) -> str:
        """What runs here, for people."""
        return "redesigned, embedded"

    def __enter__(self) -> Redesigned:
        try:
            self._cluster.start()
            for name, nsqd in zip(NSQDS, self._cluster.nsqds, strict=True):
                self._fronts[name] = self.links.open(name, nsqd.tcp, (FRONT, nsqd.tcp.port))
            for name, lookupd in zip(LOOKUPDS, self._cluster.lookupds, strict=True):
                self._fronts[name] = self.links.open(name, lookupd.http)
            self._cluster.create_topic(TOPIC, PARTITIONS, 2, channels=_CHANNELS, ordered=True)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.links.__exit__()
        self._cluster.kill()

    # Faults

    def begin(self, fault: Fault) -> None:
        """Let a fault of the cluster begin."""
        if fault.kind == "freeze":
            self._commands.acquire()  # a frozen cluster obeys nobody
            kill(self._cluster.pid, signal.SIGSTOP)
        else:
            with self._commands:
                self._order(fault)

    def end(self, fault: Fault) -> None:
        """End a fault of the cluster; returns when the node serves again."""
        if fault.kind == "freeze":
            kill(self._cluster.pid, signal.SIGCONT)
            self._commands.release()
        elif fault.kind == "kill":
            with self._commands:
                self._cluster.restart_node(NSQDS.index(fault.target))

    def _order(self, fault: Fault) -> None:
        if fault.kind == "kill":
            self._cluster.kill_node(NSQDS.index(fault.target))
            return
        with suppress(NsqError):  # no other replica is alive just now
            self._cluster.move_leader(TOPIC, _LEADERS.index(fault.target))

    # Work

    def start(self) -> None:
        """Begin to publish and to consume."""
        lookupds = {"lookupd_http_addresses": [f"http://{self._fronts[name]}" for name in LOOKUPDS]}
        for channel in _CHANNELS:
            self.consumers.start(TOPIC, channel, message_handler=self._handle, max_in_flight=30, **lookupds)
        producer = self.publishers.producer(**lookupds)
        for key in range(KEYS):
            interval = KEYS * _PIPELINE / (self._rate / 2)  # one message at a time is on its way to a consumer
            self.publishers.every(interval, self._publish, producer, key, _PIPELINE)

    def publish_some(self, count: int) -> None:
        """Publish about so many messages; raises when that fails."""
        lookupds = [f"http://{lookupd.http}" for lookupd in self._cluster.lookupds]
        producer = self.publishers.producer(lookupd_http_addresses=lookupds)
        for key in range(KEYS):
            self._publish(producer, key, count // KEYS)

    def _publish(self, producer: Any, key: int, count: int) -> None:
        began = monotonic()
        numbers = self.ledger.begin(count=count)
        sequences = range(self._next[key], self._next[key] + count)
        self._next[key] += count
        self._key_of.extend([key] * count)
        self._sequence_of.extend(sequences)
        results = [producer.publish_nowait(TOPIC, encode_body(number), key=f"key{key}") for number in numbers]
        for number, sequence, result in zip(numbers, sequences, results, strict=True):
            if not self.publishers.record((number,), began, result.get):
                for order in self._orders.values():
                    order.mark_loose(key, sequence)

    def _handle(self, consumer: Consumer, message: Message) -> None:
        channel = consumer.channel
        with self._turn(channel, message.partition):
            number = self.consumers.number(message)
            if number is not None and number < len(self._key_of):
                self._orders[channel].delivered(self._key_of[number], self._sequence_of[number])
                self._act(channel, number, message)
            self.consumers.finish(consumer, number)

    @contextmanager
    def _turn(self, channel: str, partition: int | None) -> Iterator[None]:
        turns = self._turns[channel]
        turns.enter(partition)
        try:
            yield
        finally:
            turns.leave(partition)

    def _act(self, channel: str, number: int, message: Message) -> None:
        """What some messages get in place of a handler that just returns, the first time they come."""
        kind = number % _SPECIAL
        if kind > 4 or (channel, number) in self._done_once:
            return
        self._done_once.add((channel, number))
        if kind == 0:
            raise ValueError("a handler that fails, the first time")
        if kind == 1:
            raise RequeueMessage(0.1, backoff=False)
        if kind == 2:
            sleep(MSG_TIMEOUT * 0.6)
            message.touch()
            sleep(MSG_TIMEOUT * 0.6)
        if kind == 3:
            sleep(0.3)

    @property
    def violations(self) -> list[str]:
        """What should not be, in words."""
        late = [f"{channel}: {text}" for channel, order in self._orders.items() for text in order.violations]
        side_by_side = [
            f"{channel}: {turns.most} handlers of one partition at once"
            for channel, turns in self._turns.items()
            if turns.most > 1
        ]
        return [*late[:5], *([f"... {len(late):,} messages out of order"] if len(late) > 5 else []), *side_by_side]

    # Servers' side

    def left(self) -> dict[str, int]:
        """What the leaders hold for the channels, by channel and state; what is 0 is left out."""
        left: Counter[str] = Counter()
        for channel in self._channels():
            left.update(held_by(channel))
        return {state: count for state, count in left.items() if count}

    def clients(self) -> list[dict[str, Any]]:
        """What the leaders say of the clients of their channels, each with its ``channel``."""
        return [
            {**client, "channel": channel["channel_name"]}
            for channel in self._channels()
            for client in channel["clients"] or ()
        ]

    def _channels(self) -> Iterator[dict[str, Any]]:
        for nsqd in self._cluster.nsqds:
            with NsqdHTTPClient(*nsqd.http, timeout=5.0) as admin:
                for topic in admin.stats(topic=TOPIC)["topics"]:
                    if topic["is_leader"]:
                        yield from topic["channels"]
