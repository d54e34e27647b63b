"""The format in a real Spark: found by itself, checked at load, its rows as Spark sees them, its secrets nowhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspark
import pytest
from pyspark.errors import AnalysisException
from support.spark_driver import Driver
from support.spark_made_up import MadeUp
from support.spark_marks import LIMIT
from support.spark_replay import Topic
from support.spark_settings import ROOT
from support.spark_sink import numbered, taken
from support.waiting import PROCESS

import nsq_fast.spark
from nsq_fast.broker import BrokerProcess, ClusterProcess
from nsq_fast.client.admin import NsqdHTTPClient
from nsq_fast.errors import ConfigError
from nsq_fast.spark import NsqDataSource
from nsq_fast.spark.schema import spark_schema
from nsq_fast.spark.versions import TELLS_START

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


Drivers = Callable[..., Driver]
SECRET = "open-sesame"
OPTIONS = {
    "topic": "t",
    "channel": "c",
    "nsqd_tcp_addresses": "127.0.0.1:1",
    "nsqd_http_addresses": "127.0.0.1:1",
    "nsq.auth_secret": SECRET,
    "nsq.lookupd_authorization_secret": f"Bearer {SECRET}",
}


def test_rows_as_spark_sees_them(spark: SparkSession) -> None:
    spark.dataSource.register(MadeUp)
    source = spark.read.format(MadeUp.name()).options(
        **OPTIONS, reader="replayable", includeHeaders="true", columns="*"
    )
    frame = source.load()
    readable = frame.selectExpr("*", "decode(body, 'utf-8') text").drop("body", "message_id")
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


# What Spark finds without being told, and what it writes down

PLANS = """
import contextlib, io, os
from support.spark_program import GIVEN, arguments, say
import json
from pyspark.sql import SparkSession

builder = SparkSession.builder
for name, value in json.loads(os.environ[GIVEN])["settings"].items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()  # and nothing is registered
given = {**arguments(), "reader": "journalled"}

def explained(frame):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        frame.explain(True)
    return text.getvalue()

def failed(action):
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return "nothing"

