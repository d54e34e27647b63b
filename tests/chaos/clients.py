"""The clients of a run: greenlets that publish at a steady rate and write down what became of each publish, consumers
that mark what they finish, and what is looked at while they work. ``Scene``: what the two dialects have in common.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any

from gevent import Greenlet, sleep, spawn

from nsq_fast import Message
from nsq_fast.consumer import Consumer
from nsq_fast.errors import NsqError, RequeueMessage
from nsq_fast.names import Address
from nsq_fast.producer import Producer

from .faults import Fault, Kind, Links
from .invariants import Accounts, Bound, ConnectionSample, Ledger, Outcome, decode_body

PUBLISH_TIMEOUT = 10.0
PUBLISH_GRACE = 3.0

PRODUCER_OPTIONS: dict[str, Any] = {
    "publish_timeout": PUBLISH_TIMEOUT,
    "heartbeat_interval": 1.0,
    "connect_timeout": 2.0,
    "max_backoff_duration": 2.0,
    "lookupd_poll_interval": 2.0,
    "lookupd_timeout": 1.0,
}
"""Of every producer: quick to notice what is wrong, so that a run of minutes sees it often."""


class Publishers:
    """Producers and the greenlets that use them.

    Attributes:
        slow: publishes that took longer than their timeout allows, in words.
        surprises: errors that a publish must not raise, in words.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.slow: list[str] = []
        self.surprises: list[str] = []
        self.is_publishing = True
        self._ledger = ledger
        self._producers: list[Producer] = []
        self._greenlets: list[Greenlet[..., Any]] = []

    def producer(self, **options: Any) -> Producer:
        """A producer that is closed with the others."""
        producer = Producer(**{**PRODUCER_OPTIONS, **options})
        producer.start()
        self._producers.append(producer)
        return producer

    def every(self, seconds: float, publish: Callable[..., None], *arguments: Any) -> None:
        """Call ``publish(*arguments)`` again and again, not more often than once in ``seconds``."""
        self._greenlets.append(spawn(self._loop, seconds, publish, arguments))

    def record(self, numbers: Sequence[int], began: float, wait: Callable[[], object]) -> bool:
        """Wait for the outcome of a publish of these messages, and mark it; whether it was answered OK."""
        text, outcome = "answered OK", Outcome.STORED
        try:
            wait()
        except NsqError as error:
            text = f"{type(error).__name__}: {error}"
            outcome = Outcome.UNKNOWN if getattr(error, "possibly_stored", False) else Outcome.REFUSED
            if not hasattr(error, "possibly_stored") and type(error).__name__ not in ("NoNsqd", "NoLeader"):
                self.surprises.append(f"a publish raised {text}")
        self._ledger.mark(numbers, outcome)
        if (seconds := monotonic() - began) > PUBLISH_TIMEOUT + PUBLISH_GRACE:
            self.slow.append(f"a publish took {seconds:.1f} s, its limit is {PUBLISH_TIMEOUT:.0f} s; {text}")
        return outcome == Outcome.STORED

    def stop(self) -> None:
        self.is_publishing = False
        for greenlet in self._greenlets:
            greenlet.get()  # with its exception, if it ended with one
        self._greenlets.clear()

    def close(self) -> None:
        for producer in self._producers:
            producer.close()

    @property
    def violations(self) -> list[str]:
        return [*dict.fromkeys([*self.slow[:3], *self.surprises[:3]])]

    def _loop(self, seconds: float, publish: Callable[..., None], arguments: Sequence[Any]) -> None:
        due = monotonic()
        while self.is_publishing:
            publish(*arguments)
            due = max(due + seconds, monotonic() - 1.0)  # what was missed is not made up for
            sleep(max(0.0, due - monotonic()))


CLOSE_TIMEOUT = 10.0
CLOSE_GRACE = 2.0
_MOST_ATTEMPTS = 6

CONSUMER_OPTIONS: dict[str, Any] = {
    "max_tries": 0,
    "heartbeat_interval": 1.0,
    "connect_timeout": 2.0,
    "max_reconnect_delay": 2.0,
    "max_backoff_duration": 1.0,
    "requeue_base_delay": 0.1,
    "requeue_max_delay": 1.0,
    "lookupd_poll_interval": 2.0,
    "lookupd_timeout": 1.0,
}
"""Of every consumer: quick to notice what is wrong, so that a run of minutes sees it often."""


