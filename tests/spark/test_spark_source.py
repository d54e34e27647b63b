"""The source as a query sees it: its rows and options, what is left to do, and what a listener is told."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspark
import pytest
from click.testing import CliRunner, Result
from prometheus_client import CollectorRegistry
from pyspark.errors import AnalysisException
from pyspark.sql.datasource import DataSourceReader
from support.journal import CHANNEL, TOPIC, Server
from support.spark import ROOT, SECRET, UNREACHABLE, Driver
from support.spark_compiled import compiled
from support.spark_marks import LIMIT
from support.spark_program import run_to_end
from support.spark_replay import Topic
from support.spark_sink import numbered, taken
from support.waiting import PROCESS, until

import nsq_fast.spark
from nsq_fast._codec import encode_message
from nsq_fast._frame import ColumnReader
from nsq_fast.broker import BrokerProcess, ClusterProcess
from nsq_fast.cli import main
from nsq_fast.client.admin import NsqdHTTPClient
from nsq_fast.errors import ConfigError, DataLost
from nsq_fast.spark import MetricsListener, NsqDataSource
from nsq_fast.spark.arrow_rows import to_batch
from nsq_fast.spark.lag import SourceState, read_checkpoint
from nsq_fast.spark.versions import TELLS_START

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# The format in a real Spark: found by itself, checked at load, its rows as Spark sees them, its secrets nowhere.


Drivers = Callable[..., Driver]


def made_up_source() -> type[NsqDataSource]:
    """The source without a server: four rows of three messages, one without its partition."""

    class Reader(DataSourceReader):
        def __init__(self, options: Any) -> None:
            self.options = options

        def read(self, partition: Any) -> Iterator[Any]:
            head: Any = {"ext_version": 4, "ext": b'{"k":"v"}', "offset": 700, "raw_size": 40}
            at = 1_700_000_000_123_456_789
            frames = [encode_message(at, 65535, b"\xff" * 16, b"%d" % number, **head) for number in range(3)]
            columns = ColumnReader(ext=True, detail=True).feed(b"".join(frames))
            place: Any = {"topic": self.options.topic, "partition": 5, "nsqd": "h:1", "is_redesigned": True}
            yield to_batch(columns, self.options.columns, self.options.headers_as, **place)
            place = {**place, "partition": None, "first": 1, "count": 1}
            yield to_batch(columns, self.options.columns, self.options.headers_as, **place)

    class MadeUp(NsqDataSource):  # within a function, so that workers get it itself: they cannot import this file
        @classmethod
        def name(cls) -> str:
            return "nsq-made-up"

        def make_batch_reader(self, kind: str, options: Any) -> Any:
            return Reader(options)

    return MadeUp


def test_rows_as_spark_sees_them(spark: SparkSession) -> None:
    spark.dataSource.register(made_up_source())
    source = spark.read.format("nsq-made-up").options(
        **UNREACHABLE, reader="replayable", includeHeaders="true", columns="*"
    )
    frame = source.load()
    readable = frame.selectExpr("*", "decode(body, 'utf-8') text").drop("body", "message_id")
    with compiled(spark):
        texts = [row[0] for row in readable.selectExpr("to_json(struct(*))").collect()]
    expected = (
        '{{"topic":"t","partition":5,"internal_id":-1,"trace_id":-1,"timestamp":"2023-11-14T22:13:20.123Z",'
        '"attempts":65535,"offset":700,"size":40,"headers":"{{\\"k\\":\\"v\\"}}","nsqd":"h:1","text":"{}"}}'
    )
    wanted = [expected.format(number) for number in range(3)] + [expected.format(1).replace('"partition":5,', "")]
    assert sorted(texts) == sorted(wanted)
    assert [row[0].hex() for row in frame.select("message_id").collect()] == ["ff" * 16] * 4
    chosen = source.option("columns", "headers,body").load()
    assert (chosen.columns, chosen.count()) == (["headers", "body"], 4)
    as_map = source.option("headersAs", "map").load()
    assert [row[0] for row in as_map.selectExpr("headers['k']").collect()] == ["v"] * 4


def load(spark: SparkSession, **options: str) -> Any:
    return spark.readStream.format("nsq").options(**{**UNREACHABLE, **options}).load()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"startingoffset": "latest"}, "unknown option 'startingoffset'; did you mean 'startingOffsets'?"),
        ({"reader": "replayable", "journal": "/j"}, "journal: the replayable reader cannot honour it"),
        ({"nsq.lookupd_authorization": SECRET}, "Spark would show its value in plans and logs"),
    ],
)
def test_what_is_wrong_is_said_at_load(spark: SparkSession, options: dict[str, str], text: str) -> None:
    with pytest.raises(AnalysisException) as failure:
        load(spark, **options)
    assert f"ConfigError: {text}" in str(failure.value) or text in str(failure.value)
    assert SECRET not in str(failure.value)


def test_load_asks_no_server(spark: SparkSession) -> None:
    assert load(spark).isStreaming
    assert load(spark, columns="body,attempts").columns == ["body", "attempts"]
    assert spark.read.format("nsq").options(**UNREACHABLE).load().columns == ["timestamp", "body", "topic", "attempts"]


WITHOUT = """
import sys
sys.modules[{missing!r}] = None
import nsq_fast.spark, pyspark_nsq
assert not hasattr(pyspark_nsq, "DefaultSource")
try:
    nsq_fast.spark.register(None)
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize("missing", ["pyspark", "pyarrow"])
def test_the_extra_is_named_where_it_is_missing(missing: str) -> None:
    root = Path(nsq_fast.spark.__file__).parents[2]
    command = [sys.executable, "-c", WITHOUT.format(missing=missing)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS, cwd=root, check=False)
    assert "pip install 'nsq-fast[spark]'" in done.stdout, done.stderr


