"""The stream reader: answers what Spark's driver asks about offsets, and reads batches.

Exactly once for Spark: a batch is a range of offsets in Spark's checkpoint, and
reading it gives the same rows each time. The channel of the options only
follows what Spark has committed, so that the servers keep what may be asked for
again, and show how far the query is behind.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from gevent import sleep

from nsq_fast._lazy import get_logger
from nsq_fast.errors import ConfigError, DataLost, HttpError, LookupFailed, NsqError
from nsq_fast.log_events import SPARK_DATA_LOST, SPARK_LOOKUP_FAILED, SPARK_POSITION_LATER, SPARK_WAITS
from nsq_fast.spark.discovery import TopicFinder, check_redesigned, check_replayable, retried
from nsq_fast.spark.options import SourceOptions
from nsq_fast.spark.streams import NO_LIMITS, Limits, StreamReader, heard
from nsq_fast.spark.versions import (
    InputPartition,
    ReadLimit,
    ReadMaxRows,
    plain_errors,
)

from .logs import (
    START_TIMEOUT,
    Identity,
    Log,
    Offsets,
    Position,
    Resolver,
    TopicLogs,
    TopicOffsets,
    by_topic,
    check_parts,
    checked_loss,
    distance,
    ends_before,
    lost_end,
    start_of,
)
from .reading import ReadsPieces, Route, pieces

logger: logging.Logger = get_logger(__name__)


TARGET_TIMEOUT = 300.0
"""How long one that has to reach an end waits for what is missing."""

IDLE_AFTER = 1.0
"""A query without news for so many seconds is idle."""

_TURN = 0.2
_BACKLOG = "backlogBytes"
_NO_NEWS = "no news from the servers"
T = TypeVar("T")


class ReplayStreamReader(ReadsPieces, StreamReader):
    """Micro-batches that are ranges of offsets."""

    def __init__(self, options: SourceOptions) -> None:
        super().__init__(options)
        self.identity: Identity = Identity(options.server_names, options.channel)
        # What the driver's reader has learnt; one in a task has nothing of it.
        self.topics: dict[str, TopicDriver] = {}
        self._finder = TopicFinder(options)
        self._read: TopicOffsets | None = None
        self._missing: tuple[str, ...] | None = None
        self._silent: dict[str, NsqError] = {}
        self._initial: Position | None = None
        self._target: TopicOffsets | None = None
        self._planned: TopicOffsets = {}
        self._last: dict[str, Any] | None = None
        self._news_at = time.monotonic()

    # Offsets

    @plain_errors
    def initialOffset(self) -> dict[str, Any]:
        """Where the options let a new query begin."""
        if self._initial is None:
            begins = {topic: driver.begin() for topic, driver in self._present().items()}
            self._initial = Position(begins, is_initial=True, identity=self.identity)
        self._last = self._initial.to_json()
        return self._last

    @plain_errors
    def prepareForTriggerAvailableNow(self) -> None:
        """From now on there is nothing but what is there now."""
        self._target = self._ends()

    @plain_errors
    def latestOffset(self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None) -> dict[str, Any]:
        """Where the next batch ends; ``start`` itself while there is nothing, or nobody to ask.

        PySpark before 4.2 gives neither argument. There the reader goes on from where it was itself. Where its channel
        is there already it may be a restart, of which it cannot know where it was: the first batch then ends where
        the logs end, whatever the limits.
        """
        is_told = start is not None
        start = self._last if start is None else start
        if start is None and not any(driver.has_channel() for driver in self._present().values()):
            start = self.initialOffset()
        if start is None:
            self._last = Position(self._ends(), identity=self.identity).to_json()
        else:
            self._last = self._latest(start, limit or self.getDefaultReadLimit())
            if not is_told and self._last is not start:
                self._tell_left()
        return self._last

    def _latest(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        position = self._position(start)
        self._has_read(position.offsets)
        self._planned = position.offsets
        self._planned = self._next_end(position.offsets, self._limits(limit))
        end = position.until(self._planned)
        return start if end is position else end._replace(identity=self.identity).to_json()

    def _limits(self, limit: ReadLimit) -> Limits:
        if isinstance(limit, ReadMaxRows):
            return Limits(limit.max_rows, self.options.max_bytes_per_trigger)
        # Spark passes over the limit that ``getDefaultReadLimit`` gives with the trigger "once", and only then.
        is_once = self.options.max_offsets_per_trigger is not None
        return NO_LIMITS if is_once else Limits(None, self.options.max_bytes_per_trigger)

    def _next_end(self, start: TopicOffsets, limits: Limits) -> TopicOffsets:
        if self._target is None:
            end = self._plan(start, limits, None)
            self._rest(is_idle=end == start)
            return end
        deadline = time.monotonic() + TARGET_TIMEOUT
        while not self._has_reached(start, self._target):
            must_answer = time.monotonic() > deadline
            end = self._plan(start, limits, self._target, must_answer=must_answer)
            if end != start:
                return end
            sleep(_TURN)
        return start

    def _rest(self, *, is_idle: bool) -> None:
        """Keep a query that has been idle for a while from asking each 10 ms: there is no news sooner than that."""
        now = time.monotonic()
        if not is_idle:
            self._news_at = now
        elif now - self._news_at > IDLE_AFTER:
            sleep(POLL_INTERVAL)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Where the logs end, how many bytes of each are not in a batch yet, and Kafka's metrics of that."""
        logs = {topic: driver.known_logs() for topic, driver in self.topics.items()}
        if not any(logs.values()):
            return None
        ends = {topic: {each: log.end for each, log in known.items()} for topic, known in logs.items()}
        backlog = {
            topic: {each: _waiting(self._planned.get(topic, {}).get(each, log.end), log) for each, log in known.items()}
            for topic, known in logs.items()
        }
        return {**by_topic(ends), _BACKLOG: by_topic(backlog), "metrics": self._metrics(backlog)}

    # Batches

    @plain_errors
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        self._last = end
        first, last = self._position(start), self._position(end)
        drivers = self._found()
        routes = {topic: driver.routes() for topic, driver in drivers.items()}
        begins = {
            topic: drivers[topic].begins(offsets, last.offsets.get(topic, {})) if topic in drivers else offsets
            for topic, offsets in start_of(first, last).items()
        }
        return [*pieces(begins, last.offsets, routes, self.options.min_partitions, self._cuts)]

    @plain_errors
    def commit(self, end: dict[str, Any]) -> None:
        """Spark is done with all before ``end``: the servers need not keep it for us."""
        offsets = self._position(end).offsets
        for topic, driver in self.topics.items():
            driver.release(offsets.get(topic, {}))

    def _cuts(self, topic: str, partition: int, begin: int, end: int) -> list[int]:
        return self.topics[topic].cuts(partition, begin, end) if topic in self.topics else []

    def stop(self) -> None:
        for driver in self.topics.values():
            driver.close()

    # Parts

    def _position(self, found: dict[str, Any]) -> Position:
        """A position of this query. Raises ConfigError when another one has made it."""
        position = Position.from_json(found, self.options)
        position.check(self.identity, self.options)
        return position

    def _ends(self) -> TopicOffsets:
        return {topic: driver.ends() for topic, driver in self._present().items()}

    def _plan(
        self, start: TopicOffsets, limits: Limits, target: TopicOffsets | None, *, must_answer: bool = False
    ) -> TopicOffsets:
        """Where the next batch ends: ``start`` while there is nothing, not enough yet, or nobody to ask.

        Args:
            target: ends that are not passed.
            must_answer: whether servers that cannot be asked are an error.

        Raises DataLost when the servers have less than ``start``; ConfigError.
        """
        self._silent = {}
        found = self._found()
        end = self._planned_ends(found, start, limits, target, must_answer)
        if self._silent:
            (error, *_) = self._silent.values()
            self._reminder.warn(_NO_NEWS, f"{_NO_NEWS} of topic {', '.join(self._silent)}: {error}")
        else:
            self._reminder.over(_NO_NEWS)
        return end

    def _planned_ends(
        self,
        found: Mapping[str, TopicDriver],
        start: TopicOffsets,
        limits: Limits,
        target: TopicOffsets | None,
        must_answer: bool,
    ) -> TopicOffsets:
        stretches = self._asked(
            found,
            lambda topic: found[topic].stretch(start.get(topic, {}), None if target is None else target.get(topic, {})),
            must_answer,
        )
        goes_back = any(stretch.goes_back(start.get(topic, {})) for topic, stretch in stretches.items())
        if limits.waits and target is None and not goes_back and not self._is_due(stretches, must_answer):
            return start
        stretches = self._limited(stretches, limits, must_answer)
        ends = {topic: behind(start.get(topic, {}), stretch) for topic, stretch in stretches.items()}
        return {**start, **{topic: offsets for topic, offsets in ends.items() if offsets}}

    def _has_reached(self, start: TopicOffsets, target: TopicOffsets) -> bool:
        """Whether nothing is left to read. A log that ends before the start may be another one, which was not read."""
        is_there = all(
            start.get(topic, {}).get(partition, 0) >= offset
            for topic, offsets in target.items()
            for partition, offset in offsets.items()
        )
        return is_there and not any(
            ends_before(driver.known_logs(), start.get(topic, {})) for topic, driver in self.topics.items()
        )

    def _has_read(self, offsets: TopicOffsets) -> None:
        """All before these offsets has been read: for the metrics."""
        now = time.monotonic()
        if self._read is None:
            self._throughput.begin(now)
        elif (size := distance(self._read, offsets)) > 0:
            self._throughput.add(size, now)
        self._read = offsets

    def _found(self, timeout: float | None = None) -> Mapping[str, TopicDriver]:
        for topic in self._finder.topics() if timeout is None else self._finder.topics(timeout):
            if topic not in self.topics:
                self.topics[topic] = TopicDriver(self.options.for_topic(topic))
        return self.topics

    def _present(self) -> Mapping[str, TopicDriver]:
        """When a query begins, the topics that there are. Raises LookupFailed for one that nobody knows."""
        if self._missing is None:
            self._missing = check_replayable(self.options, START_TIMEOUT)
        return {topic: driver for topic, driver in self._found(START_TIMEOUT).items() if topic not in self._missing}

    def _asked(self, topics: Iterable[str], ask: Callable[[str], T], must_answer: bool) -> dict[str, T]:
        """What is found of each topic whose servers answer; of the others it is noted that they do not.

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
                self._silent[topic] = error
        return found

    def _rows(self, stretches: Mapping[str, Stretch], must_answer: bool) -> dict[str, dict[int, int]]:
        return self._asked(stretches, lambda topic: self.topics[topic].rows(stretches[topic]), must_answer)

    def _is_due(self, stretches: Mapping[str, Stretch], must_answer: bool) -> bool:
        if not self._pace.is_needed:
            return True
        return self._pace.is_due(sum(sum(counts.values()) for counts in self._rows(stretches, must_answer).values()))

    def _limited(self, stretches: dict[str, Stretch], limits: Limits, must_answer: bool) -> dict[str, Stretch]:
        if limits.bytes is not None:
            shares = _shared_out({topic: stretch.sizes for topic, stretch in stretches.items()}, limits.bytes)
            stretches = {topic: cut_bytes(stretch, shares[topic]) for topic, stretch in stretches.items()}
        if limits.rows is not None:
            stretches = self._limited_in_rows(stretches, limits.rows, must_answer)
        return stretches

    def _limited_in_rows(self, stretches: dict[str, Stretch], limit: int, must_answer: bool) -> dict[str, Stretch]:
        rows = self._rows(stretches, must_answer)
        shares = _shared_out(rows, limit)
        self._left = max(0, sum(sum(counts.values()) for counts in rows.values()) - limit)
        return self._asked(
            rows,
            lambda topic: self.topics[topic].cut_rows(stretches[topic], rows[topic], shares[topic]),
            must_answer,
        )

    def _metrics(self, backlog: TopicOffsets) -> dict[str, Any]:
        """As Spark's Kafka connector names them; offsets are bytes here."""
        behind = [size for sizes in backlog.values() for size in sizes.values()]
        return {
            "minOffsetsBehindLatest": min(behind, default=0),
            "maxOffsetsBehindLatest": max(behind, default=0),
            "avgOffsetsBehindLatest": sum(behind) / len(behind) if behind else 0,
            "bytesPerSecond": self._throughput.now(),
            **heard(self.topics),
        }


