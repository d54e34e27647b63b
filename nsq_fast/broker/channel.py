"""A channel of the original: what waits in memory and on disk, what is in flight, and the clients.

nsqio/nsq: nsqd/channel.go.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from gevent import Greenlet, spawn_later

from nsq_fast._lazy import get_logger
from nsq_fast.broker.journal import Journal, Position, read_all
from nsq_fast.broker.message import Exiting, Message
from nsq_fast.broker.queue import SAMPLE_OF, BaseChannel, InFlight, LatencyWindow
from nsq_fast.log_events import BROKER_READ_FAILED, BROKER_READ_RECOVERED

if TYPE_CHECKING:
    from nsq_fast.broker.connection import Connection

logger: logging.Logger = get_logger("nsq_fast.broker.channel")


def ranges_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Numbers as ranges of (first, one after the last)."""
    return joined((number, number + 1) for number in numbers)


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in order, those that touch as one. None of them overlap."""
    found: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if found and found[-1][1] == first:
            found[-1] = (found[-1][0], end)
        else:
            found.append((first, end))
    return found


_MOST_LEFT_OUT = 20_000
"""A channel that leaves out more records fills its memory again when it leaves out fewer."""


class BackendQueue:
    """The backend queue of one channel: the messages for which there was no room in its memory, first in, first out.

    In the original it is a file of its own (nsqio/nsq: nsqd/channel.go, put; nsqio/go-diskqueue). Here all channels of
    a topic share the topic's log, so nothing is written twice: a queue is the place from which on its channel reads the
    log, and the numbers of the records behind that place that it leaves out, as the channel has them in memory or is
    done with them. A message that comes back after a delivery stays in memory, and has its place in the order.

    Args:
        log: the topic's. Its readers may not pass what the topic holds back: that is in no queue yet.
        sort_out: takes the messages that are read, and gives back those that are ready; it keeps the others.

    Attributes:
        cursor: where the log is to be read next; None: nothing in it is for this queue.
        is_stalled: whether the last read has failed. ``take`` tries it again.
    """

    __slots__ = ("_left_out", "_log", "_sort_out", "cursor", "is_stalled", "read_ahead", "returned")

    def __init__(self, log: Journal, sort_out: Callable[[Sequence[Message]], Iterable[Message]]) -> None:
        self.cursor: Position | None = None
        self.is_stalled: bool = False
        self._log = log
        self._sort_out = sort_out
        self._left_out: set[int] = set()
        self.read_ahead: deque[Message] = deque()
        # Messages that came back, each with the number of the record that it comes before.
        self.returned: deque[tuple[int, Message]] = deque()

    def __len__(self) -> int:
        return len(self.read_ahead) + len(self.returned) + self._unread_count

    def __bool__(self) -> bool:
        return self.cursor is not None or bool(self.read_ahead) or bool(self.returned)

    @property
    def _unread_count(self) -> int:
        if self.cursor is None:
            return 0
        log, left_out = self._log, len(self._left_out)
        if log.has_losses:  # there may be numbers without records
            left_out = sum(log.count(number, number + 1) for number in self._left_out)
        return max(0, log.count(self.cursor.sequence, log.readable_end) - left_out)

    @property
    def leaves_out_many(self) -> bool:
        return len(self._left_out) >= _MOST_LEFT_OUT

    # --- in ----------------------------------------------------------------------------------------------------------

    def add_from(self, position: Position) -> None:
        """Add all that the log has from a position on, and what will be behind that, but for what is left out."""
        if self.cursor is None and position.sequence < self._log.readable_end:
            self.cursor = position

    def leave_out(self, first: int, end: int) -> None:
        """Leave out the records from number ``first`` to before ``end``."""
        if self.cursor is not None:
            self._left_out.update(range(max(first, self.cursor.sequence), end))

    def put_back(self, messages: Sequence[Message]) -> None:
        """Add messages that were delivered or deferred."""
        end = self._log.readable_end
        self.returned.extend((end, message) for message in messages)

    def restore(self, cursor: Position, left_out: Iterable[int], delivered: Iterable[Message]) -> None:
        """Begin at a position, and leave out records behind it; ``delivered``: some of them that were before."""
        self.returned.extend((message.sequence, message) for message in delivered)
        self.add_from(cursor)
        if self.cursor is not None:
            self._left_out.update(number for number in left_out if number >= cursor.sequence)

    # --- out ---------------------------------------------------------------------------------------------------------

    def take(self, count: int) -> list[Message]:
        """Take out the next messages; fewer than ``count`` only when there are no more, or it ``is_stalled``."""
        read_ahead = self.read_ahead
        if count <= len(read_ahead) and not self.returned:
            return [read_ahead.popleft() for _ in range(count)]
        taken: list[Message] = []
        while len(taken) < count:
            if self._comes_back_next():
                taken.append(self.returned.popleft()[1])
            elif read_ahead:
                at_once = 1 if self.returned else min(count - len(taken), len(read_ahead))
                taken += [read_ahead.popleft() for _ in range(at_once)]
            elif self.cursor is None or not self._read(self.cursor):
                break
        return taken

    def _comes_back_next(self) -> bool:
        if not self.returned:
            return False
        before = self.returned[0][0]
        if self.read_ahead:
            return before <= self.read_ahead[0].sequence
        return self.cursor is None or before <= self.cursor.sequence

    def _read(self, cursor: Position) -> bool:
        """Read ahead; whether that was possible."""
        try:
            messages, end = self._log.read(cursor)
        except OSError as error:
            if not self.is_stalled:
                where = self._log.folder or "a log in memory"
                text = "messages of %s cannot be read: %s; they stay where they are, and it is tried again"
                logger.error(text, where, error, extra=BROKER_READ_FAILED)
            self.is_stalled = True
            return False
        if self.is_stalled:
            self.is_stalled = False
            logger.warning("messages of %s can be read again", self._log.folder, extra=BROKER_READ_RECOVERED)
        left_out = self._left_out
        if left_out:
            messages, read = [each for each in messages if each.sequence not in left_out], messages
            left_out.difference_update([each.sequence for each in read])
        self.read_ahead.extend(self._sort_out(messages))
        self.cursor = end if end.sequence < self._log.readable_end else None
        if self.cursor is None:
            left_out.clear()
        return True

    def clear(self) -> None:
        self.cursor = None
        self._left_out.clear()
        self.read_ahead.clear()
        self.returned.clear()

    # --- for a checkpoint --------------------------------------------------------------------------------------------

    def in_memory(self) -> Iterator[Message]:
        """Every message of the queue that is in memory."""
        yield from self.read_ahead
        yield from (message for _, message in self.returned)

    def unread(self) -> list[tuple[int, int]]:
        """The numbers of the records that were not read yet: ranges of (first, one after the last)."""
        ranges: list[tuple[int, int]] = []
        if self.cursor is not None:
            first, end = self.cursor.sequence, self._log.readable_end
            for number in (*sorted(self._left_out), end):
                if first < number:
                    ranges.append((first, number))
                first = max(first, number + 1)
        return ranges


Run = tuple[int, int, "Message | None"]
"""Records: the first, the one after the last, and None, of such as were never delivered nor deferred; or a single one
that was, with its message."""


def add_to_runs(runs: deque[Run], message: Message) -> None:
    """Add the record of a message behind those that there are: nearly all follow each other."""
    number = message.sequence
    if message.attempts or message.due:
        runs.append((number, number + 1, message))
    elif runs and runs[-1][1] == number and runs[-1][2] is None:
        runs[-1] = (runs[-1][0], number + 1, None)
    else:
        runs.append((number, number + 1, None))


class MemoryRuns:
    """Which records a queue in memory has, for checkpoints: what has come and gone is added up, nothing else is walked.

    Messages come in behind, and go out in front, as they came in. So what is behind the last one of the time before
    is new, and what the count lacks has gone. A message that was taken out and came back has one attempt more.
    """

    def __init__(self) -> None:
        self._runs: deque[Run] = deque()
        self._count = 0
        self._last: tuple[Message | None, int] = None, 0

    def of(self, memory: deque[Message]) -> Iterable[Run]:
        """The records of ``memory``, in its order."""
        last, attempts = self._last
        new = []
        for message in reversed(memory):
            if message is last and message.attempts == attempts:
                break
            new.append(message)
        else:
            self._runs.clear()
            self._count = 0
        self._leave_out(self._count + len(new) - len(memory))
        for message in reversed(new):
            add_to_runs(self._runs, message)
        self._count = len(memory)
        self._last = (memory[-1], memory[-1].attempts) if memory else (None, 0)
        return self._runs

    def _leave_out(self, count: int) -> None:
        while count > 0:
            first, end, message = self._runs.popleft()
            if end - first > count:
                self._runs.appendleft((first + count, end, message))
            count -= end - first


_REFILL = 2000
_RETRY_INTERVAL = 0.1
"""Seconds until messages that could not be read are tried again."""


class Channel(BaseChannel[Message]):
    """One channel of a topic: a queue in memory, and one on disk for what memory has no room for.

    nsqio/nsq: nsqd/channel.go, put; nsqd/protocol_v2.go, messagePump. A message takes the place in memory that is free
    when it comes, whatever waits on disk, and a delivery takes the first one of either queue at random: so the order is
    kept only as long as all messages have room in memory.

    Args:
        capacity: messages that memory has room for.
        latency: how long its messages take until they are finished; None: not measured.
        preserve_order: messages go behind those that wait on disk, and come after those in memory.

    Attributes:
        message_count: messages that came in, ever.
        is_exiting: closed or deleted.
        memory: the queue in memory, and ``runs``, its records for checkpoints; ``backend``: the one on disk.
    """

    def __init__(
        self,
        topic_name: str,
        name: str,
        log: Journal,
        capacity: int,
        on_unused: Callable[[], None],
        latency: LatencyWindow | None = None,
        *,
        preserve_order: bool = False,
    ) -> None:
        super().__init__(name, on_unused)
        self.memory: deque[Message] = deque()
        self.runs: MemoryRuns = MemoryRuns()
        self.backend: BackendQueue = BackendQueue(log, self._sort_out)
        self.log = log
        self._capacity = capacity
        self._preserve_order = preserve_order
        self.topic_name = topic_name
        self.is_exiting: bool = False
        self.message_count: int = 0
        self.latency = latency
        self.on_change: Callable[[], None] = lambda: None
        self._retry: Greenlet[..., None] | None = None

    @property
    def depth(self) -> int:
        """Messages that wait, in memory and on disk; those that are deferred do not count."""
        return len(self.memory) + len(self.backend)

    # --- messages in -------------------------------------------------------------------------------------------------

    def _room(self) -> int:
        if self.backend and (self._preserve_order or self.backend.leaves_out_many):
            return 0
        return max(0, self._capacity - len(self.memory))

    def put(self, messages: Sequence[Message], start: Position) -> None:
        """Take new messages, which the log holds from ``start`` on."""
        self.message_count += len(messages)
        if self.is_ephemeral:
            self._put_while_room(messages)
        else:
            room = self._room()
            self.memory.extend(messages[:room] if room < len(messages) else messages)
            if room < len(messages) or self.backend:
                in_memory = min(room, len(messages))
                self._go_on_behind(start.sequence, Position(start.sequence + in_memory, start.offset))
        self.notify()

    def _go_on_behind(self, first: int, end: Position) -> None:
        """Have in the backend queue what the log has from ``end`` on, and not the records from ``first`` to there."""
        self.backend.leave_out(first, end.sequence)
        self.backend.add_from(end)

    def _put_while_room(self, messages: Sequence[Message]) -> None:
        """What an ephemeral one has no room for is lost; what clients would take at once has room, too."""
        takers = 0 if self.is_paused else sum(max(0, each.rdy - len(each.in_flight)) for each in self._waiting)
        self.memory.extend(messages[: max(0, self._capacity + takers - len(self.memory))])

    def put_back(self, messages: Sequence[Message]) -> None:
        """Those are never put on disk again."""
        if self._preserve_order:
            self.memory.extend(messages)
        elif self.is_ephemeral:
            self._put_while_room(messages)
        else:
            room = max(0, self._capacity - len(self.memory))
            self.memory.extend(messages[:room])
            self.backend.put_back(messages[room:])

    def defer(self, message: Message) -> None:
        """Take a message that is not ready before its ``due``."""
        self.deferred.put((message,), message.due)

    def release(self, held_at: Position, count: int, deferred: Iterable[Message]) -> None:
        """Take the records that the topic held back from ``held_at`` on.

        ``deferred``: those of them that are known to be deferred. They need no room.
        """
        self.message_count += count
        if self.is_ephemeral:
            self._release_while_room(held_at)
        else:
            self._release(held_at, deferred)
        self.notify()

    def _release(self, held_at: Position, deferred: Iterable[Message]) -> None:
        position, room = held_at, self._room()
        while room > 0 and position.sequence < self.log.end:
            try:
                messages, position = self.log.read(position, min(self.log.end, position.sequence + room))
            except OSError:
                break  # the backend queue reads on, when it can
            ready = self._sort_out(messages)
            self.memory.extend(ready)
            room -= len(ready)
        self._go_on_behind(held_at.sequence, position)
        for message in deferred:
            if message.sequence >= position.sequence:
                self.defer(message.copy())
                self.backend.leave_out(message.sequence, message.sequence + 1)

    def _release_while_room(self, position: Position) -> None:
        while position.sequence < self.log.end:
            try:
                messages, position = self.log.read(position)
            except OSError as error:
                # It has no place on disk to read them from later, and the other channels must have theirs.
                logger.error("an ephemeral channel misses messages: %s", error, extra=BROKER_READ_FAILED)
                break
            self._put_while_room(self._sort_out(messages))

    def restore(self, cursor: Position, left_out: Iterable[int], delivered: Sequence[Message]) -> None:
        """Take what was not finished before a restart: the log from ``cursor`` on, but for ``left_out``; ``delivered``.

        nsqio/nsq: nsqd/channel.go, flush: nothing is in memory then.
        """
        self.backend.restore(cursor, left_out, self._sort_out(delivered))

    def _sort_out(self, messages: Sequence[Message]) -> list[Message]:
        """Put those aside that are not ready yet; the others."""
        now = time.time()
        ready = [message for message in messages if message.due <= now]
        if len(ready) < len(messages):
            for message in messages:
                if message.due > now:
                    self.defer(message)
        return ready

    # --- messages out ------------------------------------------------------------------------------------------------

    def deliver(self, client: Connection, count: int, sample_rate: int = 0) -> list[bytes]:
        """Up to ``count`` frames for a client; of several clients each gets its share, so that the first has not all.

        With a ``sample_rate`` the messages that it leaves out are gone (nsqio/nsq: nsqd/protocol_v2.go, messagePump).
        """
        if len(self.clients) > 1:
            count = min(count, self.depth // len(self.clients) + 1)
        taken = self._take(count)
        if not taken and self.backend.is_stalled and not self._retry:
            self._retry = spawn_later(_RETRY_INTERVAL, self._read_again)
        if sample_rate:
            taken = [message for message in taken if random.randrange(SAMPLE_OF) <= sample_rate]
        return _start(taken, client.in_flight)

    def _take(self, count: int) -> list[Message]:
        """Take out the messages that come next; fewer than ``count`` only when there are no more."""
        memory, backend = self.memory, self.backend
        taken: list[Message] = []
        if backend and self._preserve_order:
            if not memory:
                # What is put back goes behind them, and does not keep the others waiting for ever.
                memory.extend(backend.take(_REFILL))
        elif backend:
            while len(taken) < count and memory and backend:
                # Of two that are ready, Go's select takes either.
                taken += [memory.popleft()] if random.getrandbits(1) else backend.take(1)
            taken += backend.take(count - len(taken))
        taken += [memory.popleft() for _ in range(min(count - len(taken), len(memory)))]
        return taken

    def has_ready(self, client: Connection) -> bool:
        return bool(self.memory) or (bool(self.backend) and not self.backend.is_stalled)

    def _read_again(self) -> None:
        self._retry = None
        self.notify()

    def _count_for_waiting(self) -> int:
        return self.depth

    def _pop_deferred(self, now: float, wall_now: float) -> list[Message]:
        due = self.deferred.pop_due(wall_now)  # they are due since the epoch
        for message in due:
            message.due = 0.0
        return due

    def in_memory(self) -> Iterator[Message]:
        """Every message that is in memory, ready or not."""
        yield from self.memory
        yield from self.besides_memory()

    def besides_memory(self) -> Iterator[Message]:
        """Those of them that are not in the queue in memory."""
        yield from self.backend.in_memory()
        yield from self.deferred

    def unfinished(self) -> list[Message]:
        """Every message that is not done: waiting, deferred, or in flight. Reads those on disk."""
        on_disk = [each for first, end in self.backend.unread() for each in read_all(self.log, first, end)]
        return [*self.messages_in_flight(), *self.in_memory(), *on_disk]

    # --- FIN, REQ ----------------------------------------------------------------------------------------------------

    def finish(self, client: Connection, ids: list[bytes]) -> list[bytes]:
        """Drop messages that are done; the ids of those that the client has not got in flight."""
        pop = client.in_flight.messages.pop
        if self.latency is None:
            return [id for id in ids if pop(id, None) is None]
        missing = []
        for id in ids:
            message = pop(id, None)
            if message is None:
                missing.append(id)
            else:
                self.latency.add(time.time_ns() - message.timestamp)
        return missing

    def requeue(self, client: Connection, id: bytes, delay: float) -> None:
        """Give a message back, to be ready after ``delay`` seconds; NotOwner if the client has not got it."""
        message = client.in_flight.pop(id)
        if message is None:
            raise self.not_owner(id)
        self.requeue_count += 1
        if delay > 0:
            message.due = time.time() + delay
            self.defer(message)
            return
        self.put_back((message,))
        self.notify()

    # --- administration ----------------------------------------------------------------------------------------------

    @property
    def _shown_name(self) -> str:
        return f"{self.topic_name}:{self.name}"

    def add_client(self, client: Connection, limit: int = 0) -> None:
        """Subscribe a client; Exiting when the channel goes away, too."""
        if self.is_exiting:
            raise Exiting("exiting")
        super().add_client(client, limit)

    def set_paused(self, is_paused: bool) -> None:
        super().set_paused(is_paused)
        self.on_change()

    def empty(self) -> None:
        """Drop every message: those that wait, that are deferred, and that are in flight."""
        self.memory.clear()
        self.deferred.clear()
        self.backend.clear()
        self.forget_in_flight()
        self.wake()
        self.on_change()

    def close(self) -> None:
        """Disconnect the clients; no more messages are taken."""
        self.is_exiting = True
        self._on_unused = lambda: None
        self.disconnect()


# What a topic does with each publish for each of its channels, in loops without calls: these took half of the CPU of a
# PUB to 100 channels.


def have_room(channels: Iterable[Channel], count: int, *, are_logged: bool) -> bool:
    """Whether so many new messages have room in the memories of all; those of ephemeral ones do not matter.

    What is logged stands behind what a channel has on disk already: there it is for ``Channel.put``.
    """
    for channel in channels:
        backend = channel.backend
        if backend.cursor is None and not backend.read_ahead and not backend.returned:
            room = channel._capacity - len(channel.memory)
        else:
            room = 0 if are_logged else channel._room()
        if count > room and not channel.is_ephemeral:
            return False
    return True


def put_in_memory(channels: Iterable[Channel], messages: Sequence[Message]) -> None:
    """Have channels take new messages, by ``have_room``."""
    count = len(messages)
    for channel in channels:
        channel.message_count += count
        if channel.is_ephemeral:
            channel._put_while_room(messages)
        else:
            channel.memory.extend(messages)
        if channel._waiting:
            channel.notify()


def _start(messages: list[Message], in_flight: InFlight[Message]) -> list[bytes]:
    now = time.monotonic()
    deadline = now + in_flight.timeout
    by_id = in_flight.messages
    frames: list[bytes] = []
    append = frames.append
    for message in messages:
        if message.is_shared:
            message = message.copy()
        message.delivered_at = now
        message.priority = deadline
        by_id[message.id] = message
        if message.attempts:
            message.attempts += 1
            append(message.redelivery_frame())
        else:
            message.attempts = 1
            append(message.frame)
    return frames