def test_spark_finds_the_format_of_an_editable_install(tmp_path: Path) -> None:
    """It lists modules. The package itself is left out here: it would be compiled."""
    tree, target = tmp_path / "tree", tmp_path / "site"
    (tree / "nsq_fast").mkdir(parents=True)
    target.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "pyspark_nsq.py"):
        shutil.copy(ROOT / name, tree)
    (tree / "nsq_fast" / "__init__.py").touch()
    (tree / "setup.py").write_text("from setuptools import setup\nsetup(version='1')\n")
    build = f"from setuptools import build_meta; print(build_meta.build_editable({str(target)!r}))"
    done = subprocess.run([sys.executable, "-c", build], cwd=tree, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(target / done.stdout.split()[-1]) as wheel:
        wheel.extractall(target)
    look = f"import pkgutil, site; site.addsitedir({str(target)!r}); print([m.name for m in pkgutil.iter_modules()])"
    found = subprocess.run([sys.executable, "-IS", "-c", look], capture_output=True, text=True, check=True)
    assert "'pyspark_nsq'" in found.stdout


NUMBERS = count()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"{request.node.originalname[5:40]}_{next(NUMBERS)}"


def publish(broker: BrokerProcess, topic: str, bodies: list[bytes]) -> None:
    with NsqdHTTPClient(*broker.nsqd.http) as client:
        client.create_topic(topic)
        client.create_channel(topic, "spark")
        if bodies:
            client.multipublish(topic, bodies, binary=True)


@pytest.fixture
def three(broker: BrokerProcess, name: str) -> dict[str, str]:
    """Where three messages are: options of a source."""
    publish(broker, name, numbered(3))
    return {"topic": name, "lookupd_http_addresses": str(broker.lookupd.http)}


def failure(action: Any) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # Spark has many kinds; the text is what counts
        action()
    return str(caught.value)


def test_a_table_and_a_view_are_read_by_sql(spark: SparkSession, broker: BrokerProcess, name: str) -> None:
    publish(broker, name, numbered(30))
    options = (
        f"topic '{name}', channel 'spark', lookupd_http_addresses '{broker.lookupd.http}', columns 'body,attempts'"
    )
    spark.sql(f"CREATE TABLE {name} USING nsq OPTIONS ({options})")
    found = spark.sql(f"SELECT cast(body AS string) AS text FROM {name} WHERE attempts > 0").collect()
    assert sorted(row.text.encode() for row in found) == sorted(numbered(30))
    assert spark.read.table(name).columns == ["body", "attempts"]
    assert spark.read.table(name).count() == 30
    spark.sql(f"CREATE TEMP VIEW {name}_view USING nsq OPTIONS ({options})")
    assert spark.sql(f"SELECT * FROM {name}_view").count() == 30
    assert "it was made to be read" in failure(lambda: spark.sql(f"INSERT INTO {name} SELECT cast('a' AS binary), 1"))


def test_rows_are_inserted_into_a_table(spark: SparkSession, broker: BrokerProcess, name: str, tmp_path: Path) -> None:
    servers = f"lookupd_http_addresses '{broker.lookupd.http}'"
    spark.sql(f"CREATE TABLE {name} USING nsq OPTIONS (topic '{name}', {servers})")
    spark.sql(f"INSERT INTO {name} VALUES ('0'), ('1')")
    spark.range(2, 4).selectExpr("cast(id AS string) AS body").write.insertInto(name)
    assert sorted(taken(broker.nsqd.tcp, name, 4)) == numbered(4)
    spark.sql(f"CREATE TABLE {name}_by_topic USING nsq OPTIONS ({servers}, columns 'topic,body,defer_ms')")
    columns, values = ("body, topic", f"'4', '{name}'")
    if pyspark.__version__.startswith("4.0."):  # it takes no row without all columns
        columns, values = (f"{columns}, defer_ms", f"{values}, null")
    spark.sql(f"INSERT INTO {name}_by_topic ({columns}) SELECT {values}")
    assert taken(broker.nsqd.tcp, name, 1) == [b"4"]
    assert "mode" in failure(lambda: spark.sql(f"INSERT OVERWRITE {name} VALUES ('5')"))
    text = failure(lambda: spark.sql(f"SELECT * FROM {name}").collect())
    assert "channel: the table has none, so it is a sink" in text
    rows = spark.readStream.format("rate").load().selectExpr("cast(value AS string) AS body")
    stream = rows.writeStream.option("checkpointLocation", str(tmp_path))
    assert "a stream gives them itself" in failure(lambda: stream.toTable(name).awaitTermination())


@pytest.mark.parametrize(
    ("columns", "more", "match"),
    [
        ("", ", `nsq.auth_secret` 'hush'", "the catalog would keep it in clear"),
        ("", ", chanel 'c'", "unknown option 'chanel'"),
        ("", ", columns 'body,size'", "columns: 'size' is unknown; the columns are body, topic"),
    ],
)
def test_a_table_that_cannot_be_is_not_made(
    spark: SparkSession, name: str, columns: str, more: str, match: str
) -> None:
    statement = f"CREATE TABLE {name} {columns} USING nsq OPTIONS (topic 't', nsqd_tcp_addresses '127.0.0.1:1'{more})"
    text = failure(lambda: spark.sql(statement))
    assert match in text
    assert "hush" not in text
    assert not spark.catalog.tableExists(name)


def test_a_table_with_columns_of_its_own_says_what_to_do(spark: SparkSession, name: str) -> None:
    options = "topic 't', nsqd_tcp_addresses '127.0.0.1:1'"
    spark.sql(f"CREATE TABLE {name} (body STRING) USING nsq OPTIONS ({options})")
    assert "choose them with the option columns" in failure(lambda: spark.sql(f"INSERT INTO {name} VALUES ('a')"))


def source(spark: SparkSession, **options: Any) -> Any:
    given = {"topic": "t", "channel": "spark", **options}
    return spark.read.format("nsq").options(**{key: str(value) for key, value in given.items()})


def test_a_topic_that_nobody_knows_is_named(spark: SparkSession, broker: BrokerProcess) -> None:
    lookupd = broker.lookupd.http
    text = failure(source(spark, topic="nowhere", lookupd_http_addresses=lookupd).load().count)
    assert f"topic 'nowhere' is not known to nsqlookupd {lookupd}" in text
    assert "AttributeError" not in text
    tcp, http = broker.nsqd.tcp, broker.nsqd.http
    text = failure(source(spark, topic="nowhere", nsqd_tcp_addresses=tcp, nsqd_http_addresses=http).load().count)
    assert f"topic 'nowhere' is not known to nsqd {tcp}" in text
    source(spark, topic="nowhere", lookupd_http_addresses=lookupd).load().createOrReplaceTempView("nowhere")
    assert "topic 'nowhere' is not known" in failure(spark.sql("SELECT * FROM nowhere").collect)


def test_an_nsqd_that_is_down_is_named(spark: SparkSession, broker: BrokerProcess, three: dict[str, str]) -> None:
    tcp, http = f"127.0.0.1:1,{broker.nsqd.tcp}", f"127.0.0.1:1,{broker.nsqd.http}"
    given = {"topic": three["topic"], "nsqd_tcp_addresses": tcp, "nsqd_http_addresses": http}
    assert "nsqd 127.0.0.1:1 cannot be reached" in failure(source(spark, **given).load().count)
    assert source(spark, **given, failOnDataLoss="false").load().count() == 3


def test_an_empty_batch_has_no_rows(spark: SparkSession, broker: BrokerProcess, topic: Topic, name: str) -> None:
    publish(broker, name, [])
    assert source(spark, topic=name, lookupd_http_addresses=broker.lookupd.http).load().count() == 0
    topic.fill(10)
    future = str(4_000_000_000_000)
    assert source(spark, **topic.options, startingTimestamp=future).load().count() == 0
    ends = {"startingOffsets": '{"0": -1, "1": -1}', "endingOffsets": '{"0": -1, "1": -1}'}
    assert source(spark, **topic.options, **ends).load().count() == 0


def test_a_start_that_cannot_be_is_refused_with_the_reason(spark: SparkSession, topic: Topic) -> None:
    topic.fill(10)
    ends = {"startingOffsets": '{"0": -1, "1": -1}', "endingOffsets": '{"0": 0, "1": -1}'}
    text = failure(source(spark, **topic.options, **ends).load().count)
    assert "startingOffsets: partition 0 of topic" in text
    assert "behind its end at 0 by endingOffsets" in text
    strategy = {"startingTimestamp": "4000000000000", "startingOffsetsByTimestampStrategy": "error"}
    assert "nothing was published to partition 0" in failure(source(spark, **topic.options, **strategy).load().count)


def test_the_replayable_reader_refuses_original_servers_at_once(
    spark: SparkSession, three: dict[str, str], tmp_path: Path
) -> None:
    for topic in (three["topic"], "nowhere"):
        given = {**three, "topic": topic, "reader": "replayable"}
        assert "are the original NSQ's" in failure(source(spark, **given).load().count)
        rows = spark.readStream.format("nsq").options(channel="spark", **given)
        writer = rows.load().writeStream.format("noop").option("checkpointLocation", str(tmp_path / topic))
        query = writer.trigger(availableNow=True).start()
        assert "are the original NSQ's" in failure(lambda query=query: query.awaitTermination(int(LIMIT)))


def test_a_schema_of_the_users_own_chooses_columns(spark: SparkSession, three: dict[str, str]) -> None:
    rows = source(spark, **three).schema("attempts int, body binary").load()
    assert sorted((row.attempts > 0, bytes(row.body)) for row in rows.collect()) == [
        (True, each) for each in numbered(3)
    ]
    text = failure(source(spark, **three).schema("body string, price double").load().count)
    assert "schema struct<body:string,price:double>: the source gives struct<topic:string" in text
    text = failure(source(spark, **three, columns="body").schema("attempts int").load().count)
    assert "the source gives struct<body:binary>" in text


def test_the_first_line_of_an_error_is_ours(spark: SparkSession, three: dict[str, str]) -> None:
    planning = failure(source(spark, **three, reader="replayable").load().count)
    assert "ConfigError: reader='replayable'" in planning.splitlines()[0]
    assert "Traceback" not in planning
    frame = spark.createDataFrame([(None,)], "body string")
    writing = failure(frame.write.format("nsq").mode("append").options(**{**three, "nsq.publish_timeout": "1"}).save)
    lines = 2 if TELLS_START else 3  # before PySpark 4.2 a line of Spark's is above ours
    assert "row 0 of Arrow batch 0: body is null" in "".join(writing.splitlines()[:lines])
    assert "Traceback" not in writing


@pytest.mark.parametrize("kind", ["file", "below a file"])
def test_a_journal_that_cannot_be_is_named(
    spark: SparkSession, three: dict[str, str], tmp_path: Path, kind: str
) -> None:
    (tmp_path / "file").write_text("")
    journal = tmp_path / "file" if kind == "file" else tmp_path / "file" / "journal"
    text = failure(source(spark, **three, journal=journal, consume="true").load().count)
    assert f"ConfigError: journal='{journal}': cannot be made or written" in text


def test_a_batch_of_several_topics(spark: SparkSession, cluster: ClusterProcess, name: str) -> None:
    lookupd = str(cluster.lookupds[0].http)
    topics = [f"{name}_{each}" for each in "ab"]
    for each in topics:
        cluster.create_topic(each, partitions=2, replicas=2, multi_part=True, channels=["spark"])
        Topic(each, lookupd).fill(10)
    listed = source(spark, topic=",".join(topics), lookupd_http_addresses=lookupd).load()
    assert dict(listed.groupBy("topic").count().collect()) == dict.fromkeys(topics, 10)
    matched = spark.read.format("nsq").options(
        channel="spark", topicPattern=f"{name}_.*", lookupd_http_addresses=lookupd
    )
    assert matched.load().count() == 20
    at = f'{{"{topics[0]}": {{"0": -1, "1": -2}}, "{topics[1]}": {{"0": -1, "1": -1}}}}'
    assert matched.option("startingOffsets", at).load().count() == 5


def test_the_environment_of_the_driver_is_left_alone(spark: SparkSession) -> None:
    failure(source(spark, lookupd_http_addresses="127.0.0.1:1", reader="replayable", journal="/j").load)
    assert "SPARK_HIDE_TRACEBACK" not in os.environ


# `nsq-fast lag`: what waits for a query, by its checkpoint and its servers, for both readers.


def run(spark: SparkSession, checkpoint: Path, options: Mapping[str, str]) -> None:
    rows = spark.readStream.format("nsq").options(**options).load()
    writer = rows.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
    run_to_end(lambda: writer.trigger(availableNow=True).start().awaitTermination())


def lag(checkpoint: Path, *arguments: str, **options: str) -> Result:
    given = [part for name, value in options.items() for part in ("--option", f"{name}={value}")]
    return CliRunner().invoke(main, ["lag", "--checkpoint", str(checkpoint), *given, *arguments])


def shown(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def uncommit(checkpoint: Path) -> None:
    """As if the last batch still ran."""
    last = max(
        (each for each in (checkpoint / "commits").iterdir() if each.name.isdecimal()), key=lambda p: int(p.name)
    )
    last.unlink()


def test_a_query_of_the_replayable_reader(spark: SparkSession, topic: Topic, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    topic.fill(400)
    run(spark, checkpoint, {**topic.options, "startingOffsets": "earliest"})
    found = shown(lag(checkpoint, "--json"))
    assert [(row["topic"], row["partition"], row["channel"]) for row in found] == [
        (topic.name, number, "spark") for number in (0, 1)
    ]
    assert [(row["depth"], row["planned"], row["behind_bytes"]) for row in found] == [(0, 0, 0)] * 2
    topic.fill(31, label="more")
    found = shown(lag(checkpoint, "--json"))
    assert [(row["depth"], row["planned"]) for row in found] == [(16, 0), (15, 0)]
    ends = {number: topic.stats(number)["backend_depth"] for number in (0, 1)}
    done = json.loads(sorted((checkpoint / "offsets").glob("[0-9]*"))[-1].read_text().splitlines()[2])["offsets"]
    for row in found:
        number = row["partition"]
        assert row["behind_bytes"] == ends[number] - done[topic.name][str(number)]
        assert row["nsqd"] == "{broadcast_address}:{http_port}".format(**topic.leader(number))
    uncommit(checkpoint)  # it was the first batch: where it began is known from its end
    found = shown(lag(checkpoint, "--json"))
    assert [(row["depth"], row["planned"]) for row in found] == [(16, 200), (15, 200)]
    assert [row["behind_bytes"] for row in found] == [ends[0], ends[1]]


def test_options_that_are_given_go_before_what_the_checkpoint_says(tmp_path: Path, topic: Topic) -> None:
    topic.fill(6)
    offset = {"channel": "spark", "servers": ["127.0.0.1:1"], "offsets": {topic.name: {"0": 0, "1": 0}}}
    checkpoint = write(tmp_path, {0: ["v1", "{}", json.dumps(offset)]}, (0,))
    given = {"lookupd_http_addresses": topic.lookupd, "topicPattern": "topic.*", "CHANNEL": "other"}
    found = nsq_fast.spark.lags(checkpoint, given)
    assert [(each.topic, each.channel, each.depth) for each in found] == [(topic.name, "other", 3)] * 2


def test_a_first_batch_that_does_not_say_where_it_begins(tmp_path: Path, topic: Topic) -> None:
    """With PySpark before 4.2. Nothing is committed, so it begins where the channel stands."""
    topic.fill(6)
    ends = {str(number): topic.stats(number)["backend_depth"] for number in (0, 1)}
    offset = {"channel": "spark", "servers": [topic.lookupd], "offsets": {topic.name: ends}}
    found = nsq_fast.spark.lags(write(tmp_path, {0: ["v1", "{}", json.dumps(offset)]}))
    assert [(each.planned, each.depth, each.behind_bytes) for each in found] == [(3, 0, end) for end in ends.values()]


def test_a_log_that_ends_before_what_was_read_has_no_lag_but_is_lost(
    tmp_path: Path, topic: Topic, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nsq_fast.spark.replay.logs.LATE_PATIENCE", 0.0)
    topic.fill(6)
    offset = {"channel": "spark", "servers": [topic.lookupd], "offsets": {topic.name: {"0": 10**6, "1": 0}}}
    checkpoint = write(tmp_path, {0: ["v1", "{}", json.dumps(offset)]}, (0,))
    lost = f"topic '{topic.name}', partition 0: offsets .* up to 1000000 are lost"
    with pytest.raises(DataLost, match=lost):
        nsq_fast.spark.lags(checkpoint)
    refused = lag(checkpoint)
    assert refused.exit_code
    assert "up to 1000000 are lost" in " ".join(refused.output.split())
    found = nsq_fast.spark.lags(checkpoint, {"failOnDataLoss": "false"})
    assert [each.depth for each in found] == [3, 3]
    assert re.search(lost, caplog.text)


def test_the_journalled_reader_of_a_redesigned_topic(spark: SparkSession, topic: Topic, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    topic.fill(20)
    given = {**topic.options, "reader": "journalled", "journal": str(tmp_path / "journal")}
    run(spark, checkpoint, given)
    found = shown(lag(checkpoint, "--json", **given))
    leaders = ["{broadcast_address}:{tcp_port}".format(**topic.leader(number)) for number in (0, 1)]
    assert [(row["partition"], row["nsqd"], row["depth"]) for row in found] == [(0, leaders[0], 0), (1, leaders[1], 0)]
    uncommit(checkpoint)
    assert [row["planned"] for row in shown(lag(checkpoint, "--json", **given))] == [10, 10]


@pytest.mark.parametrize("server", ["ours"], indirect=True)
def test_a_query_of_the_journalled_reader(spark: SparkSession, server: Server, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    given = {"topic": TOPIC, "channel": CHANNEL, **server.options}
    server.publish(100)
    run(spark, checkpoint, {**given, "reader": "journalled", "journal": str(tmp_path / "journal")})
    expected = {
        "nsqd": str(server.tcp),
        "topic": TOPIC,
        "partition": None,
        "channel": CHANNEL,
        "depth": 0,
        "in_flight": 0,
        "deferred": 0,
        "planned": 0,
        "behind_bytes": None,
    }
    assert shown(lag(checkpoint, "--json", **given)) == [expected]
    server.publish(20, prefix="more")
    assert shown(lag(checkpoint, "--json", **given)) == [{**expected, "depth": 20}]
    uncommit(checkpoint)
    assert shown(lag(checkpoint, "--json", **given)) == [{**expected, "depth": 20, "planned": 100}]
    labels = f'{{nsqd="{server.tcp}",topic="{TOPIC}",partition="",channel="{CHANNEL}"}}'
    metrics = lag(checkpoint, "--metrics", **given).stdout.splitlines()
    assert f"nsq_fast_channel_depth{labels} 20" in metrics
    assert f"nsq_fast_channel_planned{labels} 100" in metrics
    assert "# TYPE nsq_fast_channel_in_flight gauge" in metrics
    assert not [line for line in metrics if "behind_bytes" in line]
    table = lag(checkpoint, **given).stdout
    assert TOPIC in table
    assert "in flight" in table
    refused = lag(checkpoint)
    assert refused.exit_code == 2
    assert "topic, channel, lookupd_http_addresses: the checkpoint of a journalled" in " ".join(refused.output.split())
    assert nsq_fast.spark.lags(checkpoint, given)[0].depth == 20


def test_the_lag_of_a_channel_that_nobody_knows_is_an_error(broker: BrokerProcess, tmp_path: Path) -> None:
    client = NsqdHTTPClient(*broker.nsqd.http)
    client.create_topic("of_lag")
    client.publish("of_lag", b"one")
    checkpoint = write(tmp_path, {0: ["v1", "{}", json.dumps({"j": "j", "batch": 0, "slots": {}})]}, (0,))
    given = {"topic": "of_lag", "channel": "misspelt", "lookupd_http_addresses": str(broker.lookupd.http)}
    until(lambda: client.stats("of_lag")["topics"][0]["depth"])
    refused = lag(checkpoint, **given)
    assert refused.exit_code
    assert "channel 'misspelt' of topic 'of_lag' is not known" in " ".join(refused.output.split())
    assert client.stats("of_lag")["topics"][0]["channels"] == []
    client.create_channel("of_lag", "misspelt")
    assert shown(lag(checkpoint, "--json", **given))[0]["depth"] == 1


def test_the_names_are_those_of_the_exporter() -> None:
    figures = pytest.importorskip("nsq_fast.exporter")
    from nsq_fast.cli.spark import FIGURES, PREFIX

    names = {family.name for family in figures.Families().all()}
    assert {f"{PREFIX}_{name}" for name in list(FIGURES)[:3]} <= names


def write(folder: Path, offsets: Mapping[int, list[str]], commits: tuple[int, ...] = ()) -> Path:
    for kind in ("offsets", "commits"):
        (folder / kind).mkdir()
        (folder / kind / ".9.crc").write_bytes(b"\0crc")
    for batch, lines in offsets.items():
        (folder / "offsets" / str(batch)).write_text("\n".join(lines))
    for batch in commits:
        (folder / "commits" / str(batch)).write_text("v1\n{}")
    return folder


def test_of_several_sources_those_of_nsq_are_found(tmp_path: Path) -> None:
    def offset(number: int) -> dict[str, Any]:
        return {"channel": "c", "servers": ["h:1"], "offsets": {"t": {"0": number}}}

    batches = {
        number: ["v1", "{}", '{"topic":{"0":5}}', json.dumps(offset(number)), "-", "17"] for number in (9, 10, 11)
    }
    assert read_checkpoint(write(tmp_path, batches, (9, 10))) == [SourceState(offset(10), offset(11))]


def test_before_the_first_commit_nothing_is_committed(tmp_path: Path) -> None:
    offset = {"j": "x", "batch": 1, "slots": {"h:1": 7}}
    assert read_checkpoint(write(tmp_path, {0: ["v1", "{}", json.dumps(offset)]})) == [SourceState(None, offset)]


@pytest.mark.parametrize(
    ("offsets", "reason"),
    [
        ({}, "has no offsets: it is no checkpointLocation of this machine"),
        ({0: ["v1", "{}", "17"]}, "none of its offsets is of NSQ"),
        ({0: ["v7", "{}", "17"]}, r"begins with \['v7'\], and only the layout v1 is known"),
        ({0: [""]}, "and only the layout v1 is known"),
    ],
)
def test_what_is_no_checkpoint_of_ours_is_said(tmp_path: Path, offsets: Mapping[int, list[str]], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_checkpoint(write(tmp_path, offsets))


def test_a_folder_that_is_not_there_and_formats_that_exclude_each_other(tmp_path: Path) -> None:
    assert "does not exist" in lag(tmp_path / "nothing").output
    assert "has no offsets" in lag(tmp_path).output
    assert "only one of them may be given" in lag(tmp_path, "--json", "--metrics").output


# What the listener shows of real queries to Prometheus, and what the dashboard and the alert rules ask of it.


EXAMPLES = Path(__file__).parents[2] / "examples" / "prometheus"

Value = Callable[..., float | None]


@pytest.fixture
def registry(spark: SparkSession) -> Iterator[CollectorRegistry]:
    registry = CollectorRegistry()
    listener = MetricsListener(registry)
    spark.streams.addListener(listener)
    yield registry
    spark.streams.removeListener(listener)


def run_query(spark: SparkSession, folder: Path, name: str, options: dict[str, str], then: Any = None) -> Any:
    frame = spark.readStream.format("nsq").options(**options).load()
    query = frame.writeStream.queryName(name).option("checkpointLocation", str(folder / name))
    return (query.foreachBatch(then) if then else query.format("noop")).start()


@pytest.mark.parametrize("server", ["ours"], indirect=True)
def test_the_figures_of_queries_of_both_kinds(
    spark: SparkSession, server: Server, topic: Topic, tmp_path: Path, registry: CollectorRegistry
) -> None:
    def value(name: str, query: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"nsq_fast_spark_{name}", {"query": query, **labels})

    def of_source(name: str, query: str, place: str = "") -> float | None:
        return value(name, query, source="0", place=place)

    server.publish(300)
    journalled = {"topic": TOPIC, "channel": CHANNEL, "journal": str(tmp_path / "kept"), **server.options}
    queries = [
        run_query(spark, tmp_path, "journalled", {**journalled, "maxOffsetsPerTrigger": "100"}),
        run_query(spark, tmp_path, "replayed", {**topic.options, "startingOffsets": "earliest"}),
    ]
    try:
        topic.fill(200)
        until(lambda: value("rows_total", "journalled") == 300 and value("rows_total", "replayed") == 200)
        assert value("batches_total", "journalled") == 3
        for name in ("journalled", "replayed"):
            assert value("running", name, source="", place="") == 1
            assert value("batch_seconds", name, source="", place="")
            assert value("batch_timestamp_seconds", name, source="", place="")
        if TELLS_START:
            (nsqd,) = [f"{host}:{port}" for host, port in [server.tcp]]
            assert of_source("backlog_messages", "journalled", nsqd) == 100  # when the last batch was planned
            assert of_source("journal_bytes", "journalled")
            assert {of_source("backlog_bytes", "replayed", f"{topic.name}/p{each}") for each in (0, 1)} == {0}
            for name in ("journalled", "replayed"):
                assert of_source("lookup_age_seconds", name) is not None
                assert of_source("unknown_topics", name) == 0
                assert of_source("bytes_per_second", name) is not None
        asked_for_are_known(registry)
    finally:
        for query in queries:
            query.stop()
    until(lambda: value("running", "journalled", source="", place="") == 0)
    assert value("failures_total", "journalled") == 0
    assert of_source("journal_bytes", "journalled") is None  # nobody knows any more

    def fails(batch: Any, number: int) -> None:
        raise OSError("the sink is full")

    server.publish(1)
    run_query(spark, tmp_path, "failing", {**journalled, "orphans": "warn"}, fails)
    until(lambda: value("failures_total", "failing") == 1)


def asked_for_are_known(registry: CollectorRegistry) -> None:
    known = {f"{each.name}{'_total' if each.type == 'counter' else ''}" for each in registry.collect()}
    panels = json.loads((EXAMPLES / "spark-dashboard.json").read_text())["panels"]
    texts = [target["expr"] for panel in panels for target in panel["targets"]]
    texts.append((EXAMPLES / "alerts.yml").read_text())
    asked = set(re.findall(r"\bnsq_fast_spark_\w+", "\n".join(texts)))
    assert len(asked) > 8
    assert asked <= known
