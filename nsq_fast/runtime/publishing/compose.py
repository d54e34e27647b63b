"""From the arguments of a publish to its commands: checked, measured, cut.

Everything a caller can get wrong is found here, before anything is queued, so
that a rejected argument harms nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from nsq_fast import _codec
from nsq_fast.config import ProducerConfig
from nsq_fast.errors import BodyInvalid, ConfigError
from nsq_fast.protocol.dialect import TAG_KEY, TRACE_ID_KEY
from nsq_fast.protocol.partitioner import Key, key_partitioner
from nsq_fast.protocol.topology import MAX_PARTITIONS
from nsq_fast.runtime.trace import TraceLog, check_trace_id, new_trace_id

from .addressed import PLAIN, Addressed, AddressedMany, Saying
from .publish import Publish
from .routes import Route

# Bytes of an MPUB body before the messages, and before each message.
_MPUB_HEADER = 4
_LENGTH = 4
_MAX_HEADER = 65534
_MAX_TAG = 100

Body = bytes | bytearray | memoryview


class Extras(NamedTuple):
    """The arguments of a publish that only servers with partitions know.

    Attributes:
        key: str or bytes (``hashcode``: str, or int as a Java Long); equal keys go to one partition, in order.
            ConfigError where the topic has no partitions: original servers have no order to keep.
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


NO_EXTRAS = Extras()


