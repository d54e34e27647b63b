"""What callers wait for: a Publish, or a Group of those that one call made.

What happens to a publish is for its destination and the Delivery to say, and
what that means for it for ``protocol.publish``; here its caller is woken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from gevent import get_hub, getcurrent
from gevent.event import AsyncResult

from nsq_fast.errors import NoNsqd, PublishFailed
from nsq_fast.protocol.partitioner import Key
from nsq_fast.protocol.publish import PublishState
from nsq_fast.protocol.wire_form import OK, PLAIN, PLAIN_BATCH, Form
from nsq_fast.protocol.wire_form import Receipt as Receipt

if TYPE_CHECKING:
    from collections import deque

    from nsq_fast.names import Address
    from nsq_fast.runtime.net.connection import Connection


if TYPE_CHECKING:

    class Waiter(Protocol):
        """Something that a greenlet waits for."""

        waiter: Any


class Wakeups:
    """Wakes callers: those whose replies came in one read are resumed by one callback of the hub.

    Each hands on to the next when it waits again, without a switch to the hub between them: that is half the switches.

    Attributes:
        is_waking: several are being resumed now: what they publish next can leave together.
    """

    __slots__ = ("_due", "_hub", "_ready", "is_waking")

    def __init__(self) -> None:
        self._hub = get_hub()
        self._ready: list[Waiter] = []
        self._due: list[Waiter] = []  # being resumed, the next one last
        self.is_waking = False

    def add(self, waiter: Waiter) -> None:
        """Resume the greenlet that waits for it, soon."""
        if not self._ready:
            self._hub.loop.run_callback(self._wake)
        self._ready.append(waiter)

    def add_many(self, waiters: Sequence[Waiter]) -> None:
        """As ``add``, for several."""
        if not self._ready:
            self._hub.loop.run_callback(self._wake)
        self._ready += waiters

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


if TYPE_CHECKING:

    class Abandoning(Protocol):
        """Who sends for a destination; a ``Delivery``."""

        def abandon(self, publish: Publish) -> None:
            """Nobody waits for a publish any more. What was not sent yet will not be."""

        def why_nowhere(self, publish: Publish) -> NoNsqd | None:
            """Why a publish cannot be sent now, if it is for want of a connection to an nsqd that takes it."""

    class Destination(Protocol):
        """Where publishes go: it has the queue in which they wait. See ``destination``."""

        topic: str
        waiting: deque[Publish]

        @property
        def links(self) -> Sequence[object]:
            """What takes its publishes now."""

        def add(self, publish: Publish) -> None:
            """Take a publish on its way: send it now, or when those before it have left."""

        def stored(self) -> None:
            """The server replied OK to a command to it."""

        def failed(self, command: Command, again: list[Publish], delay: float, *, is_stale: bool) -> None:
            """A command to it failed; ``again``, of it, is to be sent again, after ``delay`` seconds.

            ``is_stale``: the nsqd does not lead the partition (any more).
            """

        def can_move(self) -> bool:
            """Whether another link could take what one owes."""

        def missing_leader(self, is_connected: Callable[[Address], bool]) -> str | None:
            """Why it cannot send what must go to one partition; None when it can, or where nobody says who leads it."""

        def leaders_named(self) -> str:
            """Whom lookup names as the leaders that take its publishes, for people to read."""

        @property
        def sender(self) -> Abandoning:
            """Who sends for it."""

        def remove_ended(self) -> None:
            """Forget what ended while it waited."""

    class PendingPublishes(Protocol):
        """Those that have not ended; see ``pending``."""

        def replace(self, publish: Publish, parts: Sequence[Publish]) -> None:
            """``parts`` are pending in place of ``publish``, which need not have been yet; they have one deadline."""

    class Promise(Protocol):
        """What gets the result of a publish, once, in the hub's thread: an AsyncResult, or what has its setters."""

        def set(self, value: Any) -> object:
            """It went well."""

        def set_exception(self, error: BaseException) -> object:
            """It did not."""


