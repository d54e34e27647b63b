"""Publishes: what a caller asks for, checked and encoded, and what it waits for.

``Composer`` turns the arguments of a call into what is sent, so that a wrong argument harms nobody but its caller: it
is found before anything is queued, or any room taken. ``Publish`` is one command's worth of a call on its way through
``routing`` and ``sender``; ``Group`` is a call that needs several. ``PendingLimit`` is the room that they need
(``max_pending``).

A publish goes through its attempts so:

| state   | what happened                                   | next state                                          |
|---------|-------------------------------------------------|-----------------------------------------------------|
| waiting | a command with it was written                   | on the wire                                         |
| on wire | the server replied OK                           | stored                                              |
| on wire | ``attempt_failed``: refused, or connection lost | waiting; the decision says whether to try again     |
| waiting | ``end``: it will not be tried again             | failed; unknown if an attempt may have been stored  |
| on wire | ``end``: its caller waits no longer             | unknown: the reply is still due                     |
| an end  | anything                                        | the same                                            |

Several publishes may share a command and its reply. Each of them ends, or is tried again, by itself.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec

from nsq_fast import _codec
from nsq_fast._publish_path import COUNT_BYTES, LENGTH_BYTES, LimitPath, PublishPath, Wakeups
from nsq_fast.client.trace import TraceLog, check_trace_id, new_trace_id
from nsq_fast.config import MAX_PARTITION, MAX_TAG_SIZE, ProducerConfig
from nsq_fast.errors import BodyInvalid, ConfigError, NoNsqd, NsqError, PublishFailed, TypeInvalid, counted
from nsq_fast.protocol.dialect import TAG_KEY, TRACE_ID_KEY
from nsq_fast.protocol.publishing import (
    CODEC_HEADER,
    MOST_SERVERS_LOST,
    OK,
    PLAIN,
    PLAIN_BATCH,
    BatchEncoding,
    Encoding,
    Key,
    MessageEncoding,
    Receipt,
    RetryDecision,
    RetryPolicy,
    compressed,
    decide,
    is_miss,
    key_partitioner,
    may_have_ended_server,
)

from .connection import check_delay

if TYPE_CHECKING:
    from nsq_fast._publish_path import Command

    from .loop import Loop, Waiter
    from .routing import Queue, TopicRoute


class Promise(Protocol):
    """What gets the result of a publish, once: a waiter of the loop, or what has its setters."""

    def set(self, value: Any) -> object:
        """It went well."""

    def set_exception(self, error: BaseException) -> object:
        """It did not."""


class Publish(PublishPath):
    """One publish: what a caller waits for, or holds a promise of. What all have is in ``PublishPath``.

    Attributes:
        timeout: its own, in seconds; None: that of the producer.
        pin: the partition that it was given in place of a key.
        failed_attempts: attempts that ended, and count.
        misses: those of them that have not come to the publish itself, see ``is_miss``.
        ended_servers: the servers that were working on it when they ended the connection.
        possibly_stored: an attempt that ended may have been stored.
        last_error: what the last attempt failed with, at ``last_server``; ``failure``: both as text.
        partition: where it was stored; None when the server was to choose.
        receipts: what the server said of it, when it was traced.
        is_abandoned: whether its caller was interrupted, so that nobody hears of its end.
    """

    # One is made for each publish: what is rare goes into a dict, over the defaults here.
    __slots__ = ("__dict__",)

    promised: Any

    destination: Queue

    timeout: float | None = None
    pin: int | None = None
    failed_attempts: int = 0
    misses: int = 0
    ended_servers: tuple[object, ...] = ()
    possibly_stored: bool = False
    last_error: BaseException | None = None
    last_server: object = None
    partition: int | None = None
    receipts: list[Receipt] = []  # noqa: RUF012  # never changed in place
    is_abandoned: bool = False

    @property
    def topic(self) -> str:
        """Its topic."""
        return self.destination.topic

    # Its attempts

    @property
    def attempts(self) -> int:
        """How often it was sent, so far as that counts: see ``RetryDecision.counts``."""
        return self.failed_attempts + (self.attempt is not None)

    @property
    def may_be_stored(self) -> bool:
        """Whether a server may have stored it, as far as is known now."""
        return self.possibly_stored or self.attempt is not None

    def may_retry(self, error: BaseException, policy: RetryPolicy) -> bool:
        """Whether it would be tried again if its attempt failed with ``error`` now."""
        return decide(error, self.attempts, policy, self.misses).retry

    def attempt_failed(
        self, error: BaseException, policy: RetryPolicy, *, is_shared: bool = False, server: object = None
    ) -> RetryDecision:
        """Its attempt at ``server`` is over; return what to do. ``is_shared``: others were in the same command."""
        is_again = server in self.ended_servers
        decision = decide(error, self.attempts, policy, self.misses, is_again=is_again)
        if may_have_ended_server(error):
            # If it did, it ends alone next time, and only one server more.
            self.is_alone: bool = True
            self.ended_servers = (*(each for each in self.ended_servers if each != server), server)
            if len(self.ended_servers) >= MOST_SERVERS_LOST:
                decision = msgspec.structs.replace(decision, retry=False)
        if is_shared and decision.splits and not decision.retry:
            # The server took none, because of one of them or because of them all: let the bad one fail alone.
            self.is_alone = True
            decision = msgspec.structs.replace(decision, retry=True)
        self.attempt: Command | None = None
        self.last_error, self.last_server = error, server
        self.possibly_stored |= decision.possibly_stored
        self.failed_attempts += decision.counts
        self.misses += decision.counts and is_miss(decision, error, policy, self.misses, is_again)
        return decision

    @property
    def failure(self) -> str:
        """What the last attempt failed with, and where."""
        said, where = str(self.last_error) or repr(self.last_error), str(self.last_server or "")
        return said if where in said else f"{said}, at {where}"

    def end(self, error: BaseException | None) -> None:
        """It is over, well when ``error`` is None. The first end counts."""
        if not self.done:
            self.done = True
            self.error = error

    # Its end

    def value(self) -> Any:
        """What it ended with when it went well."""
        return self.encoding.result(self.receipts, self.partition)

    def results(self) -> list[Any]:
        """What became of each of its messages, now that it has ended: OK, a Receipt, or the exception."""
        if self.error is None:
            return self.receipts or [OK] * self.weight
        return [self.error] * self.weight

    def wake(self, wakeups: Wakeups) -> None:
        """It has ended: tell whoever waits for it."""
        if self.waiter is not None:
            wakeups.add(self)
        elif self.promised is not None:
            promise, self.promised = self.promised, None  # which may know this publish: they would be a cycle
            keep_promise(promise, self)
        elif self.group is not None:
            self.group.part_done(self.error, wakeups)


class Group:
    """The publishes that one call made: it ends with their results when all went well; else with the first error.

    The error says ``possibly_stored`` as soon as any part was or may have been stored.
    """

    def __init__(self, parts: Iterable[Publish]) -> None:
        self.done: bool = False
        self.waiter: Any = None
        self.error: BaseException | None = None
        self.promised: Promise | None = None
        self._parts = list(parts)
        self._left = len(self._parts)
        self._is_any_stored = False
        for part in self._parts:
            part.group = self

    def wait(self, wakeups: Wakeups) -> Any:
        """Block the calling greenlet until it is done; return its value or raise its error."""
        while not self.done:
            wakeups.wait_for(self)
        if self.error is not None:
            raise self.error
        return self.value()

    def value(self) -> Any:
        """What it ended with when it went well."""
        values = [part.value() for part in self._parts]
        return OK if OK in values else [receipt for value in values for receipt in value]

    def part_done(self, error: BaseException | None, wakeups: Wakeups) -> None:
        """Count one part."""
        self._left -= 1
        self._is_any_stored |= error is None or getattr(error, "possibly_stored", False)
        self.error = self.error or error
        if self._left:
            return
        self.error = self._whole_error()
        self.done = True
        if self.waiter is not None:
            wakeups.add(self)
        elif self.promised is not None:
            keep_promise(self.promised, self)

    def _whole_error(self) -> BaseException | None:
        """The first error, with what became of each message; it tells when any of them may be stored."""
        error = self.error
        if error is not None and self._is_any_stored:
            error = of_a_part(error)
        if isinstance(error, PublishFailed):
            error.results = [result for part in self._parts for result in part.results()]
        return error


def of_a_part(error: BaseException) -> BaseException:
    """The error of a batch of which one part failed with ``error``, and another was or may have been stored."""
    if isinstance(error, PublishFailed) and not isinstance(error, NoNsqd):
        error.possibly_stored = True
        return error
    if not isinstance(error, NsqError):
        return error
    failed = PublishFailed(f"a part of the batch was not sent: {error}", attempts=0, possibly_stored=True)
    failed.__cause__ = error
    return failed


def keep_promise(promise: Promise, ended: Publish | Group) -> None:
    """Give it what a call has ended with."""
    if ended.error is None:
        promise.set(ended.value())
    else:
        promise.set_exception(ended.error)


class PendingLimit(LimitPath):
    """Back-pressure: counts the messages that a producer holds, and lets callers wait for room (``max_pending``).

    They wait in the order they came, and nobody passes one that was let in and has not gone on yet: the order of
    publishes is the order of the calls. One that is larger than the limit goes in alone, when nothing else is there.
    """

    __slots__ = ("_loop",)

    used: int
    admitted: int
    queue: OrderedDict[Waiter, int]

    def __init__(self, limit: int, loop: Loop) -> None:
        super().__init__(limit)
        self._loop = loop

    def fits(self, weight: int) -> bool:
        """Whether ``weight`` messages may come in now."""
        return not self.queue and not self.admitted and self._fits(weight)

    async def take(self, weight: int, deadline: float) -> bool:
        """Come in with ``weight`` messages, waiting for room until ``deadline`` (monotonic); False: none came free."""
        if self.fits(weight):
            self.used += weight
            return True
        waiter = self._loop.waiter()
        self.queue[waiter] = weight
        try:
            await self._loop.wait(waiter, max(deadline - monotonic(), 0.0))
        except TimeoutError:
            self._leave(waiter, weight)
            return False
        except BaseException:
            self._leave(waiter, weight)
            raise
        self.admitted -= 1
        self._admit()
        return True

    def give(self, weight: int) -> None:
        """Go out with ``weight`` messages."""
        self.used -= weight
        if self.queue:
            self._admit()

    def _admit(self) -> None:
        while self.queue and self._fits(next(iter(self.queue.values()))):
            waiter, weight = self.queue.popitem(last=False)
            self.admitted += 1
            self.used += weight
            if not waiter.ready():
                waiter.set(True)

    def _fits(self, weight: int) -> bool:
        return self.used + weight <= self.limit or not self.used

    def _leave(self, waiter: Waiter, weight: int) -> None:
        if self.queue.pop(waiter, None) is None:  # admitted, but interrupted before it could run
            self.admitted -= 1
            self.used -= weight
        self._admit()


# From the arguments of a call to what is sent

Body = bytes | bytearray | memoryview
Headers: TypeAlias = Mapping[str, Any]
Stored: TypeAlias = bytes | Receipt
AllStored: TypeAlias = bytes | list[Receipt]


class PublishOptions(msgspec.Struct, frozen=True):
    """The arguments of a publish that only servers with partitions know.

    Attributes:
        key: str or bytes (``hashcode``: str, or int as a Java Long); equal keys go to one partition, in order.
            A topic of the original NSQ has no order to keep: there it goes to any nsqd, as without a key.
        partition: its number, instead of a key.
        trace_id: 0 to 2**64-1; stay below 2**63 where Java reads it.
        headers: a mapping that is sent as JSON; the topic must be extended.
        tag: consumers with the same ``desired_tag`` get the message; the topic must be extended.
    """

    key: Key | None = None
    partition: int | None = None
    trace_id: Any = None
    headers: Any = None
    tag: str | None = None


NO_OPTIONS = PublishOptions()


def options_of(key: Key | None, partition: int | None, trace_id: Any, headers: Any, tag: str | None) -> PublishOptions:
    """The options of a publish; ``NO_OPTIONS`` where there are none."""
    if key is tag is None and partition is trace_id is None and headers is None:
        return NO_OPTIONS
    return PublishOptions(key, partition, trace_id, headers, tag)


class Composer:
    """Makes the encodings of one producer's publishes."""

    def __init__(self, config: ProducerConfig, trace: TraceLog) -> None:
        self._max_msg_size = config.max_msg_size
        self._max_body_size = config.max_body_size
        self._partition_of_key = key_partitioner(config.key_strategy)
        self._has_own_keys = callable(config.key_strategy)
        self._codec_name = config.body_compression
        self._trace = trace

    # One message

    def encoding(self, route: TopicRoute, body: Body, trace_id: Any, headers: Any, tag: Any) -> MessageEncoding:
        """The encoding of one message, whose body has been checked."""
        if self._is_bare(route, trace_id, headers, tag):
            return PLAIN
        encoding = self.message_encoding(route, trace_id, headers, tag)
        if encoding is PLAIN or self._fits(route, body, encoding):
            return encoding
        if encoding.is_optional:
            return PLAIN
        raise BodyInvalid(f"body {self._excess(route, body, encoding)}")

    def deferred(self, route: TopicRoute, defer: int, options: PublishOptions) -> MessageEncoding:
        """The encoding of one message that is delivered later."""
        if route.is_partitioned or options is not NO_OPTIONS:
            raise ConfigError(
                f"defer={defer}: servers with partitions, keys, traces and headers cannot delay a publish;"
                " leave defer out"
            )
        return MessageEncoding("DPUB", defer=defer, is_alone=True)

    def packed(self, route: TopicRoute, body: bytes, options: PublishOptions) -> tuple[bytes, PublishOptions]:
        """A body above ``route.plain_size``, compressed if that saves something, and the options that say so."""
        headers = {} if options.headers is None else options.headers
        if self._codec_name is None or not isinstance(headers, Mapping) or CODEC_HEADER in headers:
            return body, options  # such headers are refused later; or the body is one that was compressed before
        found = compressed(self._codec_name, body)
        if found is None:
            return body, options
        return found[0], msgspec.structs.replace(options, headers={**headers, **found[1]})

    def _fits(self, route: TopicRoute, body: Body, encoding: MessageEncoding) -> bool:
        # A trace id that goes before the body is no part of the record behind its head.
        limit = self._max_msg_size if encoding.kind == "PUB_TRACE" else route.max_msg_size
        return len(body) + encoding.overhead <= limit

    def _excess(self, route: TopicRoute, body: Body, encoding: MessageEncoding) -> str:
        return f"of {len(body)} bytes with {encoding.overhead} bytes of trace id or header is above {route.limit_text}"

    def _is_bare(self, route: TopicRoute, trace_id: Any, headers: Any, tag: Any) -> bool:
        """Whether it says nothing but its body. Original servers cannot trace; lookup shows them."""
        if trace_id is not None or headers is not None or tag is not None:
            return False
        return not self._trace.is_active or not self._trace.is_on(route.name) or (route.has_lookup and route.is_plain)

    def message_encoding(
        self, route: TopicRoute, trace_id: Any, headers: Any, tag: Any, *, is_batch: bool = False
    ) -> MessageEncoding:
        """What goes with one message; ``is_batch``: it shares its command with others."""
        is_optional = False
        if headers is not None or tag is not None:
            fields, trace_id = _merge(headers, tag, trace_id)
            if trace_id is None and not is_batch and self._trace.is_on(route.name):
                drawn = new_trace_id()
                trace_id = drawn if self._trace.takes(route.name, drawn) else None
            return _with_header(fields, trace_id)
        if trace_id is None:
            if not self._trace.is_on(route.name):
                return PLAIN
            trace_id, is_optional = new_trace_id(), True
            if not is_batch and not self._trace.takes(route.name, trace_id):
                return PLAIN
        check_trace_id(trace_id)
        if route.is_ext and not is_batch:
            return msgspec.structs.replace(_with_header({}, trace_id), is_optional=is_optional)
        return MessageEncoding("PUB_TRACE", trace_id, is_traced=True, is_optional=is_optional)

    def check_binding(self, key: Key | None, partition: int | None) -> None:
        """Raise ConfigError unless both can name a partition."""
        if key is not None:
            if partition is not None:
                raise ConfigError(f"key={key!r} with partition={partition}: the key names the partition")
            if self._has_own_keys:
                return  # what it takes is for the function to say, when it is asked for a partition
            try:
                self._partition_of_key(key, 1)
            except TypeError as error:
                raise TypeInvalid(str(error)) from None
            except ValueError as error:
                raise ConfigError(str(error)) from None
        elif partition is not None and (
            not isinstance(partition, int) or isinstance(partition, bool) or not 0 <= partition <= MAX_PARTITION
        ):
            raise ConfigError(f"partition={partition!r}: must be a whole number, 0 to {MAX_PARTITION}, or None")

    def check_options(self, options: PublishOptions) -> None:
        """Raise ConfigError or TypeError for what no topic takes."""
        self.check_binding(options.key, options.partition)
        if options.headers is not None or options.tag is not None:
            _with_header(*_merge(options.headers, options.tag, options.trace_id))
        elif options.trace_id is not None:
            check_trace_id(options.trace_id)

    def check_body(self, route: TopicRoute | None, body: Any) -> None:
        """Raise TypeError or BodyInvalid unless ``body`` can be a message of this topic; None: of some topic."""
        size = size_of(body)
        if size > (self._max_msg_size if route is None else route.max_msg_size):
            limit = f"max_msg_size={self._max_msg_size}" if route is None else route.limit_text
            raise BodyInvalid(f"body of {size} bytes is above {limit}")

    # Batches

    def parts(self, route: TopicRoute, bodies: Any, options: PublishOptions) -> list[tuple[list[bytes], Encoding]]:
        """The commands of a batch: the bodies of each, and the encoding that goes with them."""
        messages = _as_list(bodies)
        messages, total = self._check_bodies(route, messages)
        if self._codec_name is not None and max(map(len, messages)) > route.plain_size:
            messages, options = self._packed_batch(route, messages, options)
            total = self._max_body_size + 1  # unknown now; the parts are measured below
        is_bare = self._is_bare(route, options.trace_id, options.headers, options.tag)
        encodings = None if is_bare else self._encodings(route, messages, options)
        if encodings is None:
            groups = [messages] if total <= self._max_body_size else self._cut(messages, None)
            return [(group, PLAIN_BATCH) for group in groups]
        for number, (message, encoding) in enumerate(zip(messages, encodings, strict=True)):
            if not self._fits(route, message, encoding):
                raise BodyInvalid(f"bodies[{number}] {self._excess(route, message, encoding)}")
        parts: list[tuple[list[bytes], Encoding]] = []
        start = 0
        for group in self._cut(messages, encodings):
            parts.append((group, BatchEncoding(encodings[start : start + len(group)])))
            start += len(group)
        return parts

    def _packed_batch(
        self, route: TopicRoute, messages: list[bytes], options: PublishOptions
    ) -> tuple[list[bytes], PublishOptions]:
        """The messages, the large ones compressed; not where they are traced: with headers a batch has no receipts."""
        if options.trace_id is not None or (options.headers is None and self._trace.is_on(route.name)):
            return messages, options
        count = len(messages)
        headers = _each("headers", options.headers, count)
        pairs = [
            self.packed(route, message, PublishOptions(headers=header))
            if len(message) > route.plain_size
            else (message, PublishOptions(headers=header))
            for message, header in zip(messages, headers, strict=True)
        ]
        packed = [each.headers or {} for _, each in pairs]  # all have a header, or none
        if options.headers is None and options.tag is None and not any(packed):
            return messages, options
        return [message for message, _ in pairs], msgspec.structs.replace(options, headers=packed)

    def _encodings(
        self, route: TopicRoute, messages: list[bytes], options: PublishOptions
    ) -> list[MessageEncoding] | None:
        """What goes with each message; None: nothing."""
        count = len(messages)
        is_asked = options.trace_id is not None or options.headers is not None or options.tag is not None
        if not is_asked and max(map(len, messages)) + _TRACE_ID_BYTES > self._max_msg_size:
            return None
        is_same = not isinstance(options.headers, Sequence) and not isinstance(options.trace_id, Sequence)
        if is_same and is_asked:
            return [self.message_encoding(route, options.trace_id, options.headers, options.tag, is_batch=True)] * count
        trace_ids = _each("trace_id", options.trace_id, count)
        headers = _each("headers", options.headers, count)
        encodings = [
            self.message_encoding(route, trace_id, header, options.tag, is_batch=True)
            for trace_id, header in zip(trace_ids, headers, strict=True)
        ]
        if len({encoding.kind for encoding in encodings}) > 1:
            raise ConfigError("headers: give one mapping for each message, {} for none")
        return encodings

    def _cut(self, messages: list[bytes], encodings: list[MessageEncoding] | None) -> list[list[bytes]]:
        """Cut a batch so that no part is above ``max_body_size``."""
        parts: list[list[bytes]] = [[]]
        size = COUNT_BYTES
        for number, message in enumerate(messages):
            needed = LENGTH_BYTES + len(message) + (0 if encodings is None else encodings[number].overhead)
            if size + needed > self._max_body_size and parts[-1]:
                parts.append([])
                size = COUNT_BYTES
            parts[-1].append(message)
            size += needed
        return parts

    def _check_bodies(self, route: TopicRoute, messages: list[Any]) -> tuple[list[bytes], int]:
        """Check every message; return them as bytes, and the size of an MPUB body of them all."""
        if not messages:
            raise BodyInvalid("bodies is empty: nsqd takes no empty batch")
        total = _codec.mpub_size(messages, route.max_msg_size)
        if total >= 0:
            return messages, total
        for number, message in enumerate(messages):
            try:
                self.check_body(route, message)
            except (TypeError, BodyInvalid) as error:  # noqa: PERF203
                raise type(error)(f"bodies[{number}]: {error}") from None
        messages = list(map(bytes, messages))
        return messages, COUNT_BYTES + LENGTH_BYTES * len(messages) + sum(map(len, messages))


