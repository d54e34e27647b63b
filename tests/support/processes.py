"""Processes and loops that tests run programs in."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from .spark_marks import poll
from .waiting import PROCESS, until_on

# Processes that tests start: how, and those of a session (as ``setsid`` makes one) found and killed. Linux.


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


def run_quietly(program: str, *arguments: str, **environment: str) -> str:
    """As ``run_python``, of a program that ends well and complains of nothing; what it printed."""
    done = run_python(program, *arguments, **environment)
    assert (done.returncode, complaints(done.stderr)) == (0, "")
    return done.stdout


_OF_SLOWNESS = re.compile(
    r".*(: has not replied for .* s|: given up: it does not reply|: not connected within .* s(: .*)?"
    r"|: closed after .* without the server's consent|closing waits for CLOSE_WAIT of .*)\n"
)


def complaints(stderr: str) -> str:
    """What a program says there, but for its client's warnings of a server that is slow: on a busy machine each is."""
    return _OF_SLOWNESS.sub("", stderr)


@contextmanager
def piped() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """What starts a command with pipes as its input and output, as text; all are killed in the end."""
    running: list[subprocess.Popen[str]] = []

    def start(*command: object) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        running.append(subprocess.Popen([*map(str, command)], stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        return running[-1]

    try:
        yield start
    finally:
        for process in running:
            process.kill()
            process.communicate()


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
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


# The event loops with which tests of asyncio run: its own, and uvloop's.


try:
    import uvloop
except ImportError:  # it is not built for each Python and machine
    uvloop = None

NewLoop = Callable[[], asyncio.AbstractEventLoop]

LOOPS = [
    pytest.param(asyncio.new_event_loop, id="asyncio"),
    pytest.param(
        uvloop and uvloop.new_event_loop,
        id="uvloop",
        marks=pytest.mark.skipif(uvloop is None, reason="uvloop is not installed"),
    ),
]


def run(main: Coroutine[Any, Any, Any], new_loop: NewLoop) -> None:
    """As ``asyncio.run``, in a loop of this kind."""
    loop = new_loop()
    try:
        loop.run_until_complete(main)
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


async def until_async(probe: Callable[[], object]) -> None:
    """As ``until``, while the loop runs."""
    await until_on(asyncio, probe)
