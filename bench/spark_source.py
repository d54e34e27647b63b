"""How fast the journalled source of Spark is, against a real nsqd: all figures of one run, so that ratios can be read.

    python bench/spark_source.py [--servers DIR] [--rows N] [--rounds N] [--no-spark]

Printed are the rates of ``read()`` without Spark (with no journal at all, with
one that is not synced, as it is, and of a replay), of a stream into a noop sink
with each of these, and of the same stream fed with Arrow batches that were
ready before. Messages have 200 bytes. The fastest round counts; the others are
shown. nsqd, the JVM and Python share the machine's cores.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader

from nsq_fast.bench.clients import PROGRAMS
from nsq_fast.client.admin import NsqdHTTPClient
from nsq_fast.spark.journal import JournalStreamReader
from nsq_fast.spark.journal.collect import Collector
from nsq_fast.spark.journal.files import FileStorage
from nsq_fast.spark.journal.slot import Chain, Head, Stored
from nsq_fast.spark.options import SourceOptions
from nsq_fast.spark.source import NsqDataSource
from nsq_fast.spark.versions import ReadAllAvailable

BODY = b"x" * 200
TOPIC, CHANNEL = "bench", "spark"
MODES = ("no journal", "not synced", "as it is")
ROWS_PER_BATCH = 250_000


class NotSynced(Collector):
    """A journal that is not on disk before its messages are finished."""

    def __init__(self, slot: Any) -> None:
        super().__init__(slot, FileStorage(slot.path, durable=False))


class NoJournal(NotSynced):
    """Keeps the rows in memory instead."""

    def __init__(self, slot: Any) -> None:
        super().__init__(slot)
        self.kept: list[Any] = []

    def claim(self, index: int, head: Head, columns: Any) -> Stored:
        self.kept.append(columns)
        return KeptRows(self.chain, index, head, columns)

    def seal(self, index: int, head: Head) -> None:
        pass


class KeptRows(Stored):
    """A segment in memory."""

    def __new__(cls, chain: Chain, index: int, head: Head, columns: Any) -> KeptRows:
        made = super().__new__(cls, chain.storage, chain.name(index), head)
        made.rows = columns
        return made

    def columns(self) -> Any:
        return self.rows


class BenchReader(JournalStreamReader):
    """Collects as the environment says."""

    def make_collector(self, slot: Any) -> Collector:
        kinds = dict(zip(MODES, (NoJournal, NotSynced, Collector), strict=True))
        return kinds[self.mode](slot)

    @property
    def mode(self) -> str:
        return Path(self.journal).name.replace("_", " ")


class BenchSource(NsqDataSource):
    @classmethod
    def name(cls) -> str:
        return "nsqbench"

    def make_stream_reader(self, kind: str, options: SourceOptions) -> DataSourceStreamReader:
        return BenchReader(options)


class Nsqd:
    """A real nsqd whose queue is filled between the measurements."""

    def __init__(self, binary: Path, folder: Path) -> None:
        flags = ["-tcp-address=127.0.0.1:0", "-http-address=127.0.0.1:0", "-https-address=127.0.0.1:0"]
        flags += [f"-data-path={folder}", "-broadcast-address=127.0.0.1"]
        flags += ["-mem-queue-size=20000000", "-max-body-size=50000000"]
        self._log = (folder / "nsqd.log").open("w+")
        self.process = subprocess.Popen([str(binary), *flags], stderr=self._log)
        self.tcp, self.http = (self._listening(folder / "nsqd.log", face) for face in ("TCP", "HTTP"))
        host, _, port = self.http.rpartition(":")
        self.client = NsqdHTTPClient(host, int(port))
        self.client.create_topic(TOPIC)
        self.client.create_channel(TOPIC, CHANNEL)

    def _listening(self, log: Path, face: str) -> str:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for line in log.read_text().splitlines():
                if f" {face}: listening on " in line:
                    return line.rpartition(" ")[2]
            time.sleep(0.02)
        raise SystemExit(f"nsqd did not start; see {log}")

    def depth(self) -> int:
        (topic,) = self.client.stats(TOPIC)["topics"]
        return int(topic["channels"][0]["depth"])

    def fill(self, rows: int) -> None:
        """So many messages wait in the channel."""
        while (missing := rows - self.depth()) > 0:
            self.client.multipublish(TOPIC, [BODY] * min(missing, 50_000), binary=True)
            while int(self.client.stats(TOPIC)["topics"][0]["depth"]):
                time.sleep(0.01)

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()
        self._log.close()


def options_of(nsqd: Nsqd, folder: Path, mode: str, **more: str) -> dict[str, str]:
    given = {"topic": TOPIC, "channel": CHANNEL, "nsqd_tcp_addresses": nsqd.tcp, "nsqd_http_addresses": nsqd.http}
    return {**given, "journal": str(folder / mode.replace(" ", "_")), "reader": "journalled", **more}


def rows_per_second(work: Callable[[], int]) -> float:
    start = time.perf_counter()
    rows = work()
    return rows / (time.perf_counter() - start)


def measure_read(nsqd: Nsqd, folder: Path, mode: str, rows: int) -> dict[str, float]:
    """``read()`` of one task that takes all, and of one that reads it again."""
    reader = BenchReader(SourceOptions.parse(options_of(nsqd, folder, mode)))
    start = reader.initialOffset()
    nsqd.fill(rows)
    reader.backlog.fresh()
    end = reader.latestOffset(start, ReadAllAvailable())
    (task,) = reader.partitions(start, end)
    rates = {mode: rows_per_second(lambda: sum(batch.num_rows for batch in reader.read(task)))}
    if mode == MODES[-1]:
        rates["replay"] = rows_per_second(lambda: sum(batch.num_rows for batch in reader.read(task)))
    reader.commit(end)
    reader.stop()
    return rates


def session(folder: Path) -> Any:
    from pyspark.sql import SparkSession

    here = str(Path(__file__).parent)
    folders = [here, str(Path(here).parent), str(PROGRAMS)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    sys.path.append(str(PROGRAMS))
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]").config("spark.driver.memory", "1g")
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.local.dir": str(folder / "spark"),
    }.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    import ready_rows  # both by their names, so that workers import the classes rather than get copies
    import spark_source

    spark.dataSource.register(spark_source.BenchSource)
    spark.dataSource.register(ready_rows.ReadySource)
    return spark


def measure_stream(spark: Any, folder: Path, reader: Any, rows: int) -> list[float]:
    """Rows a second of each micro-batch but the first, whose processes are cold, as Spark counts them."""
    query = (
        reader.load()
        .writeStream.format("noop")
        .option("checkpointLocation", tempfile.mkdtemp(dir=folder))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    done = [each for each in query.recentProgress if each["numInputRows"] == rows]
    return [each["numInputRows"] / each["durationMs"]["triggerExecution"] * 1000 for each in done[1:]]


def show(name: str, rates: list[float]) -> None:
    others = " ".join(f"{rate / 1000:,.0f}" for rate in rates)
    print(f"{name:48s} {max(rates) / 1000:10,.0f} k/s   ({others})", flush=True)  # noqa: T201


def run(binary: Path, rows: int, rounds: int, with_spark: bool) -> None:
    folder = Path(tempfile.mkdtemp(prefix="nsq-bench-"))
    nsqd = Nsqd(binary, folder)
    try:
        found: dict[str, list[float]] = {}
        for _ in range(rounds):
            for mode in MODES:
                for name, rate in measure_read(nsqd, folder, mode, rows).items():
                    found.setdefault(f"read(), {name}", []).append(rate)
        for name, rates in found.items():
            show(name, rates)
        if with_spark:
            run_streams(nsqd, folder, rounds)
    finally:
        nsqd.close()
        shutil.rmtree(folder, ignore_errors=True)


def run_streams(nsqd: Nsqd, folder: Path, rounds: int) -> None:
    spark = session(folder)
    batches_each = 4 * ROWS_PER_BATCH
    found: dict[str, list[float]] = {}
    try:
        for _ in range(rounds):
            ready = spark.readStream.format("ready").option("rows", batches_each).option("perBatch", ROWS_PER_BATCH)
            found.setdefault("stream, batches that were ready", []).extend(
                measure_stream(spark, folder, ready, ROWS_PER_BATCH)
            )
            for mode in MODES:
                nsqd.fill(batches_each)
                more = {"maxOffsetsPerTrigger": str(ROWS_PER_BATCH)}
                reader = spark.readStream.format("nsqbench").options(**options_of(nsqd, folder, mode, **more))
                found.setdefault(f"stream, {mode}", []).extend(measure_stream(spark, folder, reader, ROWS_PER_BATCH))
    finally:
        spark.stop()
    for name, rates in found.items():
        show(name, rates)
    ready_rate = max(found["stream, batches that were ready"])
    for mode in MODES:
        rate = max(found[f"stream, {mode}"])
        print(f"stream, {mode}, of batches that were ready: {rate / ready_rate:.2f}x", flush=True)  # noqa: T201


def main() -> None:
    default = Path(os.environ.get("NSQ_FAST_SERVERS", "~/.cache/nsq-fast/servers")).expanduser()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=Path, default=default, help="folder with original/nsqd")
    parser.add_argument("--rows", type=int, default=500_000, help="messages of one read()")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-spark", action="store_true", help="read() only")
    given = parser.parse_args()
    binary = given.servers / "original" / "nsqd"
    if not os.access(binary, os.X_OK):
        sys.exit(f"no nsqd at {binary}")
    run(binary, given.rows, given.rounds, not given.no_spark)


if __name__ == "__main__":
    main()
