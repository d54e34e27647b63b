"""How far a query is behind, seen from outside: its checkpoint compared with what the servers say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from nsq_fast.names import Address

from .checkpoint import SourceState, read_checkpoint
from .discovery import TopicServers
from .journal.backlogs import Backlogs
from .journal.plan import Depth, Offset, parse_source, source_of, topic_of
from .options import SourceOptions
from .replay.log import TopicLogs
from .replay.planning import Planner, Stretch, stretch_of
from .replay.position import Offsets, Position, TopicOffsets
from .replay.start import Resolver
from .spelling import normal

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

    Raises ConfigError, and LookupFailed, HttpError where servers do not answer.
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
    """The options that the checkpoint knows."""
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
    planner = Planner(topic_logs)
    whole = stretch_of(done, logs, None)
    cut = {each: min(max(begin, planned.get(each, begin)), whole.ends[each]) for each, begin in whole.begins.items()}
    running, left = planner.rows(Stretch(whole.begins, cut, logs)), planner.rows(Stretch(cut, whole.ends, logs))
    for partition, log in logs.items():
        yield Lag(
            nsqd=str(log.nsqd.http.address),
            topic=options.topic,
            partition=partition,
            channel=options.channel,
            depth=left[partition],
            in_flight=0,
            deferred=0,
            planned=running[partition],
            behind_bytes=whole.sizes[partition],
        )


# The journalled reader


def _of_channels(state: SourceState, given: Mapping[str, str]) -> Iterator[Lag]:
    options = SourceOptions.parse(given)
    backlogs = Backlogs(options)
    try:
        depths = backlogs.all_depths()
        servers = {topic: backlogs.servers(topic) for topic in {topic_of(source) for source in depths}}
    finally:
        backlogs.close()
    planned = _planned(state)
    for source in sorted({*depths, *planned}):
        topic, depth = topic_of(source), depths.get(source, Depth())
        partition, nsqd = _place(source, servers.get(topic))
        yield Lag(
            nsqd=nsqd,
            topic=topic or options.topic,
            partition=partition,
            channel=options.channel,
            depth=depth.ready,
            in_flight=depth.in_flight,
            deferred=depth.deferred,
            planned=planned.get(source, 0),
            behind_bytes=None,
        )


def _place(source: str, servers: TopicServers | None) -> tuple[int | None, str]:
    """The partition, if any, and the nsqd that leads it; "" where nobody does."""
    place = parse_source(source)
    if isinstance(place, Address):
        return None, str(place)
    leader = None if servers is None else servers.leaders.get(place)
    return place, "" if leader is None else str(leader.tcp)


def _planned(state: SourceState) -> dict[str, int]:
    """Rows of the batch that is not committed, by source."""
    offset = Offset.decode(state.planned)
    if state.committed is not None and Offset.decode(state.committed).batch == offset.batch:
        return {}
    found: dict[str, int] = {}
    for name, rows in offset.slots.items():
        found[source_of(name)] = found.get(source_of(name), 0) + rows
    return found
