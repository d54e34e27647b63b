"""When lookup is asked: a topic after the poll interval, sooner when nobody answers or knows it. Pure.

Times are seconds of any steady clock; chance is a number in [0, 1) that lengthens pauses, so that clients do not ask
together. It is drawn once for a round of questions: topics of one client are to be asked about together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from nsq_fast.config import LookupConfig

# Calls of refresh() within so many seconds are one.
_BURST = 0.1
_FIRST_RETRY = 0.5
# A topic that no lookupd knows yet is asked for after these seconds, doubled each time.
_FIRST_SEARCH = 0.2
_LONGEST_SEARCH = 5.0
_MAX_SKIPPED_POLLS = 8
LOST_SPREAD = 5.0
"""Seconds over which the consumers that lose an nsqd without partitions spread their questions."""


def jittered(seconds: float, config: LookupConfig, chance: float) -> float:
    """A pause that is longer by what chance makes of ``lookupd_poll_jitter``."""
    return seconds * (1.0 + config.lookupd_poll_jitter * chance)


def lost_pause(chance: float) -> float:
    """Seconds until lookup is asked after an nsqd without partitions was lost."""
    return LOST_SPREAD * chance


class PollTimes:
    """The polls of one client: one time for all topics, those that were asked about in between as well.

    Each round costs every lookupd a connection, and the client a look at all topics.
    """

    def __init__(self, config: LookupConfig) -> None:
        self._config = config
        self._next = 0.0

    def after(self, now: float, chance: float) -> float:
        """When topics that are asked about now are to be asked about again."""
        if self._next <= now:
            self._next = now + jittered(self._config.lookupd_poll_interval, self._config, chance)
        return self._next


class TopicSchedule:
    """When one topic is asked about.

    Attributes:
        asked_at, due: times of the last question and the next one.
        failures, searches: rounds one after the other that nobody answered, and in which nobody knew the topic.
    """

    def __init__(self, config: LookupConfig) -> None:
        self._config = config
        self.asked_at = float("-inf")
        self.due = 0.0
        self.failures = 0
        self.searches = 0

    def asked(self, now: float, due: float) -> None:
        """It is asked about now, and next time at ``due``, unless something makes that sooner."""
        self.asked_at = now
        self.due = due

    def refresh(self, now: float, later: float = 0.0) -> bool:
        """Make it due soon, or in ``later`` seconds; False when that changes nothing.

        It does not when a question about it has just been sent, or is due sooner.
        """
        if now - self.asked_at < _BURST:
            return False
        due = max(now + later, self.asked_at + self._config.lookupd_refresh_interval)
        is_sooner = due < self.due or not later
        self.due = min(self.due, due)
        return is_sooner

    def unanswered(self, now: float, chance: float) -> None:
        """No lookupd answered: what is known stays, and the next question comes sooner."""
        delay = min(_FIRST_RETRY * 2 ** min(self.failures, 16), self._config.lookupd_poll_interval)
        self.failures += 1
        self._hurry(now, delay, chance)

    def missing(self, now: float, chance: float) -> None:
        """No lookupd names an nsqd for it, and its first message may come at any moment: ask again soon."""
        delay = min(_FIRST_SEARCH * 2 ** min(self.searches, 16), _LONGEST_SEARCH)
        self.searches += 1
        self._hurry(now, delay, chance)

    def _hurry(self, now: float, delay: float, chance: float) -> None:
        self.due = min(self.due, now + jittered(delay, self._config, chance))


class LookupdHealth:
    """How a lookupd has been doing: one that keeps failing is asked at every second, fourth, then eighth poll only.

    Attributes:
        failures: rounds one after the other in which it gave no good answer.
    """

    def __init__(self, poll_interval: float) -> None:
        self._interval = poll_interval
        self._retry_at = 0.0
        self.failures = 0

    def is_preferred(self, now: float) -> bool:
        """Whether it is to be asked now, as long as there are others that work."""
        return self.failures == 0 or now >= self._retry_at

    def succeeded(self) -> None:
        """It gave a good answer."""
        self.failures = 0

    def failed(self, now: float) -> None:
        """It gave a bad answer or none."""
        self.failures += 1
        polls = min(2 ** min(self.failures - 1, 16), _MAX_SKIPPED_POLLS)
        # Half an interval less: jitter must not make it miss the poll that is meant, a refresh in between must.
        self._retry_at = now + self._interval * (polls - 0.5)


HealthT = TypeVar("HealthT", bound=LookupdHealth)


def preferred(lookupds: Sequence[HealthT], now: float) -> Sequence[HealthT]:
    """Whom to ask now: those that work and those whose turn to be tried it is; all of them when none works."""
    if all(lookupd.failures for lookupd in lookupds):
        return lookupds
    return [lookupd for lookupd in lookupds if lookupd.is_preferred(now)]
