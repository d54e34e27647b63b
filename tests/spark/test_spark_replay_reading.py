"""Reading a topic again from its log: positions, parts, rows."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import pytest
from gevent import joinall, sleep, spawn
from hypothesis import given
from hypothesis import strategies as st
from support.spark_replay import MakeTopic, Topic, ask
from support.waiting import WAIT, holds, until

from nsq_fast._codec import encode_message
from nsq_fast._frame import ColumnReader, Columns
from nsq_fast.broker import ClusterProcess
from nsq_fast.client.http import Endpoint
from nsq_fast.columns import ColumnSubscription
from nsq_fast.errors import ConfigError, ConnectionLost, DataLost, LookupFailed, NotLeader, Unauthorized
from nsq_fast.names import Address
from nsq_fast.spark.discovery import Nsqd
from nsq_fast.spark.options import SourceOptions
from nsq_fast.spark.replay import ReplayBatchReader, ReplayStreamReader
from nsq_fast.spark.replay.logs import Identity, Log, Position, Record, TopicLogs, first_at, start_of
from nsq_fast.spark.replay.reading import Assembly, Piece, PieceReader, Route, Run, own_channel, pieces
from nsq_fast.spark.replay.stream import share_out
from nsq_fast.spark.versions import ReadAllAvailable, ReadMaxRows

# Pieces of a log of the embedded cluster are read whole, in order and once, while the cluster is not well.


def options(topic: Topic, **given: str) -> SourceOptions:
    return SourceOptions.parse({**topic.options, "startingOffsets": "earliest", "columns": "*", **given})


def whole(reader: ReplayStreamReader) -> list[Any]:
    """The pieces of a batch of all there is."""
    start = reader.initialOffset()
    return reader.partitions(start, reader.latestOffset(start, ReadAllAvailable()))


def begin_of(reader: ReplayStreamReader, topic: Topic) -> dict[str, int]:
    begin = reader.initialOffset()
    assert begin["initial"]
    offsets: dict[str, int] = begin["offsets"][topic.name]
    return offsets


def rows(batches: Iterator[Any], column: str = "body") -> list[Any]:
    return [value for batch in batches for value in batch[column].to_pylist()]


def bodies_of(reader: Any, pieces: Iterable[Any]) -> list[bytes]:
    return [body for piece in pieces for body in rows(reader.read(piece))]


def read(topic: Topic, **given: str) -> list[bytes]:
    reader = ReplayStreamReader(options(topic, **given))
    return bodies_of(reader, whole(reader))


def piece_of(topic: Topic, partition: int = 0, **given: str) -> tuple[SourceOptions, Piece]:
    found = options(topic, **given)
    pieces = whole(ReplayStreamReader(found))
    return found, next(piece for piece in pieces if piece.partition == partition)


@pytest.mark.parametrize(("ordered", "count"), [(False, 3000), (True, 300)])  # an ordered channel sends one at a time
def test_all_of_a_topic_is_read_in_order(make_topic: MakeTopic, ordered: bool, count: int) -> None:
    topic = make_topic(ordered=ordered)
    bodies = topic.fill(count)
    assert read(topic) == bodies[::2] + bodies[1::2]


def test_columns_of_ext_topics(make_topic: MakeTopic) -> None:
    topic = make_topic(1, ext=True)
    for number in range(3):
        header = json.dumps({"##trace_id": str(70 + number), "k": "é"})
        topic.call(0, "POST", "/pub_ext", b"body", ext=header)
    topic.publish(0, [b"plain"])
    reader = ReplayStreamReader(options(topic, includeHeaders="true"))
    [piece] = whole(reader)
    [batch] = reader.read(piece)
    assert batch["trace_id"].to_pylist() == [70, 71, 72, 0]
    assert [text and json.loads(text)["k"] for text in batch["headers"].to_pylist()] == ["é", "é", "é", None]
    assert batch["body"].to_pylist() == [b"body"] * 3 + [b"plain"]
    [batch] = ReplayStreamReader(options(topic, headersAs="map")).read(piece)
    assert [entries and dict(entries)["k"] for entries in batch["headers"].to_pylist()] == ["é", "é", "é", None]


def test_cut_anywhere_the_pieces_make_up_the_whole(make_topic: MakeTopic) -> None:
    topic = make_topic(1)
    bodies = topic.fill(40, [0])
    end = topic.stats(0)["backend_depth"]
    found = options(topic)
    for cut in (1, 2, 39, 40, 41, end - 41, end - 40, end - 39, end - 1):
        halves = [
            rows(PieceReader(found, Piece(topic.name, 0, *ends, None)).batches()) for ends in ((0, cut), (cut, end))
        ]
        assert [*chain(*halves)] == bodies


def test_more_pieces_than_partitions(make_topic: MakeTopic) -> None:
    topic = make_topic()
    bodies = topic.fill(1000)
    reader = ReplayStreamReader(options(topic, minPartitions="7"))
    pieces = whole(reader)
    assert len(pieces) >= 7
    assert bodies_of(reader, pieces) == bodies[::2] + bodies[1::2]


@pytest.mark.parametrize("least", [None, "12"])
def test_a_task_reads_no_more_records_than_it_may(make_topic: MakeTopic, least: str | None) -> None:
    topic = make_topic()
    # Of several sizes: equal parts in bytes are none in records.
    bodies = [b"%03d" % number + b"x" * (number % 97) for number in range(501)]
    for partition in (0, 1):
        topic.publish(partition, bodies[partition::2])
    given = {"maxRecordsPerPartition": "100", **({"minPartitions": least} if least else {})}
    for reader, shares in (
        ((stream := ReplayStreamReader(options(topic, **given))), whole(stream)),
        ((batch := ReplayBatchReader(options(topic, **given))), batch.partitions()),
    ):
        parts = [rows(reader.read(piece)) for piece in shares]
        assert len(parts) >= 12 if least else [len(part) for part in parts] == [100, 100, 51, 100, 100, 50]
        assert max(map(len, parts)) <= 100
        assert [body for part in parts for body in part] == bodies[::2] + bodies[1::2]


@pytest.mark.parametrize("name", ["minPartitions", "maxRecordsPerPartition"])
def test_an_ordered_topic_is_not_cut(make_topic: MakeTopic, name: str) -> None:
    topic = make_topic(ordered=True)
    with pytest.raises(ConfigError, match=rf"{name}: .*ordered"):
        read(topic, **{name: "3"})
    with pytest.raises(ConfigError, match=rf"{name}: .*ordered"):
        ReplayBatchReader(options(topic, **{name: "3"})).partitions()


def test_the_channel_of_a_query_is_its_own(make_topic: MakeTopic) -> None:
    topic = make_topic(1)
    found = options(topic)
    leader = topic.leader(0)
    other = PieceReader(found, Piece(topic.name, 0, 0, 1, None)).subscribe(_route(topic, leader), "spark")
    with pytest.raises(ConfigError, match="must be this query's own"):
        ReplayStreamReader(found).initialOffset()
    other.abort()


def _route(topic: Topic, leader: dict[str, Any]) -> Route:
    host = leader["broadcast_address"]
    http = Endpoint("http", Address(host, leader["http_port"]))
    return Route(Nsqd(Address(host, leader["tcp_port"]), http), False, False, False)


def test_a_query_begins_where_its_channel_stands(make_topic: MakeTopic) -> None:
    topic = make_topic(1)
    bodies = topic.fill(10, [0])
    plain = topic.options
    reader = ReplayStreamReader(SourceOptions.parse(plain))
    assert bodies_of(reader, whole(reader)) == bodies
    reader.commit({"0": topic.stats(0)["backend_depth"] // 2})
    restarted = ReplayStreamReader(SourceOptions.parse(plain))
    assert begin_of(restarted, topic) == {"0": topic.stats(0)["backend_depth"] // 2}
    fresh = ReplayStreamReader(SourceOptions.parse({**plain, "channel": "fresh"}))
    assert begin_of(fresh, topic) == {"0": topic.stats(0)["backend_depth"]}
    assert topic.channels(0)["fresh"]["depth"] == 0


def test_starting_offsets(make_topic: MakeTopic) -> None:
    topic = make_topic()
    topic.fill(20)
    middle, end = topic.stats(0)["backend_depth"] // 2, topic.stats(1)["backend_depth"]

    def initial(text: str) -> dict[str, int]:
        return begin_of(ReplayStreamReader(options(topic, startingOffsets=text)), topic)

    assert initial("earliest") == {"0": 0, "1": 0}
    assert initial("latest") == {"0": 2 * middle, "1": end}
    assert initial(f'{{"0": {middle}, "1": -1}}') == {"0": middle, "1": end}
    with pytest.raises(ConfigError, match="startingOffsets: names partitions"):
        initial('{"0": 5}')
    with pytest.raises(ConfigError, match=f"startingOffsets: partition 1 ends at {end}, not at {end + 1}"):
        initial(f'{{"0": 0, "1": {end + 1}}}')


def test_a_batch_by_offsets_and_by_time(make_topic: MakeTopic) -> None:
    topic = make_topic()
    before = topic.fill(300, label="before")
    sleep(0.005)  # sleep: times are in milliseconds
    between = time.time_ns() // 1_000_000
    sleep(0.005)  # sleep: times are in milliseconds
    middle = [topic.stats(partition)["backend_depth"] for partition in (0, 1)]
    after = topic.fill(200, label="after")

    def slice(**given: str) -> list[bytes]:
        reader = ReplayBatchReader(SourceOptions.parse({**topic.options, **given}))
        return sorted(bodies_of(reader, reader.partitions()))

    at = json.dumps({"0": middle[0], "1": middle[1]})
    assert slice() == sorted(before + after)
    assert slice(endingOffsets=at) == slice(endingTimestamp=str(between)) == sorted(before)
    assert slice(startingOffsets=at) == slice(startingTimestamp=str(between)) == sorted(after)
    assert slice(startingOffsets=at, endingOffsets=at) == []
    assert slice(startingTimestamp=str(between + 10**6)) == []
    assert topic.channels(0)["spark"]["depth"] == 250  # left where it was
    with pytest.raises(ConfigError, match="endingOffsets: partition 0 ends at"):
        slice(endingOffsets='{"0": 999999999, "1": -1}')


class Troubled(PieceReader):
    """Calls ``trouble`` once, when it has read so many rows of a connection; counts its connections."""

    def __init__(self, found: SourceOptions, piece: Piece, trouble: Callable[[], object], patience: float = 10) -> None:
        super().__init__(found, piece, patience)
        self.trouble = trouble
        self.connections = 0

    def subscribe(self, route: Route, channel: str) -> ColumnSubscription:
        self.connections += 1
        subscription = super().subscribe(route, channel)
        if self.connections == 1:
            subscription = Interrupted(subscription, self.trouble)  # type: ignore[assignment]
        return subscription


class Interrupted:
    """A subscription that after its first messages lets something happen."""

    def __init__(self, subscription: ColumnSubscription, trouble: Callable[[], object]) -> None:
        self._subscription = subscription
        self._trouble = trouble
        self._has_happened = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._subscription, name)

    def fetch(self, timeout: float) -> Any:
        columns = self._subscription.fetch(timeout)
        if columns.count and not self._has_happened:
            self._has_happened = True
            self._trouble()
        return columns


@pytest.mark.parametrize(("ordered", "count"), [(False, 6000), (True, 600)])
def test_a_leader_moves_within_a_piece(
    cluster: ClusterProcess, make_topic: MakeTopic, ordered: bool, count: int
) -> None:
    topic = make_topic(1, 2, ordered=ordered)
    bodies = topic.fill(count, [0])
    before = topic.leader(0)["tcp_port"]
    reader = Troubled(*piece_of(topic), lambda: cluster.move_leader(topic.name, 0))
    assert rows(reader.batches()) == bodies
    assert reader.connections > 1
    assert topic.leader(0)["tcp_port"] != before


def test_a_leader_dies_within_a_piece(cluster: ClusterProcess, make_topic: MakeTopic) -> None:
    topic = make_topic(1, 2)
    bodies = topic.fill(6000, [0])
    node = topic.leading_node(cluster)
    reader = Troubled(*piece_of(topic), lambda: cluster.kill_node(node))
    try:
        found = [row for batch in reader.batches() for row in batch.to_pylist()]
    finally:
        cluster.restart_node(node)
    assert [row["body"] for row in found] == bodies
    assert len({row["nsqd"] for row in found}) == 2


@pytest.mark.parametrize(("moment", "dies"), [("record_at", False), ("record_number", False), ("record_at", True)])
def test_a_leader_moves_or_dies_while_a_batch_by_time_is_planned(
    cluster: ClusterProcess,
    make_topic: MakeTopic,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    dies: bool,
) -> None:
    topic = make_topic(1, 2)
    topic.fill(300, [0], label="before")
    sleep(0.005)  # sleep: times are in milliseconds
    between = time.time_ns() // 1_000_000
    sleep(0.005)  # sleep: times are in milliseconds
    after = topic.fill(200, [0], label="after")
    node = topic.leading_node(cluster)
    ask, trouble = getattr(TopicLogs, moment), [cluster.kill_node if dies else cluster.move_leader]

    def ask_after_trouble(*question: Any) -> Any:
        if trouble:
            trouble.pop()(*([node] if dies else [topic.name, 0]))
        return ask(*question)

    monkeypatch.setattr(TopicLogs, moment, ask_after_trouble)
    reader = ReplayBatchReader(SourceOptions.parse({**topic.options, "startingTimestamp": str(between)}))
    try:
        assert bodies_of(reader, reader.partitions()) == after
    finally:
        if dies:
            cluster.restart_node(node)
    assert not trouble


def test_a_partition_without_a_leader_is_waited_for(cluster: ClusterProcess, make_topic: MakeTopic) -> None:
    topic = make_topic(1, 1)
    bodies = topic.fill(500, [0])
    found, piece = piece_of(topic)
    node = topic.leading_node(cluster)
    cluster.kill_node(node)
    job = spawn(lambda: rows(PieceReader(found, piece).batches()))
    holds(lambda: not job.ready(), 0.5)
    cluster.restart_node(node)
    assert job.get(timeout=WAIT) == bodies


def _raise(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def test_what_will_not_pass_is_raised_at_once(make_topic: MakeTopic) -> None:
    topic = make_topic(1)
    topic.fill(10, [0])
    reader = Troubled(*piece_of(topic), _raise(Unauthorized("no")))
    with pytest.raises(Unauthorized):
        list(reader.batches())
    assert reader.connections == 1


def test_what_does_not_pass_is_raised_after_a_while(make_topic: MakeTopic) -> None:
    topic = make_topic(1)
    topic.fill(10, [0])

    class Refused(PieceReader):
        def subscribe(self, route: Route, channel: str) -> ColumnSubscription:
            raise NotLeader

    with pytest.raises(NotLeader):
        list(Refused(*piece_of(topic), patience=0.3).batches())


def test_a_query_begins_when_all_partitions_can_be_asked(
    cluster: ClusterProcess, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = make_topic(2, 1)
    topic.fill(10)
    node = topic.leading_node(cluster, 1)
    cluster.kill_node(node)
    job = spawn(ReplayStreamReader(options(topic)).initialOffset)
    holds(lambda: not job.ready(), 0.3)
    cluster.restart_node(node)
    assert job.get(timeout=WAIT)["offsets"] == {topic.name: {"0": 0, "1": 0}}


def test_no_news_while_the_servers_cannot_be_asked(cluster: ClusterProcess, make_topic: MakeTopic) -> None:
    topic = make_topic(1, 1)
    topic.fill(10, [0])
    reader = ReplayStreamReader(options(topic))
    start = reader.initialOffset()
    node = topic.leading_node(cluster)
    cluster.kill_node(node)
    assert reader.latestOffset(start, ReadAllAvailable()) == start
    cluster.restart_node(node)
    until(lambda: reader.latestOffset(start, ReadAllAvailable()) != start)


@pytest.mark.parametrize(("registered", "attempts"), [(False, 3), (True, 2)])
def test_attempts_do_not_disturb_each_other(make_topic: MakeTopic, registered: bool, attempts: int) -> None:
    """Those on a channel that must be registered share it, and read around each other."""
    topic = make_topic(1, disable_channel_auto_create=registered)
    bodies = topic.fill(4000, [0])
    found, piece = piece_of(topic)
    jobs = [spawn(lambda: rows(PieceReader(found, piece).batches())) for _ in range(attempts)]
    joinall(jobs, timeout=30)
    assert [job.value for job in jobs] == [bodies] * attempts
    until(lambda: set(topic.channels(0)) == {"spark"})


def test_a_dead_attempt_that_still_holds_a_registered_channel(make_topic: MakeTopic) -> None:
    topic = make_topic(1, disable_channel_auto_create=True)
    bodies = topic.fill(4000, [0])
    found, piece = piece_of(topic, **{"nsq.heartbeat_interval": "1"})
    assert piece.route is not None
    zombie = PieceReader(found, piece).subscribe(piece.route, "spark")
    zombie.set_rdy(1000)
    assert zombie.fetch(2.0).count  # and neither finishes them, nor answers heartbeats
    assert rows(PieceReader(found, piece).batches()) == bodies
    zombie.abort()


def test_an_attempt_that_wakes_after_the_commit_disturbs_nobody(make_topic: MakeTopic) -> None:
    topic = make_topic(1)
    bodies = topic.fill(30_000, [0])
    found, piece = piece_of(topic)
    zombie = PieceReader(found, piece).batches()
    woken = rows(iter([next(zombie)]))
    reader = ReplayStreamReader(found)
    [again] = whole(reader)
    assert rows(reader.read(again)) == bodies
    reader.commit({"0": again.end})
    later = topic.fill(1000, [0], label="later")
    following = PieceReader(
        found, Piece(topic.name, 0, again.end, topic.stats(0)["backend_depth"], again.route)
    ).batches()
    assert woken + rows(zombie) == bodies
    assert rows(following) == later
    assert topic.channels(0)["spark"]["depth"] == len(later)


def test_retention_that_has_overtaken_a_query_is_told(cluster: ClusterProcess, make_topic: MakeTopic) -> None:
    topic = make_topic(1)
    bodies = topic.fill(100, [0])
    found, piece = piece_of(topic)
    cut = topic.stats(0)["backend_depth"] // 4
    cluster.forget_log(topic.name, 0, cut)
    lost = rf"topic '{topic.name}', partition 0: offsets 0 up to {cut} are lost: .*has overtaken.*; failOnDataLoss"
    with pytest.raises(DataLost, match=lost):
        list(PieceReader(found, piece).batches())
    reader = ReplayStreamReader(found)
    with pytest.raises(DataLost, match=lost):
        reader.latestOffset({"0": 0}, ReadAllAvailable())
    assert rows(PieceReader(options(topic, failOnDataLoss="false"), piece).batches()) == bodies[25:]
    reader = ReplayStreamReader(options(topic, failOnDataLoss="false"))
    assert reader.latestOffset({"0": 0}, ReadAllAvailable())["offsets"] == {topic.name: {"0": 4 * cut}}
    assert reader.latestOffset({"0": 0}, ReadMaxRows(10))["offsets"][topic.name]["0"] == cut + 10 * piece.end // 100
    with pytest.raises(DataLost):
        ReplayBatchReader(options(topic, startingOffsets='{"0": 0}')).partitions()
    batch = ReplayBatchReader(options(topic, startingOffsets='{"0": 0}', failOnDataLoss="false"))
    assert [(each.start, each.end) for each in batch.partitions()] == [(cut, 4 * cut)]  # type: ignore[attr-defined]


def made_anew(cluster: ClusterProcess, topic: Topic, count: int) -> None:
    """The topic is deleted and created again, with so many messages in its partition."""
    ask(f"{topic.lookupd}/topic/delete?topic={topic.name}&partition=**", "POST")
    cluster.create_topic(topic.name, 1, 1, multi_part=True, channels=["spark"])
    topic.fill(count, [0], label="anew")


@pytest.mark.parametrize("is_bounded", [False, True])
def test_a_topic_made_anew_that_is_shorter_than_what_was_read_is_data_lost(
    cluster: ClusterProcess,
    make_topic: MakeTopic,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_bounded: bool,
) -> None:
    monkeypatch.setattr("nsq_fast.spark.replay.logs.LATE_PATIENCE", 0.0)
    topic = make_topic(1)
    topic.fill(100, [0])
    end = topic.stats(0)["backend_depth"]
    made_anew(cluster, topic, 10)
    short = topic.stats(0)["backend_depth"]
    lost = rf"topic '{topic.name}', partition 0: offsets {short} up to {end} are lost: .* made anew.*failOnDataLoss"
    reader = ReplayStreamReader(options(topic))
    if is_bounded:
        reader.prepareForTriggerAvailableNow()
    with pytest.raises(DataLost, match=lost):
        reader.latestOffset({"0": end}, ReadAllAvailable())
    report = reader.reportLatestOffset()
    assert report is not None
    assert report["metrics"]["maxOffsetsBehindLatest"] == short
    with pytest.raises(DataLost, match=lost):  # as PySpark before 4.2 has the first batch after a restart
        reader.partitions({"0": end}, {"0": short})

    given = {} if is_bounded else {"minOffsetsPerTrigger": "1000", "maxTriggerDelay": "1h"}
    reader = ReplayStreamReader(options(topic, failOnDataLoss="false", **given))
    if is_bounded:
        reader.prepareForTriggerAvailableNow()
    caplog.clear()
    begin = reader.latestOffset({"0": end}, ReadAllAvailable())
    assert reader.partitions({"0": end}, begin) == []
    assert [record for record in caplog.records if "are lost" in record.getMessage()] == caplog.records[-1:]
    if not is_bounded:  # waits for more rows; what comes meanwhile reaches beyond what was read
        assert reader.latestOffset(begin, ReadAllAvailable()) == begin
        topic.fill(1000, [0], label="more")
        reader = ReplayStreamReader(options(topic, failOnDataLoss="false"))
    [piece] = reader.partitions(begin, reader.latestOffset(begin, ReadAllAvailable()))
    assert len(rows(reader.read(piece))) == (10 if is_bounded else 1010)


def test_a_log_that_is_short_for_a_moment_is_waited_for(make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = make_topic(1)
    topic.fill(100, [0])
    end = topic.stats(0)["backend_depth"]
    whole = TopicLogs.logs
    late = iter([10, 10, 10])

    def logs(self: TopicLogs) -> dict[int, Log]:
        return {each: log._replace(end=next(late, log.end)) for each, log in whole(self).items()}

    monkeypatch.setattr(TopicLogs, "logs", logs)
    start = {"offsets": {topic.name: {"0": end}}}
    for reader in (ReplayStreamReader(options(topic)), ReplayStreamReader(options(topic))):
        assert reader.latestOffset(start, ReadAllAvailable()) == start
    late = iter([10, 10, 10])
    reader.prepareForTriggerAvailableNow()
    assert reader.latestOffset(start, ReadAllAvailable()) == start


def test_a_log_that_can_be_had_from_a_later_record_on_only_is_told(
    make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a real nsqd, which cleans its log of publishes earlier than the data: see ``TopicLogs``."""
    topic = make_topic(1)
    bodies = topic.fill(100, [0])
    found, piece = piece_of(topic)
    first = 40 * piece.end // 100
    find, set_position = TopicLogs.record_at, TopicLogs.set_position
    monkeypatch.setattr(TopicLogs, "record_at", lambda logs, log, part, at: find(logs, log, part, max(at, first)))
    monkeypatch.setattr(
        TopicLogs,
        "set_position",
        lambda logs, nsqd, part, name, at: set_position(logs, nsqd, part, name, max(at, first)),
    )
    with pytest.raises(DataLost, match=f"offsets 0 up to {first} are lost"):
        list(PieceReader(found, piece).batches())
    assert rows(PieceReader(options(topic, failOnDataLoss="false"), piece).batches()) == bodies[40:]
    asked = {"startingOffsets": '{"0": 0}'}
    with pytest.raises(DataLost, match=f"offsets 0 up to {first} are lost"):
        ReplayBatchReader(options(topic, **asked)).partitions()
    assert read(topic) == bodies[40:]  # from the earliest on


