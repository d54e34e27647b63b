"""Clients that ask lookupds where their topics are, with the schedules of `protocol.lookup_schedule`.

The model of a lookupd: it answers ``capacity`` questions a second, one after the other; a client asks about its topics
in turn, over one connection a round. While it is down it refuses connections at once. After a restart it knows a topic
only when the topic's nsqds have told it: each within ``REGISTER`` seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nsq_fast.config import LookupConfig
from nsq_fast.protocol.lookup_schedule import LookupdHealth, PollTimes, TopicSchedule, preferred

from .events import Curve, Simulation

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
