"""What waits where, and which part of it is a batch: offsets, the depths of channels, slots. For the driver."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from nsq_fast._lazy import get_logger
from nsq_fast.client.admin import NsqdHTTPClient
from nsq_fast.errors import ConfigError, LookupFailed, NsqError
from nsq_fast.names import Address, parse_address
from nsq_fast.spark.discovery import (
    NO_ANSWER,
    TIMEOUT,
    Nsqd,
    TopicFinder,
    TopicServers,
    check_topics,
    discover,
    is_transient,
    nsqd_client,
    unknown_topic,
)
from nsq_fast.spark.options import SourceOptions
from nsq_fast.spark.streams import Reminder, heard

logger: logging.Logger = get_logger(__name__)


# Offsets, and how many rows of a batch come from where. Nothing here asks a server or reads a clock.
#
# An offset names the journal, the batch, and each slot with the rows planned for
# it. A batch is planned only once, because an nsqd that has left lookup since may
# have rows in the journal.
#
# A *source* is where messages wait: an nsqd, named by its address, or a partition
# of a redesigned topic, named ``p3``; where several topics are read, with the
# topic before it: ``orders/p3``. A *slot* is one task that reads from a source;
# ``#1`` marks the second slot of a source.


_PARTITION = re.compile(r"p([0-9]{1,4})\Z")


class Depth(NamedTuple):
    """What a channel holds at one source: messages that wait, are with consumers, come later, are held by a pause."""

    ready: int = 0
    in_flight: int = 0
    deferred: int = 0
    paused: int = 0

    @property
    def total(self) -> int:
        return sum(self)


class Offset(NamedTuple):
    """Where a query is: behind batch ``batch`` of the journal ``journal``.

    Attributes:
        slots: rows planned for each slot of that batch, by the slot's name.
    """

    journal: str
    batch: int = 0
    slots: Mapping[str, int] = {}

    def encode(self) -> dict[str, Any]:
        return {"j": self.journal, "batch": self.batch, "slots": dict(sorted(self.slots.items()))}

    @classmethod
    def decode(cls, offset: Mapping[str, Any]) -> Offset:
        """From what Spark kept. Raises ConfigError for what is not of this reader."""
        try:
            return cls(str(offset["j"]), int(offset["batch"]), {str(k): int(v) for k, v in offset["slots"].items()})
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ConfigError(
                f"the checkpoint holds {offset!r}, which is no offset of the journalled reader: it was made with"
                " another reader"
            ) from None

    def following(self, slots: Mapping[str, int]) -> Offset:
        return Offset(self.journal, self.batch + 1, slots)

    def numbered(self) -> list[tuple[int, str, int]]:
        """Number, name and rows of each slot; the number is what its files are called by."""
        return [(number, name, rows) for number, (name, rows) in enumerate(sorted(self.slots.items()))]


def partition_source(partition: int) -> str:
    return f"p{partition}"


def source_of(slot: str) -> str:
    return slot.partition("#")[0]


def with_topic(topic: str, source: str) -> str:
    """The name of a source where there are several topics."""
    return f"{topic}/{source}"


def topic_of(source: str) -> str | None:
    """The topic in the name of a source; None where there is only one."""
    topic, slash, _ = source.rpartition("/")
    return topic if slash else None


def find_source(source: str, servers: TopicServers) -> tuple[int | None, Address | None]:
    """The partition that a source is, if it is one, and where it is read now: None where nobody leads it."""
    place = source.rpartition("/")[2]
    if (found := _PARTITION.match(place)) is None:
        return None, parse_address(place, 0)
    leader = servers.leaders.get(int(found[1]))
    return int(found[1]), leader and leader.tcp


def plan_rows(available: Mapping[str, int], limit: int | None) -> dict[str, int]:
    """Share ``limit`` rows out evenly among the sources; what one source does not have goes to the others.

    A limit of None means all rows. Sources without rows are left out.
    """
    wanted = {source: rows for source, rows in sorted(available.items()) if rows > 0}
    if limit is None or sum(wanted.values()) <= limit:
        return wanted
    planned: dict[str, int] = {}
    left = limit
    for place, (source, rows) in enumerate(sorted(wanted.items(), key=lambda item: item[1])):  # the last has most
        share = left // (len(wanted) - place)
        planned[source] = min(rows, share)
        left -= planned[source]
    return {source: rows for source, rows in planned.items() if rows}


def plan_slots(rows: Mapping[str, int], least: int | None, most_rows: int | None = None) -> dict[str, int]:
    """Split each source's rows into slots, so that there are ``least`` of them or more, if there are rows enough.

    None of them has more than ``most_rows``.
    """
    if not rows:
        return {}
    each = -(-(least or 1) // len(rows))
    slots: dict[str, int] = {}
    for source, count in rows.items():
        parts = max(min(each, count), -(-count // most_rows) if most_rows else 1)
        for part in range(parts):
            name = source if part == 0 else f"{source}#{part}"
            slots[name] = count // parts + (part < count % parts)
    return slots


class Target:
    """What is left to read of what there was when a run with the trigger AvailableNow began."""

    def __init__(self, depths: Mapping[str, Depth]) -> None:
        self._left = {source: depth.total for source, depth in depths.items()}

    def bound(self, available: Mapping[str, int]) -> dict[str, int]:
        """``available``, as far as it belongs to the target."""
        return {source: min(rows, self._left.get(source, 0)) for source, rows in available.items()}

    def subtract(self, taken: Mapping[str, int]) -> None:
        """These were taken from the servers since."""
        for source, rows in taken.items():
            self._left[source] = max(0, self._left.get(source, 0) - rows)


# How many messages wait in a channel at each source, from /stats of the nsqds, at most every 200 ms. For the driver.
#
# An nsqd that does not answer is left out of this round, and warned about every minute. What
# lookup said is used until the next poll, and longer while lookup does not answer.


STATS_INTERVAL = 0.2
DISCOVERY_INTERVAL = 5.0
_STATS_TIMEOUT = 3.0
_SOON = 1.0
_AS_BEFORE = "lookup does not answer, and the servers of topics are taken to be as before"


class Backlog:
    """The depths of the channel of one topic, and the servers that were asked for them.

    Args:
        reminder: that of all topics, so that what they have in common is told once.
        is_peek: nothing is taken, so a channel is created only where messages wait for the first one.

    Attributes:
        silent: the nsqds that did not answer when they were last asked, and why.
        answered_at: when a source of the topic was last heard of (monotonic); None: never.
        begun_at: when it was first asked for.
        creates: whether the channel is created where it is not.
        has_channel: whether a source has the channel.
        others: the other channels that sources have.
    """

    def __init__(self, options: SourceOptions, reminder: Reminder, *, creates: bool, is_peek: bool = False) -> None:
        self._options = options
        self._is_peek = is_peek
        self.creates = creates
        self.has_channel: bool = False
        self.others: set[str] = set()
        self._servers: TopicServers | None = None
        self._discovered_at = self._asked_at = float("-inf")
        self._depths: dict[str, Depth] = {}
        self._clients: dict[Nsqd, NsqdHTTPClient] = {}
        self._reminder = reminder
        self.silent: dict[Nsqd, Exception] = {}
        self.answered_at: float | None = None
        self.begun_at: float = time.monotonic()

    @property
    def topic(self) -> str:
        return self._options.topic

    def servers(self, timeout: float = TIMEOUT) -> TopicServers:
        """The servers of the topic, as of the last few seconds; those known before stay when nobody answers soon.

        Raises LookupFailed, HttpError, ConfigError.
        """
        if self._servers is not None and time.monotonic() - self._discovered_at <= DISCOVERY_INTERVAL:
            return self._servers
        try:
            found = discover(self._options, timeout=timeout if self._servers is None else min(timeout, _SOON))
        except NO_ANSWER as error:
            if self._servers is None or not is_transient(error):
                raise
            self._reminder.warn(_AS_BEFORE, f"{_AS_BEFORE}: {error}")
            found = self._servers
        else:
            self._reminder.over(_AS_BEFORE)
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
            self._depths, self.silent = {}, {}
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
            self._reminder.warn(key, f"{unknown_topic(self._options)} Nothing is read of it until it is there")

    def fresh(self, timeout: float = TIMEOUT) -> Mapping[str, Depth]:
        """As ``depths``, but asked now."""
        self.forget()
        return self.depths(timeout)

    def forget(self) -> None:
        """Ask anew the next time."""
        self._asked_at = float("-inf")

    def close(self) -> None:
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
                self.has_channel = True
                found = Depth(*(int(channel.get(key) or 0) for key in ("depth", "in_flight_count", "deferred_count")))
                key = f"topic {self.topic}, channel {self._options.channel}: paused at nsqd {nsqd}"
                if channel.get("paused") or topic.get("paused"):
                    self._reminder.warn(key, f"{key}: nothing is read there until it is unpaused")
                    return found._replace(ready=0, paused=found.ready)
                self._reminder.over(key)
                return found
            self.others.add(str(channel.get("channel_name")))
        # Until there is a channel, nothing waits in it; messages of the topic come into the first one that is made.
        waits = int(topic.get("depth") or 0) if partition is None else 0
        # Who only looks needs no channel where it would see nothing: nobody would read from it, and it would fill up.
        if self.creates and (waits or not self._is_peek):
            self._client(nsqd).create_channel(self._options.topic, self._options.channel, partition=partition)
            self.has_channel = True
        return Depth(waits)


def _left_out(nsqd: Nsqd) -> str:
    return f"nsqd {nsqd} does not answer"


# What waits in the channels of all topics of a query, by source.
#
# With several topics a source is named ``orders/10.0.0.1:4150``; with one, as before, ``10.0.0.1:4150``.


_NOTHING = "nothing is read until a server answers"


class Backlogs:
    """The depths of the channels, and the servers that were asked for them. For the driver.

    Args:
        creates: whether channels are created where they are not.
        is_peek: see ``Backlog``.
    """

    def __init__(self, options: SourceOptions, *, creates: bool = True, is_peek: bool = False) -> None:
        self._options = options
        self._creates, self._is_peek = creates, is_peek
        self._finder = TopicFinder(options)
        self._topics: dict[str, Backlog] = {}
        self._reminder = Reminder(logger)

    def depths(self, timeout: float = TIMEOUT) -> Mapping[str, Depth]:
        """What waits at each source that answers; nothing of a topic whose servers do not. Raises ConfigError."""
        failures: dict[str, Exception] = {}

        def or_nothing(backlog: Backlog) -> Mapping[str, Depth]:
            try:
                return backlog.depths(timeout)
            except NO_ANSWER as error:
                failures[backlog.topic] = error
                return {}

        found = self._gathered(or_nothing, timeout)
        if failures:
            (error, *_) = failures.values()
            self._reminder.warn(_NOTHING, f"{_NOTHING}, of topic {', '.join(failures)}: {error}")
        else:
            self._reminder.over(_NOTHING)
        return found

    def fresh(self, timeout: float = TIMEOUT) -> Mapping[str, Depth]:
        """As ``depths``, but asked now. Raises LookupFailed, HttpError too."""
        return self._gathered(lambda backlog: backlog.fresh(timeout), timeout)

    def all_depths(self) -> Mapping[str, Depth]:
        """What waits at all sources. Raises LookupFailed when one cannot be had, or there is no such topic."""
        if not self._finder.topics(TIMEOUT):
            raise LookupFailed(f"topicPattern={self._options.topic!r}: no topic matches it")
        missing = check_topics(self._options)
        return self._gathered(lambda each: {} if each.topic in missing else each.all_depths(), TIMEOUT)

    def servers(self, topic: str) -> TopicServers:
        """The servers of one of the topics. Raises LookupFailed, HttpError, ConfigError."""
        return self.of(topic).servers()

    def of(self, topic: str) -> Backlog:
        if topic not in self._topics:
            own = self._options.for_topic(topic)
            self._topics[topic] = Backlog(own, self._reminder, creates=self._creates, is_peek=self._is_peek)
        return self._topics[topic]

    def check_channel(self) -> None:
        """Raise LookupFailed when the topics have other channels, and not that of the options: see ``all_depths``."""
        asked = self._topics.values()
        others = set[str]().union(*(each.others for each in asked))
        if others and not any(each.has_channel for each in asked):
            raise LookupFailed(
                f"channel {self._options.channel!r} of topic {self._options.topic!r} is not known to its servers, and"
                f" who only looks creates none there: is its name right? They have: {', '.join(sorted(others))}"
            )

    def create_channels(self) -> None:
        """From now on they are created where they are not."""
        self._creates = True
        for backlog in self._topics.values():
            backlog.creates = True
        self.forget()

    def forget(self) -> None:
        """Ask anew the next time."""
        for backlog in self._topics.values():
            backlog.forget()

    def metrics(self) -> dict[str, Any]:
        return heard(self._topics)

    def close(self) -> None:
        for backlog in self._topics.values():
            backlog.close()

    def _gathered(self, ask: Callable[[Backlog], Mapping[str, Depth]], timeout: float) -> dict[str, Depth]:
        found: dict[str, Depth] = {}
        for topic in self._finder.topics(timeout):
            depths = ask(self.of(topic))
            if self._options.reads_several:
                depths = {with_topic(topic, source): depth for source, depth in depths.items()}
            found.update(depths)
        return found
