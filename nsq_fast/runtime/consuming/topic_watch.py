"""Asks lookup now and then which topics there are, for a consumer whose topics are chosen by a pattern."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence

from gevent.event import Event

from nsq_fast.config import LookupConfig
from nsq_fast.errors import LookupFailed
from nsq_fast.log_events import TOPICS_UNKNOWN
from nsq_fast.protocol.topic_choice import TopicChoice
from nsq_fast.runtime.supervised import Supervisor
from nsq_fast.runtime.topic_lister import TopicLister

FIRST_SEARCH = 0.5
LONGEST_SEARCH = 5.0
"""Seconds between questions while nothing matches, or nobody answers: doubled each time, up to the longest."""

Follow = Callable[[Sequence[str], Sequence[str]], None]


class TopicWatch:
    """Keeps a consumer at the topics that match, each ``lookupd_poll_interval``.

    Args:
        follow: called with the topics that match, and those that matched and are listed by no lookupd any more. Those
            that some lookupd, which did not answer, may still list are neither.
    """

    def __init__(
        self,
        lister: TopicLister,
        choice: TopicChoice,
        config: LookupConfig,
        follow: Follow,
        supervisor: Supervisor,
        log: logging.Logger,
    ) -> None:
        self._lister = lister
        self._choice = choice
        self._config = config
        self._follow = follow
        self._supervisor = supervisor
        self._log = log
        self._stopped = Event()
        self._followed: set[str] = set()
        self._searches = 0
        self._last_problem = ""

    def start(self, name: str) -> None:
        """Begin to ask."""
        self._supervisor.loop(name, self._run).start()

    def stop(self) -> None:
        """Ask no more. Does not block."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            problem = self._look()
            if problem and problem != self._last_problem and not self._stopped.is_set():
                self._log.warning("%s; asking again until that changes", problem, extra=TOPICS_UNKNOWN)
            self._last_problem = problem
            self._stopped.wait(self._pause(problem))

    def _look(self) -> str:
        """Ask once; return what keeps the consumer from having a topic, or from knowing those that are new."""
        try:
            listing = self._lister.ask()
        except LookupFailed as error:
            return str(error)
        found = self._choice.matching(listing.names)
        gone = sorted(self._followed.difference(found)) if listing.is_whole else []
        self._followed = self._followed.difference(gone).union(found)
        self._follow(found, gone)
        return "" if self._followed else f"lookup lists no topic that matches {str(self._choice)!r}"

    def _pause(self, problem: str) -> float:
        interval = self._config.lookupd_poll_interval
        self._searches = self._searches + 1 if problem else 0
        if problem:
            interval = min(interval, FIRST_SEARCH * 2 ** min(self._searches - 1, 16), LONGEST_SEARCH)
        return interval * (1.0 + self._config.lookupd_poll_jitter * random.random())
