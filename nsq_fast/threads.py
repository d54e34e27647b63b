"""NSQ for programs of threads: a Producer and a Consumer that every native thread may call.

    from nsq_fast.threads import Producer

    with Producer("127.0.0.1:4150") as producer:
        producer.publish("greetings", b"hello")

They have the names and arguments of those of ``nsq_fast``, which live on gevent. What they do is done by such ones, in
a hub thread of the process (``bridge.py``).

A publish waits in its own thread. It checks what it can, appends a ``Request`` to a queue, wakes the hub thread, and
waits for a lock that this releases with the result. What was handed over in one moment leaves together.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from inspect import signature
from threading import get_ident
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

from gevent._hub_local import get_hub_if_exists
from gevent.exceptions import HubDestroyed
from msgspec import UNSET

from nsq_fast._codec import Message
from nsq_fast._lazy import get_logger
from nsq_fast._publish_path import PlainPath, wake_all
from nsq_fast.bridge import Batch, HandlerExecutor, HubThread, Place, Reply, arguments_of
from nsq_fast.client.consumer import ConsumerCore, ConsumerOptions, warn_unclosed
from nsq_fast.client.gevent_loop import run
from nsq_fast.client.loop import SLICE, EndTimeout, check_close_timeout, check_end_timeout, refuse_copies
from nsq_fast.client.publishes import (
    NO_OPTIONS,
    AllStored,
    Group,
    Publish,
    PublishOptions,
    Stored,
    check_defer,
    check_timeout,
    of_a_part,
    owned,
)
from nsq_fast.client.workers import check_handler
from nsq_fast.consumer import Consumer as GeventConsumer
from nsq_fast.errors import CallInvalid, NotRunning, PublishFailed, RequeueMessage
from nsq_fast.log_events import EXIT_IGNORED
from nsq_fast.names import check_topic
from nsq_fast.producer import BlockingCalls
from nsq_fast.producer import Producer as GeventProducer
from nsq_fast.protocol.publishing import OK

if TYPE_CHECKING:
    import blinker
    from typing_extensions import Self

    from nsq_fast.client.consumer import ConsumerStats
    from nsq_fast.client.progress import ConsumerProgress, ProducerProgress
    from nsq_fast.client.publishes import Promise
    from nsq_fast.config import ConnectionConfig, ConsumerConfig, LookupConfig

__all__ = ["Consumer", "Producer"]

logger: logging.Logger = get_logger(__name__)


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
        check_defer(defer)
        self._composer.check_body(None, body)
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
        request.promised.set_exception(of_a_part(error) if self._let_go(request) else error)

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
    __reduce_ex__: Callable[..., NoReturn] = refuse_copies

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


# The Consumer: handlers run on native threads, and any thread may iterate, respond and close.
#
# It is one of gevent's in the hub thread, held in another. In a child of a fork, and where the hub thread has failed,
# it is made again.

T = TypeVar("T")
Handler: TypeAlias = Callable[["Consumer", Message], object]
BatchHandler: TypeAlias = Callable[["Consumer", list[Message]], object]

if TYPE_CHECKING:
    _as_every_consumer = ConsumerCore[Handler, BatchHandler].__init__
else:
    _as_every_consumer = ConsumerCore.__init__


_READABLE = {
    "channel", "config", "connection_config", "given_up", "is_paused", "is_running", "lookup_config", "name",
    "nsqd_tcp_addresses", "outdated", "topic", "topics",
}  # fmt: skip
"""What any thread may read of the consumer in the hub thread."""

_COUNTED = {"is_starved", "total_in_flight", "total_ready_count"}
"""What is counted in the hub thread: connections come and go meanwhile."""


class HubConsumer(GeventConsumer):
    """A Consumer in the hub thread that hands its messages to other threads. All of it belongs to that thread.

    Attributes:
        taken: brings messages to those who iterate, from the start on; None: handlers run on native threads.
    """

    taken: TakenBatches | None = None
    _is_iterated = False

    def live_in(self, hub_thread: HubThread, *, is_iterated: bool) -> HubConsumer:
        """Say in which thread it is, and whether threads take its messages by iterating."""
        self._is_iterated = is_iterated
        hub_thread.adopt(self)
        return self

    def _new_executor(self) -> HandlerExecutor | None:
        self.taken = TakenBatches() if self._is_iterated else None
        return self.taken

    def __repr__(self) -> str:
        return f"<{Consumer.__module__}.Consumer {self.topic} {self.channel}>"

    @property
    def is_left(self) -> bool:
        return self.taken is not None and not self.taken.at

    @property
    def is_started(self) -> bool:
        """Whether ``start`` was called, whatever has become of it since."""
        return self._is_started

    def is_failure(self, error: BaseException) -> bool:
        return super().is_failure(error) or isinstance(error, (SystemExit, KeyboardInterrupt))  # which end nothing here

    def _closed(self) -> None:
        try:
            super()._closed()
        finally:
            if self.taken is not None:
                self.taken.put(None)

    @property
    def is_calling(self) -> bool:
        """Whether the calling thread runs one of its handlers."""
        return self._thread.is_served_here

    def thread_ended(self, error: NotRunning) -> None:
        """The hub thread fails: nothing of it runs any more, and nsqd delivers again what it holds. Does not block."""
        if self._is_started and not self._is_closed:
            if self._executor is not None:
                self._executor.leave()
            self.failure: NotRunning = error
            self._closed()

    def close_at_exit(self, timeout: float) -> int:
        """Close within ``timeout`` seconds. Messages whose handlers run then are delivered again."""
        if self.is_running:
            warn_unclosed(self)
        self.close(drain=True, timeout=timeout)
        return 0

    def count_unconfirmed(self) -> int:
        """A consumer publishes nothing."""
        return 0


class TakenBatches(HandlerExecutor):
    """Brings messages to those who iterate.

    Attributes:
        at: those that somebody goes through, and in which thread.
    """

    max_batch = 256

    def __init__(self) -> None:
        super().__init__()
        self.at: dict[Batch, int] = {}
        self._batches: deque[Batch | None] = deque()
        self._waiting: deque[Reply] = deque()

    def _begin(self, batch: Batch) -> None:
        self.put(batch)

    def put(self, batch: Batch | None) -> None:
        """Give the next who asks a batch; None: there are no more. In any thread."""
        self._batches.append(batch)
        self._wake_one()

    def next(self) -> Batch | None:
        """Wait for a batch. Where gevent runs, only the calling greenlet waits: a queue of Python's, patched or not,
        would keep the others from running, or never hear of what another thread puts in."""
        with suppress(IndexError):
            return self._batches.popleft()
        while True:
            reply = Reply()
            self._waiting.append(reply)
            try:
                if not self._batches:
                    reply.wait()
                with suppress(IndexError):  # another was faster
                    return self._batches.popleft()
            finally:
                with suppress(ValueError):
                    self._waiting.remove(reply)
                if self._batches:  # what woke this one, which may be interrupted, was perhaps for another
                    self._wake_one()

    def _wake_one(self) -> None:
        with suppress(IndexError):
            self._waiting.popleft().set()

    def is_held_here(self) -> bool:
        """Whether the calling thread iterates, and is at a message."""
        here = get_ident()
        return any(thread == here and batch.current is not None for batch, thread in list(self.at.items()))

    def messages(self, batch: Batch) -> Iterator[Message]:
        """Those of a batch, as far as a time slice allows: asking for the next finishes the one before."""
        self.at[batch] = batch.thread = get_ident()
        end = monotonic() + SLICE
        try:
            while (message := batch.take()) is not None:
                yield message
                batch.end(None)
                if monotonic() > end:
                    break
        finally:
            left = batch.current
            if left is not None:  # the loop is left early
                batch.end(None if left.is_async() else RequeueMessage(0.0, backoff=False))
            del self.at[batch]
            self.done(batch)


def _never_called(consumer: object, message: Message) -> None:
    """In place of the handler where threads iterate."""


class Consumer(ConsumerOptions):
    """Consume one topic, or several, through a channel; handlers run on native threads.

    There are ``handler_threads`` of them, 1 by default. Arguments, options, guarantees and errors are those of
    ``nsq_fast.Consumer``. Handlers may block, and any thread may call the consumer and respond to its messages: a FIN,
    REQ or TOUCH leaves soon after the call.

    Instead of a handler, iterate: ``for message in consumer``. Asking for the next message finishes the one before.

    ``give_up``, ``blocked_policy``, ``max_age_policy`` and receivers of signals run in the hub thread: they must not
    block. The sender of signals is the consumer there.
    """

    if TYPE_CHECKING:
        on_message: blinker.Signal
        on_response: blinker.Signal
        on_error: blinker.Signal
        on_finish: blinker.Signal
        on_requeue: blinker.Signal
        on_giving_up: blinker.Signal
        on_auth: blinker.Signal
        on_expired: blinker.Signal
        on_exception: blinker.Signal
        on_order_violation: blinker.Signal
        on_blocked: blinker.Signal
        on_close: blinker.Signal
        config: ConsumerConfig
        connection_config: ConnectionConfig
        lookup_config: LookupConfig
        topic: str
        topics: tuple[str, ...]
        channel: str
        name: str
        given_up: int
        outdated: int
        nsqd_tcp_addresses: set[str]
        is_paused: bool
        is_running: bool
        is_starved: bool
        total_ready_count: int
        total_in_flight: int

    @arguments_of(_as_every_consumer)
    def __init__(self, *arguments: Any, **options: Any) -> None:
        try:
            given = signature(GeventConsumer).bind(*arguments, **options).arguments
        except TypeError as error:
            raise TypeError(f"Consumer.__init__() {error}") from None
        given.update(given.pop("options", {}))
        handler, batch_handler = given.get("message_handler"), given.get("batch_handler")
        check_handler("message_handler", handler)
        check_handler("batch_handler", batch_handler)
        self._is_iterated = handler is None and batch_handler is None
        concurrency = given.get("concurrency") or 1
        given["handler_threads"] = given.get("handler_threads") or concurrency
        is_iterated = self._is_iterated
        if is_iterated:
            given["concurrency"] = concurrency
            given["message_handler"] = _never_called  # it must not hold what is to be collected: see __del__
        elif batch_handler is None:
            given["message_handler"] = self._with_self(handler)
        else:  # the consumer in the hub thread refuses both
            given["batch_handler"] = self._with_self(batch_handler)

        def make(thread: HubThread) -> HubConsumer:
            return HubConsumer(**given).live_in(thread, is_iterated=is_iterated)

        self._place: Place[HubConsumer] = Place(make)  # one that is made again has to be started

    def __del__(self) -> None:
        """One that is iterated is of no use without whoever iterates: nobody can take what it holds. Does not block."""
        place = vars(self).get("_place")  # none if its arguments were wrong
        if place is None or not self._is_iterated or place.thread.is_over:
            return
        consumer = place.get()
        if consumer.is_running:
            with suppress(NotRunning):  # the thread has just ended
                place.thread.submit(place.thread.start_job, consumer.close)
            warn_unclosed(consumer)

    def _with_self(self, handler: Any) -> Callable[[object, Any], object]:
        return lambda consumer, item: handler(self, item)

    def _call(self, function: Callable[[HubConsumer], T]) -> T:
        consumer = self._place.get()
        return self._place.thread.call(function, consumer)

    def _submit(self, function: Callable[[HubConsumer], object]) -> None:
        consumer = self._place.get()
        self._place.thread.submit(function, consumer)

    def __getattr__(self, name: str) -> Any:
        if name in _READABLE or name.startswith("on_"):
            return getattr(self._place.get(), name)
        if name in _COUNTED:
            return self._call(lambda consumer: getattr(consumer, name))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__name__} {self.topic} {self.channel}>"

    # Running

    def start(self, block: bool = True) -> None:
        """Begin to consume. With ``block``, return only when the consumer is closed, as ``join``.

        Raises CallInvalid when there is no handler, NotRunning after close.
        """
        if self._is_iterated:
            raise CallInvalid("no message_handler or batch_handler: iterate over the consumer, or give it one")
        self._start()
        if block:
            self.join()

    def _start(self) -> None:
        self._call(lambda consumer: consumer.start(block=False))

    def join(self, timeout: float | None = None, raise_error: bool = False) -> bool:
        """Wait until the consumer is closed; False if ``timeout`` seconds passed first."""
        return self._call(lambda consumer: consumer.join(timeout, raise_error))

    def close(self, drain: bool = True, timeout: EndTimeout = UNSET) -> None:
        """Stop consuming, gracefully, as ``nsq_fast.Consumer.close``.

        In any thread. In a handler, in a handler of ``signal.signal``, and in a thread that iterates and is at a
        message, it only begins to close; ``join`` waits for the end.
        """
        check_close_timeout(timeout)
        consumer = self._place.get()
        only_begins = consumer.is_calling or (consumer.taken is not None and consumer.taken.is_held_here())
        self._place.thread.call_or_begin(consumer.close, drain, timeout, only_begins=only_begins)

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # Iterating

    def __iter__(self) -> Iterator[Message]:
        """Take messages one by one, until the consumer is closed; starts it if need be.

        Asking for the next message finishes the one before, unless it was responded to or made asynchronous. A message
        at which the loop is left early is requeued, unless it was responded to. Several threads may iterate. The
        consumer goes on after that, until it is closed; one that nobody can reach any more is closed with a
        ResourceWarning.
        """
        if not self._is_iterated:
            raise CallInvalid("a consumer with a handler cannot be iterated")
        if not self._place.get().is_started:
            self._start()
        return self._messages()

    def _messages(self) -> Iterator[Message]:
        consumer = self._place.get()
        taken = consumer.taken
        if taken is None:
            raise NotRunning("the consumer is closed")
        while (batch := taken.next()) is not None:
            yield from taken.messages(batch)
        taken.put(None)  # for the others that iterate
        if consumer.failure is not None:
            raise consumer.failure

    # Flow

    @property
    def max_in_flight(self) -> int:
        """Most messages held at once, over all connections. May be set at any time; takes effect soon after."""
        return self._place.get().max_in_flight

    @max_in_flight.setter
    def max_in_flight(self, value: int | None) -> None:
        self.config.replace(max_in_flight=value)  # raises what is wrong with it
        self._submit(lambda consumer: setattr(consumer, "max_in_flight", value))

    def pause(self) -> None:
        """Ask for no more messages (RDY 0), soon. What has been received is still handled."""
        self._submit(HubConsumer.pause)

    def resume(self) -> None:
        """End ``pause``."""
        self._submit(HubConsumer.resume)

    def stats(self) -> ConsumerStats:
        """A snapshot of what was done and what is going on."""
        return self._call(HubConsumer.stats)

    def progress(self) -> ConsumerProgress:
        """What moves, and why nothing does, as ``nsq_fast.Consumer.progress``."""
        return self._call(HubConsumer.progress)
