"""`nsq-fast lag`: what waits for a query, by its checkpoint and its servers, for both readers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result
from support.journal import CHANNEL, TOPIC, Server
from support.spark_program import run_to_end
from support.spark_replay import Topic

import nsq_fast.spark
from nsq_fast.cli import main
from nsq_fast.errors import ConfigError
from nsq_fast.spark.lag import SourceState, read_checkpoint

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run(spark: SparkSession, checkpoint: Path, options: Mapping[str, str]) -> None:
    """Read all that there is."""
    rows = spark.readStream.format("nsq").options(**options).load()
    writer = rows.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
    run_to_end(writer.trigger(availableNow=True).start)


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


def test_the_names_are_those_of_the_exporter() -> None:
    figures = pytest.importorskip("nsq_fast.exporter")
    from nsq_fast.cli.lag import _FIGURES, _PREFIX

    names = {family.name for family in figures.Families().all()}
    assert {f"{_PREFIX}_{name}" for name in list(_FIGURES)[:3]} <= names


# The checkpoint


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
