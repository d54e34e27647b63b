"""`nsq-fast bench scale`: what each further process brings."""

from __future__ import annotations

from pathlib import Path

import click

from nsq_fast.bench.clients import OURS, available, chosen
from nsq_fast.bench.machine import about
from nsq_fast.bench.results import as_json
from nsq_fast.bench.scale import ScaleRun, explained, measure, settings_of
from nsq_fast.bench.scale_report import HEADER, html, picture_of, rows, title_of
from nsq_fast.bench.servers import embedded, from_folder

from . import console, options

_FILE = click.Path(dir_okay=False, path_type=Path)
_KINDS = ("consume", "publish", "both")


@click.command("scale", short_help="Many processes on many nsqds.")
@click.option("--servers", type=options.FOLDER, metavar="DIR", help="Start the nsqd binary of this folder.")
@click.option(
    "--processes",
    type=click.IntRange(1, 64),
    multiple=True,
    default=(1, 2, 4),
    show_default=True,
    help="How many at once (repeatable).",
)
@click.option("--nsqds", type=click.IntRange(1, 64), default=1, show_default=True, help="How many are started.")
@click.option(
    "--connections",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    help="Connections of a process to each nsqd.",
)
@click.option("--kind", "kinds", type=click.Choice(_KINDS), multiple=True, help="Repeatable; default: all.")
@click.option("--size", type=click.IntRange(1), default=200, show_default=True, help="Bytes in a message.")
@click.option("--duration", type=options.duration, default=2.0, show_default=True, help="Of one process alone.")
@click.option("--json", "target", type=_FILE, metavar="FILE", help="Write the run to this file.")
@click.option("--html", "html_file", type=_FILE, metavar="FILE", help="Write a report that stands alone.")
@click.option("--svg", "svg_folder", type=click.Path(file_okay=False, path_type=Path), help="Write charts to a folder.")
def scale_command(
    servers: Path | None,
    processes: tuple[int, ...],
    nsqds: int,
    connections: int,
    kinds: tuple[str, ...],
    size: int,
    duration: float,
    target: Path | None,
    html_file: Path | None,
    svg_folder: Path | None,
) -> None:
    """Measure nsq_fast in several processes at once, each on a topic of its own, over all nsqds.

    Against nsqds of --servers, or of the embedded broker. The last column is the largest p99 of the processes: of one
    publish, or from publish to handler.
    """
    source = from_folder(servers) if servers else embedded
    (client,) = chosen(available(), [OURS])
    curves = []
    for kind in kinds or _KINDS:
        settings = settings_of(kind, connections, size, duration)
        curve = measure(kind, settings, sorted(set(processes)), nsqds, client, source, console.progress)
        curves.append(curve)
    run = ScaleRun(about=about({}), curves=curves)
    _show(run)
    _write(run, target, html_file, svg_folder)


def _show(run: ScaleRun) -> None:
    output = console.output()
    for curve in run.curves:
        output.print(console.grid(HEADER, list(rows(curve)), output.width, title=f"{title_of(curve)}: {curve.server}"))
        for line in explained(curve, run.about.cores):
            output.print(line)


def _write(run: ScaleRun, target: Path | None, html_file: Path | None, svg_folder: Path | None) -> None:
    texts = {}
    if target:
        texts[target] = as_json(run)
    if html_file:
        texts[html_file] = html(run)
    if svg_folder:
        texts |= {svg_folder / f"scale-{curve.kind}.svg": picture_of(curve) + "\n" for curve in run.curves}
    for path, text in texts.items():
        console.write_file(path, text)
