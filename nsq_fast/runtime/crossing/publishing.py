"""A Producer in a hub thread, and the publishes that other threads hand over to it."""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import Any

from nsq_fast._latch import Latch
from nsq_fast.errors import NotRunning, PublishFailed
from nsq_fast.names import check_topic
from nsq_fast.runtime.owner_thread import get_ident
from nsq_fast.runtime.producer import Producer
from nsq_fast.runtime.publishing.compose import Extras, owned, size_of
from nsq_fast.runtime.publishing.life import check_timeout
from nsq_fast.runtime.publishing.publish import Group, Promise, Publish
from nsq_fast.runtime.supervised import Job
from nsq_fast.runtime.waiting import is_interrupting

from .gathering import FEWEST, Gathering
from .hub_thread import HubThread
from .reply import Reply


class PublishRequest:
    """One call of publish or multipublish, on its way to the hub thread.

    Args:
        topic, defer, timeout, extras: as the arguments of ``Producer.publish``.
        content: a body as bytes, or a list of bodies.
        waits: for room below ``max_pending``, and for a connection. Otherwise it fails where there is none.
        needs_nsqd: it fails also where no nsqd is connected.
        promise: gets the result, in the hub thread.
        latch: what a thread waits for, where one does.
    """

    __slots__ = ("content", "defer", "extras", "is_cancelled", "job", "latch", "needs_nsqd", "parts", "promise",
                 "timeout", "topic", "waits")  # fmt: skip

    def __init__(
        self,
        topic: str,
        content: Any,
        defer: int | None,
        timeout: float | None,
        extras: Extras,
        promise: Promise,
        *,
        waits: bool,
        needs_nsqd: bool = False,
        latch: Latch | None = None,
    ) -> None:
        self.topic = topic
        self.content = content
        self.defer = defer
        self.timeout = timeout
        self.extras = extras
        self.promise = promise
        self.waits = waits
        self.needs_nsqd = needs_nsqd
        self.latch = latch
        self.parts: list[Publish] = []  # what it has become in the hub thread
        self.job: Job | None = None  # what waits for room there
        self.is_cancelled = False

    @property
    def weight(self) -> int:
        """How many messages it is."""
        return 1 if isinstance(self.content, bytes) else len(self.content)


