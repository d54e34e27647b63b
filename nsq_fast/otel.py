"""OpenTelemetry for nsq_fast: spans and metrics of publishing and processing, and their context with each message.

    from nsq_fast.otel import Telemetry

    telemetry = Telemetry(context="headers")
    producer = telemetry.instrument(Producer("127.0.0.1:4150"))
    consumer = Consumer("orders", "billing", "127.0.0.1:4150", message_handler=telemetry.handler(handle))

Nothing of it is there unless it is asked for: producers and handlers that are not handed to a ``Telemetry`` are as they
were. It follows OpenTelemetry's conventions for messaging, and needs the extra ``nsq-fast[otel]``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic, time_ns
from typing import Any, TypeAlias, TypeVar

import msgspec

try:
    from opentelemetry.context import Context
    from opentelemetry.metrics import MeterProvider, get_meter
    from opentelemetry.propagate import get_global_textmap
    from opentelemetry.propagators.textmap import TextMapPropagator
    from opentelemetry.trace import (
        Link,
        Span,
        SpanKind,
        Status,
        StatusCode,
        TracerProvider,
        get_current_span,
        get_tracer,
        set_span_in_context,
        use_span,
    )
except ImportError as _error:
    raise ImportError("nsq_fast.otel needs opentelemetry-api: pip install 'nsq-fast[otel]'") from _error

from nsq_fast import __version__
from nsq_fast._codec import Message
from nsq_fast.errors import ConfigError, NsqError, RequeueMessage

__all__ = ["Telemetry"]


Carrier: TypeAlias = Mapping[str, str]
"""What a propagator of OpenTelemetry writes and reads: ``traceparent`` and the like."""

MAGIC = b"\x1eotel"
"""Begins an envelope: then comes a JSON object of strings, a line feed, and the body."""

MAX_ENVELOPE = 16 * 1024
"""Bytes in which the line feed has to be found; else it is no envelope."""

_carrier = msgspec.json.Decoder(dict[str, str])


class Wrapping:
    """How context travels with a message: this way, it stays here."""

    def wrap(self, body: Any, headers: Any, carrier: Carrier) -> tuple[Any, Any]:
        """The body and headers to publish, or the lists of a batch; what is wrong with them is left to the producer."""
        return body, headers

    def unwrap(self, message: Any) -> tuple[Any, Carrier]:
        """The message as its handler shall see it, and what came with it; an empty carrier where nothing did."""
        return message, {}


class Headers(Wrapping):
    """In the extended headers of a topic with ``extend``."""

    def wrap(self, body: Any, headers: Any, carrier: Carrier) -> tuple[Any, Any]:
        if headers is None or isinstance(headers, Mapping):
            return body, {**(headers or {}), **carrier}
        return body, [{**each, **carrier} for each in headers]

    def unwrap(self, message: Any) -> tuple[Any, Carrier]:
        if message.ext is None:
            return message, {}
        try:
            headers = message.headers
        except NsqError:  # headers that are no JSON: of whoever publishes
            return message, {}
        return message, {name: value for name, value in headers.items() if isinstance(value, str)}


class Envelope(Wrapping):
    """In front of the body; consumers that do not know of it see that. What only begins like one is left as it is."""

    def wrap(self, body: Any, headers: Any, carrier: Carrier) -> tuple[Any, Any]:
        head = MAGIC + msgspec.json.encode(dict(carrier)) + b"\n"
        if isinstance(body, list):
            return [_after(head, each) for each in body], headers
        return _after(head, body), headers

    def unwrap(self, message: Any) -> tuple[Any, Carrier]:
        if isinstance(message, OpenedMessage):
            return message, message.carrier
        body = message.body
        if not body.startswith(MAGIC):
            return message, {}
        end = body.find(b"\n", len(MAGIC), MAX_ENVELOPE)
        try:
            carrier = _carrier.decode(body[len(MAGIC) : end]) if end > 0 else None
        except (msgspec.DecodeError, UnicodeDecodeError):
            carrier = None
        return (message, {}) if carrier is None else (OpenedMessage(message, body[end + 1 :], carrier), carrier)


def _after(head: bytes, body: Any) -> Any:
    return head + body if isinstance(body, (bytes, bytearray, memoryview)) and len(body) else body


class OpenedMessage:
    """A message with the body that was in its envelope; all else is the message's: to respond to one is to respond to
    the other.

    Attributes:
        body: as it was published.
        carrier: what came with it.
    """

    __slots__ = ("_message", "body", "carrier")

    def __init__(self, message: Message, body: bytes, carrier: Carrier) -> None:
        self._message = message
        self.body: bytes = body
        self.carrier: Carrier = carrier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)

    def __repr__(self) -> str:
        return repr(self._message)


WRAPPINGS: Mapping[str | None, Wrapping] = {None: Wrapping(), "headers": Headers(), "envelope": Envelope()}
"""What the argument ``context`` of a ``Telemetry`` may be."""


def of_batch(bodies: Any) -> Any:
    """The bodies of a batch as a list, if they can be one."""
    return list(bodies) if isinstance(bodies, Iterable) and not isinstance(bodies, (str, bytes, bytearray)) else bodies


LIBRARY = "nsq_fast"
TYPES = {"publish": "send", "receive": "receive", "process": "process"}
"""What is done, as NSQ calls it -> as the conventions do."""

KINDS = {"publish": SpanKind.PRODUCER, "receive": SpanKind.CLIENT, "process": SpanKind.CONSUMER}

Attributes = dict[str, Any]


def described(operation: str, topic: str) -> Attributes:
    """What spans and metrics have in common."""
    return {
        "messaging.system": "nsq",
        "messaging.operation.name": operation,
        "messaging.operation.type": TYPES[operation],
        "messaging.destination.name": topic,
    }


def failed(span: Span, error: BaseException) -> Mapping[str, Any]:
    """Note on a span what was raised; returns the attribute for metrics. To ask for a requeue is no failure."""
    if isinstance(error, RequeueMessage):
        span.set_attribute("nsq.requeued", True)
        return {}
    kind = type(error).__qualname__
    span.record_exception(error)
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, str(error)))
    return {"error.type": kind}


METHODS = ("publish", "publish_nowait", "multipublish")
LARGEST_ID = 2**64 - 1
"""Of a redesigned trace id, which has half the bits of OpenTelemetry's; 0 is none."""