stream = spark.readStream.format("nsq").options(**given).load()
say("schema", text=stream.schema.simpleString())
say("plan", text=explained(stream))
query = lambda: stream.writeStream.format("noop").option("checkpointLocation", "checkpoint").start().awaitTermination()
say("query", text=failed(query))
batch = spark.read.format("nsq").options(**given).option("consume", "true")
say("batch", text=failed(lambda: batch.load().count()))
say("load", text=failed(lambda: batch.option("nsq.snappy", "x").load()))
unreachable = spark.read.format("nsq").options(**arguments()).load()
say("unreachable", text=failed(unreachable.count))
write = spark.range(3).selectExpr("cast(id as string) body").write.format("nsq").mode("append")
sink = {key: value for key, value in arguments().items() if key not in ("channel", "nsqd_http_addresses")}
say("write", text=failed(lambda: write.options(**sink).option("nsq.publish_timeout", "1").save()))
spark.stop()
"""


def test_secrets_are_nowhere_and_the_format_is_found_by_itself(spark_driver: Drivers, tmp_path: Path) -> None:
    events = tmp_path / "events"
    events.mkdir()
    settings = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": str(events),
        "spark.eventLog.compress": "false",
        "spark.eventLog.rolling.enabled": "false",
    }
    driver = spark_driver(PLANS, settings=settings, **OPTIONS)
    driver.start()
    driver.wait()
    said = {what: driver.said(what)[0]["text"] for what in ("schema", "plan", "query", "batch", "load", "write")}
    assert said["schema"] == spark_schema(NsqDataSource(OPTIONS).source_options().columns).simpleString()
    assert "nsq.auth_secret=*********(redacted)" in said["plan"]
    assert "ConfigError: journal: is required by the journalled reader" in said["query"].splitlines()[0]
    assert "ConfigError: journal: is required by the journalled reader" in said["batch"]
    assert "AnalysisException" in said["load"]
    assert "ConfigError: nsq.snappy='x': must be true or false" in said["load"]
    assert "127.0.0.1:1" in driver.said("unreachable")[0]["text"]
    assert said["write"] != "nothing"
    written = [path.read_text(errors="replace") for path in events.rglob("*") if path.is_file()]
    assert any("nsq" in text for text in written)
    texts = [*said.values(), driver.said("unreachable")[0]["text"], driver.log(None), *written]
    assert not [text for text in texts if SECRET in text]


# At load


def load(spark: SparkSession, **options: str) -> Any:
    return spark.readStream.format("nsq").options(**{**OPTIONS, **options}).load()


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
    assert spark.read.format("nsq").options(**OPTIONS).load().columns == ["timestamp", "body", "topic", "attempts"]


def test_a_schema_of_the_users_own_must_be_the_sources() -> None:
    source = NsqDataSource({**OPTIONS, "columns": "body,attempts", "reader": "replayable"})
    expected = r"schema struct<topic:string,x:string>: the source gives struct<body:binary,attempts:int>"
    with pytest.raises(ConfigError, match=expected):
        source.reader(spark_schema(("topic",)).add("x", "string"))
    with pytest.raises(ConfigError, match="leave schema"):
        source.streamReader(spark_schema(("attempts", "body")))


# Without the extra

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


# SQL: tables and views over the source and the sink; and what the source says of mistakes, in one line.


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


def failure(action: Any) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011  # Spark has many kinds; the text is what counts
        action()
    return str(caught.value)


def test_a_table_is_read_by_sql(spark: SparkSession, broker: BrokerProcess, name: str) -> None:
    publish(broker, name, numbered(30))
    options = (
        f"topic '{name}', channel 'spark', lookupd_http_addresses '{broker.lookupd.http}', columns 'body,attempts'"
    )
    spark.sql(f"CREATE TABLE {name} USING nsq OPTIONS ({options})")
    found = spark.sql(f"SELECT cast(body AS string) AS text FROM {name} WHERE attempts > 0").collect()
    assert sorted(row.text.encode() for row in found) == sorted(numbered(30))
    assert spark.read.table(name).columns == ["body", "attempts"]
    assert spark.read.table(name).count() == 30
    assert "it was made to be read" in failure(lambda: spark.sql(f"INSERT INTO {name} SELECT cast('a' AS binary), 1"))


def test_rows_are_inserted_into_a_table(spark: SparkSession, broker: BrokerProcess, name: str) -> None:
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


def test_a_view_is_read_by_sql(spark: SparkSession, broker: BrokerProcess, name: str) -> None:
    publish(broker, name, numbered(5))
    options = f"topic '{name}', channel 'spark', lookupd_http_addresses '{broker.lookupd.http}'"
    spark.sql(f"CREATE TEMP VIEW {name} USING nsq OPTIONS ({options})")
    assert spark.sql(f"SELECT count(*) AS rows FROM {name}").first()["rows"] == 5  # type: ignore[index]


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


# Mistakes


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


def test_an_nsqd_that_is_down_is_named(spark: SparkSession, broker: BrokerProcess, name: str) -> None:
    publish(broker, name, numbered(3))
    tcp, http = f"127.0.0.1:1,{broker.nsqd.tcp}", f"127.0.0.1:1,{broker.nsqd.http}"
    given = {"topic": name, "nsqd_tcp_addresses": tcp, "nsqd_http_addresses": http}
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
    spark: SparkSession, broker: BrokerProcess, name: str, tmp_path: Path
) -> None:
    publish(broker, name, numbered(3))
    for topic in (name, "nowhere"):
        given = {"topic": topic, "lookupd_http_addresses": broker.lookupd.http, "reader": "replayable"}
        assert "are the original NSQ's" in failure(source(spark, **given).load().count)
        rows = spark.readStream.format("nsq").options(
            channel="spark", **{key: str(each) for key, each in given.items()}
        )
        writer = rows.load().writeStream.format("noop").option("checkpointLocation", str(tmp_path / topic))
        query = writer.trigger(availableNow=True).start()
        assert "are the original NSQ's" in failure(lambda query=query: query.awaitTermination(int(LIMIT)))


def test_a_schema_of_the_users_own_chooses_columns(spark: SparkSession, broker: BrokerProcess, name: str) -> None:
    publish(broker, name, numbered(3))
    given = {"topic": name, "lookupd_http_addresses": broker.lookupd.http}
    rows = source(spark, **given).schema("attempts int, body binary").load()
    assert sorted((row.attempts > 0, bytes(row.body)) for row in rows.collect()) == [
        (True, each) for each in numbered(3)
    ]
    text = failure(source(spark, **given).schema("body string, price double").load().count)
    assert "schema struct<body:string,price:double>: the source gives struct<topic:string" in text
    text = failure(source(spark, **given, columns="body").schema("attempts int").load().count)
    assert "the source gives struct<body:binary>" in text


def test_the_first_line_of_an_error_is_ours(spark: SparkSession, broker: BrokerProcess, name: str) -> None:
    publish(broker, name, numbered(3))
    given = {"topic": name, "lookupd_http_addresses": broker.lookupd.http}
    planning = failure(source(spark, **given, reader="replayable").load().count)
    assert "ConfigError: reader='replayable'" in planning.splitlines()[0]
    assert "Traceback" not in planning
    frame = spark.createDataFrame([(None,)], "body string")
    writing = failure(frame.write.format("nsq").mode("append").options(**{**given, "nsq.publish_timeout": "1"}).save)
    lines = 2 if TELLS_START else 3  # before PySpark 4.2 a line of Spark's is above ours
    assert "row 0 of Arrow batch 0: body is null" in "".join(writing.splitlines()[:lines])
    assert "Traceback" not in writing


@pytest.mark.parametrize("kind", ["file", "below a file"])
def test_a_journal_that_cannot_be_is_named(
    spark: SparkSession, broker: BrokerProcess, name: str, tmp_path: Path, kind: str
) -> None:
    publish(broker, name, numbered(3))
    (tmp_path / "file").write_text("")
    journal = tmp_path / "file" if kind == "file" else tmp_path / "file" / "journal"
    given = {"topic": name, "lookupd_http_addresses": broker.lookupd.http, "journal": journal, "consume": "true"}
    text = failure(source(spark, **given).load().count)
    assert f"ConfigError: journal='{journal}': cannot be made or written" in text


# Several topics


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
