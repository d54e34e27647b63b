"""`nsq-fast lag`: how far a query of Spark is behind, by its checkpoint and what the servers say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.box import SIMPLE_HEAD

from . import console, options

if TYPE_CHECKING:
    from nsq_fast.spark.lag import Lag

_PREFIX = "nsq_fast_channel"
_LABELS = ("nsqd", "topic", "partition", "channel")
_FIGURES = {
    "depth": "Messages that wait for a consumer.",
    "in_flight": "Messages that consumers hold.",
    "deferred": "Messages that wait for their time.",
    "planned": "Messages of a batch of Spark that is planned and not committed.",
    "behind_bytes": "Bytes of the log behind what Spark has committed.",
}


@click.command("lag", short_help="How far a query of Spark is behind, by its checkpoint.")
@click.option(
    "--checkpoint",
    required=True,
    type=options.FOLDER,
    metavar="DIR",
    help="The query's checkpointLocation.",
)
@click.option(
    "--option",
    "given",
    multiple=True,
    type=options.pair,
    metavar="NAME=VALUE",
    help="An option of the source, as the query has it. Any number of times.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON for each place.")
@click.option("--metrics", "as_metrics", is_flag=True, help="Print metrics for Prometheus, named as the exporter does.")
def command(checkpoint: Path, given: Sequence[tuple[str, str]], as_json: bool, as_metrics: bool) -> None:
    """Show what waits for a query of Spark, of either reader. The query need not run.

    The checkpoint of the replayable reader says which topics, channel and nsqlookupds it reads. For the journalled
    reader give topic, channel and lookupd_http_addresses by --option.
    """
    if as_json and as_metrics:
        raise click.UsageError("--json and --metrics: only one of them may be given")
    try:
        from nsq_fast.spark import lags
    except ImportError as error:
        raise click.ClickException(str(error)) from error
    found = lags(checkpoint, dict(given))
    if as_json:
        for lag in found:
            click.echo(json.dumps(lag._asdict()))
    elif as_metrics:
        for line in _metrics(found):
            click.echo(line)
    else:
        _print_table(found)


def _metrics(found: Sequence[Lag]) -> Iterator[str]:
    for name, help in _FIGURES.items():
        shown = [lag for lag in found if getattr(lag, name) is not None]
        if shown:
            yield f"# HELP {_PREFIX}_{name} {help}"
            yield f"# TYPE {_PREFIX}_{name} gauge"
        for lag in shown:
            labels = ",".join(f'{label}="{_text(getattr(lag, label))}"' for label in _LABELS)
            yield f"{_PREFIX}_{name}{{{labels}}} {getattr(lag, name)}"


def _text(value: Any) -> str:
    """Names of NSQ have no quotes and no backslashes."""
    return "" if value is None else str(value)


def _print_table(found: Sequence[Lag]) -> None:
    rows = [
        [_text(getattr(lag, name)) for name in _LABELS]
        + ["" if (count := getattr(lag, name)) is None else f"{count:,}" for name in _FIGURES]
        for lag in found
    ]
    head = [name.replace("_", " ") for name in (*_LABELS, *_FIGURES)]
    output = console.output()
    output.print(console.grid(head, rows, output.width, names=len(_LABELS), box=SIMPLE_HEAD))
