"""Where the next batch ends: at all that there is, or after so many rows or bytes, shared out among the partitions.

Without a limit a batch ends where the logs end. With one, each partition gets a
share in proportion to what it has, as in Kafka's connector. For a limit in rows
nsqd is asked where the record of that number begins: the batch has exactly so
many rows, whatever their size.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from nsq_fast.log_events import SPARK_WAITS

from .log import Log, TopicLogs
from .position import Offsets

logger = logging.getLogger(__name__)

_MAX_KNOWN = 4096
Key = TypeVar("Key", bound=Any)


class Stretch(NamedTuple):
    """What the partitions of a topic have for the next batch: from where to where."""

    begins: Offsets
    ends: Offsets
    logs: Mapping[int, Log]

    @property
    def sizes(self) -> dict[int, int]:
        """Bytes, by partition."""
        return {partition: self.ends[partition] - begin for partition, begin in self.begins.items()}


class Planner:
    """Plans batches of one topic; remembers how many records lie before the offsets it has planned.

    Raises HttpError, RemoteProtocolError.
    """

    def __init__(self, topic_logs: TopicLogs) -> None:
        self._topic_logs = topic_logs
        self._counts: dict[tuple[int, int], int] = {}

    def rows(self, stretch: Stretch) -> dict[int, int]:
        """How many records begin in it, by partition; a few too many while they are being published."""
        return {partition: self._rows(partition, stretch) for partition in stretch.logs}

    def cut_rows(self, stretch: Stretch, rows: Mapping[int, int], shares: Mapping[int, int]) -> Stretch:
        """Its first ``shares`` records, of the ``rows`` that it has."""
        ends = {
            partition: end if shares[partition] == rows[partition] else self._cut(partition, stretch, shares[partition])
            for partition, end in stretch.ends.items()
        }
        return stretch._replace(ends=ends)

    def _rows(self, partition: int, stretch: Stretch) -> int:
        begin, end, log = stretch.begins[partition], stretch.ends[partition], stretch.logs[partition]
        if begin >= end:
            return 0
        return max(0, self._count(partition, end, log) - self._count(partition, begin, log))

    def _count(self, partition: int, offset: int, log: Log) -> int:
        """How many records begin before an offset."""
        if offset >= log.end:
            return log.messages
        known = self._counts.get((partition, offset))
        if known is None:
            record = self._topic_logs.record_at(log, partition, offset)
            known = log.messages if record is None else record.number - 1
            if record is not None:
                self._remember(partition, offset, known)
        return known

    def _cut(self, partition: int, stretch: Stretch, rows: int) -> int:
        """The offset so many records behind the begin; the begin while nsqd cannot tell."""
        begin, log = stretch.begins[partition], stretch.logs[partition]
        if not rows:
            return begin
        number = self._count(partition, begin, log) + rows + 1
        record = self._topic_logs.record_number(log, partition, number)
        if record is None or record.number != number:
            logger.info("%s-%d: record %d is not there yet", log.nsqd, partition, number, extra=SPARK_WAITS)
            return begin
        self._remember(partition, record.offset, record.number - 1)
        return min(record.offset, stretch.ends[partition])

    def _remember(self, partition: int, offset: int, count: int) -> None:
        if len(self._counts) > _MAX_KNOWN:  # only those of the last batch are asked for again
            self._counts.clear()
        self._counts[partition, offset] = count


def stretch_of(start: Offsets, logs: Mapping[int, Log], target: Offsets | None) -> Stretch:
    """From ``start`` to where the logs end; never behind ``target``.

    A partition that is new, or has lost its beginning, goes on at its first record.
    """
    begins = {partition: max(start.get(partition, log.start), log.start) for partition, log in logs.items()}
    ends = {partition: max(begins[partition], log.end) for partition, log in logs.items()}
    if target is not None:
        ends = {partition: max(begins[partition], target.get(partition, 0)) for partition in ends}
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
