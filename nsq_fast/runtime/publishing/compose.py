"""From the arguments of a publish to its form: checked, measured, cut.

Everything a caller can get wrong is found here, before anything is queued, so
that a rejected argument harms nobody.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from nsq_fast import _codec
from nsq_fast.config import MAX_PARTITION, MAX_TAG_SIZE, ProducerConfig
from nsq_fast.errors import BodyInvalid, ConfigError
from nsq_fast.protocol.compression import CODEC_HEADER, compressed
from nsq_fast.protocol.dialect import TAG_KEY, TRACE_ID_KEY
from nsq_fast.protocol.partitioner import Key, key_partitioner
from nsq_fast.protocol.wire_form import COUNT_BYTES, LENGTH_BYTES, PLAIN, PLAIN_BATCH, BatchForm, Form, WireForm
from nsq_fast.runtime.trace import TraceLog, check_trace_id, new_trace_id

from .topic_route import TopicRoute, no_headers

Body = bytes | bytearray | memoryview


class Extras(msgspec.Struct, frozen=True):
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

    @property
    def go_with_body(self) -> bool:
        """Whether any of them is sent; a key and a partition only say where to."""
        return self.trace_id is not None or self.headers is not None or self.tag is not None


NO_EXTRAS = Extras()


def extras_of(key: Key | None, partition: int | None, trace_id: Any, headers: Any, tag: str | None) -> Extras:
    """The extras of a publish; ``NO_EXTRAS`` where there are none."""
    if key is tag is None and partition is trace_id is None and headers is None:
        return NO_EXTRAS
    return Extras(key, partition, trace_id, headers, tag)


class Part(msgspec.Struct, frozen=True):
    """Messages of a batch that make one command: their bodies, and the form that goes with them."""

    bodies: list[bytes]
    form: Form


class Composer:
    """Makes the forms of one producer's publishes.

    Args:
        refresh: called with a topic whose meta may be out of date.
    """

    def __init__(self, config: ProducerConfig, trace: TraceLog, refresh: Callable[[str], None]) -> None:
        self._max_msg_size = config.max_msg_size
        self._max_body_size = config.max_body_size
        self._partition_of_key = key_partitioner(config.key_strategy)
        self._has_own_keys = callable(config.key_strategy)
        self._codec_name = config.body_compression
        self._trace = trace
        self._refresh = refresh

    # One message

    def form(self, route: TopicRoute, body: Body, defer: int | None, extras: Extras) -> WireForm:
        """The form of one message, whose body has been checked."""
        if defer:
            if route.is_partitioned or extras is not NO_EXTRAS:
                raise ConfigError(
                    f"defer={defer}: servers with partitions, keys, traces and headers cannot delay a publish;"
                    " leave defer out"
                )
            return WireForm("DPUB", defer=defer)
        if self._is_bare(route, extras):
            return PLAIN
        form = self.message_form(route, extras.trace_id, extras.headers, extras.tag)
        if form.overhead and not self._fits(route, body, form):
            if form.is_optional:
                return PLAIN
            raise BodyInvalid(f"body {self._excess(route, body, form)}")
        return form

    def packed(self, route: TopicRoute, body: bytes, extras: Extras) -> tuple[bytes, Extras]:
        """A body above ``route.plain_size``, compressed if that saves something, and the extras that say so."""
        headers = {} if extras.headers is None else extras.headers
        if self._codec_name is None or not isinstance(headers, Mapping) or CODEC_HEADER in headers:
            return body, extras  # such headers are refused later; or the body is one that was compressed before
        found = compressed(self._codec_name, body)
        if found is None:
            return body, extras
        return found[0], msgspec.structs.replace(extras, headers={**headers, **found[1]})

    def _fits(self, route: TopicRoute, body: Body, form: WireForm) -> bool:
        # A trace id that goes before the body is no part of the record behind its head.
        limit = self._max_msg_size if form.kind == "PUB_TRACE" else route.max_msg_size
        return len(body) + form.overhead <= limit

    def _excess(self, route: TopicRoute, body: Body, form: WireForm) -> str:
        return f"of {len(body)} bytes with {form.overhead} bytes of trace id or header is above {route.limit_text}"

    def _is_bare(self, route: TopicRoute, extras: Extras) -> bool:
        """Whether it says nothing but its body. Original servers cannot trace; lookup shows them."""
        if extras is not NO_EXTRAS and extras.go_with_body:
            return False
        return not self._trace.is_active or not self._trace.is_on(route.topic) or (route.has_lookup and route.is_plain)

    def message_form(
        self, route: TopicRoute, trace_id: Any, headers: Any, tag: Any, *, is_batch: bool = False
    ) -> WireForm:
        """What goes with one message; ``is_batch``: it shares its command with others."""
        is_optional = False
        if headers is not None or tag is not None:
            fields, trace_id = _merge(headers, tag, trace_id)
            self._check_ext(route)
            if trace_id is None and not is_batch and self._trace.is_on(route.topic):
                drawn = new_trace_id()
                trace_id = drawn if self._trace.takes(route.topic, drawn) else None
            return _with_header(fields, trace_id)
        if trace_id is None:
            if not self._trace.is_on(route.topic):
                return PLAIN
            trace_id, is_optional = new_trace_id(), True
            if not is_batch and not self._trace.takes(route.topic, trace_id):
                return PLAIN
        check_trace_id(trace_id)
        if route.is_ext and not is_batch:
            return msgspec.structs.replace(_with_header({}, trace_id), is_optional=is_optional)
        return WireForm("PUB_TRACE", trace_id, is_traced=True, is_optional=is_optional)

    def _check_ext(self, route: TopicRoute) -> None:
        if route.is_ext is False:
            self._refresh(route.topic)
            raise no_headers(route.topic)

    def check_binding(self, key: Key | None, partition: int | None) -> None:
        """Raise ConfigError or TypeError unless both can name a partition."""
        if key is not None:
            if partition is not None:
                raise ConfigError(f"key={key!r} with partition={partition}: the key names the partition")
            if self._has_own_keys:
                return  # what it takes is for the function to say, when it is asked for a partition
            try:
                self._partition_of_key(key, 1)
            except ValueError as error:
                raise ConfigError(str(error)) from None
        elif partition is not None and (
            not isinstance(partition, int) or isinstance(partition, bool) or not 0 <= partition <= MAX_PARTITION
        ):
            raise ConfigError(f"partition={partition!r}: must be a whole number, 0 to {MAX_PARTITION}, or None")

    def check_body(self, route: TopicRoute, body: Any) -> None:
        """Raise TypeError or BodyInvalid unless ``body`` can be a message."""
        size = size_of(body)
        if size > route.max_msg_size:
            raise BodyInvalid(f"body of {size} bytes is above {route.limit_text}")

    # Batches

    def parts(self, route: TopicRoute, bodies: Any, extras: Extras) -> list[Part]:
        """The commands of a batch."""
        messages = _as_list(bodies)
        messages, total = self._check_bodies(route, messages)
        if self._codec_name is not None and max(map(len, messages)) > route.plain_size:
            messages, extras = self._packed_batch(route, messages, extras)
            total = self._max_body_size + 1  # unknown now; the parts are measured below
        forms = None if self._is_bare(route, extras) else self._forms(route, messages, extras)
        if forms is None:
            groups = [messages] if total <= self._max_body_size else self._cut(messages, None)
            return [Part(group, PLAIN_BATCH) for group in groups]
        for number, (message, form) in enumerate(zip(messages, forms, strict=True)):
            if not self._fits(route, message, form):
                raise BodyInvalid(f"bodies[{number}] {self._excess(route, message, form)}")
        parts: list[Part] = []
        start = 0
        for group in self._cut(messages, forms):
            parts.append(Part(group, BatchForm(forms[start : start + len(group)])))
            start += len(group)
        return parts

    def _packed_batch(self, route: TopicRoute, messages: list[bytes], extras: Extras) -> tuple[list[bytes], Extras]:
        """The messages, the large ones compressed; not where they are traced: with headers a batch has no receipts."""
        if extras.trace_id is not None or (extras.headers is None and self._trace.is_on(route.topic)):
            return messages, extras
        count = len(messages)
        headers = _each("headers", extras.headers, count)
        pairs = [
            self.packed(route, message, Extras(headers=header))
            if len(message) > route.plain_size
            else (message, Extras(headers=header))
            for message, header in zip(messages, headers, strict=True)
        ]
        packed = [each.headers or {} for _, each in pairs]  # all have a header, or none
        if extras.headers is None and extras.tag is None and not any(packed):
            return messages, extras
        return [message for message, _ in pairs], msgspec.structs.replace(extras, headers=packed)

    def _forms(self, route: TopicRoute, messages: list[bytes], extras: Extras) -> list[WireForm] | None:
        """What goes with each message; None: nothing."""
        count = len(messages)
        is_asked = extras.go_with_body
        if not is_asked and max(map(len, messages)) + _TRACE_ID_BYTES > self._max_msg_size:
            return None
        is_same = not isinstance(extras.headers, Sequence) and not isinstance(extras.trace_id, Sequence)
        if is_same and is_asked:
            return [self.message_form(route, extras.trace_id, extras.headers, extras.tag, is_batch=True)] * count
        trace_ids = _each("trace_id", extras.trace_id, count)
        headers = _each("headers", extras.headers, count)
        forms = [
            self.message_form(route, trace_id, header, extras.tag, is_batch=True)
            for trace_id, header in zip(trace_ids, headers, strict=True)
        ]
        if len({form.kind for form in forms}) > 1:
            raise ConfigError("headers: give one mapping for each message, {} for none")
        return forms

    def _cut(self, messages: list[bytes], forms: list[WireForm] | None) -> list[list[bytes]]:
        """Cut a batch so that no part is above ``max_body_size``."""
        parts: list[list[bytes]] = [[]]
        size = COUNT_BYTES
        for number, message in enumerate(messages):
            needed = LENGTH_BYTES + len(message) + (0 if forms is None else forms[number].overhead)
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


_TRACE_ID_BYTES = WireForm("PUB_TRACE").overhead


def size_of(body: Any) -> int:
    """The bytes of a body. Raises TypeError or BodyInvalid where no server takes it."""
    if not isinstance(body, (bytes, bytearray, memoryview)):
        hint = "; encode it first" if isinstance(body, str) else ""
        raise TypeError(f"body must be bytes, bytearray or memoryview, not {type(body).__name__}{hint}")
    size = body.nbytes if isinstance(body, memoryview) else len(body)
    if not size:
        raise BodyInvalid("body is empty: nsqd takes no empty message")
    return size


def owned(bodies: Any) -> list[Any]:
    """The messages of a batch, as they are now: what the caller may change later is copied."""
    return [bytes(body) if isinstance(body, (bytearray, memoryview)) else body for body in _as_list(bodies)]


def _as_list(bodies: Any) -> list[Any]:
    if isinstance(bodies, (str, bytes, bytearray, memoryview)) or not isinstance(bodies, Iterable):
        raise TypeError(f"bodies must be an iterable of messages, not {type(bodies).__name__}")
    return list(bodies)  # a copy: the caller may change its own


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
        if not isinstance(tag, str) or not 0 < len(tag) <= MAX_TAG_SIZE:
            raise ConfigError(f"tag={tag!r}: must be a str of 1 to {MAX_TAG_SIZE} characters, or None")
        fields[TAG_KEY] = tag
    carried = fields.pop(TRACE_ID_KEY, None)
    if trace_id is None and carried is not None:
        if not isinstance(carried, str) or not carried.isascii() or not carried.isdigit():
            raise ConfigError(f"headers: {TRACE_ID_KEY} must be a str of decimal digits, not {carried!r}")
        trace_id = int(carried)
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


def _with_header(fields: dict[str, Any], trace_id: int | None) -> WireForm:
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
    return WireForm("PUB_EXT", trace_id or 0, header, is_traced=trace_id is not None)
