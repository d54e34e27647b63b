"""`nsq-fast trace-report`: from trace logs to a report, and to tables, by a Spark that it starts, or by DuckDB."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from nsq_fast.errors import counted

from . import console, options
from .options import argument, flag, number, option, several, write_file

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from nsq_fast.spark.trace import Figures, TraceSettings
    from nsq_fast.spark.trace.schema import Order

_SHUFFLE_BYTES = 64 << 20  # of logs that go into one partition of a shuffle
_FEWEST, _MOST = 2, 512
_SMALL = 64 << 20  # below that the JVM is best told not to prepare for a long run
_SMALL_JVM = {"spark.driver.defaultJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
_SHOWN = {
    "messages": "in all channels",
    "finished": "",
    "pending": "not finished, within the grace period",
    "lost": "published, never finished",
    "duplicates": "finished more than once",
    "violations": "finished out of order",
    "redelivered_req": "delivered again after a REQ",
    "redelivered_timeout": "delivered again after a timeout",
    "redelivered_unknown": "delivered again, cause not recorded",
    "problems": "lines that hold no record",
}


def _setting(text: str) -> tuple[str, str]:
    name, found, value = text.partition("=")
    if not found:
        raise ValueError(f"{text!r} is not name=value")
    return name, value


@options.command("trace-report", "What trace logs say: lost, duplicates, order, latency.")
def command(
    logs: Sequence[str] = argument(nargs=-1, metavar="[LOG]..."),
    html_file: Path | None = options.output_file("--html", help="Write the report: one page that stands alone."),
    tables: str | None = option(metavar="DIR", help="Write the tables as Parquet; without LOG: report on those there."),
    window: float = option(type=options.some_time, default=10.0, help="Length of windows."),
    grace: float = option(
        type=options.duration, default=60.0, help="A message not finished so long after it was published is lost."
    ),
    slowest: int = number(default=20, least=0, help="How many messages to show."),
    order: Order = option(
        type=click.Choice(["offsets", "ids", "off"]),
        default="offsets",
        help="Judge the order where messages have offsets, everywhere by id, or nowhere.",
    ),
    is_local: bool = flag("--local", help="Without Spark and Java, on this machine: by DuckDB."),
    master: str = option(default="local[*]", metavar="URL", help="Where Spark runs."),
    memory: str = option(default="1g", metavar="SIZE", help="Of the JVM, or of DuckDB."),
    settings: Sequence[tuple[str, str]] = several(
        "--conf", type=options.Kind("name=value", _setting), help="A setting of Spark (repeatable)."
    ),
    as_json: bool = flag("--json", help="Print the summary as one line of JSON."),
) -> None:
    """Join the trace records of producers, consumers and redesigned nsqds, and report what became of the messages.

    LOG is a file, a folder or a pattern, compressed or not, of any host. Lines may have something before the JSON.
    Needs Java 17 or newer, and pip install 'nsq-fast[spark]'; or, with --local, pip install 'nsq-fast[trace]'.
    """
    if not logs and not tables:
        raise click.UsageError("give at least one LOG, or --tables DIR of an earlier run")
    if not (html_file or tables or as_json):
        raise click.UsageError("say what to write: --html, --tables or --json")
    if is_local and (tables or settings):
        raise click.UsageError(f"{'--tables' if tables else '--conf'} is for Spark: leave it out, or --local")
    if not is_local and (reason := why_not()):
        raise click.ClickException(f"{reason}. Or report without Spark: --local")
    from nsq_fast.spark import trace  # which needs no Spark by itself

    trace_settings = trace.TraceSettings(window=window, grace=grace, slowest=slowest, order=order)
    if is_local:
        figures = _by_duckdb(logs, trace_settings, memory)
    else:
        with _session(logs, master, memory, dict(settings)) as spark:
            figures = _by_spark(spark, logs, tables, trace_settings)
    if html_file:
        write_file(html_file, trace.html(figures))
    _print_json(figures) if as_json else _print_table(figures, html_file)


def why_not() -> str | None:
    """Why Spark can make no report here, and what to do about it; None when it can."""
    from nsq_fast.spark.trace import missing

    return missing()


@contextmanager
def _session(logs: Sequence[str], master: str, memory: str, settings: dict[str, str]) -> Iterator[SparkSession]:
    from nsq_fast.spark.trace import explained, local_session
    from nsq_fast.spark.trace.schema import expand

    # About how many bytes of lines there are, as far as they are on this machine.
    files = [name for name in expand(logs) if os.path.exists(name)] if logs else []
    size = sum(os.path.getsize(name) * (8 if name.endswith((".gz", ".bz2", ".zst")) else 1) for name in files)
    partitions = min(_MOST, max(_FEWEST, os.cpu_count() or 1, -(-size // _SHUFFLE_BYTES)))
    given = {**(_SMALL_JVM if size < _SMALL else {}), **settings}
    with explained():
        spark = local_session(master, memory, partitions, given)
        try:
            yield spark
        finally:
            spark.stop()


def _by_spark(spark: SparkSession, logs: Sequence[str], tables: str | None, settings: TraceSettings) -> Figures:
    from nsq_fast.spark.trace import figures_of, read_logs, write_tables

    with tempfile.TemporaryDirectory(prefix="nsq_fast_traces_") as folder:
        if logs:
            write_tables(spark, read_logs(spark, logs), tables or folder, settings)
        return figures_of(spark, tables or folder)


def _by_duckdb(logs: Sequence[str], settings: TraceSettings, memory: str) -> Figures:
    """The figures without Spark; a terminal shows how far it is. Raises ClickException where DuckDB is missing."""
    try:
        from nsq_fast.spark.trace import local_figures
    except ImportError as error:
        raise click.ClickException(f"--local: {error}") from None
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    terminal = Console(stderr=True)
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as bars:
        task = bars.add_task("", total=1.0)

        def tell(stage: str, share: float) -> None:
            bars.update(task, description=stage, completed=share)

        return local_figures(logs, settings, memory, tell)


def _print_json(figures: Figures) -> None:
    found: dict[str, Any] = {**figures.totals, "problems": figures.problems, "records": figures.records}
    groups = [
        {"topic": each.topic, "partition": each.partition, "channel": each.channel, **each.counts, **each.durations}
        for each in figures.groups
    ]
    click.echo(json.dumps({**found, "publishes": figures.publishes, "groups": groups}))


def _print_table(figures: Figures, html_file: Path | None) -> None:
    title = f"{counted(figures.records, 'trace record')}, {figures.publishes:,} of publishes"
    counts = {**figures.totals, "problems": figures.problems}
    rows = [(name.replace("_", " "), f"{counts[name]:,}", note) for name, note in _SHOWN.items()]
    console.output().print(console.notes(title, rows))
    if html_file:
        click.echo(f"report: {html_file}")
