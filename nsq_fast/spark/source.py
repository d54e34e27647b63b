"""The format "nsq": its columns, and the options that Spark loads it with; which reader or writer fits them.

The modules of readers and writers are imported when one is needed. Spark makes
the source again in several processes, so making it has no effect. Most of these
read nothing, and importing pyarrow would be half of their CPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    VarcharType,
)

from nsq_fast.errors import ConfigError, LookupFailed, NsqError

from .discovery import TIMEOUT, TopicFinder, discover, in_cluster, known_topics, retried, unknown_topic
from .options import (
    AUTO,
    BATCHES,
    BEGINS,
    EARLIEST,
    ENDS,
    JOURNALLED,
    JSON,
    LATEST,
    NAMES,
    REDACTED,
    REPLAYABLE,
    SOURCE,
    STREAMS,
    Only,
    SinkOptions,
    SourceOptions,
    as_texts,
    column_type,
    is_by_topic,
    normal,
)
from .versions import (
    PUSHES_FILTERS,
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamReader,
    StreamWriterBase,
    in_worker,
    plain_errors,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

if importlib.util.find_spec("pyarrow") is None:  # the readers import it; here the message names the extra
    raise ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow")


# The columns that the source gives, in Spark's types. Their rows, in Arrow's: ``arrow_rows``.


_PAIR = StructType([StructField("key", StringType()), StructField("value", BinaryType())])
_KINDS: tuple[DataType, ...] = (
    StringType(),
    IntegerType(),
    LongType(),
    BinaryType(),
    TimestampType(),
    MapType(StringType(), StringType()),
    ArrayType(_PAIR),
)
_TYPES = {kind.simpleString(): kind for kind in _KINDS}


def spark_schema(names: Sequence[str] = NAMES, headers_as: str = JSON) -> StructType:
    """The Spark schema of these columns, in this order. Every column may be null."""
    return StructType([StructField(name, _TYPES[column_type(name, headers_as)]) for name in names])


class NsqDataSource(DataSource):
    """NSQ as a data source. Derive from it, and override the ``make_`` methods, to put other readers in."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))

    @classmethod
    def name(cls) -> str:
        return "nsq"

    @plain_errors
    def schema(self) -> StructType:
        """The columns that the options ask for. Called at load of a source, and when a table is made."""
        table = table_options(self.options)
        if table is None:
            return self._source_schema(self.source_options())
        if "channel" in map(normal, table):
            return with_options(self._source_schema(SourceOptions.parse(table)), table)
        return with_options(_module("sink.plan").table_schema(SinkOptions.parse(table)), table)

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
        if {*map(normal, self.options)} == {"checkpointlocation"}:
            raise ConfigError("no option is given: Spark passes no stream those of a table; a stream gives them itself")
        writer: StreamWriterBase = _module("sink").stream_writer(self.sink_options(), schema, overwrite)
        return writer

    def source_options(self) -> SourceOptions:
        return SourceOptions.parse(self.options)

    def sink_options(self) -> SinkOptions:
        return SinkOptions.parse(self.options)

    def make_batch_reader(self, kind: str, options: SourceOptions) -> DataSourceReader:
        replayable = "FilteringBatchReader" if options.push_filters else "ReplayBatchReader"
        name = replayable if kind == REPLAYABLE else "JournalBatchReader"
        reader: DataSourceReader = getattr(_readers(kind), name)(options)
        return reader

    def make_stream_reader(self, kind: str, options: SourceOptions) -> DataSourceStreamReader:
        name = "ReplayStreamReader" if kind == REPLAYABLE else "JournalStreamReader"
        reader: DataSourceStreamReader = getattr(_readers(kind), name)(options)
        return reader

    def _source_schema(self, options: SourceOptions) -> StructType:
        check_load(options)
        return spark_schema(options.columns, options.headers_as)

    def _checked(self, schema: StructType) -> SourceOptions:
        """The options. A schema of the user's own chooses columns by name, as the option columns does."""
        given = options_in(self.options, schema)
        if given is not self.options and "channel" not in map(normal, given):
            raise ConfigError(
                "channel: the table has none, so it is a sink, made to be written to; make another with one, to read"
            )
        options = SourceOptions.parse(given)
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


