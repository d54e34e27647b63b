"""How many messages wait in a channel at each source, from /stats of the nsqds, at most every 200 ms. For the driver.

An nsqd that does not answer is left out of this round, and warned about every minute. What
lookup said is used until the next poll, and longer while lookup does not answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from nsq_fast.errors import ConfigError, LookupFailed, NsqError
from nsq_fast.log_events import SPARK_LOOKUP_FAILED
from nsq_fast.runtime import NsqdHTTPClient
from nsq_fast.spark.discovery import (
    NO_ANSWER,
    TIMEOUT,
    Nsqd,
    TopicServers,
    discover,
    is_transient,
    nsqd_client,
    unknown_topic,
)
from nsq_fast.spark.options import SourceOptions
from nsq_fast.spark.reminder import Reminder

from .plan import Depth, partition_source

logger = logging.getLogger(__name__)

STATS_INTERVAL = 0.2
DISCOVERY_INTERVAL = 5.0
_STATS_TIMEOUT = 3.0
_SOON = 1.0


class Backlog:
    """The depths of the channel of one topic, and the servers that were asked for them.

    Attributes:
        silent: the nsqds that did not answer when they were last asked, and why.
        answered_at: when a source of the topic was last heard of (monotonic); None: never.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._servers: TopicServers | None = None
        self._discovered_at = self._asked_at = float("-inf")
        self._depths: dict[str, Depth] = {}
        self._clients: dict[Nsqd, NsqdHTTPClient] = {}
        self._reminder = Reminder(logger)
        self.silent: dict[Nsqd, Exception] = {}
        self.answered_at: float | None = None

    @property
    def topic(self) -> str:
        """Its name."""
        return self._options.topic

    def servers(self, timeout: float = TIMEOUT) -> TopicServers:
        """The servers of the topic, as of the last few seconds. Raises LookupFailed, HttpError, ConfigError."""
        if time.monotonic() - self._discovered_at > DISCOVERY_INTERVAL or not self._servers:
            self.discover(timeout)
        assert self._servers is not None
        return self._servers

    def discover(self, timeout: float = TIMEOUT) -> TopicServers:
        """Ask for the servers now; those known before stay when nobody answers soon."""
        try:
            found = discover(self._options, timeout=timeout if self._servers is None else min(timeout, _SOON))
        except NO_ANSWER as error:
            if self._servers is None or not is_transient(error):
                raise
            logger.warning(
                "the servers of topic %s are as before: %s", self._options.topic, error, extra=SPARK_LOOKUP_FAILED
            )
            found = self._servers
        if found.is_ordered:
            raise ConfigError(
                f"topic {self._options.topic} is ordered: its servers give one message at a time, and the journalled"
                " reader would have to wait for the disk after each; use the replayable reader"
            )
        self._discovered_at = time.monotonic()
        self._servers = found
        return found

    def depths(self, timeout: float = TIMEOUT) -> Mapping[str, Depth]:
        """What waits at each source that answers."""
        if time.monotonic() - self._asked_at >= STATS_INTERVAL:
            servers = self.servers(timeout)
            self._depths = {}
            for nsqd in servers.nsqds:
                self._depths.update(self._ask(nsqd, servers))
            self._asked_at = time.monotonic()
            self._tell_unknown()
        return self._depths

    def all_depths(self) -> Mapping[str, Depth]:
        """What waits at all sources. Raises LookupFailed when the topic is not known, or an nsqd does not answer."""
        found = self.depths()
        for nsqd, error in self.silent.items():
            if self._options.fail_on_data_loss or not found:
                raise LookupFailed(
                    f"nsqd {nsqd.tcp} cannot be reached, and its messages of topic {self._options.topic!r} would be"
                    f" missing: {error}; failOnDataLoss=false leaves it out, as long as another answers"
                ) from error
        if not found:
            raise unknown_topic(self._options)
        return found

    def _tell_unknown(self) -> None:
        key = f"topic {self._options.topic} is not known"
        if self._depths:
            self.answered_at = time.monotonic()
            self._reminder.over(key)
        elif not self.silent:
            self._reminder.warn(key, f"{unknown_topic(self._options)} The query waits for it")

    def fresh(self, timeout: float = TIMEOUT) -> Mapping[str, Depth]:
        """As ``depths``, but asked now."""
        self._asked_at = float("-inf")
        return self.depths(timeout)

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def _ask(self, nsqd: Nsqd, servers: TopicServers) -> dict[str, Depth]:
        try:
            topics = self._client(nsqd).stats(self._options.topic).get("topics") or []
            found = dict(self._channels(nsqd, servers, topics))
        except (NsqError, OSError) as error:
            self.silent[nsqd] = error
            self._reminder.warn(_left_out(nsqd), f"nsqd {nsqd} is left out until it answers: {error}")
            return {}
        self.silent.pop(nsqd, None)
        self._reminder.over(_left_out(nsqd))
        return found

    def _client(self, nsqd: Nsqd) -> NsqdHTTPClient:
        if nsqd not in self._clients:
            self._clients[nsqd] = nsqd_client(self._options, nsqd, _STATS_TIMEOUT)
        return self._clients[nsqd]

    def _channels(self, nsqd: Nsqd, servers: TopicServers, topics: list[Any]) -> list[tuple[str, Depth]]:
        found = []
        for topic in topics:
            if topic.get("topic_name") != self._options.topic:
                continue
            partition = int(topic["topic_partition"]) if servers.leaders else None
            if partition is not None and servers.leaders.get(partition) != nsqd:
                continue
            source = str(nsqd.tcp) if partition is None else partition_source(partition)
            found.append((source, self._depth(nsqd, topic, partition)))
        return found

    def _depth(self, nsqd: Nsqd, topic: Mapping[str, Any], partition: int | None) -> Depth:
        for channel in topic.get("channels") or []:
            if channel.get("channel_name") == self._options.channel:
                if channel.get("paused") or topic.get("paused"):
                    return Depth()
                return Depth(*(int(channel.get(key) or 0) for key in ("depth", "in_flight_count", "deferred_count")))
        # Until there is a channel, nothing waits in it; messages of the topic come into the first one that is made.
        self._client(nsqd).create_channel(self._options.topic, self._options.channel, partition=partition)
        return Depth(int(topic.get("depth") or 0) if partition is None else 0)


def _left_out(nsqd: Nsqd) -> str:
    return f"nsqd {nsqd} does not answer"
