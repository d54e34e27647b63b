"""What is left of a topic in the cluster from which it moves away: its nsqds say so by HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nsq_fast.config import LookupConfig
from nsq_fast.errors import LookupFailed
from nsq_fast.protocol.topology import Nsqd
from nsq_fast.runtime.admin import NsqdHTTPClient
from nsq_fast.runtime.lookup import LookupPoller

_FIELDS = ("depth", "in_flight_count", "deferred_count")


def messages_left(
    lookup: LookupPoller | None, topic: str, channel: str, config: LookupConfig, is_left: Callable[[], bool]
) -> int:
    """Messages of a channel in all nsqds of a topic: waiting, in flight, deferred, and not yet given to channels.

    ``is_left()`` says whether the consumer does not poll for the topic there now.

    Raises an NsqError when lookup, or one of the nsqds, cannot be asked.
    """
    if lookup is None:
        raise LookupFailed("there is no nsqlookupd to ask")
    return sum(_left_in(nsqd, topic, channel, config) for nsqd in _nsqds(lookup, topic, config, is_left))


def _nsqds(lookup: LookupPoller, topic: str, config: LookupConfig, is_left: Callable[[], bool]) -> tuple[Nsqd, ...]:
    """Where a topic is; one that is not polled for, because its old cluster is left, is asked about once."""
    topology = lookup.topology(topic)
    if topology is not None:
        return topology.nsqds
    lookup.add_topic(topic, is_sought=False)
    try:
        return lookup.wait_topology(topic, config.lookupd_timeout).nsqds
    finally:
        if is_left():
            lookup.remove_topic(topic)


def _left_in(nsqd: Nsqd, topic: str, channel: str, config: LookupConfig) -> int:
    if nsqd.http is None:
        raise LookupFailed(f"lookup names no HTTP port of {nsqd.tcp}")
    with NsqdHTTPClient(*nsqd.http, timeout=config.lookupd_timeout) as client:
        stats = client.stats(topic, include_clients=False)
    return sum(_left_of(each, channel) for each in stats.get("topics") or ())


def _left_of(topic: Mapping[str, Any], channel: str) -> int:
    """What the stats of one topic say."""
    channels = [each for each in topic.get("channels") or () if each.get("channel_name") == channel]
    waiting = sum(int(each.get(field) or 0) for each in channels for field in _FIELDS)
    # A topic with partitions is a log, which channels read: youzan/nsq: nsqd/stats.go, TopicStats
    return waiting + (0 if "topic_partition" in topic else int(topic.get("depth") or 0))
