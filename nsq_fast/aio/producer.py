"""The Producer of asyncio: the loop goes on while the hub thread does the work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeAlias

from nsq_fast.errors import NotRunning
from nsq_fast.protocol.wire_form import Receipt
from nsq_fast.runtime import CrossingProducer, OutsideProducer, PlainRequest, PublishRequest, extras_of, task_publisher

from .callers import WaitingTasks
from .gate import LoopGate, LoopPromise

Body: TypeAlias = bytes | bytearray | memoryview
Headers: TypeAlias = Mapping[str, Any]
Stored: TypeAlias = bytes | Receipt
AllStored: TypeAlias = bytes | list[Receipt]

WITHDRAWAL_TIMEOUT = 1.0
"""Seconds that a cancelled publish waits for the hub thread to say whether it may be stored."""


class Producer(OutsideProducer):
    """Publishes messages, from any number of tasks of the loop in which it was started.

    Arguments, options, guarantees and errors are those of ``nsq_fast.Producer``.

    A publish that is cancelled, by ``asyncio.timeout`` too, is withdrawn if nothing of it was sent. The CancelledError
    has the attribute ``possibly_stored``, which says whether a server may have the message all the same; where
    ``asyncio.timeout`` makes a TimeoutError of it, it is the ``__cause__`` of that.

    A producer that nobody closes is closed at the end of the interpreter, which waits two seconds for what is pending
    and says in one line how many publishes were not confirmed.
    """

    _gate: LoopGate | None = None
    _publish_plain: Callable[[Any, Any, bool], PlainRequest | None] | None = None

    # Publishing

    async def publish(
        self,
        topic: str,
        body: Body,
        defer: int | None = None,
        block: bool = True,
        timeout: float | None = None,
        *,
        key: str | bytes | int | None = None,
        partition: int | None = None,
        trace_id: int | None = None,
        headers: Headers | None = None,
        tag: str | None = None,
    ) -> Stored:
        """Publish one message and wait until a server has it; returns ``b"OK"``, or a Receipt when it was traced.

        The arguments are those of ``nsq_fast.Producer.publish``.
        """
        if (self._publish_plain is not None and defer is None) and (
            timeout is None and key is partition is trace_id is None and headers is None and tag is None
        ):
            plain = self._publish_plain(topic, body, block)
            if plain is not None:
                try:
                    usual: Stored = await plain.awaited
                    return usual
                except asyncio.CancelledError as error:
                    await self._withdraw(plain, error)
                    raise
        producer, gate = self._started("publish()")
        body = producer.body_of(topic, body, timeout)
        extras = extras_of(key, partition, trace_id, headers, tag)
        promise = LoopPromise(gate)
        request = PublishRequest(topic, body, defer, timeout, extras, promise, waits=block, needs_nsqd=not block)
        stored: Stored = await self._sent(producer, request, promise)
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
    ) -> asyncio.Future[Stored]:
        """Publish one message without waiting; the future gets what ``publish`` returns, or the error.

        Raises PublishFailed when ``max_pending`` is reached. Cancelling the future does not withdraw the publish.
        """
        producer, gate = self._started("publish_nowait()")
        body = producer.body_of(topic, body, timeout)
        extras = extras_of(key, partition, trace_id, headers, tag)
        promise = LoopPromise(gate)
        producer.hand_over(PublishRequest(topic, body, defer, timeout, extras, promise, waits=False))
        return promise.future

    async def multipublish(
        self,
        topic: str,
        bodies: Iterable[Body],
        block: bool = True,
        timeout: float | None = None,
        *,
        key: str | bytes | int | None = None,
        partition: int | None = None,
        trace_id: int | Sequence[int] | None = None,
        headers: Headers | Sequence[Headers] | None = None,
        tag: str | None = None,
    ) -> AllStored:
        """Publish several messages with one command, as ``nsq_fast.Producer.multipublish``."""
        producer, gate = self._started("multipublish()")
        content = producer.bodies_of(topic, bodies, timeout)
        extras = extras_of(key, partition, trace_id, headers, tag)
        promise = LoopPromise(gate)
        request = PublishRequest(topic, content, None, timeout, extras, promise, waits=block, needs_nsqd=not block)
        stored: AllStored = await self._sent(producer, request, promise)
        return stored

    async def _sent(self, producer: CrossingProducer, request: PublishRequest, promise: LoopPromise) -> Any:
        """Hand a publish over and wait for its result; withdraw it when the caller is cancelled."""
        producer.hand_over(request)
        try:
            return await promise.future
        except asyncio.CancelledError as error:
            await self._withdraw(request, error)
            raise

    async def _withdraw(self, request: PublishRequest | PlainRequest, error: asyncio.CancelledError) -> None:
        """Take back what was not sent; tell ``error`` whether any of it may be stored."""
        error.possibly_stored = True  # type: ignore[attr-defined]  # until it is known better
        request.is_cancelled = True  # what is not taken yet will not be
        producer = self._place.get()
        withdrawn = LoopPromise(self._gate_of())
        self._place.thread.submit(lambda: withdrawn.set(producer.abandon(request)))
        try:
            await asyncio.wait((withdrawn.future,), timeout=WITHDRAWAL_TIMEOUT)
        except asyncio.CancelledError as again:
            again.possibly_stored = True  # type: ignore[attr-defined]  # nobody waits to know it better
            raise
        if withdrawn.future.done():
            error.possibly_stored = withdrawn.future.result()  # type: ignore[attr-defined]

    # Life

    async def start(self) -> None:
        """Begin to connect, without waiting for it. A closed producer cannot be started again."""
        producer = self._place.get()
        if self._gate is None:
            direct = producer.direct
            self._gate = LoopGate(self._place.thread, repr(self), producer.close_in_background, direct.at_end_of_turn)
            descriptor = direct.allow()
            if descriptor is not None:
                self._gate.watch(descriptor, direct.readable)
            publisher = task_publisher(producer, WaitingTasks(self._gate), self._gate.loop, asyncio.get_running_loop)
            self._publish_plain = publisher.publish
        await self._gate.call(producer.start)

    async def close(self, timeout: float | None = None) -> None:
        """Publish no more; wait for the publishes that are pending, then close the connections.

        Args:
            timeout: seconds that all of it may take; publishes that are still pending then fail.
        """
        producer, gate = self._place.get(), self._gate
        if gate is None:
            producer.close_from_outside(timeout)  # never started: there is nothing to wait for
        elif gate.loop.is_closed():
            self._place.thread.submit(producer.close_in_background)  # nobody waits for a result any more
        else:
            await gate.call(producer.close, timeout)
            gate.close()

    async def join(self, timeout: float | None = None) -> bool:
        """Wait until the producer has closed; whether it has."""
        return await self._gate_of().wait(self._place.get().join, timeout)

    def _started(self, call: str) -> tuple[CrossingProducer, LoopGate]:
        """What a call needs. Raises NotRunning before ``start``, and in another loop."""
        producer = self._place.get()
        gate = self._gate_of()
        gate.check_loop(f"Producer.{call}")
        return producer, gate

    def _gate_of(self) -> LoopGate:
        if self._gate is None:
            raise NotRunning("the producer is not running: await start(), or use it with `async with`")
        return self._gate

    def _renewed(self, producer: CrossingProducer) -> None:
        self._gate = self._publish_plain = None  # in a child of a fork, whose loop is another one

    async def __aenter__(self) -> Producer:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
