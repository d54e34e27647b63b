"""What one message costs, counted by a program that a client runs behind: instructions by valgrind, system calls by
perf or strace.

Such a program counts a whole run, start and end included. So the client runs twice, with few messages and with many,
and the difference is what the messages cost.

Instructions are those of the program, without the system's. Other programs on the machine do not change them, so two
clients can be told apart where CPU time varies by more than they differ. The program takes some thirty times as long,
so a server is always ahead of a consumer, which finds as much as it can read. strace stops the program at every call:
its count is right, but a slowed program gathers more in each call than it would otherwise, so perf is tried first.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec


class Counter(msgspec.Struct, frozen=True, kw_only=True):
    """A program that counts.

    Attributes:
        what: it counts, in words.
        wrapper: the command that a client's command follows; it writes its report to the path.
        read: the number in what it wrote; None where there is none.
        share: of the messages of a round, so many are counted, since the client is slower behind it.
        is_slow: only the clients that goals compare are counted.
    """

    what: str
    wrapper: Callable[[Path], list[str]]
    read: Callable[[str], int | None]
    share: float
    is_slow: bool = False


def per_message(counter: Counter, run: Callable[[int, list[str]], int], few: int, many: int) -> float | None:
    """``run(count, wrapper)`` runs the client behind a command. None where nothing was counted, or too few to tell."""
    if many <= few:
        return None
    counts = []
    for count in (few, many):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report"
            run(count, counter.wrapper(report))
            found = counter.read(report.read_text()) if report.exists() else None
        if found is None:
            return None
        counts.append(found)
    return (counts[1] - counts[0]) / (many - few) if counts[1] > counts[0] else None


INSTRUCTIONS = "instructions"
INSTRUCTIONS_NEED = "instructions are counted by valgrind, which is not installed"


def instruction_counter() -> Counter | None:
    """What counts them here; None where nothing can."""
    if not shutil.which("valgrind"):
        return None
    return Counter(what=INSTRUCTIONS, wrapper=_valgrind, read=read_cachegrind, share=0.1, is_slow=True)


def _valgrind(report: Path) -> list[str]:
    # What it finds of the caches is not wanted, and takes as long again.
    return ["valgrind", "-q", "--tool=cachegrind", "--cache-sim=no", f"--cachegrind-out-file={report}"]


def read_cachegrind(text: str) -> int | None:
    """The number of instructions in what cachegrind wrote."""
    found = re.search(r"^summary:\s+(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else None


SYSCALLS = "system calls"
SYSCALLS_NEED = "system calls are counted by perf or strace, and neither works here"

_PERF_EVENT = "raw_syscalls:sys_enter"


@cache
def syscall_counter() -> Counter | None:
    """What counts them here; None where nothing can."""
    for name, probe, wrapper in (
        ("perf", ["perf", "stat", "-e", _PERF_EVENT, "true"], _perf),
        ("strace", ["strace", "-c", "true"], _strace),
    ):
        if shutil.which(name) and subprocess.run(probe, capture_output=True, check=False).returncode == 0:
            return Counter(what=SYSCALLS, wrapper=wrapper, read=read_calls, share=0.5)
    return None


def _perf(report: Path) -> list[str]:
    return ["perf", "stat", "-x", ";", "-o", str(report), "-e", _PERF_EVENT, "--"]


def _strace(report: Path) -> list[str]:
    return ["strace", "-f", "-c", "-o", str(report)]


def read_calls(text: str) -> int | None:
    """The number of calls in what ``perf stat -x ;`` or ``strace -c`` wrote."""
    for line in text.splitlines():
        if _PERF_EVENT in line:
            number = line.split(";")[0]
            return int(number) if number.isdigit() else None
    total = re.search(r"^\s*100\.00\s+\S+\s+\d+\s+(\d+)(?:\s+\d+)?\s+total$", text, re.MULTILINE)
    return int(total[1]) if total else None
