"""The Producer of threads: every call waits in its own thread, while the hub thread does the work.

A call checks what it can, appends a ``Request`` to a queue, wakes the hub thread, and waits for a lock that this
releases with the result. What was handed over in one moment leaves together.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from gevent._hub_local import get_hub_if_exists
from gevent.exceptions import HubDestroyed

from nsq_fast._publish_path import PlainPath, wake_all
from nsq_fast.bridge import HubThread, Place, Reply, arguments_of
from nsq_fast.client.gevent_loop import run
from nsq_fast.client.loop import check_end_timeout
from nsq_fast.client.publishes import (
    NO_OPTIONS,
    Group,
    Publish,
    PublishOptions,
    check_defer,
    check_timeout,
    owned,
)
from nsq_fast.errors import NotRunning, PublishFailed
from nsq_fast.log_events import EXIT_IGNORED
from nsq_fast.names import check_topic
from nsq_fast.producer import AllStored, BlockingCalls, Stored
from nsq_fast.producer import Producer as GeventProducer
from nsq_fast.protocol.publishing import OK

if TYPE_CHECKING:
    from typing_extensions import Self

    from nsq_fast.client.progress import ProducerProgress
    from nsq_fast.client.publishes import Promise

logger: logging.Logger = logging.getLogger(__name__)


FEWEST = 4
"""Where so many threads wait for replies, requests gather: two or three are faster if each leaves at once."""

LONGEST = 0.002
"""Seconds that a request waits for the replies to others. A server that takes longer is far away, or busy."""

TOLERATED, REST = 3, 0.1
"""After so many such waits on end, so many seconds without gathering."""


class Request:
    """One call of publish or multipublish, on its way to the hub thread.

    Args:
        destination: what takes it.
        topic, defer, timeout, options: as the arguments of ``Producer.publish``.
        content: a body as bytes, or a list of bodies.

    Attributes:
        waits: for room below ``max_pending``, and for a connection. Otherwise it fails where there is none.
        needs_nsqd: it fails also where no nsqd is connected.
        promised: gets the result, in the hub thread.
        parts: what it has become in the hub thread.
        job: what waits for room there.
        is_cancelled: its caller was interrupted, and waits no longer.
    """

    __slots__ = (
        "content", "defer", "destination", "is_cancelled", "job", "needs_nsqd", "options", "parts", "promised",
        "timeout", "topic", "waits",
    )  # fmt: skip

    needs_nsqd: bool
    waits: bool

    def __init__(
        self,
        destination: HubProducer,
        topic: str,
        content: Any,
        defer: int | None,
        timeout: float | None,
        options: PublishOptions,
    ) -> None:
        self.destination: HubProducer = destination
        self.topic: str = topic
        self.content: Any = content
        self.defer: int | None = defer
        self.timeout: float | None = timeout
        self.options: PublishOptions = options
        self.promised: Any = None
        self.waits = self.needs_nsqd = False
        self.parts: Sequence[Publish] = ()
        self.job: Any = None
        self.is_cancelled: bool = False

    @property
    def weight(self) -> int:
        """How many messages it is."""
        return 1 if isinstance(self.content, bytes) else len(self.content)


class PlainRequest(PlainPath):
    """A Request of one body without other arguments, and what its caller, a thread, waits for: most are so."""

    __slots__ = ()

    defer = timeout = None
    options = NO_OPTIONS
    waits = True
    needs_nsqd = False
    weight = 1

    @property
    def promised(self) -> PlainRequest:
        """What gets the result."""
        return self


class HubProducer(GeventProducer):
    """A Producer in the hub thread that takes publishes of others. Its methods belong to that thread; others say so.

    A thread that hands a request over wakes the hub thread, and both want the interpreter's lock (GIL): with sixteen
    threads these switches take most of the time. But while replies to some of them are due in a moment, the hub thread
    wakes up for these anyway: what others hand over meanwhile waits for that, and leaves as one command
    (``nsq-fast bench publish --client "nsq_fast threads" --mode concurrent``).
    """

    def live_in(self, hub_thread: HubThread) -> HubProducer:
        """Say in which thread it is; returns itself."""
        self._hub_thread = hub_thread
        self._requests: deque[AnyRequest] = deque()
        self._turn, self._woken_in = 0, -1
        self._blocked: set[PlainRequest] = set()  # threads wait for their ends
        self._answered: list[PlainRequest] = []  # their threads are woken at the end of this turn
        self._returning = 0  # threads that were woken together last, and may publish again
        self._gathers_until: Any = None  # a timer; None while nothing gathers
        self._in_vain, self._rests_until = 0, 0.0
        self._entering: set[AnyRequest] = set()  # they wait for room in jobs of their own: nobody may pass them
        hub_thread.adopt(self)
        return self

    def body_of(self, topic: Any, body: Any, timeout: Any, defer: Any, options: PublishOptions) -> bytes:
        """The body of a publish, as bytes of its own. In any thread: it only reads.

        Raises what is wrong with an argument at once and where it was called.
        """
        self._check_call(topic, timeout)
        if defer is not None:
            check_defer(defer)
        self._composer.check_size(body)
        if options is not NO_OPTIONS:
            self._composer.check_options(options)
        return bytes(body)

    def bodies_of(self, topic: Any, bodies: Any, timeout: Any) -> list[Any]:
        """As ``body_of``, for a multipublish. What is wrong with one of the bodies is said later."""
        self._check_call(topic, timeout)
        return owned(bodies)

    def _check_call(self, topic: Any, timeout: Any) -> None:
        if not self.is_running:
            raise self._not_running()
        if timeout is not None:
            check_timeout(timeout)
        if topic.__class__ is not str or topic not in self._routes:
            check_topic(topic)

    def check_room(self, request: Request) -> None:
        """Raise PublishFailed when as many are pending as may be. In any thread."""
        limit = self._pending_limit
        if limit.used + len(self._requests) >= limit.limit:
            raise PublishFailed(f"publish to {request.topic!r}: {self._full()}", attempts=0)

    def hand_over_plain(self, topic: str, body: bytes) -> PlainRequest | None:
        """Have one body taken, without other arguments. None: there is more to check; nothing was done."""
        if not self._is_running or self._trace.is_active or topic not in self._routes or not body:
            return None
        request = PlainRequest(self, topic, body)
        self.add(request)
        return request

    def add(self, request: AnyRequest) -> None:
        """Have a request taken soon, with all others of the moment, and wake the hub thread, unless it will look all
        the same. In any thread. Raises NotRunning.

        Whatever raises in between, as handlers of Unix signals do, the next caller wakes it. Whoever finds that it was
        woken in this turn has added before it looks, which is after it has begun another turn.
        """
        self._requests.append(request)
        turn = self._turn
        if self._woken_in != turn or self._hub_thread.is_over:
            self._hub_thread.submit(self._take)
            self._woken_in = turn

    def _take(self) -> None:
        self._turn += 1
        if self._gathers_until is not None:
            self._gathers_until.cancel()
            self._gathers_until = None
        requests = self._requests
        self._wakeups.is_waking = len(requests) > 1  # they leave together
        try:
            while requests:
                request = requests.popleft()
                is_plain = isinstance(request, PlainRequest) and not self._entering and not request.is_cancelled
                if not (is_plain and self._sent_for_thread(request, self._blocked)):
                    self._admit(request)
        finally:
            self._wakeups.is_waking = False
        if self._blocked and len(self._blocked) + self._returning >= FEWEST and monotonic() >= self._rests_until:
            self._gathers_until = self._loop.call_later(LONGEST, self._gathered_in_vain)
            self._woken_in = self._turn  # nobody need wake it
            if requests:  # they came before that was said
                self._hub_thread.submit(self._take)

    def _gathered_in_vain(self) -> None:
        """No reply has come: the server is far away, or busy. After some such waits nothing gathers for a while."""
        self._gathers_until = None
        self._in_vain += 1
        if self._in_vain >= TOLERATED:
            self._rests_until = monotonic() + REST
        self._take()

    def answered(self, requests: list[PlainRequest]) -> None:
        """They have ended: their threads go on soon, with the others of this turn."""
        self._blocked.difference_update(requests)
        self._answered += requests
        if len(self._answered) == len(requests):  # where there is no other turn this wakes them now
            self._hub_thread.at_end_of_turn(self._wake_threads)

    def _wake_threads(self) -> None:
        answered, self._answered = self._answered, []
        self._returning = len(answered)
        wake_all(answered)
        self._in_vain = 0
        if self._gathers_until is not None:
            self._take()

    def _admit(self, request: AnyRequest) -> None:
        """Take a request: send it, or have it wait for room. Its promise gets what goes wrong. Does not block."""
        if request.is_cancelled:
            return
        try:
            if isinstance(request.content, bytes):
                parts = [self._new(request.topic, request.content, request.defer, request.timeout, request.options)]
            else:
                parts = self._parts(request.topic, request.content, request.timeout, request.options)
            request.parts = parts
            whole: Publish | Group = parts[0] if len(parts) == 1 else Group(parts)
            whole.promised = request.promised
            if request.needs_nsqd and (nowhere := parts[0].destination.why_nowhere(parts[0])):
                raise nowhere
        except Exception as error:
            request.promised.set_exception(error)
            return
        limit = self._pending_limit
        for number, part in enumerate(parts):
            if self._entering or not limit.fits(part.weight):
                self._wait_or_fail(request, parts[number:])
                return
            limit.used += part.weight
            part.destination.add(part)

    def _wait_or_fail(self, request: AnyRequest, parts: list[Publish]) -> None:
        if request.waits:
            self._entering.add(request)
            request.job = self._hub_thread.start_job(self._enter_later, request, parts)
        else:
            self._fail(request, PublishFailed(f"publish to {request.topic!r}: {self._full()}", attempts=0))

    def _enter_later(self, request: AnyRequest, parts: list[Publish]) -> None:
        try:
            for part in parts:
                run(self._wait_for_room(part))
                part.destination.add(part)
        except Exception as error:
            self._fail(request, error)
        finally:
            self._entering.discard(request)
            request.job = None

    def _fail(self, request: AnyRequest, error: Exception) -> None:
        """A part could not enter: those before it that were not sent will not be."""
        is_stored = self._let_go(request)
        if isinstance(error, PublishFailed):
            error.possibly_stored |= is_stored
        request.promised.set_exception(error)

    def abandon(self, request: AnyRequest) -> bool:
        """Nobody waits for it any more: what was not sent will not be. Returns whether any of it may be stored."""
        request.is_cancelled = True
        self._blocked.discard(request)
        if request.job is not None:
            request.job.kill(block=False)
            self._entering.discard(request)  # a job that had not begun does not do it
        return self._let_go(request)

    def _let_go(self, request: AnyRequest) -> bool:
        for part in request.parts:
            part.group = part.promised = None
        return self._withdraw(request.parts)

    def thread_ended(self, error: NotRunning) -> None:
        """The hub thread fails: tell those who wait for a publish, each whether it may be stored. Does not block."""
        self._is_running, self._is_closed = False, True
        self._gathers_until = None
        self._wake_threads()
        waiting = [*self._requests, *self._entering]
        told = {id(request.promised) for request in waiting}
        for request in waiting:
            _fail_for_good(request.promised, error, any(part.may_be_stored for part in request.parts))
        for part in list(self._sender.pending.publishes):
            promise = part.promised if part.group is None else part.group.promised
            if promise is not None and id(promise) not in told:
                told.add(id(promise))
                _fail_for_good(promise, error, part.group is not None or part.may_be_stored)

    def close(self, timeout: float | None = None) -> None:
        """As ``nsq_fast.Producer.close``. What was handed over before is published."""
        self._thread.check("Producer.close()")
        self._take()
        super().close(timeout)

    def close_at_exit(self, timeout: float) -> int:
        """Close within ``timeout`` seconds; return how many messages were not confirmed."""
        if not self._is_running:
            return 0
        end = monotonic() + timeout
        self._take()
        self._sender.flush()
        run(self._sender.pending.wait_for_none(max(0.0, end - monotonic())))
        lost = self.count_unconfirmed()
        self.close(0.1)
        return lost

    def count_unconfirmed(self) -> int:
        """How many messages were handed over and are not confirmed. In the hub thread, or while that is stuck."""
        # Of copies: a thread that turns out not to be stuck may change them meanwhile.
        parts: set[Publish] = set(self._sender.pending.publishes.copy())
        for request in list(self._entering):  # of these some parts wait for room
            parts.update(part for part in request.parts if not part.done)
        return sum(part.weight for part in parts) + sum(request.weight for request in list(self._requests))


AnyRequest: TypeAlias = Request | PlainRequest


def _fail_for_good(promise: Promise, cause: NotRunning, possibly_stored: bool) -> None:
    error = PublishFailed(f"{cause}: nobody can say any more what became of it", possibly_stored=possibly_stored)
    error.__cause__ = cause
    promise.set_exception(error)


class _Promise(Future[Any]):
    """A Future that gets what a publish ends with."""

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()  # it is on its way: nothing can be cancelled

    def set(self, value: Any) -> None:
        """It went well."""
        with _going_on():
            self.set_result(value)

    def set_exception(self, error: BaseException | None) -> None:
        """It did not."""
        with _going_on():
            super().set_exception(error)


@contextmanager
def _going_on() -> Iterator[None]:
    """A callback of a Future that exits must keep nobody else's result back."""
    try:
        yield
    except HubDestroyed:  # kept back in the middle of a callback, the loop of the hub would run on in freed memory
        raise
    except BaseException as error:
        logger.error("%r of a callback of a Future ends nothing", error, extra=EXIT_IGNORED)


