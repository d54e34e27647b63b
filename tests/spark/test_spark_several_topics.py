"""Streams of several topics, limits in bytes, batches that wait for rows; and what is said while nobody answers."""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.http_server import Question, scripted_http
from support.journal import CHANNEL, Query, Server
from support.spark_replay import MakeTopic
from support.waiting import until

from nsq_fast.broker import BrokerProcess, ClusterProcess
from nsq_fast.errors import HttpError, JournalError, LookupFailed
from nsq_fast.spark import streams as reminder
from nsq_fast.spark.discovery import TopicFinder, discover, retried
from nsq_fast.spark.journal import JournalBatchReader
from nsq_fast.spark.options import SourceOptions
from nsq_fast.spark.replay import ReplayBatchReader, ReplayStreamReader
from nsq_fast.spark.source import choose
from nsq_fast.spark.streams import Pace, Reminder, Throughput


class Stream:
    """A query of the replayable reader without Spark, that goes on from its last offset."""

    def __init__(self, cluster: ClusterProcess, start: dict[str, Any] | None = None, **options: str) -> None:
        given = {"channel": "spark", "lookupd_http_addresses": str(cluster.lookupds[0].http)}
        self.reader = ReplayStreamReader(SourceOptions.parse({**given, "startingOffsets": "earliest", **options}))
        self.offset = start or self.reader.initialOffset()

    def batch(self) -> list[bytes]:
        """The bodies of the next batch."""
        end = self.reader.latestOffset(self.offset, self.reader.getDefaultReadLimit())
        found = [
            body
            for piece in self.reader.partitions(self.offset, end)
            for rows in self.reader.read(piece)
            for body in rows["body"].to_pylist()
        ]
        self.offset = end
        return found

    def until(self, bodies: list[bytes]) -> None:
        """Batches until these have come, and nothing else."""
        found: list[bytes] = []
        until(lambda: (found.extend(self.batch()), len(found) >= len(bodies))[1], timeout=30, every=0.05)
        assert sorted(found) == sorted(bodies)


def test_a_stream_of_two_topics_with_a_limit(cluster: ClusterProcess, make_topic: MakeTopic) -> None:
    first, second = make_topic(name="two_a"), make_topic(name="two_b")
    bodies = first.fill(30, label="a") + second.fill(10, label="b")
    stream = Stream(cluster, topic="two_a,two_b", maxOffsetsPerTrigger="8")
    taken = [stream.batch() for _ in range(5)]
    assert [len(each) for each in taken] == [8] * 5
    assert sorted(body for each in taken for body in each) == sorted(bodies)
    assert all(sum(body.startswith(b"b") for body in each) == 2 for each in taken)  # in proportion
    assert stream.offset["offsets"].keys() == {"two_a", "two_b"}


def test_available_now_stops_where_it_began_although_more_is_published(
    cluster: ClusterProcess, make_topic: MakeTopic
) -> None:
    topic = make_topic(name="available")
    topic.fill(25, label="first")
    stream = Stream(cluster, topic="available", maxOffsetsPerTrigger="10")
    stream.reader.prepareForTriggerAvailableNow()
    taken: list[bytes] = []
    while len(taken) < 100 and (rows := stream.batch()):
        taken += rows
        topic.fill(20, label=f"later{len(taken)}")
    assert (len(taken), {body[:5] for body in taken}) == (25, {b"first"})