class Composer:
    """Makes the commands of one producer.

    Args:
        refresh: called with a topic whose meta may be out of date.

    Attributes:
        partition_of_key: the number of the partition for a key and the count of partitions.
    """

    def __init__(self, config: ProducerConfig, trace: TraceLog, refresh: Callable[[str], None]) -> None:
        self._max_msg_size = config.max_msg_size
        self._max_body_size = config.max_body_size
        self.partition_of_key = key_partitioner(config.key_strategy)
        self._trace = trace
        self._refresh = refresh

    # One message

    def addressed(
        self, route: Route, topic: str, body: Body, defer: int | None, deadline: float, extras: Extras
    ) -> Addressed:
        """A publish whose command depends on where it goes. ``body`` has been checked."""
        if defer is not None:
            return self._deferred(route, topic, body, defer, deadline, extras)
        saying = self._saying(route, topic, body, extras)
        return self.pinned(route, topic, bytes(body), deadline, extras.key, extras.partition, saying)

    def pinned(
        self,
        route: Route,
        topic: str,
        body: bytes,
        deadline: float,
        key: Key | None,
        partition: int | None,
        saying: Saying = PLAIN,
    ) -> Addressed:
        """As ``addressed``, of what has been checked but for ``key`` and ``partition``."""
        publish = Addressed(route, topic, body, deadline, saying)
        publish.pin = self.pin(route, key, partition)
        publish.key = key
        return publish

    def _deferred(self, route: Route, topic: str, body: Body, defer: int, deadline: float, extras: Extras) -> Addressed:
        if route.is_partitioned or extras is not NO_EXTRAS:
            raise ConfigError(
                f"defer={defer}: servers with partitions, keys, traces and headers cannot delay a publish;"
                " leave defer out"
            )
        return Addressed(route, topic, _codec.dpub(topic, defer, body), deadline, Saying("DPUB"))

    def _saying(self, route: Route, topic: str, body: Body, extras: Extras) -> Saying:
        saying = self.saying(route, topic, extras.trace_id, extras.headers, extras.tag)
        if saying.overhead and len(body) + saying.overhead > self._max_msg_size:
            if saying.is_optional:
                return PLAIN
            raise BodyInvalid(
                f"body of {len(body)} bytes with {saying.overhead} bytes of trace id or header"
                f" is above max_msg_size={self._max_msg_size}"
            )
        return saying

    def saying(
        self, route: Route, topic: str, trace_id: Any, headers: Any, tag: Any, *, is_batch: bool = False
    ) -> Saying:
        """What goes with one message."""
        is_optional = False
        if headers is not None or tag is not None:
            fields, trace_id = _merge(headers, tag, trace_id)
            self._check_ext(route, topic)
            if trace_id is None and not is_batch and self._trace.is_on(topic):
                trace_id = new_trace_id()
            return _with_header(fields, trace_id)
        if trace_id is None:
            if not self._trace.is_on(topic):
                return PLAIN
            trace_id, is_optional = new_trace_id(), True
        check_trace_id(trace_id)
        if route.is_ext and not is_batch:
            return _with_header({}, trace_id)._replace(is_optional=is_optional)
        return Saying("PUB_TRACE", trace_id, is_traced=True, is_optional=is_optional)

    def _check_ext(self, route: Route, topic: str) -> None:
        if route.is_ext is False:
            self._refresh(topic)
            raise ConfigError(
                f"headers, tag: topic {topic!r} carries no extended headers; leave them out, or create it with extend"
            )

    def pin(self, route: Route, key: Key | None, partition: int | None) -> int | None:
        """The partition, as far as it is known; checks both arguments."""
        if key is not None:
            if partition is not None:
                raise ConfigError(f"key={key!r} with partition={partition}: the key names the partition")
            try:
                found = self.partition_of_key(key, route.partition_num or 1)
            except ValueError as error:
                raise ConfigError(str(error)) from None
            return found if route.partition_num else None
        if partition is not None and (
            not isinstance(partition, int) or isinstance(partition, bool) or not 0 <= partition < MAX_PARTITIONS
        ):
            raise ConfigError(f"partition={partition!r}: must be a whole number, 0 to {MAX_PARTITIONS - 1}, or None")
        return partition

    def check_body(self, body: Any) -> None:
        """Raise TypeError or BodyInvalid unless ``body`` can be a message."""
        if not isinstance(body, (bytes, bytearray, memoryview)):
            hint = "; encode it first" if isinstance(body, str) else ""
            raise TypeError(f"body must be bytes, bytearray or memoryview, not {type(body).__name__}{hint}")
        size = body.nbytes if isinstance(body, memoryview) else len(body)
        if not size:
            raise BodyInvalid("body is empty: nsqd takes no empty message")
        if size > self._max_msg_size:
            raise BodyInvalid(f"body of {size} bytes is above max_msg_size={self._max_msg_size}")

    # Batches

    def plain_parts(self, route: Route, topic: str, bodies: Any, deadline: float) -> list[Publish]:
        """The commands of a batch for servers without partitions."""
        messages = _as_list(bodies)
        total = self._check_bodies(messages)
        parts = [messages] if total <= self._max_body_size else self._cut(messages, lambda _: 0)
        return [Publish(route, topic, "MPUB", _codec.mpub(topic, part), deadline, len(part)) for part in parts]

    def addressed_parts(
        self, route: Route, topic: str, bodies: Any, deadline: float, extras: Extras
    ) -> list[AddressedMany]:
        """The commands of a batch that depend on where it goes."""
        pin = self.pin(route, extras.key, extras.partition)
        messages = _as_list(bodies)
        total = self._check_bodies(messages)
        messages = list(map(bytes, messages))
        sayings = self._sayings(route, topic, messages, extras)
        if sayings is None:
            groups = [messages] if total <= self._max_body_size else self._cut(messages, lambda _: 0)
            return [self._many(route, topic, group, PLAIN, deadline, extras, pin) for group in groups]
        for number, (message, saying) in enumerate(zip(messages, sayings, strict=True)):
            if len(message) + saying.overhead > self._max_msg_size:
                raise BodyInvalid(
                    f"bodies[{number}] of {len(message)} bytes with {saying.overhead} bytes of trace id or header"
                    f" is above max_msg_size={self._max_msg_size}"
                )
        parts: list[AddressedMany] = []
        start = 0
        for part in self._cut(messages, lambda at: sayings[at].overhead):
            said = sayings[start : start + len(part)]
            parts.append(self._many(route, topic, part, said, deadline, extras, pin))
            start += len(part)
        return parts

    def _many(
        self,
        route: Route,
        topic: str,
        bodies: list[bytes],
        sayings: list[Saying] | Saying,
        deadline: float,
        extras: Extras,
        pin: int | None,
    ) -> AddressedMany:
        publish = AddressedMany(route, topic, bodies, sayings, deadline)
        publish.key, publish.pin = extras.key, pin
        return publish

    def _sayings(self, route: Route, topic: str, messages: list[bytes], extras: Extras) -> list[Saying] | None:
        """What goes with each message; None: nothing."""
        count = len(messages)
        if extras[2:] == NO_EXTRAS[2:] and (
            not self._trace.is_on(topic) or max(map(len, messages)) + PLAIN_TRACE > self._max_msg_size
        ):
            return None
        is_same = not isinstance(extras.headers, Sequence) and not isinstance(extras.trace_id, Sequence)
        if is_same and extras[2:] != NO_EXTRAS[2:]:
            return [self.saying(route, topic, extras.trace_id, extras.headers, extras.tag, is_batch=True)] * count
        trace_ids = _each("trace_id", extras.trace_id, count)
        headers = _each("headers", extras.headers, count)
        sayings = [
            self.saying(route, topic, trace_id, header, extras.tag, is_batch=True)
            for trace_id, header in zip(trace_ids, headers, strict=True)
        ]
        if len({saying.kind for saying in sayings}) > 1:
            raise ConfigError("headers: give one mapping for each message, {} for none")
        return sayings

    def _cut(self, messages: list[Any], overhead: Callable[[int], int]) -> list[list[Any]]:
        """Cut a batch so that no part is above ``max_body_size``."""
        parts: list[list[Any]] = [[]]
        size = _MPUB_HEADER
        for number, message in enumerate(messages):
            needed = _LENGTH + overhead(number) + (message.nbytes if isinstance(message, memoryview) else len(message))
            if size + needed > self._max_body_size and parts[-1]:
                parts.append([])
                size = _MPUB_HEADER
            parts[-1].append(message)
            size += needed
        return parts

    def _check_bodies(self, messages: list[Any]) -> int:
        """Check every message; return the size of an MPUB body of them all."""
        if not messages:
            raise BodyInvalid("bodies is empty: nsqd takes no empty batch")
        total = _codec.mpub_size(messages, self._max_msg_size)
        if total >= 0:
            return total
        total = _MPUB_HEADER
        for number, message in enumerate(messages):
            try:
                self.check_body(message)
            except (TypeError, BodyInvalid) as error:
                raise type(error)(f"bodies[{number}]: {error}") from None
            total += _LENGTH + (message.nbytes if isinstance(message, memoryview) else len(message))
        return total