def _shared_out(sizes: TopicOffsets, limit: int) -> dict[str, dict[int, int]]:
    """``share_out`` among the partitions of all topics."""
    shares = share_out({(topic, each): size for topic, own in sizes.items() for each, size in own.items()}, limit)
    return {topic: {each: shares[topic, each] for each in own} for topic, own in sizes.items()}


def _waiting(planned: int, log: Log) -> int:
    """How many bytes wait: all of a log that ends before what was read of it."""
    return log.end - (planned if planned <= log.end else log.start)


# One topic of a stream, as its driver sees it: its logs, asked for now and then, and the channel that it moves.


POLL_INTERVAL = 0.2
"""Fewest seconds between two questions to the servers: Spark asks 50 times a second."""

RELEASE_INTERVAL = 1.0


class TopicDriver:
    """The driver's view of one topic; ``options`` are for it alone.

    Attributes:
        answered_at: when its servers were last asked with success (monotonic); None: never.
        begun_at: when it was first asked for.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._topic_logs = TopicLogs(options)
        self.answered_at: float | None = None
        self.begun_at: float = time.monotonic()
        self._logs: dict[int, Log] = {}
        self._asked_at = self._released_at = float("-inf")
        self._told: dict[int, int] = {}  # where a query stood when it was told that it had lost something

    def begin(self) -> Offsets:
        """Where a new query begins. The channel is there then, and stands there. Raises ConfigError, NsqError."""
        self._check_channel(self._logs_at_start())
        resolver = Resolver(self._options, self._topic_logs)
        # Leaders may move or die between two questions: they are asked for again then.
        starts = retried(lambda left: resolver.starting(self._all_logs(left), None), START_TIMEOUT)
        for partition, log in self._logs.items():
            self._move_channel(partition, log, starts[partition])
        return starts

    def has_channel(self) -> bool:
        """Whether the channel is there, on any partition. Raises ConfigError, NsqError."""
        return any(self._options.channel in log.channels for log in self._logs_at_start().values())

    def ends(self) -> Offsets:
        """Where all logs end now. Raises ConfigError, NsqError."""
        return {partition: log.end for partition, log in self._logs_at_start().items()}

    def stretch(self, start: Offsets, target: Offsets | None) -> Stretch:
        """What there is for the next batch. Raises DataLost when the servers have less than ``start``; NsqError."""
        logs = self._recent_logs()
        if ends_before(logs, start):
            self._keep(self._topic_logs.caught_up(logs, start))
            logs = self._logs
        for partition, log in logs.items():
            offset = start.get(partition, log.start)
            if offset < log.start:
                reason = f"the log begins at {log.start}: retention has overtaken the query"
                self._tell(partition, offset, checked_loss(self._options, partition, (offset, log.start), reason))
            elif offset > log.end:
                self._tell(partition, offset, lost_end(self._options, partition, offset, log))
                self._topic_logs.forget_counts()  # the log is another one now
        return stretch_of(start, logs, target)

    def rows(self, stretch: Stretch) -> dict[int, int]:
        """How many records begin in it, by partition; a few too many while they are being published."""
        return {
            partition: self._topic_logs.rows(log, partition, stretch.begins[partition], stretch.ends[partition])
            for partition, log in stretch.logs.items()
        }

    def cut_rows(self, stretch: Stretch, rows: Mapping[int, int], shares: Mapping[int, int]) -> Stretch:
        """Its first ``shares`` records, of the ``rows`` that it has."""
        ends = dict(stretch.ends)
        for partition, log in stretch.logs.items():
            if shares[partition] < rows[partition]:
                found = self._topic_logs.behind_rows(log, partition, stretch.begins[partition], shares[partition])
                ends[partition] = min(found, ends[partition])
        return stretch._replace(ends=ends)

    def begins(self, start: Offsets, end: Offsets) -> Offsets:
        """Where the parts of a batch begin: at the beginning of the log where it ends before it began.

        Raises DataLost for one that does, unless the query may go on. Such a batch has rows only with PySpark before
        4.2, which lets the first one after a restart end without telling where it begins.
        """
        found = dict(start)
        for partition, log in self._logs.items():
            offset = start.get(partition, 0)
            if offset > end.get(partition, offset):
                self._tell(partition, offset, lost_end(self._options, partition, offset, log))
                found[partition] = log.start
        return found

    def known_logs(self) -> Mapping[int, Log]:
        return self._logs

    def routes(self) -> dict[int, Route]:
        """How to read the partitions, as far as is known; whoever finds it wrong looks for himself."""
        if not self._logs:
            try:
                self._recent_logs()
            except NsqError as error:
                logger.warning(
                    "topic %s: its leaders are not known: %s", self._options.topic, error, extra=SPARK_LOOKUP_FAILED
                )
        return {partition: Route.of(log) for partition, log in self._logs.items()}

    def cuts(self, partition: int, begin: int, end: int) -> list[int]:
        """Where a task's part of a batch ends by its number of records. Without a leader to ask it is one part."""
        log = self._logs.get(partition)
        try:
            return [] if log is None else self._topic_logs.cuts(log, partition, begin, end)
        except NsqError as error:
            logger.info("%s-%d: not cut: %s", log and log.nsqd, partition, error, extra=SPARK_WAITS)
            return []

    def release(self, offsets: Offsets) -> None:
        """Move the channel to where everything before it may be forgotten. When that fails, the next call does it."""
        now = time.monotonic()
        if now - self._released_at < RELEASE_INTERVAL:
            return
        self._released_at = now
        for partition, offset in offsets.items():
            log = self._logs.get(partition)
            if log is not None:
                self._move_channel(partition, log, offset)

    def close(self) -> None:
        self._topic_logs.close()

    def _recent_logs(self) -> dict[int, Log]:
        now = time.monotonic()
        if now - self._asked_at >= POLL_INTERVAL:
            self._asked_at = now
            self._keep(self._topic_logs.logs())
        return self._logs

    def _logs_at_start(self) -> Mapping[int, Log]:
        check_redesigned(self._options, START_TIMEOUT)
        return self._all_logs(START_TIMEOUT)

    def _all_logs(self, timeout: float) -> Mapping[int, Log]:
        self._keep(self._topic_logs.all_logs(timeout))
        return self._logs

    def _keep(self, logs: dict[int, Log]) -> None:
        if not logs:
            raise LookupFailed(f"topic {self._options.topic!r} is not known to {', '.join(self._options.server_names)}")
        self._logs = logs
        self.answered_at = time.monotonic()
        check_parts(self._options, logs)

    def _tell(self, partition: int, offset: int, loss: DataLost) -> None:
        if self._told.get(partition) != offset:
            self._told[partition] = offset
            logger.warning("%s", loss, extra=SPARK_DATA_LOST)

    # The channel

    def _check_channel(self, logs: Mapping[int, Log]) -> None:
        name = self._options.channel
        for partition, log in logs.items():
            clients = log.channels[name].clients if name in log.channels else 0
            if clients:
                raise ConfigError(
                    f"channel={name!r}: {clients} consumers are attached to it at {log.nsqd}, partition {partition};"
                    " the channel must be this query's own, which moves it as Spark commits"
                )

    def _move_channel(self, partition: int, log: Log, offset: int) -> None:
        if log.has_fixed_channels:
            return  # it is read from, and moves with that
        try:
            self._topic_logs.create_channel(log, partition)
            self._topic_logs.set_position(log.nsqd, partition, self._options.channel, offset)
        except HttpError as error:
            logger.info(
                "channel %s of partition %d is moved later: %s",
                self._options.channel,
                partition,
                error,
                extra=SPARK_POSITION_LATER,
            )


