"""What became of each message of the main job, so that loss and duplication are counted, not guessed.

Every message has a sequence number. A publish that was answered OK, a FIN and a
give-up are marked against that number, in one byte each:

    lost         published OK, and never finished nor given up
    duplicated   finished more than once

Marks are made where the fact is known: OK after the reply, FIN when the handler
has decided it. That the server has taken the FINs is checked against its own
statistics at the end of the job.
"""

from __future__ import annotations

from array import array
from collections import Counter

from gevent.event import Event

_MOST = 255


class Ledger:
    """Marks for the sequence numbers 0 to ``size - 1``.

    Attributes:
        published, publish_failed: messages answered OK, and those that were not.
        delivered: calls of handlers.
        settled: messages finished or given up at least once.
        events: how often handlers failed, requeued, touched, answered later.
        latencies: nanoseconds from publish to first delivery.
        woken: set when ``settled`` reaches ``wake_at``.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.published = 0
        self.publish_failed = 0
        self.delivered = 0
        self.settled = 0
        self.given_up = 0
        self.events: Counter[str] = Counter()
        self.latencies = array("q")
        self.woken = Event()
        self.wake_at = size
        self._ok = bytearray(size)
        self._finished = bytearray(size)
        self._given_up = bytearray(size)

    def mark_published(self, first: int, count: int) -> None:
        """The messages from ``first`` on were answered OK."""
        self._ok[first : first + count] = b"\1" * count
        self.published += count

    def mark_failed(self, count: int) -> None:
        """So many publishes failed; a message of theirs may be stored all the same."""
        self.publish_failed += count

    def mark_finished(self, number: int) -> None:
        """The handler of this message decided on FIN."""
        finished = self._finished
        if finished[number] == 0:
            finished[number] = 1
            self._settle(number, self._given_up)
        elif finished[number] < _MOST:
            finished[number] += 1

    def mark_given_up(self, number: int) -> None:
        """The consumer gave this message up."""
        self.given_up += 1
        if self._given_up[number] == 0:
            self._given_up[number] = 1
            self._settle(number, self._finished)

    def _settle(self, number: int, other: bytearray) -> None:
        if other[number] == 0:
            self.settled += 1
            if self.settled >= self.wake_at:
                self.woken.set()

    def is_settled(self, number: int) -> bool:
        """Whether this message was finished or given up."""
        return bool(self._finished[number] or self._given_up[number])

    def wake_when(self, settled: int) -> Event:
        """Arrange for ``woken`` to be set when that many messages are settled; return it."""
        self.wake_at = settled
        if self.settled >= settled:
            self.woken.set()
        else:
            self.woken.clear()
        return self.woken

    @property
    def finished(self) -> int:
        """Messages finished at least once."""
        return self.size - self._finished.count(0)

    @property
    def duplicated(self) -> int:
        """Messages finished more than once."""
        return self.size - self._finished.count(0) - self._finished.count(1)

    @property
    def lost(self) -> int:
        """Messages answered OK and not settled."""
        marks = zip(self._ok, self._finished, self._given_up, strict=True)
        return sum(ok and not finished and not given_up for ok, finished, given_up in marks)

    def latency_ms(self, percent: float) -> float | None:
        """A percentile of the latencies, in milliseconds; None when there are none."""
        if not self.latencies:
            return None
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] / 1e6