class Producer(BlockingCalls[Future[Stored], Future[AllStored]]):
    """Publishes messages, from any number of threads.

    Arguments, options, guarantees and errors are those of ``nsq_fast.Producer``. A method blocks the thread that calls
    it, or the greenlet where that thread runs a hub of gevent, and no other. Keyed publishes keep the order of the
    calls of each thread.

    A producer that nobody closes is closed at the end of the interpreter, which waits two seconds for what is pending
    and says in one line how many publishes were not confirmed. A child of a fork has a thread and connections of
    its own, from its first publish on.
    """

    _is_started = False
    _new_promise = _Promise

    @arguments_of(GeventProducer.__init__)
    def __init__(self, *arguments: Any, **options: Any) -> None:
        def make(thread: HubThread) -> HubProducer:
            return HubProducer(*arguments, **options).live_in(thread)

        self._place = Place(make, self._renewed)

    def __repr__(self) -> str:
        return repr(self._place.get())

    @property
    def nsqd_tcp_addresses(self) -> set[str]:
        """The configured nsqds as 'host:port'."""
        return self._place.get().nsqd_tcp_addresses

    @property
    def is_running(self) -> bool:
        """Whether it takes publishes."""
        return self._place.get().is_running

    @property
    def is_connected(self) -> bool:
        """Whether any nsqd is connected now."""
        return self._place.get().is_connected

    def stats(self) -> dict[str, Any]:
        """As ``nsq_fast.Producer.stats``."""
        producer = self._place.get()
        return self._place.thread.call(producer.stats)

    def progress(self) -> ProducerProgress:
        """As ``nsq_fast.Producer.progress``."""
        producer = self._place.get()
        return self._place.thread.call(producer.progress)

    # Publishing

    def _publish_usual(self, topic: Any, body: Any, key: Any, partition: Any, trace_id: Any) -> bytes | None:
        """Publish one body without other arguments; None: it is not for this to do, and nothing was done."""
        thread = self._place.thread
        if not (key is partition is trace_id is None and topic.__class__ is str and body.__class__ is bytes):
            return None
        if get_hub_if_exists() is not None or thread.is_over:  # greenlets of the thread are not to be blocked
            return None
        request = self._place.get().hand_over_plain(topic, body)
        if request is None:
            return None
        try:
            request.latch.wait()
        except BaseException:
            if not request.is_set:  # the caller was interrupted
                thread.submit(self._place.get().abandon, request)
            raise
        if request.error is not None:
            raise request.error
        return OK

    def _multipublish_usual(self, topic: Any, bodies: Any) -> None:
        """There is no shorter way."""

    def _prepared(self, topic: Any, body: Any, key: Any, partition: Any, trace_id: Any) -> None:
        """There is none here, either."""

    def _new(self, topic: str, body: Any, defer: int | None, timeout: float | None, options: PublishOptions) -> Request:
        producer = self._place.get()
        data = producer.body_of(topic, body, timeout, defer, options)
        return Request(producer, topic, data, defer, timeout, options)

    def _parts(self, topic: str, bodies: Any, timeout: float | None, options: PublishOptions) -> list[Request]:
        producer = self._place.get()
        return [Request(producer, topic, producer.bodies_of(topic, bodies, timeout), None, timeout, options)]

    def _take_room_now(self, request: Request) -> None:
        request.destination.check_room(request)

    def _carry_out(self, parts: list[Request], request: Request, block: bool, raise_error: bool) -> Any:
        request.waits, request.needs_nsqd = block, not block
        if not block:
            self._take_room_now(request)
        if not raise_error:
            request.promised = _Promise()
            request.destination.add(request)
            return request.promised
        reply = request.promised = Reply()
        request.destination.add(request)
        try:
            return reply.get()
        except BaseException:
            if not reply.is_set:  # the caller was interrupted
                self._place.thread.submit(request.destination.abandon, request)
            raise

    # Life

    def start(self) -> None:
        """Begin to connect, without waiting for it. A closed producer cannot be started again."""
        producer = self._place.get()
        self._place.thread.call(producer.start)
        self._is_started = True

    def close(self, timeout: float | None = None) -> None:
        """Publish no more; wait for the publishes that are pending, then close the connections.

        In any thread, and in a handler of ``signal.signal``, where it only begins to close.

        Args:
            timeout: seconds that all of it may take; publishes that are still pending then fail.
        """
        check_end_timeout(timeout)
        producer = self._place.get()
        self._is_started = False  # a child that is forked later does not begin again
        self._place.thread.call_or_begin(producer.close, timeout)

    def join(self, timeout: float | None = None, raise_error: bool = False) -> bool:
        """Wait until the producer has closed; whether it has."""
        producer = self._place.get()
        return self._place.thread.call(producer.join, timeout, raise_error)

    def _renewed(self, producer: HubProducer) -> None:
        if self._is_started:
            producer.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
