"""Greenlets that publish at a steady rate, and write down what became of each publish."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from gevent import Greenlet, sleep, spawn

from nsq_fast.errors import NsqError
from nsq_fast.runtime import Producer

from .ledger import Ledger

PUBLISH_TIMEOUT = 10.0
GRACE = 3.0

OPTIONS: dict[str, Any] = {
    "publish_timeout": PUBLISH_TIMEOUT,
    "heartbeat_interval": 1.0,
    "connect_timeout": 2.0,
    "max_backoff_duration": 2.0,
    "lookupd_poll_interval": 2.0,
    "lookupd_timeout": 1.0,
}
"""Of every producer: quick to notice what is wrong, so that a run of minutes sees it often."""


class Publishers:
    """Producers and the greenlets that use them.

    Attributes:
        slow: publishes that took longer than their timeout allows, in words.
        surprises: errors that a publish must not raise, in words.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.slow: list[str] = []
        self.surprises: list[str] = []
        self.is_publishing = True
        self._ledger = ledger
        self._producers: list[Producer] = []
        self._greenlets: list[Greenlet[..., Any]] = []

    def producer(self, **options: Any) -> Producer:
        """A producer that is closed with the others."""
        producer = Producer(**{**OPTIONS, **options})
        producer.start()
        self._producers.append(producer)
        return producer

    def every(self, seconds: float, publish: Callable[..., None], *arguments: Any) -> None:
        """Call ``publish(*arguments)`` again and again, not more often than once in ``seconds``."""
        self._greenlets.append(spawn(self._loop, seconds, publish, arguments))

    def record(self, numbers: Sequence[int], began: float, wait: Callable[[], object]) -> bool:
        """Wait for the outcome of a publish of these messages, and mark it; whether it was answered OK."""
        outcome = "answered OK"
        try:
            wait()
        except NsqError as error:
            outcome = f"{type(error).__name__}: {error}"
            if not hasattr(error, "possibly_stored") and type(error).__name__ not in ("NoNsqd", "NoLeader"):
                self.surprises.append(f"a publish raised {outcome}")
            is_unknown = getattr(error, "possibly_stored", False)
            (self._ledger.mark_unknown if is_unknown else self._ledger.mark_refused)(numbers)
            is_stored = False
        else:
            self._ledger.mark_stored(numbers)
            is_stored = True
        if (seconds := monotonic() - began) > PUBLISH_TIMEOUT + GRACE:
            self.slow.append(f"a publish took {seconds:.1f} s, its limit is {PUBLISH_TIMEOUT:.0f} s; {outcome}")
        return is_stored

    def stop(self) -> None:
        """Let every greenlet come to its end."""
        self.is_publishing = False
        for greenlet in self._greenlets:
            greenlet.get()  # with its exception, if it ended with one
        self._greenlets.clear()

    def close(self) -> None:
        """Close the producers."""
        for producer in self._producers:
            producer.close()

    @property
    def violations(self) -> list[str]:
        """What should not be, in words."""
        return [*dict.fromkeys([*self.slow[:3], *self.surprises[:3]])]

    def _loop(self, seconds: float, publish: Callable[..., None], arguments: Sequence[Any]) -> None:
        due = monotonic()
        while self.is_publishing:
            publish(*arguments)
            due = max(due + seconds, monotonic() - 1.0)  # what was missed is not made up for
            sleep(max(0.0, due - monotonic()))
