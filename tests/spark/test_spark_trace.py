"""Traces as records: queries, reports and streams of them, here and on Spark."""

from __future__ import annotations

import bz2
import gzip
import json
import logging
import os
import random
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytest
from click.testing import CliRunner, Result
from support import trace_logs
from support.spark import LOCAL, ROOT
from support.spark_compiled import compiled
from support.trace_logs import BAD_LINES, CLICKS, MS, SECOND, START, Planted
from support.trace_logs import run as run_command
from support.waiting import PROCESS, until

from nsq_fast import Consumer, Message, Producer
from nsq_fast.broker import BrokerProcess, RedesignedCluster
from nsq_fast.cli import main
from nsq_fast.client.admin import NsqdHTTPClient
from nsq_fast.client.trace import ConsumeRecord, ReceiveRecord, TraceLog, TraceRecord, log_to_file
from nsq_fast.errors import ConfigError
from nsq_fast.spark.trace import (
    TABLES,
    Figures,
    TraceSettings,
    figures_of,
    html,
    local_figures,
    parse_lines,
    read_logs,
    read_table,
    stream_logs,
    stream_tables,
    write_report,
    write_tables,
)
from nsq_fast.spark.trace.queries import BatchWriter
from nsq_fast.spark.trace.schema import Order

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


# The tables of the trace pipeline: planted faults are found, each of them and nothing else.


PLACE = ("topic", "partition", "channel", "internal_id")


PARTS = 3

SETTINGS = TraceSettings(window=5, grace=30, lateness=2)

GIVEN = ("--window", "5", "--grace", "30")


class Run:
    """Three runs with planted faults, ten minutes apart, and the tables that the command has written of their logs.

    Attributes:
        planted: the faults of each.
        told: what the command printed.
    """

    def __init__(self, spark: SparkSession, folder: Path, report: Report) -> None:
        log: dict[Any, list[TraceRecord]] = {}
        self.planted: list[Planted] = []
        for number in range(PARTS):
            part = trace_logs.good_log(130, number, number)
            planted = trace_logs.plant(part, number)
            if number < PARTS - 1:
                for place in {(place[0], place[1], "", place[3]) for place in planted.pending}:
                    del part[place]
                planted = planted._replace(pending=set())
            self.planted.append(planted)
            log |= part
        self.records: list[TraceRecord] = trace_logs.records_of(log)
        self.folder = folder / "tables"
        self.spark = spark
        self.logs = trace_logs.write_logs(self.records, folder / "logs")
        done = report(*self.logs, "--tables", self.folder, "--json", *GIVEN)
        assert done.exit_code == 0, done.output
        self.told = json.loads(done.stdout)

    def all_planted(self, kind: str) -> list[Any]:
        return ordered(place for each in self.planted for place in getattr(each, kind))

    def rows(self, table: str, where: str = "true") -> list[Any]:
        return read_table(self.spark, self.folder, table).where(where).collect()

    def places(self, table: str, where: str = "true") -> list[tuple[Any, ...]]:
        return sorted((tuple(row[name] for name in PLACE) for row in self.rows(table, where)), key=repr)


Report = Callable[..., Result]


@pytest.fixture(scope="module")
def report_here(spark: SparkSession) -> Iterator[Report]:
    """The command in this process, with the session of all tests: starting one takes longer than so small a report.

    In a process of its own, with a Spark of its own: the demo, in test_spark_trace_report.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(spark), "stop", lambda session: None)
        yield lambda *given: CliRunner().invoke(main, ["trace-report", "--master", LOCAL, *map(str, given)])


@pytest.fixture(scope="module")
def run(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, report_here: Report) -> Run:
    return Run(spark, tmp_path_factory.mktemp("traces"), report_here)


OF_SMALL = TraceSettings(window=0.25, grace=0, slowest=10_000, order="ids")


class Small:
    """Small logs of which each has a topic of its own: their tables are written once."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder = spark, folder / "tables"
        logs, patterned = folder / "logs", folder / "a[1]{b},c.log"
        write_awkward(logs, 1)
        patterned.write_text("\n".join([*GOING_BACK, *HUNG, *LOGGED_BY_BOTH, *LOGGED_BY_SERVER]))
        (logs / "no-records.log").write_text("\n".join(NO_RECORDS))
        (logs / "braces.log").write_text(f"{{worker-1}} INFO: {IN_BRACES}")
        (logs / "nsqd.INFO").write_text("\n".join(OF_A_SERVER))
        log_a_cluster(folder / "cluster")
        # Some are named twice.
        self.logs = [patterned, logs / "braces.log", logs / "no-*.log", logs, folder / "cluster"]
        write_tables(spark, read_logs(spark, self.logs), self.folder, OF_SMALL)

    def rows(self, table: str, topic: str) -> dict[int, Any]:
        rows = read_table(self.spark, self.folder, table).where(f"topic = '{topic}'").collect()
        return {int(row.internal_id): row for row in rows}

    def records(self, file: str) -> list[Any]:
        """Those of a file, in the order of their times."""
        records = read_table(self.spark, self.folder, "records").where(f"endswith(source, '{file}')")
        return records.orderBy("time_ns").collect()


