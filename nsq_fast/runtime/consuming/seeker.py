"""Asks lookup again and again as long as something is missing that lookup may know."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gevent.event import Event

from nsq_fast.runtime.supervised import Loop, Supervisor

if TYPE_CHECKING:
    from nsq_fast.runtime.lookup import LookupPoller

SEEK_INTERVAL = 1.0
"""Seconds between questions to lookup while a partition has no connection."""


class Seeker:
    """Refreshes one topic.

    Args:
        lookup: whom to ask; None: nobody, and every call does nothing.
        is_missing: whether there is anything to ask for.
        name: of the greenlet.
    """

    def __init__(
        self,
        lookup: LookupPoller | None,
        topic: str,
        is_missing: Callable[[], bool],
        supervisor: Supervisor,
        name: str,
    ) -> None:
        self._lookup = lookup
        self._topic = topic
        self._is_missing = is_missing
        self._supervisor = supervisor
        self._name = name
        self._loop: Loop | None = None
        self._stopped = Event()

    def ask(self, later: float = 0.0) -> None:
        """Ask once, soon or in ``later`` seconds: what lookup said may be out of date. Does not block."""
        if self._lookup is not None and not self._stopped.is_set():
            self._lookup.refresh(self._topic, later)

    def seek(self) -> None:
        """Ask every ``SEEK_INTERVAL`` from now on, until nothing is missing. Does not block."""
        if self._loop is None and self._is_seeking():
            self._loop = self._supervisor.loop(self._name, self._run)
            self._loop.start()

    def stop(self) -> None:
        """Ask no more."""
        self._stopped.set()

    def resume(self) -> None:
        """Ask again when ``ask`` or ``seek`` is called, after ``stop``."""
        self._stopped.clear()

    def _is_seeking(self) -> bool:
        return self._lookup is not None and not self._stopped.is_set() and self._is_missing()

    def _run(self) -> None:
        # A pause first: whoever calls ``seek`` has asked just now.
        while not self._stopped.wait(SEEK_INTERVAL) and self._is_seeking():
            self.ask()
        self._loop = None
