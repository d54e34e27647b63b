"""How long handlers take, and how old messages are then: sampled, where ``histograms`` asks for it.

At most one message is sampled in ``EVERY`` seconds, by each consumer: the first one that a worker begins with. That is
decided before anything is known of it, so slow messages are as likely to be sampled as quick ones. The others cost
nothing (nsq-fast bench consume).
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, time
from typing import Any

from nsq_fast._codec import Message
from nsq_fast.runtime.histogram import Histogram

EVERY = 0.01
"""Seconds between two samples: about 10 us for each are a thousandth of the time."""


class Sample:
    """One message, or batch of messages, whose handler is timed; that may run in any thread.

    Args:
        timing: counts it.

    Attributes:
        age: seconds from the time that the message has from nsqd to the start of its handler; of a batch, its first.
        seconds: what the handler took; None before it has ended.
    """

    __slots__ = ("_began", "_timing", "age", "seconds")

    def __init__(self, timing: HandlerTiming) -> None:
        self._timing: HandlerTiming | None = timing
        self._began: float | None = None
        self.age = 0.0
        self.seconds: float | None = None

    def begin(self, item: Message | list[Message]) -> None:
        """The handler begins with a message, or a list of them. The first call counts."""
        if self._began is None:
            message = item[0] if isinstance(item, list) else item
            self.age = time() - 1e-9 * message.timestamp
            self._began = monotonic()

    def end(self) -> None:
        """The handler has ended, whatever came of it. The first call counts."""
        if self._began is not None and self.seconds is None:
            self.seconds = monotonic() - self._began

    def count(self) -> None:
        """Count it, unless no handler has ended. In the thread of the consumer; the first call counts."""
        if self._timing is not None and self.seconds is not None:
            self._timing.handler_time.observe(self.seconds)
            self._timing.message_age.observe(self.age)
            self._timing = None

    def timed(self, handler: Callable[[Any, Any], object]) -> Callable[[Any, Any], object]:
        """A handler whose first call is timed."""

        def handle(consumer: Any, item: Any) -> object:
            self.begin(item)
            try:
                return handler(consumer, item)
            finally:
                self.end()

        return handle


class HandlerTiming:
    """What was sampled.

    Attributes:
        handler_time: seconds from the call of a handler to its end; of a coroutine function, to the end of its task.
        message_age: seconds from the timestamp of a message to the start of its handler.
        due: when the next sample may be taken, monotonic.
    """

    def __init__(self) -> None:
        self.handler_time = Histogram()
        self.message_age = Histogram()
        self.due = 0.0

    def sample(self, now: float) -> Sample:
        """A new sample, which is due. Call its ``count`` when its handler has ended."""
        self.due = now + EVERY
        return Sample(self)
