"""A channel: a queue of messages, those in flight, those deferred, and the clients that share them.

nsqio/nsq: nsqd/channel.go.

Clients pull: one that is ready for messages and finds none waits in line, and
is woken when there are some. ``deliver`` gives a client as many frames as it
can take in one go.

A client of a channel is anything with ``in_flight`` (an InFlight), ``wake()``,
``close()`` and ``stats()``.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from nsq_fast.broker.diskqueue.log import SegmentLog
from nsq_fast.broker.diskqueue.segments import Position
from nsq_fast.broker.errors import Exiting, NotOwner
from nsq_fast.broker.message import Message
from nsq_fast.names import is_ephemeral

from .backlog import Backlog
from .in_flight import ChannelInFlight, InFlight, wake
from .latency import LatencyWindow

SAMPLE_OF = 100


class Consumer(Protocol):
    """A client that has subscribed."""

    id: int
    rdy: int
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
        latency: how long its messages take until they are finished; None: not measured.
        backlog: the messages that wait. ``in_flight``: those that are delivered, and neither finished nor requeued.
    """

    def __init__(
        self,
        topic_name: str,
        name: str,
        log: SegmentLog,
        capacity: int,
        on_unused: Callable[[], None],
        latency: LatencyWindow | None = None,
        *,
        preserve_order: bool = False,
    ) -> None:
        self.topic_name = topic_name
        self.name = name
        self.is_ephemeral = is_ephemeral(name)
        self.is_paused = False
        self.is_exiting = False
        self.clients: dict[int, Consumer] = {}
        self.message_count = 0
        self.requeue_count = 0
        self.timeout_count = 0
        self.backlog = Backlog(
            log,
            capacity,
            is_ephemeral=self.is_ephemeral,
            takers=lambda: 0 if self.is_paused else sum(map(_room_of, self._waiting)),
            preserve_order=preserve_order,
        )
        self.in_flight: ChannelInFlight[Message] = ChannelInFlight()
        self.latency = latency
        self.on_change: Callable[[], None] = lambda: None
        self._on_unused = on_unused
        self._waiting: dict[Consumer, None] = {}

    @property
    def depth(self) -> int:
        """Messages that wait, in memory and on disk."""
        return len(self.backlog)

    @property
    def in_flight_count(self) -> int:
        """Messages delivered, and neither finished nor requeued."""
        return len(self.in_flight)

    # --- messages in -------------------------------------------------------------------------------------------------

    def put(self, messages: Sequence[Message]) -> None:
        """Take new messages that the topic has found room for."""
        self.message_count += len(messages)
        self.backlog.put(messages)
        self.notify()

    def put_logged(self, messages: Sequence[Message], frames: Sequence[bytes], start: Position) -> None:
        """Take new messages that the topic has also logged."""
        self.message_count += len(messages)
        self.backlog.put_logged(messages, frames, start)
        self.notify()

    def release(self, held_at: Position, count: int, deferred: Sequence[tuple[Message, Position]]) -> None:
        """Take what the topic held back: see ``Backlog.release``."""
        self.message_count += count
        self.backlog.release(held_at, deferred)
        self.notify()

    # --- messages out ------------------------------------------------------------------------------------------------

    def deliver(self, client: Consumer, count: int, sample_rate: int = 0) -> list[bytes]:
        """Up to ``count`` frames for a client; its messages are in flight from now on.

        Of several clients each gets its share, so that the first does not take all.
        With a ``sample_rate`` the messages that it leaves out are gone (nsqio/nsq: nsqd/protocol_v2.go, messagePump).
        """
        if len(self.clients) > 1:
            count = min(count, len(self.backlog) // len(self.clients) + 1)
        taken = self.backlog.take(count)
        if sample_rate:
            taken = [message for message in taken if random.randrange(SAMPLE_OF) <= sample_rate]
        return _start(taken, client.in_flight)

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

    # --- FIN, REQ, TOUCH ---------------------------------------------------------------------------------------------

    def finish(self, client: Consumer, id: bytes) -> None:
        """Drop a message that is done; NotOwner if the client has not got it in flight."""
        message = client.in_flight.pop(id)
        if message is None:
            raise _not_owner(self, id)
        if self.latency is not None:
            self.latency.add(time.time_ns() - message.timestamp)

    def requeue(self, client: Consumer, id: bytes, delay: float) -> None:
        """Give a message back, to be ready after ``delay`` seconds; NotOwner if the client has not got it."""
        message = client.in_flight.pop(id)
        if message is None:
            raise _not_owner(self, id)
        self.requeue_count += 1
        if delay > 0:
            message.due = time.time() + delay
            self.backlog.defer(message)
            return
        self.backlog.put_back((message,))
        self.notify()

    def touch(self, client: Consumer, id: bytes, longest: float) -> None:
        """Start a message's timeout again; NotOwner if the client has not got it."""
        if not client.in_flight.touch(id, time.monotonic(), longest):
            raise _not_owner(self, id)

    # --- clients -----------------------------------------------------------------------------------------------------

    def add_client(self, client: Consumer, limit: int = 0) -> None:
        """Subscribe a client; Exiting when the channel goes away or has ``limit`` clients."""
        if self.is_exiting:
            raise Exiting("exiting")
        if limit and len(self.clients) >= limit:
            raise Exiting(f"consumers for {self.topic_name}:{self.name} exceeds limit of {limit}")
        self.clients[client.id] = client
        self.in_flight.add(client.in_flight)

    def remove_client(self, client: Consumer) -> None:
        """Forget a client. What it has in flight stays so until it times out.

        nsqio/nsq: nsqd/channel.go, RemoveClient.
        """
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
        wake(self.clients.values())
        self.on_change()

    def unpause(self) -> None:
        """Go on with delivery."""
        self.is_paused = False
        wake(self.clients.values())
        self.on_change()

    def empty(self) -> None:
        """Drop every message: those that wait, that are deferred, and that are in flight."""
        self.backlog.clear()
        self.in_flight.clear()
        wake(self.clients.values())
        self.on_change()

    def close(self) -> None:
        """Disconnect the clients; no more messages are taken."""
        self.is_exiting = True
        for client in list(self.clients.values()):
            client.close()

    def scan(self, now: float, wall_now: float) -> bool:
        """Give back what has timed out and what is due; whether there was anything."""
        back = self.in_flight.pop_expired(now)
        self.timeout_count += len(back)
        back += self.backlog.pop_due(wall_now)
        if back:
            self.backlog.put_back(back)
            self.notify()
        return bool(back)


def _room_of(client: Consumer) -> int:
    """How many messages a client would take at once."""
    return max(0, client.rdy - len(client.in_flight))


def _not_owner(channel: Channel, id: bytes) -> NotOwner:
    """Why a client cannot finish, requeue or touch a message (nsqio/nsq: nsqd/channel.go, popInFlightMessage)."""
    return NotOwner("client does not own message" if id in channel.in_flight else "ID not in flight")


def _start(messages: list[Message], in_flight: InFlight[Message]) -> list[bytes]:
    """Put messages in flight; their frames."""
    now = time.monotonic()
    deadline = now + in_flight.timeout
    by_id = in_flight.messages
    frames: list[bytes] = []
    append = frames.append
    for message in messages:
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
