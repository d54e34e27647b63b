"""Tasks and workers of queries die wherever it could hurt, and are tried again; leaders move and die meanwhile.

All run in one driver, side by side, so that it is started once: the journalled reader, the replayable one, and the
sink. In a cluster: see test_spark_cluster_kills.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.journal import Server
from support.spark import BESIDE, Driver, Program
from support.spark_journal_program import Journalled
from support.spark_ledger import account
from support.spark_publisher import Publisher
from support.spark_replay import Topic
from support.spark_replay_program import Replayable
from support.spark_sink import check_keys, taken, with_keys

from nsq_fast.broker import BrokerProcess, ClusterProcess

Drivers = Callable[..., Driver]
LOCAL = "local[4,8]"
"""With room for the tasks of three queries; tasks are tried again."""
PLACES = {"before claim 0": "raise", "after claim 1": "raise", "after claim 2": "exit", "before seal": "exit"}

RETRYING = """
import os

from pyspark import TaskContext
from support.spark_marks import poll
from support.spark_program import arguments, say, session
from support.spark_replay import ask
from nsq_fast.spark import foreach_batch_sink

given = arguments()
spark = session()
spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "500")
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
say("written")
"""
"""Writes of the sink, of each of which one task fails once."""


class Retried:
    """Writes into two topics, and into two others with idempotence keys, by which consumers can tell copies.

    Attributes:
        program: for the driver.
    """

    def __init__(self, folder: Path, broker: BrokerProcess, cluster: ClusterProcess) -> None:
        self._broker, self._cluster, self._folder = broker, cluster, folder
        self._writes = {
            how: {"topic": f"again-{how}", "nsqd_tcp_addresses": str(broker.nsqd.tcp), "reportPath": str(folder / how)}
            for how in ("raise", "exit")
        }
        self._keyed = [with_keys(cluster, topic) for topic in ("again-keyed", "again-foreach")]
        https = [str(nsqd.http) for nsqd in (broker.nsqd, *cluster.nsqds)]
        writes = [*self._writes.items(), ("exit", self._keyed[0])]
        self.program = Program(RETRYING, folder, writes=writes, foreach=self._keyed[1], https=https)

    def check(self) -> None:
        """The rows that the first attempt had written are there twice; whoever suppresses copies gets them once."""
        expected = [b"%0200d" % number for number in range(10_000)]
        for options in self._keyed:
            assert check_keys(self._cluster, options["topic"], expected) > 0
        for how, options in self._writes.items():
            found = account(expected, taken(self._broker.nsqd.tcp, options["topic"], 10_000))
            found.check(duplicates=3000)
            assert found.extra > 0, how
            assert all(5000 <= int(body) < 8000 for body in found.duplicated)
            [report] = map(json.loads, (path.read_text() for path in (self._folder / how).glob("*.json")))
            assert (report["committed"], report["rows"], report["tasks"]) == (True, 10_000, 2)


@pytest.mark.slow
@pytest.mark.parametrize("server", ["ours"], indirect=True)
def test_tasks_that_fail_and_leaders_that_move_lose_and_double_nothing(
    server: Server,
    broker: BrokerProcess,
    cluster: ClusterProcess,
    topic: Topic,
    spark_driver: Drivers,
    tmp_path: Path,
) -> None:
    """Tasks of the journalled reader and of the sink fail; those of the replayable one do not, whatever leaders do."""
    slots = {"minPartitions": "2", "maxOffsetsPerTrigger": "16000"}
    journalled = Journalled(server, tmp_path / "journalled", server.publish(40_000), PLACES, **slots)
    replayable = Replayable(topic, tmp_path / "replayable", {}, limit=1000, forever=True)
    sink = Retried(tmp_path / "sink", broker, cluster)
    programs = [each.given for each in (journalled, replayable, sink.program)]
    driver = spark_driver(BESIDE, LOCAL, programs=programs)
    driver.start()
    driver.wait_said("written")
    sink.check()  # what leaders do to a sink: test_spark_sink
    publisher = Publisher(tmp_path, "p", topic.name, 2000, lookupd_http_addresses=topic.lookupd)
    try:
        driver.wait_said("batch", 2)
        for number in range(6):
            trouble(cluster, topic, number)
            driver.wait_said("batch", len(driver.said("batch")) + 2)
        publisher.stop()
    finally:
        publisher.kill()
    replayable.marks.reach("end")
    driver.wait()
    assert driver.said("left")[0]["count"] == 0
    assert all(journalled.marks.count(place) == 1 for place in PLACES)
    journalled.check()
    attempts = replayable.marks.details("attempt")
    assert len(attempts) == len(set(attempts))
    replayable.check(publisher.stored, publisher.unknown)
    assert len(publisher.stored) > 3000


def trouble(cluster: ClusterProcess, topic: Topic, number: int) -> None:
    """A leader of the topic moves, or its node dies and comes back."""
    partition = number % 2
    if number in (0, 1, 4):
        cluster.move_leader(topic.name, partition)
        return
    node = topic.leading_node(cluster, partition)
    cluster.kill_node(node)
    cluster.restart_node(node)
