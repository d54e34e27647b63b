"""A channel: a queue of messages, those in flight, those deferred, and the clients that share them.

Clients pull: one that is ready for messages and finds none waits in line, and
is woken when there are some. ``deliver`` gives a client as many frames as it
can take in one go.

A client of a channel is anything with ``in_flight`` (an InFlight), ``wake()``,
``close()`` and ``stats()``.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from nsq_fast.broker.diskqueue.log import Position, SegmentLog
from nsq_fast.broker.errors import Exiting, NotOwner
from nsq_fast.broker.message import Message
from nsq_fast.names import is_ephemeral

from .backlog import Backlog
from .in_flight import InFlight

SAMPLE_OF = 100


class Consumer(Protocol):
    """A client that has subscribed."""

    id: int
    in_flight: InFlight[Message]

    def wake(self) -> None:
        """There may be something to do: messages, or an end of a pause."""

    def close(self) -> None:
        """Disconnect."""

    def stats(self) -> dict[str, Any]:
        """Figures under the original's JSON names."""


class Subscribable(Protocol):
    """What a connection needs of the channel it has subscribed to."""

    is_paused: bool

    def deliver(self, client: Any, count: int, sample_rate: int = 0) -> list[bytes]:
        """Up to ``count`` frames for a client; its messages are in flight from now on."""

    def has_ready(self, client: Any) -> bool:
        """Whether there may be messages for a client right now."""

    def wait(self, client: Any) -> None:
        """Put a client that is ready, and found nothing, in line."""

    def notify(self) -> None:
        """Wake those in line as far as there are messages for them."""

    def remove_client(self, client: Any) -> None:
        """Forget a client."""


