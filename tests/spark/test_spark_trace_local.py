"""The report without Spark: its figures are those of Spark, on logs with faults, on random ones and on awkward ones."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("duckdb", reason="no duckdb: pip install 'nsq-fast[trace]'")

from support import trace_logs
from support.trace_logs import SECOND, START
from support.waiting import PROCESS

from nsq_fast.errors import ConfigError
from nsq_fast.spark.trace import (
    Figures,
    TraceSettings,
    figures_of,
    html,
    local_figures,
    read_logs,
    write_tables,
)
from nsq_fast.spark.trace.schema import Order

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PUBLISH = {
    "event": "publish",
    "time": START,
    "topic": "t",
    "partition": 0,
    "nsqd": "n:1",
    "internal_id": 1,
    "trace_id": 2,
}
CONSUME = {
    **PUBLISH,
    "event": "consume",
    "channel": "c",
    "local": "h:2",
    "timestamp": START,
    "attempts": 1,
    "outcome": "FIN",
    "handling_time": 0.0015,
}
AWKWARD = [
    "",
    "   ",
    "no record",
    "[1, 2]",
    "{}",
    "null",
    '{"event":"publish","time":1',
    "x" * 300 + " é",
    "2026 INFO {not json} " + json.dumps(PUBLISH, separators=(",", ":")),
    json.dumps({**PUBLISH, "internal_id": 3}) + " and something behind",
    json.dumps({**PUBLISH, "internal_id": 2**64 - 1}),
    json.dumps({**PUBLISH, "internal_id": 2**64}),
    json.dumps({**PUBLISH, "internal_id": -1}),
    json.dumps({**PUBLISH, "internal_id": 4, "time": 2**62 + 1}),
    json.dumps({**PUBLISH, "internal_id": 4, "time": -1}),
    json.dumps({**PUBLISH, "internal_id": 4, "time": "soon"}),
    json.dumps({**PUBLISH, "internal_id": 5, "partition": 2**31}),
    json.dumps({**PUBLISH, "internal_id": 6, "partition": None}),
    json.dumps({**PUBLISH, "internal_id": 7, "nsqd": None}),
    json.dumps({**PUBLISH, "internal_id": 8, "topic": 7}),
    json.dumps({**PUBLISH, "internal_id": 9, "unknown": {"a": [1]}}),
    json.dumps({**PUBLISH, "internal_id": 10, "topic": "nobody_reads"}),
    json.dumps({**PUBLISH, "internal_id": 11, "event": "other"}),
    json.dumps({**CONSUME, "internal_id": 1, "outcome": "GONE"}),
    json.dumps({**CONSUME, "internal_id": 1, "attempts": None}),
    json.dumps({**CONSUME, "internal_id": 12, "handling_time": 2e9}),
    json.dumps({**CONSUME, "internal_id": 12, "handling_time": -0.1}),
    json.dumps({**CONSUME, "internal_id": 13, "handling_time": 1.0000000015}),
    json.dumps({**CONSUME, "internal_id": 14, "handling_time": None}),
    json.dumps({**CONSUME, "internal_id": 15, "timestamp": START + 5 * SECOND}),
    json.dumps({**CONSUME, "internal_id": 16, "event": "receive", "outcome": None}),
    json.dumps({**CONSUME, "internal_id": 17, "topic": "größe", "channel": "a'b\"c"}),
]
ID = (1 << 50) + 5  # of partition 1
STORED, DELIVERED = "[TRACE] topic s-1 trace id 9: message", "[TRACE] topic s channel c trace id 9: message"
SERVER = [
    f"[nsqd] 2026 {STORED} {ID}( 10) put to channel at offset: 40, x at time {START}",
    f"{STORED} {ID + 1} put success from client 1:2 at offset: 80, x at time {START}",
    f"{DELIVERED} {ID} (ts: {START}, offset: 40, pri:0) consume state START"
    f" from client 10.0.0.1:5(3) at time: {START + 7} cost: 5, attempt: 1",
    f"{DELIVERED} {ID} (ts: {START}, offset: 40, pri:-1) consume state FIN"
    f" from client (3) at time: {START + 9} cost: -5, attempt: 1",
    f"{DELIVERED} {2**63 + 5} (ts: {START}, offset: 1, pri:0) consume state FIN_INTERNAL"
    f" from client x(3) at time: {START + 9} cost: 1, attempt: {2**31}",
    f"{DELIVERED} {ID} (ts: {2**63}, offset: 1, pri:0) consume state FIN"
    " from client x(3) at time: 5 cost: 1, attempt: 1",
    f"[TRACE] topic s-{2**31} trace id 9: message 5( 10) put x at offset: {2**63}, x at time {START}",
    f"[TRACE] topic s-1 trace id {2**64}: message 5( 10) put x at offset: 1, x at time {START}",
    "[TRACE] topic of something else",
]


def random_lines(seed: int, count: int) -> list[str]:
    """Records of few messages, so that they meet: in any order, repeated, with gaps, by clocks that disagree."""
    chance = random.Random(seed)

    def maybe(value: Any) -> Any:
        return None if chance.random() < 0.1 else value

    lines = []
    for _ in range(count):
        number = chance.randrange(60)
        partition = chance.choice([None, 0, 1])
        common = {
            "time": START + chance.randrange(30 * SECOND),
            "topic": chance.choice(["a", "b"]),
            "partition": partition,
            "nsqd": f"n{chance.randrange(3)}:1",
            "internal_id": number + chance.choice([0, 0, 0, 2**63]),
            "trace_id": number % 2,
        }
        if chance.random() < 0.4:
            record = {"event": "publish", **common, "offset": maybe(number * 10), "size": maybe(10)}
        else:
            record = {
                "event": chance.choice(["receive", "consume", "consume", "consume"]),
                **common,
                "channel": chance.choice(["x", "y"]),
                "local": f"h{chance.randrange(3)}:{chance.randrange(5)}",
                "timestamp": START + chance.randrange(20 * SECOND),
                "attempts": chance.choice([0, 1, 1, 2, 3]),
                "outcome": chance.choice(["FIN", "FIN", "FIN", "REQ", "TIMEOUT"]),
                "offset": maybe(chance.choice([None, number * 10])),
                "size": maybe(10),
                "handling_time": maybe(chance.random()),
            }
        lines.append(json.dumps(record))
    return lines


def by_spark(spark: SparkSession, folder: Path, settings: TraceSettings) -> Figures:
    write_tables(spark, read_logs(spark, folder / "logs"), folder / "tables", settings)
    found: Figures = figures_of(spark, folder / "tables")
    return found


def check_equal(ours: Figures, theirs: Figures) -> None:
    for name in Figures.__struct_fields__:
        assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.parametrize(("order", "window", "grace", "seed"), [("offsets", 1.0, 5.0, 1), ("ids", 0.25, 60.0, 2)])
def test_the_figures_are_those_of_spark(
    spark: SparkSession, tmp_path: Path, order: Order, window: float, grace: float, seed: int
) -> None:
    logs = tmp_path / "logs"
    log = trace_logs.good_log(seed=seed)
    trace_logs.plant(log)
    trace_logs.write_logs(trace_logs.records_of(log), logs)
    (logs / "random names é.log").write_text("\n".join(random_lines(seed, 1500)) + "\n", encoding="utf-8")
    (logs / "mac.log").write_text("\r".join(random_lines(seed + 10, 20)), encoding="utf-8")
    (logs / "windows.log.gz").write_bytes(gzip.compress("\r\n".join(random_lines(seed + 20, 20)).encode()))
    (logs / "more.log.bz2").write_bytes(bz2.compress("\n".join(SERVER).encode()))
    (logs / "awkward.log").write_text("\n".join(AWKWARD), encoding="utf-8")
    settings = TraceSettings(window=window, grace=grace, order=order, slowest=10)
    check_equal(local_figures(logs, settings), by_spark(spark, tmp_path, settings))


def logged(folder: Path, lines: list[str]) -> Path:
    path = folder / "some.log"
    path.write_text("\n".join(lines))
    return path


def test_what_it_cannot_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty.log").touch()
    (tmp_path / "x.zst").write_bytes(b"x")
    (tmp_path / "torn.gz").write_bytes(gzip.compress(random.Random(1).randbytes(9999))[:-99])
    for name, message in {
        "empty.log": "nothing was traced: the logs are empty",
        "x.zst": "--local reads plain, .gz and .bz2 files",
        "torn.gz": r"torn\.gz: cannot be read",
        "none.log": "names no file",
    }.items():
        with pytest.raises(ConfigError, match=message):
            local_figures(tmp_path / name)
    with pytest.raises(ConfigError, match="--local reads files of this machine"):
        local_figures("s3://bucket/x.log")
    with pytest.raises(ConfigError, match="nothing was traced"):
        local_figures(logged(tmp_path, AWKWARD[:7]))
    with pytest.raises(ConfigError, match="memory='much': must be a number with k, m, g or t"):
        local_figures(logged(tmp_path, [json.dumps(PUBLISH)]), memory="much")


def test_a_report_of_a_publish_alone_and_without_order(tmp_path: Path) -> None:
    only = local_figures(logged(tmp_path, [json.dumps(PUBLISH)]))
    assert (only.records, only.unconsumed, only.groups, only.channels) == (1, {"t": 1}, [], [])
    assert "1 publish to t, and no delivery was recorded" in html(only)
    lines = random_lines(5, 3000)
    assert local_figures(logged(tmp_path, lines), TraceSettings(order="ids")).totals["violations"] > 0
    assert local_figures(logged(tmp_path, lines), TraceSettings(order="off")).totals["violations"] == 0


def test_little_memory_and_many_batches_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = logged(tmp_path, random_lines(6, 4000))
    shares: list[tuple[str, float]] = []
    whole = local_figures(path)
    monkeypatch.setattr("nsq_fast.spark.trace.local.ROWS", 100)
    assert local_figures(path, memory="100m", tell=lambda stage, share: shares.append((stage, share))) == whole
    assert list(dict.fromkeys(stage for stage, _ in shares)) == ["reading", "joining", "counting"]
    reading = [share for stage, share in shares if stage == "reading"]
    assert reading == sorted(reading)
    assert reading[-1] == 1.0


def test_the_command_needs_no_java(tmp_path: Path) -> None:
    logs = logged(tmp_path, random_lines(7, 500))
    page = tmp_path / "report.html"
    command = [sys.executable, "-m", "nsq_fast", "trace-report", str(logs), "--local", "--json", "--html", str(page)]
    env = {**os.environ, "PATH": "", "JAVA_HOME": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS, check=False, env=env)
    assert done.returncode == 0, done.stderr
    found, figures = json.loads(done.stdout), local_figures(logs)
    assert {name: found[name] for name in figures.totals} == figures.totals
    assert [each["latency_p99_ns"] for each in found["groups"]] == [
        each.durations["latency_p99_ns"] for each in figures.groups
    ]
    assert "NSQ traces" in page.read_text()
