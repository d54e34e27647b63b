"""`nsq-fast nsqd`: the embedded nsqd, with the original's command line."""

from __future__ import annotations

import sys

import click

from nsq_fast.broker.servers.executable import main


@click.command(
    "nsqd",
    short_help="The embedded nsqd, with the original's flags and log.",
    context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]},
    add_help_option=True,
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def command(flags: tuple[str, ...]) -> None:
    """Run nsqd as the original would be run: its flags (-flag=value), its --version, its log lines."""
    sys.exit(main("nsqd", flags))
