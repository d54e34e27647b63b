"""`nsq-fast run-as-gnsq`: run a program that imports gnsq on nsq_fast, without touching it."""

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


# By click alone: what declares other commands imports ssl and sockets, which the program may be about to patch.
@click.command(
    "run-as-gnsq",
    short_help="Run a Python program with nsq_fast as its gnsq.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("-m", "is_module", is_flag=True, help="PROGRAM is a module, as for python -m.")
@click.argument("program")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(is_module: bool, program: str, args: tuple[str, ...]) -> None:
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