def test_a_topic_and_a_partition_that_appear_are_read_from_their_beginning(
    cluster: ClusterProcess, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsq_fast.spark.discovery.TOPICS_AGE", 0.1)
    first = make_topic(name="appear_a")
    make_topic(name="other")
    stream = Stream(cluster, topicPattern="appear_.*", startingOffsets="latest")
    assert stream.offset["offsets"].keys() == {"appear_a"}
    second = make_topic(name="appear_b")
    stream.until(second.fill(10, label="b") + first.fill(10, label="a"))
    going_on = Stream(cluster, stream.offset, topicPattern="appear_.*")
    going_on.until(make_topic(name="appear_c").fill(10, label="c"))
    assert stream.reader.options.topic_pattern == "appear_.*"


def test_a_limit_in_bytes_makes_progress_record_by_record(cluster: ClusterProcess, make_topic: MakeTopic) -> None:
    topic = make_topic(name="bytes")
    bodies = topic.fill(20, size=100)
    stream = Stream(cluster, topic="bytes", maxBytesPerTrigger="300")
    sizes = []
    found: list[bytes] = []
    while len(found) < 20:
        batch = stream.batch()
        sizes.append(len(batch))
        found += batch
    assert sorted(found) == sorted(bodies)
    assert max(sizes) <= 4  # 300 bytes begin in so many records of more than 100, of two partitions
    assert stream.batch() == []


def test_a_leader_that_dies_while_rows_are_counted_is_waited_for(
    cluster: ClusterProcess, make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    topic = make_topic(name="dies_counted")
    bodies = topic.fill(20)
    stream = Stream(cluster, topic="dies_counted", maxOffsetsPerTrigger="8")
    taken = stream.batch()
    node = topic.leading_node(cluster)
    with monkeypatch.context() as patched:
        # Who leads is known, and about to be wrong.
        patched.setattr("nsq_fast.spark.replay.stream.POLL_INTERVAL", 3600.0)
        cluster.kill_node(node)
        try:
            assert stream.batch() == []
        finally:
            cluster.restart_node(node)
    (warning,) = [each.getMessage() for each in caplog.records if "no news" in each.getMessage()]
    assert "/message/get" in warning
    stream.until([each for each in bodies if each not in taken])


def test_an_old_checkpoint_is_read_on_and_completed(cluster: ClusterProcess, make_topic: MakeTopic) -> None:
    topic = make_topic(name="old")
    topic.fill(10)
    stream = Stream(cluster, topic="old")
    stream.batch()
    old = stream.offset["offsets"]["old"]
    going_on = Stream(cluster, old, topic="old")
    assert going_on.batch() == []
    assert going_on.offset == old  # no batch for it alone
    going_on.until(topic.fill(4, label="new"))
    assert (going_on.offset["channel"], going_on.offset["offsets"].keys()) == ("spark", {"old"})


def test_a_batch_waits_for_its_fewest_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("nsq_fast.spark.streams.time.monotonic", lambda: clock[0])
    pace = Pace(SourceOptions.parse({**AWAY, "minOffsetsPerTrigger": "10", "maxTriggerDelay": "60s"}))
    assert not pace.is_due(9)
    assert pace.is_due(10)
    clock[0] += 59
    assert not pace.is_due(9)
    clock[0] += 2
    assert pace.is_due(9)
    assert not pace.is_due(9)


def test_a_stream_waits_for_its_fewest_rows(cluster: ClusterProcess, make_topic: MakeTopic) -> None:
    topic = make_topic(name="fewest")
    stream = Stream(cluster, topic="fewest", minOffsetsPerTrigger="12")
    first = topic.fill(8, label="a")
    for _ in range(3):
        assert stream.batch() == []
    stream.until(first + topic.fill(8, label="b"))


# The journalled reader


@pytest.mark.parametrize("server", ["ours", "real"], indirect=True)
def test_a_journalled_stream_of_two_topics(server: Server, tmp_path: Path) -> None:
    bodies = [body for name in ("pay", "refund") for body in server.publish(50, name, topic=name)]
    query = Query(tmp_path / "journal", {**server.options, "topic": "pay,refund", "columns": "topic,body"})
    until(lambda: query.plan() and sum(query.planned["slots"].values()) == 100)  # type: ignore[index]
    assert set(query.planned["slots"]) == {f"pay/{server.tcp}", f"refund/{server.tcp}"}  # type: ignore[index]
    first = query.run()
    assert sorted(first) == sorted(bodies)
    assert sorted(query.run()) == sorted(first)  # again, from the journal
    query.done(first)
    query.change(topic="pay")
    with pytest.raises(JournalError, match=r"is of topic pay,refund, .* cannot be used for pay, .* not read refund"):
        query.plan()


@pytest.mark.parametrize("server", ["ours", "real"], indirect=True)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"topic": "a"}, {"topic": "a,b"}),
        ({"topic": "a"}, {"topicPattern": "[ab]"}),
        ({"topic": "a,b"}, {"topic": "b,a"}),
        ({"topic": "a,b"}, {"topicPattern": "[a-z]"}),
        ({"topicPattern": "[ab]"}, {"topic": "b,a"}),
        ({"topicPattern": "a.?"}, {"topicPattern": "[ab]"}),
    ],
    ids=lambda options: ",".join(f"{name}={value}" for name, value in options.items()),
)
def test_topics_of_a_journalled_checkpoint_may_change(
    server: Server, tmp_path: Path, before: dict[str, str], after: dict[str, str]
) -> None:
    """The batch that was planned before is run again as it was; what is added is read from its beginning."""
    bodies = server.publish(50, "a-0-", topic="a")
    query = Query(tmp_path / "journal", {**server.options, **before, "failOnMissingTopic": "false"})
    query.batch()
    bodies += server.publish(50, "a-1-", topic="a")
    assert query.plan()
    planned = query.planned
    bodies += server.publish(50, "b-1-", topic="b")
    query.change(**after)
    assert query.planned == planned
    query.done(query.run())
    until(lambda: (query.batch(), len(query.rows) >= len(bodies))[1], timeout=30, every=0.05)
    assert sorted(query.rows) == sorted(bodies)


