"""Models of servers for fleets in virtual time, and clients that run the policies of ``nsq_fast.protocol`` among them.

What is due next happens next, and takes no time itself. The models say what they assume of a server.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Any

from nsq_fast.config import LookupConfig
from nsq_fast.errors import NotLeader
from nsq_fast.protocol import rdy
from nsq_fast.protocol.backoff import Backoff, ReconnectDelay
from nsq_fast.protocol.publishing import RetryPolicy, decide, retry_delay
from nsq_fast.protocol.rdy import Sharing, limit_in_backoff
from nsq_fast.protocol.topology import LookupdHealth, PollTimes, TopicSchedule, lost_pause, preferred


class Simulation:
    """A heap of what will happen.

    Args:
        seed: of all chance in the run: with the same one, the same happens.

    Attributes:
        now: seconds since the begin.
        random: the only source of chance.
        steps: things that have happened.
    """

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.steps = 0
        self._due: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0

    def after(self, delay: float, action: Callable[..., object], *arguments: Any) -> None:
        """Have ``action(*arguments)`` happen in ``delay`` seconds; what is due together happens in order of calls."""
        self._count += 1
        heappush(self._due, (self.now + delay, self._count, action, arguments))

    def run(self, until: float = inf) -> None:
        """Let everything happen that is due by then."""
        while self._due and self._due[0][0] <= until:
            self.now, _, action, arguments = heappop(self._due)
            self.steps += 1
            action(*arguments)
        if until < inf:
            self.now = until


class Curve:
    """What happened in each interval of virtual time.

    Args:
        interval: seconds.
    """

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self._counts: dict[int, float] = {}

    def add(self, now: float, amount: float = 1.0) -> None:
        """Count something."""
        slot = int(now / self.interval)
        self._counts[slot] = self._counts.get(slot, 0.0) + amount

    def points(self, until: float) -> list[tuple[float, float]]:
        """(begin of the interval, rate a second) of all intervals, empty ones too."""
        slots = range(int(until / self.interval))
        return [(slot * self.interval, self._counts.get(slot, 0.0) / self.interval) for slot in slots]

    def totals(self, until: float) -> list[tuple[float, float]]:
        """(end of the interval, all that happened by then)."""
        result, total = [], 0.0
        for slot in range(int(until / self.interval)):
            total += self._counts.get(slot, 0.0)
            result.append(((slot + 1) * self.interval, total))
        return result

    @property
    def peak(self) -> float:
        """The highest rate a second."""
        return max(self._counts.values(), default=0.0) / self.interval

    @property
    def end(self) -> float:
        """The end of the last interval in which something happened."""
        return (max(self._counts, default=-1) + 1) * self.interval

    @property
    def total(self) -> float:
        """All that was counted."""
        return sum(self._counts.values())


def share(values: list[float], part: float) -> float:
    """The value below which ``part`` (0 to 1) of them are; 0.0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


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


REGISTER = 15.0
"""Seconds between the pings of an nsqd to its lookupds, with one of which it registers again."""
# nsqio/nsq: nsqd/lookup.go, lookupLoop

REQUEST_BYTES = 180
PRODUCER_BYTES = 190
"""Of a question with its HTTP head, and of one nsqd in an answer, measured with addresses of usual length."""


class Lookupd:
    """One lookupd.

    Attributes:
        is_up: whether it accepts connections.
        requests, connects, bytes: over time.
        slowest: the longest that a question waited for its answer, in seconds.
    """

    def __init__(self, simulation: Simulation, capacity: float, interval: float) -> None:
        self._simulation = simulation
        self._seconds = 1.0 / capacity
        self._free_at = 0.0
        self._known_from = float("-inf")
        self.is_up = True
        self.requests = Curve(interval)
        self.connects = Curve(interval)
        self.bytes = Curve(interval)
        self.slowest = 0.0

    def stop(self) -> None:
        """Go down, and forget all registrations."""
        self.is_up = False

    def start(self) -> None:
        """Come up, knowing nothing."""
        self.is_up = True
        self._known_from = self._simulation.now

    def knows(self, registered_after: float) -> bool:
        """Whether the nsqd that registers ``registered_after`` seconds after a restart has done so."""
        return self._simulation.now >= self._known_from + registered_after

    def answer(self, questions: int, nsqds: int) -> float:
        """Take in the questions of one client, about topics of ``nsqds`` each; seconds until all are answered."""
        now = self._simulation.now
        self.connects.add(now)
        self.requests.add(now, questions)
        self.bytes.add(now, questions * (REQUEST_BYTES + nsqds * PRODUCER_BYTES))
        self._free_at = max(self._free_at, now) + questions * self._seconds
        self.slowest = max(self.slowest, self._free_at - now)
        return self._free_at - now