class Deeds:
    """What a handler does with some messages in place of returning at once: by their number, the first time that they
    come on a channel.

    Args:
        every: of so many messages those in ``deeds`` get one.
    """

    def __init__(self, every: int, deeds: Mapping[int, Callable[[Message], object]]) -> None:
        self._every, self._deeds = every, deeds
        self._done: set[tuple[str, int]] = set()

    def do(self, channel: str, number: int | None, message: Message) -> None:
        if number is not None and (channel, number) not in self._done:
            deed = self._deeds.get(number % self._every)
            if deed is not None:
                self._done.add((channel, number))
                deed(message)

    @staticmethod
    def fail(_message: Message) -> None:
        raise ValueError("a handler that fails, the first time")

    @staticmethod
    def requeue(_message: Message) -> None:
        raise RequeueMessage(0.2, backoff=False)

    @staticmethod
    def touch(message: Message) -> None:
        sleep(MSG_TIMEOUT * 0.6)
        message.touch()
        sleep(MSG_TIMEOUT * 0.6)

    @staticmethod
    def take_a_while(_message: Message) -> None:
        sleep(0.4)


class Garbled(Exception):
    """A body that is not what was published: the link changed it, and it has to come again."""


class Consumers:
    """The consumers by the name of their channel, which is their client id too.

    Attributes:
        garbled: deliveries of a changed body.
        given_up: messages that came changed again and again: changed on their way into the server.
        running: handlers that run now.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.garbled = 0
        self.given_up = 0
        self.running = 0
        self.slow_to_close: list[str] = []
        self._ledger = ledger
        self._consumers: dict[str, Consumer] = {}
        self._bounds: dict[str, Bound] = {}
        self._readers: list[Greenlet[..., Any]] = []

    def start(self, topic: str, channel: str, **options: Any) -> Consumer:
        consumer = self._make(topic, channel, **options)
        consumer.start(block=False)
        return consumer

    def iterate(self, topic: str, channel: str, **options: Any) -> None:
        self._readers.append(spawn(self._read, self._make(topic, channel, **options)))

    def _make(self, topic: str, channel: str, **options: Any) -> Consumer:
        for name in ("message_handler", "batch_handler"):
            if name in options:
                options[name] = self._counted(options[name])
        consumer = Consumer(topic, channel, client_id=channel, **{**CONSUMER_OPTIONS, **options})
        self._consumers[channel] = consumer
        self._bounds[channel] = Bound(f"{channel}: messages held", consumer.max_in_flight)
        return consumer

    def _counted(self, handler: Callable[[Consumer, Any], None]) -> Callable[[Consumer, Any], None]:
        def handle(consumer: Consumer, taken: Any) -> None:
            self.running += 1
            try:
                handler(consumer, taken)
            finally:
                self.running -= 1

        return handle

    def _read(self, consumer: Consumer) -> None:
        for message in consumer:
            self.finish_or_requeue(consumer, message)

    def finish_or_requeue(self, consumer: Consumer, message: Message) -> None:
        """What a loop or a batch handler does with a message; the client finishes it unless it is requeued."""
        try:
            number = self.number(message)
        except Garbled:
            message.requeue(100)
        else:
            self.finish(consumer.channel, number)

    def number(self, message: Message) -> int | None:
        """The number of a message; None for one that is to be finished and forgotten. Raises Garbled."""
        number = decode_body(message.body)
        if number is None:
            self.garbled += 1
            if message.attempts < _MOST_ATTEMPTS:
                raise Garbled
            self.given_up += 1
        return number

    def finish(self, channel: str, number: int | None) -> None:
        if number is not None:
            self._ledger.mark_finished(channel, number)

    def sample(self) -> list[ConnectionSample]:
        """Every connection, as it is now; the bounds are looked at, too."""
        samples = []
        for name, consumer in self._consumers.items():
            stats = consumer.stats()
            self._bounds[name].sample(stats.in_flight)
            is_excused = stats.backoff_level > 0 or stats.max_in_flight < len(stats.connections)
            for each in stats.connections:
                address = str(each.address) if each.partition is None else f"{each.address}/{each.partition}"
                samples.append(ConnectionSample(name, address, each.is_connected, each.rdy, each.in_flight, is_excused))
        return samples

    @property
    def connected(self) -> dict[str, int]:
        return {
            name: sum(each.is_connected for each in consumer.stats().connections)
            for name, consumer in self._consumers.items()
        }

    def accounts(self) -> dict[str, Accounts]:
        """What the consumers say that they have finished and requeued."""
        totals = {name: consumer.stats().totals for name, consumer in self._consumers.items()}
        return {name: Accounts(each.finished, each.requeued, each.answers_failed) for name, each in totals.items()}

    def close(self) -> None:
        for name, consumer in self._consumers.items():
            began = monotonic()
            consumer.close(timeout=CLOSE_TIMEOUT)
            if (seconds := monotonic() - began) > CLOSE_TIMEOUT + CLOSE_GRACE:
                self.slow_to_close.append(f"{name}: close(timeout={CLOSE_TIMEOUT:.0f}) took {seconds:.1f} s")
        for reader in self._readers:
            reader.get(timeout=CLOSE_TIMEOUT)

    @property
    def violations(self) -> list[str]:
        return [*(each for bound in self._bounds.values() for each in bound.violations), *self.slow_to_close]


FRONT = "127.0.0.2"
"""Where the proxies listen, on the ports of their servers: what nsqlookupd tells clients is there, too."""

MSG_TIMEOUT = 5.0
NSQDS = ("nsqd0", "nsqd1", "nsqd2")
LOOKUPDS = ("lookupd0", "lookupd1")
LINK_FAULTS = (
    (Kind("delay", 2.0, 8.0), (*NSQDS, *LOOKUPDS)),
    (Kind("split", 2.0, 8.0), NSQDS),
    (Kind("blackhole", 1.0, 8.0, 2), (*NSQDS, *LOOKUPDS)),
    (Kind("refuse", 0.5, 5.0), (*NSQDS, *LOOKUPDS)),
    (Kind("cut", 0.1, 0.1, 2), NSQDS),
    (Kind("garble", 0.1, 0.1, 2), (*NSQDS, *LOOKUPDS)),
)


class Scene:
    """Servers of a dialect behind proxies, with the work on them. Use it in a ``with``. ``rate``: messages a second.

    Attributes:
        name: what runs here, for people.
        menu: what may go wrong with what.
    """

    name: str
    menu: Sequence[tuple[Kind, Sequence[str]]]

    def __init__(self, channels: Sequence[str], rate: float) -> None:
        self.ledger = Ledger(channels)
        self.consumers = Consumers(self.ledger)
        self.publishers = Publishers(self.ledger)
        self.links = Links()
        self.fronts: dict[str, Address] = {}
        self._rate = rate

    def __enter__(self) -> Any:
        try:
            self.start_servers()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.links.__exit__()
        self.stop_servers()

    def front(self, name: str, tcp: Address | None, http: Address) -> None:
        """Put a proxy in front of an nsqd, or of an nsqlookupd, of which clients use HTTP alone."""
        self.fronts[name] = self.links.open(name, tcp, (FRONT, tcp.port)) if tcp else self.links.open(name, http)

    @property
    def lookupds(self) -> dict[str, Any]:
        return {"lookupd_http_addresses": [f"http://{self.fronts[name]}" for name in LOOKUPDS]}

    def start_servers(self) -> None:
        """Start them with their topic, and the proxies."""
        raise NotImplementedError

    def stop_servers(self) -> None:
        """End all that runs."""
        raise NotImplementedError

    def begin(self, fault: Fault) -> None:
        """Let a fault of a server begin."""
        raise NotImplementedError

    def end(self, fault: Fault) -> None:
        """End a fault of a server; returns when it serves again."""
        raise NotImplementedError

    def start(self) -> None:
        """Begin to publish and to consume."""
        raise NotImplementedError

    def publish_some(self, count: int) -> None:
        """Publish about so many messages; raises when that fails."""
        raise NotImplementedError

    def channels(self) -> list[dict[str, Any]]:
        """The rows of the channels in ``/stats`` of all nsqds."""
        raise NotImplementedError

    @property
    def violations(self) -> list[str]:
        return []

    def left(self) -> dict[str, int]:
        """What the nsqds hold for the channels, by channel and state; what is 0 is left out."""
        left: Counter[str] = Counter()
        for channel in self.channels():
            for state, figure in _STATES.items():
                left[f"{channel['channel_name']} {state}"] += channel[figure]
        return {state: count for state, count in left.items() if count}

    def clients(self) -> list[dict[str, Any]]:
        """What the nsqds say of the clients of their channels, each with its ``channel``."""
        return [
            {**client, "channel": channel["channel_name"]}
            for channel in self.channels()
            for client in channel.get("clients") or ()
        ]


_STATES = {"waiting": "depth", "in flight": "in_flight_count", "deferred": "deferred_count"}