# Where the next batch ends: at all that there is, or after so many rows or bytes, shared out among the partitions.
#
# Without a limit a batch ends where the logs end. With one, each partition gets a
# share in proportion to what it has, as in Kafka's connector. For a limit in rows
# nsqd is asked where the record of that number begins: the batch has exactly so
# many rows, whatever their size.


Key = TypeVar("Key", bound=Any)


class Stretch(NamedTuple):
    """What the partitions of a topic have for the next batch: from where to where."""

    begins: Offsets
    ends: Offsets
    logs: Mapping[int, Log]

    @property
    def sizes(self) -> dict[int, int]:
        return {partition: self.ends[partition] - begin for partition, begin in self.begins.items()}

    def goes_back(self, start: Offsets) -> bool:
        """Whether a partition begins before where the query is."""
        return any(begin < start.get(partition, 0) for partition, begin in self.begins.items())


def stretch_of(start: Offsets, logs: Mapping[int, Log], target: Offsets | None) -> Stretch:
    """From ``start`` to where the logs end; never behind ``target``.

    A partition that is new, or has lost its beginning, goes on at its first record. One whose log ends before ``start``
    goes back to its first record in a batch without rows: what the log gets meanwhile may reach up to ``start``, and
    would then be taken for read.
    """
    begins = {}
    ends = {}
    for partition, log in logs.items():
        offset = start.get(partition, log.start)
        if offset > log.end:
            begins[partition] = ends[partition] = log.start
            continue
        begins[partition] = begin = max(offset, log.start)
        ends[partition] = max(begin, log.end if target is None else target.get(partition, 0))
    return Stretch(begins, ends, logs)


def cut_bytes(stretch: Stretch, shares: Mapping[int, int]) -> Stretch:
    """Its first bytes. A cut may fall within a record: that belongs to where it begins."""
    ends = {partition: stretch.begins[partition] + shares[partition] for partition in stretch.ends}
    return stretch._replace(ends=ends)


def behind(start: Offsets, stretch: Stretch) -> Offsets:
    """Where all partitions are behind a batch; those without a log in it stay where they are."""
    begins = stretch.begins
    moved = {each: end for each, end in stretch.ends.items() if each in start or end > begins[each]}
    return {**start, **moved}


def share_out(rows: Mapping[Key, int], limit: int) -> dict[Key, int]:
    """Share ``limit`` out in proportion to ``rows``: all of it when there is enough, to each no more than it has."""
    total = sum(rows.values())
    if total <= limit:
        return dict(rows)
    shares = {partition: limit * count // total for partition, count in rows.items()}
    left = limit - sum(shares.values())
    by_remainder = sorted(sorted(rows), key=lambda partition: -(limit * rows[partition] % total))
    for partition in by_remainder[:left]:
        shares[partition] += 1
    return shares
