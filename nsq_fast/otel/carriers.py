"""How the context of a span travels with a message: in its extended headers, in an envelope around its body, or not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeAlias

import msgspec

from nsq_fast._codec import Message
from nsq_fast.errors import NsqError

Carrier: TypeAlias = Mapping[str, str]
"""What a propagator of OpenTelemetry writes and reads: ``traceparent`` and the like."""

MAGIC = b"\x1eotel"
"""Begins an envelope: then comes a JSON object of strings, a line feed, and the body."""

MAX_ENVELOPE = 16 * 1024
"""Bytes in which the line feed has to be found; else it is no envelope."""

_carrier = msgspec.json.Decoder(dict[str, str])


class Wrapping(Protocol):
    """One way in which context travels."""

    def wrap(self, body: Any, headers: Any, carrier: Carrier) -> tuple[Any, Any]:
        """The body and headers to publish; what is wrong with them is left to the producer to say."""

    def unwrap(self, message: Any) -> tuple[Any, Carrier]:
        """The message as its handler shall see it, and what came with it; an empty carrier where nothing did."""


class Headers:
    """In the extended headers of a topic with ``extend``."""

    def wrap(self, body: Any, headers: Any, carrier: Carrier) -> tuple[Any, Any]:
        """See ``Wrapping``. ``headers`` may be those of a batch: a list with some for each."""
        if headers is None or isinstance(headers, Mapping):
            return body, {**(headers or {}), **carrier}
        return body, [{**each, **carrier} for each in headers]

    def unwrap(self, message: Any) -> tuple[Any, Carrier]:
        """See ``Wrapping``."""
        if message.ext is None:
            return message, {}
        try:
            headers = message.headers
        except NsqError:  # headers that are no JSON: of whoever publishes
            return message, {}
        return message, {name: value for name, value in headers.items() if isinstance(value, str)}


class Envelope:
    """In front of the body; consumers that do not know of it see that."""

    def wrap(self, body: Any, headers: Any, carrier: Carrier) -> tuple[Any, Any]:
        """See ``Wrapping``. ``body`` may be a list, of a batch."""
        head = MAGIC + msgspec.json.encode(dict(carrier)) + b"\n"
        if isinstance(body, list):
            return [_after(head, each) for each in body], headers
        return _after(head, body), headers

    def unwrap(self, message: Any) -> tuple[Any, Carrier]:
        """See ``Wrapping``. A body that is no envelope, but begins like one, is left as it is."""
        if isinstance(message, OpenedMessage):
            return message, message.carrier
        body = message.body
        if not body.startswith(MAGIC):
            return message, {}
        end = body.find(b"\n", len(MAGIC), MAX_ENVELOPE)
        try:
            carrier = _carrier.decode(body[len(MAGIC) : end]) if end > 0 else None
        except msgspec.DecodeError:
            carrier = None
        return (message, {}) if carrier is None else (OpenedMessage(message, body[end + 1 :], carrier), carrier)


class Nothing:
    """The context stays here."""

    def wrap(self, body: Any, headers: Any, carrier: Carrier) -> tuple[Any, Any]:
        """See ``Wrapping``."""
        return body, headers

    def unwrap(self, message: Any) -> tuple[Any, Carrier]:
        """See ``Wrapping``."""
        return message, {}


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
        self.body = body
        self.carrier = carrier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)

    def __repr__(self) -> str:
        return repr(self._message)


WRAPPINGS: Mapping[str | None, Wrapping] = {None: Nothing(), "headers": Headers(), "envelope": Envelope()}
"""What the argument ``context`` of a ``Telemetry`` may be."""


def of_batch(bodies: Any) -> Any:
    """The bodies of a batch as a list, if they can be one."""
    return list(bodies) if isinstance(bodies, Iterable) and not isinstance(bodies, (str, bytes, bytearray)) else bodies
