"""The trace pipeline at size: Spark writes a synthetic log, then makes tables and a report of it.

    python bench/spark_trace.py --records 20000000 [--master local[2]] [--memory 2g] [--folder DIR] [--json FILE]

Half of the records are publishes, half deliveries; one message in 100,000 is lost, one finished twice, one out of
order. It fails unless exactly these are found. Memory is the most that the JVM and Python ever had resident.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from nsq_fast.spark.trace import TraceSettings, local_session, read_logs, read_table, write_report, write_tables

logger = logging.getLogger("spark_trace")
START = 1_790_000_000_000_000_000
PARTITIONS = 8
FAULT_EVERY = 100_000
MESSAGES_PER_SECOND = 10_000
LOST, TWICE, LATE = 11, 22, 33  # remainders


def synthetic_lines(spark: SparkSession, messages: int) -> DataFrame:
    """The lines of a log: a publish and a delivery of each message, of two topics with four partitions each."""
    number = F.col("id")
    within = (number / (2 * PARTITIONS)).cast("bigint")
    topic = F.concat(F.lit("topic"), (number / PARTITIONS).cast("bigint") % 2)
    published = F.lit(START) + number * (1_000_000_000 // MESSAGES_PER_SECOND)
    # A group is finished in order: a message a group-turn, a time in queue that grows and falls slowly.
    turn = 2 * PARTITIONS * (1_000_000_000 // MESSAGES_PER_SECOND)
    wave = (F.sin(number / 500_000) * 400 + 500) * 1_000_000
    handling = (F.pmod(F.xxhash64("id"), F.lit(900)) + 100) * 1000
    is_late = number % FAULT_EVERY == LATE
    answered = (published + wave + F.when(is_late, 3 * turn).otherwise(0)).cast("bigint")
    common = {
        "topic": topic,
        "partition": (number % PARTITIONS).cast("int"),
        "nsqd": F.concat(F.lit("10.0.1."), (number % 3).cast("string"), F.lit(":4150")),
        "internal_id": within + 1000,
        "trace_id": F.expr("18446744073709551615 - id"),
        "offset": within * 230,
        "size": F.lit(230),
    }
    publish = _line({"event": F.lit("publish"), "time": published + 200_000, **common})
    consume = {
        **common,
        "event": F.lit("consume"),
        "time": answered,
        "channel": F.lit("workers"),
        "local": F.concat(F.lit("10.0.2."), (number % 5).cast("string"), F.lit(":40000")),
        "timestamp": published,
        "outcome": F.lit("FIN"),
        "handling_time": handling / 1e9,
    }
    first = _line({**consume, "attempts": F.lit(1)})
    second = _line({**consume, "attempts": F.lit(2), "time": answered + 1_000_000_000})
    rest = number % FAULT_EVERY
    lines = F.array_compact(F.array(publish, F.when(rest != LOST, first), F.when(rest == TWICE, second)))
    return spark.range(messages).select(F.explode(lines).alias("value"))


def _line(fields: dict[str, Any]) -> Any:
    return F.to_json(F.struct(*(value.alias(name) for name, value in fields.items())))


def timed(steps: dict[str, float], name: str, work: Callable[[], Any]) -> Any:
    """Run, and note the seconds."""
    began = perf_counter()
    found = work()
    steps[name] = round(perf_counter() - began, 1)
    logger.info("%s: %s s", name, steps[name])
    return found


def peak_mib(process: int | str) -> int:
    """The most memory that a process ever had resident."""
    status = Path(f"/proc/{process}/status").read_text()
    return next(int(line.split()[1]) // 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=20_000_000)
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--memory", default="2g")
    parser.add_argument("--partitions", type=int, default=32)
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    if options.records < 2 or options.partitions < 1:
        parser.error("--records must be 2 or more, --partitions 1 or more")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    folder = Path(tempfile.mkdtemp(prefix="spark_trace_", dir=options.folder))
    try:
        figures = run(folder, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = json.dumps(figures, indent=1)
    logger.info("%s", text)
    if options.json:
        options.json.write_text(text)


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Generate, compute, check. Raises SystemExit when the faults found are not those planted."""
    messages = options.records // 2
    settings = {"spark.local.dir": str(folder / "local")}
    spark = local_session(options.master, options.memory, options.partitions, settings)
    steps: dict[str, float] = {}
    logs, tables, page = str(folder / "logs"), folder / "tables", folder / "report.html"
    timed(steps, "generate", lambda: synthetic_lines(spark, messages).write.text(logs))
    bytes_read = sum(file.stat().st_size for file in Path(logs).iterdir())
    timed(steps, "tables", lambda: write_tables(spark, read_logs(spark, logs), tables, TraceSettings(grace=0)))
    timed(steps, "report", lambda: write_report(spark, tables, page))
    found = {name: read_table(spark, tables, name).count() for name in ("lost", "duplicates", "violations", "skews")}
    planted = {name: len(range(rest, messages, FAULT_EVERY)) for name, rest in (("lost", LOST), ("duplicates", TWICE))}
    expected = {**planted, "violations": len(range(LATE, messages, FAULT_EVERY)), "skews": 0}
    memory = {"jvm": peak_mib(spark.sparkContext._gateway.proc.pid), "python": peak_mib("self")}
    spark.stop()
    if found != expected:
        raise SystemExit(f"found {found}, planted {expected}")
    seconds = steps["tables"] + steps["report"]
    return {
        "records": options.records,
        "log_mib": bytes_read >> 20,
        "master": options.master,
        "jvm_heap": options.memory,
        "seconds": steps,
        "records_per_second": round(options.records / seconds),
        "peak_resident_mib": memory,
        "report_kib": page.stat().st_size >> 10,
        "found": found,
    }


if __name__ == "__main__":
    main()
