"""The format "nsq": checks the options when Spark loads it, and gives the reader or writer that fits them.

The modules of readers and writers are imported when one is needed. Spark makes
this object again in several processes, so making it has no effect.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType

import pyarrow  # noqa: F401  # the readers need it: better missed here, where the message names the extra
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
)
from pyspark.sql.types import StructType

from nsq_fast.errors import ConfigError

from .choice import check_load, choose
from .options import REPLAYABLE, SinkOptions, SourceOptions
from .schema import spark_schema


class NsqDataSource(DataSource):
    """NSQ as a data source. Derive from it, and override the ``make_`` methods, to put other readers in."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))

    @classmethod
    def name(cls) -> str:
        """What ``format`` takes."""
        return "nsq"

    def schema(self) -> StructType:
        """The columns that the options ask for. Called at load, of a source only."""
        options = self.source_options()
        check_load(options)
        return spark_schema(options.columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        """The reader of ``spark.read``."""
        options = self._checked(schema)
        return self.make_batch_reader(choose(options, is_stream=False), options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """The reader of ``spark.readStream``."""
        options = self._checked(schema)
        return self.make_stream_reader(choose(options, is_stream=True), options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """The writer of ``df.write``."""
        writer: DataSourceArrowWriter = _module("sink").ArrowWriter(self.sink_options(), schema, overwrite)
        return writer

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """The writer of ``df.writeStream``."""
        writer: DataSourceStreamArrowWriter = _module("sink").StreamArrowWriter(self.sink_options(), schema, overwrite)
        return writer

    def source_options(self) -> SourceOptions:
        """The options as those of a source. Raises ConfigError."""
        return SourceOptions.parse(self.options)

    def sink_options(self) -> SinkOptions:
        """The options as those of a sink. Raises ConfigError."""
        return SinkOptions.parse(self.options)

    def make_batch_reader(self, kind: str, options: SourceOptions) -> DataSourceReader:
        """The batch reader of this kind, ``replayable`` or ``journalled``."""
        name = "ReplayBatchReader" if kind == REPLAYABLE else "JournalBatchReader"
        reader: DataSourceReader = getattr(_readers(kind), name)(options)
        return reader

    def make_stream_reader(self, kind: str, options: SourceOptions) -> DataSourceStreamReader:
        """The stream reader of this kind, ``replayable`` or ``journalled``."""
        name = "ReplayStreamReader" if kind == REPLAYABLE else "JournalStreamReader"
        reader: DataSourceStreamReader = getattr(_readers(kind), name)(options)
        return reader

    def _checked(self, schema: StructType) -> SourceOptions:
        """The options; a schema of the user's own must be the one that they give, as Spark converts nothing."""
        options = self.source_options()
        wanted = spark_schema(options.columns)
        if [(each.name, each.dataType) for each in schema] != [(each.name, each.dataType) for each in wanted]:
            raise ConfigError(
                f"schema {schema.simpleString()}: the source gives {wanted.simpleString()};"
                " leave schema() out, or choose columns with the option columns"
            )
        return options


def _readers(kind: str) -> ModuleType:
    return _module("replay" if kind == REPLAYABLE else "journal")


def _module(name: str) -> ModuleType:
    return importlib.import_module(f".{name}", __package__)
