"""Queries of the replayable reader whose processes die at every point: nothing lost or twice, replays the same.

See also test_spark_driver_kills.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import processes
from support.spark_driver import Driver
from support.spark_ledger import Delivered, account
from support.spark_publisher import Publisher
from support.spark_replay import Topic
from support.spark_replay_program import BATCH, COUNT, PROGRAM, arguments, check, check_order, next_hold
from support.spark_settings import LOCAL, LOCAL_CLUSTER

from nsq_fast.broker import ClusterProcess
from nsq_fast.spark.versions import TELLS_START

Drivers = Callable[..., Driver]
Start = Callable[..., Driver]


@pytest.fixture
def start(spark_driver: Drivers, tmp_path: Path, topic: Topic) -> Start:
    """Start a query that has to get past some points: ``start(master, {"reading": "hold"})``."""

    def start(
        master: str, points: dict[str, str], settings: dict[str, str] | None = None, forever: bool = False, **given: str
    ) -> Driver:
        options = {**topic.options, "maxOffsetsPerTrigger": str(BATCH), **given}
        driver = spark_driver(PROGRAM, master, settings, **arguments(options, tmp_path, points, forever))
        driver.start()
        return driver

    return start


@pytest.mark.slow
def test_drivers_and_executors_of_a_cluster_are_killed(start: Start, topic: Topic, tmp_path: Path) -> None:
    bodies = topic.fill(COUNT)
    points = ["before", "reading", "sink"]
    driver = start(LOCAL_CLUSTER, dict.fromkeys(points, "hold"))
    to_come = list(points)
    while to_come:
        held = next_hold(driver, driver.marks, to_come)
        to_come.remove(held)
        if held == "before":
            [worker] = driver.marks.pids("before-reached")
            processes.kill(executor_of(driver, worker))
        else:
            driver.kill_driver()  # executors outlive it a little, and what they do then must not matter
            driver.start()
        driver.marks.release(held)
    driver.wait()
    assert all(driver.marks.count(f"{name}-reached") == 1 for name in points)
    assert check(tmp_path, bodies).replays()


def executor_of(driver: Driver, worker: int) -> int:
    """The executor whose Python daemon forked a worker."""
    executors = driver.executors()
    parents = {process.pid: process.parent for process in processes.of_session(os.getsid(worker))}
    while worker not in executors:
        worker = parents[worker]
    return worker


@pytest.mark.slow
def test_two_attempts_at_one_task(standalone: Any, start: Start, topic: Topic, tmp_path: Path) -> None:
    bodies = topic.fill(COUNT)
    speculative = {
        "spark.speculation": "true",
        "spark.speculation.interval": "50ms",
        "spark.speculation.multiplier": "1.0",
        "spark.speculation.quantile": "0.1",
        "spark.speculation.minTaskRuntime": "50ms",
    }
    driver = start(standalone.url, {"reading": "hold"}, speculative)
    driver.wait_mark("reading")
    batches = 2 if TELLS_START else 1  # PySpark before 4.2 asks for one with availableNow
    driver.wait_said("batch", batches)  # the other attempt has done it, while the first still held its channel
    driver.marks.release("reading")
    driver.wait()
    attempts = driver.marks.details("attempt")
    assert len(attempts) > len(set(attempts))
    check(tmp_path, bodies)


@pytest.mark.slow
def test_leaders_move_and_die_while_a_query_runs(
    start: Start, topic: Topic, cluster: ClusterProcess, tmp_path: Path
) -> None:
    publisher = Publisher(tmp_path, "p", topic.name, 2000, lookupd_http_addresses=topic.lookupd)
    try:
        driver = start(LOCAL, {}, forever=True, maxOffsetsPerTrigger="1000")
        driver.wait_said("batch", 2)
        for number in range(6):
            trouble(cluster, topic, number)
            driver.wait_said("batch", len(driver.said("batch")) + 2)
        publisher.stop()
    finally:
        publisher.kill()
    driver.marks.reach("end")
    driver.wait()
    delivered = Delivered(tmp_path / "out")
    account(publisher.stored, delivered.bodies(), publisher.unknown).check()
    check_order(delivered)
    assert len(publisher.stored) > 3000


def trouble(cluster: ClusterProcess, topic: Topic, number: int) -> None:
    """A leader of the topic moves, or its node dies and comes back."""
    partition = number % 2
    if number in (0, 1, 4):
        cluster.move_leader(topic.name, partition)
        return
    node = [nsqd.tcp.port for nsqd in cluster.nsqds].index(topic.leader(partition)["tcp_port"])
    cluster.kill_node(node)
    cluster.restart_node(node)
