"""`nsq-fast nsqd` and `nsq-fast nsqlookupd`: one embedded server with the original's command line. What starts many of
them waits for nothing that they do not need."""

from __future__ import annotations

import sys

import click

from . import options
from .options import argument


def _as_the_original(name: str, flags: str) -> click.Command:
    """The command of one server, with the flags that the original has."""

    @options.command(
        name,
        f"The embedded {name}, with the original's flags and log.",
        help=f"Run the embedded {name} with the command line of the original: the same flags (-flag=value), --config"
        f" FILE, --version, and the same log lines.\n\n{flags}",
        context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]},
    )
    def run(flags: tuple[str, ...] = argument(nargs=-1, type=click.UNPROCESSED)) -> None:
        from nsq_fast.broker.executable import main

        sys.exit(main(name, flags))

    return run


nsqd_command: click.Command = _as_the_original(
    "nsqd", "`nsq-fast broker --help` describes the flags, except -config, -log-level and -log-prefix."
)
nsqlookupd_command: click.Command = _as_the_original(
    "nsqlookupd",
    "The flags: -tcp-address, -http-address, -broadcast-address, -inactive-producer-timeout,"
    " -tombstone-lifetime, -config, -log-level and -log-prefix.",
)
