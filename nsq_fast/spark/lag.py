"""How far a query is behind, seen from outside: its checkpoint compared with what the servers say."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nsq_fast._lazy import get_logger
from nsq_fast.errors import ConfigError, LookupFailed
from nsq_fast.log_events import SPARK_DATA_LOST
from nsq_fast.spark.journal.plan import Backlogs, Depth, Offset, find_source, source_of, topic_of
from nsq_fast.spark.replay.logs import Offsets, Position, Resolver, TopicLogs, TopicOffsets, ends_before, lost_end
from nsq_fast.spark.replay.stream import stretch_of

from .discovery import TopicServers
from .options import SourceOptions, normal

logger: logging.Logger = get_logger(__name__)

TIMEOUT = 30.0


class Lag(NamedTuple):
    """What waits for a query at one place. Messages, with the names of `nsq-fast exporter`.

    Attributes:
        nsqd: who has it: its HTTP address for the replayable reader, its TCP address for the journalled one.
        partition: None on the original NSQ.
        depth: in no batch yet; of the journalled reader, what waits in the channel.
        in_flight, deferred: of the channel, for the journalled reader.
        planned: of the batch that is planned and not committed. The journalled reader may still have a part of them
            in the channel: what that counts is in both.
        behind_bytes: of the log, behind what is committed; None for the journalled reader.
    """

    nsqd: str
    topic: str
    partition: int | None
    channel: str
    depth: int
    in_flight: int
    deferred: int
    planned: int
    behind_bytes: int | None


def lags(checkpoint: str | Path, options: Mapping[str, str] | None = None) -> list[Lag]:
    """How far the sources of a query are behind.

    Args:
        checkpoint: the query's ``checkpointLocation``, as a path here.
        options: of the source, as Spark is given them. A checkpoint of the replayable reader names topics, channel and
            nsqlookupds itself; the journalled reader's does not.

    Raises ConfigError; DataLost where a log ends before what the query has read of it, unless the options have
    failOnDataLoss=false; LookupFailed, HttpError where servers do not answer, or do not know a channel.
    """
    given = dict(options or {})
    found: list[Lag] = []
    for state in read_checkpoint(Path(checkpoint)):
        found += _of_channels(state, given) if "j" in state.planned else _of_logs(state, given)
    return sorted(found, key=lambda lag: (lag.topic, -1 if lag.partition is None else lag.partition, lag.nsqd))


# The replayable reader


def _of_logs(state: SourceState, given: Mapping[str, str]) -> Iterator[Lag]:
    options = _options_of(state, given)
    end = Position.from_json(state.planned, options)
    done = _committed(state, end, options)
    for topic, planned in end.offsets.items():
        logs = TopicLogs(options.for_topic(topic))
        try:
            yield from _of_topic(logs, options.for_topic(topic), None if done is None else done.get(topic, {}), planned)
        finally:
            logs.close()


def _options_of(state: SourceState, given: Mapping[str, str]) -> SourceOptions:
    """Those that are given, and what the checkpoint knows besides. It names each topic that a pattern has found."""
    own = {name: value for name, value in given.items() if normal(name) != normal("topicPattern")}
    known = {normal(name) for name in own}
    if normal("nsqd_tcp_addresses") in known:
        known.add(normal("lookupd_http_addresses"))
    named = {name: value for name, value in _named_by(state).items() if normal(name) not in known}
    return SourceOptions.parse({**named, **own})


def _named_by(state: SourceState) -> dict[str, str]:
    found = {"topic": ",".join(state.planned["offsets"])}
    if "channel" in state.planned:
        found["channel"] = str(state.planned["channel"])
        found["lookupd_http_addresses"] = ",".join(map(str, state.planned["servers"]))
    return found


def _committed(state: SourceState, end: Position, options: SourceOptions) -> TopicOffsets | None:
    """The first batch says itself where it begins; with PySpark before 4.2 it need not know: None."""
    return end.begin if state.committed is None else Position.from_json(state.committed, options).offsets


def _of_topic(topic_logs: TopicLogs, options: SourceOptions, done: Offsets | None, planned: Offsets) -> Iterator[Lag]:
    logs = topic_logs.all_logs(TIMEOUT)
    if done is None:  # nothing is committed, so the channel has not moved from there
        done = Resolver(options, topic_logs).starting(logs, None)
    logs = topic_logs.caught_up(logs, done)
    lost = ends_before(logs, done)
    for partition in lost:
        logger.warning("%s", lost_end(options, partition, done[partition], logs[partition]), extra=SPARK_DATA_LOST)
    done = {partition: offset for partition, offset in done.items() if partition not in lost}
    planned = {each: end for each, end in planned.items() if each not in lost or end <= logs[each].end}
    whole = stretch_of(done, logs, None)
    for partition, log in logs.items():
        begin, end = whole.begins[partition], whole.ends[partition]
        cut = min(max(begin, planned.get(partition, begin)), end)
        yield Lag(
            nsqd=str(log.nsqd.http.address),
            topic=options.topic,
            partition=partition,
            channel=options.channel,
            depth=topic_logs.rows(log, partition, cut, end),
            in_flight=0,
            deferred=0,
            planned=topic_logs.rows(log, partition, begin, cut),
            behind_bytes=end - begin,
        )


# The journalled reader

_NEEDED = {
    "topic": ("topic", "topicPattern"),
    "channel": ("channel",),
    "lookupd_http_addresses": ("lookupd_http_addresses", "nsqd_tcp_addresses"),
}


def _of_channels(state: SourceState, given: Mapping[str, str]) -> Iterator[Lag]:
    known = set(map(normal, given))
    missing = [name for name, ways in _NEEDED.items() if not known & set(map(normal, ways))]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)}: the checkpoint of a journalled query does not name them; give each as the query has"
            " it: --option name=value, or lags(checkpoint, {name: value})"
        )
    options = SourceOptions.parse(given)
    backlogs = Backlogs(options, creates=False)
    try:
        depths = backlogs.all_depths()
        topics = sorted({topic_of(each) or options.topic for each in depths})
        for topic in topics:
            if not backlogs.of(topic).has_channel:
                raise LookupFailed(
                    f"channel {options.channel!r} of topic {topic!r} is not known to its servers: is its name right?"
                )
        servers = {topic: backlogs.servers(topic) for topic in topics}
    finally:
        backlogs.close()
    planned = _planned(state)
    for source in sorted({*depths, *planned}):
        topic, depth = topic_of(source) or options.topic, depths.get(source, Depth())
        partition, nsqd = find_source(source, servers.get(topic, TopicServers()))
        yield Lag(
            nsqd=str(nsqd or ""),
            topic=topic,
            partition=partition,
            channel=options.channel,
            depth=depth.ready + depth.paused,
            in_flight=depth.in_flight,
            deferred=depth.deferred,
            planned=planned.get(source, 0),
            behind_bytes=None,
        )


def _planned(state: SourceState) -> dict[str, int]:
    offset = Offset.decode(state.planned)
    if state.committed is not None and Offset.decode(state.committed).batch == offset.batch:
        return {}
    found: dict[str, int] = {}
    for name, rows in offset.slots.items():
        found[source_of(name)] = found.get(source_of(name), 0) + rows
    return found


# Where a query is, by the checkpoint that Spark keeps of it: which batch it has committed, and which it has planned.
#
# A checkpoint has a file ``offsets/7`` when batch 7 is planned, and ``commits/7``
# when it is done. The first holds, behind a version and Spark's settings, a line
# for each source of the query: where the batch ends in it, "-" where it has
# nothing of it (apache/spark: OffsetSeqLog.scala).


_VERSION = "v1"
_SOURCES_FROM = 2

Encoded = Mapping[str, Any]
"""An offset as one of the readers has encoded it."""


class SourceState(NamedTuple):
    """Where one source of a query is. The same twice while no batch runs; ``committed`` is None before the first."""

    committed: Encoded | None
    planned: Encoded


def read_checkpoint(folder: Path) -> list[SourceState]:
    """Of each source that is ours. Raises ConfigError when there is none."""
    planned = _last(folder / "offsets")
    if planned is None:
        raise ConfigError(
            f"checkpoint {folder}: has no offsets: it is no checkpointLocation of this machine, or its query has"
            " planned no batch yet"
        )
    ends = _offsets(folder, planned)
    done = _last(folder / "commits")
    before = {} if done is None else _offsets(folder, done)
    found = [SourceState(before.get(number), end) for number, end in ends.items()]
    if not found:
        raise ConfigError(f"checkpoint {folder}: none of its offsets is of NSQ: another source wrote it")
    return found


def _last(folder: Path) -> int | None:
    names = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    return max((int(name) for name in names if name.isdecimal()), default=None)


def _offsets(folder: Path, batch: int) -> dict[int, Encoded]:
    path = folder / "offsets" / str(batch)
    lines = path.read_text().splitlines()
    if not lines or lines[0] != _VERSION:
        raise ConfigError(f"{path}: begins with {lines[:1]}, and only the layout {_VERSION} is known")
    decoded = {number: _decoded(line) for number, line in enumerate(lines[_SOURCES_FROM:])}
    return {number: offset for number, offset in decoded.items() if offset is not None}


def _decoded(line: str) -> Encoded | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    is_ours = isinstance(found, dict) and ({"j", "batch", "slots"} <= found.keys() or "offsets" in found)
    return found if is_ours else None
