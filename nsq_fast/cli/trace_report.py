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

from nsq_fast.printable import counted

from . import console, options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from nsq_fast.spark.trace import Figures, TraceSettings
    from nsq_fast.spark.trace.schema import Order

_SHUFFLE_BYTES = 64 << 20  # of logs that go into one partition of a shuffle
_FEWEST, _MOST = 2, 512
_SMALL = 64 << 20  # below that the JVM is best told not to prepare for a long run
_JVM = "spark.driver.defaultJavaOptions"
_SMALL_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_STAGES = ("reading", "joining", "counting")  # of a report without Spark
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
        raise click.BadParameter(f"{text!r} is not name=value")
    return name, value


@click.command("trace-report", short_help="What trace logs say: lost, duplicates, order, latency.")
@click.argument("logs", nargs=-1, metavar="[LOG]...")
@options.output_file("--html", "html_file", help="Write the report: one page that stands alone.")
@click.option("--tables", metavar="DIR", help="Write the tables as Parquet; without LOG: report on those there.")
@options.seconds("--window", default=10.0, help="Length of windows.")
@options.seconds(
    "--grace", default=60.0, may_be_zero=True, help="A message not finished so long after it was published is lost."
)
@options.number("--slowest", default=20, least=0, help="How many messages to show.")
@click.option(
    "--order",
    type=click.Choice(["offsets", "ids", "off"]),
    default="offsets",
    show_default=True,
    help="Judge the order where messages have offsets, everywhere by id, or nowhere.",
)
@click.option("--local", "is_local", is_flag=True, help="Without Spark and Java, on this machine: by DuckDB.")
@click.option("--master", default="local[*]", show_default=True, metavar="URL", help="Where Spark runs.")
@click.option("--memory", default="1g", show_default=True, metavar="SIZE", help="Of the JVM, or of DuckDB.")
@click.option(
    "--conf",
    "settings",
    type=_setting,
    multiple=True,
    metavar="NAME=VALUE",
    help="A setting of Spark (repeatable).",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one line of JSON.")
def command(
    logs: Sequence[str],
    html_file: Path | None,
    tables: str | None,
    window: float,
    grace: float,
    slowest: int,
    order: Order,
    is_local: bool,
    master: str,
    memory: str,
    settings: Sequence[tuple[str, str]],
    as_json: bool,
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
    settings_class = _settings_class() if is_local else _require_spark()
    trace_settings = settings_class(window=window, grace=grace, slowest=slowest, order=order)
    figures = (
        _local_figures(logs, trace_settings, memory)
        if is_local
        else _spark_figures(logs, tables, trace_settings, master, memory, settings)
    )
    if html_file:
        _write(html_file, figures)
    _print_json(figures) if as_json else _print_table(figures, html_file)


def _spark_figures(
    logs: Sequence[str],
    tables: str | None,
    trace_settings: TraceSettings,
    master: str,
    memory: str,
    settings: Sequence[tuple[str, str]],
) -> Figures:
    size = _size(logs)
    given = {**({_JVM: _SMALL_JVM} if size < _SMALL else {}), **dict(settings)}
    from nsq_fast.spark.trace.session import explained

    with explained(), _session(master, memory, _partitions(size), given) as spark:
        return _figures(spark, logs, tables, trace_settings)


def _local_figures(logs: Sequence[str], settings: TraceSettings, memory: str) -> Figures:
    """The figures without Spark; a terminal shows how far it is. Raises ClickException where DuckDB is missing."""
    from nsq_fast.spark import trace

    try:
        local_figures = trace.local_figures
    except ImportError as error:
        raise click.ClickException(f"--local: {error}") from None
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    terminal = Console(stderr=True)
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as bars:
        tasks = {stage: bars.add_task(stage, total=1.0, start=False) for stage in _STAGES}

        def tell(stage: str, share: float) -> None:
            for earlier in _STAGES[: _STAGES.index(stage)]:
                bars.update(tasks[earlier], completed=1.0)
            bars.start_task(tasks[stage])
            bars.update(tasks[stage], completed=share)

        return local_figures(logs, settings, memory, tell)


def why_not() -> str | None:
    """Why there can be no report here, and what to do about it; None when there can."""
    from nsq_fast.spark.trace.session import missing

    return missing()


def _settings_class() -> type[TraceSettings]:
    from nsq_fast.spark.trace import TraceSettings

    return TraceSettings


def _require_spark() -> type[TraceSettings]:
    """Raise ClickException where Spark cannot run; importing nsq_fast.spark.trace needs no Spark."""
    if reason := why_not():
        raise click.ClickException(f"{reason}. Or report without Spark: --local")
    return _settings_class()


@contextmanager
def _session(master: str, memory: str, partitions: int, settings: dict[str, str]) -> Iterator[SparkSession]:
    from nsq_fast.spark.trace.session import local_session

    spark = local_session(master, memory, partitions, settings)
    try:
        yield spark
    finally:
        spark.stop()


def _size(logs: Sequence[str]) -> int:
    """About how many bytes of lines there are, as far as they are on this machine."""
    from nsq_fast.spark.trace.schema import expand

    files = [name for name in expand(logs) if os.path.exists(name)] if logs else []
    return sum(os.path.getsize(name) * (8 if name.endswith((".gz", ".bz2", ".zst")) else 1) for name in files)


def _partitions(size: int) -> int:
    """Into how many parts to shuffle lines of so many bytes."""
    return min(_MOST, max(_FEWEST, os.cpu_count() or 1, -(-size // _SHUFFLE_BYTES)))


def _figures(spark: SparkSession, logs: Sequence[str], tables: str | None, settings: TraceSettings) -> Figures:
    from nsq_fast.spark.trace import figures_of, read_logs, write_tables

    if tables and not logs:
        return figures_of(spark, tables)
    with tempfile.TemporaryDirectory(prefix="nsq_fast_traces_") as folder:
        write_tables(spark, read_logs(spark, logs), tables or folder, settings)
        return figures_of(spark, tables or folder)


def _write(path: Path, figures: Figures) -> None:
    from nsq_fast.spark.trace import html

    try:
        path.write_text(html(figures), encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror or error}") from error


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
    output = console.output()
    output.print(console.notes(title, [(name.replace("_", " "), f"{counts[name]:,}", _SHOWN[name]) for name in _SHOWN]))
    if html_file:
        output.print(f"report: {html_file}")
