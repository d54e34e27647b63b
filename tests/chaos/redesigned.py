"""The redesigned dialect: an ordered topic on an embedded cluster while leaders move, nodes die and links misbehave.

Each key is published by a greenlet of its own, several messages at a time. Two channels are read; on each the messages
of a key must come in order, and of a partition one at a time.
"""

from __future__ import annotations

import signal
from array import array
from contextlib import suppress
from os import kill
from time import monotonic
from typing import Any

from gevent.lock import Semaphore

from nsq_fast import Message
from nsq_fast.broker import ClusterProcess
from nsq_fast.client.admin import NsqdHTTPClient
from nsq_fast.consumer import Consumer
from nsq_fast.errors import NsqError

from .clients import FRONT, LINK_FAULTS, LOOKUPDS, MSG_TIMEOUT, NSQDS, Deeds, Scene
from .faults import Fault, Kind
from .invariants import Bound, KeyOrder, encode_body

TOPIC = "soak-ordered"
KEYS = 12
PARTITIONS = 3
_CHANNELS = ("billing", "shipping")
_LEADERS = tuple(f"partition{number}" for number in range(PARTITIONS))
_PIPELINE = 5

MENU = (
    (Kind("kill", 0.5, 6.0, 3), NSQDS),
    (Kind("move", 0.1, 0.1, 4), _LEADERS),
    (Kind("freeze", 0.5, 4.0), ("cluster",)),
    *LINK_FAULTS,
)


class Redesigned(Scene):
    """One run's cluster and work."""

    name = "redesigned, embedded"
    menu = MENU

    def __init__(self, rate: float) -> None:
        super().__init__(_CHANNELS, rate)
        self._cluster = ClusterProcess(
            3,
            2,
            broadcast_address=FRONT,
            msg_timeout=MSG_TIMEOUT,
            tcp_address="127.0.0.1:0",
            http_address="127.0.0.1:0",
        )
        self._orders = {channel: KeyOrder() for channel in _CHANNELS}
        self._turns = {channel: Bound(f"{channel}: handlers of one partition", 1) for channel in _CHANNELS}
        self._deeds = Deeds(1000, {0: Deeds.fail, 1: Deeds.requeue, 2: Deeds.touch, 3: Deeds.take_a_while})
        self._key_of = array("H")
        self._sequence_of = array("Q")
        self._next = [0] * KEYS
        self._commands = Semaphore()  # one command at a time; a freeze is one that lasts

    def start_servers(self) -> None:
        self._cluster.start()
        for name, nsqd in zip(NSQDS, self._cluster.nsqds, strict=True):
            self.front(name, nsqd.tcp, nsqd.http)
        for name, lookupd in zip(LOOKUPDS, self._cluster.lookupds, strict=True):
            self.front(name, None, lookupd.http)
        self._cluster.create_topic(TOPIC, PARTITIONS, 2, channels=_CHANNELS, ordered=True)

    def stop_servers(self) -> None:
        self._cluster.kill()

    def begin(self, fault: Fault) -> None:
        if fault.kind == "freeze":
            self._commands.acquire()  # a frozen cluster obeys nobody
            kill(self._cluster.pid, signal.SIGSTOP)
        else:
            with self._commands:
                self._order(fault)

    def end(self, fault: Fault) -> None:
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

    def start(self) -> None:
        lookupds = self.lookupds
        for channel in _CHANNELS:
            self.consumers.start(TOPIC, channel, message_handler=self._handle, max_in_flight=30, **lookupds)
        producer = self.publishers.producer(**lookupds)
        for key in range(KEYS):
            interval = KEYS * _PIPELINE / (self._rate / 2)  # one message at a time is on its way to a consumer
            self.publishers.every(interval, self._publish, producer, key, _PIPELINE)

    def publish_some(self, count: int) -> None:
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
        with self._turns[channel].turn(message.partition):
            number = self.consumers.number(message)
            if number is not None and number < len(self._key_of):
                self._orders[channel].delivered(self._key_of[number], self._sequence_of[number])
                self._deeds.do(channel, number, message)
            self.consumers.finish(channel, number)

    @property
    def violations(self) -> list[str]:
        late = [f"{channel}: {text}" for channel, order in self._orders.items() for text in order.violations]
        side_by_side = [text for turns in self._turns.values() for text in turns.violations]
        return [*late[:5], *([f"... {len(late):,} messages out of order"] if len(late) > 5 else []), *side_by_side]

    def channels(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for nsqd in self._cluster.nsqds:
            with NsqdHTTPClient(*nsqd.http, timeout=5.0) as admin:
                leading = [topic for topic in admin.stats(topic=TOPIC)["topics"] if topic["is_leader"]]
            found += [channel for topic in leading for channel in topic["channels"]]
        return found
