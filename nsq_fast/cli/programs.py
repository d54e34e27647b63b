"""Commands that are another program: `nsq-fast run-as-gnsq` runs one that imports gnsq on nsq_fast, without touching
it; `nsq-fast nsqd` and `nsq-fast nsqlookupd` are one embedded server with the original's command line.

By click alone: what declares other commands imports ssl and sockets, which a program may be about to patch, and what
starts many servers waits for nothing that they do not need.
"""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import click

from nsq_fast.errors import NsqError


class _OnImport(MetaPathFinder, Loader):
    """Installs nsq_fast as gnsq when the program first imports gnsq.

    Not before: a program that monkey-patches does so first, and expects no socket or ssl module to be there yet.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name == "gnsq" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        from nsq_fast import install_as_gnsq

        install_as_gnsq()
        module = sys.modules["gnsq"]
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has just replaced it


@click.command(
    "run-as-gnsq",
    short_help="Run a Python program with nsq_fast as its gnsq.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("-m", "is_module", is_flag=True, help="PROGRAM is a module, as for python -m.")
@click.argument("program")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run_as_gnsq(is_module: bool, program: str, args: tuple[str, ...]) -> None:
    """Run PROGRAM, a Python file, with ARGS as python would, except that what it imports as gnsq is nsq_fast."""
    sys.meta_path.insert(0, _OnImport())
    sys.argv = [program, *args]
    try:
        if is_module:
            sys.path.insert(0, "")
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            if not Path(program).is_file() and not Path(program, "__main__.py").is_file():
                raise click.UsageError(f"no such file: {program}")
            sys.path.insert(0, str(Path(program).resolve().parent))
            runpy.run_path(program, run_name="__main__")
    except NsqError:
        # The program's own failure: it shows as it would without us.
        traceback.print_exc()
        sys.exit(1)


def _as_the_original(name: str, flags: str) -> click.Command:
    """The command of one server, with the flags that the original has."""

    @click.command(
        name,
        short_help=f"The embedded {name}, with the original's flags and log.",
        help=f"Run the embedded {name} with the command line of the original: the same flags (-flag=value), --config"
        f" FILE, --version, and the same log lines.\n\n{flags}",
        context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]},
    )
    @click.argument("flags", nargs=-1, type=click.UNPROCESSED)
    def run(flags: tuple[str, ...]) -> None:
        from nsq_fast.broker.executable import main

        sys.exit(main(name, flags))

    return run


nsqd: click.Command = _as_the_original(
    "nsqd", "`nsq-fast broker --help` describes the flags, except -config, -log-level and -log-prefix."
)
nsqlookupd: click.Command = _as_the_original(
    "nsqlookupd",
    "The flags: -tcp-address, -http-address, -broadcast-address, -inactive-producer-timeout,"
    " -tombstone-lifetime, -config, -log-level and -log-prefix.",
)
