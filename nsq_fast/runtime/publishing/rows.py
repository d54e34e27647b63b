"""Publishes of many messages that lie in columns: one command each, and no object for a message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from nsq_fast._codec import Records, TracedReply
from nsq_fast.errors import ConfigError
from nsq_fast.names import Address
from nsq_fast.protocol.dialect import Dialect
from nsq_fast.runtime.trace import TraceLog, split_receipt

from .addressed import PLAIN, Addressed, Receipt, Saying, check_partition, kind_for

if TYPE_CHECKING:
    from .routes import Route


class StoredRows(NamedTuple):
    """What became of a publish of rows.

    Attributes:
        messages: how many were stored.
        partition: where; None when the server was to choose, or has none.
        receipts: of the messages that have a trace id other than 0, in order; none where the server gives none.
    """

    messages: int
    partition: int | None
    receipts: list[Receipt]


class AddressedRows(Addressed):
    """Rows of ``records`` that leave as one command: ``rows[start:stop]``, or rows ``start`` to ``stop`` without.

    The columns are kept, and each attempt builds its command of them.
    """

    __slots__ = ("receipts", "records", "rows", "start", "stop")

    def __init__(
        self,
        route: Route,
        topic: str,
        records: Records,
        rows: bytes | None,
        start: int,
        stop: int,
        deadline: float,
        *,
        is_optional: bool,
    ) -> None:
        super().__init__(route, topic, b"", deadline, _saying(records, is_optional), stop - start)
        self.is_alone = True
        self.records = records
        self.rows = rows
        self.start = start
        self.stop = stop
        self.receipts: list[Receipt] = []

    def value(self) -> Any:
        return StoredRows(self.stop - self.start, self.partition, self.receipts)

    def encode_for(self, partition: int | None, dialect: Dialect) -> None:
        check_partition(partition, dialect)
        self.partition = partition
        kind = kind_for(self.saying, dialect)
        if kind != "PUB" and not dialect.supports(kind):
            raise ConfigError(f"{dialect.name} servers: {dialect.refusals['M' + kind]}")
        self.command = "M" + kind
        build = getattr(self.records, self.command.lower())
        self.data = build(self.topic, partition, self.rows, self.start, self.stop)

    def take_receipt(self, reply: TracedReply, nsqd: Address, trace: TraceLog) -> None:
        """Keep what the server said of the records that have trace ids, and write it down."""
        each = split_receipt(reply, self.records.pairs(self.rows, self.start, self.stop))
        self.receipts = [Receipt(*ids, self.partition, nsqd) for ids in each if ids[1]]
        if trace.is_on(self.topic):
            _write_down(self.topic, self.receipts, trace)


def _saying(records: Records, is_optional: bool) -> Saying:
    if records.has_headers:
        return Saying("PUB_EXT")
    return Saying("PUB_TRACE", is_traced=True, is_optional=is_optional) if records.is_traced else PLAIN


def _write_down(topic: str, receipts: Iterable[Receipt], trace: TraceLog) -> None:
    for receipt in receipts:
        trace.published(topic, receipt[:4], partition=receipt.partition, nsqd=receipt.nsqd)
