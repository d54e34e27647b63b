"""Choose the reader of a source from its servers and its options, and check that the options fit that reader.

*Replayable*: a redesigned cluster keeps what was consumed, so a batch is a
range of offsets and can be read again. *Journalled*: anything else; what was
read is written to a journal of ours before its FIN is sent.
"""

from __future__ import annotations

from collections.abc import Mapping

from nsq_fast.errors import ConfigError, LookupFailed

from .discovery import TIMEOUT, TopicFinder, discover, in_cluster
from .options import AUTO, JOURNALLED, REPLAYABLE, SourceOptions
from .positions import EARLIEST, LATEST, is_by_topic
from .versions import PUSHES_FILTERS

_BATCH_ONLY = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp", "consume", "pushFilters")
_STREAM_ONLY = ("maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay")
_BEGINS = ("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp")
_ENDS = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
_NOT_FOR = {
    REPLAYABLE: {
        **dict.fromkeys(
            ("journal", "journalEndpoint", "journalRegion"), "it reads again from the servers, and keeps no journal"
        ),
        "consume": "its channel follows what was read anyhow",
        "suppressDuplicates": "offsets tell duplicates apart, there are none",
        "nsq.sample_rate": "messages left out would be missed",
        "nsq.desired_tag": "messages left out would be missed",
        "nsq.ext_filter": "messages left out would be missed",
    },
    JOURNALLED: {
        **dict.fromkeys(
            (*_BEGINS, "startingOffsetsByTimestampStrategy", *_ENDS),
            "a channel begins and ends where it stands, and cannot be moved",
        ),
        "pushFilters": "a channel has no offsets to begin and end at",
        "maxBytesPerTrigger": "nsqd does not tell the sizes of messages before it delivers them",
    },
}


def check_load(options: SourceOptions) -> None:
    """Check what holds for a batch and a stream alike: load does not know which is read. Raises ConfigError."""
    for_batches = [name for name in _BATCH_ONLY if name in options.given]
    for_streams = [name for name in _STREAM_ONLY if name in options.given]
    if for_batches and for_streams:
        raise ConfigError(f"{for_batches[0]} is for spark.read only, {for_streams[0]} for spark.readStream only")
    for names in (_BEGINS, _ENDS):
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


def _check_several(options: SourceOptions) -> None:
    if not options.reads_several:
        return
    given = {
        "startingOffsets": options.starting_offsets,
        "startingOffsetsByTimestamp": options.starting_times,
        "endingOffsets": options.ending_offsets,
        "endingOffsetsByTimestamp": options.ending_times,
    }
    for name, positions in given.items():
        if isinstance(positions, Mapping) and not is_by_topic(positions):
            raise ConfigError(
                f'{name}: there may be several topics, so each has to be named: {{"orders": {{"0": 1234, "1": 560}}}}'
            )


def check_use(options: SourceOptions, *, is_stream: bool) -> None:
    """Raise ConfigError for options that are for the other kind of read, or contradict each other."""
    check_load(options)
    wrong, other = (_BATCH_ONLY, "spark.read") if is_stream else (_STREAM_ONLY, "spark.readStream")
    for name in wrong:
        if name in options.given:
            raise ConfigError(f"{name}: is for {other} only")
    if not is_stream and options.starting_offsets == LATEST:
        raise ConfigError("startingOffsets='latest': there is nothing to read from there; it is for streams")
    if options.reader != AUTO:
        check_reader(options, options.reader, is_stream=is_stream)


def check_reader(options: SourceOptions, reader: str, *, is_stream: bool) -> None:
    """Raise ConfigError for an option that ``reader`` cannot honour, saying why; and for one that it lacks."""
    for name, reason in _NOT_FOR[reader].items():
        if name in options.given:
            raise ConfigError(f"{name}: the {reader} reader cannot honour it: {reason}")
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
    topics = TopicFinder(options).topics(TIMEOUT)
    if not topics:
        raise LookupFailed(f"topicPattern={options.topic!r}: no topic matches it: create one first, or set reader")
    found = {topic: _can_replay_topic(options.for_topic(topic)) for topic in topics}
    if len(set(found.values())) > 1:
        replayable = sorted(topic for topic, can_replay in found.items() if can_replay)
        raise ConfigError(
            f"topic={options.topic!r}: a redesigned cluster has {', '.join(replayable)}, and other servers the rest:"
            " read them by two queries, or all of them with reader=journalled"
        )
    return all(found.values())


def _can_replay_topic(options: SourceOptions) -> bool:
    servers = discover(options)
    if servers.is_redesigned and not servers.nsqds:
        # A guess could give the query another reader now than later, and with it another kind of offset.
        raise LookupFailed(f"topic {options.topic!r} is not known: create it first, or set reader")
    return bool(servers.leaders) and in_cluster(options, servers)
