"""Commands on the wire: what is sent over which connection, what comes back, and what that means for the publishes.

A ``ProducerConnection`` is the place of one connection to one nsqd, renewed for ever:

| state      | what happened                                    | next state                                         |
|------------|--------------------------------------------------|----------------------------------------------------|
| connecting | it is open                                       | open                                               |
| connecting | it failed                                        | connecting, after pauses that grow                 |
| open       | it ended                                         | connecting, after a pause                          |
| open       | a reply is overdue by ``attempt_timeout``        | stalled: it takes no publishes                     |
| stalled    | all replies that were due have come              | open                                               |
| silent     | a fresh connection works, and what is owed may   | open, with that; the old one is given up           |
|            | be tried again, and could nowhere else           |                                                    |
| any        | ``stop``                                         | ended, after what was written is flushed           |

An open connection is silent, too, when it is stalled and no reply at all has come for ``attempt_timeout``, when its
heartbeat is overdue, or when the system sends what was written again and again because nobody acknowledges it. Then,
and while publishes wait for a connection, a try to connect begins every ``TRY_INTERVAL``, whether or not those before
it have ended: what packets got lost with is sent again only after pauses that double, so the try that begins next after
a network is whole again is the first to succeed.

The ``Sender`` writes commands to open connections. A reply ends the publishes of its command; a failure goes, for each
of them, through the table in ``protocol.publishing``; a deadline ends a publish wherever it is. A command whose
publishes ended while its reply was still owed stays with its connection, in its place, and the late reply is taken
silently; until then its messages keep their share of ``max_pending``.

Gathering: with ``linger`` publishes wait for each other; one timer serves all queues, it rings ``linger`` seconds after
the first publish came, and everything that gathered leaves. With ``coalesce`` what was published in one turn of the
loop leaves at its end: nothing waits, and a hundred callers that were woken together cost the server one command
instead of a hundred (``nsq-fast bench publish``). In both cases a queue leaves earlier when it makes a full command.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import ceil, inf
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from nsq_fast._codec import NOP, traced_reply
from nsq_fast._lazy import get_logger
from nsq_fast._publish_path import Command, PendingPath, SendPath, Wakeups
from nsq_fast._record import SAMPLE_EVERY, Histogram
from nsq_fast.errors import (
    ConfigError,
    ConnectionClosed,
    ConnectionLost,
    LookupFailed,
    NoNsqd,
    NsqError,
    PublishFailed,
    PublishTimeout,
    ServerError,
    counted,
    said_at,
)
from nsq_fast.log_events import (
    CLOSE_WAITS,
    CONNECT_FAILED,
    CONNECTION_LOST,
    CONNECTION_RECOVERED,
    CONNECTION_STALLED,
    KEYS_UNORDERED,
)
from nsq_fast.names import Address
from nsq_fast.protocol.dialect import Dialect
from nsq_fast.protocol.publishing import (
    LONGEST_LEADER_PAUSE,
    MOST_SERVERS_LOST,
    OK,
    RetryPolicy,
    batch_command,
    classify,
    publish_failed,
    retry_delay,
    take_receipts,
)
from nsq_fast.protocol.rdy import ReconnectDelay

from .connection import CLOSE_TIMEOUT, TELL_AFTER, Connection, ConnectionOwner
from .loop import Event
from .publishes import PendingLimit, Publish
from .routing import Pool, Queue, Routing

if TYPE_CHECKING:
    from nsq_fast.config import ProducerConfig

    from .loop import Loop, Supervisor, Task, Timer
    from .producer import ProducerCore

logger: logging.Logger = get_logger(__name__)

GOOD_AFTER = 1.0
"""A connection that lasted so long (s) was a good one: the next pause starts from the shortest again."""

FEWEST_LOOKS = 8
"""A reply that is due at so many looks in a row, or more, is late. Looks are counted and not seconds, so that a time in
which this process did not run, and read nothing, does not count against the server."""

LONGEST_LOOK = 1.0
"""Seconds between two looks at most: a connection that the network has swallowed is noticed after two of them."""

TRY_INTERVAL = 1.0
"""Seconds from the beginning of one try to connect to that of the next, while somebody waits for it."""

MOST_TRIES = 5
"""To one nsqd at a time: as many as fit into the default of ``connect_timeout``."""

NEVER = float("inf")
SHORTEST_WAIT = 0.001  # a loop's notion of now may be stale, and then its timer rings early: no second look spins
FAULT_PAUSE = 1.0
"""A look that failed is done again after so many seconds: what it did not get done is still due."""

SLACK_PER_PENDING = 1e-6
"""Looking for publishes that are too late costs about 0.1 us for each that is pending. It is done so rarely that this
stays below a tenth of the time, so 100,000 pending publishes may end 0.1 s late."""


class Pending(PendingPath):
    """Publishes that have not ended, and the one timer for their deadlines: one each would cost more than the publish.

    Args:
        on_late: called with each publish whose deadline has come; it ends it.
        on_look: called every ``look_every`` seconds, as long as anything is pending.
    """

    __slots__ = ("_look_every", "_loop", "_next_look", "_on_late", "_on_look", "_timer")

    none_left: Event | None

    def __init__(
        self, loop: Loop, on_late: Callable[[Publish], object], look_every: float, on_look: Callable[[], object]
    ) -> None:
        super().__init__()
        self._loop = loop
        self._on_late = on_late
        self._on_look = on_look
        self._look_every = look_every
        self._next_look = 0.0
        self._timer: Timer | None = None

    def hasten(self, publish: Publish) -> None:
        """Its deadline comes before the timer would ring."""
        self._ring_at(min(publish.deadline, self._time_of_look(monotonic())))

    def removed(self) -> None:
        """Some have been taken out of ``publishes``. Need not be called while ``none_left`` is None."""
        if self.none_left is not None and not self.publishes:
            self.none_left.set()

    async def wait_for_none(self, timeout: float | None) -> bool:
        """Wait until nothing is pending; whether that is so. Several may wait."""
        if self.none_left is None:
            self.none_left = Event(self._loop)
        self.removed()
        return await self.none_left.wait(timeout)

    def stop(self) -> None:
        """Look for deadlines no more."""
        self.rings_at: float = NEVER
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_of_look(self, now: float) -> float:
        if self._next_look <= now:
            self._next_look = now + self._look_every
        return self._next_look

    def _ring_at(self, at: float) -> None:
        if at < self.rings_at:
            self.stop()
            self.rings_at = at
            self._timer = self._loop.call_later(max(at - monotonic(), SHORTEST_WAIT), self._ring)

    def _ring(self) -> None:
        self.stop()
        try:
            self._look(monotonic())
        except Exception as fault:
            self._loop.report("looking for what is too late", fault, f"it is done again in {FAULT_PAUSE} s")
            self._ring_at(monotonic() + FAULT_PAUSE)

    def _look(self, now: float) -> None:
        if now >= self._next_look:
            self._on_look()
        late = [publish for publish in self.publishes if publish.deadline <= now]
        for publish in late:
            if not publish.done:
                self._on_late(publish)
        # What ended must not pile up where it waits for an nsqd that may never come back.
        for destination in {id(publish.destination): publish.destination for publish in late}.values():
            destination.remove_ended()
        if self.publishes:
            nearest = min(min(publish.deadline for publish in self.publishes), self._time_of_look(now))
            self._ring_at(max(nearest, now + SLACK_PER_PENDING * len(self.publishes)))


class ProducerConnection(ConnectionOwner[Connection]):
    """The place of one connection to one nsqd; see the head of this file. It is the owner of its connections.

    Attributes:
        conn: the connection, while there is one.
        users: partitions that have it as their own.
        overdue: commands that it has not replied to and somebody waits for no longer.
        owed: replies that it has to send before it takes publishes again; 0 while it is not stalled.
        error: why it takes no publishes; None while it does.
        is_stopping: ``stop`` was called.
        tried: set when it was connected, or could not be, for the first time.
    """

    def __init__(self, address: Address, sender: Sender) -> None:
        self.address = address
        self.conn: Connection | None = None
        self.users = 0
        self.overdue: int = 0
        self.owed: int = 0
        self.error: NsqError | None = None
        self.is_stopping: bool = False
        self.on_reply: Any = sender.replied  # straight: the path of every publish
        self._sender = sender
        self._loop = sender.loop
        config = sender.config
        self._delay = ReconnectDelay(config.max_backoff_duration, random=random.random, good_after=GOOD_AFTER)
        self._patience = min(config.retry_max_delay, LONGEST_LEADER_PAUSE)
        self._has_failed = False
        self._is_blameless = False
        # Each look asks whether some reply takes too long, by a command that was the newest at an earlier look; and
        # whether the server stands still, by the oldest: it works on that one. And for how many looks that is so.
        self._sample: Command | None = None
        self._sample_looks = 0
        self._oldest: Command | None = None
        self._oldest_looks = 0
        self._silent_since = NEVER  # since when a connection was not heard whose heartbeat is overdue
        self._latest: Connection | None = None
        self._tries: dict[Connection, Task] = {}
        self._tried_at = self._failed_at = self._pause = 0.0
        self.tried: Event = Event(self._loop)
        self._news = Event(self._loop)
        self._ended = Event(self._loop)
        self._task: Task | None = None
        self._begin()

    def __repr__(self) -> str:
        return f"<ProducerConnection {self.address} {'open' if self.conn else 'down'}>"

    @property
    def is_down(self) -> bool:
        """Whether it is not connected, and that was tried."""
        return self.conn is None and self.error is not None

    def stop(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Connect no more, and close the connection after what was written to it is flushed. Does not wait for that."""
        if self.is_stopping:
            return
        self.is_stopping = True
        self._end_tries()
        if self._task is not None:
            self._task.cancel()
        if self.conn is not None:
            self.conn.close(timeout=min(timeout, CLOSE_TIMEOUT))
        else:
            self._ended.set()

    async def ended(self, timeout: float) -> bool:
        """Wait until what ``stop`` has begun is over; whether it is."""
        return await self._ended.wait(timeout)

    def let_go(self) -> None:
        """The loop is closed: so is the connection, and those that are being made."""
        for conn in (self.conn, *self._tries):
            if conn is not None:
                conn.let_go(())
        self.conn = None

    def hurry(self) -> None:
        """Publishes wait: cut a long pause short."""
        self._news.set()

    # Connecting: nothing runs while a connection is open and heard

    def _begin(self) -> None:
        if not self.is_stopping and (self._task is None or self._task.ready()):
            self._task = self._sender.supervisor.keep(f"nsq_fast-link-{self.address}", self._connect)

    async def _connect(self) -> None:
        """Until a connection is open and heard."""
        while not self.is_stopping and (self.conn is None or self._is_silent):
            left = self._next_try_at() - monotonic()
            if left > 0:
                self._news.clear()
                await self._news.wait(None if left == NEVER else left)
            else:
                self._tried_at = monotonic()
                conn = Connection(self.address, self._sender.connection_config, self, self._loop)
                self._tries[conn] = self._sender.supervisor.job(f"nsq_fast-try-{self.address}", self._try, conn)
        self._end_tries()

    def _next_try_at(self) -> float:
        is_urgent = self.conn is not None or self._sender.routing.waiting_count() > 0
        if self._tries:
            return self._tried_at + TRY_INTERVAL if is_urgent and len(self._tries) < MOST_TRIES else NEVER
        return self._failed_at + (min(self._pause, self._patience) if is_urgent else self._pause)

    def _end_tries(self) -> None:
        tries, self._tries = self._tries, {}
        for task in tries.values():
            task.cancel()
        self._news.set()

    async def _try(self, conn: Connection) -> None:
        failure: NsqError | None = None
        try:
            await conn.open()
        except NsqError as error:
            failure = error
        finally:
            self._tries.pop(conn, None)  # nobody ends it any more
            self._news.set()
        if failure is None:
            self._try_succeeded(conn)
        else:
            self._try_failed(failure)

    def _try_succeeded(self, conn: Connection) -> None:
        silent = self.conn
        if self.is_stopping or (silent is not None and not (self._is_silent and self._may_give_up(silent))):
            conn.close()
            self._paused(TRY_INTERVAL)
            return
        if conn.closed_error is not None:
            self._paused(self._delay.next(monotonic()))
            return
        if silent is not None:
            self._give_up(silent)
        try:
            self._opened(conn)
        except BaseException as error:
            conn.close(ConnectionClosed(f"{self.address}: nsq_fast itself failed: {error!r}"))
            raise

    def _paused(self, seconds: float) -> None:
        """Try no more for so long, unless publishes wait."""
        self._failed_at, self._pause = monotonic(), seconds
        self._news.set()

    def _opened(self, conn: Connection) -> None:
        self._delay.connected(monotonic())
        self.error = None
        self._has_failed = False
        self.overdue = self.owed = 0
        self._sample = None
        self._silent_since = NEVER
        self.on_reply = self._sender.replied
        conn.read_replies_soon()
        self._latest = self.conn = conn
        self._sender.link_opened(self)
        self.tried.set()

    def _try_failed(self, error: NsqError) -> None:
        self._paused(self._delay.next(monotonic()))
        if self.conn is not None:
            return  # it is silent, and whoever waits for it knows
        self.error = error
        self.tried.set()
        level = logging.DEBUG if self._has_failed else logging.WARNING
        self._has_failed = True
        text = "%s: %s; it is tried again"
        logger.log(level, text, self.address, said_at(self.address, error), extra=CONNECT_FAILED)
        self._sender.routing.link_failed()

    def drop(self, conn: Any, error: NsqError) -> None:
        """Offer the connection to publishes no more. What it still owes is reported by ``on_failed``."""
        if self.conn is conn:
            self.conn = None
            self.owed = 0
            self.error = error
            self._sender.link_lost(self)

    # Late replies

    def look(self) -> None:
        """See whether a reply is late, and whether the server is still there. Call it at even intervals."""
        conn = self.conn
        if conn is None:
            return
        tokens = conn.session.tokens()
        oldest = tokens[0] if tokens else None
        self._oldest_looks = self._oldest_looks + 1 if oldest is self._oldest else 0
        self._oldest = oldest
        if self.owed:
            if self._is_silent:
                self._begin()
            return
        if self._sample is None or self._sample.conn is not conn:  # the reply has come
            self._sample = tokens[-1] if tokens else None
            self._sample_looks = 0
            return
        self._sample_looks += 1
        if self._sample_looks >= self._sender.looks:
            self._stall(conn)
        elif conn.is_unheard():
            self._begin()
        elif self._sample_looks == 1:  # if the reply is what was lost, nothing of ours is sent again; this will be
            conn.put_bytes(NOP)

    def _stall(self, conn: Connection) -> None:
        """Take no publishes until all replies that are due now have come: one took too long."""
        limit = self._sender.config.attempt_limit
        self.owed = conn.session.pending_count
        self.on_reply = self._late_reply
        self._sample = None
        self.error = ConnectionLost(f"{self.address}: connected, but has not replied for {limit:.3g} s")
        logger.warning(
            "%s: has not replied for %.3g s, gets no publishes until it does",
            self.address,
            limit,
            extra=CONNECTION_STALLED,
        )
        self._sender.link_stalled(self)
        if self._is_silent:
            self._begin()

    def will_reply_late(self, conn: Connection) -> None:
        """Nobody waits any longer for the reply to a command."""
        if conn is self.conn:
            self.overdue += 1

    def has_replied_late(self, conn: Connection) -> None:
        """The reply to a command that was overdue has come, or will not come any more."""
        if conn is self.conn and self.overdue:
            self.overdue -= 1

    def owes_on(self, conn: Connection) -> bool:
        """Whether it is stalled, with this connection."""
        return conn is self.conn and bool(self.owed)

    def owes_to(self, topic: str, partition: int) -> bool:
        """Whether it owes a reply to a command to this partition."""
        return self.conn is not None and any(
            command.partition == partition and command.destination.topic == topic
            for command in self.conn.session.tokens()
        )

    def _late_reply(self, conn: Connection, command: Command, data: bytes) -> None:
        self._sender.replied(conn, command, data)
        self._has_replied(conn)

    def _has_replied(self, conn: Connection) -> None:
        if conn is self.conn and self.owed:
            self.owed -= 1
            if not self.owed:
                logger.info("%s: replies again", self.address, extra=CONNECTION_RECOVERED)
                self.on_reply = self._sender.replied
                self.error = None
                self._news.set()
                self._sender.link_recovered(self)

    def on_heartbeat_overdue(self, conn: Connection) -> None:
        if conn is self.conn:
            self._silent_since = conn.last_received_at
            self._begin()

    @property
    def _is_silent(self) -> bool:
        conn = self.conn
        # A server that is late and replies to one command after the other is slow: on another connection it would get
        # the same publishes again, and be slower still.
        return conn is not None and (
            (bool(self.owed) and self._oldest_looks >= self._sender.looks)
            or conn.last_received_at == self._silent_since
            or conn.is_unheard()
        )

    def _may_give_up(self, conn: Connection) -> bool:
        """Whether that helps anybody, and harms nobody.

        A server that shakes hands may be slow to store all the same. So what went elsewhere meanwhile is no reason to
        send it anything new, and what must not be tried again waits for its reply as long as it may.
        """
        error = self.error or ConnectionLost(f"{self.address}: given up")
        commands = [command for command in conn.session.tokens() if command.conn is conn]
        live = [publish for command in commands for publish in command.publishes if not publish.done]
        policy = self._sender.policy
        spare = max(2, policy.max_attempts - 1)  # one attempt is left for a leader that moves after all
        return (bool(live) or not self.owed) and all(
            publish.attempts - publish.misses < spare and publish.may_retry(error, policy) for publish in live
        )

    def _give_up(self, conn: Connection) -> None:
        error = ConnectionLost(f"{self.address}: given up: it does not reply, while a new connection does")
        self._tell_lost(error)
        self.drop(conn, error)
        conn.close(error)  # what it owes comes back soon, when the new one is there

    def _tell_lost(self, error: NsqError) -> None:
        text = "%s: connection lost: %s"
        logger.warning(text, self.address, said_at(self.address, error), extra=CONNECTION_LOST)

    # What the connection tells its owner

    def on_failed(self, conn: Connection, command: Command, error: NsqError) -> None:
        if isinstance(error, ServerError):
            self._sender.tell("on_error", error=error)
            if conn.session.dialect.is_fatal(error, command.name):
                # The server closes now. If what we sent was to blame, there is nothing to wait for.
                self._is_blameless = not classify(error).retry
                self.drop(conn, error)
        else:
            self.drop(conn, error)
            if isinstance(error, ConnectionLost) and command is self._oldest:
                error.waited = self._oldest_looks * self._sender.look_every
        self._sender.refused(conn, command, error)
        self._has_replied(conn)

    def on_error(self, conn: Connection, error: ServerError) -> None:
        self._sender.tell("on_error", error=error)

    def on_answer_failed(self, conn: Connection, error: ServerError, message_id: bytes | None) -> None:
        self._sender.tell("on_error", error=error)

    def on_disconnect(self, conn: Connection, error: NsqError) -> None:
        if self.conn is conn and not self.is_stopping:
            self._tell_lost(error)
        self.drop(conn, error)
        if conn is self._latest:
            if self.is_stopping:
                self._ended.set()
            self._paused(0.0 if self._is_blameless else self._delay.next(monotonic()))
            self._is_blameless = False
            self._begin()


