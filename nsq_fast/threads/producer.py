"""The Producer of threads: every call waits in its own thread, while the hub thread does the work."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, TypeAlias, overload

from nsq_fast.log_events import EXIT_IGNORED
from nsq_fast.protocol.wire_form import Receipt
from nsq_fast.runtime import CrossingProducer, OutsideProducer, PublishRequest, extras_of, thread_publisher

Body: TypeAlias = bytes | bytearray | memoryview
Headers: TypeAlias = Mapping[str, Any]
Stored: TypeAlias = bytes | Receipt
AllStored: TypeAlias = bytes | list[Receipt]

logger = logging.getLogger(__name__)


class Producer(OutsideProducer):
    """Publishes messages, from any number of threads.

    Arguments, options, guarantees and errors are those of ``nsq_fast.Producer``. A method blocks the thread that calls
    it, or the greenlet where that thread runs a hub of gevent, and no other. Keyed publishes keep the order of the
    calls of each thread.

    A producer that nobody closes is closed at the end of the interpreter, which waits two seconds for what is pending
    and says in one line how many publishes were not confirmed. A child of a fork has a thread and connections of
    its own, from its first publish on.
    """

    _is_started = False
    _publish_plain: Callable[[Any, Any], Any] | None = None

    # Publishing

    @overload
    def publish(
        self,
        topic: str,
        body: Body,
        defer: int | None = None,
        block: bool = True,
        timeout: float | None = None,
        raise_error: Literal[True] = True,
        *,
        key: str | bytes | int | None = None,
        partition: int | None = None,
        trace_id: int | None = None,
        headers: Headers | None = None,
        tag: str | None = None,
    ) -> Stored: ...

    @overload
    def publish(
        self,
        topic: str,
        body: Body,
        defer: int | None = None,
        block: bool = True,
        timeout: float | None = None,
        *,
        raise_error: Literal[False],
        key: str | bytes | int | None = None,
        partition: int | None = None,
        trace_id: int | None = None,
        headers: Headers | None = None,
        tag: str | None = None,
    ) -> Future[Stored]: ...

    def publish(
        self,
        topic: str,
        body: Body,
        defer: int | None = None,
        block: bool = True,
        timeout: float | None = None,
        raise_error: bool = True,
        *,
        key: str | bytes | int | None = None,
        partition: int | None = None,
        trace_id: int | None = None,
        headers: Headers | None = None,
        tag: str | None = None,
    ) -> Stored | Future[Stored]:
        """Publish one message and wait until a server has it; returns ``b"OK"``, or a Receipt when it was traced.

        The arguments are those of ``nsq_fast.Producer.publish``; ``raise_error=False`` returns a Future at once.
        """
        if (self._publish_plain is not None and block and raise_error and defer is None) and (
            timeout is None and key is partition is trace_id is None and headers is None and tag is None
        ):
            plain: Stored | None = self._publish_plain(topic, body)
            if plain is not None:
                return plain
        producer = self._place.get()
        body = producer.body_of(topic, body, timeout)
        extras = extras_of(key, partition, trace_id, headers, tag)
        promise = producer.reply() if raise_error else _Promise()
        request = PublishRequest(
            topic, body, defer, timeout, extras, promise, waits=block, needs_nsqd=not block, latch=promise.latch
        )
        stored: Stored | Future[Stored] = self._sent(producer, request)
        return stored

    def publish_nowait(
        self,
        topic: str,
        body: Body,
        defer: int | None = None,
        timeout: float | None = None,
        *,
        key: str | bytes | int | None = None,
        partition: int | None = None,
        trace_id: int | None = None,
        headers: Headers | None = None,
        tag: str | None = None,
    ) -> Future[Stored]:
        """Publish one message without ever blocking; the Future gets what ``publish`` returns, or the error.

        Raises PublishFailed when ``max_pending`` is reached. A Future cannot be cancelled. Its callbacks run in the
        hub thread: they must not block.
        """
        producer = self._place.get()
        body = producer.body_of(topic, body, timeout)
        extras = extras_of(key, partition, trace_id, headers, tag)
        promise = _Promise()
        producer.hand_over(PublishRequest(topic, body, defer, timeout, extras, promise, waits=False))
        return promise.future

    @overload
    def multipublish(
        self,
        topic: str,
        bodies: Iterable[Body],
        block: bool = True,
        timeout: float | None = None,
        raise_error: Literal[True] = True,
        *,
        key: str | bytes | int | None = None,
        partition: int | None = None,
        trace_id: int | Sequence[int] | None = None,
        headers: Headers | Sequence[Headers] | None = None,
        tag: str | None = None,
    ) -> AllStored: ...

    @overload
    def multipublish(
        self,
        topic: str,
        bodies: Iterable[Body],
        block: bool = True,
        timeout: float | None = None,
        *,
        raise_error: Literal[False],
        key: str | bytes | int | None = None,
        partition: int | None = None,
        trace_id: int | Sequence[int] | None = None,
        headers: Headers | Sequence[Headers] | None = None,
        tag: str | None = None,
    ) -> Future[AllStored]: ...

    def multipublish(
        self,
        topic: str,
        bodies: Iterable[Body],
        block: bool = True,
        timeout: float | None = None,
        raise_error: bool = True,
        *,
        key: str | bytes | int | None = None,
        partition: int | None = None,
        trace_id: int | Sequence[int] | None = None,
        headers: Headers | Sequence[Headers] | None = None,
        tag: str | None = None,
    ) -> AllStored | Future[AllStored]:
        """Publish several messages with one command, as ``nsq_fast.Producer.multipublish``."""
        producer = self._place.get()
        content = producer.bodies_of(topic, bodies, timeout)
        extras = extras_of(key, partition, trace_id, headers, tag)
        promise = producer.reply() if raise_error else _Promise()
        request = PublishRequest(
            topic, content, None, timeout, extras, promise, waits=block, needs_nsqd=not block, latch=promise.latch
        )
        stored: AllStored | Future[AllStored] = self._sent(producer, request)
        return stored

    def _sent(self, producer: CrossingProducer, request: PublishRequest) -> Any:
        promise: Any = request.promise
        producer.hand_over(request)
        if isinstance(promise, _Promise):
            return promise.future
        try:
            return promise.get()
        except BaseException:
            if not promise.is_set:  # the caller was interrupted
                self._place.thread.submit(producer.abandon, request)
            raise

    # Life

    def start(self) -> None:
        """Begin to connect, without waiting for it. A closed producer cannot be started again."""
        producer = self._place.get()
        self._place.thread.call(producer.start)
        self._is_started = True
        self._publish_plain = thread_publisher(producer).publish

    def close(self, timeout: float | None = None) -> None:
        """Publish no more; wait for the publishes that are pending, then close the connections.

        In any thread, and in a handler of ``signal.signal``, where it only begins to close.

        Args:
            timeout: seconds that all of it may take; publishes that are still pending then fail.
        """
        producer = self._place.get()
        self._is_started = False  # a child that is forked later does not begin again
        producer.close_from_outside(timeout)

    def join(self, timeout: float | None = None, raise_error: bool = False) -> bool:
        """Wait until the producer has closed; whether it has."""
        producer = self._place.get()
        return self._place.thread.call(producer.join, timeout, raise_error)

    def _renewed(self, producer: CrossingProducer) -> None:
        if self._is_started:
            producer.start()
            self._publish_plain = thread_publisher(producer).publish

    def __enter__(self) -> Producer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Promise:
    """Gives a Future what a publish ends with."""

    latch = None  # nobody waits in it

    def __init__(self) -> None:
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()  # it is on its way: nothing can be cancelled

    def set(self, value: Any) -> None:
        """It went well."""
        with _going_on():
            self.future.set_result(value)

    def set_exception(self, error: BaseException) -> None:
        """It did not."""
        with _going_on():
            self.future.set_exception(error)


@contextmanager
def _going_on() -> Iterator[None]:
    """A callback of a Future that exits must keep nobody else's result back."""
    try:
        yield
    except BaseException as error:
        logger.error("%r of a callback of a Future ends nothing", error, extra=EXIT_IGNORED)
