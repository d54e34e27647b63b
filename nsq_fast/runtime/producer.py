"""Producer: publish to topics, over as many nsqds as there are.

The public face: arguments are checked and made into commands here, before
anything is queued, so that a rejected argument harms nobody. What happens to
a publish then is in ``delivery``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from time import monotonic
from types import TracebackType
from typing import Any, Literal, overload

from gevent.event import AsyncResult, Event

from nsq_fast import _codec
from nsq_fast.config import ConnectionConfig, LookupConfig, ProducerConfig, split_options
from nsq_fast.errors import BodyInvalid, ConfigError, NoNsqd, NotRunning, PublishFailed, PublishTimeout
from nsq_fast.names import DEFAULT_NSQD_TCP_PORT, parse_addresses

from .delivery import Delivery
from .linger import Linger
from .publish import Gather, Outcome, Publish
from .routes import Route
from .signals import LazySignal

logger = logging.getLogger(__name__)

# Bytes of an MPUB body before the messages, and before each message.
_MPUB_HEADER = 4
_LENGTH = 4

Addresses = str | Iterable[str | tuple[str, int]]


class Producer:
    """Publishes messages, with retries, failover and pipelining; any number of greenlets may share one.

    Args:
        nsqd_tcp_addresses: nsqds that take every topic, as ``host:port`` or (host, port).
        lookupd_http_addresses: nsqlookupds that say which nsqds take a topic. A topic they do not know
            goes to any nsqd they know. At least one of the two kinds of addresses is needed.
        options: the options of ProducerConfig, ConnectionConfig and LookupConfig.

    Delivery is at least once: a publish whose outcome is unknown (its connection broke before the reply) is
    tried again unless ``retry_unknown_outcome`` is False. Its error says ``possibly_stored`` if it may have
    been stored although no OK came.

    Errors of the publish methods: TypeError, NameInvalid, BodyInvalid and ConfigError for a wrong argument, at
    once; NotRunning; NoNsqd; PublishFailed, with the last error as its cause; PublishTimeout.
    """

    on_response = LazySignal("Sent for each response of an nsqd: ``response`` is its bytes.")
    on_error = LazySignal("Sent for each error frame of an nsqd: ``error`` is a ServerError.")
    on_auth = LazySignal("Sent after AUTH: ``conn``, and ``response``, the reply as a dict.")
    on_close = LazySignal("Sent when the producer has closed.")

    def __init__(
        self, nsqd_tcp_addresses: Addresses = (), lookupd_http_addresses: Addresses = (), **options: Any
    ) -> None:
        self.config, self.connection_config, self.lookup_config = split_options(
            options, ProducerConfig, ConnectionConfig, LookupConfig
        )
        self.nsqd_tcp_addresses = parse_addresses(nsqd_tcp_addresses, DEFAULT_NSQD_TCP_PORT)
        self.lookupd_http_addresses = _listed(lookupd_http_addresses)
        if not self.nsqd_tcp_addresses and not self.lookupd_http_addresses:
            raise ConfigError("nsqd_tcp_addresses or lookupd_http_addresses is needed: there is nowhere to publish to")
        self._is_running = False
        self._is_closed = False
        self._closed = Event()
        self._delivery = Delivery(
            self,
            self.nsqd_tcp_addresses,
            self.lookupd_http_addresses,
            self.config,
            self.connection_config,
            self.lookup_config,
        )
        self._linger = Linger(self._delivery, self.config) if self.config.linger or self.config.coalesce else None
        self._lingers_always = self.config.linger > 0
        self._routes = self._delivery.routes.by_topic
        self._room = self._delivery.room
        self._timeout = self.config.publish_timeout
        self._max_msg_size = self.config.max_msg_size

    def __repr__(self) -> str:
        addresses = [*map(str, self.nsqd_tcp_addresses), *self.lookupd_http_addresses]
        return f"<Producer {', '.join(addresses)} {'running' if self._is_running else 'not running'}>"

    # Life

    def start(self) -> None:
        """Begin to connect, without waiting for it. A closed producer cannot be started again."""
        if self._is_closed:
            raise NotRunning("the producer was closed; make a new one")
        if self._is_running:
            logger.warning("%r: started already", self)
            return
        self._is_running = True
        self._delivery.routes.start()

    def close(self, timeout: float | None = None) -> None:
        """Publish no more; wait for the publishes that are pending, then close the connections.

        Args:
            timeout: seconds to wait for pending publishes; those left then fail. None: each has its own deadline.
        """
        _check_timeout(timeout)
        if self._is_closed or not self._is_running:
            self._is_closed = True
            self._closed.set()
            return
        self._is_running = False
        self._is_closed = True
        if self._linger is not None:
            self._linger.flush()
        try:
            self._delivery.drain(timeout)
        finally:
            self._delivery.close(self.connection_config.connect_timeout)
            self._closed.set()
        self.on_close.send(self)

    def join(self, timeout: float | None = None, raise_error: bool = False) -> bool:
        """Wait until the producer has closed; whether it has. ``raise_error`` is there for gnsq's sake."""
        return bool(self._closed.wait(timeout))

    def __enter__(self) -> Producer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_running(self) -> bool:
        """Whether it takes publishes."""
        return self._is_running

    @property
    def is_connected(self) -> bool:
        """Whether any nsqd is connected now."""
        return bool(self._delivery.pool.open)

    def stats(self) -> dict[str, Any]:
        """What is pending, held and waiting for an nsqd; which nsqds are connected, and why the others are not."""
        return self._delivery.stats()

    # Publishing

    @overload
    def publish(
        self,
        topic: str,
        body: bytes | bytearray | memoryview,
        defer: int | None = None,
        block: bool = True,
        timeout: float | None = None,
        raise_error: Literal[True] = True,
    ) -> bytes: ...

    @overload
    def publish(
        self,
        topic: str,
        body: bytes | bytearray | memoryview,
        defer: int | None = None,
        block: bool = True,
        timeout: float | None = None,
        *,
        raise_error: Literal[False],
    ) -> AsyncResult[bytes]: ...

    def publish(
        self,
        topic: str,
        body: bytes | bytearray | memoryview,
        defer: int | None = None,
        block: bool = True,
        timeout: float | None = None,
        raise_error: bool = True,
    ) -> bytes | AsyncResult[bytes]:
        """Publish one message and wait until a server has it; returns ``b"OK"``.

        Args:
            topic: its name.
            body: the message, not empty, at most ``max_msg_size`` bytes.
            defer: milliseconds until it is delivered to consumers (original servers only).
            block: wait for a connection, and for room below ``max_pending``; False raises NoNsqd, or PublishFailed.
            timeout: seconds for all of it, retries included; None: the option ``publish_timeout``.
            raise_error: False returns an AsyncResult at once, which gets the result or the error.
        """
        room = self._room
        route = self._routes.get(topic) if topic.__class__ is str else None
        if (
            self._is_running
            and route is not None
            and body.__class__ is bytes
            and 0 < len(body) <= self._max_msg_size
            and room.used < room.limit
            and not room.queue
            and defer is timeout is None
            and block
            and raise_error
        ):
            # The usual publish, without the calls of the general way below: they cost a tenth of it (bench/macro.py).
            route.is_used = True
            room.used += 1
            if self._linger is not None and (self._lingers_always or self._delivery.pending):
                publish = Publish(route, topic, "PUB", b"", monotonic() + self._timeout)
                self._linger.add(publish, body)
            else:
                publish = Publish(route, topic, "PUB", _codec.pub(topic, body), monotonic() + self._timeout)
                self._delivery.submit(publish)
        else:
            publish = self._new(topic, body, defer, timeout)
            result = None if raise_error else publish.promise()
            self._enter(publish, body, block)
            if result is not None:
                return result
        try:
            return publish.wait()
        finally:
            if not publish.done:
                self._delivery.abandon(publish)

    def publish_nowait(
        self,
        topic: str,
        body: bytes | bytearray | memoryview,
        defer: int | None = None,
        timeout: float | None = None,
    ) -> AsyncResult[bytes]:
        """Publish one message without ever blocking; the AsyncResult gets ``b"OK"`` or the error.

        It waits for a connection in the background. Raises PublishFailed when ``max_pending`` is reached.
        """
        publish = self._new(topic, body, defer, timeout)
        result = publish.promise()
        self._take_room_now(publish.weight, topic)
        self._send(publish, body)
        return result

    @overload
    def multipublish(
        self,
        topic: str,
        bodies: Iterable[bytes | bytearray | memoryview],
        block: bool = True,
        timeout: float | None = None,
        raise_error: Literal[True] = True,
    ) -> bytes: ...

    @overload
    def multipublish(
        self,
        topic: str,
        bodies: Iterable[bytes | bytearray | memoryview],
        block: bool = True,
        timeout: float | None = None,
        *,
        raise_error: Literal[False],
    ) -> AsyncResult[bytes]: ...

    def multipublish(
        self,
        topic: str,
        bodies: Iterable[bytes | bytearray | memoryview],
        block: bool = True,
        timeout: float | None = None,
        raise_error: bool = True,
    ) -> bytes | AsyncResult[bytes]:
        """Publish several messages with one command; the server stores all of them or none.

        A batch above ``max_body_size`` is cut into several commands, and is no longer atomic then: if some
        fail, the error says ``possibly_stored``.

        Args:
            bodies: any iterable of messages; an empty one raises BodyInvalid.
        The other arguments are those of ``publish``.
        """
        parts = self._parts(topic, bodies, timeout)
        outcome: Outcome = parts[0] if len(parts) == 1 else Gather(parts)
        result = None if raise_error else outcome.promise()
        entered = 0
        try:
            for part in parts:
                self._enter(part, b"", block)
                entered += 1
            return outcome.wait() if result is None else result
        finally:
            # An interrupted caller; or no room, or no nsqd, for a part: the others of the batch are on their way.
            if not outcome.done and (result is None or entered < len(parts)):
                for part in parts[:entered]:
                    self._delivery.abandon(part)

    # What one publish goes through

    def _new(self, topic: str, body: Any, defer: int | None, timeout: float | None) -> Publish:
        """Check the arguments of a publish and make its command."""
        if not self._is_running:
            raise self._not_running()
        route = self._routes.get(topic) if topic.__class__ is str else None
        if route is None:
            route = self._delivery.routes.of(topic)
        route.is_used = True
        if body.__class__ is not bytes or not 0 < len(body) <= self._max_msg_size:
            self._check_body(body)
        if timeout is None:
            timeout = self._timeout
        else:
            _check_timeout(timeout)
        deadline = monotonic() + timeout
        if defer is not None and _checked_defer(defer):
            return Publish(route, topic, "DPUB", _codec.dpub(topic, defer, body), deadline)
        if self._linger is not None and (self._lingers_always or self._delivery.pending):
            return Publish(route, topic, "PUB", b"", deadline)
        return Publish(route, topic, "PUB", _codec.pub(topic, body), deadline)

    def _enter(self, publish: Publish, body: Any, block: bool) -> None:
        """Take room, waiting for it if ``block``, and send."""
        room = self._room
        if block and room.used < room.limit and not room.queue and publish.weight == 1:
            room.used += 1  # the usual case
        elif block:
            self._wait_for_room(publish)
        elif publish.route.links:
            self._take_room_now(publish.weight, publish.topic)
        else:
            raise NoNsqd(self._delivery.why_no_nsqd(publish.topic))
        self._send(publish, body)

    def _send(self, publish: Publish, body: Any) -> None:
        if self._linger is None:
            self._delivery.submit(publish)
        elif publish.data:
            self._linger.flush_topic(publish.topic)
            self._delivery.submit(publish)
        else:
            self._linger.add(publish, bytes(body))

    def _wait_for_room(self, publish: Publish) -> None:
        if not self._room.take(publish.weight, publish.deadline):
            raise PublishTimeout(f"publish to {publish.topic!r}: {self._full()}", attempts=0)
        if not self._is_running:  # closed meanwhile
            self._room.give(publish.weight)
            raise self._not_running()

    def _take_room_now(self, weight: int, topic: str) -> None:
        if not self._room.fits(weight):
            raise PublishFailed(f"publish to {topic!r}: {self._full()}", attempts=0)
        self._room.used += weight

    def _full(self) -> str:
        return f"no room: max_pending={self._room.limit} messages wait for their replies"

    def _not_running(self) -> NotRunning:
        return NotRunning("the producer was closed" if self._is_closed else "the producer is not running: call start()")

    def _check_body(self, body: Any) -> None:
        if not isinstance(body, (bytes, bytearray, memoryview)):
            hint = "; encode it first" if isinstance(body, str) else ""
            raise TypeError(f"body must be bytes, bytearray or memoryview, not {type(body).__name__}{hint}")
        size = body.nbytes if isinstance(body, memoryview) else len(body)
        if not size:
            raise BodyInvalid("body is empty: nsqd takes no empty message")
        if size > self._max_msg_size:
            raise BodyInvalid(f"body of {size} bytes is above max_msg_size={self._max_msg_size}")

    # Batches

    def _parts(self, topic: str, bodies: Iterable[Any], timeout: float | None) -> list[Publish]:
        """Check the arguments of a multipublish and make its commands."""
        if not self._is_running:
            raise self._not_running()
        route: Route | None = self._routes.get(topic) if topic.__class__ is str else None
        if route is None:
            route = self._delivery.routes.of(topic)
        route.is_used = True
        if isinstance(bodies, (str, bytes, bytearray, memoryview)) or not isinstance(bodies, Iterable):
            raise TypeError(f"bodies must be an iterable of messages, not {type(bodies).__name__}")
        messages = bodies if bodies.__class__ is list else list(bodies)
        _check_timeout(timeout)
        deadline = monotonic() + (self._timeout if timeout is None else timeout)
        return [
            Publish(route, topic, "MPUB", _codec.mpub(topic, part), deadline, len(part)) for part in self._cut(messages)
        ]

    def _cut(self, messages: list[Any]) -> list[list[Any]]:
        """Cut a batch so that no part is above ``max_body_size``."""
        total = self._check_bodies(messages)
        if total <= self.config.max_body_size:
            return [messages]
        parts: list[list[Any]] = [[]]
        size = _MPUB_HEADER
        for message in messages:
            needed = _LENGTH + (message.nbytes if isinstance(message, memoryview) else len(message))
            if size + needed > self.config.max_body_size and parts[-1]:
                parts.append([])
                size = _MPUB_HEADER
            parts[-1].append(message)
            size += needed
        return parts

    def _check_bodies(self, messages: list[Any]) -> int:
        """Check every message; return the size of an MPUB body of them all."""
        if not messages:
            raise BodyInvalid("bodies is empty: nsqd takes no empty batch")
        if set(map(type, messages)) == {bytes}:
            sizes = list(map(len, messages))
            if min(sizes) > 0 and max(sizes) <= self._max_msg_size:
                return _MPUB_HEADER + _LENGTH * len(sizes) + sum(sizes)
        total = _MPUB_HEADER
        for number, message in enumerate(messages):
            try:
                self._check_body(message)
            except (TypeError, BodyInvalid) as error:
                raise type(error)(f"bodies[{number}]: {error}") from None
            total += _LENGTH + (message.nbytes if isinstance(message, memoryview) else len(message))
        return total


def _listed(addresses: Any) -> list[str]:
    """Lookup addresses as a list; the poller reads them."""
    if isinstance(addresses, str):
        return [part.strip() for part in addresses.split(",") if part.strip()]
    return list(addresses)


def _check_timeout(timeout: Any) -> None:
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ConfigError(f"timeout={timeout!r}: must be a number of seconds above 0, or None")


def _checked_defer(defer: Any) -> int:
    if isinstance(defer, bool) or not isinstance(defer, int) or defer < 0:
        raise ConfigError(f"defer={defer!r}: must be a whole number of milliseconds, 0 or more, or None")
    return defer