def test_retention_within_a_piece(cluster: ClusterProcess, make_topic: MakeTopic) -> None:
    topic = make_topic(1)
    topic.fill(6000, [0])
    found, piece = piece_of(topic)

    def forget() -> None:
        cluster.forget_log(topic.name, 0, piece.end // 2)
        raise ConnectionLost("and gone")

    with pytest.raises(DataLost, match="partition 0"):
        list(Troubled(found, piece, forget).batches())


def test_a_log_that_ends_too_early_is_told(make_topic: MakeTopic) -> None:
    topic = make_topic(1)
    bodies = topic.fill(10, [0])
    found, piece = piece_of(topic)
    longer = Piece(topic.name, 0, 0, piece.end + 500, piece.route)
    with pytest.raises(DataLost, match=f"offsets {piece.end} up to {piece.end + 500} are lost: the log ends"):
        list(PieceReader(found, longer, patience=0.5).batches())
    tolerant = options(topic, failOnDataLoss="false")
    assert rows(PieceReader(tolerant, longer, patience=0.5).batches()) == bodies


def test_an_end_that_is_not_stored_yet_is_waited_for(make_topic: MakeTopic) -> None:
    topic = make_topic(1)
    bodies = topic.fill(10, [0])
    found, piece = piece_of(topic)
    longer = Piece(topic.name, 0, 0, piece.end + 1, piece.route)
    job = spawn(lambda: rows(PieceReader(found, longer).batches()))
    holds(lambda: not job.ready(), 0.2)
    topic.publish(0, [b"late"])
    assert job.get(timeout=WAIT) == [*bodies, b"late"]


def test_an_unknown_topic(cluster: ClusterProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsq_fast.spark.discovery.MISSING_PATIENCE", 0.5)
    topic = Topic("nowhere", str(cluster.lookupds[0].http))
    with pytest.raises(LookupFailed, match="nowhere"):
        ReplayStreamReader(options(topic)).initialOffset()


def test_nsqds_without_lookup(cluster: ClusterProcess, make_topic: MakeTopic) -> None:
    topic = make_topic(2, 2)
    bodies = topic.fill(2000)
    given = {
        "topic": topic.name,
        "channel": "spark",
        "nsqd_tcp_addresses": ",".join(str(nsqd.tcp) for nsqd in cluster.nsqds),
        "nsqd_http_addresses": ",".join(str(nsqd.http) for nsqd in cluster.nsqds),
        "startingOffsets": "earliest",
    }
    reader = ReplayStreamReader(SourceOptions.parse(given))
    pieces = whole(reader)
    cluster.move_leader(topic.name, 0)
    assert sorted(bodies_of(reader, pieces)) == bodies


def test_servers_are_asked_for_news_now_and_then(make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = make_topic(1)
    reader = ReplayStreamReader(options(topic))
    start = reader.initialOffset()
    logs = reader.topics[topic.name]._topic_logs
    asked = []
    original = logs.logs
    logs.logs = lambda: (asked.append(1), original())[1]  # type: ignore[method-assign,func-returns-value]
    for interval, most in ((3600.0, 1), (0.0, 20)):
        monkeypatch.setattr("nsq_fast.spark.replay.stream.POLL_INTERVAL", interval)
        asked.clear()
        for _ in range(20):
            assert reader.latestOffset(start, ReadAllAvailable()) == start
        assert len(asked) <= most
    assert len(asked) == 20


# The parts of the replayable reader that ask nobody: putting a range together, positions, shares, cuts, times.


NSQD = Nsqd(Address("h", 1), Endpoint("http", Address("h", 2)))

SIZES = [35, 31, 40, 31, 33, 50, 31, 36, 42, 31]

OFFSETS = [sum(SIZES[:n]) for n in range(len(SIZES))]

END = sum(SIZES)


def columns(rows: Iterable[int]) -> Columns:
    """Records of the log above, by their places."""
    frames = [encode_message(n, 1, b"%016d" % n, b"x", offset=OFFSETS[n], raw_size=SIZES[n]) for n in rows]
    return ColumnReader(detail=True).feed(b"".join(frames))


def rows_of(runs: Iterable[Run]) -> list[int]:
    """The places of the records in runs."""
    return [int(run.columns.ids[16 * n : 16 * n + 16]) for run in runs for n in range(run.first, run.stop)]


def assembled(assembly: Assembly, *chunks: Iterable[int]) -> list[int]:
    return [row for chunk in chunks for row in rows_of(assembly.add(columns(chunk)))]


def test_what_was_let_go_has_to_come_again() -> None:
    assembly = Assembly(0, END)
    assembled(assembly, range(5, 10))
    assembly.forget_held()
    assert assembled(assembly, range(5)) == list(range(5))
    assert not assembly.is_complete


def test_records_that_do_not_lie_on_the_others_are_no_continuation() -> None:
    assembly = Assembly(OFFSETS[3] + 5, END)
    assert assembled(assembly, [3, 4]) == []
    assert assembly.expected == OFFSETS[3] + 5


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=8), max_size=30))
def test_whatever_comes_each_record_is_handed_on_once_and_in_order(chunks: list[list[int]]) -> None:
    assembly = Assembly(OFFSETS[1], OFFSETS[9])
    got = assembled(assembly, *chunks)
    assert got == list(range(1, 1 + len(got)))
    got += assembled(assembly, range(10))
    assert got == list(range(1, 9))
    assert assembly.is_complete


