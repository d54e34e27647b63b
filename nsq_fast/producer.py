"""The Producer of gevent: its calls block the greenlet that makes them, and no other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

from gevent import get_hub, getcurrent
from gevent.event import AsyncResult

from nsq_fast._publish_path import Wakeups
from nsq_fast.client.gevent_loop import GeventLoop, run
from nsq_fast.client.greenlets import check_can_wait, is_interrupting, keep, may_wait, tell_forks
from nsq_fast.client.loop import check_end_timeout
from nsq_fast.client.producer import ProducerCore
from nsq_fast.client.publishes import AllStored, Body, Group, Headers, Publish, Stored, options_of
from nsq_fast.client.signals import LazySignal, emit
from nsq_fast.errors import NotRunning
from nsq_fast.protocol.publishing import Key, Receipt

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from nsq_fast.keywords import MultipublishKeywords, PublishKeywords

FutureT = TypeVar("FutureT")
AllFutureT = TypeVar("AllFutureT")


class BlockingCalls(Generic[FutureT, AllFutureT]):
    """The calls of the Producers that block: of greenlets, and of threads.

    The type parameters are the promises that they give, of one message and of several. A face has what a call is
    checked with and carried out by.
    """

    _publish_usual: Callable[[Any, Any, Any, Any, Any], Any]
    _multipublish_usual: Callable[[Any, Any], bytes | None]
    _prepared: Any
    _new: Any
    _parts: Any
    _take_room_now: Any
    _new_promise: Any
    _carry_out: Any

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
        trace_id: int,
        key: Key | None = None,
        partition: int | None = None,
        headers: Headers | None = None,
        tag: str | None = None,
    ) -> Receipt: ...

    @overload
    def publish(
        self,
        topic: str,
        body: Body,
        defer: int | None = None,
        block: bool = True,
        timeout: float | None = None,
        raise_error: Literal[True] = True,
        **options: Unpack[PublishKeywords],
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
        **options: Unpack[PublishKeywords],
    ) -> FutureT: ...

    def publish(
        self,
        topic: str,
        body: Body,
        defer: int | None = None,
        block: bool = True,
        timeout: float | None = None,
        raise_error: bool = True,
        *,
        key: Key | None = None,
        partition: int | None = None,
        trace_id: int | None = None,
        headers: Headers | None = None,
        tag: str | None = None,
    ) -> Stored | FutureT:
        """Publish one message and wait until a server has it; returns ``b"OK"``, or a Receipt when it was traced.

        Args:
            body: the message, not empty, at most ``max_msg_size`` bytes, its trace id and header included.
            defer: milliseconds until it is delivered to consumers (original servers only).
            block: wait for a connection, and for room below ``max_pending``; False raises NoNsqd, or PublishFailed.
            timeout: seconds for all of it, retries included; None: the option ``publish_timeout``.
            raise_error: False returns a promise at once, which gets the result or the error: gevent's AsyncResult, a
                Future in ``nsq_fast.threads``.
            key, partition, trace_id, headers, tag: for servers with partitions, see ``PublishOptions``.
        """
        is_usual = block and raise_error and (defer is timeout is None and headers is None and tag is None)
        if is_usual and (usual := self._publish_usual(topic, body, key, partition, trace_id)) is not None:
            stored: Stored = usual  # nothing was left to check (nsq-fast bench publish)
            return stored
        publish = self._new(topic, body, defer, timeout, options_of(key, partition, trace_id, headers, tag))
        ended: Stored | FutureT = self._carry_out([publish], publish, block, raise_error)
        return ended

    def publish_nowait(
        self,
        topic: str,
        body: Body,
        defer: int | None = None,
        timeout: float | None = None,
        *,
        key: Key | None = None,
        partition: int | None = None,
        trace_id: int | None = None,
        headers: Headers | None = None,
        tag: str | None = None,
    ) -> FutureT:
        """Publish one message without ever blocking; the promise gets what ``publish`` returns, or the error.

        It waits for a connection in the background. Raises PublishFailed when ``max_pending`` is reached. A promise
        cannot be cancelled. Callbacks of a Future run in the hub thread: they must not block.
        """
        is_usual = defer is timeout is None and headers is None and tag is None
        publish: Any = self._prepared(topic, body, key, partition, trace_id) if is_usual else None
        if publish is None:
            publish = self._new(topic, body, defer, timeout, options_of(key, partition, trace_id, headers, tag))
            self._take_room_now(publish)
        promise: FutureT = self._new_promise()
        publish.promised = promise
        publish.destination.add(publish)
        return promise

    @overload
    def multipublish(
        self,
        topic: str,
        bodies: Iterable[Body],
        block: bool = True,
        timeout: float | None = None,
        raise_error: Literal[True] = True,
        **options: Unpack[MultipublishKeywords],
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
        **options: Unpack[MultipublishKeywords],
    ) -> AllFutureT: ...

    def multipublish(
        self,
        topic: str,
        bodies: Iterable[Body],
        block: bool = True,
        timeout: float | None = None,
        raise_error: bool = True,
        *,
        key: Key | None = None,
        partition: int | None = None,
        trace_id: int | Sequence[int] | None = None,
        headers: Headers | Sequence[Headers] | None = None,
        tag: str | None = None,
    ) -> AllStored | AllFutureT:
        """Publish several messages with one command; the server stores all of them or none.

        Returns ``b"OK"``, or a list of a Receipt for each message when they were traced; servers give none for
        batches with headers. A batch above ``max_body_size`` is cut into several commands, and is no longer atomic
        then: if some fail, the error says ``possibly_stored``. Its ``results`` say what became of each message.

        Args:
            bodies: any iterable of messages; an empty one raises BodyInvalid.
            key, partition, tag: of all of them.
            trace_id, headers: of all of them, or a list with one for each.
        The other arguments are those of ``publish``.
        """
        is_usual = (
            block
            and raise_error
            and (timeout is key is partition is trace_id is None and headers is None and tag is None)
        )
        if is_usual and (usual := self._multipublish_usual(topic, bodies)) is not None:
            return usual  # one command of which nothing was left to check (nsq-fast bench publish --mode batch)
        parts = self._parts(topic, bodies, timeout, options_of(key, partition, trace_id, headers, tag))
        whole = parts[0] if len(parts) == 1 else Group(parts)
        stored: AllStored | AllFutureT = self._carry_out(parts, whole, block, raise_error)
        return stored


class Producer(ProducerCore, BlockingCalls["AsyncResult[Stored]", "AsyncResult[AllStored]"]):
    """Publishes messages, with retries, failover and pipelining; any number of greenlets may share one.

    Args:
        nsqd_tcp_addresses: nsqds that take every topic, as ``host:port`` or (host, port), or the
            path of a Unix socket, ``/path`` or ``unix:/path``.
        lookupd_http_addresses: nsqlookupds that say which nsqds take a topic. A topic they do not know
            goes to any nsqd they know. At least one of the two kinds of addresses is needed.
        trace: the trace log; the one that all share by default.
        options: the options of ProducerConfig, ConnectionConfig and LookupConfig.

    Delivery is at least once: a publish whose outcome is unknown (its connection broke before the reply) is
    tried again unless ``retry_unknown_outcome`` is False. Its error says ``possibly_stored`` if it may have
    been stored although no OK came.

    Topics with partitions need lookup. Publishes take turns over the partitions that can be written now; those
    with a ``key`` go to the one that ``key_strategy`` finds for it among all that the topic has, and to no other:
    while it has no leader they wait.

    Order. Publishes to one partition by ``key=`` or ``partition=`` are stored in the order of the calls of this
    producer, also when they are pipelined (``publish_nowait``, many greenlets), tried again, or the leader moves:
    each partition has one command on its way at a time, and what comes meanwhile leaves together as the next.
    One that failed for good leaves a gap. A repeated attempt can store a message twice: what comes after the first
    copy may come between the copies only if it was sent with it, so that the first copies of all are in order.
    The guarantee ends where the number of partitions is changed, and holds for one producer: several that publish
    the same keys mix. Publishes without key and partition, and all to original servers, have no order.

    Tracing. A publish with a ``trace_id``, and every publish to a topic for which ``trace`` is on, returns a
    Receipt instead of ``b"OK"``; while ``trace`` is on its record is written too. Servers that cannot trace take
    the latter untraced. Headers, tags and trace ids need servers with partitions.

    Errors of the publish methods: TypeInvalid, NameInvalid, BodyInvalid and ConfigError for a wrong argument, at
    once, or as soon as it is known what servers take the topic; NotRunning; NoNsqd, and NoLeader for a partition;
    PublishFailed, with the last error as its cause; PublishTimeout.
    """

    _new_promise = AsyncResult

    def _carry_out(self, parts: list[Publish], whole: Publish | Group, block: bool, raise_error: bool) -> Any:
        """Send the parts of a call, and wait for its end unless it is to give an AsyncResult."""
        result: AsyncResult[Any] | None = None
        if raise_error:
            check_can_wait("Producer.publish()", "; or publish_nowait(), which waits for nothing")
        else:
            result = whole.promised = AsyncResult()
        run(self._enter_all(parts, block))
        if result is not None:
            return result
        try:
            return whole.wait(self._wakeups)
        finally:
            if not whole.done:  # the caller was interrupted
                self._withdraw(parts)

    # Life

    on_response: LazySignal = LazySignal("Sent for each response of an nsqd: ``response`` is its bytes.")
    on_error: LazySignal = LazySignal("Sent for each error frame of an nsqd: ``error`` is a ServerError.")
    on_auth: LazySignal = LazySignal("Sent after AUTH: ``conn``, and ``response``, the reply as a dict.")
    on_close: LazySignal = LazySignal("Sent when the producer has closed.")

    def _made(self) -> None:
        self._build(GeventLoop.here())
        tell_forks(self)

    def _new_wakeups(self) -> Wakeups:
        return Wakeups(get_hub(), getcurrent, None)

    def _tell(self, signal: str, **values: Any) -> None:
        emit(self, signal, **values)

    def start(self) -> None:
        """Begin to connect, without waiting for it. A closed producer cannot be started again."""
        self._thread.check("Producer.start()")
        if not self._is_running and not self._is_closed and self._loop is not GeventLoop.here():
            self._build(GeventLoop.here())  # its parts belong to the hub of the thread that makes them
        run(self._start())

    def close(self, timeout: float | None = None) -> None:
        """Publish no more; wait for the publishes that are pending, then close the connections.

        Called while another greenlet closes, it waits for the same end, or brings it about when its timeout is over.
        Called in a receiver of a signal, in a handler of ``signal.signal`` or in the hub it only begins to close;
        ``join`` waits for the end.

        Args:
            timeout: seconds that all of it may take; publishes that are still pending then fail. None: each has its
                own deadline.
        """
        self._thread.check("Producer.close()")
        check_end_timeout(timeout)
        if is_interrupting():
            get_hub().loop.run_callback(self._begin_closing, timeout)
        elif may_wait():
            run(self._close(timeout))
        else:
            self._begin_closing(timeout)

    def _begin_closing(self, timeout: float | None) -> None:
        self._sender.supervisor.job(f"the closing of {self!r}", self._close, timeout)

    def join(self, timeout: float | None = None, raise_error: bool = False) -> bool:
        """Wait until the producer has closed; whether it has. ``raise_error`` is there for gnsq's sake.

        Raises NotRunning when it would wait for ever: without a timeout, before ``start`` and ``close``.
        """
        self._thread.check("Producer.join()")
        check_end_timeout(timeout)
        if timeout is None and not self.is_running and not self._is_closed:
            raise NotRunning("join() before start(): call start() first")
        return run(self._closed.wait(timeout))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def forked(self) -> None:
        """In the child of a fork: begin anew, with the first publish. What is pending is the parent's."""
        keep(self._closed, self._sender)
        self._sender.forget()
        self._is_inherited |= self._is_running
        self._is_running = self._is_closing = False
        self._build(GeventLoop.here())
        if self._is_closed:
            self._closed.set()

    def _resume(self) -> None:
        """Connect, if the parent of this process was connected. Raises NotRunning."""
        if not self._is_inherited:
            raise self._not_running()
        self.start()


class DeadLetters(Producer):
    """Of a consumer's policy: it is started when it is used first, by each of those who come until it runs."""

    def _resume(self) -> None:
        self.start()
