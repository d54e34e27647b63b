"""What the driver of a stream asks the servers: of all its topics, those too that appear while it runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from nsq_fast.errors import ConfigError, DataLost, NsqError
from nsq_fast.spark.discovery import TopicFinder
from nsq_fast.spark.options import SourceOptions
from nsq_fast.spark.pace import Limits, Pace
from nsq_fast.spark.reminder import Reminder
from nsq_fast.spark.throughput import Throughput

from .piece import Route
from .planning import Stretch, behind, cut_bytes, share_out
from .position import TopicOffsets, by_topic, distance
from .topic import TopicDriver

logger = logging.getLogger(__name__)

_BACKLOG = "backlogBytes"
T = TypeVar("T")


class Driver:
    """The driver's view of the topics of a query."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._finder = TopicFinder(options)
        self._pace = Pace(options)
        self._reminder = Reminder(logger)
        self._topics: dict[str, TopicDriver] = {}
        self._throughput = Throughput()
        self._read: TopicOffsets | None = None

    def begin(self, timeout: float) -> TopicOffsets:
        """Where a new query begins. Its channel is there then, and stands there. Raises ConfigError, NsqError."""
        return {topic: driver.begin(timeout) for topic, driver in self._found(timeout).items()}

    def is_new(self, timeout: float) -> bool:
        """Whether nobody has used the channel yet. Raises ConfigError, NsqError."""
        return not any(driver.has_channel(timeout) for driver in self._found(timeout).values())

    def ends(self, timeout: float) -> TopicOffsets:
        """Where all logs end now."""
        return {topic: driver.ends(timeout) for topic, driver in self._found(timeout).items()}

    def end(
        self, start: TopicOffsets, limits: Limits, target: TopicOffsets | None, *, must_answer: bool = False
    ) -> TopicOffsets:
        """Where the next batch ends: ``start`` while there is nothing, not enough yet, or nobody to ask.

        Args:
            target: ends that are not passed.
            must_answer: whether servers that cannot be asked are an error.

        Raises DataLost when the servers have less than ``start``; ConfigError.
        """
        found = self._found()
        stretches = self._asked(
            found,
            lambda topic: found[topic].stretch(start.get(topic, {}), None if target is None else target.get(topic, {})),
            must_answer,
        )
        if limits.waits and target is None and not self._is_due(stretches, must_answer):
            return start
        stretches = self._limited(stretches, limits, must_answer)
        for topic in stretches:
            self._reminder.over(_no_news(topic))
        ends = {topic: behind(start.get(topic, {}), stretch) for topic, stretch in stretches.items()}
        return {**start, **{topic: offsets for topic, offsets in ends.items() if offsets}}

    def has_read(self, offsets: TopicOffsets) -> None:
        """All before these offsets has been read: for the metrics."""
        now = time.monotonic()
        if self._read is None:
            self._throughput.begin(now)
        elif size := distance(self._read, offsets):
            self._throughput.add(size, now)
        self._read = offsets

    def routes(self) -> dict[str, dict[int, Route]]:
        """How to read the partitions, as far as is known."""
        return {topic: driver.routes() for topic, driver in self._found().items()}

    def release(self, offsets: TopicOffsets) -> None:
        """Let the channels follow: everything before may be forgotten."""
        for topic, driver in self._topics.items():
            driver.release(offsets.get(topic, {}))

    def report(self, planned: TopicOffsets) -> dict[str, Any] | None:
        """For the progress of the query: where the logs end, what of them is in no batch yet, and what is amiss."""
        ends = {topic: {p: log.end for p, log in each.known_logs().items()} for topic, each in self._topics.items()}
        if not any(ends.values()):
            return None
        backlog = {
            topic: {each: max(0, end - planned.get(topic, {}).get(each, end)) for each, end in offsets.items()}
            for topic, offsets in ends.items()
        }
        return {**by_topic(ends), _BACKLOG: by_topic(backlog), "metrics": self._metrics(backlog)}

    def close(self) -> None:
        """Close connections."""
        for driver in self._topics.values():
            driver.close()

    def _found(self, timeout: float | None = None) -> Mapping[str, TopicDriver]:
        for topic in self._finder.topics() if timeout is None else self._finder.topics(timeout):
            if topic not in self._topics:
                self._topics[topic] = TopicDriver(self._options.for_topic(topic))
        return self._topics

    def _asked(self, topics: Iterable[str], ask: Callable[[str], T], must_answer: bool) -> dict[str, T]:
        """What is found of each topic whose servers answer; of the others it is said that they do not.

        A server may die between any two questions: each one is asked through here.
        """
        found: dict[str, T] = {}
        for topic in topics:
            try:
                found[topic] = ask(topic)
            except (ConfigError, DataLost):  # noqa: PERF203  # each topic for itself
                raise
            except NsqError as error:
                if must_answer:
                    raise
                self._reminder.warn(_no_news(topic), f"{_no_news(topic)}: {error}")
        return found

    def _rows(self, stretches: Mapping[str, Stretch], must_answer: bool) -> dict[str, dict[int, int]]:
        """How many records there are, by topic and partition."""
        return self._asked(stretches, lambda topic: self._topics[topic].planner.rows(stretches[topic]), must_answer)

    def _is_due(self, stretches: Mapping[str, Stretch], must_answer: bool) -> bool:
        if not self._pace.is_needed:
            return True
        return self._pace.is_due(sum(sum(counts.values()) for counts in self._rows(stretches, must_answer).values()))

    def _limited(self, stretches: dict[str, Stretch], limits: Limits, must_answer: bool) -> dict[str, Stretch]:
        if limits.bytes is not None:
            sizes = {(topic, each): size for topic, one in stretches.items() for each, size in one.sizes.items()}
            shares = _by_topic(share_out(sizes, limits.bytes))
            stretches = {topic: cut_bytes(stretch, shares.get(topic, {})) for topic, stretch in stretches.items()}
        if limits.rows is not None:
            stretches = self._limited_in_rows(stretches, limits.rows, must_answer)
        return stretches

    def _limited_in_rows(self, stretches: dict[str, Stretch], limit: int, must_answer: bool) -> dict[str, Stretch]:
        rows = self._rows(stretches, must_answer)
        flat = {(topic, each): count for topic, counts in rows.items() for each, count in counts.items()}
        shares = _by_topic(share_out(flat, limit))
        return self._asked(
            rows,
            lambda topic: self._topics[topic].planner.cut_rows(stretches[topic], rows[topic], shares.get(topic, {})),
            must_answer,
        )

    def _metrics(self, backlog: TopicOffsets) -> dict[str, Any]:
        """As Spark's Kafka connector names them; offsets are bytes here."""
        behind = [size for sizes in backlog.values() for size in sizes.values()]
        now = time.monotonic()
        ages = [now - each.answered_at for each in self._topics.values() if each.answered_at is not None]
        unknown = sorted(topic for topic, each in self._topics.items() if each.answered_at is None)
        return {
            "minOffsetsBehindLatest": min(behind, default=0),
            "maxOffsetsBehindLatest": max(behind, default=0),
            "avgOffsetsBehindLatest": sum(behind) / len(behind) if behind else 0,
            "bytesPerSecond": round(self._throughput.rate(now)),
            "lookupAgeSeconds": round(max(ages, default=0.0), 1),
            **({"unknownTopics": unknown} if unknown else {}),
        }


def _no_news(topic: str) -> str:
    return f"topic {topic}: no news from its servers"


def _by_topic(shares: Mapping[tuple[str, int], int]) -> dict[str, dict[int, int]]:
    found: dict[str, dict[int, int]] = {}
    for (topic, partition), share in shares.items():
        found.setdefault(topic, {})[partition] = share
    return found
