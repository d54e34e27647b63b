"""Tasks of the journalled reader against our nsqd and the real one: whatever dies where, nothing is lost or doubled.

The calls are those of Spark, made one by one. Faults are in readers derived from ours.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from support.journal import CHANNEL, TOPIC, Attempt, Query, Server, reading_once
from support.journal_places import Placed
from support.s3 import BUCKET, REGION
from support.servers import SERVERS, find_server
from support.spark_ledger import account
from support.spark_replay import MakeTopic
from support.waiting import WAIT, until

from nsq_fast._frame import join_columns
from nsq_fast.broker import Broker
from nsq_fast.broker.process import ClusterProcess
from nsq_fast.client.admin import NsqdHTTPClient
from nsq_fast.columns import ColumnSubscription
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import (
    ConfigError,
    ConnectFailed,
    ConnectionLost,
    JournalClosed,
    JournalError,
    JournalMissing,
    JournalTaken,
    LookupFailed,
)
from nsq_fast.spark import lags
from nsq_fast.spark.journal import JournalBatchReader, JournalStreamReader, collect
from nsq_fast.spark.journal.collect import Collector
from nsq_fast.spark.journal.files import Storage, open_storage
from nsq_fast.spark.journal.plan import Backlogs
from nsq_fast.spark.options import ObjectStore, SourceOptions
from nsq_fast.spark.versions import ReadAllAvailable

QUICK = {"nsq.msg_timeout": "2"}  # half of it may pass before what came is kept: also on a busy machine
FILES, OBJECTS = "files", "objects"
each_storage = pytest.mark.parametrize(
    ("server", "journal"), [("ours", FILES), ("real", FILES), ("ours", OBJECTS)], indirect=True
)
each_storage_of_ours = pytest.mark.parametrize(
    ("server", "journal"), [("ours", FILES), ("ours", OBJECTS)], indirect=True
)
ROWS = 6_000


class Journal(NamedTuple):
    """Where a journal lies, and the options that say so besides."""

    path: str
    options: dict[str, str]

    def below(self, path: str) -> Storage:
        """A place of it."""
        return open_storage(path, ObjectStore(*self.options.values()))


@pytest.fixture
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Journal:
    """A folder, or a place in an object store."""
    if getattr(request, "param", FILES) == FILES:
        return Journal(str(tmp_path / "journal"), {})
    server = request.getfixturevalue("s3")
    return Journal(f"s3://{BUCKET}/{uuid.uuid4().hex}", {"journalEndpoint": server.url, "journalRegion": REGION})


@pytest.fixture
def query(server: Server, journal: Journal) -> Query:
    return Query(journal.path, {**server.options, **journal.options})


class Stop(Exception):
    """The fault."""


def cut(subscription: Any) -> None:
    """End the connection, from whatever thread: a subscription's own methods belong to the thread that opened it."""
    if subscription.is_open:
        with suppress(OSError):
            subscription._transport.sock.shutdown(socket.SHUT_RDWR)


def failing(place: str) -> type[JournalStreamReader]:
    def fail(_: Any) -> None:
        raise Stop(place)

    return reading_once(place, fail)


def dying(place: str) -> type[JournalStreamReader]:
    """Its connections are cut, and say nothing."""

    def silent(*_: Any) -> None:
        raise ConnectionLost("dead")

    def die(collector: Any) -> None:
        collector.finish = silent
        for connection in collector._connections:
            cut(connection.subscription)
        raise Stop(place)

    return reading_once(place, die)


def die_at(place: str, query: Query, task: Any) -> None:
    with pytest.raises((Stop, ConnectionLost)):
        query.run_task(task, dying(place))


# Without faults


@each_storage
def test_messages_come_once_and_a_replay_gives_the_same_in_the_same_order(server: Server, query: Query) -> None:
    """It asks no server."""
    bodies = server.publish(ROWS)
    query.plan()
    first = query.run()
    account(bodies, first).check()
    assert server.depth() == (0, 0, 0)
    server.close()
    query.start()
    assert query.run() == first


def test_a_limit_is_kept_to_the_row_and_nothing_is_left_in_flight(server: Server, tmp_path: Path) -> None:
    options = {**server.options, "maxOffsetsPerTrigger": "2600", "minPartitions": "2"}
    query = Query(tmp_path / "journal", options)
    bodies = server.publish(ROWS)
    sizes = []
    while rows := query.batch():
        sizes.append(len(rows))
        assert server.depth() == (ROWS - sum(sizes), 0, 0)
    assert sizes == [2600, 2600, 800]
    assert not query.plan()
    account(bodies, query.rows).check()


