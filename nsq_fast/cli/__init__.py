"""The `nsq-fast` command: each subcommand's module is loaded when it is used.

What several commands have in common stands in ``options`` (how they are declared, what they say), ``servers``
(addresses, TLS, Ctrl-C), ``console`` (tables) and here: an error of ours is one line on stderr, never a traceback. Exit
codes are 0, 1 (it failed), 2 (wrong arguments), 130 (Ctrl-C before the work was done).
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import sys
from typing import Any

import click

from nsq_fast import __version__
from nsq_fast.errors import ConfigError, NameInvalid, NsqError

COMMANDS = {
    "demo": "demo",
    "broker": "broker",
    "with-broker": "broker:with_broker_command",
    "nsqd": "programs:nsqd",
    "nsqlookupd": "programs:nsqlookupd",
    "pub": "pub",
    "tail": "tail",
    "lookup": "stat:lookup_command",
    "stat": "stat",
    "admin": "admin",
    "bench": "bench",
    "trace-report": "trace_report",
    "lag": "spark:lag",
    "journal": "spark:journal",
    "run": "run",
    "exporter": "exporter",
    "run-as-gnsq": "programs:run_as_gnsq",
}
"""Each command -> its module, and its name there where it is not ``command``."""

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What writing to standard output may fail with, which click leaves alone; a reader that has gone is its affair."""

_ONLY_SHOW = ("lookup", "stat", "lag", "journal")
"""What do nothing else, and have done all that was wanted when the reader of their output goes (``| head``)."""


class Commands(click.Group):
    """A group whose commands are modules of this package."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(f".{module}", __package__), name or "command")
        return command

    def main(self, *arguments: Any, **settings: Any) -> Any:
        try:
            return super().main(*arguments, **settings)
        except OSError as error:
            if error.errno not in _NOT_WRITTEN or error.filename is not None:
                raise
            drop_output()
            click.echo(f"Error: cannot write the output: {error.strerror}", err=True)
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (ConfigError, NameInvalid) as error:
            raise click.UsageError(str(error)) from error
        except NsqError as error:
            raise click.ClickException(str(error)) from error
        except BrokenPipeError:
            if ctx.invoked_subcommand not in _ONLY_SHOW:
                raise
            drop_output()
            ctx.exit()
        except KeyboardInterrupt:
            ctx.exit(130)


def drop_output() -> None:
    """What is left in the buffer goes nowhere, or the end of the interpreter would complain of it once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="nsq-fast")
@click.option("-v", "--verbose", count=True, help="Log to stderr what happens; twice: in detail.")
def main(verbose: int) -> None:
    """A client for NSQ, and an embedded nsqd with nsqlookupd."""
    if verbose:
        logging.basicConfig(format=LOG_FORMAT, level=logging.INFO if verbose == 1 else logging.DEBUG)
    else:
        logging.getLogger("nsq_fast").addHandler(logging.NullHandler())
