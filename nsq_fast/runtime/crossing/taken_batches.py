"""Batches that a program takes by itself, message after message: ``for message in consumer`` in another thread."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from nsq_fast._codec import Message
from nsq_fast.errors import RequeueMessage
from nsq_fast.runtime.consuming.outside_handlers import Batch, OutsideHandlers
from nsq_fast.runtime.loop_turns import SLICE


class TakenBatches(OutsideHandlers):
    """Brings batches to those who iterate.

    Args:
        bring: called with each batch, in the hub thread; it does not block.

    Attributes:
        cursors: of those who iterate.
    """

    max_batch = 256

    def __init__(self, bring: Callable[[Batch], object]) -> None:
        super().__init__()
        self._bring = bring
        self.cursors: list[Cursor] = []

    def _begin(self, batch: Batch) -> None:
        self._bring(batch)

    def is_held_by(self, owner: object) -> bool:
        """Whether ``owner``, who iterates, is at a message."""
        return any(cursor.owner == owner and cursor.is_holding for cursor in list(self.cursors))

    def done(self, batch: Batch) -> None:
        """Nothing of the batch is used any more. In any thread."""
        self._done(batch)


class Cursor:
    """Goes through batches. All of it belongs to one thread, or one loop: that of who iterates.

    Attributes:
        owner: the task, or the thread, that took the batch.
    """

    def __init__(self, batches: TakenBatches) -> None:
        self.owner: object = None
        self._batches = batches
        self._batch: Batch | None = None
        self._end = 0.0
        batches.cursors.append(self)

    @property
    def is_holding(self) -> bool:
        """Whether it is at a message."""
        return self._batch is not None and self._batch.current is not None

    def begin(self, batch: Batch) -> None:
        """Go on with another batch. The one before is over."""
        self._batch = batch
        self._end = monotonic() + SLICE

    def next(self) -> Message | None:
        """The one before is done; take the next message of the batch. None: the batch is over."""
        batch = self._batch
        if batch is None:
            return None
        is_over = batch.current is not None and monotonic() > self._end
        batch.end(None)
        message: Message | None = None if is_over else batch.take()
        if message is None:
            self._leave_batch(batch)
        return message

    def leave(self) -> None:
        """The loop is left: give back the message of this round, unless it is responded to or asynchronous."""
        batch = self._batch
        if batch is None:
            return
        if batch.current is not None:
            batch.end(None if batch.current.is_async() else RequeueMessage(0.0, backoff=False))
        self._leave_batch(batch)

    def end(self) -> None:
        """Nobody goes on with it. Idempotent."""
        self.leave()
        if self in self._batches.cursors:
            self._batches.cursors.remove(self)

    def _leave_batch(self, batch: Batch) -> None:
        self._batch = None
        self._batches.done(batch)
