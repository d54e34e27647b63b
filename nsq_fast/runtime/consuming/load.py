"""How busy the workers of a pool are, and how many messages they can begin with in time.

A message that waits longer than its timeout is taken back by nsqd, delivered again, and its attempt is lost. So no
more messages are asked for than the workers handle in a part of the timeout, at the speed that was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Protocol

from nsq_fast._codec import Message
from nsq_fast._dispatch import Tally

from .orphans import Orphans

UNLIMITED = 1 << 30

USABLE = 0.5
"""Share of the message timeout that messages may spend waiting, at the speed measured. The rest is for handlers that
take longer than others."""

TOLERANCE = 0.25
"""A capacity that changes by less stays as it is: each change costs RDY commands."""


class Load(Tally):
    """The work of one pool.

    Attributes:
        stuck: messages whose handlers run so long that nsqd is about to take them back, or has done so; one a worker.
        pace: seconds that a handler took for a message when that was measured last; 0.0 before there was any.
    """

    __slots__ = ("_busy_before", "_handled_before", "_last", "pace", "stuck")

    def __init__(self) -> None:
        self.stuck: list[Message] = []
        self.pace = 0.0
        self._busy_before = 0.0
        self._handled_before = 0
        self._last = UNLIMITED

    def measure(self) -> bool:
        """Take in what was handled since the last call; say whether there was anything."""
        handled = self.handled - self._handled_before
        if handled == 0:
            return False
        self.pace = (self.busy - self._busy_before) / handled
        # Differences, not totals: the handlers of now count, not those of the first hour.
        self._busy_before, self._handled_before = self.busy, self.handled
        return True

    def count_stuck(self) -> int:
        """Workers whose handlers run too long right now."""
        self.stuck = [message for message in self.stuck if not (message.has_responded() or message.is_async())]
        return len(self.stuck)

    def capacity(self, workers: int, msg_timeout: float, spare: int = 0) -> int:
        """How many messages ``workers`` can take on at once and begin with in time; 0 when all of them are stuck.

        ``spare`` workers besides only wait for one of them to be done, which counts as time that their handlers took.

        Not fewer than there are workers free: a handler that takes nearly the whole timeout is in time if it begins
        at once.
        """
        free = max(workers, 1) - self.count_stuck()
        # With every worker stuck, any message asked for would wait behind them until nsqd takes it back.
        if free <= 0:
            return 0
        if self.pace <= 0.0:
            return UNLIMITED
        fitting = int(min(UNLIMITED, (free + spare) * USABLE * msg_timeout / self.pace))
        if abs(fitting - self._last) > TOLERANCE * self._last:
            self._last = fitting
        return max(free, self._last)


if TYPE_CHECKING:

    class Worker(Protocol):
        """One greenlet that handles messages."""

        @property
        def current(self) -> Message | list[Message] | None:
            """What it handles now."""

    class Pool(Protocol):
        """Workers, as their load is asked for."""

        spare: int

        @property
        def load(self) -> Load:
            """The work that they have done."""

        @property
        def workers(self) -> Sequence[Worker]:
            """The workers."""


class Workload:
    """All pools of a consumer, and the messages that the program holds although nsqd has taken them back.

    Args:
        orphans: messages of lost connections.
        is_bounded: whether what was measured bounds anything.

    Attributes:
        pools: those that there are.
        shared: the pool that serves all connections; None when each has its own.
        msg_timeout: shortest message timeout of all connections there were, in seconds.
    """

    def __init__(self, orphans: Orphans, is_bounded: bool) -> None:
        self.pools: list[Pool] = []
        self.shared: Pool | None = None
        self.msg_timeout = inf
        self.orphans = orphans
        self._is_bounded = is_bounded

    @property
    def overdue(self) -> int:
        """Messages that the program still holds although nsqd has taken them back, or is about to."""
        return self.orphans.count() + sum(pool.load.count_stuck() for pool in self.pools if pool.load.stuck)

    @property
    def is_handling(self) -> bool:
        """Whether a handler runs now."""
        return any(worker.current is not None for pool in self.pools for worker in pool.workers)

    def capacity_of(self, pool: Pool | None) -> int:
        """How many messages the workers of ``pool`` can begin with in time."""
        if pool is None or not self._is_bounded or not (pool.load.pace or pool.load.stuck):
            return UNLIMITED
        return pool.load.capacity(len(pool.workers) - pool.spare, self.msg_timeout, pool.spare)

    @property
    def pace(self) -> float:
        """Seconds that the slowest pool takes for a message."""
        return max((pool.load.pace for pool in self.pools), default=0.0)
