"""Publishes on their way: what is sent, for whom, until when, and how it ended.

An Outcome is what a caller waits for. A Publish is one command on the wire
(PUB, DPUB or MPUB) and its attempts; a Batch is an MPUB made of lingering
publishes, each with an outcome of its own; a Gather is the one outcome of a
large batch that was cut into several MPUBs.

Nothing here decides anything: see ``delivery``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gevent import get_hub, getcurrent
from gevent.event import AsyncResult

from nsq_fast import _codec
from nsq_fast.errors import PublishFailed

if TYPE_CHECKING:
    from nsq_fast.runtime.net.connection import Connection

    from .routes import Route

OK = b"OK"


class Wakeups:
    """Wakes callers: those whose replies came in one read are resumed by one callback of the hub.

    Each hands on to the next when it waits again, without a switch to the hub between them: that is half the switches.

    Attributes:
        is_waking: several are being resumed now: what they publish next can leave together.
    """

    __slots__ = ("_due", "_hub", "_ready", "is_waking")

    def __init__(self) -> None:
        self._hub = get_hub()
        self._ready: list[Outcome] = []
        self._due: list[Outcome] = []  # being resumed, the next one last
        self.is_waking = False

    def add(self, outcome: Outcome) -> None:
        """Resume the greenlet that waits for ``outcome``, soon."""
        if not self._ready:
            self._hub.loop.run_callback(self._wake)
        self._ready.append(outcome)

    def add_many(self, outcomes: list[Publish]) -> None:
        """As ``add``, for several."""
        if not self._ready:
            self._hub.loop.run_callback(self._wake)
        self._ready += outcomes

    def _wake(self) -> None:
        due, self._ready = self._ready, []
        self.is_waking = len(due) > 1
        due.reverse()
        self._due = due
        while due:
            waiter = due.pop().waiter
            if waiter is not None:  # None: it was interrupted meanwhile
                try:
                    waiter.switch()
                except BaseException as error:  # of a raw greenlet; it must not keep the others waiting
                    self._hub.handle_error(waiter, type(error), error, error.__traceback__)
        self.is_waking = False

    def sleep(self) -> None:
        """Switch to whoever is to run next, until somebody resumes the calling greenlet."""
        due = self._due
        while due:
            waiter = due.pop().waiter
            if waiter is not None:
                waiter.switch()
                return
        self._hub.switch()


class Outcome:
    """How something ended, for one waiting greenlet, or for whoever holds its AsyncResult.

    Attributes:
        conn: the connection whose reply it is waiting for.
    """

    __slots__ = ("conn", "done", "error", "result", "waiter")

    def __init__(self) -> None:
        self.conn: Connection | None = None
        self.done = False
        self.error: BaseException | None = None
        self.waiter: Any = None
        self.result: AsyncResult[Any] | None = None

    def promise(self) -> AsyncResult[Any]:
        """An AsyncResult of it. Ask before it is submitted."""
        self.result = AsyncResult()
        return self.result

    def wait(self, wakeups: Wakeups) -> Any:
        """Block the calling greenlet until it is done; return its value or raise its error."""
        conn = self.conn
        if conn is not None and not self.done:
            self.waiter = getcurrent()
            try:
                data = conn.await_reply()
            finally:
                self.waiter = None
            if data is not None:
                conn.take_reply(data)
        if not self.done:
            self.waiter = getcurrent()
            try:
                wakeups.sleep()
            finally:
                self.waiter = None
        if self.error is not None:
            raise self.error
        return OK if self.__class__ is Publish else self.value()

    def value(self) -> Any:
        """What it ended with when it went well."""
        return OK

    def settle(self, error: BaseException | None, wakeups: Wakeups) -> None:
        """End it, once: well when ``error`` is None."""
        self.done = True
        self.error = error
        if self.waiter is not None:
            wakeups.add(self)
        elif self.result is not None:
            if error is None:
                self.result.set(self.value())
            else:
                self.result.set_exception(error)


class Publish(Outcome):
    """One command to publish, through all its attempts.

    Attributes:
        command: its name on the wire.
        data: its bytes, for as long as they may be needed.
        deadline: when it has to be over, ``time.monotonic``.
        weight: messages it holds room for; 0 once the room was given back.
        attempts: how often it was written so far.
        batch: the Batch it lingered in.
        gather: the Gather it is a part of.
        last_error: what the last attempt failed with.
    """

    __slots__ = (
        "attempts",
        "batch",
        "command",
        "data",
        "deadline",
        "gather",
        "last_error",
        "possibly_stored",
        "route",
        "topic",
        "weight",
    )

    def __init__(self, route: Route, topic: str, command: str, data: bytes, deadline: float, weight: int = 1) -> None:
        self.done = False
        self.error = None
        self.waiter = None
        self.result = None
        self.route = route
        self.topic = topic
        self.command = command
        self.data = data
        self.deadline = deadline
        self.weight = weight
        self.attempts = 0
        self.possibly_stored = False
        self.conn = None
        self.batch: Batch | None = None
        self.gather: Gather | None = None
        self.last_error: BaseException | None = None

    def settle(self, error: BaseException | None, wakeups: Wakeups) -> None:
        super().settle(error, wakeups)
        if self.gather is not None:
            self.gather.part_done(error, wakeups)

    @property
    def is_on_wire(self) -> bool:
        """Whether a reply to it may still come."""
        return self.conn is not None or (self.batch is not None and self.batch.conn is not None)

    @property
    def may_be_stored(self) -> bool:
        """Whether a server may have stored it, as far as we know now."""
        return self.possibly_stored or self.is_on_wire or (self.batch is not None and self.batch.possibly_stored)


class Batch(Publish):
    """An MPUB of gathered publishes. Children that ended (their deadline came) are left out when it is sent again.

    Attributes:
        children: the publishes; ``bodies`` are theirs.
    """

    __slots__ = ("bodies", "children")

    def __init__(self, children: list[Publish], bodies: list[bytes]) -> None:
        first = children[0]
        data = _codec.mpub(first.topic, bodies)
        super().__init__(first.route, first.topic, "MPUB", data, max([child.deadline for child in children]), 0)
        self.children = children
        self.bodies = bodies
        for child in children:
            child.batch = self

    def encode(self) -> bool:
        """Build the command anew, from the children that still wait; False when none does."""
        bodies = [body for child, body in zip(self.children, self.bodies, strict=True) if not child.done]
        if bodies:
            self.data = _codec.mpub(self.topic, bodies)
        return bool(bodies)

    def live(self) -> list[Publish]:
        """The children that still wait."""
        return [child for child in self.children if not child.done]


class Gather(Outcome):
    """The outcome of several parts: what they ended with when all went well; else the first error.

    The error says ``possibly_stored`` as soon as any part was or may have been stored.
    """

    __slots__ = ("_first", "_left", "_parts", "_stored")

    def __init__(self, parts: Iterable[Publish]) -> None:
        super().__init__()
        self._parts = list(parts)
        self._left = 0
        self._stored = False
        self._first: BaseException | None = None
        for part in self._parts:
            part.gather = self
            self._left += 1

    def value(self) -> Any:
        values = [part.value() for part in self._parts]
        return OK if OK in values else [receipt for value in values for receipt in value]

    def part_done(self, error: BaseException | None, wakeups: Wakeups) -> None:
        """Count one part."""
        self._left -= 1
        self._stored |= error is None or getattr(error, "possibly_stored", False)
        self._first = self._first or error
        if self._left:
            return
        if self._stored and isinstance(self._first, PublishFailed):
            self._first.possibly_stored = True
        self.settle(self._first, wakeups)