class Channel:
    """One channel of a topic.

    Attributes:
        clients: who has subscribed, by their ids.
        message_count: messages that came in, ever. ``requeue_count``, ``timeout_count``: how many came back.
        is_exiting: closed or deleted.
    """

    def __init__(self, topic_name: str, name: str, log: SegmentLog, capacity: int, on_unused: Callable[[], None]):
        self.topic_name = topic_name
        self.name = name
        self.is_ephemeral = is_ephemeral(name)
        self.is_paused = False
        self.is_exiting = False
        self.clients: dict[int, Consumer] = {}
        self.message_count = 0
        self.requeue_count = 0
        self.timeout_count = 0
        self.backlog = Backlog(log, capacity)
        self.on_change: Callable[[], None] = lambda: None
        self._on_unused = on_unused
        self._waiting: dict[Consumer, None] = {}
        self._in_flight: list[InFlight[Message]] = []
        self._deferred: list[tuple[float, int, Message]] = []
        self._ties = itertools.count()

    @property
    def depth(self) -> int:
        """Messages that wait, in memory and on disk."""
        return len(self.backlog)

    @property
    def backend_depth(self) -> int:
        """Messages that wait on disk."""
        return self.backlog.on_disk

    @property
    def in_flight_count(self) -> int:
        """Messages delivered and not answered."""
        return sum(map(len, self._in_flight))

    @property
    def deferred_count(self) -> int:
        """Messages that wait for their time."""
        return len(self._deferred)

    # --- messages in -------------------------------------------------------------------------------------------------

    def put(self, messages: Sequence[Message]) -> None:
        """Take new messages that the topic has found room for."""
        self.message_count += len(messages)
        if self.is_ephemeral:
            self.backlog.put_while_room(messages)
        else:
            self.backlog.put(messages)
        self.notify()

    def put_logged(self, messages: Sequence[Message], frames: Sequence[bytes], start: Position) -> None:
        """Take new messages that the topic has also logged."""
        self.message_count += len(messages)
        if self.is_ephemeral:
            self.backlog.put_while_room(messages)
        else:
            self.backlog.put_logged(messages, frames, start)
        self.notify()

    def put_deferred(self, message: Message) -> None:
        """Take a new message that becomes ready when it is due."""
        self.message_count += 1
        self._defer(message)

    def release(self, held_at: Position, count: int) -> None:
        """Take what the topic held back."""
        self.message_count += count
        self.backlog.release(held_at)
        self.notify()

    def restore(self, messages: Sequence[Message], cursor: Position, end: Position) -> None:
        """Take the messages that were not finished before a restart, and go on reading at ``cursor``."""
        self._take_in(messages)
        self.backlog.cursor = cursor if cursor.sequence < end.sequence else None

    def _take_in(self, messages: Sequence[Message]) -> None:
        now = time.time()
        ready = [message for message in messages if message.due <= now]
        self.backlog.put(ready)
        if len(ready) < len(messages):
            for message in messages:
                if message.due > now:
                    self._defer(message)

    def _defer(self, message: Message) -> None:
        heapq.heappush(self._deferred, (message.due, next(self._ties), message))

    # --- messages out ------------------------------------------------------------------------------------------------

    def deliver(self, client: Consumer, count: int, sample_rate: int = 0) -> list[bytes]:
        """Up to ``count`` frames for a client; its messages are in flight from now on.

        Of several clients each gets its share, so that the first does not take all.
        With a ``sample_rate`` the messages that it leaves out are gone, as in the original.
        """
        memory = self._ready_memory()
        share = len(memory) // len(self.clients) + 1 if len(self.clients) > 1 else count
        count = min(count, share, len(memory))
        taken = [memory.popleft() for _ in range(count)]
        if sample_rate:
            taken = [message for message in taken if random.randrange(SAMPLE_OF) <= sample_rate]
        return _start(taken, client.in_flight)

    def _ready_memory(self) -> deque[Message]:
        backlog = self.backlog
        while not backlog.memory and backlog.cursor is not None:
            messages = backlog.read()
            if not messages:
                break
            self._take_in(messages)
        return backlog.memory

    def has_ready(self, client: Consumer) -> bool:
        """Whether there may be messages for a client right now."""
        return bool(self.backlog)

    def wait(self, client: Consumer) -> None:
        """Put a client that is ready, and found nothing, in line."""
        self._waiting[client] = None

    def notify(self) -> None:
        """Wake those in line as far as there are messages for them."""
        waiting = self._waiting
        if waiting and not self.is_paused:
            for client in list(itertools.islice(waiting, len(self.backlog))):
                del waiting[client]
                client.wake()

    # --- answers -----------------------------------------------------------------------------------------------------

    def finish(self, client: Consumer, id: bytes) -> None:
        """Drop a message that is done; NotOwner if the client has not got it in flight."""
        if client.in_flight.pop(id) is None:
            raise self._not_owner(id)

    def requeue(self, client: Consumer, id: bytes, delay: float) -> None:
        """Give a message back, to be ready after ``delay`` seconds; NotOwner if the client has not got it."""
        message = client.in_flight.pop(id)
        if message is None:
            raise self._not_owner(id)
        self.requeue_count += 1
        if delay > 0:
            message.due = time.time() + delay
            self._defer(message)
            return
        self.backlog.put((message,))
        self.notify()

    def touch(self, client: Consumer, id: bytes, longest: float) -> None:
        """Start a message's timeout again; NotOwner if the client has not got it."""
        if not client.in_flight.touch(id, time.monotonic(), longest):
            raise self._not_owner(id)

    def _not_owner(self, id: bytes) -> NotOwner:
        if any(id in in_flight for in_flight in self._in_flight):
            return NotOwner("client does not own message")
        return NotOwner("ID not in flight")

    # --- clients -----------------------------------------------------------------------------------------------------

    def add_client(self, client: Consumer, limit: int = 0) -> None:
        """Subscribe a client; Exiting when the channel goes away or has ``limit`` clients."""
        if self.is_exiting:
            raise Exiting("exiting")
        if limit and len(self.clients) >= limit:
            raise Exiting(f"consumers for {self.topic_name}:{self.name} exceeds limit of {limit}")
        self.clients[client.id] = client
        self._in_flight.append(client.in_flight)

    def remove_client(self, client: Consumer) -> None:
        """Forget a client. What it has in flight stays so until it times out, as in the original."""
        if self.clients.pop(client.id, None) is None:
            return
        client.in_flight.client = None
        self._waiting.pop(client, None)
        self.notify()
        if not self.clients and self.is_ephemeral and not self.is_exiting:
            self._on_unused()

    # --- administration ----------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stop delivery."""
        self.is_paused = True
        self.on_change()

    def unpause(self) -> None:
        """Go on with delivery."""
        self.is_paused = False
        for client in list(self.clients.values()):
            client.wake()
        self.on_change()

    def empty(self) -> None:
        """Drop every message: those that wait, that are deferred, and that are in flight."""
        self.backlog.clear()
        self._deferred.clear()
        for in_flight in self._in_flight:
            in_flight.clear()
        for client in list(self.clients.values()):
            client.wake()
        self.on_change()

    def close(self) -> None:
        """Disconnect the clients; no more messages are taken."""
        self.is_exiting = True
        for client in list(self.clients.values()):
            client.close()

    def scan(self, now: float, wall_now: float) -> bool:
        """Give back what has timed out and what is due; whether there was anything."""
        back = self._pop_expired(now)
        self.timeout_count += len(back)
        while self._deferred and self._deferred[0][0] <= wall_now:
            message = heapq.heappop(self._deferred)[2]
            message.due = 0.0
            back.append(message)
        if back:
            self.backlog.put(back)
            self.notify()
        return bool(back)

    def _pop_expired(self, now: float) -> list[Message]:
        expired: list[Message] = []
        for in_flight in self._in_flight:
            if not in_flight:
                continue
            messages = in_flight.pop_expired(now)
            if messages and in_flight.client is not None:
                in_flight.client.wake()
            expired += messages
        if any(in_flight.client is None and not in_flight for in_flight in self._in_flight):
            self._in_flight = [item for item in self._in_flight if item.client is not None or item]
        return expired

    def unfinished(self) -> list[Message]:
        """Every message that is in memory, in flight or deferred: what a restart must bring back."""
        in_flight = [message for item in self._in_flight for message in item.all()]
        return [*self.backlog.memory, *in_flight, *(message for _, _, message in self._deferred)]


def _start(messages: list[Message], in_flight: InFlight[Message]) -> list[bytes]:
    """Put messages in flight; their frames."""
    now = time.monotonic()
    deadline = now + in_flight.timeout
    by_id = in_flight.messages
    frames: list[bytes] = []
    append = frames.append
    for message in messages:
        message.delivered_at = now
        message.deadline = deadline
        by_id[message.id] = message
        if message.attempts:
            message.attempts += 1
            append(message.redelivery_frame())
        else:
            message.attempts = 1
            append(message.frame)
    return frames
