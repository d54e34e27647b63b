"""What comes next in a channel of a partition, and what is done.

A ``DeliveryQueue`` reads the log as far as clients ask. On an ext topic it sorts what it reads by tag while
there are clients with tags. ``Confirmed`` is where the channel would go on after a change of leader
(youzan/nsq: nsqd/channel.go, ConfirmBackendQueue).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from .filters import tag_of
from .log import PartitionLog, Record

_ROUTE_BATCH = 256


class Delivery:
    """A record on its way through one channel. Times are monotonic."""

    __slots__ = ("attempts", "deadline", "delivered_at", "id", "record")

    def __init__(self, record: Record) -> None:
        self.id = record.id
        self.record = record
        self.attempts = 0
        self.deadline = 0.0
        self.delivered_at = 0.0


class Confirmed:
    """Which records of the log are done.

    Attributes:
        position: sequence of the first record that is not done.
        ahead: sequences of those behind it that are.
    """

    def __init__(self, position: int) -> None:
        self.position = position
        self.ahead: set[int] = set()

    def confirm(self, sequences: Iterable[int]) -> None:
        """These records are done."""
        ahead, position = self.ahead, self.position
        for sequence in sequences:
            if sequence != position:
                ahead.add(sequence)
                continue
            position += 1
            while position in ahead:
                ahead.remove(position)
                position += 1
        self.position = position

    def reset(self, position: int) -> None:
        """Everything before a position is done, and nothing from there on."""
        self.ahead.clear()
        self.position = position


class DeliveryQueue:
    """The deliveries that come next: those given back, and those still to be read from the log."""

    def __init__(self, log: PartitionLog, confirmed: Confirmed) -> None:
        self._log = log
        self._confirmed = confirmed
        self._cursor = log.end
        # Before this sequence some records were done already when the cursor was set back.
        self._reread_until = log.end
        self._untagged: deque[Delivery] = deque()
        self._tagged: dict[str, deque[Delivery]] = {}

    @property
    def is_sorted_by_tag(self) -> bool:
        """Whether there are clients with a tag."""
        return bool(self._tagged)

    @property
    def untagged_count(self) -> int:
        """Deliveries for clients without a tag, counting what is not read yet."""
        return self._log.end - self._cursor + len(self._untagged)

    def has_ready(self, tag: str, *, is_ordered: bool) -> bool:
        """Whether there may be something for clients with this tag."""
        if self._of(tag):
            return True
        if is_ordered and self._tagged and (self._untagged or any(self._tagged.values())):
            return False  # the next message is for clients with another tag
        return self._cursor < self._log.end

    def take(self, tag: str, count: int, *, is_ordered: bool) -> list[Delivery]:
        """Up to ``count`` deliveries for a client with this tag."""
        queue = self._of(tag)
        if self._tagged:
            self._sort_until(queue, count, 1 if is_ordered else _ROUTE_BATCH)
        taken = [queue.popleft() for _ in range(min(count, len(queue)))]
        if len(taken) < count and not self._tagged:
            taken += map(Delivery, self._read(count - len(taken)))
        return taken

    def _of(self, tag: str) -> deque[Delivery]:
        return self._tagged[tag] if tag else self._untagged

    def _read(self, count: int) -> list[Record]:
        records = self._log.read(self._cursor, count)
        if not records:
            return records
        first, self._cursor = records[0].sequence, records[-1].sequence + 1
        if first < self._reread_until:
            return [record for record in records if record.sequence not in self._confirmed.ahead]
        return records

    def _sort_until(self, queue: deque[Delivery], count: int, step: int) -> None:
        """Read on until ``queue`` has enough; what is not for it goes where it belongs. A step of 1 is all of it."""
        while len(queue) < count and self._cursor < self._log.end:
            for record in self._read(step):
                self._queue_for(record).append(Delivery(record))
            if step == 1:
                return

    def _queue_for(self, record: Record) -> deque[Delivery]:
        return self._tagged.get(tag_of(record), self._untagged) if self._tagged else self._untagged

    def put_back(self, deliveries: Sequence[Delivery]) -> None:
        """Deliver these again, behind what waits."""
        for delivery in deliveries:
            self._queue_for(delivery.record).append(delivery)

    def put_first(self, deliveries: Sequence[Delivery]) -> None:
        """Deliver these again, in their order, before what waits."""
        for delivery in reversed(deliveries):
            self._queue_for(delivery.record).appendleft(delivery)

    def add_tag(self, tag: str) -> None:
        """There is a client with this tag."""
        self._tagged.setdefault(tag, deque())

    def drop_tag(self, tag: str) -> None:
        """There is no client with this tag any more."""
        self._untagged.extendleft(reversed(self._tagged.pop(tag)))

    def rewind(self) -> None:
        """Deliver again what is not done."""
        self._forget()
        self._reread_until = self._cursor
        self._cursor = self._confirmed.position

    def go_to(self, position: int) -> None:
        """Go on at a record."""
        self._forget()
        self._cursor = self._reread_until = position

    def _forget(self) -> None:
        self._untagged.clear()
        for queue in self._tagged.values():
            queue.clear()