class Sender(SendPath):
    """Sends for the queues of one producer, and hears of its connections.

    Attributes:
        tell: sends a signal of the producer: ``tell(name, **values)``. ``heard`` has those that somebody asked for.
        news: set whenever a connection opens, or lookup says where a topic lives.
        pool, routing: the connections, and what goes to which.
    """

    config: ProducerConfig
    refused_count: int
    stored_count: int
    unknown_count: int

    def __init__(self, producer: ProducerCore, loop: Loop, wakeups: Wakeups) -> None:
        config = self.config = producer.config
        self.connection_config: Any = producer.connection_config
        self.tell: Callable[..., None] = producer._tell
        self.heard: dict[str, Any] = vars(producer)
        self.loop = loop
        self.wakeups = wakeups
        self._trace = producer._trace
        lookup = producer._new_lookup(lambda *args: self.routing.learnt(*args))
        self.policy: RetryPolicy = RetryPolicy(
            max_attempts=config.max_publish_attempts,
            retry_unknown_outcome=config.retry_unknown_outcome,
            base_delay=config.retry_base_delay,
            max_delay=config.retry_max_delay,
            leader_misses=len(producer.nsqd_addresses) - 1 if lookup is None else inf,
        )
        self._is_unordered_told = False
        self._is_draining = False
        self.supervisor: Supervisor = loop.supervisor(logger, lambda error: self.tell("on_error", error=error))
        self.news: Event = Event(loop)
        self.looks: int = max(FEWEST_LOOKS, ceil(config.attempt_limit / LONGEST_LOOK))
        self.look_every: float = config.attempt_limit / self.looks
        self.pending: Any = Pending(loop, self._time_out, self.look_every, self._look_at_links)
        self.pending_limit: Any = PendingLimit(config.max_pending, loop)
        self.latency: Histogram | None = Histogram() if config.histograms else None
        self.timed: Callable[[Publish], object] | None = self._time if config.histograms else None
        self._next_sample = 0.0
        self._timers: set[Timer] = set()
        self.lingers: bool = config.linger > 0
        self._gathers = bool(config.linger or config.coalesce)
        self._held: dict[Queue, None] = {}
        self._held_until: Timer | None = None
        self.most: int = config.linger_max_messages if self._gathers else 1
        self.enough: int = min(config.linger_max_bytes, config.max_body_size)
        self.limit: int = config.max_body_size
        self.pool: Pool = Pool(lambda address: ProducerConnection(address, self), config.connections_per_nsqd)
        self.routing: Routing = Routing(self, producer.nsqd_addresses, lookup, producer.lookup_config)

    # Later

    def later(self, delay: float, callback: Callable[[], object]) -> None:
        """Call ``callback()`` once, in ``delay`` seconds. It must not block."""

        def ring() -> None:
            self._timers.discard(timer)
            self._safely(callback, "a timer")

        timer = self.loop.call_later(delay, ring)
        self._timers.add(timer)

    def _safely(self, callback: Callable[[], object], what: str) -> None:
        """What fails keeps none of the others back."""
        try:
            callback()
        except Exception as fault:
            self.supervisor.report(what, fault, "the others go on")

    def forget(self) -> None:
        """Nothing is due any more: the producer has closed, or this is the child of a fork."""
        self.pending.stop()
        self._stop_holding()
        self._held.clear()
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def seek(self, queue: Queue) -> None:
        """Publishes wait in a queue, and no connection takes them: look for one, more and more rarely."""
        self.pool.hurry()
        if self.routing.lookup is not None and not queue.is_sought:
            queue.is_sought = True
            queue.seeks += 1
            delay = retry_delay(queue.seeks, self.policy, random.random, for_leader=True)
            self.later(delay, lambda: self._seek_on(queue))

    def _seek_on(self, queue: Queue) -> None:
        queue.is_sought = False
        if queue.is_stranded:
            self.routing.refresh(queue.topic)
            self.seek(queue)
        else:
            queue.seeks = 0

    # Gathering

    def hold(self, queue: Queue) -> bool:
        """Hold a queue for what comes next, unless gathering is off; ``Queue.pump`` is called in time then."""
        if not self._gathers:
            return False
        if not self._held:
            if self.lingers:
                self._held_until = self.loop.call_later(self.config.linger, self.flush)
            else:
                self.loop.call_soon(self.flush)
        self._held[queue] = None
        return True

    def release_hold(self, queue: Queue) -> None:
        """Hold a queue no longer: it leaves now."""
        self._held.pop(queue, None)
        if not self._held:
            self._stop_holding()

    def _stop_holding(self) -> None:
        if self._held_until is not None:
            self._held_until.cancel()
            self._held_until = None

    def flush(self) -> None:
        """Send all that gathered."""
        self._stop_holding()
        held, self._held = self._held, {}
        for queue in held:
            self._safely(queue.pump, "sending what gathered")

    # What leaves and comes back: SendPath sends commands, and takes the usual replies

    def _encode_many(self, command: Command, dialect: Dialect) -> tuple[str, bytes]:
        """The name and the bytes of a command of several publishes: of one message each, others share none."""
        publishes: Sequence[Publish] = command.publishes
        topic, first = command.destination.topic, publishes[0].encoding
        encodings = (publish.encoding for publish in publishes)
        return batch_command(topic, [each.body for each in publishes], encodings, first, command.partition, dialect)

    def _time(self, publish: Publish) -> None:
        """Note what a publish took that was stored just now: of at most one in ``SAMPLE_EVERY`` seconds."""
        now = monotonic()
        if now >= self._next_sample and self.latency is not None:
            self._next_sample = now + SAMPLE_EVERY
            # When it began follows from its deadline: nothing more is kept for each publish.
            timeout = self.config.publish_timeout if publish.timeout is None else publish.timeout
            self.latency.observe(now - (publish.deadline - timeout))

    def _replied_after_all(self, conn: Connection, command: Command, data: bytes) -> None:
        """A connection that had stalled has stored a command whose publishes were tried elsewhere."""
        if data != OK:
            self._take_receipts(command, data, conn.address)
        for publish in command.publishes:
            if not publish.done:
                if command.partition is not None:
                    publish.partition = command.partition
                owe(publish.attempt)
                self.finish(publish, None)

    def _take_receipts(self, command: Command, data: bytes, nsqd: Address) -> None:
        """Give each publish what the server said of its records, and write that down."""
        topic = command.destination.topic
        take_receipts(command.publishes, traced_reply(data), command.partition, nsqd)
        if self._trace.is_active and self._trace.is_on(topic):
            for publish in command.publishes:
                for receipt in publish.receipts:
                    self._trace.published(topic, receipt[:4], partition=receipt.partition, nsqd=receipt.nsqd)

    def refused(self, conn: Connection, command: Command, error: NsqError) -> None:
        """A command failed: each of its publishes is tried again, or fails."""
        if command.conn is not conn:
            return
        command.conn = None
        if command.is_overdue:
            conn.owner.has_replied_late(conn)
        again: list[Publish] = []
        delay = 0.0
        is_stale = needs_lookup = False
        for publish in command.publishes:
            if publish.done:
                publish.attempt = None
                self.pending_limit.give(publish.weight)
                continue
            is_shared = len(command.publishes) > 1
            decision = publish.attempt_failed(error, self.policy, is_shared=is_shared, server=conn.address)
            is_stale |= decision.leader
            needs_lookup |= decision.refresh
            if decision.retry:
                again.append(publish)
                if decision.pause:
                    number = max(publish.attempts, 1)
                    pause = retry_delay(number, self.policy, random.random, for_leader=decision.leader)
                    delay = max(delay, pause)
            else:
                self.finish(publish, final_error(publish, error))
        if needs_lookup:
            self.routing.refresh(command.destination.topic)
        command.destination.failed(command, again, delay, is_stale=is_stale)

    # The end of a publish

    def finish(self, publish: Publish, error: BaseException | None) -> None:
        """End a publish, well when ``error`` is None. It gives its room back now, or when its command is over."""
        if publish.attempt is None:
            self.pending_limit.give(publish.weight)
        if publish.done:
            pass
        elif error is None:
            self.stored_count += 1
        elif getattr(error, "possibly_stored", False):
            self.unknown_count += 1
        else:
            self.refused_count += 1
        publish.end(error)
        if isinstance(error, PublishFailed) and publish.group is None and isinstance(publish.body, list):
            error.results = publish.results()
        self.pending.publishes.pop(publish, None)
        self.pending.removed()
        publish.wake(self.wakeups)

    def _time_out(self, publish: Publish) -> None:
        owe(publish.attempt)
        self.routing.refresh(publish.topic)  # what did not reply may lead no longer
        self.finish(publish, self._timeout_error(publish))

    def abandon(self, publish: Publish) -> None:
        """Its caller was interrupted. What was not sent yet will not be, and ``drain`` does not wait for the rest."""
        publish.is_abandoned = True
        if not publish.done and (publish.attempt is None or self._is_draining):
            interrupted = ConnectionClosed("interrupted")
            self.finish(publish, publish_failed(publish.topic, interrupted, publish.attempts, publish.may_be_stored))
            queue = publish.destination
            queue.withdrawn += 1
            if 2 * queue.withdrawn > len(queue.waiting):  # looking costs each two steps at most
                queue.remove_ended()

    async def drain(self, timeout: float | None) -> None:
        """Wait until nothing is pending that somebody waits for; after ``timeout`` seconds fail what is."""
        self.flush()
        self._is_draining = True
        for publish in [each for each in self.pending.publishes if each.is_abandoned]:
            self.abandon(publish)
        if timeout is None or timeout > TELL_AFTER:
            if await self.pending.wait_for_none(TELL_AFTER):
                return
            timeout = None if timeout is None else timeout - TELL_AFTER
            self._tell_drain(timeout)
        if not await self.pending.wait_for_none(timeout):
            self.end_all()

    def _tell_drain(self, left: float | None) -> None:
        pending = list(self.pending.publishes)
        longest = max(publish.deadline for publish in pending) - monotonic()
        text = f"closing waits for nsqds to confirm {counted(sum(publish.weight for publish in pending), 'message')}"
        logger.warning(
            "%s; at most %.1f s more",
            self.nowhere(NoNsqd, text, pending[0].topic),
            longest if left is None else min(left, longest),
            extra=CLOSE_WAITS,
        )

    def end_all(self) -> None:
        """The producer closes: fail what is pending."""
        closed = ConnectionClosed("the producer was closed")
        for publish in list(self.pending.publishes):
            if not publish.done:
                self.finish(publish, publish_failed(publish.topic, closed, publish.attempts, publish.may_be_stored))

    async def close(self, timeout: float) -> None:
        """Close the connections. Nothing may be pending."""
        self.routing.stop()
        self.forget()
        await self.pool.close(timeout)

    def let_go(self) -> None:
        """The loop is closed: drop the connections. What is queued is sent as far as the system takes it at once."""
        with suppress(RuntimeError):  # nothing can be cancelled any more
            self.routing.stop()
        self.pool.let_go()

    def tell_unordered(self, topic: str) -> None:
        """Log, once, that keys give no order in the original NSQ."""
        if not self._is_unordered_told:
            self._is_unordered_told = True
            logger.warning(
                "[%s] is a topic of the original NSQ, where keys give no order: its publishes with a key go to any"
                " nsqd, as those without (said once for this producer)", topic, extra=KEYS_UNORDERED,
            )  # fmt: skip

    # What is known of why a publish failed

    def _timeout_error(self, publish: Publish) -> NsqError:
        """The error for a publish whose deadline came."""
        stored = publish.may_be_stored
        nowhere = None if publish.attempt is not None else publish.destination.why_nowhere(publish)
        if nowhere is not None and not stored and not publish.attempts:
            return nowhere
        reasons = []
        if publish.last_error is not None:
            times = counted(publish.attempts, "attempt")
            reasons.append(f"its time was over after {times}, the last failure: {publish.failure}")
        if publish.attempt is not None:
            conn = publish.attempt.conn
            reasons.append(f"no reply before its deadline{f', from {conn.address}' if conn else ''}")
        if not reasons:
            reasons.append("its time was over before it was sent")
        if nowhere is not None:
            reasons.append(str(nowhere))
        elif publish.misses:
            reasons.append(publish.destination.leaders_named())
        if stored:
            reasons.append("it may have been stored all the same")
        error = PublishTimeout(
            f"publish to {publish.topic!r}: {'; '.join(reasons)}",
            attempts=publish.attempts,
            possibly_stored=stored,
        )
        error.__cause__ = publish.last_error
        return error

    def nowhere(self, kind: type[NoNsqd], text: str, topic: str) -> NoNsqd:
        """``text`` as an error that says, too, what is known of each nsqd and of lookup; the last is its cause."""
        errors = {str(address): (str(error), error) for address, error in self.pool.errors()}
        reasons = [said if said.startswith(name) else f"{name}: {said}" for name, (said, _) in errors.items()]
        begun = {str(link.address): None for link in self.pool if link.conn is None and link.error is None}
        reasons += [f"{name}: not connected yet" for name in begun]
        problem = self.routing.lookup_problem(topic)
        if problem:
            reasons.append(problem)
        error = kind(f"{text} ({'; '.join(reasons)})" if reasons else text)
        if errors:
            error.__cause__ = list(errors.values())[-1][1]
        elif problem:
            error.__cause__ = LookupFailed(problem)
        return error

    # News of the connections

    def _look_at_links(self) -> None:
        for link in self.pool:  # stalled ones, too: they may fall silent
            link.look()

    def link_opened(self, link: ProducerConnection) -> None:
        """It can take publishes from now on."""
        self.news.set()
        conn = link.conn
        if conn is not None and conn.auth_data is not None and "on_auth" in self.heard:
            self.tell("on_auth", conn=conn, response=msgspec.json.decode(conn.auth_data))
        self.link_recovered(link)

    def link_recovered(self, link: ProducerConnection) -> None:
        """It has replied: it takes publishes again."""
        if link.conn is not None and link not in self.pool.open:
            self.pool.open.append(link)
        self.routing.links_changed()
        self._relieve(self.pool)

    def link_lost(self, link: ProducerConnection) -> None:
        """It takes no more publishes."""
        if link in self.pool.open:
            self.pool.open.remove(link)
            self.routing.links_changed()

    def link_stalled(self, link: ProducerConnection) -> None:
        """It has not replied for too long; it takes no publishes until it has sent all the replies that it owes."""
        self.link_lost(link)
        self.routing.link_failed()
        self._relieve([link])

    def _relieve(self, links: Iterable[ProducerConnection]) -> None:
        """Try what stalled ones owe at other ones, where there are any and the publishes may be tried again."""
        for link in links:
            conn, error = link.conn, link.error
            if conn is None or error is None or not link.owed:
                continue
            for command in conn.session.tokens():
                if command.conn is not conn:
                    continue
                live = [publish for publish in command.publishes if not publish.done]
                if not command.destination.can_move():
                    self.routing.refresh(command.destination.topic)
                elif live and all(publish.may_retry(error, self.policy) for publish in live):
                    self.refused(conn, command, error)


def owe(command: Command | None) -> None:
    """A publish has ended while a reply to ``command`` is due; None: none is."""
    if command is not None and not command.is_overdue and command.conn is not None:
        command.is_overdue = True
        command.conn.owner.will_reply_late(command.conn)


def final_error(publish: Publish, error: NsqError) -> NsqError:
    """The error for a publish whose last attempt failed with ``error``.

    A wrong argument stays what it is, also when only the server at hand shows that it is wrong.
    """
    if isinstance(error, ConfigError):
        return ConfigError(*error.args)
    why = publish.failure
    if len(publish.ended_servers) >= MOST_SERVERS_LOST:
        ended = " and ".join(map(str, publish.ended_servers))
        why += (
            f"; {ended} ended the connection while working on it, so it may be what ended them:"
            " it is sent to no other server"
        )
    return publish_failed(publish.topic, error, publish.attempts, publish.possibly_stored, why)
