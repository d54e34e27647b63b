"""Spark on a real redesigned cluster: a query whose driver is killed, whose leaders move, whose nsqds die.

For ``--run-real-cluster`` only; on the embedded cluster ``tests/spark`` does the same in pieces.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from support import spark_needs
from support.fleet import Fleet

REAL_TIMEOUT = 1800
RATE = 1000
PATIENCE = 300.0
ORDERED = 100_000
ORDERED_BATCH = 60_000  # a task holds after its first 10,000 rows, with as many and more to come

pytestmark = [
    pytest.mark.timeout(REAL_TIMEOUT),
    pytest.mark.parametrize("fleet", ["real"], indirect=True),
    pytest.mark.skipif(spark_needs.missing_for_spark() is not None, reason=str(spark_needs.missing_for_spark())),
]


def start_query(folder: Path, fleet: Fleet, topic: str, limit: int = 5000, **given: Any) -> Any:
    """A driver program of a query, running."""
    from support.spark import LOCAL, Driver
    from support.spark_replay_program import PROGRAM

    options = {
        "topic": topic,
        "channel": "spark",
        "lookupd_http_addresses": ",".join(fleet.lookupds),
        "startingOffsets": "earliest",
        "columns": "*",
        "maxOffsetsPerTrigger": str(limit),
    }
    paths = {"out": str(folder / "out"), "checkpoint": str(folder / "checkpoint")}
    driver = Driver(PROGRAM, folder, LOCAL, options=options, **paths, **given)
    driver.start()
    return driver


def come_on(driver: Any, batches: int = 3) -> float:
    """Wait for so many more batches; how long that took, in seconds."""
    began = time.monotonic()
    driver.wait_said("batch", len(driver.said("batch")) + batches, PATIENCE)
    return time.monotonic() - began


def move(fleet: Fleet, topic: str, partition: int) -> None:
    """Move a leader, as soon as the cluster is willing to."""
    fleet.wait_stable()
    while not fleet.move_leader(topic, partition):
        time.sleep(0.5)  # sleep: looks again and again


def test_a_query_loses_and_doubles_nothing_whatever_dies(fleet: Fleet, tmp_path: Path, report: list[str]) -> None:
    from support.spark_ledger import Delivered, account
    from support.spark_marks import poll
    from support.spark_publisher import Publisher
    from support.spark_replay_program import check_order

    topic = "spark_real"
    fleet.create_topic(topic, 2, 2, channels=("spark",), multi_part=True)
    publisher = Publisher(tmp_path, "p", topic, RATE, lookupd_http_addresses=",".join(fleet.lookupds))
    driver = start_query(tmp_path, fleet, topic, places={"reading": "hold", "sink": "hold"}, forever=True)
    try:
        for point in ("reading", "sink"):
            driver.wait_mark(point, timeout=PATIENCE)
            driver.kill_driver()
            driver.marks.release(point)
            driver.start()
        come_on(driver)
        for partition in (0, 1):
            move(fleet, topic, partition)
            report.append(f"a leader moved: 3 batches within {come_on(driver):.1f} s")
        stored = len(publisher.stored)
        node = fleet.kill_leader(topic, 0)
        began = time.monotonic()
        poll(lambda: len(publisher.stored) > stored + RATE, PATIENCE, "publishing goes on")
        published_after = time.monotonic() - began
        again = f"published again after {published_after:.1f} s, 3 batches {come_on(driver):.1f} s later"
        report.append(f"an nsqd killed: {again}")
        fleet.restart(node)
        report.append(f"it came back: 3 batches within {come_on(driver):.1f} s")
        publisher.stop()
        driver.marks.reach("end")
        driver.wait(PATIENCE)
    finally:
        publisher.kill()
        driver.close()
    delivered = Delivered(tmp_path / "out")
    outcome = account(publisher.stored, delivered.bodies(), publisher.unknown)
    batches = len({run["batch"] for run in delivered.runs()})
    report.append(f"{outcome}; {batches} batches, {len(delivered.replays())} replayed with the same content")
    outcome.check()
    delivered.check_replays()
    assert delivered.replays()
    check_order(delivered)


def test_an_ordered_topic_keeps_its_order(fleet: Fleet, tmp_path: Path, report: list[str]) -> None:
    from support.spark_ledger import Delivered
    from support.spark_replay import Topic
    from support.spark_replay_program import check

    topic = "spark_ordered"
    fleet.create_topic(topic, 2, 2, channels=("spark",), ordered=True)
    bodies = Topic(topic, fleet.lookupds[0]).fill(ORDERED)
    fleet.wait_stable()
    driver = start_query(tmp_path, fleet, topic, ORDERED_BATCH, places={"reading": "hold"}, forever=False)
    try:
        driver.wait_mark("reading", timeout=PATIENCE)
        for partition in (0, 1):
            move(fleet, topic, partition)
        driver.marks.release("reading")
        driver.wait(PATIENCE)
    finally:
        driver.close()
    delivered = Delivered(tmp_path / "out")
    check(delivered, bodies)
    report.append(f"{len(delivered.bodies())} rows of {ORDERED} in order, both leaders moved within a batch")
