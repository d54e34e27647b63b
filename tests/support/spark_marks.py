"""Marks: how the processes of a Spark tell a test where they are, and are held there.

A ``Marks`` is a folder. It can be pickled into tasks; whoever has it, in whatever
process on this machine, leaves marks, waits for those of others, and is held
until the test lets it go.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

POLL = 0.05
LIMIT = 600.0  # how long anything of Spark may take where the machine is busy: it ends hangs, and measures nothing
T = TypeVar("T")


def poll(probe: Callable[[], T], timeout: float = LIMIT, what: str = "") -> T:
    """Call ``probe`` until its result is true, and return that. Uses no gevent: Python workers call it, too."""
    deadline = time.monotonic() + timeout
    while not (result := probe()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not so within {timeout} s: {what or probe}")
        time.sleep(POLL)  # sleep: looks again and again
    return result


class Marks:
    """The marks in one folder, made at once."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = os.fspath(folder)
        Path(folder).mkdir(parents=True, exist_ok=True)

    def reach(self, name: str, detail: str = "") -> None:
        line = f"{os.getpid()} {detail}".strip() + "\n"
        fd = os.open(self._path(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)

    def once(self, name: str) -> bool:
        """Whether this is the first call with this name, in all processes."""
        try:
            os.close(os.open(self._path(f"once-{name}"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        return True

    def hold(self, name: str, timeout: float = LIMIT) -> None:
        """Leave a mark, and return once ``release`` was called. Raises TimeoutError."""
        self.reach(name)
        poll(lambda: os.path.exists(self._path(f"go-{name}")), timeout, f"{name} let go")

    def release(self, name: str) -> None:
        """Let go whoever holds there, now and from now on."""
        Path(self._path(f"go-{name}")).touch()

    def count(self, name: str) -> int:
        """How often the mark was left."""
        return len(self.details(name))

    def details(self, name: str) -> list[str]:
        """What was said with each mark."""
        return [line.partition(" ")[2] for line in self._lines(name)]

    def pids(self, name: str) -> list[int]:
        """The processes that left the mark."""
        return [int(line.split()[0]) for line in self._lines(name)]

    def wait(
        self, name: str, count: int = 1, timeout: float = LIMIT, alive: Callable[[], object] | None = None
    ) -> None:
        """Return once the mark was left so often. ``alive`` is called meanwhile, and may raise."""
        poll(lambda: (alive and alive(), self.count(name) >= count)[1], timeout, f"{name} marked {count} times")

    def _lines(self, name: str) -> list[str]:
        try:
            return Path(self._path(name)).read_text().split("\n")[:-1]
        except FileNotFoundError:
            return []

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, re.sub(r"[^\w.-]", "_", name))
