"""From a publish to its outcome: attempts, replies, failures, retries, deadlines.

A publish is written to an open link at once, or waits for one. Its reply settles it; a
failure goes through the table in ``protocol.retry``; its deadline ends it wherever it is.
A publish that ended while its reply was still owed stays with its connection, in its place,
and the late reply is taken silently; until then it keeps its share of ``max_pending``.

Publishes that are pinned to a partition go through its ``Lane``: see ``pinned``.
The path of one that just succeeds is ``submit`` (or ``prompt``), ``_write``, ``replied``; keep it short.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from itertools import groupby
from time import monotonic
from typing import Any

import msgspec
from gevent.event import Event

from nsq_fast import _codec
from nsq_fast._codec import traced_reply
from nsq_fast.config import ConnectionConfig, LookupConfig, ProducerConfig
from nsq_fast.errors import BadBody, BadMessage, ConfigError, ConnectionClosed, ConnectionLost, NsqError, ServerError
from nsq_fast.names import Address
from nsq_fast.protocol.retry import RetryPolicy, Verdict, decide, publish_failed, retry_delay
from nsq_fast.runtime.net.connection import Connection
from nsq_fast.runtime.signals import emit, is_heard
from nsq_fast.runtime.supervised import Supervisor
from nsq_fast.runtime.trace import TraceLog

from .addressed import Addressed, AddressedBatch, kind_of
from .alarm import Agenda, Alarm
from .lane import Lane
from .pinned import Pinned, waits_in
from .pool import LATE_AFTER_LOOKS, Link, Pool
from .publish import OK, Batch, Publish, Wakeups
from .reasons import final_error, timeout_error
from .room import Room
from .routes import Route, Routes

logger = logging.getLogger(__name__)

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
        news: set whenever a link opens, or lookup says where a topic lives.
        max_batch, max_batch_bytes: limits of a command that a lane makes of several publishes.
    """

    def __init__(
        self,
        sender: object,
        nsqds: Iterable[Address],
        lookupds: list[str],
        config: ProducerConfig,
        connection: ConnectionConfig,
        lookup: LookupConfig,
        trace: TraceLog,
    ) -> None:
        self.supervisor = Supervisor(logger, lambda error: emit(sender, "on_error", error=error))
        self.pending: set[Publish] = set()
        self.room = Room(config.max_pending)
        self.wakeups = Wakeups()
        self.news = Event()
        self.pool = Pool(connection, config, self)
        self.pinned = Pinned(self)
        self.routes = Routes(self.pool, nsqds, lookupds, lookup, config, self, self._drain, self.pinned.decided)
        self.max_batch = config.linger_max_messages if config.linger or config.coalesce else 1
        self.max_batch_bytes = min(config.linger_max_bytes, config.max_body_size)
        self._trace = trace
        self._sender = sender
        self._signals = sender.__dict__
        self._policy = RetryPolicy(
            max_attempts=config.max_publish_attempts,
            retry_unknown_outcome=config.retry_unknown_outcome,
            base_delay=config.retry_base_delay,
            max_delay=config.retry_max_delay,
            max_leader_attempts=config.max_leader_attempts if self.routes.has_lookup else 0,
        )
        self._deadlines = Alarm(self._expire, self.supervisor)
        self._agenda = Agenda(self.supervisor)
        self._idle: Event | None = None
        self._attempt_limit = config.attempt_limit
        self._look_every = config.attempt_limit / LATE_AFTER_LOOKS
        self._next_look = 0.0

    # Sending

    def submit(self, publish: Publish) -> None:
        """Take a publish, for which there is room, on its way."""
        self.track(publish)
        route = publish.route
        if route.waiting:
            route.waiting.append(publish)  # behind those that came before
        elif publish.data and (link := route.choose()) is not None:
            self._write(publish, link)
        else:
            self._attempt(publish)

    def track(self, publish: Publish) -> None:
        """Watch over the deadline of a publish."""
        self.pending.add(publish)
        if publish.deadline < self._deadlines.at:
            self._deadlines.set(min(publish.deadline, self._time_of_look(monotonic())))

    def submit_batch(self, children: list[Publish], bodies: list[bytes]) -> None:
        """Send publishes that gathered: as one MPUB, or as a PUB when only one of them still waits."""
        live = [child for child in children if not child.done]
        if len(live) < len(children):
            bodies = [body for child, body in zip(children, bodies, strict=True) if not child.done]
        if live and not live[0].route.is_plain:
            self.submit(AddressedBatch(live, bodies))
        elif len(live) > 1:
            self.submit(Batch(live, bodies))
        elif live:
            self._submit_alone(live[0], bodies[0])

    def submit_run(self, children: list[Publish], bodies: list[bytes]) -> None:
        """As ``submit_batch``, for publishes of which some or all are addressed: those of one kind go together."""
        for kind, run in groupby(zip(children, bodies, strict=True), key=lambda pair: kind_of(pair[0])):
            members = [pair for pair in run if not pair[0].done]
            if members:
                gathered = [child for child, _ in members], [body for _, body in members]
                if not kind:
                    self.submit_batch(*gathered)
                else:
                    self.submit(AddressedBatch(*gathered) if len(members) > 1 else members[0][0])

    def _submit_alone(self, child: Publish, body: bytes) -> None:
        child.batch = None
        child.data = _codec.pub(child.topic, body)
        self.submit(child)

    def _attempt(self, publish: Publish) -> None:
        route = publish.route
        lane = None
        if route.is_partitioned and isinstance(publish, (Addressed, AddressedBatch)):
            lane = route.choose_lane()
            link = None if lane is None else lane.choose()
        else:
            link = route.choose()
        if link is None:
            route.waiting.append(publish)
            self.pool.hurry()
            self.seek(route)
        elif isinstance(publish, (Addressed, AddressedBatch)):
            if not isinstance(publish, AddressedBatch) or self._has_live(publish):
                self.send(publish, link, None if lane is None else lane.partition)
        elif publish.data or self._encode(publish):
            self._write(publish, link)

    def _has_live(self, batch: Batch) -> bool:
        """Whether any child still waits; ends the batch otherwise."""
        if not all(child.done for child in batch.children):
            return True
        self._finish_batch(batch, None)
        return False

    def send(self, command: Addressed | AddressedBatch, link: Link, partition: int | None) -> None:
        assert link.conn is not None
        try:
            command.encode_for(partition, link.conn.session.dialect)
        except ConfigError as error:
            command.conn = link.conn
            self.refused(link.conn, command, error)
            return
        if isinstance(command, AddressedBatch) and command.lane is not None:
            for child in command.sent:
                child.attempts += 1
        self._write(command, link)

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
        self.finish(publish, None)
        return False

    def _drain(self, route: Route) -> None:
        """A link was opened for publishes that wait for one."""
        waiting = route.waiting
        for _ in range(len(waiting)):
            publish = waiting.popleft()
            if not publish.done:
                self._attempt(publish)

    def locate(self, publish: Publish) -> None:
        """Find out whose turn a publish that is pinned will be. Raises ConfigError."""
        if isinstance(publish, Addressed) and publish.is_pinned:
            publish.lane = self.routes.lane_of(publish)

    # News from the links

    def link_opened(self, link: Link) -> None:
        self.pool.open.append(link)
        self.news.set()
        conn = link.conn
        if conn is not None and conn.auth_data is not None and is_heard(self._sender, "on_auth"):
            emit(self._sender, "on_auth", conn=conn, response=msgspec.json.decode(conn.auth_data))
        self.routes.changed()
        self._relieve_stalled()

    def link_failed(self, link: Link) -> None:
        self.routes.failed()

    def link_lost(self, link: Link, error: NsqError) -> None:
        if link in self.pool.open:
            self.pool.open.remove(link)
            self.routes.changed()

    def link_stalled(self, link: Link) -> None:
        self.pool.open.remove(link)
        self.routes.changed()
        self.routes.failed()
        self._relieve(link)

    def link_recovered(self, link: Link) -> None:
        self.pool.open.append(link)
        self.routes.changed()
        self._relieve_stalled()

    def _relieve_stalled(self) -> None:
        for link in self.pool:
            if link.owed:
                self._relieve(link)

    def _relieve(self, link: Link) -> None:
        """Try what a stalled link owes at another one, where there is one and the publish may be tried again."""
        conn, error = link.conn, link.error
        if conn is None or error is None:
            return
        for publish in [each for each in self.pending if each.conn is conn]:
            if publish.conn is conn and self._may_move(publish, error):
                self.refused(conn, publish, error)

    def _may_move(self, publish: Publish, error: NsqError) -> bool:
        route = publish.route
        if isinstance(publish, (Addressed, AddressedBatch)):
            if publish.lane is not None:  # its partition has one leader: lookup is asked whether that is another now
                self.routes.refresh(publish.topic)
                return False
            has_other = route.choose_lane() is not None if route.is_partitioned else bool(route.links)
            return has_other and decide(error, publish.attempts, self._policy, publish.misses).retry
        return bool(route.links) and decide(error, publish.attempts, self._policy).retry

    def has_waiting(self) -> bool:
        return self.routes.waiting_count() > 0

    def server_error(self, conn: Connection, error: ServerError) -> None:
        emit(self._sender, "on_error", error=error)

    def replied(self, conn: Connection, publish: Publish, data: bytes) -> None:
        kind = publish.__class__
        if publish.conn is not conn or publish.done or not (kind is Publish or (kind is Addressed and data == OK)):
            self._replied_otherwise(conn, publish, data)
        else:
            publish.conn = None
            self.pending.discard(publish)
            room = self.room
            room.used -= publish.weight
            if room.queue:
                room.give(0)
            publish.done = True
            if publish.waiter is not None:
                self.wakeups.add(publish)
            elif publish.result is not None or publish.gather is not None:
                publish.settle(None, self.wakeups)
            if kind is Addressed and publish.lane is not None:  # type: ignore[attr-defined]
                publish.lane.ended([])  # type: ignore[attr-defined]
            if self._idle is not None:
                self._check_idle()
        if "on_response" in self._signals:
            emit(self._sender, "on_response", response=data)

    def _replied_otherwise(self, conn: Connection, publish: Publish, data: bytes) -> None:
        if publish.conn is not conn:
            self._replied_after_all(publish, data)
            return
        publish.conn = None
        lane = None
        if isinstance(publish, (Addressed, AddressedBatch)):
            lane = publish.lane
            if data != OK:
                publish.take_receipt(traced_reply(data), conn.address, self._trace)
        if publish.done:
            self.came_late(conn, publish)
        elif isinstance(publish, Batch):
            self._batch_stored(publish)
        else:
            self.finish(publish, None)
        if lane is not None:
            lane.ended([])

    def _replied_after_all(self, publish: Publish, data: bytes) -> None:
        """A link that had stalled answers an attempt that was given up."""
        if publish.done or data != OK:
            return
        self._expect_late_reply(publish)
        if isinstance(publish, Batch):
            self._batch_stored(publish)
        else:
            self.finish(publish, None)

    def came_late(self, conn: Connection, publish: Publish) -> None:
        """What was owed to a publish that had ended before."""
        link = self.pool.link_of(conn)
        if link is not None and link.overdue:
            link.overdue -= 1
        if isinstance(publish, Batch):
            self._finish_batch(publish, None)
        else:
            self.release(publish)

    def refused(self, conn: Connection, publish: Publish, error: NsqError) -> None:
        if publish.conn is not conn:
            return
        publish.conn = None
        if isinstance(publish, (Addressed, AddressedBatch)) and publish.lane is not None:
            self.pinned.refused(conn, publish, publish.lane, error)
            return
        if publish.done:
            self.came_late(conn, publish)
            return
        verdict = self.judge(publish, error)
        if verdict.refresh:
            self.routes.refresh(publish.topic)
        if isinstance(publish, Batch):
            publish.data = b""
        if not verdict.retry:
            self.fail(publish, error)
        elif verdict.leader and self._shun(publish):
            self._attempt(publish)
        elif verdict.pause:
            self._agenda.add(self.delay_of(publish), lambda: self._retry(publish))
        else:
            self._attempt(publish)

    def judge(self, publish: Publish, error: NsqError) -> Verdict:
        """Look the failure of an attempt up, and book it."""
        misses = publish.misses if isinstance(publish, (Addressed, AddressedBatch)) else 0
        publish.last_error = error
        verdict = decide(error, publish.attempts, self._policy, misses)
        publish.possibly_stored |= verdict.possibly_stored
        if not verdict.counts:
            publish.attempts -= 1
        elif verdict.leader and self._policy.max_leader_attempts and isinstance(publish, (Addressed, AddressedBatch)):
            publish.misses += 1
        return verdict

    def delay_of(self, publish: Publish) -> float:
        """Seconds to wait before the next attempt."""
        return retry_delay(max(publish.attempts, 1), self._policy, random.random)

    def _retry(self, publish: Publish) -> None:
        if not publish.done:
            self._attempt(publish)

    def _shun(self, publish: Publish) -> bool:
        """Send nothing to a partition whose leader moves, for a while; False when it is not known to be one."""
        if not isinstance(publish, (Addressed, AddressedBatch)) or publish.partition is None:
            return False
        lane = publish.route.lanes.get(publish.partition)
        if lane is not None and not lane.is_paused:
            lane.pause(self.delay_of(publish))
        return lane is not None

    def fail(self, publish: Publish, error: NsqError) -> None:
        if isinstance(publish, Batch):
            self._fail_batch(publish, error)
        else:
            self.finish(publish, final_error(publish, error))

    # Batches

    def _batch_stored(self, batch: Batch) -> None:
        weight = 0
        woken: list[Publish] = []
        for child in batch.children:
            child.batch = None
            weight += child.weight
            child.weight = 0
            if not child.done:
                child.done = True
                if child.waiter is not None:
                    woken.append(child)
                else:
                    child.settle(None, self.wakeups)
        if woken:
            self.wakeups.add_many(woken)
        batch.done = True
        self.pending.difference_update(batch.children)
        self.pending.discard(batch)
        self.room.give(weight)
        self._check_idle()

    def _fail_batch(self, batch: Batch, error: NsqError) -> None:
        if isinstance(error, (BadMessage, BadBody)) and len(batch.live()) > 1:
            self._send_each_alone(batch)
            return
        self._finish_batch(batch, lambda: final_error(batch, error))

    def _send_each_alone(self, batch: Batch) -> None:
        """The server took none, because of one body or because of them all: let the bad one fail alone."""
        pairs = list(zip(batch.children, batch.bodies, strict=True))
        self.pending.discard(batch)
        batch.done = True
        for child, body in pairs:
            child.batch = None
            child.possibly_stored |= batch.possibly_stored
            if child.done:
                self.release(child)
            elif isinstance(child, Addressed):
                self.submit(child)
            else:
                self.submit_batch([child], [body])

    def _finish_batch(self, batch: Batch, make_error: Callable[[], NsqError] | None) -> None:
        for child in batch.children:
            child.batch = None
            child.possibly_stored |= batch.possibly_stored
            if child.done:
                self.release(child)
            else:
                self.finish(child, make_error() if make_error is not None else None)
        if not batch.done:
            self.finish(batch, None)

    # The end

    def finish(self, publish: Publish, error: BaseException | None) -> None:
        self.pending.discard(publish)
        if not publish.is_on_wire:
            self.release(publish)
        publish.settle(error, self.wakeups)
        self._check_idle()

    def release(self, publish: Publish) -> None:
        """Give its room back, once, and forget its bytes."""
        weight, publish.weight = publish.weight, 0
        publish.data = b""
        self.room.give(weight)

    def abandon(self, publish: Publish) -> None:
        """Its caller was interrupted. What was not sent yet will not be."""
        if not publish.done and not publish.is_on_wire:
            self.finish(
                publish, publish_failed(publish.topic, ConnectionClosed("interrupted"), publish.attempts, False)
            )

    def drain(self, timeout: float | None) -> None:
        """Wait until nothing is pending; after ``timeout`` seconds fail what is."""
        if self._idle is None:
            self._idle = Event()
        self._check_idle()
        if self._idle.wait(timeout):
            return
        for publish in list(self.pending):
            if not publish.done:
                closed = ConnectionClosed("the producer was closed")
                self.finish(publish, publish_failed(publish.topic, closed, publish.attempts, publish.may_be_stored))

    def close(self, timeout: float | None) -> None:
        """Close the connections. Nothing may be pending."""
        self.routes.stop()
        self._deadlines.stop()
        self._agenda.stop()
        self.pool.close(timeout)

    def _check_idle(self) -> None:
        if self._idle is not None and not self.pending:
            self._idle.set()

    # Time

    def later(self, delay: float, callback: Callable[[], object]) -> None:
        self._agenda.add(delay, callback)

    def resumed(self, lane: Lane) -> None:
        route = lane.route
        if route.waiting and route.links:
            self._drain(route)

    def seek(self, holder: Lane | Route) -> None:
        """Publishes wait for a leader that is not known, or not connected: ask again, and again."""
        if self.routes.has_lookup and not holder.is_sought:
            holder.is_sought = True
            holder.seeks += 1
            self._agenda.add(retry_delay(holder.seeks, self._policy, random.random), lambda: self._seek_on(holder))

    def _seek_on(self, holder: Lane | Route) -> None:
        holder.is_sought = False
        undecided = holder.undecided if isinstance(holder, Route) else ()
        if holder.topic is not None and (undecided or (holder.waiting and not holder.links)):
            self.routes.refresh(holder.topic)
            self.pool.hurry()
            self.seek(holder)
        else:
            holder.seeks = 0

    def _time_of_look(self, now: float) -> float:
        """When to look at the links next."""
        if self._next_look <= now:
            self._next_look = now + self._look_every
        return self._next_look

    def _expire(self) -> None:
        now = monotonic()
        if now >= self._next_look:
            for link in [link for link in self.pool.open if link.is_late()]:
                link.stall(self._attempt_limit)
        late = [publish for publish in self.pending if publish.deadline <= now]
        for publish in late:
            if not publish.done:
                self._time_out(publish)
        # What ended must not pile up where it waited for an nsqd that may never come back.
        for waiting in {id(queue): queue for publish in late for queue in waits_in(publish) if queue}.values():
            live = [publish for publish in waiting if not publish.done]
            waiting.clear()
            waiting.extend(live)
        if self.pending:
            nearest = min(min(publish.deadline for publish in self.pending), self._time_of_look(now))
            self._deadlines.set(max(nearest, now + _SLACK_PER_PENDING * len(self.pending)))

    def _time_out(self, publish: Publish) -> None:
        self._expect_late_reply(publish)
        self.finish(publish, timeout_error(publish, self.pool, self.routes))

    def _expect_late_reply(self, publish: Publish) -> None:
        if publish.conn is not None and (link := self.pool.link_of(publish.conn)) is not None:
            link.overdue += 1

    def stats(self) -> dict[str, Any]:
        """Counters of this moment."""
        return {
            "pending": len(self.pending),
            "held": self.room.used,
            "waiting": self.routes.waiting_count(),
            "leaders": self.routes.leaders(),
            "connected": [str(link.address) for link in self.pool.connected],
            "stalled": [str(link.address) for link in self.pool.connected if link.owed],
            "disconnected": {str(link.address): str(link.error) for link in self.pool if link.is_down},
        }
