"""What the servers of a cluster say of themselves: for `nsq-fast stat`, and for `exporter`, which needs the extra
``metrics``.

``Nsqds`` asks nsqds, ``read_stats`` reads their ``/stats``, of both dialects; ``Families`` makes metrics of it for
Prometheus; ``Cluster`` finds the servers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from gevent import joinall, spawn
from gevent.lock import BoundedSemaphore

from nsq_fast._lazy import get_logger
from nsq_fast.client.admin import LookupPoller, NsqdHTTPClient
from nsq_fast.client.http import Endpoint
from nsq_fast.config import LookupConfig
from nsq_fast.errors import NsqError
from nsq_fast.log_events import EXPORTER_NSQD_FAILED, EXPORTER_NSQD_RECOVERED, LOOKUP_UNANSWERED
from nsq_fast.names import is_ephemeral

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_NANOSECONDS = 1e9


class Row(NamedTuple):
    """What an nsqd says of a topic, or of a channel of it.

    Attributes:
        partition, channel: empty where it has none.
        figures: by the names of ``TOPIC`` and ``CHANNEL``, and ``backend_depth`` and ``ready``, the sum of the RDYs of
            its clients; without what this nsqd does not say.
        said: all of it.
    """

    topic: str
    partition: str
    channel: str
    figures: dict[str, Any]
    said: Mapping[str, Any]


class Nsqds:
    """Asks nsqds for their ``/stats``, all at once, over connections that are kept while an nsqd is asked again.

    Args:
        options: of ``NsqdHTTPClient``.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._clients: dict[str, NsqdHTTPClient] = {}

    def ask(self, nsqds: Iterable[str], **query: Any) -> dict[str, Mapping[str, Any] | NsqError]:
        """What each says, or why it says nothing; ``query``: as for ``NsqdHTTPClient.stats``."""
        jobs = {nsqd: spawn(self._ask, nsqd, query) for nsqd in dict.fromkeys(nsqds)}
        joinall(list(jobs.values()))  # a request ends in time, whatever becomes of it
        for gone in self._clients.keys() - jobs.keys():
            self._clients.pop(gone).close()
        return {nsqd: job.get() for nsqd, job in jobs.items()}

    def _ask(self, nsqd: str, query: Mapping[str, Any]) -> Mapping[str, Any] | NsqError:
        if nsqd not in self._clients:
            self._clients[nsqd] = NsqdHTTPClient.from_url(nsqd, **self._options)
        try:
            stats: Mapping[str, Any] = self._clients[nsqd].stats(**query)
        except NsqError as error:
            return error
        return stats


# nsqio/nsq: nsqd/stats.go, TopicStats, ChannelStats; youzan/nsq: nsqd/stats.go, the same.
_SAID = {
    "depth": "depth",
    "backend_depth": "backend_depth",
    "in_flight": "in_flight_count",
    "deferred": "deferred_count",
    "paused": "paused",
    "messages": "message_count",
    "requeued": "requeue_count",
    "timed_out": "timeout_count",
}
_OF_TOPIC_ONLY = "depth", "backend_depth"


def read_stats(stats: Mapping[str, Any]) -> Iterator[Row]:
    """The topics of an answer to ``/stats``, each followed by its channels.

    Of a partition its leader counts: replicas would count it again.
    """
    for topic in stats.get("topics") or ():
        if topic.get("is_leader") is False:
            continue
        place = str(topic["topic_name"]), str(topic.get("topic_partition") or "")
        figures = _figures(topic)
        if "topic_partition" in topic:  # there it is all bytes ever written (youzan/nsq: nsqd/stats.go, NewTopicStats)
            figures = {name: value for name, value in figures.items() if name not in _OF_TOPIC_ONLY}
        yield Row(*place, "", figures, topic)
        for channel in topic.get("channels") or ():
            yield Row(*place, str(channel["channel_name"]), {**_figures(channel), **_of_clients(channel)}, channel)


def _figures(said: Mapping[str, Any]) -> dict[str, Any]:
    return {ours: said[theirs] for ours, theirs in _SAID.items() if said.get(theirs) is not None}


def _of_clients(channel: Mapping[str, Any]) -> dict[str, Any]:
    """Both dialects count them, by different names; old nsqds list them only. Of the oldest message redesigned nsqds
    say when it came, 0 where nothing waits."""
    listed = channel.get("clients") or ()
    counts = [channel[name] for name in ("client_count", "client_num") if channel.get(name) is not None]
    oldest = channel.get("depth_ts_nano")
    return {
        "clients": counts[0] if counts else len(listed),
        "ready": sum(each.get("ready_count", 0) for each in listed),
        **({"oldest_timestamp_seconds": oldest / _NANOSECONDS} if oldest else {}),
    }


TOPIC = {
    "depth": "Messages that wait in the topic, not in its channels.",
    "messages": "Messages published since nsqd started.",
    "paused": "1 while the topic is paused.",
}
CHANNEL = {
    "depth": "Messages that wait for a consumer.",
    "in_flight": "Messages that consumers hold.",
    "deferred": "Messages that wait for their time.",
    "clients": "Consumers that are connected.",
    "paused": "1 while the channel is paused.",
    "messages": "Messages that came into the channel since nsqd started.",
    "requeued": "Messages that consumers requeued since nsqd started.",
    "timed_out": "Messages not responded to in time since nsqd started.",
    "oldest_timestamp_seconds": "When the oldest message that waits was published.",
}
_COUNTED = "messages", "requeued", "timed_out"
TOPIC_LABELS = ("nsqd", "topic", "partition")
CHANNEL_LABELS = (*TOPIC_LABELS, "channel")
_LATENCY = "Time from publish to FIN, as nsqd reckons it."