OPTIONS = SourceOptions.parse({"topic": "t", "channel": "c", "lookupd_http_addresses": "a:4161,b:4161"})

IDENTITY = Identity(OPTIONS.server_names, "c")


def at(*offsets: int, **more: Any) -> Position:
    """A position in the topic of these options."""
    return Position({"t": dict(enumerate(offsets))}, **more)


def test_a_position_is_an_object_by_topic_and_partition() -> None:
    position = Position({"u": {10: 7, 2: 5}, "t": {0: 1}}, identity=IDENTITY)
    assert json.dumps(position.to_json()) == (
        '{"channel": "c", "servers": ["a:4161", "b:4161"], "offsets": {"t": {"0": 1}, "u": {"2": 5, "10": 7}}}'
    )
    assert Position.from_json(position.to_json(), OPTIONS) == position


def test_the_first_batch_begins_where_its_end_says() -> None:
    first, found_again = at(5, 6, is_initial=True), at(50, 60, is_initial=True)
    end = Position.from_json(first.until({"t": {0: 9, 1: 6}}).to_json(), OPTIONS)
    assert start_of(found_again, end) == {"t": {0: 5, 1: 6}}
    assert start_of(end, end.until({"t": {0: 12, 1: 8}})) == end.offsets
    assert end.until({"t": {0: 12, 1: 8}}) == at(12, 8)


