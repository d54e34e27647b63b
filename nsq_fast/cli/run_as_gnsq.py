"""`nsq-fast run-as-gnsq`: run a program that imports gnsq on nsq_fast, without touching it."""

from __future__ import annotations

import runpy
import sys
import traceback
from pathlib import Path

import click

from nsq_fast import install_as_gnsq
from nsq_fast.errors import NsqError


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
    install_as_gnsq()
    sys.argv = [program, *args]
    try:
        if is_module:
            sys.path.insert(0, "")
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            if not Path(program).exists():
                raise click.UsageError(f"no such file: {program}")
            sys.path.insert(0, str(Path(program).resolve().parent))
            runpy.run_path(program, run_name="__main__")
    except NsqError:
        # The program's own failure: it shows as it would without us.
        traceback.print_exc()
        sys.exit(1)