def read_batch(spark: Any, **options: Any) -> DataFrame:
    """What ``spark.read`` gives, for PySpark 3.5, which has no Python data sources. Newer versions may use it, too.

        read_batch(spark, topic="orders", channel="spark", lookupd_http_addresses="127.0.0.1:4161")

    Options are those of the source; write one with a dot as ``**{"nsq.msg_timeout": 30_000}``. The batch is planned by
    this call: each action on the result reads what it has found, anew. Raises ConfigError; what keeps the servers from
    answering.
    """
    source = NsqDataSource(as_texts(options))
    schema = source.schema()
    reader = source.reader(schema)
    partitions = reader.partitions()

    def read(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from reader.read(partitions[number])

    return spark.range(0, len(partitions), 1, len(partitions) or 1).mapInArrow(read, schema)


def _types(schema: StructType) -> list[tuple[str, DataType]]:
    return [(field.name, field.dataType) for field in schema]


def _readers(kind: str) -> ModuleType:
    return _module("replay" if kind == REPLAYABLE else "journal")


def _module(name: str) -> ModuleType:
    return importlib.import_module(f".{name}", __package__)


# Choose the reader of a source from its servers and its options, and check that the options fit that reader.
#
# *Replayable*: a redesigned cluster keeps what was consumed, so a batch is a
# range of offsets and can be read again. *Journalled*: anything else; what was
# read is written to a journal of ours before its FIN is sent.


_READERS = {each.name: each.readers for each in SOURCE if each.readers.reader} | dict.fromkeys(
    ("nsq.sample_rate", "nsq.desired_tag", "nsq.ext_filter"), Only(JOURNALLED, "messages left out would be missed")
)


def check_load(options: SourceOptions) -> None:
    """Check what holds for a batch and a stream alike: load does not know which is read. Raises ConfigError."""
    for_batches, for_streams = _given(options, BATCHES), _given(options, STREAMS)
    if for_batches and for_streams:
        raise ConfigError(f"{for_batches[0]} is for spark.read only, {for_streams[0]} for spark.readStream only")
    for names in (BEGINS, ENDS):
        both = [name for name in names if name in options.given]
        if len(both) > 1:
            raise ConfigError(f"{both[0]} and {both[1]}: only one of them may be given")
    _check_several(options)
    if options.min_offsets_per_trigger is None and "maxTriggerDelay" in options.given:
        raise ConfigError("maxTriggerDelay: has no effect without minOffsetsPerTrigger")
    least, most = options.min_offsets_per_trigger, options.max_offsets_per_trigger
    if least is not None and most is not None and least > most:
        raise ConfigError(f"minOffsetsPerTrigger={least}: is more than maxOffsetsPerTrigger={most}")
    if options.ending_offsets == EARLIEST:
        raise ConfigError("endingOffsets='earliest': there is nothing to read up to there")
    if options.push_filters and not PUSHES_FILTERS:
        raise ConfigError(
            "pushFilters: Spark tells a source what it filters for from PySpark 4.1 on, and this is older"
        )
    if options.reader != AUTO:
        check_reader(options, options.reader, is_stream=bool(for_streams))


def _given(options: SourceOptions, only: str) -> list[str]:
    """The options for batches alone, or for streams, that are given."""
    return [each.name for each in SOURCE if each.only == only and each.name in options.given]


def _check_several(options: SourceOptions) -> None:
    for each in SOURCE:
        positions = getattr(options, each.field) if each.field and options.reads_several else None
        if isinstance(positions, Mapping) and not is_by_topic(positions):
            raise ConfigError(
                f'{each.name}: there may be several topics, so each has to be named: {{"orders": {{"0": 1234, "1":'
                " 560}}"
            )


def check_use(options: SourceOptions, *, is_stream: bool) -> None:
    """Raise ConfigError for options that are for the other kind of read, or contradict each other."""
    check_load(options)
    other = BATCHES if is_stream else STREAMS
    for name in _given(options, other):
        raise ConfigError(f"{name}: is for {other} only")
    if not is_stream and options.starting_offsets == LATEST:
        raise ConfigError("startingOffsets='latest': there is nothing to read from there; it is for streams")


def check_reader(options: SourceOptions, reader: str, *, is_stream: bool) -> None:
    """Raise ConfigError for an option that ``reader`` cannot honour, saying why; and for one that it lacks."""
    for name, only in _READERS.items():
        if name in options.given and only.reader != reader:
            raise ConfigError(f"{name}: the {reader} reader cannot honour it: {only.refusal}")
    if reader == JOURNALLED and options.journal is None and (is_stream or options.consume):
        raise ConfigError(
            "journal: is required by the journalled reader: a folder that the driver and all executors share, or"
            " s3://bucket/prefix, where messages are kept from their acknowledgement until Spark has committed them"
        )


def choose(options: SourceOptions, *, is_stream: bool) -> str:
    """The reader that the options ask for; otherwise the replayable one where the servers and the options allow it.

    Raises ConfigError; LookupFailed or HttpError when the servers do not answer in time.
    """
    check_use(options, is_stream=is_stream)
    reader = options.reader
    if reader == AUTO and options.given & {"journal", "consume"}:
        reader = JOURNALLED
    if reader == AUTO:
        reader = REPLAYABLE if _can_replay(options) else JOURNALLED
    check_reader(options, reader, is_stream=is_stream)
    return reader


def _can_replay(options: SourceOptions) -> bool:
    """Whether all topics are of a redesigned cluster. Raises LookupFailed, HttpError while that cannot be told.

    A guess could give the query another reader now than later, and with it another kind of offset.
    """
    topics = TopicFinder(options).topics(TIMEOUT)
    if not topics:
        raise LookupFailed(f"topicPattern={options.topic!r}: no topic matches it: create one first, or set reader")
    known = retried(lambda left: known_topics(options, left))
    found = {topic: _can_replay_topic(options.for_topic(topic), known) for topic in topics}
    if len(set(found.values())) > 1:
        replayable = sorted(topic for topic, can_replay in found.items() if can_replay)
        raise ConfigError(
            f"topic={options.topic!r}: a redesigned cluster has {', '.join(replayable)}, and other servers the rest:"
            " read them by two queries, or all of them with reader=journalled"
        )
    return all(found.values())


def _can_replay_topic(options: SourceOptions, known: Collection[str]) -> bool:
    servers = discover(options)
    if options.topic not in known or not servers.nsqds:
        raise LookupFailed(f"{unknown_topic(options)} Create it first, or set reader: its servers say which one fits")
    return bool(servers.leaders) and in_cluster(options, servers)


class RefusedStreamReader(DataSourceStreamReader):
    """Raises ``error``. An error of ``streamReader`` itself would be hidden by one of Spark's own: it calls ``stop``
    of the reader that it did not get (pyspark 4.0 to 4.3: ``python_streaming_source_runner.py``, ``main``)."""

    def __init__(self, error: NsqError) -> None:
        self.error = error

    @plain_errors
    def _refuse(self, *_: Any) -> NoReturn:
        raise self.error

    initialOffset: Callable[..., NoReturn] = _refuse
    latestOffset: Callable[..., NoReturn] = _refuse
    partitions: Callable[..., NoReturn] = _refuse
    read: Callable[..., NoReturn] = _refuse


# The options of a table that was made by ``CREATE TABLE ... USING nsq OPTIONS (...)``.
#
# Spark gives them to ``schema`` when the table is made: each twice, as ``topic``
# and as ``option.topic``, among properties of the catalog's own (``provider``,
# ``owner``). When the table is read or written it gives no options at all, only
# the schema that is in the catalog (seen with 4.0 to 4.3). So the options are kept
# there, in the metadata of the columns. Spark carries it to readers; to writers it
# does with a column that is converted on INSERT, as one of ``BODY`` always is.


BODY = VarcharType(2**31 - 1)
"""The type of the body in a table that is made to be written: a text of any length, which is converted to a string."""

_OPTION = "option."
_KEY = "nsq"


def table_options(options: Mapping[str, str]) -> dict[str, str] | None:
    """The options of a table that is being made; None when it is none. Raises ConfigError for a secret."""
    found = {key[len(_OPTION) :]: value for key, value in options.items() if key.lower().startswith(_OPTION)}
    if not found:
        return None
    secrets = sorted(key for key in found if REDACTED.search(key))
    if secrets:
        raise ConfigError(
            f"{secrets[0]}: the catalog would keep it in clear with the table; use CREATE TEMP VIEW, or spark.read"
        )
    return found


def with_options(schema: StructType, options: Mapping[str, str]) -> StructType:
    """The schema of a table, with its options in it."""
    kept = {_KEY: json.dumps(dict(sorted(options.items())))}
    return StructType([StructField(each.name, each.dataType, each.nullable, kept) for each in schema.fields])


def options_in(options: Mapping[str, str], schema: StructType) -> Mapping[str, str]:
    """The options, or, where Spark gives none, those in the schema of a table. Raises ConfigError without any."""
    if options:
        return options
    for field in schema.fields:
        if _KEY in field.metadata:
            found: dict[str, str] = json.loads(field.metadata[_KEY])
            return found
    raise ConfigError(
        "no option is given: Spark passes those of a table on only when CREATE TABLE names no columns; leave them out,"
        " and choose them with the option columns"
    )