def test_rows_of_a_topic_among_others_are_adopted_by_who_reads_all_of_them(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bodies = server.publish(50, "a-", topic="a") + server.publish(50, "b-", topic="b")
    old = Query(tmp_path, {**server.options, "topic": "a,b"})
    until(lambda: old.plan() and len(old.planned["slots"]) == 2)  # type: ignore[index]
    assert len(old.run()) == 100
    assert not Query(tmp_path, {**server.options, "topic": "a"}).plan()
    assert "has rows of topic b, too, which topic a does not name" in caplog.text
    query = Query(tmp_path, {**server.options, "topicPattern": "[a-z]"})
    assert query.plan()  # and is not run: what was adopted is left to the next one
    options = {**server.options, "failOnMissingTopic": "false"}
    assert sorted(Query(tmp_path, {**options, "topic": "b,c,a"}).batch()) == sorted(bodies)


# What is said while nobody answers


def test_an_unknown_topic_of_a_stream_is_told_once_and_in_the_progress(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    query = Query(tmp_path / "journal", {**server.options, "topic": "nowhere", "failOnMissingTopic": "false"})
    for _ in range(3):
        assert not query.plan()
    told = [each for each in caplog.messages if "topic 'nowhere' is not known to nsqd" in each]
    assert [each.rpartition("? ")[2] for each in told] == ["Nothing is read of it until it is there"]
    assert query.reader.reportLatestOffset()["metrics"]["unknownTopics"] == ["nowhere"]  # type: ignore[index]
    server.client.create_topic("nowhere")
    until(lambda: (query.plan(), "unknownTopics" not in query.reader.backlog.metrics())[1], timeout=30)
    assert any("over after" in each for each in caplog.messages)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsq_fast.spark.discovery.MISSING_PATIENCE", 0.2)


MISSING = r"topic 'nowhere' is not known to .*failOnMissingTopic=false goes on without it"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("server", ["ours"], indirect=True)
def test_a_missing_topic_of_the_journalled_reader(server: Server, tmp_path: Path) -> None:
    """A new stream fails, and a batch; a stream that has begun waits."""
    given = {**server.options, "topic": "nowhere,orders"}
    query = Query(tmp_path / "s", given)
    query.reader.prepareForTriggerAvailableNow()
    with pytest.raises(LookupFailed, match=MISSING):
        query.plan()
    options = {**given, "channel": CHANNEL, "columns": "body"}
    with pytest.raises(LookupFailed, match=MISSING):
        JournalBatchReader(SourceOptions.parse(options)).partitions()
    bodies = server.publish(3)
    options["failOnMissingTopic"] = "false"
    reader = JournalBatchReader(SourceOptions.parse(options))
    found = [row for task in reader.partitions() for rows in reader.read(task) for row in rows["body"].to_pylist()]
    assert sorted(found) == bodies
    query.change(failOnMissingTopic="false")
    assert sorted(query.batch()) == bodies
    query.change(failOnMissingTopic="true")
    assert not query.plan()


@pytest.mark.usefixtures("impatient")
def test_a_missing_topic_of_the_replayable_reader(cluster: ClusterProcess, make_topic: MakeTopic) -> None:
    with pytest.raises(LookupFailed, match=MISSING):
        Stream(cluster, topic="nowhere")
    bodies = make_topic(name="there").fill(10)
    given = {"channel": "spark", "lookupd_http_addresses": str(cluster.lookupds[0].http), "topic": "nowhere,there"}
    with pytest.raises(LookupFailed, match=MISSING):
        ReplayBatchReader(SourceOptions.parse(given)).partitions()
    pieces = ReplayBatchReader(SourceOptions.parse({**given, "failOnMissingTopic": "false"})).partitions()
    assert {piece.topic for piece in pieces} == {"there"}
    stream = Stream(cluster, topic="nowhere,there", failOnMissingTopic="false")
    stream.reader.prepareForTriggerAvailableNow()
    stream.until(bodies)
    assert stream.batch() == []


@pytest.mark.parametrize("given", [{"topic": "nowhere"}, {"topicPattern": "nowhere.*"}], ids=["topic", "pattern"])
@pytest.mark.parametrize("family", ["original", "redesigned", "away"])
@pytest.mark.parametrize("way", ["lookup", "direct"])
@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "batch"])
def test_auto_fails_where_it_cannot_tell(
    cluster: ClusterProcess,
    broker: BrokerProcess,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, str],
    family: str,
    way: str,
    is_stream: bool,
) -> None:
    for module in ("discovery", "source"):
        monkeypatch.setattr(f"nsq_fast.spark.{module}.retried", lambda attempt, timeout=0.0: retried(attempt, 0.1))
    monkeypatch.setattr("nsq_fast.spark.source.TIMEOUT", 0.1)
    servers = {"original": broker, "redesigned": cluster}.get(family)
    nsqds = servers.nsqds if servers else []
    if way == "lookup":
        lookupd = {"original": str(broker.lookupd.http), "redesigned": str(cluster.lookupds[0].http)}
        options = {"lookupd_http_addresses": lookupd.get(family, "127.0.0.1:1")}
    else:
        options = {
            "nsqd_tcp_addresses": ",".join(str(each.tcp) for each in nsqds) or "127.0.0.1:1",
            "nsqd_http_addresses": ",".join(str(each.http) for each in nsqds) or "127.0.0.1:1",
        }
    known = r"nowhere.*[cC]reate .* set reader|127\.0\.0\.1:1"
    late = "no lookupd answered for topic 'nowhere'"  # on a busy machine
    with pytest.raises((LookupFailed, HttpError), match=f"{known}|{late}"):
        choose(SourceOptions.parse({**given, **options, "channel": "c"}), is_stream=is_stream)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


