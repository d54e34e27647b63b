"""Where the next batch ends: at all that there is, or after so many rows, shared out among the partitions.

Without a limit a batch ends where the logs end. With one, each partition gets a
share in proportion to what it has, as in Kafka's connector, and nsqd is asked
where the record of that number begins: the batch has exactly so many rows,
whatever their size.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from .log import Log, TopicLogs
from .position import Offsets

logger = logging.getLogger(__name__)

_MAX_KNOWN = 4096


class Planner:
    """Plans batches; remembers how many records lie before the offsets it has planned."""

    def __init__(self, topic_logs: TopicLogs) -> None:
        self._topic_logs = topic_logs
        self._counts: dict[tuple[int, int], int] = {}

    def end(self, start: Offsets, logs: Mapping[int, Log], limit: int | None, target: Offsets | None) -> Offsets:
        """Where a batch from ``start`` ends; never behind ``target``. ``limit``: most rows; None: no limit.

        Partitions without a log in ``logs`` stay where they are. Raises HttpError, RemoteProtocolError.
        """
        begins = {partition: begin(start, partition, log) for partition, log in logs.items()}
        ends = {partition: max(begins[partition], log.end) for partition, log in logs.items()}
        if target is not None:
            ends = {partition: max(begins[partition], target.get(partition, 0)) for partition in ends}
        if limit is not None:
            ends = self._limited(begins, ends, logs, limit)
        moved = {partition: end for partition, end in ends.items() if partition in start or end > begins[partition]}
        return {**start, **moved}

    def _limited(self, begins: Offsets, ends: Offsets, logs: Mapping[int, Log], limit: int) -> dict[int, int]:
        rows = {partition: self._rows(partition, begins, ends, log) for partition, log in logs.items()}
        shares = share_out(rows, limit)
        return {
            partition: ends[partition]
            if shares[partition] == rows[partition]
            else self._cut(partition, begins, ends, log, shares[partition])
            for partition, log in logs.items()
        }

    def _rows(self, partition: int, begins: Offsets, ends: Offsets, log: Log) -> int:
        """How many records begin in what is left; a few too many while they are being published."""
        if begins[partition] >= ends[partition]:
            return 0
        return max(0, self._count(partition, ends[partition], log) - self._count(partition, begins[partition], log))

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

    def _cut(self, partition: int, begins: Offsets, ends: Offsets, log: Log, rows: int) -> int:
        """The offset so many records behind the begin; the begin while nsqd cannot tell."""
        if not rows:
            return begins[partition]
        number = self._count(partition, begins[partition], log) + rows + 1
        record = self._topic_logs.record_number(log, partition, number)
        if record is None or record.number != number:
            logger.info("%s-%d: record %d is not there yet", log.nsqd, partition, number)
            return begins[partition]
        self._remember(partition, record.offset, record.number - 1)
        return min(record.offset, ends[partition])

    def _remember(self, partition: int, offset: int, count: int) -> None:
        if len(self._counts) > _MAX_KNOWN:  # only those of the last batch are asked for again
            self._counts.clear()
        self._counts[partition, offset] = count


def begin(start: Offsets, partition: int, log: Log) -> int:
    """Where a partition goes on: at its first record when it is new, or when that lies behind ``start``."""
    return max(start.get(partition, log.start), log.start)


def share_out(rows: Mapping[int, int], limit: int) -> dict[int, int]:
    """Share ``limit`` out in proportion to ``rows``: all of it when there is enough, to each no more than it has."""
    total = sum(rows.values())
    if total <= limit:
        return dict(rows)
    shares = {partition: limit * count // total for partition, count in rows.items()}
    left = limit - sum(shares.values())
    by_remainder = sorted(rows, key=lambda partition: (-(limit * rows[partition] % total), partition))
    for partition in by_remainder[:left]:
        shares[partition] += 1
    return shares
