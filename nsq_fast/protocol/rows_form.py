"""What goes with a publish of rows of columns: a batch without an object for each message."""

from __future__ import annotations

from typing import NamedTuple

from nsq_fast._codec import Records

from .dialect import Dialect
from .wire_form import PLAIN, Receipt, WireForm, kind_for


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


class RowsForm:
    """Rows of ``records``: ``rows[start:stop]``, or rows ``start`` to ``stop`` without ``rows``. The body is not used.

    Args:
        is_optional: servers that cannot trace take them untraced.
    """

    is_alone = True
    overhead = 0

    def __init__(self, records: Records, rows: bytes | None, start: int, stop: int, *, is_optional: bool) -> None:
        self._records = records
        self._span = (rows, start, stop)
        self._form = _form_of(records, is_optional)
        self.kind = self._form.kind
        self.count = stop - start

    def command(self, topic: str, body: object, partition: int | None, dialect: Dialect) -> tuple[str, bytes]:
        kind = kind_for(self._form, dialect)
        name = f"M{kind}"
        dialect.require(name)
        build = getattr(self._records, name.lower())
        return name, build(topic, partition, *self._span)

    def record_size(self, body: object) -> int:
        return 0

    def traces(self, body: object) -> list[tuple[int, int]]:
        return self._records.pairs(*self._span)

    def kept(self, receipts: list[Receipt]) -> list[Receipt]:
        return [receipt for receipt in receipts if receipt.trace_id]

    def result(self, receipts: list[Receipt], partition: int | None) -> StoredRows:
        return StoredRows(self.count, partition, receipts)


def _form_of(records: Records, is_optional: bool) -> WireForm:
    if records.has_headers:
        return WireForm("PUB_EXT")
    return WireForm("PUB_TRACE", is_traced=True, is_optional=is_optional) if records.is_traced else PLAIN
