"""The sink in Spark: what was written is there once; what fails is said. Retries: see test_spark_task_faults."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gevent
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
)
from support.servers import RealNsqd, find_server
from support.spark_ledger import account
from support.spark_sink import lookupds, numbered, taken

from nsq_fast import NsqdHTTPClient
from nsq_fast.broker import BrokerProcess, ClusterProcess
from nsq_fast.client.admin import LookupdHTTPClient
from nsq_fast.errors import ConfigError
from nsq_fast.names import Address
from nsq_fast.protocol.publishing import murmur3_partition
from nsq_fast.spark.options import SINK_COLUMNS, SinkOptions
from nsq_fast.spark.sink import ArrowWriter, stream_writer
from nsq_fast.spark.sink.plan import column_names
from nsq_fast.spark.source import spark_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


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


@pytest.mark.parametrize("headers_as", ["json", "map", "array"])
def test_headers_are_written_as_they_are_read(
    spark: SparkSession, cluster: ClusterProcess, topic: str, headers_as: str
) -> None:
    name = f"{topic[:40]}_{headers_as}"
    cluster.create_topic(name, 1, 1, ext=True, channels=["check"])
    servers = {"topic": name, "lookupd_http_addresses": cluster.lookupds[0].http}
    append(spark.range(1).selectExpr("'a' body", """'{"k":"v","w":"x"}' headers"""), **servers)
    source = spark.read.format("nsq").options(**servers, channel="check", headersAs=headers_as)
    append(source.load().select("body", "headers"), **servers)
    first, second = source.load().select("body", "headers").collect()
    assert first == second
    assert first.headers


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
        topic=topic,
        channel="check",
        lookupd_http_addresses=lookupds(cluster),
        startingOffsets="earliest",
        columns="body,partition,internal_id,trace_id,offset,size",
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
        options = {"nsqd_tcp_addresses": broker.nsqd.tcp, "topic": topic, "nsq.publish_timeout": "4"}
        secure = {"nsq.tls_v1": "true", "nsq.tls_cafile": tls_files["ca"]}
        append(numbers(spark, 500), **options, **secure, **{"nsq.auth_secret": "hush"})
        with pytest.raises(PythonException, match=r"E_AUTH|E_UNAUTHORIZED") as caught:
            append(numbers(spark, 1), **options, **secure, **{"nsq.auth_secret": "guessed"})
        assert "guessed" not in str(caught.value)
        with pytest.raises(PythonException, match=r"E_INVALID|tls"):
            append(numbers(spark, 1), **options)
        with pytest.raises(PythonException, match="certificate verify failed"):
            append(numbers(spark, 1), **options, **{"nsq.tls_v1": "true"})


# Which DataFrames may be written, and how the options of the sink are read.


TYPES: dict[str, DataType] = {
    "binary": BinaryType(),
    "string": StringType(),
    "tinyint": ByteType(),
    "smallint": ShortType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "long": LongType(),
    "double": DoubleType(),
    "array<binary>": ArrayType(BinaryType()),
    "map<string,string>": MapType(StringType(), StringType()),
    "map<string,int>": MapType(StringType(), IntegerType()),
}


def schema(text: str) -> StructType:
    """Columns as ``name type, ...``."""
    found = StructType()
    for each in text.split(", "):
        name, kind = each.split(" ")
        found.add(name, TYPES[kind])
    return found


def names(text: str, topic: str | None = "t", key_strategy: str = "murmur3") -> dict[str, str]:
    return column_names(schema(text), topic=topic, key_strategy=key_strategy)


def test_every_column_in_every_type_that_it_may_have() -> None:
    assert names("body binary") == {"body": "body"}
    assert names("BODY string, Topic string, trace_ID long", None) == {
        "body": "BODY",
        "topic": "Topic",
        "trace_id": "trace_ID",
    }
    everything = (
        "body binary, topic string, partition int, key string, trace_id long, headers string, tag string, defer_ms int"
    )
    assert set(names(everything)) == set(SINK_COLUMNS)
    for kind in ("tinyint", "smallint", "int", "bigint"):
        assert names(f"body string, partition {kind}, trace_id {kind}, defer_ms {kind}")
        assert names(f"body string, key {kind}", key_strategy="hashcode")
    assert names("body string, headers map<string,string>, key binary")
    as_read = spark_schema(["body", "headers"], "array")
    assert column_names(as_read, topic="t", key_strategy="murmur3") == {"body": "body", "headers": "headers"}
    assert names("body string, key string", key_strategy="hashcode")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("value binary", "column 'value': unknown; the columns are body, topic, partition, key"),
        ("topic string", "column 'body' is missing"),
        ("body int", "column 'body': is int; must be binary, string"),
        ("body array<binary>", "column 'body': is array<binary>"),
        ("body binary, Body string", "'Body': there twice, as 'body' too"),
        ("body binary, partition string", "column 'partition': is string; must be tinyint, smallint, int, bigint"),
        (
            "body binary, headers map<string,int>",
            "column 'headers': is map<string,int>; must be string, map<string,string>",
        ),
        ("body binary, headers array<binary>", r"must be string, map<string,string>, array<struct<key:string,value:"),
        ("body binary, defer_ms double", "column 'defer_ms': is double"),
        ("body binary, key int", "column 'key': is int; key_strategy 'murmur3' takes string, binary"),
        ("body string, key binary", "column 'key': is binary; key_strategy 'hashcode' takes string"),
    ],
)
def test_other_columns_are_refused(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        names(text, key_strategy="hashcode" if "hashcode" in match else "murmur3")


def test_a_topic_is_needed() -> None:
    with pytest.raises(ConfigError, match="topic: give the option, or a column"):
        names("body string", None)
    assert names("body string, topic string", None)


def test_a_folder_that_takes_no_reports_is_refused_before_anything_is_published(
    spark: SparkSession, broker: BrokerProcess, topic: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    given = {"topic": topic, "nsqd_tcp_addresses": broker.nsqd.tcp, "reportPath": tmp_path / "file" / "reports"}
    with pytest.raises(Exception, match=r"ConfigError: reportPath='.*file/reports': cannot be made: ") as caught:
        append(numbers(spark, 5), **given)
    assert "reportPath" in str(caught.value).splitlines()[0]
    assert not NsqdHTTPClient.from_url(broker.nsqd.http).stats(topic=topic)["topics"]


@pytest.mark.parametrize("ends", ["commit", "abort"])
def test_a_report_that_cannot_be_kept_fails_no_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ends: str
) -> None:
    reports = tmp_path / "reports"
    given = {"topic": "t", "nsqd_tcp_addresses": "127.0.0.1:4150", "reportPath": str(reports)}
    writer = ArrowWriter(SinkOptions.parse(given), schema("body string"), False)
    reports.rmdir()
    reports.touch()
    getattr(writer, ends)([])
    assert f"write has no report in {reports}: " in caplog.text


def test_writers_check_at_load_and_travel() -> None:
    options = SinkOptions.parse({"topic": "t", "nsqd_tcp_addresses": "127.0.0.1:4150", "nsq.auth_secret": "hush"})
    for kind in (ArrowWriter, stream_writer):
        make: Any = kind
        with pytest.raises(ConfigError, match=r'mode\("append"\)'):
            make(options, schema("body string"), True)
        with pytest.raises(ConfigError, match="unknown"):
            make(options, schema("body string, foo int"), False)
        copy = pickle.loads(pickle.dumps(make(options, schema("body string"), False)))
        assert copy.options == options
        assert copy.names == {"body": "body"}
    assert "hush" not in repr(options)
