"""The benchmark of Spark measures what it says, with few rows."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.spark import quick_environment
from support.waiting import until

from nsq_fast.bench.clients import PROGRAMS, SPARK, SPARK_FLOOR, available
from nsq_fast.bench.results import Round, Settings
from nsq_fast.bench.runner import Task, run_scenarios
from nsq_fast.bench.servers import embedded
from nsq_fast.spark.arrow_rows import arrow_schema
from nsq_fast.spark.options import DEFAULT_COLUMNS

ROWS = 16_000


def measured(client: str, mode: str) -> Round:
    settings = Settings(kind="spark", mode=mode, count=ROWS, rounds=1)
    clients = [each for each in available(sys.executable) if each.name == client]
    (found,) = run_scenarios([Task(f"spark-{mode}", settings, clients, embedded)])
    (result,) = found.clients
    assert result.failure == ""
    (only,) = result.rounds
    return only


@pytest.mark.usefixtures("java")
def test_a_stream_is_measured_from_the_end_of_its_first_batch_with_its_jvm_and_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in quick_environment().items():
        monkeypatch.setenv(name, value)
    found = measured(SPARK, "stream")
    assert 0 < found.messages <= ROWS * 7 // 8
    assert found.cpu_seconds > 0
    assert found.seconds > 0


@pytest.mark.usefixtures("java")
def test_the_floor_of_a_write_publishes_without_spark() -> None:
    found = measured(SPARK_FLOOR, "write")
    assert found.messages == ROWS
    assert found.cpu_seconds > 0


def children(pid: int) -> list[list[str]]:
    """What the system says of the processes that one has started, behind their names."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            found.append(path.read_text().rpartition(")")[2].split())
    return [fields for fields in found if int(fields[1]) == pid]


def test_the_cpu_of_a_worker_that_has_ended_can_be_read() -> None:
    pytest.importorskip("pyspark")
    secret = {"PYTHON_WORKER_FACTORY_SECRET": "s3cret", "PYTHONPATH": str(PROGRAMS)}
    command = [sys.executable, "-m", "spark_daemon", "pyspark.worker"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env={**os.environ, **secret}, **pipes) as daemon:  # type: ignore[call-overload]
        assert daemon.stdout is not None
        port = int.from_bytes(daemon.stdout.read(4), "big")
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall((5).to_bytes(4, "big") + b"wrong")  # a worker is started, and ends of this
            with sock.makefile("rb") as answer:
                assert answer.read(11)[-3:] == b"err"  # behind its process id
        until(lambda: [fields[0] for fields in children(daemon.pid)] == ["Z"])
        daemon.stdin.close()


def test_rows_that_are_ready_are_as_those_of_a_channel() -> None:
    sys.path.append(str(PROGRAMS))
    try:
        from ready_rows import ReadySource
    finally:
        with suppress(ValueError):
            sys.path.remove(str(PROGRAMS))
    source: Any = ReadySource({"rows": "20000", "perbatch": "10000"})
    reader = source.reader(None)
    found = pa.Table.from_batches([batch for each in reader.partitions() for batch in reader.read(each)])
    assert (found.num_rows, found.schema) == (20_000, arrow_schema(DEFAULT_COLUMNS))
    stream = source.streamReader(None)
    first = stream.latestOffset(stream.initialOffset(), None)
    (task,) = stream.partitions(stream.initialOffset(), first)
    assert sum(batch.num_rows for batch in stream.read(task)) == 10_000
    last = stream.latestOffset(first, None)
    assert stream.latestOffset(last, None) == last != first
