"""What waits in the channels of all topics of a query, by source; see ``backlog`` for one topic.

With several topics a source is named ``orders/10.0.0.1:4150``; with one, as before, ``10.0.0.1:4150``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from nsq_fast.errors import LookupFailed
from nsq_fast.spark.discovery import NO_ANSWER, TIMEOUT, TopicFinder, TopicServers
from nsq_fast.spark.options import SourceOptions
from nsq_fast.spark.reminder import Reminder

from .backlog import Backlog
from .plan import Depth, with_topic

logger = logging.getLogger(__name__)


class Backlogs:
    """The depths of the channels, and the servers that were asked for them. For the driver."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._finder = TopicFinder(options)
        self._topics: dict[str, Backlog] = {}
        self._reminder = Reminder(logger)

    def depths(self, timeout: float = TIMEOUT) -> Mapping[str, Depth]:
        """What waits at each source that answers; nothing of a topic whose servers do not. Raises ConfigError."""
        return self._gathered(lambda backlog: self._or_nothing(backlog, timeout), timeout)

    def fresh(self, timeout: float = TIMEOUT) -> Mapping[str, Depth]:
        """As ``depths``, but asked now. Raises LookupFailed, HttpError too."""
        return self._gathered(lambda backlog: backlog.fresh(timeout), timeout)

    def all_depths(self) -> Mapping[str, Depth]:
        """What waits at all sources. Raises LookupFailed when one cannot be had, or there is no such topic."""
        if not (topics := self._finder.topics(TIMEOUT)):
            raise LookupFailed(f"topicPattern={self._options.topic!r}: no topic matches it")
        for topic in topics:
            self.of(topic)
        return self._gathered(Backlog.all_depths, TIMEOUT)

    def servers(self, topic: str | None) -> TopicServers:
        """The servers of one of the topics; None: of the only one. Raises LookupFailed, HttpError, ConfigError."""
        return self.of(self._options.topic if topic is None else topic).servers()

    def of(self, topic: str) -> Backlog:
        """One of the topics."""
        if topic not in self._topics:
            self._topics[topic] = Backlog(self._options.for_topic(topic))
        return self._topics[topic]

    def metrics(self) -> dict[str, Any]:
        """How old what is known of the servers is, and which topics nobody has been heard of."""
        now = time.monotonic()
        ages = [now - each.answered_at for each in self._topics.values() if each.answered_at is not None]
        unknown = sorted(topic for topic, each in self._topics.items() if each.answered_at is None)
        return {"lookupAgeSeconds": round(max(ages, default=0.0), 1), **({"unknownTopics": unknown} if unknown else {})}

    def close(self) -> None:
        """Close the connections."""
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

    def _or_nothing(self, backlog: Backlog, timeout: float) -> Mapping[str, Depth]:
        key = f"topic {backlog.topic}: nothing is read until a server answers"
        try:
            found = backlog.depths(timeout)
        except NO_ANSWER as error:
            self._reminder.warn(key, f"{key}: {error}")
            return {}
        self._reminder.over(key)
        return found
