"""The sink in Spark: what was written is there once; what fails is said; what a retry costs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gevent
import pyarrow.parquet as pq
import pytest
from support.fleet import unanswered
from support.servers import RealNsqd, find_server
from support.spark_driver import Driver
from support.spark_ledger import account
from support.spark_marks import poll
from support.spark_settings import LOCAL_CLUSTER_OF_ONE
from support.spark_sink import numbered, taken
from support.waiting import until

from nsq_fast import Consumer
from nsq_fast.broker import BrokerProcess, ClusterProcess
from nsq_fast.names import Address
from nsq_fast.protocol.partitioner import murmur3_partition
from nsq_fast.runtime.admin import LookupdHTTPClient

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Drivers = Callable[..., Driver]


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess() as running:
        yield running


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterProcess]:
    with ClusterProcess(nodes=3, kind=True) as running:
        yield running


@pytest.fixture(params=["embedded", "real"])
def one_nsqd(request: pytest.FixtureRequest, broker: BrokerProcess, tmp_path: Path) -> Iterator[Address]:
    if request.param == "embedded":
        yield broker.nsqd.tcp
        return
    if find_server("nsqd") is None:
        pytest.skip("no original nsqd")
    real = RealNsqd(tmp_path)
    yield real.tcp_address
    real.kill()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return request.node.originalname[:60]


def append(frame: DataFrame, **options: Any) -> None:
    frame.write.format("nsq").options(**options).mode("append").save()


def append_in_thread(spark: SparkSession, frame: DataFrame, options: dict[str, Any]) -> None:
    """Another thread does not know the session in which the format is registered."""
    java: Any = spark._jvm
    java.SparkSession.setActiveSession(spark._jsparkSession)
    append(frame, **options)


def numbers(spark: SparkSession, count: int) -> DataFrame:
    return spark.range(0, count, 1, 2).selectExpr("cast(id as string) body")


def lookupds(cluster: ClusterProcess) -> str:
    return ",".join(str(lookupd.http) for lookupd in cluster.lookupds)


def all_taken(cluster: ClusterProcess, topic: str, count: int) -> dict[int, list[bytes]]:
    """What each partition has, asked of the nsqd that leads it now."""
    with LookupdHTTPClient(*cluster.lookupds[0].http) as client:
        leaders = client.lookup(topic)["partitions"]
    return {
        int(number): taken(
            Address(leader["broadcast_address"], leader["tcp_port"]), topic, count, partition=int(number), advanced=True
        )
        for number, leader in leaders.items()
    }


def test_rows_of_all_tasks_once(spark: SparkSession, one_nsqd: Address, topic: str, tmp_path: Path) -> None:
    append(numbers(spark, 30_000), topic=topic, nsqd_tcp_addresses=one_nsqd, reportPath=tmp_path / "reports")
    account(numbered(30_000), taken(one_nsqd, topic, 30_000)).check()
    [report] = (tmp_path / "reports").glob("write-*.json")
    assert json.loads(report.read_text()) == {
        "committed": True,
        "rows": 30_000,
        "tasks": 2,
        "failed": 0,
        "places": [{"topic": topic, "partition": None, "rows": 30_000}],
        "receipts": 0,
    }


def test_binary_bodies_topics_and_empty_tasks(spark: SparkSession, broker: BrokerProcess, topic: str) -> None:
    rows = [(bytearray(b"%d" % number), f"{topic}{number % 2}") for number in range(10)]
    frame = spark.createDataFrame(rows, "Body binary, Topic string").repartition(4).where("body < '8'")
    append(frame, lookupd_http_addresses=broker.lookupd.http)
    for half in range(2):
        assert sorted(taken(broker.nsqd.tcp, f"{topic}{half}", 4)) == numbered(8)[half::2]


@pytest.mark.parametrize(
    ("mode", "match"), [("errorifexists", "ErrorIfExists"), ("ignore", "Ignore"), ("overwrite", r"mode\(\"append\"\)")]
)
def test_only_append(spark: SparkSession, broker: BrokerProcess, mode: str, match: str) -> None:
    from pyspark.errors import AnalysisException

    writer = numbers(spark, 1).write.format("nsq").options(topic="t", nsqd_tcp_addresses=broker.nsqd.tcp)
    with pytest.raises(AnalysisException, match=match):
        writer.mode(mode).save()


@pytest.mark.parametrize(
    ("select", "options", "match"),
    [
        ("'a' body, 1 foo", {}, "column 'foo': unknown; the columns are body, topic, partition"),
        ("1 body", {}, "column 'body': is int; must be binary, string"),
        ("'a' body", {"tpoic": "t"}, "unknown option 'tpoic'; did you mean 'topic'"),
        ("'a' body", {"nsq.linger": "-1"}, "nsq.linger"),
        ("'a' body", {"nsq.auth_secret": "hush", "nsq.deflate_level": "77"}, "deflate_level=77"),
    ],
)
def test_wrong_from_the_start(spark: SparkSession, select: str, options: dict[str, str], match: str) -> None:
    from pyspark.errors import AnalysisException

    with pytest.raises(AnalysisException, match=match) as caught:
        append(spark.sql(f"select {select}"), **{"topic": "t", "nsqd_tcp_addresses": "127.0.0.1:1", **options})
    assert "hush" not in str(caught.value)


def test_a_bad_row_fails_the_write_and_abort_says_what_is_there(
    spark: SparkSession, broker: BrokerProcess, topic: str, tmp_path: Path
) -> None:
    from pyspark.errors import PythonException

    frame = spark.range(0, 100, 1, 2).selectExpr("if(id = 77, null, cast(id as string)) body")
    with pytest.raises(PythonException, match="row 27 of Arrow batch 0: body is null; of this task 0 rows are stored"):
        append(frame, topic=topic, nsqd_tcp_addresses=broker.nsqd.tcp, reportPath=tmp_path)
    [report] = map(json.loads, (path.read_text() for path in tmp_path.glob("*.json")))
    assert not report["committed"]
    assert (report["failed"], report["rows"]) in ((1, 50), (2, 0))  # the other task may have been stopped
    assert len(taken(broker.nsqd.tcp, topic, 50)) in (0, 50)


def test_keys_keep_their_order_while_leaders_move(spark: SparkSession, cluster: ClusterProcess, topic: str) -> None:
    cluster.create_topic(topic, 3, 2, multi_part=True, channels=["check"])

    def slowly(batches: Iterator[Any]) -> Iterator[Any]:
        import time

        for batch in batches:
            for start in range(0, batch.num_rows, 200):
                time.sleep(0.03)  # sleep: rows that come for some seconds
                yield batch.slice(start, 200)

    frame = spark.range(0, 12_000, 1, 2).selectExpr(
        "cast(id as string) body", "concat('key', id % 40, '-', id div 6000) key"
    )
    frame = frame.mapInArrow(slowly, frame.schema)
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "400")
    try:
        options = {"topic": topic, "lookupd_http_addresses": lookupds(cluster), "nsq.linger_max_messages": "50"}
        writing = gevent.get_hub().threadpool.spawn(append_in_thread, spark, frame, options)
        for number in (0, 1, 2, 0):
            gevent.sleep(0.4)  # sleep: trouble that is spread over the rows
            cluster.move_leader(topic, number)
        writing.get(timeout=60)
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    found = all_taken(cluster, topic, 12_000)
    result = account(numbered(12_000), [body for bodies in found.values() for body in bodies])
    result.check(duplicates=1000)  # of a command whose outcome was unknown when its leader moved
    for number, bodies in found.items():
        firsts = list(dict.fromkeys(map(int, bodies)))
        for key in range(40):
            for half in range(2):
                mine = [each for each in range(6000 * half, 6000 * (half + 1)) if each % 40 == key]
                if murmur3_partition(f"key{key}-{half}", 3) == number:
                    assert [each for each in firsts if each in set(mine)] == mine


def test_receipts_and_trace_log_join_with_what_is_consumed(
    spark: SparkSession, cluster: ClusterProcess, topic: str, tmp_path: Path
) -> None:
    cluster.create_topic(topic, 2, 1, ordered=True, channels=["check"])
    frame = numbers(spark, 1000).selectExpr("body", "cast(body as bigint) + 1 trace_id")
    reports, logs = tmp_path / "reports", tmp_path / "logs"
    append(frame, topic=topic, lookupd_http_addresses=lookupds(cluster), reportPath=reports, traceLog=logs)
    [receipts] = reports.glob("*.parquet")
    table = {row["trace_id"]: row for row in pq.read_table(receipts).to_pylist()}
    lines = [json.loads(line) for path in logs.glob("publish-*.jsonl") for line in path.read_text().splitlines()]
    assert {line["trace_id"]: line["internal_id"] for line in lines} == {
        trace_id: row["internal_id"] for trace_id, row in table.items()
    }
    read = spark.read.format("nsq").options(
        topic=topic, channel="check", lookupd_http_addresses=lookupds(cluster), startingOffsets="earliest"
    )
    consumed = read.load().select("body", "partition", "internal_id", "trace_id", "offset", "size").collect()
    assert len(consumed) == len(table) == 1000
    for row in consumed:
        receipt = table[int(bytes(row["body"])) + 1]
        assert {name: receipt[name] for name in ("partition", "internal_id", "trace_id", "offset", "size")} == {
            name: row[name] for name in ("partition", "internal_id", "trace_id", "offset", "size")
        }


# AUTH and TLS


@pytest.fixture
def auth_server() -> Iterator[Address]:
    """Grants everything to those who know the secret. In threads: Spark's calls block the hub of the test."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            grants = [{"topic": ".*", "channels": [".*"], "permissions": ["subscribe", "publish"]}]
            known = "secret=hush" in self.path
            answer = json.dumps({"ttl": 60, "identity": "me", "authorizations": grants if known else []}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Address("127.0.0.1", server.server_address[1])
    server.shutdown()
    server.server_close()


def test_auth_and_tls_through_options(
    spark: SparkSession, auth_server: Address, topic: str, tls_files: dict[str, str]
) -> None:
    from pyspark.errors import PythonException

    files = {"tls_cert": tls_files["cert"], "tls_key": tls_files["key"]}
    with BrokerProcess(lookupd=False, auth_http_addresses=(str(auth_server),), tls_required="true", **files) as broker:
        options = {"nsqd_tcp_addresses": broker.nsqd.tcp, "topic": topic, "nsq.publish_timeout": "2"}
        secure = {"nsq.tls_v1": "true", "nsq.tls_cafile": tls_files["ca"]}
        append(numbers(spark, 500), **options, **secure, **{"nsq.auth_secret": "hush"})
        with pytest.raises(PythonException, match=r"E_AUTH|E_UNAUTHORIZED") as caught:
            append(numbers(spark, 1), **options, **secure, **{"nsq.auth_secret": "guessed"})
        assert "guessed" not in str(caught.value)
        with pytest.raises(PythonException, match=r"E_INVALID|tls"):
            append(numbers(spark, 1), **options)
        with pytest.raises(PythonException, match="certificate verify failed"):
            append(numbers(spark, 1), **options, **{"nsq.tls_v1": "true"})


# Retries and restarts

RETRYING = """
import os

from pyspark import TaskContext
from support.spark_marks import poll
from support.spark_program import arguments, session
from support.spark_replay import ask
from nsq_fast.spark import foreach_batch_sink

given = arguments()
spark = session(**{"spark.sql.execution.arrow.maxRecordsPerBatch": "500"})
frame = spark.range(0, 10_000, 1, 2).selectExpr("lpad(cast(id as string), 200, '0') body")


def stored(topic):
    answers = [ask(f"{http}/stats?format=json&topic={topic}&leaderOnly=true") for http in given["https"]]
    return sum(each["message_count"] for answer in answers for each in answer["topics"])


def failing(how, topic):
    def once(batches):
        context, written = TaskContext.get(), 0
        for batch in batches:
            yield batch
            written += batch.num_rows
            if context.partitionId() == 1 and context.attemptNumber() == 0 and written >= 3000:
                poll(lambda: stored(topic) > 5_000, what="more than the rows of the other task")
                if how == "exit":
                    os._exit(3)
                raise ValueError("once")

    return once


for how, options in given["writes"]:
    rows = frame.mapInArrow(failing(how, options["topic"]), frame.schema)
    rows.write.format("nsq").options(**options).mode("append").save()
foreach_batch_sink(**given["foreach"])(frame.mapInArrow(failing("exit", given["foreach"]["topic"]), frame.schema), 0)
"""


def with_keys(cluster: ClusterProcess, topic: str) -> dict[str, str]:
    """Options of a sink whose messages have idempotence keys; makes the topic."""
    cluster.create_topic(topic, 2, 2, ext=True, multi_part=True, channels=["check", "handle"])
    return {"topic": topic, "lookupd_http_addresses": lookupds(cluster), "idempotenceKey": "true"}


def consumed(cluster: ClusterProcess, topic: str, channel: str, suppress_retried: int = 0) -> tuple[list[bytes], int]:
    """What a handler gets of all that a channel has, and how many copies its consumer finished."""
    found: list[bytes] = []
    consumer = Consumer(
        topic,
        channel,
        lookupd_http_addresses=lookupds(cluster),
        message_handler=lambda _, message: found.append(message.body),
        max_in_flight=1000,
        suppress_retried=suppress_retried,
    )
    consumer.start(block=False)
    try:
        until(lambda: found and unanswered(str(cluster.lookupds[0].http), topic, channel) == 0)
    finally:
        consumer.close()
    return found, consumer.stats().totals.suppressed


def check_keys(cluster: ClusterProcess, topic: str, expected: list[bytes]) -> int:
    """Whoever suppresses copies gets every row once; how many copies there are."""
    stored, _ = consumed(cluster, topic, "check")
    copies = account(expected, stored).extra
    bodies, suppressed = consumed(cluster, topic, "handle", suppress_retried=len(expected))
    account(expected, bodies).check()
    assert suppressed == copies
    return copies


def test_a_task_that_is_tried_again_writes_its_rows_again(
    spark_driver: Drivers, broker: BrokerProcess, cluster: ClusterProcess, tmp_path: Path
) -> None:
    """Consumers can tell the copies where rows have idempotence keys."""
    writes = {
        how: {"topic": f"again-{how}", "nsqd_tcp_addresses": str(broker.nsqd.tcp), "reportPath": str(tmp_path / how)}
        for how in ("raise", "exit")
    }
    keyed, foreach = with_keys(cluster, "again-keyed"), with_keys(cluster, "again-foreach")
    expected = [b"%0200d" % number for number in range(10_000)]
    all_writes = [*writes.items(), ("exit", keyed)]
    https = [str(nsqd.http) for nsqd in (broker.nsqd, *cluster.nsqds)]
    driver = spark_driver(RETRYING, LOCAL_CLUSTER_OF_ONE, writes=all_writes, foreach=foreach, https=https)
    driver.start()
    driver.wait()
    for topic in (keyed["topic"], foreach["topic"]):
        assert check_keys(cluster, topic, expected) > 0
    for how, options in writes.items():
        found = account(expected, taken(broker.nsqd.tcp, options["topic"], 10_000))
        found.check(duplicates=3000)
        assert found.extra > 0, how  # what the first attempt had written
        assert all(5000 <= int(body) < 8000 for body in found.duplicated)
        [report] = map(json.loads, (path.read_text() for path in (tmp_path / how).glob("*.json")))
        assert (report["committed"], report["rows"], report["tasks"]) == (True, 10_000, 2)


STREAM = """
from support.spark_program import arguments, session

given = arguments()
spark = session()
queries = []
for options in given["sinks"]:
    rows = spark.readStream.schema("body string").option("maxFilesPerTrigger", 1).text(given["files"])
    writer = rows.withColumnRenamed("value", "body").writeStream.format("nsq").options(**options)
    writer = writer.option("checkpointLocation", given["checkpoint"] + options["topic"]).trigger(availableNow=True)
    queries.append(writer.start())
for query in queries:
    query.awaitTermination()
"""


def test_a_stream_that_is_killed_loses_nothing_and_repeats_one_batch(
    spark_driver: Drivers, broker: BrokerProcess, cluster: ClusterProcess, tmp_path: Path
) -> None:
    """Consumers can tell the copies of the batch where rows have idempotence keys."""
    folder, size, files = tmp_path / "files", 500, 5
    folder.mkdir()
    for number in range(files):
        lines = range(number * size, (number + 1) * size)
        (folder / f"{number:02}.txt").write_text("".join(f"{line}\n" for line in lines))
    plain = {"topic": "stream", "nsqd_tcp_addresses": str(broker.nsqd.tcp)}
    sinks = {each["topic"]: each for each in (plain, with_keys(cluster, "stream-keyed"))}
    reports = {topic: tmp_path / "reports" / topic for topic in sinks}
    given = [{**options, "reportPath": str(reports[topic])} for topic, options in sinks.items()]
    driver = spark_driver(STREAM, files=str(folder), checkpoint=str(tmp_path / "checkpoint-"), sinks=given)
    driver.start()
    poll(lambda: all(list(each.glob("batch-1-*.json")) for each in reports.values()), what="batch 1 committed")
    driver.kill()
    driver.start()
    driver.wait()
    commits = {topic: tmp_path / f"checkpoint-{topic}" / "commits" for topic in sinks}
    last = max(commits["stream-keyed"].glob("[0-9]*"), key=lambda path: int(path.name))
    for path in (last, last.with_name(f".{last.name}.crc")):  # as a driver leaves it that is killed just before
        path.unlink()
    driver.start()
    driver.wait()
    account(numbered(files * size), taken(broker.nsqd.tcp, "stream", files * size)).check(duplicates=size)
    assert size <= check_keys(cluster, "stream-keyed", numbered(files * size)) <= 2 * size  # of the killed batch, too
    for topic, each in reports.items():
        batches = {path.name.split("-")[1] for path in each.glob("batch-*.json")}
        assert batches == {path.name for path in commits[topic].glob("[0-9]*")}
        assert len(batches) in {files - 1, files}  # killed between two steps of planning, Spark gives a batch two files
