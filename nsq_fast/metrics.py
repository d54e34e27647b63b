"""Prometheus metrics of Consumers and Producers, of ``nsq_fast``, ``nsq_fast.threads`` and ``nsq_fast.aio``.

    from nsq_fast.metrics import ClientCollector

    metrics = ClientCollector()
    metrics.add_consumer("billing", consumer)
    metrics.add_producer("web", producer)

A scrape reads ``stats()`` of each client; between scrapes nothing is done. Clients with
``histograms=True`` measure samples of what handlers and publishes take, and show these, too. It needs the extra
``nsq-fast[metrics]``.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ._lazy import get_logger, get_original
from .errors import ConfigError
from .log_events import METRICS_FAILED

try:
    from prometheus_client import REGISTRY, CollectorRegistry
    from prometheus_client.metrics_core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.utils import floatToGoString
except ImportError as _error:
    raise ImportError("nsq_fast.metrics needs prometheus-client: pip install 'nsq-fast[metrics]'") from _error

if TYPE_CHECKING:
    from nsq_fast._record import HistogramStats

    from .client.consumer import ConsumerStats

logger: logging.Logger = get_logger(__name__)

PREFIX = "nsq_fast"


class ConsumerLike(Protocol):
    """What is read of a Consumer, from any thread."""

    @property
    def topic(self) -> str:
        """Its topic."""

    @property
    def channel(self) -> str:
        """Its channel."""

    def stats(self) -> ConsumerStats:
        """A snapshot."""


class ProducerLike(Protocol):
    """What is read of a Producer, from any thread."""

    def stats(self) -> dict[str, Any]:
        """A snapshot."""


COUNTER, GAUGE, HISTOGRAM = CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily


class Figure(NamedTuple):
    """One metric: ``read`` takes its value from what ``stats()`` of a client, or a server, says; None: it has none.

    The value of a histogram is a HistogramStats.
    """

    name: str
    help: str
    read: Callable[[Any], Any]
    kind: type[Any] = GAUGE

    def family(self, prefix: str, labels: tuple[str, ...]) -> Any:
        """The metric, without values."""
        return self.kind(f"{prefix}_{self.name}", self.help, labels=labels)


_CONSUMER = (
    Figure("messages_received", "Deliveries, repeated ones included.", lambda each: each.totals.received, COUNTER),
    Figure("messages_finished", "FINs handed to the system.", lambda each: each.totals.finished, COUNTER),
    Figure("messages_requeued", "REQs handed to the system.", lambda each: each.totals.requeued, COUNTER),
    Figure("messages_skipped", "Finished for their skip_header, unhandled.", lambda each: each.totals.skipped, COUNTER),
    Figure("messages_suppressed", "Copies, by suppress_retried.", lambda each: each.totals.suppressed, COUNTER),
    Figure("messages_expired", "Not responded to before their deadline.", lambda each: each.totals.expired, COUNTER),
    Figure("messages_given_up", "Handed to the give-up policy and finished.", lambda each: each.given_up, COUNTER),
    Figure("messages_outdated", "Older than max_age, finished by its policy.", lambda each: each.outdated, COUNTER),
    Figure(
        "responses_failed", "FIN, REQ or TOUCH that nsqd refused.", lambda each: each.totals.answers_failed, COUNTER
    ),
    Figure("responses_lost", "FIN or REQ lost with the connection.", lambda each: each.totals.answers_lost, COUNTER),
    Figure("messages_touched", "TOUCHes, automatic ones included.", lambda each: each.totals.touched, COUNTER),
    Figure(
        "subscriptions", "Connections subscribed, renewed ones too.", lambda each: each.totals.subscriptions, COUNTER
    ),
    Figure("leader_moves", "Times that a partition got another leader.", lambda each: each.leader_moves, COUNTER),
    Figure("lookup_errors", "Questions to lookup without good answer.", lambda each: each.lookup_errors, COUNTER),
    Figure("order_violations", "Ordered messages out of order.", lambda each: each.order_violations, COUNTER),
    Figure("ordered_messages_repeated", "Ordered messages delivered again.", lambda each: each.repeated, COUNTER),
    Figure(
        "ordered_deliveries_blocked", "Ordered, with too many attempts already.", lambda each: each.blocked, COUNTER
    ),
    Figure(
        "connections", "Connections that are subscribed.", lambda each: sum(c.is_connected for c in each.connections)
    ),
    Figure("targets", "nsqds, or partitions, to be subscribed to.", lambda each: len(each.connections)),
    Figure("rdy", "Sum of the RDYs last sent.", lambda each: sum(c.rdy for c in each.connections)),
    Figure("max_in_flight", "Most messages in flight at once.", lambda each: each.max_in_flight),
    Figure("messages_in_flight", "Neither responded to nor expired.", lambda each: each.in_flight),
    Figure("messages_unstarted", "In flight, waiting for a handler.", lambda each: each.unstarted),
    Figure("messages_orphaned", "Of lost connections, still held by handlers.", lambda each: each.orphaned),
    Figure("backoff_level", "0 when there is no backoff.", lambda each: each.backoff_level),
    Figure("backoff_seconds", "What is left of the present pause.", lambda each: each.backoff_left),
    Figure("running", "1 while started and not closed.", lambda each: each.is_running),
    Figure("paused", "1 between pause and resume.", lambda each: each.is_paused),
    Figure("starved", "1 while handlers hold 85 % of what a connection may get.", lambda each: each.is_starved),
    Figure("handler_seconds", "What handlers took, of samples.", lambda each: each.handler_time, HISTOGRAM),
    Figure(
        "message_age_seconds", "Publish to start of the handler, of samples.", lambda each: each.message_age, HISTOGRAM
    ),
)

_PRODUCER = (
    Figure("publishes_stored", "Publishes that an nsqd confirmed.", lambda each: each["stored"], COUNTER),
    Figure("publishes_refused", "Publishes that failed and are not stored.", lambda each: each["refused"], COUNTER),
    Figure("publishes_unknown", "Publishes that failed and may be stored.", lambda each: each["unknown"], COUNTER),
    Figure("leader_moves", "Times that a partition got another leader.", lambda each: each["leader_moves"], COUNTER),
    Figure("lookup_errors", "Questions to lookup without good answer.", lambda each: each["lookup_errors"], COUNTER),
    Figure("pending_publishes", "Publishes that have no result yet.", lambda each: each["pending"]),
    Figure("waiting_publishes", "Those of them that wait for an nsqd.", lambda each: each["waiting"]),
    Figure("held_messages", "Messages that count towards max_pending.", lambda each: each["held"]),
    Figure("connections", "Connections, stalled ones included.", lambda each: len(each["connected"])),
    Figure("connections_stalled", "Those that owe replies and get no publishes.", lambda each: len(each["stalled"])),
    Figure("nsqds_disconnected", "nsqds that could not be reached.", lambda each: len(each["disconnected"])),
    Figure(
        "partitions_without_leader",
        "Partitions whose leader is not known.",
        lambda each: sum(leader is None for topic in each["leaders"].values() for leader in topic.values()),
    ),
    Figure(
        "publish_seconds", "Call of a publish to its confirmation, of samples.", lambda each: each["latency"], HISTOGRAM
    ),
)


_collectors: weakref.WeakKeyDictionary[CollectorRegistry, ClientCollector] = weakref.WeakKeyDictionary()


class ClientCollector:
    """Shows the figures of the clients that were added to it; a collector of prometheus_client.

    Any thread may scrape it, and add and remove clients. It holds clients weakly: the series of one that the program
    has dropped end. Labels are the name given here, and the topic and channel of a consumer, so that there are as many
    series as there are clients. Counters never go down as long as their client lives.

    Args:
        registry: where it registers itself; None: nowhere. One registry takes one ClientCollector, and refuses
            another one with ConfigError.
    """

    def __init__(self, registry: CollectorRegistry | None = REGISTRY) -> None:
        self._consumers = _Group(f"{PREFIX}_consumer", ("consumer", "topic", "channel"), _CONSUMER)
        self._producers = _Group(f"{PREFIX}_producer", ("producer",), _PRODUCER)
        if registry is not None:
            try:
                registry.register(self)
            except ValueError as error:
                raise ConfigError(
                    "the registry has these series already: add clients to the ClientCollector that it has, see"
                    " ClientCollector.of, or give this one a registry of its own"
                ) from error
            _collectors[registry] = self

    @staticmethod
    def of(registry: CollectorRegistry = REGISTRY) -> ClientCollector:
        """The collector of a registry; where it has none, one is made."""
        return _collectors.get(registry) or ClientCollector(registry)

    def add_consumer(self, name: str, consumer: ConsumerLike) -> None:
        """Show a consumer, with the label ``consumer="name"``.

        Raises ConfigError when it is no consumer, or when it or the name is here already.
        """
        if not (_has_stats(consumer) and hasattr(consumer, "channel")):
            raise ConfigError(f"{consumer!r} is no Consumer: add_consumer takes those of nsq_fast, .threads and .aio")
        self._consumers.add(name, consumer, (str(consumer.topic), str(consumer.channel)))

    def add_producer(self, name: str, producer: ProducerLike) -> None:
        """Show a producer, with the label ``producer="name"``.

        Raises ConfigError when it is no producer, or when it or the name is here already.
        """
        if not _has_stats(producer) or hasattr(producer, "channel"):
            raise ConfigError(f"{producer!r} is no Producer: add_producer takes those of nsq_fast, .threads and .aio")
        self._producers.add(name, producer, ())

    def remove(self, client: object) -> None:
        """Show a client no longer; one that is not here is no error."""
        self._consumers.remove(client)
        self._producers.remove(client)

    def describe(self) -> Iterable[Metric]:
        """The metrics, without values: what a registry compares with those it has."""
        return [*self._consumers.families(), *self._producers.families(), _stalled()]

    def collect(self) -> Iterator[Metric]:
        """The metrics of now."""
        yield from self._consumers.collect()
        yield from self._producers.collect()
        family = _stalled()
        for labels, consumer in self._consumers.living():
            with suppress(Exception):  # what cannot be read is named where its stats() cannot be, either
                reason = consumer.progress().reason
                if reason is not None:
                    family.add_metric([*labels, reason], 1.0)
        yield family


def _stalled() -> Any:
    """The reason why nothing is done; no sample while work is done, so that there is one series a consumer at most."""
    text = "1 for the reason why nothing was done for a second."
    return GaugeMetricFamily(f"{PREFIX}_consumer_stalled", text, labels=("consumer", "topic", "channel", "reason"))


def _has_stats(client: object) -> bool:
    return callable(getattr(client, "stats", None)) and not isinstance(client, type)


class _Client:
    """One client that is shown.

    Attributes:
        ref: to the client, weak.
        labels: values, in the order of the group's labels.
        shown: the highest value of each counter so far, in this process: a child of a fork counts anew.
        process: its id.
        has_failed: whether it could not be read the last time.
    """

    def __init__(self, client: object, labels: tuple[str, ...]) -> None:
        self.ref = weakref.ref(client)
        self.labels = labels
        self.shown: dict[str, float] = {}
        self.process = os.getpid()
        self.has_failed = False


class _Group:
    """The clients of one kind, by name."""

    def __init__(self, prefix: str, labels: tuple[str, ...], figures: tuple[Figure, ...]) -> None:
        self._prefix = prefix
        self._labels = labels
        self._figures = figures
        self._clients: dict[str, _Client] = {}
        # Native, whatever is patched: scrapes come from native threads. Nothing waits while it is held.
        self._lock = get_original("_thread", "allocate_lock")()

    def add(self, name: str, client: object, labels: tuple[str, ...]) -> None:
        """Raises ConfigError, see ``ClientCollector``."""
        if not isinstance(name, str) or not name:
            raise ConfigError(f"name={name!r}: must be a string that is not empty")
        with self._lock:
            alive = {each: known for each, entry in self._clients.items() if (known := entry.ref()) is not None}
            if name in alive:
                raise ConfigError(f"name={name!r}: {alive[name]!r} has it; choose another one, or remove that first")
            for other, known in alive.items():
                if known is client:
                    raise ConfigError(f"{client!r} was added before as {other!r}; it would be counted twice")
            self._clients[name] = _Client(client, (name, *labels))

    def remove(self, client: object) -> None:
        """It, and those that live no longer."""
        with self._lock:
            self._clients = {name: entry for name, entry in self._clients.items() if entry.ref() not in (None, client)}

    def living(self) -> list[tuple[tuple[str, ...], Any]]:
        """The labels of each client that lives, and the client."""
        with self._lock:
            entries = list(self._clients.values())
        return [(entry.labels, client) for entry in entries if (client := entry.ref()) is not None]

    def families(self) -> list[Any]:
        """The metrics, without values."""
        return [each.family(self._prefix, self._labels) for each in self._figures]

    def collect(self) -> list[Metric]:
        """The metrics of all clients that live."""
        families = self.families()
        with self._lock:
            entries = list(self._clients.values())
        for entry in entries:
            for family, value in zip(families, self._values(entry), strict=False):
                if isinstance(family, HISTOGRAM):
                    if value is not None:
                        family.add_metric(entry.labels, _cumulative(value), value.sum)
                else:
                    family.add_metric(entry.labels, float(value))
        return families

    def _values(self, entry: _Client) -> list[Any]:
        """One for each figure; none when the client lives no longer, or cannot be read."""
        client: Any = entry.ref()
        if client is None:
            return []
        try:
            stats = client.stats()
            values = [each.read(stats) for each in self._figures]
        except Exception as error:
            if not entry.has_failed:
                logger.warning(
                    "no metrics of %r until its stats() can be read again: %r", client, error, extra=METRICS_FAILED
                )
            entry.has_failed = True
            return []
        entry.has_failed = False
        with self._lock:
            if entry.process != os.getpid():
                entry.process, entry.shown = os.getpid(), {}
            return [
                self._never_down(entry, figure, value) if figure.kind is COUNTER else value
                for figure, value in zip(self._figures, values, strict=True)
            ]

    def _never_down(self, entry: _Client, figure: Figure, value: float) -> float:
        """Prometheus takes a counter that goes down for one that began anew, and would count everything twice.

        ``stats()`` of a running consumer, read in another thread, may lack for a moment what the connection to an nsqd
        that has just gone had counted.
        """
        highest = entry.shown[figure.name] = max(value, entry.shown.get(figure.name, 0.0))
        return highest


def _cumulative(times: HistogramStats) -> list[tuple[str, float]]:
    """Buckets as Prometheus has them: each counts those below it, too."""
    bounds = [*map(floatToGoString, times.bounds), "+Inf"]
    return list(zip(bounds, accumulate(times.counts), strict=True))
