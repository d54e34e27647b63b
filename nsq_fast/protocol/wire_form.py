"""What goes with the body of a publish, and the commands that say it.

A form knows how to build the command of one publish for the server at hand. It
is chosen when the publish is made, and used when it is sent: only then is it
known which partition it goes to, and what that server understands.

- ``WireForm``: one message, alone (PUB, DPUB, PUB_TRACE, PUB_EXT) or with others
  of its kind in one command (``batch_command``);
- ``BatchForm``: what a caller published as one batch; it is never taken apart;
- ``RowsForm``, in ``rows_form``: rows of columns, a batch without an object for each message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from nsq_fast import _codec
from nsq_fast.names import Address

from .dialect import Dialect

# The body of an MPUB: the count of messages, then each message behind its length.
# nsqio/nsq: nsqd/protocol_v2.go, readMPUB.
COUNT_BYTES = 4
LENGTH_BYTES = 4

OK = b"OK"


class Receipt(NamedTuple):
    """Where a traced message was stored.

    Attributes:
        internal_id, trace_id: the two halves of its message id.
        offset, size: of its record in the partition's log, in bytes; None where the server did not say.
        partition: None when the server chose it.
        nsqd: the leader that stored it.
    """

    internal_id: int
    trace_id: int
    offset: int | None
    size: int | None
    partition: int | None
    nsqd: Address


class Form(Protocol):
    """How one publish is sent, and what its caller gets.

    Attributes:
        kind: publishes of one kind may share a command.
        is_alone: it shares its command with nobody.
        overhead: bytes that it adds to a body which shares its command; 0 for what never does.
    """

    @property
    def kind(self) -> str: ...

    @property
    def is_alone(self) -> bool: ...

    @property
    def overhead(self) -> int: ...

    def record_size(self, body: Any) -> int:
        """Bytes of the largest message that count as its body for a server; 0 where that is not known here."""

    def command(self, topic: str, body: Any, partition: int | None, dialect: Dialect) -> tuple[str, bytes]:
        """The name of the command that publishes ``body``, and its bytes."""

    def traces(self, body: Any) -> list[tuple[int, int]]:
        """The trace id and the size of each message: what a receipt is split by."""

    def kept(self, receipts: list[Receipt]) -> list[Receipt]:
        """Those of the receipts of all its messages that somebody wants."""

    def result(self, receipts: list[Receipt], partition: int | None) -> Any:
        """What the caller gets for a publish that was stored; there are no receipts unless it was traced."""


class WireForm(msgspec.Struct, frozen=True):
    """One message.

    Attributes:
        kind: PUB, PUB_TRACE, PUB_EXT or DPUB.
        trace_id: for PUB_TRACE.
        header: JSON, for PUB_EXT.
        is_traced: the reply is to have a receipt.
        is_optional: it is traced because tracing is switched on; servers that cannot trace take it untraced.
        defer: for DPUB: milliseconds.
    """

    kind: str = "PUB"
    trace_id: int = 0
    header: bytes = b""
    is_traced: bool = False
    is_optional: bool = False
    defer: int = 0

    @property
    def is_alone(self) -> bool:
        # A header with a trace id gets a receipt for a single publish only.
        # youzan/nsq: nsqdserver/protocol_v2.go, internalPubExtAndTrace, internalMPUBEXTAndTrace.
        return self.kind == "DPUB" or (self.kind == "PUB_EXT" and self.is_traced)

    @property
    def overhead(self) -> int:
        """Bytes that it adds to a body."""
        if self.kind == "PUB_EXT":
            return 2 + len(self.header)
        return 8 if self.kind == "PUB_TRACE" else 0

    def record_size(self, body: bytes) -> int:
        # A trace id that goes before the body is no part of the record behind its head.
        return len(body) + (self.overhead if self.kind == "PUB_EXT" else 0)

    def command(self, topic: str, body: bytes, partition: int | None, dialect: Dialect) -> tuple[str, bytes]:
        kind = kind_for(self, dialect)
        if kind == "PUB":
            return "PUB", _codec.pub(topic, body, partition)
        if kind == "PUB_TRACE":
            return kind, _codec.pub_trace(topic, self.trace_id, body, partition)
        if kind == "PUB_EXT":
            return kind, _codec.pub_ext(topic, self.header, body, partition)
        return kind, _codec.dpub(topic, self.defer, body)

    def traces(self, body: bytes) -> list[tuple[int, int]]:
        return [(self.trace_id, len(body))]

    def kept(self, receipts: list[Receipt]) -> list[Receipt]:
        return receipts

    def result(self, receipts: list[Receipt], partition: int | None) -> Any:
        return receipts[0] if receipts else OK


class PlainForm(WireForm, frozen=True):
    """A message that says nothing but its body: the form of nearly all of them."""

    def command(self, topic: str, body: bytes, partition: int | None, dialect: Dialect) -> tuple[str, bytes]:
        return "PUB", _codec.pub(topic, body, partition)


PLAIN = PlainForm()


class BatchForm:
    """What a caller published as one batch, or a part of it that makes one command.

    Args:
        forms: one for each message, all of one kind; None: they say nothing but their bodies.
    """

    is_alone = True
    overhead = 0

    def __init__(self, forms: Sequence[WireForm] | None) -> None:
        self._forms = forms
        self.kind = "PUB" if forms is None else forms[0].kind

    def command(self, topic: str, body: list[bytes], partition: int | None, dialect: Dialect) -> tuple[str, bytes]:
        if self._forms is None:
            return "MPUB", _codec.mpub(topic, body, partition)
        return batch_command(topic, body, self._forms, self._forms[0], partition, dialect)

    def record_size(self, body: list[bytes]) -> int:
        forms = self._forms or [PLAIN] * len(body)
        return max(form.record_size(each) for each, form in zip(body, forms, strict=True))

    def traces(self, body: list[bytes]) -> list[tuple[int, int]]:
        forms = self._forms or [PLAIN] * len(body)
        return [(form.trace_id, len(each)) for each, form in zip(body, forms, strict=True)]

    def kept(self, receipts: list[Receipt]) -> list[Receipt]:
        return receipts

    def result(self, receipts: list[Receipt], partition: int | None) -> Any:
        # MPUB_EXT is answered OK also where its headers have trace ids: no receipts then.
        return receipts or OK


PLAIN_BATCH = BatchForm(None)


def batch_command(
    topic: str, bodies: Sequence[bytes], forms: Iterable[Any], first: Any, partition: int | None, dialect: Dialect
) -> tuple[str, bytes]:
    """The command of several messages, and its bytes. ``forms`` are WireForms of one kind, as ``first`` is."""
    kind = "PUB" if first is PLAIN else kind_for(first, dialect)
    if kind == "PUB":
        return "MPUB", _codec.mpub(topic, bodies, partition)
    pairs = zip(forms, bodies, strict=True)
    if kind == "PUB_TRACE":
        return "MPUB_TRACE", _codec.mpub_trace(topic, [(form.trace_id, body) for form, body in pairs], partition)
    return "MPUB_EXT", _codec.mpub_ext(topic, [(form.header, body) for form, body in pairs], partition)


def kind_for(form: WireForm, dialect: Dialect) -> str:
    """What a server of this dialect gets: tracing that nobody asked for by name is left out where it is unknown."""
    return "PUB" if form.is_optional and not dialect.supports(form.kind) else form.kind
