"""A Producer in a hub thread, and the publishes that other threads hand over to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

from nsq_fast._codec import mpub_size
from nsq_fast._plain_publish import RequestQueue
from nsq_fast.errors import NotRunning, PublishFailed
from nsq_fast.names import check_topic
from nsq_fast.protocol.wire_form import OK
from nsq_fast.runtime.owner_thread import get_ident
from nsq_fast.runtime.producer import Producer
from nsq_fast.runtime.publishing.compose import owned, size_of
from nsq_fast.runtime.publishing.delivery import Delivery
from nsq_fast.runtime.publishing.joined import JoinedPublish, sends_now
from nsq_fast.runtime.publishing.life import check_timeout
from nsq_fast.runtime.publishing.publish import Group, Publish
from nsq_fast.runtime.waiting import is_interrupting

from .direct import DirectSender
from .gathering import Gathering
from .hub_thread import HubThread
from .reply import Reply
from .requests import JoinedRequests, PlainRequest, PublishRequest, Request

if TYPE_CHECKING:
    from nsq_fast.runtime.publishing.publish import Promise


class CrossingProducer(Producer):
    """A Producer that takes publishes from other threads. Its methods belong to the hub thread; others say so.

    Attributes:
        queue: the requests that are not taken.
        gathering: wakes the threads that wait for some.
        direct: sends for an event loop while the hub thread sleeps.
    """

    def live_in(self, hub_thread: HubThread) -> CrossingProducer:
        """Say in which thread it is; returns itself."""
        self._hub_thread = hub_thread
        self._entering: set[Request] = set()  # they wait for room in jobs of their own: nobody may pass them
        self.gathering = Gathering(hub_thread, self._take)
        self.queue = RequestQueue(PlainRequest, OK, hub_thread, self._take)
        self._requests: deque[Request] = self.queue.requests
        self._most_joined = 1 if self._delivery.lingers else self._delivery.most
        self.direct = DirectSender(
            hub_thread, self._delivery, self._timeout, self._trace, self._requests, lambda: self._routes
        )
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
        return Reply(open_latch=self.gathering.answer)

    def hand_over(self, request: PublishRequest) -> None:
        """Have a request taken soon, with all others of the moment. In any thread. Raises NotRunning.

        One that does not wait raises PublishFailed at once when as many are pending as may be.
        """
        limit = self._pending_limit
        if not request.waits and limit.used + len(self._requests) + self.direct.is_used >= limit.limit:
            raise PublishFailed(f"publish to {request.topic!r}: {self._full()}", attempts=0)
        self.queue.hand_over(request)

    def _take(self) -> None:
        queue, gathering = self.queue, self.gathering
        queue.is_taking = True  # what comes meanwhile gathers, or is taken next
        is_gathering = False
        try:
            self.direct.requested()
            self._take_present()
            if gathering.waiting:
                is_gathering = gathering.begins(_calls_pending(list(self._clusters), len(gathering.waiting)))
        finally:
            queue.is_taking = is_gathering
            if not is_gathering and self._requests and not self._hub_thread.is_over:  # they came before that was said
                queue.is_taking = True
                self._hub_thread.submit(self._take)

    def _take_present(self) -> None:
        """Take the requests that there are. Those that come meanwhile may leave with more."""
        gathering, requests = self.gathering, self._requests
        left = len(requests)
        if gathering.is_on:
            gathering.end()
            self._wakeups.is_waking = left > 1  # they leave together
        while left > 0 and requests:
            if isinstance(requests[0], PlainRequest):
                plain, bodies = self.queue.take_alike(min(left, self._most_joined))
                left -= len(plain) or 1
                if plain:
                    self._admit_plain(plain, bodies)
                continue
            left -= 1
            request = requests.popleft()
            if request.latch is not None and not request.is_cancelled:
                gathering.waiting.add(request.latch)
            self._admit(request)
        self._wakeups.is_waking = False

    def thread_ended(self, error: NotRunning) -> None:
        """The hub thread fails: tell those who wait for a publish, each whether it may be stored. Does not block."""
        self._is_running, self._is_closed = False, True
        self.direct.stop()
        self.gathering.close()
        pending = [
            part
            for delivery in self._clusters
            for publish in list(delivery.pending.publishes)
            for part in publish.split(delivery.pending)
        ]
        waiting = [*self._requests, *self._entering]
        for request in waiting:
            _fail_for_good(request.promise, error, any(_may_be_stored(part) for part in request.parts))
        told = {id(request.promise) for request in waiting}
        for part in pending:
            promise = part.promised if part.group is None else part.group.promised
            if promise is not None and id(promise) not in told:
                told.add(id(promise))
                _fail_for_good(promise, error, part.group is not None or _may_be_stored(part))
        self.gathering.close()

    def _admit_plain(self, requests: list[PlainRequest], bodies: list[Any]) -> None:
        """Take requests to one topic; ``bodies`` are theirs. Where nothing is left to check they are one command."""
        requests[0].callers.taken(requests)
        route = self._routes.get(requests[0].topic)
        limit = self._pending_limit
        count = len(requests)
        if (
            (route is None or not self._is_running or self._entering or self._trace.is_active)
            or (limit.queue or limit.used + count > limit.limit)
            or not 0 < mpub_size(bodies, route.plain_size) <= self._delivery.enough
            or not (count == 1 or sends_now(route.any))
        ):
            for request in requests:
                self._admit(request)
            return
        deadline = monotonic() + self._timeout
        if count == 1:
            publish = Publish(route.any, bodies[0], deadline)
            publish.promised = requests[0]
        else:
            joined = JoinedRequests(requests, self._delivery.outcomes)
            publish = JoinedPublish(route.any, bodies, deadline, joined)
        parts = (publish,)
        for request in requests:
            request.parts = parts
        route.is_used = True
        limit.used += count
        route.any.add(publish)

    def _admit(self, request: Request) -> None:
        """Take a request: send it, or have it wait for room. Its promise gets what goes wrong. Does not block."""
        if request.is_cancelled:
            return
        try:
            if isinstance(request.content, bytes):
                parts = [self._new(request.topic, request.content, request.defer, request.timeout, request.extras)]
            else:
                parts = self._parts(request.topic, request.content, request.timeout, request.extras)
            request.parts = parts
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

    def _wait_or_fail(self, request: Request, parts: list[Publish]) -> None:
        if request.waits:
            self._entering.add(request)
            request.job = self._hub_thread.start_job(self._enter_later, request, parts)
        else:
            self._fail(request, PublishFailed(f"publish to {request.topic!r}: {self._full()}", attempts=0))

    def _enter_later(self, request: Request, parts: list[Publish]) -> None:
        try:
            for part in parts:
                self._wait_for_room(part)
                part.destination.add(part)
        except Exception as error:
            self._fail(request, error)
        finally:
            self._entering.discard(request)
            request.job = None

    def _fail(self, request: Request, error: Exception) -> None:
        """A part could not enter: those before it that were not sent will not be."""
        if isinstance(error, PublishFailed):
            error.possibly_stored |= any(_may_be_stored(part) for part in request.parts)
        for part in request.parts:
            part.group = None
            part.promised = None
        _abandon_entered(request, self._clusters)
        request.promise.set_exception(error)

    def abandon(self, request: Request) -> bool:
        """Nobody waits for it any more: what was not sent will not be. Returns whether any of it may be stored."""
        request.is_cancelled = True
        if request.latch is not None:
            self.gathering.waiting.discard(request.latch)
        if request.job is not None:
            request.job.kill(block=False)
            self._entering.discard(request)  # a job that had not begun does not do it
        for part in request.parts:
            if isinstance(part, JoinedPublish):
                return _may_be_stored(part)  # it was sent, and the others in it go on
            part.group = None
            part.promised = None
        _abandon_entered(request, self._clusters)
        return any(_may_be_stored(part) for part in request.parts)

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


def _calls_pending(clusters: Sequence[Delivery], enough: int) -> int:
    """How many calls wait for what is pending; or another number above ``enough``, where that many publishes are."""
    count = sum(len(delivery.pending.publishes) for delivery in clusters)
    return count if count > enough else sum(delivery.pending.count() for delivery in clusters)


def _abandon_entered(request: Request, clusters: Iterable[Delivery]) -> None:
    for part in request.parts:
        if any(part in each.pending.publishes for each in clusters):  # those that wait for room are not
            part.destination.sender.abandon(part)


def _fail_for_good(promise: Promise, cause: NotRunning, possibly_stored: bool) -> None:
    error = PublishFailed(f"{cause}: nobody can say any more what became of it", possibly_stored=possibly_stored)
    error.__cause__ = cause
    promise.set_exception(error)


def _may_be_stored(publish: Publish) -> bool:
    return publish.may_be_stored or (publish.done and publish.error is None)
