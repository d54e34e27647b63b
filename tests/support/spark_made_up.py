"""A source of the format's own rows that asks no server: four rows of three messages, one without its partition."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql.datasource import DataSourceReader

from nsq_fast._codec import encode_message
from nsq_fast._frame import ColumnReader
from nsq_fast.spark.arrow_rows import to_batch
from nsq_fast.spark.source import NsqDataSource


class _Reader(DataSourceReader):
    def __init__(self, options: Any) -> None:
        self.options = options

    def read(self, partition: Any) -> Iterator[Any]:
        head: Any = {"ext_version": 4, "ext": b'{"k":"v"}', "offset": 700, "raw_size": 40}
        frames = [encode_message(1_700_000_000_123_456_789, 65535, b"\xff" * 16, b"%d" % n, **head) for n in range(3)]
        columns = ColumnReader(ext=True, detail=True).feed(b"".join(frames))
        place: Any = {"topic": self.options.topic, "partition": 5, "nsqd": "h:1", "is_redesigned": True}
        yield to_batch(columns, self.options.columns, self.options.headers_as, **place)
        place = {**place, "partition": None, "first": 1, "count": 1}
        yield to_batch(columns, self.options.columns, self.options.headers_as, **place)


class MadeUp(NsqDataSource):
    """The source with that reader. Python workers import it from here."""

    @classmethod
    def name(cls) -> str:
        """As Spark knows it."""
        return "nsq-made-up"

    def make_batch_reader(self, kind: str, options: Any) -> Any:
        """The reader, of whatever kind."""
        return _Reader(options)