P = TypeVar("P")
H = TypeVar("H", bound=Callable[..., Any])


class Telemetry:
    """Spans and metrics for producers and handlers of ``nsq_fast``, ``nsq_fast.threads`` and ``nsq_fast.aio``.

    Args:
        context: how the context of a publish gets to who processes its message. ``"headers"``: in extended headers,
            of redesigned topics with ``extend``. ``"envelope"``: in front of the body, for all servers; every consumer
            of the topic must know of it. None: it does not; spans of consumers then have no parent.
        trace_id: whether the lower 64 bits of a span's trace id become the redesigned trace id of its message. Needs
            servers with partitions; publishes return receipts then.
        tracer_provider, meter_provider, propagator: None: those that the program has set.

    Raises ConfigError for a ``context`` that is none of these.
    """

    def __init__(
        self,
        context: str | None = None,
        *,
        trace_id: bool = False,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        propagator: TextMapPropagator | None = None,
    ) -> None:
        if context not in WRAPPINGS:
            raise ConfigError(f"context={context!r}: must be 'headers', 'envelope' or None")
        self._tracer = get_tracer(LIBRARY, __version__, tracer_provider)
        meter = get_meter(LIBRARY, __version__, meter_provider)
        self._sent = meter.create_counter("messaging.client.sent.messages", "{message}", "Messages published.")
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Messages handed to the program."
        )
        self._published = meter.create_histogram("messaging.client.operation.duration", "s", "What publishes took.")
        self._processed = meter.create_histogram("messaging.process.duration", "s", "What handlers took.")
        self._propagator = propagator or get_global_textmap()
        self._wrapping = WRAPPINGS[context]
        self._gives_trace_id = trace_id

    def _span(self, operation: str, topic: str, attributes: Attributes, **options: Any) -> Span:
        """Begin a span."""
        return self._tracer.start_span(
            f"{operation} {topic}",
            kind=KINDS[operation],
            attributes={**described(operation, topic), **attributes},
            **options,
        )

    # Publishing

    def instrument(self, producer: P) -> P:
        """Have each publish of a producer make a span; returns the producer.

        A publish that returns at once has its span end when its result is there. A batch has one span.

        Raises ConfigError when it is no producer, or was instrumented before.
        """
        if not all(hasattr(producer, name) for name in METHODS) or isinstance(producer, type):
            raise ConfigError(f"{producer!r} is no Producer: instrument takes those of nsq_fast, .threads and .aio")
        if METHODS[0] in vars(producer):
            raise ConfigError(f"{producer!r} was instrumented before: each publish would make two spans")
        for name in METHODS:
            setattr(producer, name, self._around_publish(getattr(producer, name), is_batch=name == "multipublish"))
        return producer

    def _around_publish(self, method: Callable[..., Any], is_batch: bool) -> Callable[..., Any]:
        bind = inspect.signature(method).bind

        @functools.wraps(method)
        def publish(*arguments: Any, **options: Any) -> Any:
            ended, call = self._begin_publish(method, bind(*arguments, **options).arguments, is_batch)
            try:
                result = call()
            except BaseException as error:
                ended(error)
                raise
            if hasattr(result, "rawlink"):  # gevent's AsyncResult
                result.rawlink(lambda each: ended(each.exception))
            elif hasattr(result, "add_done_callback"):
                result.add_done_callback(lambda each: ended(_error_of(each)))
            else:
                ended(None)
            return result

        @functools.wraps(method)
        async def publish_and_wait(*arguments: Any, **options: Any) -> Any:
            ended, call = self._begin_publish(method, bind(*arguments, **options).arguments, is_batch)
            try:
                result = await call()
            except BaseException as error:
                ended(error)
                raise
            ended(None)
            return result

        return publish_and_wait if inspect.iscoroutinefunction(method) else publish

    def _begin_publish(
        self, method: Callable[..., Any], given: dict[str, Any], is_batch: bool
    ) -> tuple[Callable[[BaseException | None], None], Callable[[], Any]]:
        """Begin a span. Returns what ends it, and the call that it is about, which may give an awaitable.

        Args:
            given: the arguments by their names; first come the topic, and the body or the bodies.
        """
        (_, topic), (name, body), *_ = given.items()
        if is_batch:
            body = of_batch(body)
        count = len(body) if is_batch and isinstance(body, list) else 1
        span, began = self._publish_span(str(topic), body, count if is_batch else None, given), monotonic()
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        headers = given.get("headers")
        if carrier:
            body, headers = self._wrapping.wrap(body, headers, carrier)
        given = {**given, name: body, **({} if headers is None else {"headers": headers})}
        trace_id = span.get_span_context().trace_id & LARGEST_ID
        if self._gives_trace_id and trace_id and given.get("trace_id") is None:
            given["trace_id"] = trace_id

        def ended(error: BaseException | None) -> None:
            common = described("publish", str(topic))
            if error is not None:
                common |= failed(span, error)
                if getattr(error, "possibly_stored", False):
                    span.set_attribute("nsq.possibly_stored", True)
            span.end()
            self._sent.add(count, common)
            self._published.record(monotonic() - began, common)

        return ended, functools.partial(method, **given)

    def _publish_span(self, topic: str, body: Any, count: int | None, options: dict[str, Any]) -> Span:
        attributes: dict[str, Any] = {}
        if count is not None:
            attributes["messaging.batch.message_count"] = count
        elif isinstance(body, (bytes, bytearray, memoryview)):
            attributes["messaging.message.body.size"] = len(body)
        if options.get("partition") is not None:
            attributes["messaging.destination.partition.id"] = str(options["partition"])
        return self._span("publish", topic, attributes)

    # Processing

    def handler(self, handler: H) -> H:
        """A ``message_handler`` that makes a span of each call, as which a coroutine function stays one.

        The span is a child of the one that published the message, and linked to it. What the handler raises ends it
        as an error, but for RequeueMessage. It is the current span while the handler runs.
        """
        return self._around(handler, self.process)  # type: ignore[no-any-return]

    def batch_handler(self, handler: H) -> H:
        """A ``batch_handler`` that makes a span of each call, linked to all that published its messages."""
        return self._around(handler, self._process_batch)  # type: ignore[no-any-return]

    def receive(self, consumer: Any) -> Iterator[Any] | AsyncIterator[Any]:
        """The messages of a consumer that is iterated, by ``for`` or, of ``nsq_fast.aio``, by ``async for``.

        Each makes a span of its receipt. Use ``process`` in the body of the loop.
        """
        return self._receive_later(consumer) if hasattr(consumer, "__aiter__") else self._receive(consumer)

    def _receive(self, consumer: Any) -> Iterator[Any]:
        for message in consumer:
            yield self._received(consumer, message)

    async def _receive_later(self, consumer: Any) -> AsyncIterator[Any]:
        async for message in consumer:
            yield self._received(consumer, message)

    def _received(self, consumer: Any, message: Any) -> Any:
        """From when it came to now. The span is linked to the one that published the message."""
        opened, carrier = self._wrapping.unwrap(message)
        links = _links(self._propagator.extract(carrier)) if carrier else []
        waited = max(0.0, monotonic() - message.received_at) if message.received_at else 0.0
        attributes, topic = _described(consumer, message, opened), _topic(consumer, message)
        self._span("receive", topic, attributes, links=links, start_time=time_ns() - int(1e9 * waited)).end()
        self._consumed.add(1, described("receive", topic))
        return opened

    @contextmanager
    def process(self, consumer: Any, message: Any) -> Iterator[Any]:
        """``with telemetry.process(consumer, message) as message``: a span, as ``handler`` makes one.

        What it gives is the message without its envelope, if it has one.
        """
        opened, carrier = self._wrapping.unwrap(message)
        parent = self._propagator.extract(carrier) if carrier else None
        links = [] if parent is None else _links(parent)
        attributes = _described(consumer, message, opened)
        with self._processing(_topic(consumer, message), attributes, 1, parent, links):
            yield opened

    @contextmanager
    def _process_batch(self, consumer: Any, messages: list[Any]) -> Iterator[list[Any]]:
        """A span for a list of messages, linked to those that published them."""
        pairs = [self._wrapping.unwrap(message) for message in messages]
        links = [link for _, carrier in pairs if carrier for link in _links(self._propagator.extract(carrier))]
        attributes = {**_subscription(consumer), "messaging.batch.message_count": len(messages)}
        topic = _topic(consumer, messages[0]) if messages else str(consumer.topic)
        with self._processing(topic, attributes, len(messages), None, links):
            yield [opened for opened, _ in pairs]

    @contextmanager
    def _processing(
        self, topic: str, attributes: Attributes, count: int, parent: Context | None, links: Sequence[Link]
    ) -> Iterator[None]:
        """The span in which messages are processed is the current one; what is raised in it ends it."""
        span, began = self._span("process", topic, attributes, context=parent, links=links), monotonic()
        common = described("process", topic)
        self._consumed.add(count, common)
        try:
            with use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
                yield
        except BaseException as error:
            common |= failed(span, error)
            raise
        finally:
            span.end()
            self._processed.record(monotonic() - began, common)

    def _around(self, handler: Callable[..., Any], begin: Callable[..., Any]) -> Any:
        """The handler of a consumer, with a span around each call."""

        @functools.wraps(handler)
        def handle(consumer: Any, item: Any) -> Any:
            with begin(consumer, item) as opened:
                return handler(consumer, opened)

        @functools.wraps(handler)
        async def handle_and_wait(consumer: Any, item: Any) -> Any:
            with begin(consumer, item) as opened:
                return await handler(consumer, opened)

        return handle_and_wait if _is_coroutine_function(handler) else handle


