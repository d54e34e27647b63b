"""SQL: tables and views over the source and the sink; and what the source says of mistakes, in one line."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspark
import pytest
from support.spark_marks import LIMIT
from support.spark_replay import Topic
from support.spark_sink import numbered, taken

from nsq_fast.broker import BrokerProcess, ClusterProcess
from nsq_fast.client.admin import NsqdHTTPClient
from nsq_fast.spark.versions import TELLS_START

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
