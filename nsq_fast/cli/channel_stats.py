"""Statistics of topics and channels, added up over several nsqds: what `stat` shows and what `demo` checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class ChannelStats(NamedTuple):
    """One channel, or with ``channel`` empty one topic, over all nsqds. Counts of messages since nsqd started."""

    topic: str
    channel: str
    depth: int = 0
    backend_depth: int = 0
    in_flight: int = 0
    deferred: int = 0
    requeued: int = 0
    timed_out: int = 0
    messages: int = 0
    clients: int = 0
    paused: bool = False

    @property
    def memory_depth(self) -> int:
        """Messages that wait in memory."""
        return self.depth - self.backend_depth

    @property
    def unanswered(self) -> int:
        """Messages that wait, are in flight, or are deferred."""
        return self.depth + self.in_flight + self.deferred

    def plus(self, other: ChannelStats) -> ChannelStats:
        """The sum of the same channel on two nsqds."""
        counts = {name: getattr(self, name) + getattr(other, name) for name in _COUNTS}
        return self._replace(paused=self.paused or other.paused, **counts)


_COUNTS = [name for name in ChannelStats._fields if name not in {"topic", "channel", "paused"}]


def add_up(replies: Iterable[Mapping[str, Any]]) -> list[ChannelStats]:
    """Rows of nsqds' ``/stats`` replies: each topic, followed by its channels, in the order of their names."""
    rows: dict[tuple[str, str], ChannelStats] = {}
    for reply in replies:
        for row in _rows(reply):
            key = row[:2]
            rows[key] = rows[key].plus(row) if key in rows else row
    return [rows[key] for key in sorted(rows)]


def _rows(reply: Mapping[str, Any]) -> Iterable[ChannelStats]:
    """Of a partition its leader counts: replicas would count it again."""
    for topic in reply.get("topics") or ():
        if topic.get("is_leader") is False:
            continue
        name = topic["topic_name"]
        # That of a partition is all bytes ever written: youzan/nsq: nsqd/stats.go, NewTopicStats.
        depths = (0, 0) if "topic_partition" in topic else (topic["depth"], topic["backend_depth"])
        yield ChannelStats(
            name,
            "",
            depth=depths[0],
            backend_depth=depths[1],
            messages=topic["message_count"],
            paused=topic.get("paused", False),  # topics of redesigned servers cannot be paused
        )
        for channel in topic["channels"] or ():
            yield _channel_row(name, channel)


def _channel_row(topic: str, channel: Mapping[str, Any]) -> ChannelStats:
    clients = channel.get("client_count")
    return ChannelStats(
        topic,
        channel["channel_name"],
        depth=channel["depth"],
        backend_depth=channel["backend_depth"],
        in_flight=channel["in_flight_count"],
        deferred=channel["deferred_count"],
        requeued=channel["requeue_count"],
        timed_out=channel["timeout_count"],
        messages=channel["message_count"],
        clients=len(channel.get("clients") or ()) if clients is None else clients,
        paused=channel["paused"],
    )