def test_once_reads_all_there_is_whatever_the_limit(server: Server, tmp_path: Path) -> None:
    query = Query(tmp_path / "journal", {**server.options, "maxOffsetsPerTrigger": "100"})
    server.publish(700)
    assert len(query.batch(ReadAllAvailable())) == 700


@pytest.mark.parametrize("option", [{"minPartitions": "3"}, {"maxRecordsPerPartition": "2999"}])
def test_slots_read_side_by_side(server: Server, option: dict[str, str], tmp_path: Path) -> None:
    query = Query(tmp_path / "journal", {**server.options, **option})
    bodies = server.publish(ROWS)
    query.plan()
    tasks = query.tasks()
    assert [task.rows for task in tasks] == [2000, 2000, 2000]
    results: list[list[bytes]] = []
    threads = [threading.Thread(target=lambda task=task: results.append(query.run_task(task))) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    account(bodies, [row for rows in results for row in rows]).check()
    assert server.depth() == (0, 0, 0)


def test_large_messages_make_small_segments(server: Server, query: Query) -> None:
    """However many may be in flight: a task holds what it gathers in memory."""
    bodies = [body for part in range(16) for body in server.publish(8, f"{part}-", size=500_000)]
    task = query.plan_task()
    segments = query.reader.make_collector(task).run()
    sizes = [len(segment.columns().body) for segment in segments]
    assert max(sizes) < collect.MAX_SEGMENT_BYTES + 4 * 2**20  # a late read brings more than was waited for
    account(bodies, query.run_task(task)).check()
    assert server.depth() == (0, 0, 0)


def test_a_segment_is_of_several_windows_and_the_next_one_comes_while_it_is_written(
    server: Server, tmp_path: Path
) -> None:
    class Watched(Collector):
        opened = 0

        def open_connection(self) -> Any:
            self.opened += 1
            return super().open_connection()

        def claim(self, index: int, head: Any, columns: Any) -> Any:
            left = len(bodies) - sum(segment.head.rows for segment in self._claimed.segments)
            until(lambda: server.depth()[1] == min(left, 2_500 * 5))
            return super().claim(index, head, columns)

    query = Query(tmp_path / "journal", server.options)
    bodies = server.publish(30_000)
    task = query.plan_task()
    collector = Watched(task)
    assert [segment.head.rows for segment in collector.run()] == [10_000, 10_000, 10_000]
    assert collector.opened == 5
    account(bodies, query.run_task(task)).check()
    assert server.depth() == (0, 0, 0)


class HeldUp(Collector):
    """Nothing comes on its first connection when that is read for the second time."""

    def open_connection(self) -> Any:
        connection = super().open_connection()
        if not self._connections:
            reads = iter([connection.subscription.fetch, lambda *_: join_columns([])])
            fetch = connection.subscription.fetch
            connection.subscription.fetch = lambda *given: next(reads, fetch)(*given)
        return connection


def test_one_connection_that_is_held_up_does_not_end_the_task(server: Server, tmp_path: Path) -> None:
    query = Query(tmp_path / "journal", server.options)
    bodies = server.publish(20_000)
    task = query.plan_task()
    HeldUp(task).run()
    account(bodies, query.run_task(task)).check()


class OneConnection(Collector):
    """Its server lets nobody else in."""

    asked = 0

    def open_connection(self) -> Any:
        self.asked += 1
        if self._connections:
            raise ConnectFailed("no more of them")
        return super().open_connection()


def test_a_server_that_refuses_a_connection_is_not_asked_again(server: Server, tmp_path: Path) -> None:
    query = Query(tmp_path / "journal", server.options)
    bodies = server.publish(10_000)
    task = query.plan_task()
    collector = OneConnection(task)
    collector.run()
    assert collector.asked == 2
    account(bodies, query.run_task(task)).check()


def test_what_another_consumer_took_is_not_waited_for_long(server: Server, query: Query) -> None:
    bodies = server.publish(1_000)
    query.plan()
    other = ColumnSubscription(server.tcp, TOPIC, CHANNEL, ConnectionConfig())
    other.open()
    other.set_rdy(300)
    theirs = other.fetch(5, 300).count
    rows = query.run()
    assert (theirs, len(rows)) == (300, 700)
    other.close()
    query.done(rows)
    query.drain(server)
    account(bodies, query.rows).check()


def test_messages_that_come_during_a_batch_are_for_the_next(server: Server, query: Query) -> None:
    server.publish(500)
    query.plan()
    server.publish(100, "late")
    assert len(query.run()) == 500
    assert server.depth() == (100, 0, 0)


def test_a_channel_is_made_before_the_first_message(server: Server, tmp_path: Path) -> None:
    query = Query(tmp_path / "journal", {**server.options, "channel": "fresh"})
    assert not query.plan()
    bodies = server.publish(50)
    query.batch()
    account(bodies, query.rows).check()


def test_a_paused_channel_is_left_alone_and_told_of(
    server: Server, query: Query, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.publish(10)
    server.client.pause_channel(TOPIC, CHANNEL)
    assert not query.plan()
    (tmp_path / "offsets").mkdir()
    (tmp_path / "offsets" / "0").write_text(f"v1\n{{}}\n{json.dumps(query.offset)}")
    (lag,) = lags(tmp_path, {**server.options, "topic": TOPIC, "channel": CHANNEL})
    assert lag.depth == 10
    reported = query.reader.reportLatestOffset()
    assert reported is not None
    assert (sum(reported["backlog"].values()), sum(reported["ready"].values())) == (10, 0)
    assert re.search(f"topic {TOPIC}, channel {CHANNEL}: paused at nsqd .*: nothing is read there", caplog.text)
    server.client.unpause_channel(TOPIC, CHANNEL)
    assert len(query.batch()) == 10


# What dies where

POINTS = [f"before {step}" for step in ("claim 0", "claim 1", "finish 0", "finish 1", "finish 2", "seal")]

CASES = [("ours", FILES, place, fault) for place in POINTS for fault in (failing, dying)]
# The real nsqd takes up to 5 s to look for timeouts in a new channel: there a restart, below, stands for most of them.
CASES += [("real", FILES, place, failing) for place in POINTS] + [("real", FILES, "before finish 1", dying)]
CASES += [("ours", OBJECTS, place, dying) for place in POINTS]


@pytest.mark.parametrize(("server", "journal", "place", "fault"), CASES, indirect=["server", "journal"])
def test_a_task_that_fails_loses_and_doubles_nothing(
    server: Server, journal: Journal, place: str, fault: Callable[[str], type[JournalStreamReader]]
) -> None:
    query = Query(journal.path, {**server.options, **journal.options, **QUICK})
    bodies = server.publish(ROWS)
    task = query.plan_task()
    with pytest.raises((Stop, ConnectionLost)):
        query.run_task(task, fault(place))
    rows = query.run_task(task)
    assert query.run_task(task) == rows
    query.done(rows)
    query.drain(server)
    account(bodies, query.rows).check()


@pytest.mark.parametrize("place", POINTS)
def test_a_restarted_server_gives_the_same_ids_again(server: Server, tmp_path: Path, place: str) -> None:
    query = Query(tmp_path / "journal", server.options)  # with the default timeout: only the restart gives them back
    bodies = server.publish(ROWS)
    task = query.plan_task()
    die_at(place, query, task)
    server.restart()
    query.start()
    query.done(query.run())
    query.drain(server)
    account(bodies, query.rows).check()


@pytest.mark.parametrize("server", ["ours"], indirect=True)
def test_without_suppression_one_segment_may_come_twice(server: Server, tmp_path: Path) -> None:
    query = Query(tmp_path / "journal", {**server.options, **QUICK, "suppressDuplicates": "false"})
    bodies = server.publish(ROWS)
    task = query.plan_task()
    die_at("before finish 0", query, task)
    query.done(query.run())
    query.drain(server)
    found = account(bodies, query.rows)
    found.check(duplicates=5_000)
    assert found.extra >= 2_500


@each_storage_of_ours
def test_what_a_dead_task_claimed_is_left_out_by_other_slots_before_it_is_tried_again(
    server: Server, journal: Journal
) -> None:
    query = Query(journal.path, {**server.options, **journal.options, **QUICK, "minPartitions": "2"})
    bodies = server.publish(2_000)
    query.plan()
    first, second = query.tasks()
    die_at("before finish 0", query, first)
    server.wait_depth(2_000, 0, 0)
    second.rows = 2_000
    rows = query.run_task(second)
    assert len(rows) == 1_000
    query.done(query.run_task(first) + rows)
    query.drain(server)
    account(bodies, query.rows).check()


@each_storage_of_ours
def test_suspects_outlive_the_driver_and_are_dropped_when_they_came(server: Server, journal: Journal) -> None:
    query = Query(journal.path, {**server.options, **journal.options, **QUICK})
    server.publish(1_000)
    task = query.plan_task()
    die_at("before finish 0", query, task)
    query.done(query.run())
    suspects = journal.below(task.suspects)
    assert len(suspects.names()) == 1
    query.start()
    query.drain(server)
    query.reader.commit(query.offset)
    assert suspects.names() == []
    assert len(query.rows) == 1_000


@pytest.mark.parametrize(("server", "rows"), [("ours", 1_000), ("ours", ROWS), ("real", ROWS)], indirect=["server"])
def test_finished_too_late_is_delivered_again_and_left_out(server: Server, tmp_path: Path, rows: int) -> None:
    late = reading_once("before finish 0", lambda _: until(server.timeouts))
    query = Query(tmp_path / "journal", {**server.options, **QUICK}, late)
    bodies = server.publish(rows)
    task = query.plan_task()
    found = query.run_task(task)
    assert open_storage(task.suspects, ObjectStore()).names()
    query.done(found)
    query.drain(server)
    account(bodies, query.rows).check()


@pytest.mark.parametrize("server", ["ours"], indirect=True)
def test_what_waited_too_long_for_the_disk_is_given_back(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def stall(collector: Any) -> None:
        time.sleep(collector.slot.connection.msg_timeout)  # sleep: as long as the server's timeout

    query = Query(tmp_path / "journal", {**server.options, **QUICK}, reading_once("after claim 0", stall))
    bodies = server.publish(ROWS)
    assert len(query.batch()) < ROWS
    assert "came too late to be kept" in caplog.text
    query.drain(server)
    account(bodies, query.rows).check()


# Attempts that run at the same time


@each_storage
@pytest.mark.parametrize(
    ("at", "is_committed", "error"),
    [(0, False, JournalTaken), (1, False, JournalTaken), (0, True, JournalClosed)],
    ids=["before the first segment", "in the middle", "after the commit"],
)
def test_of_two_attempts_one_is_kept_and_the_other_acknowledges_nothing_more(
    server: Server, query: Query, tmp_path: Path, at: int, is_committed: bool, error: type[JournalError]
) -> None:
    bodies = server.publish(ROWS)
    task = query.plan_task()
    task.rows = 3_000
    other = Attempt(task, f"before claim {at}")
    rows = query.run_task(task)
    assert len(rows) == (2_500 if at else 3_000)  # the segment that the first has claimed, or others
    theirs = 500 if at else 3_000
    server.wait_depth(ROWS - len(rows) - theirs, theirs, 0)
    if is_committed:
        query.done(rows)
    assert other.go_on() == error.__name__
    server.wait_depth(ROWS - len(rows), 0, 0)  # given back
    if not is_committed:
        assert query.run_task(task) == rows
        query.done(rows)
    query.drain(server)
    account(bodies, query.rows).check()


@pytest.mark.parametrize("place", ["before claim 0", "after claim 0", "before seal"])
def test_a_batch_that_is_read_in_two_places_at_once_is_the_same_in_both(
    server: Server, tmp_path: Path, place: str
) -> None:
    """As of a stream that is joined with itself."""
    others: list[list[bytes]] = []
    twice = reading_once(place, lambda collector: others.append(query.run_task(collector.slot)))
    query = Query(tmp_path / "journal", server.options, twice)
    bodies = server.publish(ROWS)
    rows = query.batch()
    assert others == [rows] != [[]]
    query.drain(server)
    account(bodies, query.rows).check()


# Servers that go away


def test_a_server_that_restarts_in_the_middle_makes_a_short_batch(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    restarts = reading_once("before finish 1", lambda _: server.restart())
    query = Query(tmp_path / "journal", server.options, restarts)
    bodies = server.publish(20_000)
    assert len(query.batch()) < 20_000
    assert "connection lost" in caplog.text
    query.drain(server)
    account(bodies, query.rows).check()


def depth_on_disk(folder: Path, queue: str) -> int:
    """How many messages a real nsqd will find in a queue when it starts again."""
    position = folder / f"{queue}.diskqueue.meta.dat"
    return int(position.read_text().split()[0]) if position.exists() else 0


def test_a_real_nsqd_that_is_killed_in_a_stream_loses_at_most_what_it_had_in_flight(tmp_path: Path) -> None:
    """What it loses and what it sends again is its own doing: counted here, and none of it was acknowledged."""
    if find_server("nsqd") is None:
        pytest.skip(f"no real nsqd below {SERVERS}")
    count, in_flight = 20_000, Placed.connections * 2_500
    folder = tmp_path / "nsqd"
    folder.mkdir()
    server = Server.start(folder, "-mem-queue-size=0", "-sync-timeout=50ms", is_real=True)
    try:
        kills = reading_once("before finish 1", lambda _: server.kill_and_start())
        query = Query(tmp_path / "journal", server.options, kills)
        bodies = server.publish(count)
        # All of them are the channel's, on disk: what the topic still had when nsqd is killed, it would give it twice.
        until(lambda: depth_on_disk(folder, f"{TOPIC}:{CHANNEL}") >= count - 1 and not depth_on_disk(folder, TOPIC))
        first = query.batch()
        assert 0 < len(first) < count
        while True:
            query.drain(server)
            if not query.batch():
                break
    finally:
        server.close()
    found = account(bodies, query.rows)
    assert len(found.lost) <= in_flight, str(found)
    assert found.lost.isdisjoint(first)
    assert set(found.duplicated) <= set(first), str(found)


def test_a_server_that_is_down_leaves_its_slot_empty(
    server: Server, query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "CONNECT_PATIENCE", 0.3)
    bodies = server.publish(100)
    query.plan()
    server.client.close()
    server.process.stop()
    assert query.run() == []
    query.done([])
    assert not query.plan()
    server.process.start()
    query.drain(server)
    account(bodies, query.rows).check()


def test_a_slot_whose_partition_nobody_leads_stays_empty(
    server: Server, query: Query, caplog: pytest.LogCaptureFixture
) -> None:
    bodies = server.publish(5)
    task = query.plan_task()
    task.address = None
    assert query.run_task(task) == []
    assert "stays empty: nobody leads the partition now" in caplog.text
    query.done(query.run())
    query.drain(server)
    account(bodies, query.rows).check()


def test_settings_that_cannot_work_fail_the_task_at_once(server: Server, query: Query) -> None:
    server.publish(1)
    task = query.plan_task()
    task.connection = task.connection.replace(tls_v1=True)
    with pytest.raises(ConnectFailed, match="tls"):
        query.run_task(task)


# AvailableNow


def test_available_now_reads_exactly_what_was_there(server: Server, tmp_path: Path) -> None:
    query = Query(tmp_path / "journal", {**server.options, "maxOffsetsPerTrigger": "1000"})
    server.publish(3_500)
    query.reader.prepareForTriggerAvailableNow()
    sizes = []
    while rows := query.batch():
        sizes.append(len(rows))
        server.publish(400, f"later{len(sizes)}-")
    assert sizes == [1000, 1000, 1000, 500]


@pytest.mark.parametrize("was_read", [False, True])
def test_a_batch_that_is_run_again_is_off_the_target_if_it_is_read_now(
    server: Server, tmp_path: Path, was_read: bool
) -> None:
    query = Query(tmp_path / "journal", {**server.options, "maxOffsetsPerTrigger": "1000"})
    server.publish(3_000)
    query.plan()
    if was_read:
        query.run()
    query.start()  # a restart: Spark runs the planned batch again, and asks for the target first
    query.reader.prepareForTriggerAvailableNow()
    rows = query.run()
    server.publish(5_000, "later")
    query.rows += rows
    query.offset = query.planned
    taken = []
    while query.plan():
        taken.append(query.run())
        query.rows += taken[-1]
        query.offset = query.planned
    assert sum(map(len, taken)) == 2_000
    assert len(query.rows) == 3_000


# Offsets and progress


def test_progress_tells_the_backlog(server: Server, query: Query) -> None:
    server.publish(30)
    told = query.reader.reportLatestOffset()
    assert told is not None
    assert (told["backlog"], told["ready"]) == ({str(server.tcp): 30}, {str(server.tcp): 30})
    assert told["metrics"]["lookupAgeSeconds"] >= 0
    assert "unknownTopics" not in told["metrics"]


def journal_metrics(query: Query) -> tuple[int, float]:
    """How large the journal is, and how old."""
    told = query.reader.reportLatestOffset()
    assert told is not None
    return told["metrics"]["journalBytes"], told["metrics"]["journalAgeSeconds"]


def test_progress_tells_the_room_and_the_age_of_the_journal(server: Server, query: Query, tmp_path: Path) -> None:
    assert journal_metrics(query) == (0, 0.0)
    server.publish(3_000, size=200)
    query.plan()
    rows = query.run()
    files = list((tmp_path / "journal").glob("*/b1/*"))
    size, age = journal_metrics(query)
    assert size == sum(file.stat().st_size for file in files) > 3_000 * 200
    an_hour_ago = time.time() - 3600
    os.utime(files[0], (an_hour_ago, an_hour_ago))
    assert age < journal_metrics(query)[1] >= 3600
    tomorrow = time.time() + 86_400  # by the clock of another machine
    for file in files:
        os.utime(file, (tomorrow, tomorrow))
    assert journal_metrics(query) == (size, 0.0)
    query.done(rows)
    assert journal_metrics(query) == (0, 0.0)


def test_progress_tells_the_bytes_a_second(server: Server, query: Query) -> None:
    def rate() -> int:
        told = query.reader.reportLatestOffset()
        assert told is not None
        return int(told["metrics"]["bytesPerSecond"])

    begin = time.monotonic()
    assert (query.plan(), rate()) == (False, 0)
    for count, is_committed in enumerate((True, False), 1):  # before Spark asks for the next batch, or after
        server.publish(3_000, size=200)
        query.plan()
        rows = query.run()
        if is_committed:
            query.done(rows)
        query.offset = query.planned
        query.plan()
        assert rate() >= count * 3_000 * 200 / (time.monotonic() - begin)


def test_statistics_are_asked_for_at_most_every_200_ms(
    server: Server, query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    query.reader.latestOffset(query.offset, ReadAllAvailable())  # when it begins it asks once more: is the topic there?
    asked = []
    stats = NsqdHTTPClient.stats
    monkeypatch.setattr(NsqdHTTPClient, "stats", lambda *args, **kw: (asked.append(args), stats(*args, **kw))[1])
    began = time.monotonic()
    while len(asked) < 4 and time.monotonic() < began + WAIT:
        query.reader.latestOffset(query.offset, ReadAllAvailable())
        query.reader.reportLatestOffset()
    assert 4 <= len(asked) <= 1 + (time.monotonic() - began) / 0.2


def test_what_a_batch_has_taken_is_not_planned_once_more(server: Server, query: Query) -> None:
    server.publish(10)
    query.plan()
    assert len(query.run()) == 10
    ended = query.planned
    assert query.reader.latestOffset(ended, ReadAllAvailable()) == ended  # as Spark asks, at once


def test_a_server_that_does_not_answer_is_waited_for(
    server: Server, query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsq_fast.spark.journal.stream.PATIENCE", 0.2)
    server.publish(5)
    server.client.close()
    server.process.stop()
    assert query.reader.latestOffset(query.offset, ReadAllAvailable()) == query.offset
    told = query.reader.reportLatestOffset()
    assert told is not None
    assert (told["backlog"], told["ready"]) == ({}, {})
    assert told["metrics"]["unknownTopics"] == [TOPIC]
    until(lambda: query.reader.reportLatestOffset()["metrics"]["lookupAgeSeconds"] > 0)  # of the start, if of nothing
    server.process.start()
    assert len(query.batch()) == 5


def test_an_nsqd_that_has_left_lookup_is_missed_no_more_and_lookup_not_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nsq_fast.spark.journal.plan.STATS_INTERVAL", 0.0)
    monkeypatch.setattr("nsq_fast.spark.journal.plan.DISCOVERY_INTERVAL", 0.0)
    with Broker(nsqds=2) as broker:
        left, other = broker.nsqds
        for nsqd in (left, other):
            with NsqdHTTPClient(*nsqd.http_address) as client:
                client.create_topic(TOPIC)
        given = {"topic": TOPIC, "channel": CHANNEL, "lookupd_http_addresses": str(broker.lookupd.http_address)}
        backlogs = Backlogs(SourceOptions.parse(given))
        until(lambda: len(backlogs.of(TOPIC).servers().nsqds) == 2)
        monkeypatch.setattr("nsq_fast.spark.journal.plan.DISCOVERY_INTERVAL", 60.0)
        assert len(backlogs.all_depths()) == 2
        left.stop()
        with pytest.raises(LookupFailed, match=f"nsqd {left.tcp_address} cannot be reached"):
            backlogs.all_depths()
        monkeypatch.setattr("nsq_fast.spark.journal.plan.DISCOVERY_INTERVAL", 0.0)
        until(lambda: len(backlogs.of(TOPIC).servers().nsqds) == 1)
        assert list(backlogs.all_depths()) == [str(other.tcp_address)]
        broker.lookupd.stop()
        assert list(backlogs.of(TOPIC).depths()) == [str(other.tcp_address)]
        assert "the servers of topics are taken to be as before" in caplog.text
        backlogs.close()


def test_a_journal_that_is_gone_stops_the_query(server: Server, query: Query, tmp_path: Path) -> None:
    server.publish(5)
    query.plan()
    query.run()
    (tmp_path / "journal").rename(tmp_path / "elsewhere")
    query.start()
    with pytest.raises(JournalMissing, match="what was acknowledged and not committed would be lost"):
        query.run()
    with pytest.raises(JournalMissing):
        query.plan()


def test_a_batch_that_cannot_be_deleted_is_by_the_next_commit(
    server: Server, query: Query, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    bodies = server.publish(5)
    query.plan()
    rows = query.run()
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", fails)
        query.done(rows)
    assert "batch 1 not deleted: [Errno 5] Input/output error" in caplog.text
    assert list((tmp_path / "journal").glob("*/b1"))
    bodies += server.publish(5, "more")
    query.batch()
    assert not list((tmp_path / "journal").glob("*/b*"))
    account(bodies, query.rows).check()


def test_few_messages_wait_for_more(server: Server, tmp_path: Path) -> None:
    query = Query(tmp_path / "journal", {**server.options, "minOffsetsPerTrigger": "10"})
    bodies = server.publish(9)
    assert not query.plan()
    bodies += server.publish(1, "more")
    assert sorted(query.batch()) == sorted(bodies)


def test_a_query_whose_batch_another_one_has_adopted_fails(server: Server, query: Query, journal: Journal) -> None:
    bodies = server.publish(10)
    assert query.plan()
    rows = query.run()
    other = Query(journal.path, {**server.options, **journal.options})
    assert sorted(other.batch()) == sorted(rows) == bodies
    with pytest.raises(JournalError, match="another query has begun with it"):
        query.done(rows)
    query.start()
    query.reader.commit(query.offset)  # as Spark may, when a query begins again


def test_a_query_of_several_sources_may_begin_without_messages(server: Server, query: Query) -> None:
    """Spark commits the offset of each of them, here the one where it begins."""
    query.start()
    query.reader.commit(query.offset)
    bodies = server.publish(10)
    account(bodies, query.batch()).check()


def test_a_reader_has_no_side_effects_until_it_is_used(server: Server, tmp_path: Path) -> None:
    options = {"topic": TOPIC, "channel": CHANNEL, "journal": str(tmp_path / "none"), **server.options}
    JournalStreamReader(SourceOptions.parse(options))
    assert not (tmp_path / "none").exists()


def test_a_query_that_is_refused_creates_no_channel(server: Server, query: Query) -> None:
    server.publish(5)
    assert query.batch()
    query.change(channel="misspelt")
    query.reader.prepareForTriggerAvailableNow()
    with pytest.raises(JournalError, match="misspelt"):
        query.reader.latestOffset(query.offset, ReadAllAvailable())
    [topic] = server.client.stats(TOPIC)["topics"]
    assert [channel["channel_name"] for channel in topic["channels"]] == [CHANNEL]


def test_a_query_has_its_channel_once_it_has_begun(make_topic: MakeTopic, tmp_path: Path) -> None:
    topic = make_topic(1)
    topic.fill(10, [0])
    query = Query(tmp_path / "journal", {**topic.options, "channel": "of-its-own"})
    query.reader.prepareForTriggerAvailableNow()
    assert query.reader.latestOffset(query.offset, ReadAllAvailable()) == query.offset
    assert "of-its-own" in topic.channels(0)


@pytest.mark.parametrize("name", ["topic", "channel"])
def test_what_vanishes_between_batches_is_refused(server: Server, tmp_path: Path, name: str) -> None:
    options = {"topic": TOPIC, "channel": CHANNEL, "journal": str(tmp_path), **server.options, name: "x#ephemeral"}
    with pytest.raises(ConfigError, match="x#ephemeral: vanishes"):
        JournalStreamReader(SourceOptions.parse(options))


# Batch reads


def batches_of(server: Server, **options: str) -> Iterator[pa.RecordBatch]:
    given = {"topic": TOPIC, "channel": CHANNEL, "reader": "journalled", "columns": "body", **server.options, **options}
    reader = JournalBatchReader(SourceOptions.parse(given))
    return (batch for task in reader.partitions() for batch in reader.read(task))


def batch_rows(server: Server, **options: str) -> list[bytes]:
    return [row for batch in batches_of(server, **options) for row in batch["body"].to_pylist()]


@pytest.mark.parametrize("count", [0, 10, ROWS])
def test_a_batch_read_looks_and_puts_back(server: Server, count: int) -> None:
    bodies = server.publish(count) if count else []
    account(bodies, batch_rows(server)).check()
    server.wait_depth(count, 0, 0)
    account(bodies, batch_rows(server, minPartitions="3")).check()


def test_a_batch_read_that_looks_at_large_messages_gives_them_in_parts(server: Server) -> None:
    """A window of them can be more than Arrow takes."""
    bodies = [body for part in range(16) for body in server.publish(8, f"{part}-", size=500_000)]
    found = list(batches_of(server))
    assert max(batch.nbytes for batch in found) < collect.MAX_SEGMENT_BYTES + 4 * 2**20
    account(bodies, [row for batch in found for row in batch["body"].to_pylist()]).check()
    server.wait_depth(len(bodies), 0, 0)


def test_a_batch_read_that_looks_creates_no_channel_that_would_only_fill_up(server: Server) -> None:
    def channels() -> set[str]:
        topics = server.client.stats(TOPIC)["topics"]
        return {each["channel_name"] for topic in topics for each in topic["channels"]}

    server.publish(3)
    assert channels() == {CHANNEL}
    with pytest.raises(LookupFailed, match=f"'misspelt' of topic .* is not known .* They have: {CHANNEL}"):
        batch_rows(server, channel="misspelt")
    assert channels() == {CHANNEL}
    server.client.create_topic("channelless")
    assert batch_rows(server, topic="channelless") == []
    (topic,) = server.client.stats("channelless")["topics"]
    assert not topic["channels"]
    server.client.publish("channelless", b"waits for the first")
    assert batch_rows(server, topic="channelless") == [b"waits for the first"]
    (topic,) = server.client.stats("channelless")["topics"]
    assert [each["channel_name"] for each in topic["channels"]] == [CHANNEL]


def test_a_batch_read_that_consumes_gives_the_same_rows_as_long_as_its_journal_is_there(
    server: Server, tmp_path: Path
) -> None:
    bodies = server.publish(ROWS)
    options = {"consume": "true", "journal": str(tmp_path / "one"), "minPartitions": "2"}
    rows = batch_rows(server, **options)
    account(bodies, rows).check()
    assert server.depth() == (0, 0, 0)
    server.publish(7, "later")
    assert batch_rows(server, **options) == rows
    assert len(batch_rows(server, **{**options, "journal": str(tmp_path / "two")})) == 7


# Redesigned servers


def test_partitions_of_a_redesigned_topic_are_slots(
    cluster: ClusterProcess, make_topic: MakeTopic, tmp_path: Path
) -> None:
    topic = make_topic(4, 2)
    bodies = topic.fill(1_000, range(4))
    query = Query(tmp_path / "journal", {**topic.options, "nsq.msg_timeout": "1"})
    query.plan()
    assert query.planned is not None
    assert sorted(query.planned["slots"]) == ["p0", "p1", "p2", "p3"]
    tasks = query.tasks()
    die_at("before finish 0", query, tasks[1])
    cluster.move_leader(topic.name, 2)
    query.start()
    query.done(query.run())
    until(lambda: (query.batch(), len(query.rows) >= len(bodies))[1], timeout=20, every=0.1)
    until(lambda: (query.batch(), set(query.reader.reportLatestOffset()["backlog"].values()) == {0})[1], 20, 0.1)
    account(bodies, query.rows).check()


def test_headers_are_kept(make_topic: MakeTopic, tmp_path: Path) -> None:
    topic = make_topic(1, ext=True)
    topic.call(0, "POST", "/pub_ext", b"body", ext='{"k":"v"}')
    query = Query(tmp_path / "journal", {**topic.options, "columns": "headers"})
    until(query.plan)
    [rows] = [rows for task in query.tasks() for rows in query.reader.read(task)]
    assert rows["headers"].to_pylist() == ['{"k":"v"}']


def test_an_ordered_topic_is_refused(make_topic: MakeTopic, tmp_path: Path) -> None:
    topic = make_topic(ordered=True)
    with pytest.raises(ConfigError, match=f"topic {topic.name} is ordered: .* use the replayable reader"):
        Query(tmp_path / "journal", topic.options).plan()


def test_messages_that_trickle_do_not_keep_a_slot(server: Server, query: Query) -> None:
    server.publish(2_000)
    assert query.plan()
    server.client.empty_channel(TOPIC, CHANNEL)  # another consumer had them
    stop, published = threading.Event(), []

    def trickle() -> None:
        client = NsqdHTTPClient(*server.http)
        while not stop.wait(0.05) and len(published) < 1_000:
            published.append(b"n%d" % len(published))
            client.multipublish(TOPIC, [published[-1]], binary=True)
        client.close()

    publisher = threading.Thread(target=trickle)
    publisher.start()
    try:
        rows = query.run()
    finally:
        stop.set()
        publisher.join()
    assert len(rows) > 0
    assert len(published) < 600  # the window of 2,000 would not have been full before the last of the thousand
    query.done(rows)
    query.drain(server)
    account(published, query.rows).check()
