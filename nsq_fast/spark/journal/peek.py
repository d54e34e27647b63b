"""Reads the messages of a channel and requeues them.

A connection may hold only so many, so they are taken window by window and
requeued at once. nsqd puts them at the end of its queue, so the windows go
through the queue once; an id that comes a second time is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, cast

import pyarrow as pa

from nsq_fast._codec import MESSAGE_ID_SIZE
from nsq_fast._frame import Columns
from nsq_fast.log_events import SPARK_READ_PARTIAL
from nsq_fast.runtime import ColumnSubscription
from nsq_fast.spark.options import SourceOptions
from nsq_fast.spark.schema import to_batch

from .quota import MAX_WINDOW
from .screen import take
from .slot import Slot

logger = logging.getLogger(__name__)

_WAIT = 1.0
_ROUNDS = 4


class Peek:
    """A slot of a batch read that consumes nothing."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self._seen: set[bytes] = set()

    def batches(self, options: SourceOptions) -> Iterator[pa.RecordBatch]:
        """The rows, each message once."""
        slot = self.slot
        for columns in self._windows():
            yield to_batch(
                cast(Any, columns),
                options.columns,
                options.headers_as,
                topic=slot.topic,
                partition=slot.partition,
                nsqd=str(slot.address),
                is_redesigned=slot.is_redesigned,
            )

    def _windows(self) -> Iterator[Any]:
        slot = self.slot
        if slot.address is None or not slot.rows:
            return
        subscription = ColumnSubscription(
            slot.address,
            slot.topic,
            slot.channel,
            slot.connection,
            partition=slot.partition,
            advanced=slot.is_redesigned,
        )
        with subscription:
            window = min(slot.rows, subscription.info.max_rdy_count, MAX_WINDOW)
            for _ in range(1 + _ROUNDS * slot.rows // window):
                columns = self._take(subscription, window)
                yield self._new(columns)
                if columns.count < window or len(self._seen) >= slot.rows:
                    break
            else:
                logger.warning(
                    "slot %s: %s of %s messages were seen",
                    slot.name,
                    len(self._seen),
                    slot.rows,
                    extra=SPARK_READ_PARTIAL,
                )

    def _take(self, subscription: ColumnSubscription, window: int) -> Columns:
        """A window, requeued at once: nothing is held while Spark works on its rows."""
        subscription.set_rdy(window)
        columns = subscription.fetch(_WAIT, window)
        subscription.set_rdy(0)
        if columns.count:
            subscription.requeue(columns.ids)
        return columns

    def _new(self, columns: Columns) -> Any:
        size = MESSAGE_ID_SIZE
        ids = [columns.ids[at : at + size] for at in range(0, size * columns.count, size)]
        unknown = set(ids)
        if len(unknown) == len(ids) <= self.slot.rows - len(self._seen) and self._seen.isdisjoint(unknown):
            self._seen |= unknown
            return columns
        rows = []
        for row, id in enumerate(ids):
            if id not in self._seen and len(self._seen) < self.slot.rows:
                self._seen.add(id)
                rows.append(row)
        return take(columns, rows)
