"""From a publish to its outcome: attempts, replies, failures, retries, deadlines.

A publish is written to an open link at once, or waits for one. Its reply
settles it; a failure goes through the table in ``protocol.retry``; its
deadline ends it wherever it is. A publish that ended while its reply was
still owed stays with its connection, in its place, and the late reply is
taken silently; until then it keeps its share of ``max_pending``.

One Alarm serves all deadlines and one all retries. The path of a publish that
just succeeds is ``submit``, ``_write``, ``replied``; keep it short.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from itertools import count
from time import monotonic
from typing import Any

import msgspec
from gevent.event import Event

from nsq_fast import _codec
from nsq_fast.config import ConnectionConfig, LookupConfig, ProducerConfig
from nsq_fast.errors import (
    BadBody,
    BadMessage,
    ConnectionClosed,
    ConnectionLost,
    NoNsqd,
    NsqError,
    PublishTimeout,
    ServerError,
)
from nsq_fast.names import Address
from nsq_fast.protocol.retry import RetryPolicy, decide, publish_failed, retry_delay

from .alarm import Alarm
from .connection import Connection
from .pool import Link, Pool
from .publish import Batch, Publish, Wakeups
from .room import Room
from .routes import Route, Routes
from .signals import emit, is_heard

# Looking for publishes that are too late costs about 0.1 us for each that is pending. It is done so rarely that
# this stays below a tenth of the time, so 100,000 pending publishes may end 0.1 s late.
_SLACK_PER_PENDING = 1e-6


class Delivery:
    """Everything between the public methods of a producer and its connections.

    Args:
        sender: the producer, in whose name signals are sent.

    Attributes:
        pending: publishes that somebody waits for.
        room: the share of ``max_pending`` that is taken.
    """

    def __init__(
        self,
        sender: object,
        nsqds: Iterable[Address],
        lookupds: list[str],
        config: ProducerConfig,
        connection: ConnectionConfig,
        lookup: LookupConfig,
    ) -> None:
        self.pending: set[Publish] = set()
        self.room = Room(config.max_pending)
        self.wakeups = Wakeups()
        self.pool = Pool(connection, config, self)
        self.routes = Routes(self.pool, nsqds, lookupds, lookup, self._drain)
        self._sender = sender
        self._signals = sender.__dict__
        self._policy = RetryPolicy(
            max_attempts=config.max_publish_attempts,
            retry_unknown_outcome=config.retry_unknown_outcome,
            base_delay=config.retry_base_delay,
            max_delay=config.retry_max_delay,
        )
        self._deadlines = Alarm(self._expire)
        self._retry_alarm = Alarm(self._run_retries)
        self._retries: list[tuple[float, int, Publish]] = []
        self._numbers = count()
        self._idle: Event | None = None

    # Sending

    def submit(self, publish: Publish) -> None:
        """Take a publish, for which there is room, on its way."""
        self.pending.add(publish)
        if publish.deadline < self._deadlines.at:
            self._deadlines.set(publish.deadline)
        route = publish.route
        if route.waiting:
            route.waiting.append(publish)  # behind those that came before
        elif publish.data and (link := route.choose()) is not None:
            self._write(publish, link)
        else:
            self._attempt(publish)

    def track(self, publish: Publish) -> None:
        """Watch over the deadline of a publish that is not to be sent yet."""
        self.pending.add(publish)
        if publish.deadline < self._deadlines.at:
            self._deadlines.set(publish.deadline)

    def submit_batch(self, children: list[Publish], bodies: list[bytes]) -> None:
        """Send publishes that gathered: as one MPUB, or as a PUB when only one of them still waits."""
        live = [child for child in children if not child.done]
        if len(live) < len(children):
            bodies = [body for child, body in zip(children, bodies, strict=True) if not child.done]
        if len(live) > 1:
            self.submit(Batch(live, bodies))
        elif live:
            self._submit_alone(live[0], bodies[0])

    def _submit_alone(self, child: Publish, body: bytes) -> None:
        child.batch = None
        child.data = _codec.pub(child.topic, body)
        self.submit(child)

    def _attempt(self, publish: Publish) -> None:
        link = publish.route.choose()
        if link is None:
            publish.route.waiting.append(publish)
            self.pool.hurry()
        elif publish.data or self._encode(publish):
            self._write(publish, link)

    def _write(self, publish: Publish, link: Link) -> None:
        conn = link.conn
        assert conn is not None
        publish.conn = conn
        publish.attempts += 1
        try:
            conn.request(publish.data, publish.command, publish)
        except NsqError as error:
            if isinstance(error, ConnectionLost):
                link.drop(conn, error)
            self.refused(conn, publish, error)

    def _encode(self, publish: Publish) -> bool:
        """Build the command of a Batch anew: some of its children may have ended. False when all have."""
        assert isinstance(publish, Batch)
        if publish.encode():
            return True
        self._finish(publish, None)
        return False

    def _drain(self, route: Route) -> None:
        """A link was opened for publishes that wait for one."""
        waiting = route.waiting
        for _ in range(len(waiting)):
            publish = waiting.popleft()
            if not publish.done:
                self._attempt(publish)

    # News from the links

    def link_opened(self, link: Link) -> None:
        self.pool.open.append(link)
        conn = link.conn
        if conn is not None and conn.auth_data is not None and is_heard(self._sender, "on_auth"):
            emit(self._sender, "on_auth", conn=conn, response=msgspec.json.decode(conn.auth_data))
        self.routes.changed()

    def link_lost(self, link: Link, error: NsqError) -> None:
        if link in self.pool.open:
            self.pool.open.remove(link)
            self.routes.changed()

    def has_waiting(self) -> bool:
        return self.routes.waiting_count() > 0

    def server_error(self, conn: Connection, error: ServerError) -> None:
        emit(self._sender, "on_error", error=error)

    def replied(self, conn: Connection, publish: Publish, data: bytes) -> None:
        publish.conn = None
        if publish.done or publish.__class__ is not Publish:
            self._replied_otherwise(conn, publish)
        else:
            self.pending.discard(publish)
            room = self.room
            room.used -= publish.weight
            if room.queue:
                room.give(0)
            publish.done = True
            if publish.waiter is not None:
                self.wakeups.add(publish)
            else:
                publish.settle(None, self.wakeups)
            if self._idle is not None:
                self._check_idle()
        if "on_response" in self._signals:
            emit(self._sender, "on_response", response=data)

    def _replied_otherwise(self, conn: Connection, publish: Publish) -> None:
        if publish.done:
            self._came_late(conn, publish)
        elif isinstance(publish, Batch):
            self._batch_stored(publish)

    def _came_late(self, conn: Connection, publish: Publish) -> None:
        """What was owed to a publish that had ended before."""
        link = self.pool.link_of(conn)
        if link is not None and link.overdue:
            link.overdue -= 1
        if isinstance(publish, Batch):
            self._finish_batch(publish, None)
        else:
            self._release(publish)

    def refused(self, conn: Connection, publish: Publish, error: NsqError) -> None:
        if publish.conn is not conn:
            return
        publish.conn = None
        if publish.done:
            self._came_late(conn, publish)
            return
        publish.last_error = error
        verdict = decide(error, publish.attempts, self._policy)
        publish.possibly_stored |= verdict.possibly_stored
        if not verdict.counts:
            publish.attempts -= 1
        if verdict.refresh:
            self.routes.refresh(publish.topic)
        if isinstance(publish, Batch):
            publish.data = b""
        if not verdict.retry:
            self._fail(publish, error)
        elif verdict.pause:
            self._retry_later(publish)
        else:
            self._attempt(publish)

    def _fail(self, publish: Publish, error: NsqError) -> None:
        if isinstance(publish, Batch):
            self._fail_batch(publish, error)
        else:
            failed = publish_failed(publish.topic, error, publish.attempts, publish.possibly_stored)
            self._finish(publish, failed)

    # Batches

    def _batch_stored(self, batch: Batch) -> None:
        weight = 0
        for child in batch.children:
            child.batch = None
            weight += child.weight
            child.weight = 0
            if not child.done:
                child.done = True
                if child.waiter is not None:
                    self.wakeups.add(child)
                else:
                    child.settle(None, self.wakeups)
        batch.done = True
        self.pending.difference_update(batch.children)
        self.pending.discard(batch)
        self.room.give(weight)
        self._check_idle()

    def _fail_batch(self, batch: Batch, error: NsqError) -> None:
        if isinstance(error, (BadMessage, BadBody)) and len(batch.live()) > 1:
            self._send_each_alone(batch)
            return
        self._finish_batch(batch, lambda: publish_failed(batch.topic, error, batch.attempts, batch.possibly_stored))

    def _send_each_alone(self, batch: Batch) -> None:
        """The server took none, because of one body or because of them all: let the bad one fail alone."""
        pairs = list(zip(batch.children, batch.bodies, strict=True))
        self.pending.discard(batch)
        batch.done = True
        for child, body in pairs:
            child.batch = None
            child.possibly_stored |= batch.possibly_stored
            if child.done:
                self._release(child)
            else:
                self._submit_alone(child, body)

    def _finish_batch(self, batch: Batch, make_error: Callable[[], NsqError] | None) -> None:
        for child in batch.children:
            child.batch = None
            child.possibly_stored |= batch.possibly_stored
            if child.done:
                self._release(child)
            else:
                self._finish(child, make_error() if make_error is not None else None)
        if not batch.done:
            self._finish(batch, None)

    # The end

    def _finish(self, publish: Publish, error: BaseException | None) -> None:
        self.pending.discard(publish)
        if not publish.is_on_wire:
            self._release(publish)
        publish.settle(error, self.wakeups)
        self._check_idle()

    def _release(self, publish: Publish) -> None:
        """Give its room back, once, and forget its bytes."""
        weight, publish.weight = publish.weight, 0
        publish.data = b""
        self.room.give(weight)

    def abandon(self, publish: Publish) -> None:
        """Its caller was interrupted. What was not sent yet will not be."""
        if not publish.done and not publish.is_on_wire:
            self._finish(
                publish, publish_failed(publish.topic, ConnectionClosed("interrupted"), publish.attempts, False)
            )

    def drain(self, timeout: float | None) -> None:
        """Wait until nothing is pending; after ``timeout`` seconds fail what is."""
        self._idle = Event()
        self._check_idle()
        if self._idle.wait(timeout):
            return
        for publish in list(self.pending):
            if not publish.done:
                closed = ConnectionClosed("the producer was closed")
                self._finish(publish, publish_failed(publish.topic, closed, publish.attempts, publish.may_be_stored))

    def close(self, timeout: float | None) -> None:
        """Close the connections. Nothing may be pending."""
        self.routes.stop()
        self._deadlines.stop()
        self._retry_alarm.stop()
        self.pool.close(timeout)

    def _check_idle(self) -> None:
        if self._idle is not None and not self.pending:
            self._idle.set()

    # Time

    def _retry_later(self, publish: Publish) -> None:
        due = monotonic() + retry_delay(publish.attempts, self._policy, random.random)
        heapq.heappush(self._retries, (due, next(self._numbers), publish))
        self._retry_alarm.set(due)

    def _run_retries(self) -> None:
        now = monotonic()
        while self._retries and self._retries[0][0] <= now:
            publish = heapq.heappop(self._retries)[2]
            if not publish.done:
                self._attempt(publish)
        if self._retries:
            self._retry_alarm.set(self._retries[0][0])

    def _expire(self) -> None:
        now = monotonic()
        late = [publish for publish in self.pending if publish.deadline <= now]
        for publish in late:
            if not publish.done:
                self._time_out(publish)
        # What ended must not pile up where it waited for an nsqd that may never come back.
        for route in {publish.route for publish in late if publish.route.waiting}:
            live = [publish for publish in route.waiting if not publish.done]
            route.waiting.clear()
            route.waiting.extend(live)
        if self.pending:
            nearest = min(publish.deadline for publish in self.pending)
            self._deadlines.set(max(nearest, now + _SLACK_PER_PENDING * len(self.pending)))

    def _time_out(self, publish: Publish) -> None:
        if publish.conn is not None:
            link = self.pool.link_of(publish.conn)
            if link is not None:
                link.overdue += 1
        self._finish(publish, self._timeout_error(publish))

    def _timeout_error(self, publish: Publish) -> NsqError:
        stored = publish.may_be_stored
        error: NsqError
        if not stored and not publish.attempts and not publish.route.links:
            errors = self.pool.errors()
            error = NoNsqd(self.why_no_nsqd(publish.topic))
            error.__cause__ = errors[-1][1] if errors else None
            return error
        tail = "; it may have been stored all the same" if stored else ""
        error = PublishTimeout(
            f"publish to {publish.topic!r}: no reply before its deadline{tail}",
            attempts=publish.attempts,
            possibly_stored=stored,
        )
        error.__cause__ = publish.last_error
        return error

    def why_no_nsqd(self, topic: str) -> str:
        """The text of NoNsqd: what is known of each nsqd that is not connected."""
        reasons = [f"{address}: {error}" for address, error in self.pool.errors()]
        return f"no nsqd is connected for topic {topic!r}" + (f" ({'; '.join(reasons)})" if reasons else "")

    def stats(self) -> dict[str, Any]:
        """Counters of this moment."""
        return {
            "pending": len(self.pending),
            "held": self.room.used,
            "waiting": self.routes.waiting_count(),
            "connected": [str(link.address) for link in self.pool.open],
            "disconnected": {str(address): str(error) for address, error in self.pool.errors()},
        }