class Client:
    """A consumer or a producer with some topics, all of which live on ``nsqds`` nsqds each.

    Attributes:
        learnt_at: when an answer last named nsqds; None before.
        was_missing, recovered_at: whether an answer named none after one had named some; when one did again.
    """

    def __init__(
        self,
        simulation: Simulation,
        lookupds: Sequence[Lookupd],
        config: LookupConfig,
        *,
        topics: int = 1,
        nsqds: int = 1,
        delay: float = 0.0005,
        on_answer: Callable[[bool], object] = lambda is_known: None,
    ) -> None:
        self._simulation = simulation
        self._lookupds = {LookupdHealth(config.lookupd_poll_interval): lookupd for lookupd in lookupds}
        self._schedule = TopicSchedule(config)
        self._polls = PollTimes(config)
        self._topics, self._nsqds, self._delay = topics, nsqds, delay
        self._registered_after = REGISTER * simulation.random.random()
        self._is_asking = False
        self._wake_at = -1.0
        self._on_answer = on_answer
        self.learnt_at: float | None = None
        self.was_missing = False
        self.recovered_at = 0.0

    def start(self) -> None:
        """Begin to poll, now."""
        self._schedule.due = self._simulation.now
        self._plan()

    def start_at(self, at: float) -> None:
        """Have the next poll at a time, as one that was polling before."""
        self._schedule.asked(self._simulation.now - 1.0, at)
        self._plan()

    def refresh(self, later: float = 0.0) -> None:
        """What is known proved stale: ask again soon, or in ``later`` seconds."""
        if self._schedule.refresh(self._simulation.now, later):
            self._plan()

    def _plan(self) -> None:
        if not self._is_asking:
            self._wake_at = self._schedule.due
            self._simulation.after(max(0.0, self._wake_at - self._simulation.now), self._round, self._wake_at)

    def _round(self, at: float) -> None:
        if self._is_asking or at != self._wake_at:
            return  # another time was planned meanwhile
        now = self._simulation.now
        chance = self._simulation.random.random()
        self._schedule.asked(now, self._polls.after(now, chance))
        self._is_asking = True
        asked = [(self._lookupds[health], health) for health in preferred(list(self._lookupds), now)]
        up = [lookupd for lookupd, health in asked if self._ask(lookupd, health)]
        seconds = max((lookupd.answer(self._topics, self._nsqds) for lookupd in up), default=0.0)
        self._simulation.after(seconds + 2 * self._delay, self._learn, up, chance)

    def _ask(self, lookupd: Lookupd, health: LookupdHealth) -> bool:
        if lookupd.is_up:
            health.succeeded()
        else:
            lookupd.connects.add(self._simulation.now)
            health.failed(self._simulation.now)
        return lookupd.is_up

    def _learn(self, up: Sequence[Lookupd], chance: float) -> None:
        self._is_asking = False
        now = self._simulation.now
        schedule = self._schedule
        is_known = any(lookupd.knows(self._registered_after) for lookupd in up)
        if not up:
            schedule.unanswered(now, chance)
        else:
            schedule.failures = 0
            self.was_missing |= not is_known and self.learnt_at is not None
            if is_known:
                if schedule.searches:
                    self.recovered_at = now
                schedule.searches = 0
                self.learnt_at = now
            else:
                schedule.missing(now, chance)
            self._on_answer(is_known)
        self._plan()


class AcceptingNsqd:
    """A process that accepts connections.

    Attributes:
        attempts: connections that were tried, over time.
        live: those that there are.
        whole_at: when the last one was accepted.
    """

    def __init__(self, simulation: Simulation, capacity: float, interval: float) -> None:
        self._simulation = simulation
        self._seconds = 1.0 / capacity
        self._free_at = 0.0
        self._epoch = 0
        self.is_up = True
        self.attempts = Curve(interval)
        self.live: set[Connection] = set()
        self.whole_at = 0.0

    def stop(self) -> None:
        """Die: every connection is lost."""
        self.is_up = False
        self._epoch += 1
        lost, self.live = self.live, set()
        for connection in sorted(lost, key=lambda each: each.number):
            connection.lost()

    def start(self) -> None:
        """Come back."""
        self.is_up = True
        self._free_at = self._simulation.now

    def connect(self, connection: Connection) -> None:
        """A connection is tried."""
        now = self._simulation.now
        self.attempts.add(now)
        if not self.is_up:
            connection.lost()
            return
        self._free_at = max(self._free_at, now) + self._seconds
        self._simulation.after(self._free_at - now, self._accepted, connection, self._epoch)

    def _accepted(self, connection: Connection, epoch: int) -> None:
        if epoch != self._epoch or not self.is_up:
            connection.lost()
            return
        self.live.add(connection)
        self.whole_at = self._simulation.now
        connection.connected()


