"""The original dialect: three nsqds and two nsqlookupds as processes, real ones or the embedded; what goes wrong there,
and the work that goes on meanwhile.

The servers tell nsqlookupd that they are at ``FRONT``: whoever asks lookup comes through a proxy. One topic on
three nsqds, four channels, each read in another way. Every producer but three knows its nsqd, so that of most messages
it is known which nsqd has them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from gevent import get_hub, sleep, spawn, spawn_later
from support.servers import ServerProcess
from support.waiting import until

from nsq_fast import Message
from nsq_fast.client.admin import LookupdHTTPClient, NsqdHTTPClient
from nsq_fast.consumer import Consumer
from nsq_fast.errors import NsqError

from .clients import FRONT, LINK_FAULTS, LOOKUPDS, MSG_TIMEOUT, NSQDS, Consumers, Deeds, Scene
from .faults import Fault, Kind
from .invariants import ANYWHERE, Outcome, encode_body

SHORTEST_LIFE = 1.0
"""Seconds that a server runs before it is killed. An nsqd that is killed a second time before it has synced opens a
file of its queues anew that it had begun before, and loses one message of each channel that it takes later; it says so
in its log: "positive depth at tail (1), data loss" (nsqio/go-diskqueue: diskqueue.go, checkTailCorruption)."""
_NSQD_FLAGS = (
    f"-broadcast-address={FRONT}",
    f"-msg-timeout={MSG_TIMEOUT:.0f}s",
    "-mem-queue-size=0",  # what waits is on disk, so that a restart brings it back
    "-sync-timeout=100ms",
    "-https-address=127.0.0.1:0",
)


class Server(ServerProcess):
    """One server, which other greenlets need not wait for."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, *flags: str) -> None:
        self.name = name
        self._folder = folder
        self._started = 0.0
        super().__init__(*flags, command=command)

    def start(self) -> None:
        _aside(super().start)
        self._started = monotonic()

    def kill(self) -> None:
        """End it with SIGKILL, not before ``SHORTEST_LIFE``. Without effect when it does not run."""
        sleep(max(0.0, self._started + SHORTEST_LIFE - monotonic()))
        _aside(super().kill)

    def stop(self) -> None:
        _aside(super().stop)

    def freeze(self) -> None:
        _aside(super().freeze)

    def keep_log(self) -> None:
        (self._folder / f"{self.name}.log").write_text("\n".join(self.log))


def _aside(work: Callable[[], None]) -> None:
    """In a thread, so that greenlets go on."""
    get_hub().threadpool.apply(work)


class OriginalHandlers:
    """The handlers, which keep account with ``consumers``."""

    def __init__(self, consumers: Consumers) -> None:
        self._consumers = consumers
        self._deeds = Deeds(2000, {
            3: Deeds.fail,
            **dict.fromkeys((33, 533, 1033, 1533), Deeds.requeue),
            **dict.fromkeys((43, 1043), Deeds.touch),
            **dict.fromkeys(range(63, 2000, 100), self._finish_later),
            **dict.fromkeys((83, 583, 1083, 1583), Message.enable_async),  # and nobody answers
            **dict.fromkeys((103, 1103), lambda _: sleep(MSG_TIMEOUT * 1.2)),  # too late
            **dict.fromkeys(range(123, 2000, 100), Deeds.take_a_while),
        })  # fmt: skip

    def handle_plainly(self, consumer: Consumer, message: Message) -> None:
        self._consumers.finish(consumer.channel, self._consumers.number(message))

    def handle_batch(self, consumer: Consumer, messages: Sequence[Message]) -> None:
        """Finish each message of a batch, but those that the link has changed."""
        for message in messages:
            self._consumers.finish_or_requeue(consumer, message)

    def handle(self, consumer: Consumer, message: Message) -> None:
        """Do with a message what its number says, the first time; finish it otherwise."""
        number = self._consumers.number(message)
        self._deeds.do(consumer.channel, number, message)
        if not message.is_async():
            self._consumers.finish(consumer.channel, number)

    def _finish_later(self, message: Message) -> None:
        message.enable_async()
        number = self._consumers.number(message)

        def finish() -> None:
            if message.responder is not None and message.responder.is_open and not message.has_responded():
                self._consumers.finish("handlers", number)
                message.finish()

        spawn_later(0.3, finish)


TOPIC = "soak"
_BATCH = 10
_PIPELINE = 20

MENU = (
    (Kind("kill", 0.5, 6.0, 2), NSQDS),
    (Kind("stop", 0.5, 6.0, 2), NSQDS),
    (Kind("freeze", 0.5, 8.0, 2), NSQDS),
    (Kind("kill", 1.0, 6.0), LOOKUPDS),
    (Kind("freeze", 1.0, 6.0), LOOKUPDS),
    *LINK_FAULTS,
)


