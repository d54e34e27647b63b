"""The sink of Spark at speed: 200-byte bodies in two partitions to one nsqd, all on the cores of this machine.

    python bench/spark_sink.py [--rows 1000000] [--runs 3] [--size 200] [--servers DIR] [--json FILE]

Spark makes the rows itself, which is measured apart, into its noop sink. Each run fails unless nsqd has every row
once. DIR holds an nsqd; without one it is the embedded broker.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from pyspark.sql import DataFrame, SparkSession

import nsq_fast.spark
from nsq_fast.bench.servers import run_nsqd
from nsq_fast.broker import BrokerProcess
from nsq_fast.client.admin import NsqdHTTPClient
from nsq_fast.names import Address
from nsq_fast.spark.trace.session import local_session

PARTITIONS = 2


class Target(NamedTuple):
    """Where the rows go."""

    name: str
    tcp: Address
    http: Address


@contextmanager
def target(folder: Path | None) -> Iterator[Target]:
    """An nsqd of its own for the run."""
    if folder is not None and (folder / "nsqd").exists():
        with run_nsqd(folder, "127.0.0.1") as started:
            yield Target(started.version, started.tcp, started.http)
        return
    with BrokerProcess(lookupd=False, mem_queue_size=100_000_000) as broker:
        yield Target("embedded nsqd", broker.nsqd.tcp, broker.nsqd.http)


def bodies(spark: SparkSession, rows: int, size: int) -> DataFrame:
    """Messages that are all different, and cost Spark little to make."""
    tail = "-" * (size - 10)
    return spark.range(10**9, 10**9 + rows, 1, PARTITIONS).selectExpr(f"cast(concat(id, '{tail}') as binary) body")


def write(frame: DataFrame, to: Target, topic: str, **options: str) -> None:
    """One batch write."""
    writer = frame.write.format("nsq").option("nsqd_tcp_addresses", str(to.tcp)).option("topic", topic)
    writer.options(**options).mode("append").save()


def stored(to: Target, topic: str) -> int:
    """Messages that the topic ever got."""
    with NsqdHTTPClient(to.http.host, to.http.port) as client:
        topics: list[dict[str, Any]] = client.stats(topic)["topics"]
    return sum(each["message_count"] for each in topics if each["topic_name"] == topic)


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    began = perf_counter()
    work()
    return perf_counter() - began


def measure(spark: SparkSession, to: Target, rows: int = 1_000_000, runs: int = 3, size: int = 200) -> dict[str, Any]:
    """The rates, in rows a second, after one run that is not counted."""
    nsq_fast.spark.register(spark)
    frame = bodies(spark, rows, size)
    rates: dict[str, list[float]] = {"write": [], "noop": []}
    for run in range(runs + 1):
        topic = f"sink{run}"
        seconds = timed(lambda topic=topic: write(frame, to, topic))  # type: ignore[misc]
        found = stored(to, topic)
        if found != rows:
            raise SystemExit(f"{topic}: wrote {rows} rows, nsqd has {found}")
        with NsqdHTTPClient(to.http.host, to.http.port) as client:
            client.delete_topic(topic)
        made = timed(lambda: frame.write.format("noop").mode("append").save())
        if run:
            rates["write"].append(rows / seconds)
            rates["noop"].append(rows / made)
    return {
        "server": to.name,
        "cores": os.cpu_count(),
        "rows": rows,
        "body_bytes": size,
        "partitions": PARTITIONS,
        "write_rows_per_second": round(median(rates["write"])),
        "write_lowest": round(min(rates["write"])),
        "noop_rows_per_second": round(median(rates["noop"])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--size", type=int, default=200)
    parser.add_argument("--servers", type=Path, help="folder with an nsqd")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    given = parser.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = local_session(f"local[{PARTITIONS}]")
    with target(given.servers) as to:
        found = measure(spark, to, given.rows, given.runs, given.size)
    text = json.dumps(found, indent=2)
    if given.json is not None:
        given.json.write_text(text + "\n")
    sys.stdout.write(text + "\n")
    spark.stop()


if __name__ == "__main__":
    main()