def test_an_empty_batch_ends_where_it_begins() -> None:
    for position in (at(5), at(5, is_initial=True), at(5, begin={"t": {0: 1}})):
        assert position.until({"t": {0: 5}}) is position
    initial = at(5, is_initial=True)
    assert start_of(at(7, is_initial=True), initial) == {"t": {0: 5}}
    assert start_of(initial, initial.until({"t": {0: 8}})) == {"t": {0: 5}}


@pytest.mark.parametrize(
    "found",
    [
        {"j": "x", "slots": {}},
        {"0": "x"},
        {"0": 1, "begin": [1]},
        {"0": None},
        {"offsets": [1]},
        {"offsets": {"t": 5}},
        {"offsets": {}, "channel": "c"},
    ],
)
def test_an_offset_of_something_else_is_refused(found: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="checkpointLocation"):
        Position.from_json(found, OPTIONS)


def test_an_offset_of_an_older_version_is_read_and_completed() -> None:
    old = Position.from_json({"0": 9, "1": 6, "begin": {"0": 5, "1": 6}}, OPTIONS)
    assert old == at(9, 6, begin={"t": {0: 5, 1: 6}})
    old.check(IDENTITY, OPTIONS)
    assert old._replace(identity=IDENTITY).until({"t": {0: 10, 1: 6}}).to_json() == {
        "channel": "c",
        "servers": ["a:4161", "b:4161"],
        "offsets": {"t": {"0": 10, "1": 6}},
    }
    several = SourceOptions.parse({"topic": "t,u", "channel": "c", "lookupd_http_addresses": "a"})
    with pytest.raises(ConfigError, match="once with that topic alone"):
        Position.from_json({"0": 9}, several)


