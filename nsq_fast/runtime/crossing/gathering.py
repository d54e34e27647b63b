"""Threads that publish at the same time: their requests cross together, and they are woken together.

A thread that hands a request over wakes the hub thread, and both want the
interpreter's lock (GIL). With sixteen threads these switches take most of the
time. But while replies to some of them are due in a moment, the hub thread
wakes up for these anyway: what the others ask for meanwhile waits for that.
The threads whose replies came are woken first, and what some of them publish
until the hub thread has the lock again leaves with that, as one command
(``nsq-fast bench publish --client "nsq_fast threads" --mode concurrent``).

| state | what happened                                     | next state                                  |
|-------|---------------------------------------------------|---------------------------------------------|
| off   | requests were taken, and it is worth it           | on: who has a request does not wake the hub |
| on    | replies came: what gathered is taken              | on, if it is worth it again; else off       |
| on    | none came for ``LONGEST``: what gathered is taken | as above; after several such, off for REST  |
| on    | the producer closes: what gathered is taken       | as above                                    |
| on    | the hub thread fails                              | off, and those who wait are told            |

It is worth it where nothing is pending but what threads wait for, and ``FEWEST``
of them do or were just woken: two or three are faster if each leaves at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from gevent import get_hub

from nsq_fast._latch import Latch, open_all
from nsq_fast.runtime.loop_turns import LAST

from .hub_thread import HubThread

FEWEST = 4
LONGEST = 0.002
"""Seconds that a request waits for the replies to others. A server that takes longer is far away, or busy."""

TOLERATED, REST = 3, 0.1
"""After so many such waits on end, so many seconds without gathering follow each further one."""


class Gathering:
    """That of one producer. Its methods belong to the hub thread.

    Args:
        thread: the hub thread.
        take: takes all requests that there are; it asks ``begins`` then.

    Attributes:
        is_on: requests that come now wait for replies, or a short time.
        waiting: the latches of the threads whose requests were taken, and not answered.
    """

    def __init__(self, thread: HubThread, take: Callable[[], object]) -> None:
        self.is_on = False
        self._thread = thread
        self._take = take
        self.waiting: set[Latch] = set()
        self._answered: list[Latch] = []  # in this turn
        self._returning = 0  # threads that were woken together last, and may publish again
        self._rests_until = 0.0
        self._vain = 0  # waits in vain, since the last that was not
        self._timer: Any = get_hub().loop.timer(LONGEST, LONGEST, priority=LAST)  # a reply that is there comes first

    def begins(self, pending: int) -> bool:
        """Whether requests gather from now on, where so many publishes are pending. Ask when all were taken."""
        waiting = len(self.waiting)
        if 0 < pending == waiting and waiting + self._returning >= FEWEST and monotonic() >= self._rests_until:
            self.is_on = True
            self._timer.again(self._waited_in_vain, update=True)  # from now on, not from when this turn began
        return self.is_on

    def end(self) -> None:
        """No request waits any longer: the caller takes them."""
        if self.is_on:
            self.is_on = False
            self._timer.stop()

    def answer(self, latch: Latch) -> None:
        """Wake its thread: at the end of this turn of the hub, with others, or now if there are but few."""
        waiting, answered = self.waiting, self._answered
        are_few = len(waiting) < FEWEST and not answered and not self.is_on
        waiting.discard(latch)
        if are_few:
            latch.open()
            return
        answered.append(latch)
        if len(answered) == 1:
            self._thread.at_end_of_turn(self._end_turn)

    def answer_all(self, latches: Sequence[Latch]) -> None:
        """As ``answer``, for several."""
        waiting, answered = self.waiting, self._answered
        are_few = len(waiting) < FEWEST and not answered and not self.is_on
        waiting.difference_update(latches)
        if are_few:
            open_all(latches)
            return
        if not answered:
            self._thread.at_end_of_turn(self._end_turn)
        answered += latches

    def close(self) -> None:
        """Nothing gathers any more, and nobody is kept waiting."""
        self.end()
        self._wake()

    def _end_turn(self) -> None:
        self._wake()
        if self.is_on:  # some of those threads have published again meanwhile
            self._vain = 0
            self._take()

    def _wake(self) -> None:
        answered, self._answered = self._answered, []
        self._returning = len(answered)
        open_all(answered)

    def _waited_in_vain(self) -> None:
        if self._answered:
            return  # not in vain: this turn ends soon
        self._vain += 1
        if self._vain > TOLERATED:
            self._rests_until = monotonic() + REST
        self._take()
