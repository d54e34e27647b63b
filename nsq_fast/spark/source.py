"""The format "nsq": checks the options when Spark loads it, and gives the reader or writer that fits them.

The modules of readers and writers are imported when one is needed. Spark makes
this object again in several processes, so making it has no effect.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType

import pyarrow  # noqa: F401  # the readers need it: better missed here, where the message names the extra
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamReader,
)
from pyspark.sql.types import DataType, StructType

from nsq_fast.errors import ConfigError, NsqError

from .choice import check_load, choose
from .names import NAMES
from .options import REPLAYABLE, SinkOptions, SourceOptions
from .plain_errors import in_worker, plain_errors
from .refused import RefusedStreamReader
from .schema import spark_schema
from .spelling import normal
from .tables import options_in, table_options, with_options
from .versions import StreamWriterBase


class NsqDataSource(DataSource):
    """NSQ as a data source. Derive from it, and override the ``make_`` methods, to put other readers in."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))

    @classmethod
    def name(cls) -> str:
        """What ``format`` takes."""
        return "nsq"

    @plain_errors
    def schema(self) -> StructType:
        """The columns that the options ask for. Called at load of a source, and when a table is made."""
        table = table_options(self.options)
        if table is None:
            return self._source_schema(self.source_options())
        if "channel" in map(normal, table):
            return with_options(self._source_schema(SourceOptions.parse(table)), table)
        return with_options(_module("sink").table_schema(SinkOptions.parse(table)), table)

    @plain_errors
    def reader(self, schema: StructType) -> DataSourceReader:
        """The reader of ``spark.read``."""
        options = self._checked(schema)
        return self.make_batch_reader(choose(options, is_stream=False), options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """The reader of ``spark.readStream``; in a worker, for what cannot be read, one that says so when used."""
        try:
            options = self._checked(schema)
            return self.make_stream_reader(choose(options, is_stream=True), options)
        except NsqError as error:
            if not in_worker():
                raise
            return RefusedStreamReader(error)

    @plain_errors
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """The writer of ``df.write``, and of INSERT."""
        given = options_in(self.options, schema)
        if given is not self.options and "channel" in map(normal, given):
            raise ConfigError(
                "channel: the table has one, so it was made to be read; make another without, to write to"
            )
        options = SinkOptions.parse(given)
        writer: DataSourceArrowWriter = _module("sink").ArrowWriter(options, schema, overwrite)
        return writer

    @plain_errors
    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriterBase:
        """The writer of ``df.writeStream``."""
        writer: StreamWriterBase = _module("sink").stream_writer(self.sink_options(), schema, overwrite)
        return writer

    def source_options(self) -> SourceOptions:
        """The options as those of a source. Raises ConfigError."""
        return SourceOptions.parse(self.options)

    def sink_options(self) -> SinkOptions:
        """The options as those of a sink. Raises ConfigError."""
        return SinkOptions.parse(self.options)

    def make_batch_reader(self, kind: str, options: SourceOptions) -> DataSourceReader:
        """The batch reader of this kind, ``replayable`` or ``journalled``."""
        replayable = "FilteringBatchReader" if options.push_filters else "ReplayBatchReader"
        name = replayable if kind == REPLAYABLE else "JournalBatchReader"
        reader: DataSourceReader = getattr(_readers(kind), name)(options)
        return reader

    def make_stream_reader(self, kind: str, options: SourceOptions) -> DataSourceStreamReader:
        """The stream reader of this kind, ``replayable`` or ``journalled``."""
        name = "ReplayStreamReader" if kind == REPLAYABLE else "JournalStreamReader"
        reader: DataSourceStreamReader = getattr(_readers(kind), name)(options)
        return reader

    def _source_schema(self, options: SourceOptions) -> StructType:
        check_load(options)
        return spark_schema(options.columns, options.headers_as)

    def _checked(self, schema: StructType) -> SourceOptions:
        """The options. A schema of the user's own chooses columns by name, as the option columns does."""
        options = SourceOptions.parse(options_in(self.options, schema))
        names = tuple(field.name for field in schema)
        wanted = spark_schema([name for name in names if name in NAMES], options.headers_as)
        is_chosen = bool(options.given & {"columns", "includeHeaders"})
        if _types(schema) != _types(wanted) or (is_chosen and names != options.columns):
            given = spark_schema(options.columns if is_chosen else NAMES, options.headers_as)
            raise ConfigError(
                f"schema {schema.simpleString()}: the source gives {given.simpleString()}; leave schema() out, or take"
                " columns of these with their types"
            )
        return replace(options, columns=names)


def _types(schema: StructType) -> list[tuple[str, DataType]]:
    return [(field.name, field.dataType) for field in schema]


def _readers(kind: str) -> ModuleType:
    return _module("replay" if kind == REPLAYABLE else "journal")


def _module(name: str) -> ModuleType:
    return importlib.import_module(f".{name}", __package__)
