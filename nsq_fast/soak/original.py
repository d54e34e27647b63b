"""The original dialect: what goes wrong there, and the work that goes on meanwhile.

One topic on three nsqds, four channels, each read in another way. Every producer but three knows its nsqd, so that of
most messages it is known which nsqd has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from gevent import spawn

from nsq_fast.errors import NsqError
from nsq_fast.names import Address
from nsq_fast.runtime import NsqdHTTPClient

from . import bodies
from .consumers import Consumers
from .ledger import ANYWHERE, Ledger
from .links import Links
from .original_handlers import OriginalHandlers
from .publishers import Publishers
from .schedule import Fault, Kind
from .servers import FRONT, OriginalServers, held_by

TOPIC = "soak"
_NSQDS = ("nsqd0", "nsqd1", "nsqd2")
_LOOKUPDS = ("lookupd0", "lookupd1")
_BATCH = 10
_PIPELINE = 20

MENU = (
    (Kind("kill", 0.5, 6.0, 2), _NSQDS),
    (Kind("stop", 0.5, 6.0, 2), _NSQDS),
    (Kind("freeze", 0.5, 8.0, 2), _NSQDS),
    (Kind("kill", 1.0, 6.0), _LOOKUPDS),
    (Kind("freeze", 1.0, 6.0), _LOOKUPDS),
    (Kind("delay", 2.0, 8.0), (*_NSQDS, *_LOOKUPDS)),
    (Kind("split", 2.0, 8.0), _NSQDS),
    (Kind("blackhole", 1.0, 8.0, 2), (*_NSQDS, *_LOOKUPDS)),
    (Kind("refuse", 0.5, 5.0), (*_NSQDS, *_LOOKUPDS)),
    (Kind("cut", 0.1, 0.1, 2), _NSQDS),
    (Kind("garble", 0.1, 0.1, 2), (*_NSQDS, *_LOOKUPDS)),
)


class Original:
    """One run's servers and work. Use it in a ``with``.

    Args:
        rate: messages a second.
        binaries: a folder with real servers; None: the embedded ones.
    """

    menu: Sequence[tuple[Kind, Sequence[str]]] = MENU

    def __init__(self, folder: Path, rate: float, binaries: Path | None = None) -> None:
        self.servers = OriginalServers(folder, binaries)
        self.ledger = Ledger(("handlers", "batches", "plain", "few"))
        self.consumers = Consumers(self.ledger)
        self.publishers = Publishers(self.ledger)
        self._rate = rate
        self.links = Links()
        self._fronts: dict[str, Address] = {}
        self._handlers = OriginalHandlers(self.consumers)

    @property
    def name(self) -> str:
        """What runs here, for people."""
        return self.servers.name

    def __enter__(self) -> Original:
        try:
            self.servers.__enter__()
            for nsqd in self.servers.nsqds:
                self._fronts[nsqd.name] = self.links.open(nsqd.name, nsqd.tcp, (FRONT, nsqd.tcp.port))
                with NsqdHTTPClient(*nsqd.http) as admin:
                    admin.create_topic(TOPIC)
                    for channel in self.ledger.channels:
                        admin.create_channel(TOPIC, channel)
            for lookupd in self.servers.lookupds:
                self._fronts[lookupd.name] = self.links.open(lookupd.name, lookupd.http)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.links.__exit__()
        self.servers.__exit__()

    # Faults

    def begin(self, fault: Fault) -> None:
        """Let a fault of a server begin."""
        server = self.servers.server(fault.target)
        if fault.kind == "kill":
            server.kill()
            if server.name in _NSQDS:
                self.ledger.mark_killed(_NSQDS.index(server.name))
        elif fault.kind == "stop":
            server.terminate()
        else:
            server.freeze()

    def end(self, fault: Fault) -> None:
        """End a fault of a server; returns when it serves again."""
        if fault.kind == "freeze":
            self.servers.server(fault.target).thaw()
        else:
            self.servers.server(fault.target).start()

    # Work

    def start(self) -> None:
        """Begin to publish and to consume."""
        lookupds = {"lookupd_http_addresses": [f"http://{self._fronts[name]}" for name in _LOOKUPDS]}
        start = self.consumers.start
        start(TOPIC, "handlers", message_handler=self._handlers.handle, concurrency=20, max_in_flight=60, **lookupds)
        start(TOPIC, "batches", batch_handler=self._handlers.handle_batch, max_in_flight=200, snappy=True, **lookupds)
        start(TOPIC, "plain", message_handler=self._handlers.handle_plainly, max_in_flight=30, deflate=True, **lookupds)
        self.consumers.iterate(TOPIC, "few", max_in_flight=2, low_ready_idle_timeout=0.5, **lookupds)
        # Of seven parts of the rate three go to an nsqd each, one is deferred, one pipelined, two come in batches.
        interval = 7 / self._rate
        for place, name in enumerate(_NSQDS):
            retries = place != 1
            pinned = self.publishers.producer(nsqd_tcp_addresses=[self._fronts[name]], retry_unknown_outcome=retries)
            self.publishers.every(interval, self._publish, pinned, place)
        anywhere = self.publishers.producer(**lookupds)
        self.publishers.every(interval, self._publish, anywhere, ANYWHERE, 300)
        self.publishers.every(interval * _BATCH / 2, self._publish_batch, anywhere)
        lingering = self.publishers.producer(linger=0.005, **lookupds)
        self.publishers.every(interval * _PIPELINE, self._publish_pipelined, lingering)

    def publish_some(self, count: int) -> None:
        """Publish so many messages, one after the other, straight to the nsqds; raises when that fails."""
        producer = self.publishers.producer(nsqd_tcp_addresses=[nsqd.tcp for nsqd in self.servers.nsqds])
        for _ in range(count):
            numbers = self.ledger.begin()
            producer.publish(TOPIC, bodies.encode(numbers[0]))
            self.ledger.mark_stored(numbers)

    def _publish(self, producer: Any, place: int, defer: int | None = None) -> None:
        numbers, began = self.ledger.begin(place), monotonic()
        body = bodies.encode(numbers[0])
        self.publishers.record(numbers, began, lambda: producer.publish(TOPIC, body, defer))

    def _publish_batch(self, producer: Any) -> None:
        numbers, began = self.ledger.begin(count=_BATCH), monotonic()
        messages = [bodies.encode(number) for number in numbers]
        self.publishers.record(numbers, began, lambda: producer.multipublish(TOPIC, messages))

    def _publish_pipelined(self, producer: Any) -> None:
        numbers, began = self.ledger.begin(count=_PIPELINE), monotonic()
        results = [producer.publish_nowait(TOPIC, bodies.encode(number)) for number in numbers]
        for number, result in zip(numbers, results, strict=True):
            self.publishers.record((number,), began, result.get)

    @property
    def violations(self) -> list[str]:
        """What should not be, in words; nothing that is special to this dialect."""
        return []

    # Servers' side

    def left(self) -> dict[str, int]:
        """What the nsqds hold for the channels, by channel and state; what is 0 is left out."""
        left: Counter[str] = Counter()
        for reply in self._stats():
            for topic in reply["topics"]:
                left["waiting in the topic"] += topic["depth"]
                for channel in topic["channels"]:
                    left.update(held_by(channel))
        return {state: count for state, count in left.items() if count}

    def clients(self) -> list[dict[str, Any]]:
        """What the nsqds say of the clients of their channels, each with its ``channel``."""
        return [
            {**client, "channel": channel["channel_name"]}
            for reply in self._stats()
            for topic in reply["topics"]
            for channel in topic["channels"]
            for client in channel.get("clients") or ()
        ]

    def _stats(self) -> list[dict[str, Any]]:
        def ask(nsqd: Any) -> dict[str, Any]:
            with NsqdHTTPClient(*nsqd.http, timeout=5.0) as admin:
                return dict(admin.stats(topic=TOPIC))

        asked = [spawn(ask, nsqd) for nsqd in self.servers.nsqds]
        try:
            return [each.get() for each in asked]
        except OSError as error:
            raise NsqError(f"/stats of an nsqd: {error}") from error
