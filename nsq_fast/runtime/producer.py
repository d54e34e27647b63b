"""Producer: publish to topics, over as many nsqds as there are.

The public face. Arguments are checked and made into commands in ``compose``;
what happens to a publish then is in ``delivery``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from time import monotonic
from typing import Any, Literal, TypeAlias, overload

from gevent.event import AsyncResult

from nsq_fast import _codec
from nsq_fast.errors import ConfigError, PublishFailed, PublishTimeout
from nsq_fast.protocol.partitioner import Key

from .owner_thread import get_ident
from .publishing.addressed import Addressed, Receipt
from .publishing.compose import NO_EXTRAS, Body, Extras
from .publishing.lane import Lane
from .publishing.life import ProducerLife, check_timeout
from .publishing.publish import Gather, Outcome, Publish
from .publishing.reasons import why_nowhere
from .publishing.routes import Route

Headers: TypeAlias = Mapping[str, Any]
Stored: TypeAlias = bytes | Receipt
AllStored: TypeAlias = bytes | list[Receipt]


class Producer(ProducerLife):
    """Publishes messages, with retries, failover and pipelining; any number of greenlets may share one.

    Args:
        nsqd_tcp_addresses: nsqds that take every topic, as ``host:port`` or (host, port).
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

    Errors of the publish methods: TypeError, NameInvalid, BodyInvalid and ConfigError for a wrong argument, at
    once, or as soon as it is known what servers take the topic; NotRunning; NoNsqd, and NoLeader for a partition;
    PublishFailed, with the last error as its cause; PublishTimeout.
    """

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
        key: Key | None = None,
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
        key: Key | None = None,
        partition: int | None = None,
        trace_id: int | None = None,
        headers: Headers | None = None,
        tag: str | None = None,
    ) -> AsyncResult[Stored]: ...

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
    ) -> Stored | AsyncResult[Stored]:
        """Publish one message and wait until a server has it; returns ``b"OK"``, or a Receipt when it was traced.

        Args:
            body: the message, not empty, at most ``max_msg_size`` bytes, its trace id and header included.
            defer: milliseconds until it is delivered to consumers (original servers only).
            block: wait for a connection, and for room below ``max_pending``; False raises NoNsqd, or PublishFailed.
            timeout: seconds for all of it, retries included; None: the option ``publish_timeout``.
            raise_error: False returns an AsyncResult at once, which gets the result or the error.
            key, partition, trace_id, headers, tag: for servers with partitions, see ``Extras``.
        """
        room = self._room
        route = self._routes.get(topic) if topic.__class__ is str else None
        if (
            (self._is_running and route is not None and get_ident() == self._thread.ident)
            and (body.__class__ is bytes and 0 < len(body) <= self._max_msg_size)
            and (room.used < room.limit and not room.queue and block and raise_error)
            and (defer is timeout is trace_id is None and headers is None and tag is None)
            and not self._trace.is_active
            and (key is partition is None or route.partition_num)
        ):
            # The usual publish, without the calls of the general way: a tenth less (nsq-fast bench publish).
            route.is_used = True
            deadline = monotonic() + self._timeout
            linger = self._linger
            if key is not None or partition is not None:
                publish = self._publish_pinned(route, topic, body, deadline, key, partition)
            elif linger is not None and (self._lingers_always or self._delivery.pending or self._wakeups.is_waking):
                room.used += 1
                publish = Publish(route, topic, "PUB", b"", deadline)
                linger.add(publish, body)
            elif route.is_plain:
                publish = self._prompt.plain(route, topic, body, deadline)
            else:
                publish = self._prompt.anywhere(route, topic, body, deadline)
        else:
            is_simple = key is tag is None and partition is trace_id is None and headers is None
            extras = NO_EXTRAS if is_simple else Extras(key, partition, trace_id, headers, tag)
            publish = self._new(topic, body, defer, timeout, extras)
            result = None if raise_error else publish.promise()
            self._enter(publish, body, block)
            if result is not None:
                return result
        try:
            stored: Stored = publish.wait(self._wakeups)
            return stored
        finally:
            if not publish.done:
                self._delivery.abandon(publish)

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
    ) -> AsyncResult[Stored]:
        """Publish one message without ever blocking; the AsyncResult gets what ``publish`` returns, or the error.

        It waits for a connection in the background. Raises PublishFailed when ``max_pending`` is reached.
        """
        is_simple = key is tag is None and partition is trace_id is None and headers is None
        extras = NO_EXTRAS if is_simple else Extras(key, partition, trace_id, headers, tag)
        publish = self._new(topic, body, defer, timeout, extras)
        result = publish.promise()
        self._take_room_now(publish.weight, topic)
        self._send(publish, body)
        return result

    @overload
    def multipublish(
        self,
        topic: str,
        bodies: Iterable[Body],
        block: bool = True,
        timeout: float | None = None,
        raise_error: Literal[True] = True,
        *,
        key: Key | None = None,
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
        key: Key | None = None,
        partition: int | None = None,
        trace_id: int | Sequence[int] | None = None,
        headers: Headers | Sequence[Headers] | None = None,
        tag: str | None = None,
    ) -> AsyncResult[AllStored]: ...

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
    ) -> AllStored | AsyncResult[AllStored]:
        """Publish several messages with one command; the server stores all of them or none.

        Returns ``b"OK"``, or a list of a Receipt for each message when they were traced; servers give none for
        batches with headers. A batch above ``max_body_size`` is cut into several commands, and is no longer atomic
        then: if some fail, the error says ``possibly_stored``.

        Args:
            bodies: any iterable of messages; an empty one raises BodyInvalid.
            key, partition, tag: of all of them.
            trace_id, headers: of all of them, or a list with one for each.
        The other arguments are those of ``publish``.
        """
        is_simple = key is tag is None and partition is trace_id is None and headers is None
        extras = NO_EXTRAS if is_simple else Extras(key, partition, trace_id, headers, tag)
        parts = self._parts(topic, bodies, timeout, extras)
        outcome: Outcome = parts[0] if len(parts) == 1 else Gather(parts)
        result = None if raise_error else outcome.promise()
        entered = 0
        try:
            for part in parts:
                self._enter(part, b"", block)
                entered += 1
            return outcome.wait(self._wakeups) if result is None else result
        finally:
            # An interrupted caller; or no room, or no nsqd, for a part: the others of the batch are on their way.
            if not outcome.done and (result is None or entered < len(parts)):
                for part in parts[:entered]:
                    self._delivery.abandon(part)

    # What one publish goes through

    def _publish_pinned(
        self, route: Route, topic: str, body: bytes, deadline: float, key: Key | None, partition: int | None
    ) -> Publish:
        """Send what is bound to a partition, needs no more checks, and has room: ``_send_pinned`` in fewer calls."""
        if key.__class__ is str and partition is None:
            pin: int | None = self._partition_of_key(key, route.partition_num)
        else:
            pin = self._composer.pin(route, key, partition)
        lane = route.lanes.get(pin) if pin is not None and pin < route.partition_num else None
        is_idle = lane is not None and lane.on_wire is None and not lane.is_paused
        if lane is not None and is_idle and not lane.waiting and not self._lingers_always:
            prompt = self._prompt.pinned(lane, body, deadline)
            if prompt is not None:
                return prompt
        publish = Addressed(route, topic, body, deadline)
        publish.key, publish.pin = key, pin
        self._room.used += 1
        if lane is None:
            self._send_pinned(publish)
            return publish
        self._delivery.track(publish)
        publish.lane = lane
        lane.waiting.append(publish)
        # Between the first that waits and the last that fits, they wait for each other already.
        if is_idle and (len(lane.waiting) == 1 or len(lane.waiting) >= self._delivery.max_batch):
            self._move(lane)
        return publish

    def _new(self, topic: str, body: Any, defer: int | None, timeout: float | None, extras: Extras) -> Publish:
        """Check the arguments of a publish and make its command."""
        route = self._route(topic)
        if body.__class__ is not bytes or not 0 < len(body) <= self._max_msg_size:
            self._composer.check_body(body)
        if timeout is None:
            timeout = self._timeout
        else:
            check_timeout(timeout)
        deadline = monotonic() + timeout
        if defer is not None:
            _check_defer(defer)
        if not self._is_bare(route, topic, extras) or (defer and not route.is_plain):
            return self._composer.addressed(route, topic, body, defer or None, deadline, extras)
        if defer:
            return Publish(route, topic, "DPUB", _codec.dpub(topic, defer, body), deadline)
        if self._linger is not None and (self._lingers_always or self._delivery.pending):
            return Publish(route, topic, "PUB", b"", deadline)
        if route.is_plain:
            return Publish(route, topic, "PUB", _codec.pub(topic, body), deadline)
        return Addressed(route, topic, bytes(body), deadline)

    def _parts(self, topic: str, bodies: Iterable[Any], timeout: float | None, extras: Extras) -> Sequence[Publish]:
        """Check the arguments of a multipublish and make its commands."""
        route = self._route(topic)
        check_timeout(timeout)
        deadline = monotonic() + (self._timeout if timeout is None else timeout)
        if route.is_plain and self._is_bare(route, topic, extras):
            return self._composer.plain_parts(route, topic, bodies, deadline)
        return self._composer.addressed_parts(route, topic, bodies, deadline, extras)

    def _route(self, topic: str) -> Route:
        self._thread.check("Producer.publish()")
        if not self._is_running:
            self._resume()
        route: Route | None = self._routes.get(topic) if topic.__class__ is str else None
        if route is None:
            route = self._delivery.routes.of(topic)
        route.is_used = True
        return route

    def _is_bare(self, route: Route, topic: str, extras: Extras) -> bool:
        """Whether it says nothing but its body. Original servers cannot trace; lookup shows them."""
        if extras is not NO_EXTRAS:
            return False
        return not self._trace.is_active or not self._trace.is_on(topic) or (route.topic is not None and route.is_plain)

    def _enter(self, publish: Publish, body: Any, block: bool) -> None:
        """Take room, waiting for it if ``block``, and send."""
        room = self._room
        if block and room.used < room.limit and not room.queue and publish.weight == 1:
            room.used += 1  # the usual case
        elif block:
            self._wait_for_room(publish)
        else:
            self._delivery.locate(publish)
            nowhere = why_nowhere(publish, self._delivery.pool, self._delivery.routes)
            if nowhere is not None:
                raise nowhere
            self._take_room_now(publish.weight, publish.topic)
        self._send(publish, body)

    def _send(self, publish: Publish, body: Any) -> None:
        if isinstance(publish, Addressed):
            self._send_addressed(publish)
        elif self._linger is None:
            self._delivery.submit(publish)
        elif publish.data:
            self._linger.flush_topic(publish.topic)
            self._delivery.submit(publish)
        else:
            self._linger.add(publish, bytes(body))

    def _send_addressed(self, publish: Addressed) -> None:
        if publish.is_pinned:
            self._send_pinned(publish)
        elif self._linger is None or publish.is_alone or not (self._lingers_always or self._delivery.pending):
            self._delivery.submit(publish)
        else:
            self._linger.add_addressed(publish)

    def _send_pinned(self, publish: Addressed) -> None:
        lane = self._delivery.pinned.submit(publish)
        if lane is not None and lane.on_wire is None and not lane.is_paused:  # else it goes with those that wait
            self._move(lane)

    def _move(self, lane: Lane) -> None:
        """Send what waits in a lane, or let it wait for more."""
        linger = self._linger
        gathers = self._lingers_always or len(self._delivery.pending) > 1 or self._wakeups.is_waking
        if gathers and linger is not None and not linger.is_full(lane):
            linger.hold(lane)
        else:
            lane.pump()

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

    def _resume(self) -> None:
        """Connect, if the parent of this process was connected. Raises NotRunning."""
        if not self._is_inherited:
            raise self._not_running()
        self.start()


def _check_defer(defer: Any) -> None:
    if isinstance(defer, bool) or not isinstance(defer, int) or defer < 0:
        raise ConfigError(f"defer={defer!r}: must be a whole number of milliseconds, 0 or more, or None")