class Publish(PublishState):
    """One publish: what a caller waits for, or holds the AsyncResult of.

    Attributes:
        destination: where it goes.
        deadline: when it has to be over, ``time.monotonic``.
        timeout: its own, in seconds; None: that of the producer.
        key, pin: what its partition follows from, where it must go to one; ``pin`` is the number, once it is known.
        partition: where it was stored; None when the server was to choose.
        receipts: what the server said of it, when it was traced.
        group: what it is a part of.
        is_prompt: its command leaves at once, not at the end of the hub's turn, although nobody waits in the hub.
    """

    __slots__ = ("deadline", "destination", "promised", "waiter")

    timeout: float | None = None
    key: Key | None = None
    pin: int | None = None
    partition: int | None = None
    receipts: list[Receipt] = []  # noqa: RUF012  # never changed in place
    group: Group | None = None
    is_prompt = False

    def __init__(
        self, destination: Destination, body: Any, deadline: float, form: Form = PLAIN, weight: int = 1
    ) -> None:
        # Not by super(): one is made for each publish.
        self.body = body
        self.form = form
        self.weight = weight
        self.is_alone = form is not PLAIN and form.is_alone
        self.attempt = None
        self.done = False
        self.error = None
        self.destination = destination
        self.deadline = deadline
        self.waiter: Any = None
        self.promised: Promise | None = None

    @property
    def topic(self) -> str:
        """Its topic."""
        return self.destination.topic

    def promise(self) -> AsyncResult[Any]:
        """An AsyncResult of it. Ask before it is sent."""
        result: AsyncResult[Any] = AsyncResult()
        self.promised = result
        return result

    def wait(self, wakeups: Wakeups) -> Any:
        """Block the calling greenlet until it is done; return its value or raise its error."""
        command = self.attempt
        # Of several that were woken together, each would keep the next one waiting.
        if command is not None and not self.done and not wakeups.is_waking:
            self.waiter = getcurrent()
            conn = command.conn
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
        form = self.form
        return OK if form is PLAIN or form is PLAIN_BATCH else self.value()

    @property
    def callers(self) -> int:
        """How many calls it stands for."""
        return 1

    def split(self, pending: PendingPublishes) -> Sequence[Publish]:
        """What has an end of its own, before one of an error: itself, or the publishes that it stands for."""
        return (self,)

    def value(self) -> Any:
        """What it ended with when it went well."""
        return self.form.result(self.receipts, self.partition)

    def results(self) -> list[Any]:
        """What became of each of its messages, now that it has ended: OK, a Receipt, or the exception."""
        if self.error is None:
            return self.receipts or [OK] * self.weight
        return [self.error] * self.weight

    def end_batch(self) -> None:
        """It has ended, and is all that a call published as a batch: its error says what became of each message."""
        if isinstance(self.error, (NoNsqd, PublishFailed)):
            self.error.results = self.results()

    def wake(self, wakeups: Wakeups) -> None:
        """It has ended: tell whoever waits for it."""
        if self.waiter is not None:
            wakeups.add(self)
        elif self.promised is not None:
            promise, self.promised = self.promised, None  # which may know this publish: they would be a cycle
            _keep_promise(promise, self)
        elif self.group is not None:
            self.group.part_done(self.error, wakeups)


class Group:
    """The publishes that one call made: it ends with their results when all went well; else with the first error.

    The error says ``possibly_stored`` as soon as any part was or may have been stored.
    """

    def __init__(self, parts: Iterable[Publish]) -> None:
        self.done = False
        self.waiter: Any = None
        self.error: BaseException | None = None
        self.promised: Promise | None = None
        self._parts = list(parts)
        self._left = len(self._parts)
        self._is_any_stored = False
        for part in self._parts:
            part.group = self

    def promise(self) -> AsyncResult[Any]:
        """An AsyncResult of it. Ask before any part is sent."""
        result: AsyncResult[Any] = AsyncResult()
        self.promised = result
        return result

    def wait(self, wakeups: Wakeups) -> Any:
        """Block the calling greenlet until it is done; return its value or raise its error."""
        if not self.done:
            self.waiter = getcurrent()
            try:
                wakeups.sleep()
            finally:
                self.waiter = None
        if self.error is not None:
            raise self.error
        return self.value()

    def value(self) -> Any:
        """What it ended with when it went well."""
        values = [part.value() for part in self._parts]
        return OK if OK in values else [receipt for value in values for receipt in value]

    def _whole_error(self) -> BaseException | None:
        """The first error, with what became of each message; it tells when any of them may be stored."""
        error = self.error
        if isinstance(error, NoNsqd) and self._is_any_stored:
            error = PublishFailed(f"a part of the batch was not sent: {error}", attempts=0)
            error.__cause__ = self.error
        if isinstance(error, PublishFailed):
            error.possibly_stored |= self._is_any_stored
        if isinstance(error, (NoNsqd, PublishFailed)):
            error.results = [result for part in self._parts for result in part.results()]
        return error

    def part_done(self, error: BaseException | None, wakeups: Wakeups) -> None:
        """Count one part."""
        self._left -= 1
        self._is_any_stored |= error is None or getattr(error, "possibly_stored", False)
        self.error = self.error or error
        if self._left:
            return
        self.error = self._whole_error()
        self.done = True
        if self.waiter is not None:
            wakeups.add(self)
        elif self.promised is not None:
            _keep_promise(self.promised, self)


def _keep_promise(result: Promise, ended: Publish | Group) -> None:
    """Give it what a call has ended with."""
    if ended.error is None:
        result.set(ended.value())
    else:
        result.set_exception(ended.error)


class Command:
    """One command on the wire, and the publishes that it carries: the token of its reply.

    Attributes:
        name: PUB, MPUB and so on; its sender sets it.
        partition: where it goes; None leaves that to the server.
        conn: the connection that owes the reply, which its sender sets; None once it is over.
        is_overdue: a publish in it ended before the reply came.
    """

    __slots__ = ("conn", "destination", "is_overdue", "name", "partition", "publishes")

    def __init__(self, destination: Destination, publishes: list[Publish], partition: int | None) -> None:
        self.destination = destination
        self.publishes = publishes
        self.partition = partition
        self.name: str
        self.conn: Connection | None
        self.is_overdue = False