@pytest.mark.parametrize(
    ("position", "match"),
    [
        (Position({"other": {0: 5}}, identity=IDENTITY), "made with the topic 'other', which the options do not name"),
        (at(5, identity=Identity(IDENTITY.servers, "d")), "made with channel='d', and the option is channel='c'"),
        (at(5, identity=Identity(("x:4161",), "c")), "made with the servers x:4161, and the options name a:4161, b"),
    ],
)
def test_the_position_of_another_query_is_refused(position: Position, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        position.check(IDENTITY, OPTIONS)


def test_a_server_more_or_less_is_the_same_cluster() -> None:
    at(5, identity=Identity(("b:4161", "x:4161"), "c")).check(IDENTITY, OPTIONS)


def test_topics_by_pattern_are_those_of_a_checkpoint() -> None:
    pattern = SourceOptions.parse({"topicPattern": "t|u.*", "channel": "c", "lookupd_http_addresses": "a"})
    Position({"t": {0: 5}, "unity": {0: 5}}).check(IDENTITY, pattern)
    with pytest.raises(ConfigError, match="made with the topic 'tt'"):
        Position({"tt": {0: 5}}).check(IDENTITY, pattern)


def log(messages: int, start: int = 0) -> Log:
    return Log(start, 10 * messages, messages, NSQD, False, False, False, {})


@given(st.dictionaries(st.integers(0, 9), st.integers(0, 10**6), min_size=1), st.integers(1, 10**6))
def test_shares_are_fair_and_use_the_limit_up(rows: dict[int, int], limit: int) -> None:
    shares = share_out(rows, limit)
    assert sum(shares.values()) == min(limit, sum(rows.values()))
    assert all(0 <= shares[partition] <= rows[partition] for partition in rows)
    for partition, found in rows.items():
        assert shares[partition] >= limit * found // max(sum(rows.values()), limit)


def ranges(starts: dict[int, int], ends: dict[int, int], minimum: int | None) -> list[tuple[int, int, int]]:
    found = pieces({"t": starts}, {"t": ends}, {}, minimum)
    assert {piece.topic for piece in found} <= {"t"}
    return [(piece.partition, piece.start, piece.end) for piece in found]


@given(st.integers(1, 20), st.dictionaries(st.integers(0, 5), st.integers(1, 10**6), min_size=1))
def test_pieces_are_at_least_so_many_and_make_up_the_whole(minimum: int, ends: dict[int, int]) -> None:
    found = ranges({}, ends, minimum)
    if min(ends.values()) >= minimum:
        assert len(found) >= minimum
    for partition, end in ends.items():
        own = [(start, stop) for number, start, stop in found if number == partition]
        assert [start for start, _ in own] == [0, *(stop for _, stop in own[:-1])]
        assert own[-1][1] == end


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(-1, 52), st.integers(0, 5))
def test_the_first_record_at_a_time_is_found(times: list[int], wanted: int, forgotten: int) -> None:
    times.sort()
    records = [Record(10 * n, n + 1, at) for n, at in enumerate(times)][min(forgotten, len(times) - 1) :]
    by_number = {record.number: record for record in records}
    found = first_at(by_number.get, records[0], log(len(times)), wanted)
    assert found == next((record for record in records if record.timestamp >= wanted), None)


def test_a_channel_of_a_reader_has_a_name_of_its_own() -> None:
    assert own_channel("spark").startswith("spark.")
    assert own_channel("spark") != own_channel("spark")
    for name in ("c" * 64, "c#ephemeral"):
        own = own_channel(name)
        assert len(own) <= 64
        assert own.endswith("#ephemeral")
        assert own.count("#") == 1