_TRACE_DIGITS = re.compile(r"0*([0-9]{1,20})")
_TRACE_ID_BYTES = MessageEncoding("PUB_TRACE").overhead


def size_of(body: Any) -> int:
    """The bytes of a body. Raises TypeInvalid or BodyInvalid where no server takes it."""
    if not isinstance(body, (bytes, bytearray, memoryview)):
        hint = "; encode it first" if isinstance(body, str) else ""
        raise TypeInvalid(f"body must be bytes, bytearray or memoryview, not {type(body).__name__}{hint}")
    size = body.nbytes if isinstance(body, memoryview) else len(body)
    if not size:
        raise BodyInvalid("body is empty: nsqd takes no empty message")
    return size


def owned(bodies: Any) -> list[Any]:
    """The messages of a batch, as they are now: what the caller may change later is copied."""
    return [bytes(body) if isinstance(body, (bytearray, memoryview)) else body for body in _as_list(bodies)]


def _as_list(bodies: Any) -> list[Any]:
    if isinstance(bodies, (str, bytes, bytearray, memoryview)) or not isinstance(bodies, Iterable):
        raise TypeInvalid(f"bodies must be an iterable of messages, not {type(bodies).__name__}")
    return list(bodies)  # a copy: the caller may change its own


def _each(name: str, value: Any, count: int) -> Sequence[Any]:
    """One value for each message: ``value`` itself for all, or the items of a list of them."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        if len(value) != count:
            raise ConfigError(f"{name} has {counted(len(value), 'item')} for {counted(count, 'message')}")
        return value
    return [value] * count


def _merge(headers: Any, tag: Any, trace_id: Any) -> tuple[dict[str, Any], int | None]:
    """The fields of a header, and the trace id. Those of a received message may be passed on as they are."""
    if headers is not None and not (isinstance(headers, Mapping) and all(isinstance(name, str) for name in headers)):
        raise TypeInvalid(f"headers must be a mapping with str keys, not {headers!r:.100}")
    fields = dict(headers or {})
    if tag is not None:
        if not isinstance(tag, str) or not 0 < len(tag) <= MAX_TAG_SIZE:
            raise ConfigError(f"tag={tag!r}: must be a str of 1 to {MAX_TAG_SIZE} characters, or None")
        fields[TAG_KEY] = tag
    carried = fields.pop(TRACE_ID_KEY, None)
    if trace_id is None and carried is not None:
        found = _TRACE_DIGITS.fullmatch(carried) if isinstance(carried, str) else None
        if found is None:
            raise ConfigError(f"headers: {TRACE_ID_KEY} must be a str of 1 to 20 decimal digits, not {carried!r:.100}")
        trace_id = int(found[1])
    return fields, None if trace_id is None else check_trace_id(trace_id)


def _check_values(value: Any) -> None:
    """Raise ConfigError for what JSON has no form of, and the encoder would change: numbers become null, bytes text."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"headers: {value!r} cannot be JSON: send it as text, or leave it out")
    if isinstance(value, (bytes, bytearray, memoryview)):
        raise ConfigError(f"headers: {bytes(value)!r:.100} cannot be JSON: decode it to str")
    if isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            _check_values(each)