PLAIN_TRACE = Saying("PUB_TRACE").overhead


def _as_list(bodies: Any) -> list[Any]:
    if isinstance(bodies, (str, bytes, bytearray, memoryview)) or not isinstance(bodies, Iterable):
        raise TypeError(f"bodies must be an iterable of messages, not {type(bodies).__name__}")
    return bodies if bodies.__class__ is list else list(bodies)


def _each(name: str, value: Any, count: int) -> Sequence[Any]:
    """One value for each message: ``value`` itself for all, or the items of a list of them."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        if len(value) != count:
            raise ConfigError(f"{name} has {len(value)} items for {count} messages")
        return value
    return [value] * count


def _merge(headers: Any, tag: Any, trace_id: Any) -> tuple[dict[str, Any], int | None]:
    """The fields of a header, and the trace id. Those of a received message may be passed on as they are."""
    if headers is not None and not (isinstance(headers, Mapping) and all(isinstance(name, str) for name in headers)):
        raise TypeError(f"headers must be a mapping with str keys, not {headers!r:.100}")
    fields = dict(headers or {})
    if tag is not None:
        if not isinstance(tag, str) or not 0 < len(tag) <= _MAX_TAG:
            raise ConfigError(f"tag={tag!r}: must be a str of 1 to {_MAX_TAG} characters, or None")
        fields[TAG_KEY] = tag
    carried = fields.pop(TRACE_ID_KEY, None)
    if trace_id is None and carried is not None:
        if not isinstance(carried, str) or not carried.isascii() or not carried.isdigit():
            raise ConfigError(f"headers: {TRACE_ID_KEY} must be a str of decimal digits, not {carried!r}")
        trace_id = int(carried)
    return fields, None if trace_id is None else check_trace_id(trace_id)


def _with_header(fields: dict[str, Any], trace_id: int | None) -> Saying:
    if trace_id is not None:
        fields[TRACE_ID_KEY] = str(trace_id)
    try:
        header = msgspec.json.encode(fields)
    except (TypeError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"headers: cannot be JSON: {error}") from error
    if len(header) > _MAX_HEADER:
        raise BodyInvalid(f"headers of {len(header)} bytes as JSON: at most {_MAX_HEADER}")
    return Saying("PUB_EXT", trace_id or 0, header, is_traced=trace_id is not None)
