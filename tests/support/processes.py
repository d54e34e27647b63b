"""Processes that tests start: how, and those of a session (as ``setsid`` makes one) found and killed. Linux."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .spark_marks import poll
from .waiting import PROCESS

GONE_TIMEOUT = 120.0
FORKING_PYTHON = (sys.executable, "-W", "ignore:This process:DeprecationWarning")
"""The interpreter for a program that forks beside threads, of which CPython warns from 3.12 on."""


ROOT = Path(__file__).parent.parent.parent


def run_python(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program, which may fork, in an interpreter of its own to its end."""
    return subprocess.run(
        [*FORKING_PYTHON, "-c", program, *arguments],
        capture_output=True, text=True, timeout=PROCESS, check=False, cwd=ROOT, env={**os.environ, **environment},
    )  # fmt: skip


class Process(NamedTuple):
    pid: int
    parent: int
    command: str


def of_session(session: int) -> list[Process]:
    """The living processes of a session; those that only wait to be reaped are not among them."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                _, _, stat = (folder / "stat").read_text().rpartition(")")
                state, parent, _, its_session = stat.split()[:4]
                if int(its_session) == session and state not in "ZX":
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    found.append(Process(int(folder.name), int(parent), command))
    return found


def kill_session(session: int) -> None:
    """SIGKILL everything in a session, and return when it is gone."""

    def none_left() -> bool:
        left = of_session(session)
        for process in left:
            kill(process.pid)
        return not left

    poll(none_left, GONE_TIMEOUT, f"the processes of session {session} gone")


def kill(pid: int) -> None:
    """SIGKILL a process, if there is one."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