AWAY = {"lookupd_http_addresses": "127.0.0.1:1,127.0.0.1:2", "topic": "a,b", "channel": CHANNEL}


def test_lookup_that_is_away_is_one_warning_of_the_journalled_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nsq_fast.spark.journal.stream.PATIENCE", 0.2)
    monkeypatch.setattr("nsq_fast.spark.journal.plan.STATS_INTERVAL", 0.0)
    query = Query(tmp_path, AWAY)
    assert query.offset is not None
    for _ in range(4):
        assert query.reader.latestOffset(query.offset) == query.offset
    (told,) = warnings(caplog)
    assert "nothing is read until a server answers, of topic a, b" in told
    assert "127.0.0.1:1" in told
    assert "127.0.0.1:2" in told
    metrics = query.reader.backlog.metrics()
    assert metrics["lookupAgeSeconds"] > 0.2
    assert metrics["unknownTopics"] == ["a", "b"]


def test_lookup_that_is_away_is_one_warning_of_the_replayable_reader(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nsq_fast.spark.replay.logs.discover", partial(discover, timeout=0.2))
    monkeypatch.setattr("nsq_fast.spark.replay.stream.POLL_INTERVAL", 0.0)
    reader = ReplayStreamReader(SourceOptions.parse(AWAY))
    start = {"channel": CHANNEL, "servers": ["127.0.0.1:1"], "offsets": {"a": {"0": 0}, "b": {"0": 0}}}
    for _ in range(4):
        assert reader.latestOffset(start, reader.getDefaultReadLimit()) == start
    (told,) = warnings(caplog)
    assert "no news from the servers of topic a, b" in told


def test_a_state_that_lasts_is_told_every_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [0.0]
    monkeypatch.setattr("nsq_fast.spark.streams.time.monotonic", lambda: clock[0])
    told = Reminder(logging.getLogger("test"))
    for second in range(0, 130, 10):
        clock[0] = float(second)
        told.warn("it rains", "it rains")
    assert caplog.messages == ["it rains", "it rains (for 60 s now)", "it rains (for 120 s now)"]
    told.over("it rains")
    told.over("it rains")
    assert caplog.messages[3:] == ["it rains: over after 120 s"]
    assert reminder.INTERVAL == 60.0


def test_the_rate_is_over_the_last_minute() -> None:
    throughput = Throughput()
    throughput.begin(0.0)
    for second in range(1, 301):
        throughput.add(100 if second <= 200 else 700, float(second))
        if second == 2:
            assert throughput.rate(2.0) == 100.0
    assert throughput.rate(300.0) == 700.0


def test_a_batch_of_an_hour_counts_over_its_hour() -> None:
    throughput = Throughput()
    throughput.begin(0.0)
    throughput.add(10, 10.0)
    throughput.add(3_600_000, 3610.0)
    assert throughput.rate(3610.0) == 1000.0


def test_a_pattern_that_nothing_matches_is_told(cluster: ClusterProcess, caplog: pytest.LogCaptureFixture) -> None:
    given = {"channel": "c", "topicPattern": "no_such_.*", "lookupd_http_addresses": str(cluster.lookupds[0].http)}
    finder = TopicFinder(SourceOptions.parse(given))
    assert finder.topics(10.0) == finder.topics() == ()
    assert len([each for each in caplog.messages if "matches it; they are looked for again" in each]) == 1


def test_a_lookup_service_may_take_its_time_for_a_pattern_while_one_is_away() -> None:
    def slow(question: Question) -> None:
        time.sleep(0.4)  # sleep: longer than a lookup that nobody waits for would be tried again
        question.answer({"topics": ["orders", "others"]})

    with scripted_http(slow) as [lookupd]:
        servers = f"127.0.0.1:1,{lookupd.address}"
        given = {"channel": "c", "topicPattern": "order.*", "lookupd_http_addresses": servers}
        assert TopicFinder(SourceOptions.parse(given)).topics() == ("orders",)


def test_lookup_services_that_are_all_away_are_an_error_at_first() -> None:
    given = {"channel": "c", "topicPattern": ".*", "lookupd_http_addresses": "127.0.0.1:1"}
    finder = TopicFinder(SourceOptions.parse(given))
    with pytest.raises((LookupFailed, HttpError), match=r"127\.0\.0\.1:1"):
        finder.topics(0.2)
