"""Waiting for a moment without a turn of the hub, where an answer is microseconds away.

The server of an ordered partition sends a message as soon as it has the FIN of
the one before. To wait for it in the hub takes two switches and a callback,
a good part of all that such a message costs. So who reads may block the whole
thread instead: never for longer than others wait anyway for a handler that
does not yield, and only while messages come one upon the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import monotonic
from typing import Any

from gevent.monkey import get_original  # patches nothing: it finds what a program may have patched

POLLIN = 1
LONGEST_MS = 1
"""What ``poll`` is given, which counts in milliseconds; where messages are ``QUICK`` hardly any of it passes."""

QUICK = 0.0005
"""Seconds from one message to the next, handler included, up to which the next one is waited for here."""

TURN = 0.001
"""Seconds after which the hub has its turn, whatever comes."""

REST = 0.05
"""Seconds that the hub does the waiting after it was in vain here."""


class BusyPoll:
    """Says when there may be something to read, as long as waiting for it keeps nobody waiting.

    Ask ``may_begin`` once for each message. ``wait`` waits for any event of the hub's loop, not for one socket: only
    greenlets that are ready to run wait for it.
    """

    def __init__(self, loop: Any) -> None:
        poll = get_original("select", "poll")()
        self._poll: Callable[[int], list[Any]] = poll.poll
        self._last = 0.0
        self._begin = 0.0
        self._end = 0.0
        descriptor = loop.fileno()
        if descriptor is None:  # select() and poll() as backends have none
            self._begin = math.inf
        else:
            poll.register(descriptor, POLLIN)

    def may_begin(self) -> bool:
        """Whether the next message is waited for without the hub: they come quickly, and its turn is not due."""
        now = monotonic()
        is_quick = now - self._last < QUICK
        self._last = now
        if is_quick and self._begin < now < self._end:
            return True
        self._end = now + TURN
        return False

    def wait(self) -> bool:
        """Wait for an event; False if none came, and the hub is to wait for it."""
        if self._poll(LONGEST_MS):
            return True
        self.rest()
        return False

    def rest(self) -> None:
        """It was in vain: nothing came, or it was for another. Leave the waiting to the hub for a while."""
        self._begin = self._last + REST