@pytest.fixture(scope="module")
def small(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Small:
    return Small(spark, tmp_path_factory.mktemp("small"))


def ordered(places: Any) -> list[tuple[Any, ...]]:
    return sorted(places, key=repr)


def test_what_was_planted_is_found_and_nothing_else(run: Run) -> None:
    for kind in ("lost", "duplicates", "violations"):
        assert run.places(kind) == run.all_planted(kind), kind
        assert run.told[kind] == len(run.all_planted(kind)), kind
    assert run.places("lives", "state = 'pending'") == run.all_planted("pending")
    assert run.places("lives", "not is_published") == run.all_planted("unpublished")
    causes = [f"redelivered_{cause}" for cause in ("req", "timeout", "unknown")]
    again = run.rows("lives", " + ".join(causes) + " > 0")
    found = {tuple(row[name] for name in PLACE): tuple(row[name] for name in causes) for row in again}
    assert found == {place: causes for each in run.planted for place, causes in each.redelivered.items()}
    clocks = {(row.side, row.nsqd, row.host): (row.messages, row.worst_ns) for row in run.rows("skews")}
    (skews, *others) = (each.skews for each in run.planted)
    assert all(each == skews for each in others)
    assert clocks == {clock: (messages * PARTS, worst) for clock, (messages, worst) in skews.items()}


def test_the_slowest_message_comes_first_with_its_life(run: Run) -> None:
    slowest = max(run.rows("slowest"), key=lambda row: row.latency_ns)
    finishes = chain.from_iterable(trace_logs.finishes_of(run.records).values())
    assert slowest.latency_ns == max(map(trace_logs.latency, finishes))
    assert tuple(slowest[name] for name in PLACE) in {each.slowest for each in run.planted}
    assert [(event.event, event.outcome) for event in slowest.events] == [("publish", None), ("consume", "FIN")]
    publish, consume = slowest.events
    assert consume.at_ns - consume.received_ns == slowest.handling_ns == 20 * SECOND
    assert publish.at_ns < consume.received_ns
    assert consume.consumer.startswith("10.0.0.7:")


def test_the_life_of_a_redelivered_message_has_all_its_deliveries(run: Run) -> None:
    place = next(place for place, causes in run.planted[0].redelivered.items() if causes == (2, 1, 1))
    (row,) = [row for row in run.rows("slowest") if tuple(row[name] for name in PLACE) == place]
    outcomes = [(event.outcome, event.attempts) for event in row.events if event.event == "consume"]
    assert outcomes == [("REQ", 1), ("REQ", 2), ("TIMEOUT", 4), ("FIN", 5)]


def test_percentiles_of_a_window_are_exact(run: Run) -> None:
    latencies: dict[Any, list[int]] = {}
    for lane, finishes in trace_logs.finishes_of(run.records).items():
        for finish in finishes:
            window = finish.timestamp // SETTINGS.window_ns * SETTINGS.window_ns
            latencies.setdefault((*lane, window), []).append(trace_logs.latency(finish))
    expected = {
        key: tuple(trace_logs.nearest_rank(sorted(found), percent) for percent in (50, 95, 99, 100))
        for key, found in latencies.items()
    }
    points = [f"latency_{point}_ns" for point in ("p50", "p95", "p99", "max")]
    assert {
        (row.topic, row.partition, row.channel, row.window_ns): tuple(row[point] for point in points)
        for row in run.rows("windows", "finished > 0")
    } == expected


def test_latency_is_time_in_queue_and_handling(run: Run) -> None:
    rows = run.rows("lives", "deliveries = 1 and state = 'finished'")
    assert len(rows) > 1000
    assert {row.latency_ns - row.in_queue_ns - row.handling_ns for row in rows} == {0}


def test_ids_beyond_63_bits_are_exact(run: Run) -> None:
    found = {(int(row.internal_id), int(row.trace_id)) for row in run.rows("lives", "topic = 'clicks'")}
    assert found == {(record.internal_id, record.trace_id) for record in run.records if record.topic == "clicks"}
    assert max(internal for internal, _ in found) > 2**63


def test_every_line_is_accounted_for(run: Run) -> None:
    rows = run.rows("records")
    assert sorted(row.problem for row in rows if row.event is None) == sorted(BAD_LINES)
    assert sum(row.event is not None for row in rows) == len(run.records)
    where = {row.problem: Path(row.source).name for row in rows if row.problem}
    assert where[BAD_LINES[1]] == "billing.log.1"
    assert where[BAD_LINES[2]] == "others.log.gz"


def test_order_is_not_judged_where_messages_are_handled_side_by_side(run: Run) -> None:
    def out_of_order(order: Order) -> set[str]:
        groups = local_figures(run.logs, TraceSettings(order=order)).groups
        return {group.channel for group in groups if group.counts["violations"]}

    assert {order: out_of_order(order) for order in get_args(Order)} == {
        "offsets": {"billing"},
        "ids": {"billing", "web"},
        "off": set(),
    }


_PUBLISHED: Any = trace_logs.good_log(3)["orders", 0, "", 100][0]

_FINISHED: Any = trace_logs.good_log(3)["orders", 0, "billing", 100][0]

GOING_BACK = [
    str(
        trace_logs.changed(
            _FINISHED, topic="back", time=_FINISHED.time + MS * number, internal_id=internal_id, offset=offset
        )
    )
    for number, (internal_id, offset) in enumerate([(10, 500), (11, 400), (12, 600), (13, 700)])
]


def test_the_offset_going_back_is_a_violation_too(small: Small) -> None:
    ((number, row),) = small.rows("violations", "back").items()
    assert (number, row.offset, row.after_internal_id, row.after_offset) == (11, 400, 10, 500)


def receipt_of(record: Any) -> ReceiveRecord:
    return ReceiveRecord(**{name: getattr(record, name) for name in ReceiveRecord.__struct_fields__})


_DONE = trace_logs.changed(_FINISHED, topic="hung")

_HUNG = trace_logs.changed(_DONE, internal_id=101, attempts=2)

HUNG = [
    *(str(trace_logs.changed(_PUBLISHED, topic="hung", internal_id=number)) for number in (100, 101, 102)),
    *map(str, (receipt_of(_DONE), _DONE, receipt_of(_HUNG))),
]


def test_a_delivery_that_was_received_and_has_no_outcome_is_told_from_a_lost_message(small: Small) -> None:
    lives = small.rows("lives", "hung")
    assert {number: row.deliveries for number, row in lives.items()} == {100: 1, 101: 1, 102: 0}
    assert {number: row.finishes for number, row in lives.items()} == {100: 1, 101: 0, 102: 0}
    assert (lives[101].received_ns, lives[101].consumer, lives[101].last_outcome) == (_HUNG.time, _HUNG.local, None)
    assert (lives[102].received_ns, lives[102].consumer) == (None, None)


def test_tables_have_the_types_that_are_documented(spark: SparkSession, run: Run) -> None:
    for table, columns in TABLES.items():
        written = spark.read.parquet(str(run.folder / table))
        found = [(field.name, field.dataType.simpleString()) for field in written.schema.fields]
        assert found[:-1] == [
            (name, kind.replace(", ", ",")) for name, kind in (column.split(" ", 1) for column in columns)
        ]
        assert found[-1][0] == "batch"


NO_RECORDS = [
    '{"event":"publish","time":1,"topic":"t","partition":null,"nsqd":"n","internal_id":-1,"trace_id":1}',
    '{"event":"publish","time":1,"topic":"t","partition":null,"nsqd":"n","internal_id":18446744073709551616,"trace_id":1}',
    '{"event":"publish","time":"now","topic":"t","partition":null,"nsqd":"n","internal_id":1,"trace_id":1}',
    '{"event":"publish","time":9000000000000000000,"topic":"t","partition":null,"nsqd":"n","internal_id":1,"trace_id":1}',
    '{"event":"consume","time":1,"topic":"t","partition":null,"channel":"c","nsqd":"n","local":"l","internal_id":1,'
    '"trace_id":1,"timestamp":1,"attempts":1,"outcome":"FIN","handling_time":1e300}',
    '{"event":"deliver","time":1,"topic":"t","partition":null,"nsqd":"n","internal_id":1,"trace_id":1}',
    '{"event":"consume","time":1,"topic":"t","partition":null,"nsqd":"n","internal_id":1,"trace_id":1}',
    "\ufffd\x00{{{",
]


def test_lines_that_hold_no_record_are_kept_as_problems(small: Small) -> None:
    rows = small.records("no-records.log")
    assert sorted(row.problem for row in rows) == sorted(line[:200] for line in NO_RECORDS)  # of a file read once
    assert {(row.event, row.internal_id) for row in rows} == {(None, None)}


IN_BRACES: Any = trace_logs.good_log(1)[CLICKS.name, None, "web", CLICKS.first_id][0]


def test_a_prefix_may_have_braces(small: Small) -> None:
    (row,) = small.records("braces.log")
    assert (row.event, int(row.internal_id), row.time_ns) == ("consume", IN_BRACES.internal_id, IN_BRACES.time)


@pytest.mark.parametrize(("name", "message"), [("nothing*.log", "names no file"), ("_hidden.log", "begins with _")])
def test_a_path_without_a_log_is_refused(spark: SparkSession, tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "_hidden.log").write_text("x\n")
    with pytest.raises(ConfigError, match=message):
        read_logs(spark, tmp_path / name)


def test_there_is_no_report_without_tables(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no traces"):
        write_report(spark, tmp_path, tmp_path / "report.html")


@pytest.mark.parametrize(
    "wrong", [{"window": 0}, {"grace": -1}, {"order": "maybe"}, {"lateness": float("nan")}, {"slowest": -1}]
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TraceSettings(**wrong)


SERVER_START = "I1122 17:39:41.153080   19402 tracer.go:54] nsqd.(*LogMsgTracer).TracePub "


def server_lines(message: int, *states: str, topic: str = "orders", partition: int = 0) -> list[str]:
    """What a redesigned nsqd logs of a message, a second after the other."""
    internal_id, at = (partition << 50) + message, iter(range(trace_logs.START, 2 * trace_logs.START, SECOND))
    place = f"[TRACE] topic {topic}-{partition} trace id 7: message {internal_id}"
    lines = [
        f"{place}( 0) put PUB at offset: 40, current count: 2 at time {next(at)}, delayed: 0",
        f"{place} put success from client 10.0.0.1:5 at offset: 40, at time {next(at)}",
    ]
    for state in states:
        client = "0(0)" if state.startswith("READ") else "10.0.0.5:34540(3)"
        lines.append(
            f"[TRACE] topic {topic} channel billing trace id 7: message {internal_id}"
            f" (ts: {trace_logs.START}, offset: 40, pri:0)"
            f" consume state {state} from client {client} at time: {next(at)} cost: 5929399, attempt: 1"
        )
    return [SERVER_START + line for line in lines]


OF_A_SERVER = [*server_lines(5, "START", topic="of_server", partition=3), "[TRACE] topic t-0 nothing"]


def test_lines_of_a_server_are_records(small: Small) -> None:
    problem, *rows = small.records("nsqd.INFO")
    assert problem.problem == "[TRACE] topic t-0 nothing"
    seen = [(row.event, row.outcome, row.topic, row.partition, row.channel, row.consumer) for row in rows]
    assert seen == [
        ("server", "PUB", "of_server", 3, None, None),
        ("server", "PUB_CLIENT", "of_server", 3, None, None),
        ("server", "START", "of_server", 3, "billing", "10.0.0.5:34540"),
    ]
    assert {(int(row.internal_id), int(row.trace_id), row.offset) for row in rows} == {((3 << 50) + 5, 7, 40)}
    assert [row.attempts for row in rows] == [None, None, 1]


_CONSUMED = ConsumeRecord(
    time=trace_logs.START + 9 * SECOND,
    topic="both",
    partition=0,
    channel="billing",
    nsqd="10.1.0.0:4150",
    local="10.0.0.5:34540",
    internal_id=2,
    trace_id=7,
    offset=None,
    size=None,
    timestamp=trace_logs.START,
    attempts=1,
    outcome="FIN",
    handling_time=0.5,
)

LOGGED_BY_BOTH = [
    *server_lines(1, "READ_QUEUE", "START", "FIN", topic="both"),
    *server_lines(2, "READ_QUEUE", "START", topic="both"),
    *server_lines(3, topic="both"),
    str(_CONSUMED),
    str(trace_logs.changed(_CONSUMED, internal_id=1)),
]

LOGGED_BY_SERVER = [
    *server_lines(1, "READ_QUEUE", "START", "FIN", topic="served"),
    *server_lines(2, "START", topic="served"),
]


def test_what_a_server_logs_is_joined_with_what_clients_log(small: Small) -> None:
    lives = small.rows("lives", "both")
    assert {number: row.state for number, row in lives.items()} == {1: "finished", 2: "finished", 3: "lost"}
    assert {(row.deliveries, row.finishes) for row in (lives[1], lives[2])} == {(1, 1)}
    assert {row.is_published for row in lives.values()} == {True}
    assert not any(row.is_ordered for row in lives.values())
    assert lives[1].finished_ns == lives[2].finished_ns == _CONSUMED.time
    events = small.rows("slowest", "both")[2].events
    assert [event.outcome for event in events] == ["PUB", "PUB_CLIENT", "READ_QUEUE", "START", "FIN"]


def test_what_a_server_says_is_finished_is_not_lost(small: Small) -> None:
    lives = small.rows("lives", "served")
    assert {number: row.state for number, row in lives.items()} == {1: "finished", 2: "lost"}
    assert lives[1].latency_ns == 4 * SECOND


def log_a_cluster(folder: Path) -> None:
    """What an embedded cluster and its producer log of six messages in two partitions.

    Its consumer logs nothing: what became of the messages is known from the servers alone.
    """
    handled: list[bytes] = []

    def handle(consumer: Consumer, message: Message) -> None:
        handled.append(message.body)

    folder.mkdir()
    client_logger = logging.getLogger("test.clients")
    client_logger.setLevel(logging.INFO)
    server_logger = logging.getLogger("nsq_fast.broker.redesigned.channel")
    handlers = log_to_file(folder / "client", log=client_logger), log_to_file(folder / "server", log=server_logger)
    level, trace = server_logger.level, TraceLog(client_logger)
    server_logger.setLevel(logging.INFO)
    trace.enable("real")
    with RedesignedCluster(2, 1, kind=True) as cluster:
        cluster.create_topic("real", 2, 1, channels=["ch"])
        lookup = [str(cluster.lookupds[0].http_address)]
        with Producer(lookupd_http_addresses=lookup, trace=trace) as producer:
            for number in range(6):
                producer.publish("real", b"%d" % number, partition=number % 2)
        with Consumer("real", "ch", message_handler=handle, lookupd_http_addresses=lookup):
            until(lambda: len(handled) == 6)
    for logger, handler in zip((client_logger, server_logger), handlers, strict=True):
        logger.removeHandler(handler)
        handler.close()
    server_logger.setLevel(level)


def test_the_logs_of_an_embedded_cluster_and_of_its_clients_are_joined(small: Small) -> None:
    lives = small.rows("lives", "real").values()
    assert sorted((row.partition, row.state, row.deliveries, row.is_published) for row in lives) == [
        (partition, "finished", 1, True) for partition in (0, 0, 0, 1, 1, 1)
    ]
    for row in small.rows("slowest", "real").values():
        server = [event.outcome for event in row.events if event.event == "server"]
        assert server == ["PUB", "PUB_CLIENT", "READ_QUEUE", "START", "FIN"]
        assert [event.event for event in row.events].count("publish") == 1


# The stream writes what a batch writes: also after a restart, or a crash within a micro-batch.


COMPARED = ("lives", "windows", "lost", "duplicates", "violations", "skews", "slowest")


def compared(run: Run, folder: Path, table: str) -> list[str]:
    found = read_table(run.spark, folder, table).drop("batch")
    if table in ("lives", "windows"):
        end = run.records[-1].time - SECOND
        found = found.where(f"window_ns < {end // SECOND // 10 * 10 * SECOND}")
    if table == "slowest":
        found = found.orderBy("latency_ns", ascending=False).limit(SETTINGS.slowest)
    if table == "skews":
        found = found.groupBy("side", "nsqd", "host").agg({"messages": "sum", "worst_ns": "max"})
    return sorted(map(repr, found.collect()))


class Stream:
    """A stream into tables of what comes in files, and of what comes through NSQ itself."""

    def __init__(self, spark: SparkSession, broker: BrokerProcess, folder: Path) -> None:
        self._spark, self._folder = spark, folder
        self.logs, self.tables = folder / "logs", folder / "tables"
        self.logs.mkdir()
        self._options = {
            "nsqd_tcp_addresses": str(broker.nsqd.tcp),
            "nsqd_http_addresses": str(broker.nsqd.http),
            "topic": "traces",
            "channel": "spark",
            "journal": str(folder / "journal"),
        }
        self._client = NsqdHTTPClient.from_url(f"http://{broker.nsqd.http}")
        self._client.create_topic("traces")
        self._client.create_channel("traces", "spark")

    def give(self, name: str, found: Iterable[Any]) -> None:
        """A file, which appears complete."""
        hidden = self.logs / f".{name}"
        hidden.write_text("".join(f"{record}\n" for record in found))
        hidden.rename(self.logs / name)

    def publish(self, found: Iterable[Any]) -> None:
        bodies = [str(record).encode() for record in found]
        self._client.multipublish("traces", bodies, binary=True)
        until(lambda: self._client.stats("traces")["topics"][0]["channels"][0]["depth"] == len(bodies))

    def run(self) -> None:
        """A micro-batch of all there is."""
        messages = self._spark.readStream.format("nsq").options(**self._options).load()
        lines = stream_logs(self._spark, self.logs, maxFilesPerTrigger="2").unionByName(parse_lines(messages, "body"))
        query = stream_tables(lines, self.tables, self._folder / "checkpoint", SETTINGS, availableNow=True)
        try:
            query.awaitTermination()
        finally:
            query.stop()

    def table(self, name: str) -> DataFrame:
        return read_table(self._spark, self.tables, name)


def test_a_stream_that_ends_and_crashes_writes_what_a_batch_writes(
    spark: SparkSession, run: Run, broker: BrokerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, found = Stream(spark, broker, tmp_path), run.records
    begin, rest = found[: len(found) * 2 // 3], found[len(found) * 2 // 3 :]
    stream.give("first.log", begin[::2])
    stream.give("second.log", begin[1::2])
    stream.run()
    assert 0 < stream.table("lives").count() < read_table(spark, run.folder, "lives").count()
    other = stream_tables(stream_logs(spark, stream.logs), stream.tables, tmp_path / "other", availableNow=True)
    with pytest.raises(Exception, match="not those of this checkpoint"):
        other.awaitTermination()
    # Of a message that was lost: by now that is decided.
    lost = ("orders", 0, "audit", 150)
    stream.give("late.log", [trace_logs.good_log(130, seed=0)[lost][0]])
    stream.publish(rest)
    write = BatchWriter.write

    def crash(self: BatchWriter, name: str, rows: Any) -> Any:
        written = write(self, name, rows)
        if name == "slowest":
            raise RuntimeError("crashed on purpose")
        return written

    monkeypatch.setattr(BatchWriter, "write", crash)
    with pytest.raises(Exception, match="crashed on purpose"):
        stream.run()
    monkeypatch.undo()
    stream.run()
    for table in COMPARED:
        expected = compared(run, run.folder, table)
        assert expected, table
        assert compared(run, stream.tables, table) == expected, table
    (late,) = stream.table("late").collect()
    assert (late.topic, late.partition, late.channel, int(late.internal_id), late.finishes) == (*lost, 1)
    assert lost in {
        (row.topic, row.partition, row.channel, int(row.internal_id)) for row in stream.table("lost").collect()
    }


# The report without Spark: its figures are those of Spark, on logs with faults, on random ones and on awkward ones.


pytest.importorskip("duckdb", reason="no duckdb: pip install 'nsq-fast[trace]'")

PUBLISH = {
    "event": "publish",
    "time": START,
    "topic": "t",
    "partition": 0,
    "nsqd": "n:1",
    "internal_id": 1,
    "trace_id": 2,
}

CONSUME = {
    **PUBLISH,
    "event": "consume",
    "channel": "c",
    "local": "h:2",
    "timestamp": START,
    "attempts": 1,
    "outcome": "FIN",
    "handling_time": 0.0015,
}

AWKWARD = [
    "",
    "   ",
    "no record",
    "[1, 2]",
    "{}",
    "null",
    '{"event":"publish","time":1',
    "x" * 300 + " é",
    "2026 INFO {not json} " + json.dumps(PUBLISH, separators=(",", ":")),
    json.dumps({**PUBLISH, "internal_id": 3}) + " and something behind",
    json.dumps({**PUBLISH, "internal_id": 2**64 - 1}),
    json.dumps({**PUBLISH, "internal_id": 2**64}),
    json.dumps({**PUBLISH, "internal_id": -1}),
    json.dumps({**PUBLISH, "internal_id": 4, "time": 2**62 + 1}),
    json.dumps({**PUBLISH, "internal_id": 4, "time": -1}),
    json.dumps({**PUBLISH, "internal_id": 4, "time": "soon"}),
    json.dumps({**PUBLISH, "internal_id": 5, "partition": 2**31}),
    json.dumps({**PUBLISH, "internal_id": 6, "partition": None}),
    json.dumps({**PUBLISH, "internal_id": 7, "nsqd": None}),
    json.dumps({**PUBLISH, "internal_id": 8, "topic": 7}),
    json.dumps({**PUBLISH, "internal_id": 9, "unknown": {"a": [1]}}),
    json.dumps({**PUBLISH, "internal_id": 10, "topic": "nobody_reads"}),
    json.dumps({**PUBLISH, "internal_id": 11, "event": "other"}),
    json.dumps({**CONSUME, "internal_id": 1, "outcome": "GONE"}),
    json.dumps({**CONSUME, "internal_id": 1, "attempts": None}),
    json.dumps({**CONSUME, "internal_id": 12, "handling_time": 2e9}),
    json.dumps({**CONSUME, "internal_id": 12, "handling_time": -0.1}),
    json.dumps({**CONSUME, "internal_id": 13, "handling_time": 1.0000000015}),
    json.dumps({**CONSUME, "internal_id": 14, "handling_time": None}),
    json.dumps({**CONSUME, "internal_id": 15, "timestamp": START + 5 * SECOND}),
    json.dumps({**CONSUME, "internal_id": 16, "event": "receive", "outcome": None}),
    json.dumps({**CONSUME, "internal_id": 17, "topic": "größe", "channel": "a'b\"c"}),
    json.dumps({**CONSUME, "internal_id": 18, "topic": "half of a pair: \ud800"}),
    f'{json.dumps({**PUBLISH, "internal_id": 19})[:-1]},"deep":{"[" * 100_000}{"]" * 100_000}}}',
]

ID = (1 << 50) + 5  # of partition 1

STORED, DELIVERED = "[TRACE] topic s-1 trace id 9: message", "[TRACE] topic s channel c trace id 9: message"

SERVER = [
    f"[nsqd] 2026 {STORED} {ID}( 10) put to channel at offset: 40, x at time {START}",
    f"{STORED} {ID + 1} put success from client 1:2 at offset: 80, x at time {START}",
    f"{DELIVERED} {ID} (ts: {START}, offset: 40, pri:0) consume state START"
    f" from client 10.0.0.1:5(3) at time: {START + 7} cost: 5, attempt: 1",
    f"{DELIVERED} {ID} (ts: {START}, offset: 40, pri:-1) consume state FIN"
    f" from client (3) at time: {START + 9} cost: -5, attempt: 1",
    f"{DELIVERED} {2**63 + 5} (ts: {START}, offset: 1, pri:0) consume state FIN_INTERNAL"
    f" from client x(3) at time: {START + 9} cost: 1, attempt: {2**31}",
    f"{DELIVERED} {ID} (ts: {2**63}, offset: 1, pri:0) consume state FIN"
    " from client x(3) at time: 5 cost: 1, attempt: 1",
    f"[TRACE] topic s-{2**31} trace id 9: message 5( 10) put x at offset: {2**63}, x at time {START}",
    f"[TRACE] topic s-1 trace id {2**64}: message 5( 10) put x at offset: 1, x at time {START}",
    f"[TRACE] topic s-1 trace id {'9' * 5000}: message 5( 10) put x at offset: 1, x at time {START}",
    f"{STORED} {ID + 2}( 10) put x at offset: {'9' * 5000}, x at time {START}",
    "[TRACE] topic of something else",
]


def random_lines(seed: int, count: int) -> list[str]:
    """Records of few messages, so that they meet: in any order, repeated, with gaps, by clocks that disagree."""
    chance = random.Random(seed)

    def maybe(value: Any) -> Any:
        return None if chance.random() < 0.1 else value

    lines = []
    for _ in range(count):
        number = chance.randrange(60)
        partition = chance.choice([None, 0, 1])
        common = {
            "time": START + chance.randrange(30 * SECOND),
            "topic": chance.choice(["a", "b"]),
            "partition": partition,
            "nsqd": f"n{chance.randrange(3)}:1",
            "internal_id": number + chance.choice([0, 0, 0, 2**63]),
            "trace_id": number % 2,
        }
        if chance.random() < 0.4:
            record = {"event": "publish", **common, "offset": maybe(number * 10), "size": maybe(10)}
        else:
            record = {
                "event": chance.choice(["receive", "consume", "consume", "consume"]),
                **common,
                "channel": chance.choice(["x", "y"]),
                "local": f"h{chance.randrange(3)}:{chance.randrange(5)}",
                "timestamp": START + chance.randrange(20 * SECOND),
                "attempts": chance.choice([0, 1, 1, 2, 3]),
                "outcome": chance.choice(["FIN", "FIN", "FIN", "REQ", "TIMEOUT"]),
                "offset": maybe(chance.choice([None, number * 10])),
                "size": maybe(10),
                "handling_time": maybe(chance.random()),
            }
        lines.append(json.dumps(record))
    return lines


def write_awkward(logs: Path, seed: int) -> None:
    """Files of all kinds, of random lines and of such as are hard to read."""
    logs.mkdir()
    (logs / "random names é.log").write_text("\n".join(random_lines(seed, 3000)) + "\n", encoding="utf-8")
    (logs / "mac.log").write_text("\r".join(random_lines(seed + 10, 20)), encoding="utf-8")
    (logs / "windows.log.gz").write_bytes(gzip.compress("\r\n".join(random_lines(seed + 20, 20)).encode()))
    (logs / "more.log.bz2").write_bytes(bz2.compress("\n".join(SERVER).encode()))
    (logs / "awkward.log").write_text("\n".join(AWKWARD), encoding="utf-8")


def test_the_figures_are_those_of_spark(spark: SparkSession, small: Small) -> None:
    """As are those of a report: see test_a_report_on_logs_and_again_on_its_tables."""
    ours, theirs = local_figures(small.logs, OF_SMALL), figures_of(spark, small.folder)
    for name in Figures.__struct_fields__:
        assert getattr(ours, name) == getattr(theirs, name), name


def logged(folder: Path, lines: list[str]) -> Path:
    path = folder / "some.log"
    path.write_text("\n".join(lines))
    return path


def test_what_it_cannot_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty.log").touch()
    (tmp_path / "x.zst").write_bytes(b"x")
    (tmp_path / "torn.gz").write_bytes(gzip.compress(random.Random(1).randbytes(9999))[:-99])
    (tmp_path / "broken.gz").write_bytes(
        gzip.compress(b"x")[:10] + b"\x07" + bytes(20)
    )  # there is no block of such a type
    for name, message in {
        "empty.log": "nothing was traced: the logs are empty",
        "x.zst": "--local reads plain, .gz and .bz2 files",
        "torn.gz": r"torn\.gz: cannot be read",
        "broken.gz": r"broken\.gz: cannot be read",
        "none.log": "names no file",
    }.items():
        with pytest.raises(ConfigError, match=message):
            local_figures(tmp_path / name)
    with pytest.raises(ConfigError, match="--local reads files of this machine"):
        local_figures("s3://bucket/x.log")
    with pytest.raises(ConfigError, match="nothing was traced"):
        local_figures(logged(tmp_path, AWKWARD[:7]))
    with pytest.raises(ConfigError, match="memory='much': must be a number with k, m, g or t"):
        local_figures(logged(tmp_path, [json.dumps(PUBLISH)]), memory="much")
    for much in ("99999999999999999999g", "9" * 5000 + "k", "8388608t"):
        with pytest.raises(ConfigError, match=f"memory='{much}': is more than any machine has"):
            local_figures(logged(tmp_path, [json.dumps(PUBLISH)]), memory=much)
    assert local_figures(logged(tmp_path, [json.dumps(PUBLISH)]), memory="8388607t").records == 1
    with pytest.raises(ConfigError, match="'' names no file"):
        local_figures("")
    with pytest.raises(ConfigError, match=r"memory='1k', temporary folder .*: Out of Memory"):
        local_figures(logged(tmp_path, [json.dumps(PUBLISH)]), memory="1k")


def test_a_log_that_is_removed_meanwhile_is_named(tmp_path: Path) -> None:
    logs = [tmp_path / "a.log", tmp_path / "b.log"]
    for log in logs:
        log.write_text(json.dumps(PUBLISH))

    def remove(stage: str, share: float) -> None:
        if stage == "reading" and share:
            logs[1].unlink(missing_ok=True)

    with pytest.raises(ConfigError, match=r"b\.log: cannot be read: .*No such file"):
        local_figures(tmp_path, tell=remove)


def test_no_line_stops_it(tmp_path: Path) -> None:
    found = local_figures(logged(tmp_path, [*AWKWARD[-2:], *SERVER[-3:]]))
    assert (found.lines, found.problems) == (5, 3)
    assert [group.topic for group in found.groups] == ["half of a pair: ?"]


def test_a_report_of_a_publish_alone_and_without_order(tmp_path: Path) -> None:
    only = local_figures(logged(tmp_path, [json.dumps(PUBLISH)]))
    assert (only.records, only.unconsumed, only.groups, only.channels) == (1, {"t": 1}, [], [])
    assert "1 publish to t, and no delivery was recorded" in html(only)
    lines = random_lines(5, 3000)
    assert local_figures(logged(tmp_path, lines), TraceSettings(order="ids")).totals["violations"] > 0
    assert local_figures(logged(tmp_path, lines), TraceSettings(order="off")).totals["violations"] == 0


def test_little_memory_and_many_batches_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = logged(tmp_path, random_lines(6, 4000))
    shares: list[tuple[str, float]] = []
    whole = local_figures(path)
    monkeypatch.setattr("nsq_fast.spark.trace.local.ROWS", 100)
    assert local_figures(path, memory="100m", tell=lambda stage, share: shares.append((stage, share))) == whole
    assert list(dict.fromkeys(stage for stage, _ in shares)) == ["reading", "joining", "counting"]
    reading = [share for stage, share in shares if stage == "reading"]
    assert reading == sorted(reading)
    assert reading[-1] == 1.0


def test_the_command_needs_no_java(tmp_path: Path) -> None:
    logs = logged(tmp_path, random_lines(7, 500))
    page = tmp_path / "report.html"
    command = [sys.executable, "-m", "nsq_fast", "trace-report", str(logs), "--local", "--json", "--html", str(page)]
    env = {**os.environ, "PATH": "", "JAVA_HOME": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS, check=False, env=env)
    assert done.returncode == 0, done.stderr
    found, figures = json.loads(done.stdout), local_figures(logs)
    assert {name: found[name] for name in figures.totals} == figures.totals
    assert [each["latency_p99_ns"] for each in found["groups"]] == [
        each.durations["latency_p99_ns"] for each in figures.groups
    ]
    assert "NSQ traces" in page.read_text()


# `nsq-fast trace-report`, and the program that measures, in the process of the tests, with their session.


def test_a_report_on_logs_and_again_on_its_tables(tmp_path: Path, run: Run, report_here: Report) -> None:
    """It is the one that is made without Spark."""
    local = CliRunner().invoke(main, ["trace-report", "--local", "--json", *GIVEN, *map(str, run.logs)])
    assert run.told == json.loads(local.stdout)
    again = report_here("--tables", run.folder, "--html", tmp_path / "report.html")
    assert again.exit_code == 0, again.output
    assert f"{len(run.all_planted('lost')):,} │ published, never finished" in again.output
    page = (tmp_path / "report.html").read_text()
    assert "NSQ traces" in page
    assert page == html(local_figures(run.logs, SETTINGS))


def test_the_program_that_measures_finds_what_it_planted(
    spark: SparkSession, report_here: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, with the session of all tests."""
    file, figures = ROOT / "bench" / "spark_trace.py", tmp_path / "figures.json"
    given = ["--records", "4000", "--partitions", "2", "--folder", str(tmp_path), "--json", str(figures)]
    monkeypatch.setattr(sys, "argv", [str(file), *given])
    with compiled(spark):
        runpy.run_path(str(file), run_name="__main__")
    assert json.loads(figures.read_text())["found"] == {"lost": 1, "duplicates": 1, "violations": 1, "skews": 0}


@pytest.mark.parametrize(
    "given", [["--memory", "much"], ["--conf", "spark.driver.memory=much"], ["--master", "nowhere"]], ids="".join
)
def test_a_spark_that_does_not_start_is_no_traceback(java: None, tmp_path: Path, given: list[str]) -> None:
    """So what is given reaches it."""
    done = run_command("trace-report", logged(tmp_path, [json.dumps(PUBLISH)]), "--json", *given)
    assert done.returncode == 1
    assert "JAVA_GATEWAY_EXITED" in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("Error: Spark: ")
    assert "Traceback" not in done.stderr


def test_logs_in_which_nothing_was_traced(tmp_path: Path, report_here: Report) -> None:
    log = tmp_path / "some.log"
    log.write_text("INFO started\n")
    done = report_here(log, "--json")
    assert done.exit_code == 2
    assert "nothing was traced" in done.output
    assert isinstance(done.exception, SystemExit)  # and not a traceback
