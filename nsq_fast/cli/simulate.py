"""`nsq-fast simulate`: fleets in virtual time, run by the client's own policies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from nsq_fast.bench.fleet import AGREES, check
from nsq_fast.simulation.questions import QUESTIONS, Answer

from . import options


@click.command("simulate", short_help="Thousands of nsqds and clients in virtual time.")
@click.argument("questions", nargs=-1, type=click.Choice(tuple(QUESTIONS)))
@click.option(
    "--scale",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="Of the fleet: 0.1 is a tenth of its size, and of the time that a run takes.",
)
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="Of all chance in a run.")
@click.option(
    "--svg",
    "folder",
    type=options.FOLDER,
    metavar="DIR",
    help="Write the curves of each question to DIR/fleet-QUESTION.svg.",
)
@click.option(
    "--check",
    "servers",
    type=options.FOLDER,
    metavar="DIR",
    help="Run small fleets in virtual time and on the nsqd of this folder, and say how far the curves are apart.",
)
def command(questions: Sequence[str], scale: float, seed: int, folder: Path | None, servers: Path | None) -> None:
    """Answer questions about fleets: how lookup, RDY, reconnecting, retries and backoff do in a large one.

    The policies are the client's own code; the servers are small models of nsqd and nsqlookupd. Each run is seeded:
    the same seed gives the same figures on every machine. Without a question all are asked, which takes minutes.
    """
    if servers is not None:
        _check(servers)
        return
    for name in questions or QUESTIONS:
        answer = QUESTIONS[name](scale, seed)
        _show(name, answer)
        if folder is not None:
            (folder / f"fleet-{name}.svg").write_text(answer.picture(), encoding="utf-8")


def _show(name: str, answer: Answer) -> None:
    click.echo(f"{name}: {answer.title}")
    click.echo(f"  {answer.size}")
    for what, value in answer.figures:
        click.echo(f"  {what}: {value}")
    click.echo()


def _check(servers: Path) -> None:
    far = 0
    for each in check(servers):
        far += not each.agrees
        verdict = "agrees" if each.agrees else "too far"
        click.echo(
            f"{each.case.name}: curves at most {each.distance:.1%} apart ({verdict});"
            f" all handled after {each.simulated:.1f} s simulated, {each.measured:.1f} s measured"
        )
    if far:
        raise click.ClickException(
            f"{far} curves are more than {AGREES:.0%} apart: on a machine that is busy, try again when it is not"
        )