def _with_header(fields: dict[str, Any], trace_id: int | None) -> MessageEncoding:
    if trace_id is not None:
        fields[TRACE_ID_KEY] = str(trace_id)
    try:
        _check_values(fields)
        header = msgspec.json.encode(fields)
    except ConfigError:
        raise
    except (TypeError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"headers: cannot be JSON: {error}") from error
    if len(header) > _codec.MAX_HEADER_SIZE:
        raise BodyInvalid(
            f"headers of {len(header)} bytes as JSON, tag and trace id included: at most {_codec.MAX_HEADER_SIZE};"
            " servers cannot read a larger one again"
        )
    # With a trace id it gets a receipt, where it is the only one of its command.
    # youzan/nsq: nsqdserver/protocol_v2.go, internalPubExtAndTrace, internalMPUBEXTAndTrace
    is_traced = trace_id is not None
    return MessageEncoding("PUB_EXT", trace_id or 0, header, is_traced=is_traced, is_alone=is_traced)


def check_timeout(timeout: Any) -> None:
    """Raise ConfigError unless it is one of a publish: a number of seconds. None, which is one too, is not asked."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ConfigError(f"timeout={timeout!r}: must be a number of seconds above 0, or None")


def check_defer(defer: Any) -> None:
    """Raise ConfigError unless it is a delay of a publish, or None."""
    if defer is not None:
        check_delay("defer", defer)
