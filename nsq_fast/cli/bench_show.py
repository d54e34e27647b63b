"""`nsq-fast bench compare` and `nsq-fast bench report`: what became of runs that were written to files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from nsq_fast.bench import results
from nsq_fast.bench.compare import THRESHOLD, Change, compare, differences
from nsq_fast.bench.figures import METRICS, Figure, shown
from nsq_fast.bench.report import charts, docs, fill, html, readme_block, tuning_block

from . import console

_EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("compare", short_help="What changed between two runs.")
@click.argument("before", type=_EXISTING)
@click.argument("after", type=_EXISTING)
@click.option("--client", "clients", multiple=True, help="A client to compare (repeatable); default: all.")
@click.option(
    "--relative-to", default="", metavar="CLIENT", help="Divide by this client's figures, each in its own run."
)
@click.option("--threshold", type=click.FloatRange(0), default=THRESHOLD, show_default=True, help="Smallest change.")
@click.option("--all", "everything", is_flag=True, help="Show what did not change too.")
@click.option("--json", "as_json", is_flag=True, help="Print the changes as JSON.")
def compare_command(
    before: Path,
    after: Path,
    clients: Sequence[str],
    relative_to: str,
    threshold: float,
    everything: bool,
    as_json: bool,
) -> None:
    """Show what changed from run BEFORE to run AFTER by more than the spread of the rounds.

    The exit code is 1 when something became worse. Between machines, or days, use --relative-to.
    """
    old, new = results.load(before), results.load(after)
    for difference in differences(old, new):
        click.echo(f"warning: {difference}", err=True)
    changes = list(compare(old, new, clients=clients, relative_to=relative_to, threshold=threshold))
    if not changes:
        raise click.UsageError("the two runs have no figure in common")
    if as_json:
        click.echo(msgspec.json.encode(changes).decode())
    else:
        _show(
            changes if everything else [each for each in changes if each.verdict != "same"], relative_to, len(changes)
        )
    raise SystemExit(any(each.verdict == "worse" for each in changes))


def _show(changes: Sequence[Change], relative_to: str, compared: int) -> None:
    title = f"{console.counted(compared, 'figure')} compared" + (f", relative to {relative_to}" if relative_to else "")
    if not changes:
        click.echo(f"{title}: nothing changed by more than the spread of the rounds")
        return
    rows = []
    for each in changes:
        cells = [_cell(value, "" if relative_to else each.metric) for value in (each.before, each.after)]
        rows.append([each.scenario, each.client, each.metric, *cells, f"{each.ratio - 1:+.0%}", each.verdict])
    output = console.output()
    head = ("scenario", "client", "figure", "before", "after", "change", "verdict")
    output.print(console.grid(head, rows, output.width, title=title, names=3, numbers=False))


def _cell(value: Figure, metric: str) -> str:
    median = shown(value, metric) if metric in METRICS else f"{value.median:,.3g}"
    return median if value.low == value.high else f"{median} ({value.spread:.0%})"


@click.command("report", short_help="Show a run: HTML, charts, documentation.")
@click.argument("run_file", metavar="RUN", type=_EXISTING)
@click.option("--html", "html_file", type=_FILE, metavar="FILE", help="Write a report that stands alone.")
@click.option("--svg", "svg_folder", type=click.Path(file_okay=False, path_type=Path), help="Write charts to a folder.")
@click.option("--docs", "docs_file", type=_FILE, metavar="FILE", help="Write the page of the documentation.")
@click.option("--readme", type=_EXISTING, metavar="FILE", help="Put the figures between the marks of this file.")
@click.option("--tuning", type=_EXISTING, metavar="FILE", help="The same for the page about tuning.")
def report_command(
    run_file: Path,
    html_file: Path | None,
    svg_folder: Path | None,
    docs_file: Path | None,
    readme: Path | None,
    tuning: Path | None,
) -> None:
    """Write what the file RUN of a run shows, in the forms that are asked for."""
    if not (html_file or svg_folder or docs_file or readme or tuning):
        raise click.UsageError("say what to write: --html, --svg, --docs, --readme or --tuning")
    run = results.load(run_file)
    if html_file:
        console.write_file(html_file, html(run))
    if docs_file:
        console.write_file(docs_file, docs(run))
    for page, block in ((readme, readme_block), (tuning, tuning_block)):
        if page:
            console.write_file(page, fill(page.read_text(encoding="utf-8"), block(run)))
    if svg_folder:
        for name, chart in charts(run):
            console.write_file(svg_folder / name, chart)