class Families:
    """The metrics of one scrape.

    Args:
        with_ephemeral: whether to show topics and channels that vanish with their last client. Their names are often
            made up anew each time, so that there is no end to the series.
    """

    def __init__(self, with_ephemeral: bool = False) -> None:
        from nsq_fast.metrics import COUNTER, GAUGE, PREFIX

        self._with_ephemeral = with_ephemeral
        self._up = {
            kind: GAUGE(f"{PREFIX}_{kind}_up", f"1 if the {kind} answered this time.", labels=(kind,))
            for kind in ("nsqd", "nsqlookupd")
        }
        self._figures: dict[str, dict[str, Any]] = {}
        self._latency = {}
        for kind, figures, labels in (("topic", TOPIC, TOPIC_LABELS), ("channel", CHANNEL, CHANNEL_LABELS)):
            self._figures[kind] = {
                name: (COUNTER if name in _COUNTED else GAUGE)(f"{PREFIX}_{kind}_{name}", help, labels=labels)
                for name, help in figures.items()
            }
            self._latency[kind] = GAUGE(f"{PREFIX}_{kind}_e2e_latency_seconds", _LATENCY, labels=(*labels, "quantile"))

    def all(self) -> list[Metric]:
        """All of them."""
        figures = [family for kind in self._figures.values() for family in kind.values()]
        return [*self._up.values(), *figures, *self._latency.values()]

    def add_server(self, kind: str, address: str, is_up: bool) -> None:
        """Whether an ``nsqd`` or ``nsqlookupd`` has answered."""
        self._up[kind].add_metric((address,), float(is_up))

    def add_stats(self, nsqd: str, stats: Mapping[str, Any]) -> None:
        """What an nsqd answered."""
        for topic, partition, channel, figures, said in read_stats(stats):
            if not self._with_ephemeral and (is_ephemeral(topic) or is_ephemeral(channel)):
                continue
            kind, labels = (
                ("channel", (nsqd, topic, partition, channel)) if channel else ("topic", (nsqd, topic, partition))
            )
            for name, family in self._figures[kind].items():
                if name in figures:
                    family.add_metric(labels, float(figures[name]))
            for each in (said.get("e2e_processing_latency") or {}).get("percentiles") or ():
                self._latency[kind].add_metric((*labels, f"{each['quantile']:g}"), each["value"] / _NANOSECONDS)


logger: logging.Logger = get_logger(__name__)

REMEMBERED = 300.0
"""Seconds for which an nsqd that no nsqlookupd names any more is still asked, so that it is seen to be away."""


class Cluster:
    """The servers; lives in one hub.

    Args:
        nsqds: HTTP addresses of nsqds that are always asked.
        lookupds: nsqlookupds that name others.
        timeout: seconds for one server; lookup comes first, so that a scrape takes twice as long at most.
        lookup_config: of the questions to lookup.
        tls_options: for https.
        with_ephemeral: see ``Families``.
    """

    def __init__(
        self,
        nsqds: Sequence[Endpoint],
        lookupds: Sequence[Endpoint],
        *,
        timeout: float,
        lookup_config: LookupConfig,
        tls_options: Any = None,
        with_ephemeral: bool = False,
    ) -> None:
        self._always = [str(nsqd) for nsqd in nsqds]
        self._poller = LookupPoller([str(each) for each in lookupds], lookup_config) if lookupds else None
        self._asked = Nsqds(timeout=timeout, tls_options=tls_options)
        self._timeout = timeout
        self._with_ephemeral = with_ephemeral
        self._named_at: dict[str, float] = {}
        self._failed: set[str] = set()
        self._lock = BoundedSemaphore()

    def scrape(self) -> list[Any]:
        """The metrics of now, as prometheus_client has them. Servers that do not answer are shown as not up."""
        with self._lock:
            families = Families(self._with_ephemeral)
            answers = self._asked.ask(self._nsqds(families), include_clients=False, include_mem=False)
            for nsqd, said in answers.items():
                error = said if isinstance(said, NsqError) else None
                families.add_server("nsqd", _label(nsqd), error is None)
                self._tell(nsqd, error)
                if not isinstance(said, NsqError):
                    families.add_stats(_label(nsqd), said)
            return families.all()

    def _nsqds(self, families: Families) -> Iterator[str]:
        yield from self._always
        if self._poller is None:
            return
        now = monotonic()
        try:
            named = [str(nsqd.http) for nsqd in self._poller.nodes(self._timeout + 1.0) if nsqd.http]
        except NsqError as error:
            logger.warning("no nsqlookupd answers, known nsqds are asked: %s", error, extra=LOOKUP_UNANSWERED)
            named = list(self._named_at)
        self._named_at.update(dict.fromkeys(named, now))
        for nsqd in [each for each, at in self._named_at.items() if now - at > REMEMBERED]:
            del self._named_at[nsqd]
        answering = set(self._poller.answering())
        for lookupd in self._poller.lookupds:
            families.add_server("nsqlookupd", _label(lookupd), lookupd in answering)
        yield from self._named_at

    def _tell(self, nsqd: str, error: NsqError | None) -> None:
        if error is not None and nsqd not in self._failed:
            logger.warning("%s does not say how it is: %s", nsqd, error, extra=EXPORTER_NSQD_FAILED)
            self._failed.add(nsqd)
        elif error is None and nsqd in self._failed:
            logger.info("%s says how it is again", nsqd, extra=EXPORTER_NSQD_RECOVERED)
            self._failed.discard(nsqd)


def _label(server: str) -> str:
    return server.removeprefix("http://")
