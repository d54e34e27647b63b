"""Metrics from the ``/stats`` of nsqds, of both dialects. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

try:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
except ImportError as error:
    raise ImportError("nsq_fast.exporter needs prometheus-client: pip install 'nsq-fast[metrics]'") from error

PREFIX = "nsq_fast"
EPHEMERAL = "#ephemeral"
_NANOSECONDS = 1e9

Row = Mapping[str, Any]


@dataclass(frozen=True)
class _Figure:
    """One metric of a topic or channel; ``read`` takes its value from what nsqd says, None where that is nothing."""

    name: str
    help: str
    read: Callable[[Row], float | None]
    is_counter: bool = False


def _field(name: str) -> Callable[[Row], float | None]:
    return lambda row: row.get(name)


def _clients(row: Row) -> float:
    """Both dialects count them, by different names; old nsqds list them only."""
    for name in ("client_count", "client_num"):
        if row.get(name) is not None:
            return float(row[name])
    return len(row.get("clients") or ())


def _oldest(row: Row) -> float | None:
    """Redesigned servers only; 0 where nothing waits."""
    return row["depth_ts_nano"] / _NANOSECONDS if row.get("depth_ts_nano") else None


def _topic_depth(row: Row) -> float | None:
    """Original servers only: of a partition it is all bytes ever written (youzan/nsq: nsqd/stats.go, NewTopicStats)."""
    return None if "topic_partition" in row else row.get("depth")


# nsqio/nsq: nsqd/stats.go, TopicStats, ChannelStats; youzan/nsq: nsqd/stats.go, the same.
_TOPIC = (
    _Figure("depth", "Messages that wait in the topic, not in its channels.", _topic_depth),
    _Figure("messages", "Messages published since nsqd started.", _field("message_count"), True),
    _Figure("paused", "1 while the topic is paused.", _field("paused")),
)
_CHANNEL = (
    _Figure("depth", "Messages that wait for a consumer.", _field("depth")),
    _Figure("in_flight", "Messages that consumers hold.", _field("in_flight_count")),
    _Figure("deferred", "Messages that wait for their time.", _field("deferred_count")),
    _Figure("clients", "Consumers that are connected.", _clients),
    _Figure("paused", "1 while the channel is paused.", _field("paused")),
    _Figure("messages", "Messages that came into the channel since nsqd started.", _field("message_count"), True),
    _Figure("requeued", "Messages that consumers requeued since nsqd started.", _field("requeue_count"), True),
    _Figure("timed_out", "Messages not responded to in time since nsqd started.", _field("timeout_count"), True),
    _Figure("oldest_timestamp_seconds", "When the oldest message that waits was published.", _oldest),
)
_LATENCY = "Time from publish to FIN, as nsqd reckons it."


class Families:
    """The metrics of one scrape.

    Args:
        with_ephemeral: whether to show topics and channels that vanish with their last client. Their names are often
            made up anew each time, so that there is no end to the series.
    """

    def __init__(self, with_ephemeral: bool = False) -> None:
        self._with_ephemeral = with_ephemeral
        topic: tuple[str, ...] = ("nsqd", "topic", "partition")
        channel = (*topic, "channel")
        self._topic = [(figure, _family("topic", figure, topic)) for figure in _TOPIC]
        self._channel = [(figure, _family("channel", figure, channel)) for figure in _CHANNEL]
        self._latency = {
            labels: GaugeMetricFamily(f"{PREFIX}_{kind}_e2e_latency_seconds", _LATENCY, labels=(*labels, "quantile"))
            for kind, labels in (("topic", topic), ("channel", channel))
        }
        self._topic_labels, self._channel_labels = topic, channel
        self._up = {
            kind: GaugeMetricFamily(f"{PREFIX}_{kind}_up", f"1 if the {kind} answered this time.", labels=(kind,))
            for kind in ("nsqd", "nsqlookupd")
        }

    def all(self) -> list[Metric]:
        """All of them."""
        figures = [family for _, family in (*self._topic, *self._channel)]
        return [*self._up.values(), *figures, *self._latency.values()]

    def add_server(self, kind: str, address: str, is_up: bool) -> None:
        """Whether an ``nsqd`` or ``nsqlookupd`` has answered."""
        self._up[kind].add_metric((address,), float(is_up))

    def add_stats(self, nsqd: str, stats: Row) -> None:
        """What an nsqd answered. Of a partition only its leader is shown: replicas would count it twice."""
        for topic in stats.get("topics") or ():
            if topic.get("is_leader") is False or not self._is_shown(topic["topic_name"]):
                continue
            labels = nsqd, str(topic["topic_name"]), str(topic.get("topic_partition") or "")
            self._add(self._topic, self._topic_labels, labels, topic)
            for channel in topic.get("channels") or ():
                if self._is_shown(channel["channel_name"]):
                    name = str(channel["channel_name"])
                    self._add(self._channel, self._channel_labels, (*labels, name), channel)

    def _is_shown(self, name: str) -> bool:
        return self._with_ephemeral or not name.endswith(EPHEMERAL)

    def _add(
        self, figures: Iterable[tuple[_Figure, Any]], kind: tuple[str, ...], labels: tuple[str, ...], row: Row
    ) -> None:
        for figure, family in figures:
            value = figure.read(row)
            if value is not None:
                family.add_metric(labels, float(value))
        for each in (row.get("e2e_processing_latency") or {}).get("percentiles") or ():
            self._latency[kind].add_metric((*labels, f"{each['quantile']:g}"), each["value"] / _NANOSECONDS)


def _family(kind: str, figure: _Figure, labels: tuple[str, ...]) -> Any:
    family = CounterMetricFamily if figure.is_counter else GaugeMetricFamily
    return family(f"{PREFIX}_{kind}_{figure.name}", figure.help, labels=labels)
