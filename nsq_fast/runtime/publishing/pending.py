"""The publishes that somebody waits for: the end that their deadlines bring, and the end of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

from gevent.event import Event

from nsq_fast.runtime.supervised import Supervisor

from .publish import Publish
from .timers import Alarm

# Looking for publishes that are too late costs about 0.1 us for each that is pending. It is done so rarely that
# this stays below a tenth of the time, so 100,000 pending publishes may end 0.1 s late.
_SLACK_PER_PENDING = 1e-6


class Pending:
    """Publishes that have not ended.

    Args:
        on_late: called with each publish whose deadline has come; it ends it.
        on_look: called every ``look_every`` seconds, as long as anything is pending.

    Attributes:
        publishes: they.
        alarm: rings for the next deadline. Whoever adds a publish with an earlier one calls ``hasten``.
        none_left: set when nothing is pending; None while nobody waits for that.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        on_late: Callable[[Publish], object],
        look_every: float,
        on_look: Callable[[], object],
    ) -> None:
        self.publishes: set[Publish] = set()
        self._on_late = on_late
        self._on_look = on_look
        self._look_every = look_every
        self._next_look = 0.0
        self.alarm = Alarm(self._ring, supervisor)
        self.none_left: Event | None = None

    def add(self, publish: Publish) -> None:
        """It is one of them."""
        self.publishes.add(publish)
        if publish.deadline < self.alarm.at:
            self.hasten(publish)

    def hasten(self, publish: Publish) -> None:
        """Its deadline comes before the alarm would ring."""
        self.alarm.set(min(publish.deadline, self._time_of_look(monotonic())))

    def removed(self) -> None:
        """Some have been taken out of ``publishes``. Need not be called while ``none_left`` is None."""
        if self.none_left is not None and not self.publishes:
            self.none_left.set()

    def replace(self, publish: Publish, parts: Sequence[Publish]) -> None:
        """See ``publish.PendingPublishes``."""
        self.publishes.discard(publish)
        self.publishes.update(parts)
        if publish.deadline < self.alarm.at:
            self.hasten(publish)

    def count(self) -> int:
        """How many calls wait for what is pending."""
        return sum(publish.callers for publish in list(self.publishes))  # stats() of another thread reads it meanwhile

    def wait_for_none(self, timeout: float | None) -> bool:
        """Wait until nothing is pending; whether that is so. Several may wait."""
        if self.none_left is None:
            self.none_left = Event()
        self.removed()
        return self.none_left.wait(timeout)

    def stop(self) -> None:
        """Look no more."""
        self.alarm.stop()

    def _time_of_look(self, now: float) -> float:
        if self._next_look <= now:
            self._next_look = now + self._look_every
        return self._next_look

    def _ring(self) -> None:
        now = monotonic()
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
            self.alarm.set(max(nearest, now + _SLACK_PER_PENDING * len(self.publishes)))
