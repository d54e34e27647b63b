"""Nsqds that push messages, and consumers that share max_in_flight out over them: RDY and backoff at work.

The model of an nsqd: each publish goes to a channel's queue; whoever is ready, with fewer messages in flight than its
RDY, takes the next one, in turn. Of a consumer: one handler at a time for each connection, or some for all, each busy
for ``handler`` seconds a message. Commands and messages take ``delay`` seconds on their way.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable

from nsq_fast.protocol import rdy
from nsq_fast.protocol.backoff import Backoff
from nsq_fast.protocol.sharing import Sharing, limit_in_backoff

from .events import Curve, Simulation


@dataclasses.dataclass(slots=True)
class Message:
    """One message: when it was published, and where."""

    published_at: float
    nsqd: Nsqd
    attempts: int = 0


class Link:
    """A connection of a consumer to an nsqd; ``rdy`` and ``in_flight`` are what the nsqd knows.

    Attributes:
        share: what the consumer's RDY distribution knows of the connection.
        received, is_busy: messages that wait here for a handler; whether it runs, where each connection has its own.
    """

    def __init__(self, consumer: Consumer, nsqd: Nsqd) -> None:
        self.consumer = consumer
        self.nsqd = nsqd
        self.share = rdy.Share()
        self.rdy = 0
        self.in_flight = 0
        self.received: deque[Message] = deque()
        self.is_busy = False
        self.is_queued = False


class Nsqd:
    """A channel on one nsqd."""

    # nsqio/nsq: nsqd/client_v2.go, IsReadyForMessages; nsqd/protocol_v2.go, messagePump: clients that are ready wait
    # for the next message at one Go channel, which serves them first come, first served.

    def __init__(self, simulation: Simulation, delay: float) -> None:
        self._simulation = simulation
        self.delay = delay
        self.links: list[Link] = []
        self.queue: deque[Message] = deque()
        self._ready: deque[Link] = deque()

    @property
    def waiting(self) -> int:
        """Messages that nobody has in flight."""
        return len(self.queue)

    def publish(self) -> None:
        """Store one message."""
        self.put(Message(self._simulation.now, self))

    def put(self, message: Message) -> None:
        """Queue a message, a new or a requeued one."""
        self.queue.append(message)
        self._push()

    def set_rdy(self, link: Link, count: int) -> None:
        """RDY has arrived."""
        link.rdy = count
        self._offer(link)

    def responded(self, link: Link, requeued: Message | None = None, delay: float = 0.0) -> None:
        """FIN has arrived, or REQ with a delay in seconds."""
        link.in_flight -= 1
        if requeued is not None:
            self._simulation.after(delay, self.put, requeued)
        self._offer(link)

    def _offer(self, link: Link) -> None:
        if not link.is_queued and link.in_flight < link.rdy:
            link.is_queued = True
            self._ready.append(link)
        self._push()

    def _push(self) -> None:
        while self.queue and self._ready:
            link = self._ready.popleft()
            link.is_queued = False
            if link.in_flight >= link.rdy:
                continue
            link.in_flight += 1
            message = self.queue.popleft()
            message.attempts += 1
            self._simulation.after(self.delay, link.consumer.received, link, message)
            if link.in_flight < link.rdy:
                link.is_queued = True
                self._ready.append(link)


class Consumer:
    """A consumer of one channel on some nsqds.

    Args:
        max_in_flight: messages held at once; None: one for each connection.
        handler: called with the message; seconds that its handler takes, and whether it succeeds.
        concurrency: handlers that run at once for all connections; None: one for each connection.
        idle_timeout: ``low_ready_idle_timeout`` of the options.
        requeue_delay: seconds that a failed message waits in nsqd.
        backoff: of all connections; None: one with the longest pause that is the options' default.
        probes: of `protocol.rdy`.

    Attributes:
        handled: successes over time.
        waits: seconds from each publish to the begin of its first handler.
        buffered: the most messages that waited here for a handler.
    """

    def __init__(
        self,
        simulation: Simulation,
        nsqds: list[Nsqd],
        *,
        max_in_flight: int | None,
        handler: Callable[[Message], tuple[float, bool]],
        concurrency: int | None = None,
        idle_timeout: float = 10.0,
        requeue_delay: float = 0.0,
        backoff: Backoff | None = None,
        probes: int = rdy.PROBES,
        interval: float = 0.1,
    ) -> None:
        self._simulation = simulation
        self._handler = handler
        self._free = concurrency
        self._requeue_delay = requeue_delay
        self.links = [Link(self, nsqd) for nsqd in nsqds]
        self._backoff = backoff or Backoff(128.0, random=simulation.random.random)
        self._sharing = Sharing(idle_timeout, simulation.random.random, probes)
        self._limit = max_in_flight or len(nsqds)
        self._is_woken = False
        self._look_at = -1.0
        self._waiting: deque[Link] = deque()
        self._held = 0
        self.handled = Curve(interval)
        self.waits: list[float] = []
        self.buffered = 0

    def start(self) -> None:
        """Subscribe everywhere."""
        for link in self.links:
            link.share.turn_at = link.share.active_at = self._simulation.now
            link.nsqd.links.append(link)
        self._wake()

    # RDY, as runtime/consuming/flow.py has it

    def _wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            self._simulation.after(0.0, self._update)

    def _update(self) -> None:
        self._is_woken = False
        now = self._simulation.now
        shares = [link.share for link in self.links]
        limit = limit_in_backoff(self._limit, self._limit, self._backoff, now)
        for index, count in self._sharing.changes(shares, limit, self._limit, now):
            link = self.links[index]
            link.share.sent(count, now)
            self._simulation.after(link.nsqd.delay, link.nsqd.set_rdy, link, count)
        pause = self._sharing.next_look(shares, [self._backoff], limit, now)
        if pause is not None:
            self._look_at = now + pause
            self._simulation.after(pause, self._look, self._look_at)

    def _look(self, at: float) -> None:
        if at == self._look_at:  # a later update has set another time otherwise
            self._wake()

    # Messages

    def received(self, link: Link, message: Message) -> None:
        """A message has arrived."""
        link.share.in_flight += 1
        link.share.active_at = self._simulation.now
        link.received.append(message)
        if self._free is not None:
            self._waiting.append(link)
        self._held += 1
        self.buffered = max(self.buffered, self._held)
        self._handle(link)

    def _handle(self, link: Link) -> None:
        if self._free is None:
            if link.received and not link.is_busy:
                link.is_busy = True
                self._begin(link)
        elif self._free and self._waiting:
            self._free -= 1
            self._begin(self._waiting.popleft())

    def _begin(self, link: Link) -> None:
        message = link.received.popleft()
        self._held -= 1
        if message.attempts == 1:
            self.waits.append(self._simulation.now - message.published_at)
        seconds, is_success = self._handler(message)
        self._simulation.after(seconds, self._done, link, message, is_success)

    def _done(self, link: Link, message: Message, is_success: bool) -> None:
        now = self._simulation.now
        link.share.in_flight -= 1
        if is_success:
            self.handled.add(now)
            self._simulation.after(link.nsqd.delay, link.nsqd.responded, link)
        else:
            self._simulation.after(link.nsqd.delay, link.nsqd.responded, link, message, self._requeue_delay)
        if self._backoff.record(is_success, now) or self._sharing.is_waiting:
            self._wake()
        if self._free is None:
            link.is_busy = False
        else:
            self._free += 1
        self._handle(link)