class Connection:
    """One connection of a consumer, which is made again whenever it is lost.

    Args:
        is_spread: whether lookup is asked after `lost_pause`; at once otherwise.
    """

    def __init__(
        self,
        simulation: Simulation,
        nsqd: AcceptingNsqd,
        number: int,
        delay: ReconnectDelay,
        lookup: Client,
        is_spread: bool = True,
    ) -> None:
        self._simulation = simulation
        self._nsqd = nsqd
        self._lookup = lookup
        self._delay = delay
        self._is_spread = is_spread
        self.number = number

    def begin(self) -> None:
        """Be connected already, and for long."""
        self._delay.connected(-1e6)
        self._nsqd.live.add(self)

    def connected(self) -> None:
        """It is subscribed."""
        self._delay.connected(self._simulation.now)

    def lost(self) -> None:
        """It was lost, or refused."""
        self._lookup.refresh(lost_pause(self._simulation.random.random()) if self._is_spread else 0.0)
        self._simulation.after(self._delay.next(self._simulation.now), self._nsqd.connect, self)


class Partition:
    """One partition, as a producer sees it and as it is.

    Attributes:
        leader, known: the number of the leader, none (0) while there is none; and whom the producer takes for it.
        stored: numbers of the publishes, in the order in which they were stored.
        waits: seconds from each publish to its reply.
    """

    def __init__(self, producer: Producer, delay: float) -> None:
        self._producer = producer
        self._simulation = producer.simulation
        self._delay = delay
        self.leader = self.known = 1
        self._queue: deque[tuple[int, float]] = deque()
        self._attempts = self._misses = 0
        self._is_busy = False
        self._count = 0
        self.stored: list[int] = []
        self.waits: list[float] = []

    def publish(self) -> None:
        """Queue one publish."""
        self._queue.append((self._count, self._simulation.now))
        self._count += 1
        self._producer.pending += 1
        self._send()

    def _send(self) -> None:
        if self._queue and not self._is_busy:
            self._is_busy = True
            self._simulation.after(self._delay, self._arrived, self.known)

    def _arrived(self, node: int) -> None:
        # All that wait go in one command, as a producer coalesces them; none is stored where the first is refused.
        if node != self.leader:
            self._simulation.after(self._delay, self._refused)
            return
        self.stored.extend(number for number, _ in self._queue)
        self._simulation.after(self._delay, self._replied, len(self._queue))

    def _replied(self, count: int) -> None:
        now = self._simulation.now
        for _ in range(count):
            self.waits.append(now - self._queue.popleft()[1])
        self._producer.done(count)
        self._attempts = self._misses = 0
        self._again()

    def _refused(self) -> None:
        self._attempts += 1
        verdict = decide(NotLeader(), self._attempts, self._producer.policy, self._misses)
        self._misses += verdict.leader
        if verdict.refresh:
            self._producer.refresh()
        random = self._simulation.random.random
        pause = retry_delay(self._attempts, self._producer.policy, random, for_leader=verdict.leader)
        self._simulation.after(pause, self._again)

    def _again(self) -> None:
        self._is_busy = False
        self._send()


class Producer:
    """A producer with many partitions.

    Args:
        refresh: called when what lookup said proved stale.

    Attributes:
        pending, most_pending: publishes without a reply, now and at most.
        stored: over time.
    """

    def __init__(
        self, simulation: Simulation, policy: RetryPolicy, refresh: Callable[[], object], interval: float
    ) -> None:
        self.simulation = simulation
        self.policy = policy
        self.refresh = refresh
        self.partitions: list[Partition] = []
        self.stored = Curve(interval)
        self._pending = 0
        self.most_pending = 0

    @property
    def pending(self) -> int:
        """Publishes without a reply."""
        return self._pending

    @pending.setter
    def pending(self, count: int) -> None:
        self._pending = count
        self.most_pending = max(self.most_pending, count)

    def done(self, count: int) -> None:
        """So many have their reply."""
        self.pending -= count
        self.stored.add(self.simulation.now, count)

    def learn(self) -> None:
        """Lookup has answered: leaders that there are, are known."""
        for partition in self.partitions:
            if partition.leader:
                partition.known = partition.leader