class CrossingProducer(Producer):
    """A Producer that takes publishes from other threads. Its methods belong to the hub thread; others say so."""

    def live_in(self, hub_thread: HubThread) -> CrossingProducer:
        """Say in which thread it is; returns itself."""
        self._hub_thread = hub_thread
        self._requests: deque[PublishRequest] = deque()
        self._is_taking = False
        self._entering: set[PublishRequest] = set()  # they wait for room in jobs of their own: nobody may pass them
        self._gathering = Gathering(hub_thread, self._take)
        hub_thread.close_at_exit(self)
        hub_thread.tell_end(self)
        return self

    def body_of(self, topic: Any, body: Any, timeout: Any) -> bytes:
        """The body of a publish, as bytes of its own. In any thread: it only reads.

        Raises what is wrong with a topic, a body or a timeout, at once and where it was called.
        """
        self._check(topic, timeout)
        if body.__class__ is not bytes or not body:
            size_of(body)
        return bytes(body)

    def bodies_of(self, topic: Any, bodies: Any, timeout: Any) -> list[Any]:
        """As ``body_of``, for a multipublish. What is wrong with one of the bodies is said later."""
        self._check(topic, timeout)
        return owned(bodies)

    def _check(self, topic: Any, timeout: Any) -> None:
        if not self.is_running:
            raise self._not_running()
        if timeout is not None:
            check_timeout(timeout)
        if topic.__class__ is not str or topic not in self._routes:
            check_topic(topic)

    def reply(self) -> Reply:
        """What the calling thread, or greenlet, waits for when it publishes."""
        return Reply(open_latch=self._gathering.answer)

    def hand_over(self, request: PublishRequest) -> None:
        """Have a request taken soon, with all others of the moment. In any thread. Raises NotRunning.

        One that does not wait raises PublishFailed at once when as many are pending as may be.
        """
        limit = self._pending_limit
        if not request.waits and limit.used + len(self._requests) >= limit.limit:
            raise PublishFailed(f"publish to {request.topic!r}: {self._full()}", attempts=0)
        self._requests.append(request)
        # That the thread has failed is looked at afterwards: it looks at the requests after it has said so.
        if not self._is_taking or self._hub_thread.is_over:
            self._is_taking = True
            self._hub_thread.submit(self._take)

    def _take(self) -> None:
        self._is_taking = False  # before the requests are looked at: none can come in between and not be seen
        gathering = self._gathering
        requests = self._requests
        if gathering.is_on:
            gathering.end()
            self._wakeups.is_waking = len(requests) > 1  # they leave together
        while requests:
            request = requests.popleft()
            if request.latch is not None and not request.is_cancelled:
                gathering.waiting.add(request.latch)
            self._admit(request)
        self._wakeups.is_waking = False
        if len(gathering.waiting) >= FEWEST:
            pending = sum(len(delivery.pending.publishes) for delivery in self._clusters)
            self._is_taking |= gathering.begins(pending)

    def thread_ended(self, error: NotRunning) -> None:
        """The hub thread fails: tell those who wait for a publish, each whether it may be stored. Does not block."""
        self._is_running, self._is_closed = False, True
        self._gathering.close()
        pending = [part for delivery in self._clusters for part in delivery.pending.publishes]
        waiting = [*self._requests, *self._entering]
        for request in waiting:
            _fail_for_good(request.promise, error, any(_may_be_stored(part) for part in request.parts))
        told = {id(request.promise) for request in waiting}
        for part in pending:
            promise = part.promised if part.group is None else part.group.promised
            if promise is not None and id(promise) not in told:
                told.add(id(promise))
                _fail_for_good(promise, error, part.group is not None or _may_be_stored(part))
        self._gathering.close()

    def _admit(self, request: PublishRequest) -> None:
        """Take a request: send it, or have it wait for room. Its promise gets what goes wrong. Does not block."""
        if request.is_cancelled:
            return
        try:
            parts = request.parts = self._compose(request)
            whole: Publish | Group = parts[0] if len(parts) == 1 else Group(parts)
            whole.promised = request.promise
            if request.needs_nsqd and (nowhere := parts[0].destination.sender.why_nowhere(parts[0])):
                raise nowhere
        except Exception as error:
            request.promise.set_exception(error)
            return
        limit = self._pending_limit
        for number, part in enumerate(parts):
            if self._entering or not limit.fits(part.weight):
                self._wait_or_fail(request, parts[number:])
                return
            limit.used += part.weight
            part.destination.add(part)

    def _compose(self, request: PublishRequest) -> list[Publish]:
        if isinstance(request.content, bytes):
            return [self._new(request.topic, request.content, request.defer, request.timeout, request.extras)]
        return self._parts(request.topic, request.content, request.timeout, request.extras)

    def _wait_or_fail(self, request: PublishRequest, parts: list[Publish]) -> None:
        if request.waits:
            self._entering.add(request)
            request.job = self._hub_thread.start_job(self._enter_later, request, parts)
        else:
            self._fail(request, PublishFailed(f"publish to {request.topic!r}: {self._full()}", attempts=0))

    def _enter_later(self, request: PublishRequest, parts: list[Publish]) -> None:
        try:
            for part in parts:
                self._wait_for_room(part)
                part.destination.add(part)
        except Exception as error:
            self._fail(request, error)
        finally:
            self._entering.discard(request)
            request.job = None

    def _fail(self, request: PublishRequest, error: Exception) -> None:
        """A part could not enter: those before it that were not sent will not be."""
        if isinstance(error, PublishFailed):
            error.possibly_stored |= any(_may_be_stored(part) for part in request.parts)
        for part in request.parts:
            part.group = None
            part.promised = None
        self._abandon_entered(request)
        request.promise.set_exception(error)

    def abandon(self, request: PublishRequest) -> bool:
        """Nobody waits for it any more: what was not sent will not be. Returns whether any of it may be stored."""
        request.is_cancelled = True
        if request.latch is not None:
            self._gathering.waiting.discard(request.latch)
        if request.job is not None:
            request.job.kill(block=False)
            self._entering.discard(request)  # a job that had not begun does not do it
        for part in request.parts:
            part.group = None
            part.promised = None
        self._abandon_entered(request)
        return any(_may_be_stored(part) for part in request.parts)

    def _abandon_entered(self, request: PublishRequest) -> None:
        for part in request.parts:
            if any(part in each.pending.publishes for each in self._clusters):  # those that wait for room are not
                part.destination.sender.abandon(part)

    def close(self, timeout: float | None = None) -> None:
        """As ``Producer.close``. What was handed over before is published."""
        self._thread.check("Producer.close()")
        self._take()
        super().close(timeout)

    def close_from_outside(self, timeout: float | None) -> None:
        """``close``, in any thread; where that must not wait, it only begins to."""
        check_timeout(timeout)
        thread = self._hub_thread
        if is_interrupting() or get_ident() == thread.ident:
            thread.submit(thread.start_job, self.close, timeout)
        else:
            thread.call(self.close, timeout)

    def close_in_background(self) -> None:
        """Nobody waits for anything any more: close. Does not block."""
        self._hub_thread.start_job(self.close)

    def close_at_exit(self, timeout: float) -> int:
        """Close within ``timeout`` seconds; return how many messages were not confirmed."""
        if not self._is_running:
            return 0
        end = monotonic() + timeout
        self._take()
        for delivery in self._clusters:
            delivery.linger.flush()
            delivery.pending.wait_for_none(max(0.0, end - monotonic()))
        lost = self.count_unconfirmed()
        self.close(0.1)
        return lost

    def count_unconfirmed(self) -> int:
        """How many messages were handed over and are not confirmed. In the hub thread, or while that is stuck."""
        # Of copies: a thread that turns out not to be stuck may change them meanwhile.
        parts: set[Publish] = set().union(*(delivery.pending.publishes for delivery in self._clusters))
        for request in list(self._entering):  # of these some parts wait for room
            parts.update(part for part in request.parts if not part.done)
        return sum(part.weight for part in parts) + sum(request.weight for request in list(self._requests))


def _fail_for_good(promise: Promise, cause: NotRunning, possibly_stored: bool) -> None:
    error = PublishFailed(f"{cause}: nobody can say any more what became of it", possibly_stored=possibly_stored)
    error.__cause__ = cause
    promise.set_exception(error)


def _may_be_stored(publish: Publish) -> bool:
    return publish.may_be_stored or (publish.done and publish.error is None)
