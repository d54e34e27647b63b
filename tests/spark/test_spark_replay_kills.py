"""Two attempts at one task of the replayable reader, on two hosts: nothing lost or twice.

Queries whose processes die: see test_spark_task_faults, test_spark_cluster_kills and test_spark_driver_kills.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.spark import Driver
from support.spark_replay import Topic
from support.spark_replay_program import BATCH, COUNT, PROGRAM, arguments, check

from nsq_fast.spark.versions import TELLS_START


@pytest.mark.slow
def test_two_attempts_at_one_task(
    standalone: Any, spark_driver: Callable[..., Driver], topic: Topic, tmp_path: Path
) -> None:
    bodies = topic.fill(COUNT)
    speculative = {
        "spark.speculation": "true",
        "spark.speculation.interval": "50ms",
        "spark.speculation.multiplier": "1.0",
        "spark.speculation.quantile": "0.1",
        "spark.speculation.minTaskRuntime": "50ms",
    }
    options = {**topic.options, "maxOffsetsPerTrigger": str(BATCH)}
    given = arguments(options, tmp_path, {"reading": "hold"})
    driver = spark_driver(PROGRAM, standalone.url, speculative, **given)
    driver.start()
    driver.wait_mark("reading")
    batches = 2 if TELLS_START else 1  # PySpark before 4.2 asks for one with availableNow
    driver.wait_said("batch", batches)  # the other attempt has done it, while the first still held its channel
    driver.marks.release("reading")
    driver.wait()
    attempts = driver.marks.details("attempt")
    assert len(attempts) > len(set(attempts))
    check(tmp_path, bodies)