class Original(Scene):
    """Three nsqds that are registered at two nsqlookupds.

    Args:
        folder: for data and logs.
        binaries: a folder with nsqd and nsqlookupd; None: the embedded ones.
    """

    menu = MENU

    def __init__(self, folder: Path, rate: float, binaries: Path | None = None) -> None:
        super().__init__(("handlers", "batches", "plain", "few"), rate)
        self.name = "original, embedded" if binaries is None else "original, real"
        self._folder, self._binaries = folder, binaries
        self._servers: dict[str, Server] = {}
        self._handlers = OriginalHandlers(self.consumers)

    @property
    def _nsqds(self) -> list[Server]:
        return [self._servers[name] for name in NSQDS]

    def start_servers(self) -> None:
        for name in LOOKUPDS:
            lookupd = self._servers[name] = Server(name, self._program("nsqlookupd"), self._folder)
            self.front(name, None, lookupd.http_address)
        seeds = [f"-lookupd-tcp-address={self._servers[name].tcp_address}" for name in LOOKUPDS]
        for name in NSQDS:
            data = self._folder / f"data-{name}"
            data.mkdir()
            flags = (f"-data-path={data}", *_NSQD_FLAGS, *seeds)
            nsqd = self._servers[name] = Server(name, self._program("nsqd"), self._folder, *flags)
            self.front(name, nsqd.tcp_address, nsqd.http_address)
            with NsqdHTTPClient(*nsqd.http_address) as admin:
                admin.create_topic(TOPIC)
                for channel in self.ledger.channels:
                    admin.create_channel(TOPIC, channel)
        for name in LOOKUPDS:
            with LookupdHTTPClient(*self._servers[name].http_address) as client:
                until(lambda client=client: len(client.nodes()["producers"]) == len(NSQDS))

    def stop_servers(self) -> None:
        for server in reversed(self._servers.values()):
            server.kill()
            server.keep_log()

    def _program(self, kind: str) -> list[str]:
        return [sys.executable, "-m", "nsq_fast", kind] if self._binaries is None else [str(self._binaries / kind)]

    def begin(self, fault: Fault) -> None:
        server = self._servers[fault.target]
        if fault.kind == "kill":
            server.kill()
            if server.name in NSQDS:
                self.ledger.mark_killed(NSQDS.index(server.name))
        elif fault.kind == "stop":
            server.stop()
        else:
            server.freeze()

    def end(self, fault: Fault) -> None:
        server = self._servers[fault.target]
        if fault.kind == "freeze":
            server.thaw()
        else:
            server.start()

    def start(self) -> None:
        lookupds = self.lookupds
        start = self.consumers.start
        start(TOPIC, "handlers", message_handler=self._handlers.handle, concurrency=20, max_in_flight=60, **lookupds)
        start(TOPIC, "batches", batch_handler=self._handlers.handle_batch, max_in_flight=200, snappy=True, **lookupds)
        start(TOPIC, "plain", message_handler=self._handlers.handle_plainly, max_in_flight=30, deflate=True, **lookupds)
        self.consumers.iterate(TOPIC, "few", max_in_flight=2, low_ready_idle_timeout=0.5, **lookupds)
        # Of seven parts of the rate three go to an nsqd each, one is deferred, one pipelined, two come in batches.
        interval = 7 / self._rate
        for place, name in enumerate(NSQDS):
            retries = place != 1
            pinned = self.publishers.producer(nsqd_tcp_addresses=[self.fronts[name]], retry_unknown_outcome=retries)
            self.publishers.every(interval, self._publish, pinned, place)
        anywhere = self.publishers.producer(**lookupds)
        self.publishers.every(interval, self._publish, anywhere, ANYWHERE, 300)
        self.publishers.every(interval * _BATCH / 2, self._publish_batch, anywhere)
        lingering = self.publishers.producer(linger=0.005, **lookupds)
        self.publishers.every(interval * _PIPELINE, self._publish_pipelined, lingering)

    def publish_some(self, count: int) -> None:
        producer = self.publishers.producer(nsqd_tcp_addresses=[nsqd.tcp_address for nsqd in self._nsqds])
        for _ in range(count):
            numbers = self.ledger.begin()
            producer.publish(TOPIC, encode_body(numbers[0]))
            self.ledger.mark(numbers, Outcome.STORED)

    def _publish(self, producer: Any, place: int, defer: int | None = None) -> None:
        numbers, began = self.ledger.begin(place), monotonic()
        body = encode_body(numbers[0])
        self.publishers.record(numbers, began, lambda: producer.publish(TOPIC, body, defer))

    def _publish_batch(self, producer: Any) -> None:
        numbers, began = self.ledger.begin(count=_BATCH), monotonic()
        messages = [encode_body(number) for number in numbers]
        self.publishers.record(numbers, began, lambda: producer.multipublish(TOPIC, messages))

    def _publish_pipelined(self, producer: Any) -> None:
        numbers, began = self.ledger.begin(count=_PIPELINE), monotonic()
        results = [producer.publish_nowait(TOPIC, encode_body(number)) for number in numbers]
        for number, result in zip(numbers, results, strict=True):
            self.publishers.record((number,), began, result.get)

    def channels(self) -> list[dict[str, Any]]:
        """With a row for what waits in the topic."""

        def ask(nsqd: Server) -> list[dict[str, Any]]:
            with NsqdHTTPClient(*nsqd.http_address, timeout=5.0) as admin:
                (topic,) = admin.stats(topic=TOPIC)["topics"] or ({"depth": 0, "channels": ()},)
            waiting = {"channel_name": "topic", "depth": topic["depth"], "in_flight_count": 0, "deferred_count": 0}
            return [waiting, *topic["channels"]]

        asked = [spawn(ask, nsqd) for nsqd in self._nsqds]
        try:
            return [channel for each in asked for channel in each.get()]
        except OSError as error:
            raise NsqError(f"/stats of an nsqd: {error}") from error
