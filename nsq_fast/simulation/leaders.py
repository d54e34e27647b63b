"""Producers whose partitions change their leaders, with the table and the pauses of `protocol.retry`.

The model: each partition takes publishes in order, and its first one in line decides: while that is refused by an nsqd
that does not lead, or has been refused and pauses, the others wait. A leader that moves is nowhere for ``election``
seconds; then another nsqd leads, and lookup says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from nsq_fast.errors import NotLeader
from nsq_fast.protocol.retry import RetryPolicy, decide, retry_delay

from .events import Curve, Simulation


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
