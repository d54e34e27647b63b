"""Producer: publish to topics, over as many nsqds as there are.

One publish, followed downwards: here its arguments are checked, and it is made;
``publishing.destination`` keeps it until it can leave, and chooses its link;
``publishing.delivery`` writes the command that carries it, and takes the reply;
``protocol.publish`` says what that makes of it; ``publishing.publish`` wakes its
caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

from gevent.event import AsyncResult

from nsq_fast._codec import mpub_size
from nsq_fast.errors import ConfigError, PublishFailed, PublishTimeout
from nsq_fast.protocol.partitioner import Key
from nsq_fast.protocol.wire_form import PLAIN_BATCH, Form, Receipt

from .owner_thread import get_ident
from .publishing.compose import NO_EXTRAS, Body, Extras, extras_of
from .publishing.life import ProducerLife, check_timeout
from .publishing.publish import Group, Publish
from .publishing.topic_route import TopicRoute

if TYPE_CHECKING:
    from .publishing.publish import Destination

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
        route = self._routes.get(topic) if topic.__class__ is str else None
        limit = self._pending_limit
        destination: Destination | None = None
        if (
            (route is not None and self._is_running and get_ident() == self._thread.ident)
            and (body.__class__ is bytes and 0 < len(body) <= route.plain_size)
            and (limit.used < limit.limit and not limit.queue and block and raise_error)
            and (defer is timeout is trace_id is None and headers is None and tag is None)
            and not self._trace.is_active
        ):
            # The usual publish: nothing is left to check (nsq-fast bench publish).
            route.is_used = True
            destination = route.any if key is partition is None else route.bound(key, partition)
        if destination is not None:
            limit.used += 1
            publish = Publish(destination, body, monotonic() + self._timeout)
            destination.add(publish)
        else:
            publish = self._new(topic, body, defer, timeout, extras_of(key, partition, trace_id, headers, tag))
            result = None if raise_error else publish.promise()
            self._enter(publish, block)
            if result is not None:
                return result
        try:
            stored: Stored = publish.wait(self._wakeups)
            return stored
        finally:
            if not publish.done:
                publish.destination.sender.abandon(publish)

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
        route = self._routes.get(topic) if topic.__class__ is str else None
        limit = self._pending_limit
        destination: Destination | None = None
        if (
            (route is not None and self._is_running and get_ident() == self._thread.ident)
            and (body.__class__ is bytes and 0 < len(body) <= route.plain_size)
            and (limit.used < limit.limit and not limit.queue)
            and (defer is timeout is trace_id is None and headers is None and tag is None)
            and not self._trace.is_active
        ):
            # The usual publish, as in ``publish`` (nsq-fast bench roundtrip).
            route.is_used = True
            destination = route.any if key is partition is None else route.bound(key, partition)
        if destination is not None:
            limit.used += 1
            publish = Publish(destination, body, monotonic() + self._timeout)
        else:
            publish = self._new(topic, body, defer, timeout, extras_of(key, partition, trace_id, headers, tag))
            self._take_room_now(publish)
        result = publish.promise()
        publish.destination.add(publish)
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
        then: if some fail, the error says ``possibly_stored``. Its ``results`` say what became of each message.

        Args:
            bodies: any iterable of messages; an empty one raises BodyInvalid.
            key, partition, tag: of all of them.
            trace_id, headers: of all of them, or a list with one for each.
        The other arguments are those of ``publish``.
        """
        usual: Publish | None = None
        if (type(bodies) is list and block and raise_error) and (
            timeout is key is partition is trace_id is None and headers is None and tag is None
        ):
            usual = self._usual_batch(topic, bodies)
        if usual is not None:
            parts, entered = [usual], 1
        else:
            extras = extras_of(key, partition, trace_id, headers, tag)
            parts, entered = self._parts(topic, bodies, timeout, extras), 0
        whole: Publish | Group = parts[0] if len(parts) == 1 else Group(parts)
        result = None if raise_error else whole.promise()
        try:
            for part in parts[entered:]:
                self._enter(part, block)
                entered += 1
            return whole.wait(self._wakeups) if result is None else result
        finally:
            # An interrupted caller; or no room, or no nsqd, for a part: the others of the batch are on their way.
            if not whole.done and (result is None or entered < len(parts)):
                for part in parts[:entered]:
                    part.destination.sender.abandon(part)

    # What one publish goes through before it is sent

    def _usual_batch(self, topic: str, bodies: list[Any]) -> Publish | None:
        """Send a batch that is one command, and of which nothing is left to check; None where it is not so.

        What it does not take is for ``_parts`` (nsq-fast bench publish --mode batch).
        """
        route = self._routes.get(topic) if topic.__class__ is str else None
        limit = self._pending_limit
        weight = len(bodies)
        if (
            (route is not None and weight and self._is_running and get_ident() == self._thread.ident)
            and (limit.used + weight <= limit.limit and not limit.queue and not self._trace.is_active)
            and 0 < mpub_size(bodies, route.plain_size) <= self.config.max_body_size
        ):
            route.is_used = True
            limit.used += weight
            publish = Publish(route.any, bodies.copy(), monotonic() + self._timeout, PLAIN_BATCH, weight)
            route.any.add(publish)
            return publish
        return None

    def _new(self, topic: str, body: Any, defer: int | None, timeout: float | None, extras: Extras) -> Publish:
        """Check the arguments of a publish of one message."""
        route = self._route(topic, extras)
        if body.__class__ is not bytes or not 0 < len(body) <= route.max_msg_size:
            self._composer.check_body(route, body)
        deadline = self._deadline(timeout)
        if defer is not None:
            _check_defer(defer)
        data = bytes(body)
        if len(data) > route.plain_size:
            data, extras = self._composer.packed(route, data, extras)
        form = self._composer.form(route, data, defer, extras)
        publish = self._bound(route, data, form, deadline, extras)
        if timeout is not None:
            publish.timeout = timeout
        return publish

    def _parts(self, topic: str, bodies: Iterable[Any], timeout: float | None, extras: Extras) -> list[Publish]:
        """Check the arguments of a multipublish."""
        route = self._route(topic, extras)
        deadline = self._deadline(timeout)
        parts = self._composer.parts(route, bodies, extras)
        made = [self._bound(route, part.bodies, part.form, deadline, extras, len(part.bodies)) for part in parts]
        if timeout is not None:
            for publish in made:
                publish.timeout = timeout
        return made

    def _bound(
        self, route: TopicRoute, body: Any, form: Form, deadline: float, extras: Extras, weight: int = 1
    ) -> Publish:
        """A publish to where its key or partition says. Raises ConfigError when there is no such partition."""
        key, partition = extras.key, extras.partition
        if key is None and partition is None:
            return Publish(route.any, body, deadline, form, weight)
        self._composer.check_binding(key, partition)
        try:
            publish = Publish(route.destination(key, partition), body, deadline, form, weight)
        except ConfigError:
            self._clusters.refresh(route.topic)
            raise
        publish.key, publish.pin = key, partition
        return publish

    def _deadline(self, timeout: float | None) -> float:
        if timeout is not None:
            check_timeout(timeout)
        return monotonic() + (self._timeout if timeout is None else timeout)

    def _route(self, topic: str, extras: Extras = NO_EXTRAS) -> TopicRoute:
        self._thread.check("Producer.publish()")
        if not self._is_running:
            self._resume()
        route: TopicRoute | None = self._routes.get(topic) if topic.__class__ is str else None
        if route is None:
            route = self._clusters.route(topic, extras)
        route.is_used = True
        return route

    def _enter(self, publish: Publish, block: bool) -> None:
        """Take room, waiting for it if ``block``, and send."""
        if block:
            self._wait_for_room(publish)
        else:
            nowhere = publish.destination.sender.why_nowhere(publish)
            if nowhere is not None:
                raise nowhere
            self._take_room_now(publish)
        publish.destination.add(publish)

    def _wait_for_room(self, publish: Publish) -> None:
        if not self._pending_limit.take(publish.weight, publish.deadline):
            raise PublishTimeout(f"publish to {publish.topic!r}: {self._full()}", attempts=0)
        if not self._is_running:  # closed meanwhile
            self._pending_limit.give(publish.weight)
            raise self._not_running()

    def _take_room_now(self, publish: Publish) -> None:
        if not self._pending_limit.fits(publish.weight):
            raise PublishFailed(f"publish to {publish.topic!r}: {self._full()}", attempts=0)
        self._pending_limit.used += publish.weight

    def _full(self) -> str:
        return f"no room: max_pending={self._pending_limit.limit} messages wait for their replies"

    def _resume(self) -> None:
        """Connect, if the parent of this process was connected. Raises NotRunning."""
        if not self._is_inherited:
            raise self._not_running()
        self.start()


def _check_defer(defer: Any) -> None:
    if isinstance(defer, bool) or not isinstance(defer, int) or defer < 0:
        raise ConfigError(f"defer={defer!r}: must be a whole number of milliseconds, 0 or more, or None")