def _error_of(future: Any) -> BaseException | None:
    """What a Future has ended with."""
    try:
        error: BaseException | None = future.exception()
    except BaseException as cancelled:
        return cancelled
    return error


def _is_coroutine_function(handler: Any) -> bool:
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(type(handler), "__call__", None))  # noqa: B004


def _topic(consumer: Any, message: Any) -> str:
    """Its own: a consumer may have several."""
    return str(message.topic or consumer.topic)


def _links(context: Any) -> list[Link]:
    published_by = get_current_span(context).get_span_context()
    return [Link(published_by)] if published_by.is_valid else []


def _subscription(consumer: Any) -> dict[str, Any]:
    return {"messaging.destination.subscription.name": str(consumer.channel)}


def _described(consumer: Any, message: Any, opened: Any) -> dict[str, Any]:
    attributes = {
        **_subscription(consumer),
        "messaging.message.id": _name(message.id),
        "messaging.message.body.size": len(opened.body),
        "nsq.message.attempts": message.attempts,
    }
    if message.partition is not None:
        attributes["messaging.destination.partition.id"] = str(message.partition)
    return attributes


def _name(message_id: bytes) -> str:
    """In letters: as it is where it is plain, in hex otherwise."""
    text = message_id.decode("ascii", "replace")
    return text if text.isalnum() and text.isascii() else message_id.hex()
