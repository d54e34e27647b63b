"""What comes next in a channel of a partition, and what is done.

A ``DeliveryQueue`` reads the log as far as clients ask. ``Confirmed`` is where the channel would go on after a
change of leader (youzan/nsq: nsqd/channel.go, ConfirmBackendQueue).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from .filters import tag_of
from .log import PartitionLog, Record

_SORT_BATCH = 256


class Delivery:
    """A record on its way through one channel. Times are monotonic."""

    __slots__ = ("attempts", "delivered_at", "id", "is_placed", "priority", "record")

    def __init__(self, record: Record) -> None:
        self.id = record.id
        self.record = record
        self.attempts = 0
        self.priority = 0.0
        self.is_placed = False
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

    def confirm(self, deliveries: Iterable[Delivery]) -> None:
        """The records of these are done."""
        ahead, position = self.ahead, self.position
        for delivery in deliveries:
            sequence = delivery.record.sequence
            if sequence != position:
                ahead.add(sequence)
                continue
            position += 1
            while position in ahead:
                ahead.remove(position)
                position += 1
        self.position = position

    def limit(self, end: int) -> None:
        """Nothing from ``end`` on is done: the log ends there."""
        self.position = min(self.position, end)
        self.ahead = {sequence for sequence in self.ahead if sequence < end}

    def reset(self, position: int) -> None:
        """Everything before a position is done, and nothing from there on."""
        self.ahead.clear()
        self.position = position


class DeliveryQueue:
    """The deliveries that come next, in order: those given back, and those still to be read from the log.

    While there are clients with tags, the first of them is for clients with its tag, or for those without a tag
    where no client has it, and no other goes out before it: it blocks even clients that are idle
    (youzan/nsq: nsqd/channel.go, messagePump).
    """

    def __init__(self, log: PartitionLog, confirmed: Confirmed) -> None:
        self._log = log
        self._confirmed = confirmed
        self._cursor = log.end
        # Before this sequence some records were done already when the cursor was set back.
        self._reread_until = log.end
        self._waiting: deque[Delivery] = deque()
        self._tags: set[str] = set()

    @property
    def has_tags(self) -> bool:
        """Whether there are clients with a tag."""
        return bool(self._tags)

    @property
    def untagged_count(self) -> int:
        """Deliveries for clients without a tag, counting what is not read yet."""
        return self._log.end - self._cursor + len(self._waiting)

    def has_ready(self, tag: str, *, is_ordered: bool) -> bool:
        """Whether there may be something for clients with this tag."""
        if self._tags:
            head = self._head()
            return head is not None and self._tag_for(head.record) == tag
        return bool(self._waiting) or self._cursor < self._log.end

    def take(self, tag: str, count: int, *, is_ordered: bool) -> list[Delivery]:
        """Up to ``count`` deliveries for a client with this tag."""
        if self._tags:
            return self._take_from_head(tag, count)
        taken = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        if len(taken) < count:
            taken += map(Delivery, self._read(count - len(taken)))
        return taken

    def _take_from_head(self, tag: str, count: int) -> list[Delivery]:
        taken: list[Delivery] = []
        while len(taken) < count and (head := self._head()) is not None and self._tag_for(head.record) == tag:
            taken.append(self._waiting.popleft())
        return taken

    def _head(self) -> Delivery | None:
        if not self._waiting:
            self._waiting.extend(map(Delivery, self._read(1)))
        return self._waiting[0] if self._waiting else None

    def _read(self, count: int) -> list[Record]:
        """The next records that are not done."""
        while records := self._log.read(self._cursor, count):
            first, self._cursor = records[0].sequence, records[-1].sequence + 1
            if first >= self._reread_until:
                return records
            ahead = self._confirmed.ahead
            if left := [record for record in records if record.sequence not in ahead]:
                return left
        return []

    def _tag_for(self, record: Record) -> str:
        """The tag of the clients that a record is for."""
        tag = tag_of(record)
        return tag if tag in self._tags else ""

    def put_back(self, deliveries: Sequence[Delivery]) -> None:
        """Deliver these again, behind what waits."""
        self._waiting.extend(deliveries)

    def put_first(self, deliveries: Sequence[Delivery]) -> None:
        """Deliver these again, in their order, before what waits."""
        self._waiting.extendleft(reversed(deliveries))

    def add_tag(self, tag: str) -> None:
        """There is a client with this tag."""
        self._tags.add(tag)

    def drop_tag(self, tag: str) -> None:
        """There is no client with this tag any more."""
        self._tags.discard(tag)

    def rewind(self) -> None:
        """Deliver again what is not done."""
        self._forget()
        self._reread_until = self._cursor
        self._cursor = self._confirmed.position

    def go_to(self, position: int) -> None:
        """Go on at a record."""
        self._forget()
        self._cursor = self._reread_until = position

    def follow(self, log: PartitionLog) -> None:
        """Read another log, which is that of the new leader; ``rewind`` or ``go_to`` comes next."""
        self._log = log
        self._cursor = min(self._cursor, log.end)

    def _forget(self) -> None:
        self._waiting.clear()


class SortedDeliveryQueue(DeliveryQueue):
    """A queue that lets a message pass those that are for clients with another tag: kinder than the real server."""

    def __init__(self, log: PartitionLog, confirmed: Confirmed) -> None:
        super().__init__(log, confirmed)
        self._tagged: dict[str, deque[Delivery]] = {}

    def has_ready(self, tag: str, *, is_ordered: bool) -> bool:
        """Whether there may be something for clients with this tag."""
        if self._of(tag):
            return True
        if is_ordered and self._tagged and (self._waiting or any(self._tagged.values())):
            return False  # the next message is for clients with another tag
        return self._cursor < self._log.end

    def take(self, tag: str, count: int, *, is_ordered: bool) -> list[Delivery]:
        """Up to ``count`` deliveries for a client with this tag."""
        if not self._tagged:
            return super().take(tag, count, is_ordered=is_ordered)
        queue = self._of(tag)
        self._sort_until(queue, count, 1 if is_ordered else _SORT_BATCH)
        return [queue.popleft() for _ in range(min(count, len(queue)))]

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
        super().add_tag(tag)
        self._tagged.setdefault(tag, deque())

    def drop_tag(self, tag: str) -> None:
        """There is no client with this tag any more."""
        super().drop_tag(tag)
        self._waiting.extendleft(reversed(self._tagged.pop(tag)))

    def _of(self, tag: str) -> deque[Delivery]:
        return self._tagged[tag] if tag else self._waiting

    def _queue_for(self, record: Record) -> deque[Delivery]:
        return self._tagged.get(tag_of(record), self._waiting) if self._tagged else self._waiting

    def _sort_until(self, queue: deque[Delivery], count: int, step: int) -> None:
        """Read on until ``queue`` has enough; what is not for it goes where it belongs. A step of 1 is all of it."""
        while len(queue) < count and self._cursor < self._log.end:
            for record in self._read(step):
                self._queue_for(record).append(Delivery(record))
            if step == 1:
                return

    def _forget(self) -> None:
        super()._forget()
        for queue in self._tagged.values():
            queue.clear()
