"""The soak, `make soak`: work while servers die and links misbehave, and a check of what is promised.

    python -m chaos --help

``faults`` says, from a seed, what happens when, and runs the proxies in front of the servers; ``invariants`` holds what
must be true. ``clients`` are what both dialects need for their work, which is in ``original`` and ``redesigned`` with
its servers. ``run`` puts one run together, and shows what came of it. What is promised, and where each promise is
checked, stands in docs/guarantees.md.
"""

from __future__ import annotations

import logging
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import click

from nsq_fast.cli import options
from nsq_fast.cli.servers import INTERRUPTED, stop_signals
from nsq_fast.errors import NsqError

from .clients import Scene
from .faults import plan
from .original import Original
from .redesigned import Redesigned
from .run import render, soak

DIALECTS = ("original", "redesigned")
_SEEDS = 1_000_000


@click.command("soak")
@click.option(
    "--seconds", type=options.duration, metavar="DURATION", default=300.0, help="How long, over all dialects.  [300s]"
)
@click.option("--hours", type=click.FloatRange(min=0, min_open=True), help="The same in hours.")
@click.option("--seed", type=click.IntRange(0), help="Of the schedule; default: a random one, which is printed.")
@click.option(
    "--dialect",
    "dialects",
    type=click.Choice(DIALECTS),
    multiple=True,
    default=DIALECTS,
    show_default="both, one after the other",
    help="Which NSQ (repeatable).",
)
@click.option(
    "--servers",
    type=options.FOLDER,
    metavar="DIR",
    help="Run the nsqd and nsqlookupd of this folder as the original NSQ; default: the embedded ones.",
)
@click.option("--rate", type=click.FloatRange(1), default=300.0, show_default=True, help="Messages a second.")
@click.option("--schedule", "only_schedule", is_flag=True, help="Print what would go wrong when, and end.")
def command(
    seconds: float,
    hours: float | None,
    seed: int | None,
    dialects: Sequence[str],
    servers: Path | None,
    rate: float,
    only_schedule: bool,
) -> None:
    """Publish and consume while nsqds and nsqlookupds are killed, stopped, frozen and started again, and while proxies
    in front of them delay, split, garble, cut, refuse and swallow.

    Then see at the servers and at the clients whether what docs/guarantees.md promises was kept. What happens is
    printed to stderr as it happens, the counts to stdout; what the servers wrote is kept when a promise was broken. The
    same --seed with the same duration gives the same faults at the same times. The exit code is 1 when a promise was
    broken.
    """
    seed = random.randrange(_SEEDS) if seed is None else seed
    each = (seconds if hours is None else hours * 3600) / len(dialects)
    if only_schedule:
        for dialect in dialects:
            click.echo(f"{dialect}, seed {seed}, {each:.0f} s")
            for fault in plan(seed, each, _MENUS[dialect]).faults:
                click.echo(str(fault))
        return
    all_passed = True
    with stop_signals() as stop:
        for dialect in dialects:
            click.echo(f"{dialect}, seed {seed}, {each:.0f} s", err=True)
            folder = Path(tempfile.mkdtemp(prefix="nsq-fast-soak-"))
            with _scene(dialect, folder, rate, servers) as scene:
                outcome = soak(scene, seed, each, stop, lambda line: click.echo(line, err=True))
            click.echo(render(outcome) + "\n")
            if outcome.passed or not any(folder.iterdir()):
                shutil.rmtree(folder)
            else:
                click.echo(f"logs and data of the servers: {folder}", err=True)
            if outcome.is_interrupted:
                raise SystemExit(INTERRUPTED)
            all_passed = all_passed and outcome.passed
    raise SystemExit(0 if all_passed else 1)


_MENUS = {"original": Original.menu, "redesigned": Redesigned.menu}


def _scene(dialect: str, folder: Path, rate: float, servers: Path | None) -> AbstractContextManager[Scene]:
    return Original(folder, rate, servers) if dialect == "original" else Redesigned(rate)


if __name__ == "__main__":
    logging.getLogger("nsq_fast").addHandler(logging.NullHandler())
    try:
        command(prog_name="python -m chaos")
    except NsqError as error:
        sys.exit(f"Error: {error}")
