"""System calls per message, where perf or strace can count them.

strace stops the program at every call: its count is right, but a slowed program gathers more in each call than it
would otherwise, so perf is tried first.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

from .counting import Counter

SYSCALLS = "system calls"
NEEDED = "system calls are counted by perf or strace, and neither works here"

_PERF_EVENT = "raw_syscalls:sys_enter"


@cache
def counter() -> Counter | None:
    """What counts them here; None where nothing can."""
    for name, probe, wrapper in (
        ("perf", ["perf", "stat", "-e", _PERF_EVENT, "true"], _perf),
        ("strace", ["strace", "-c", "true"], _strace),
    ):
        if shutil.which(name) and subprocess.run(probe, capture_output=True, check=False).returncode == 0:
            return Counter(what=SYSCALLS, wrapper=wrapper, read=read_report, share=0.5)
    return None


def _perf(report: Path) -> list[str]:
    return ["perf", "stat", "-x", ";", "-o", str(report), "-e", _PERF_EVENT, "--"]


def _strace(report: Path) -> list[str]:
    return ["strace", "-f", "-c", "-o", str(report)]


def read_report(text: str) -> int | None:
    """The number of calls in what ``perf stat -x ;`` or ``strace -c`` wrote."""
    for line in text.splitlines():
        if _PERF_EVENT in line:
            number = line.split(";")[0]
            return int(number) if number.isdigit() else None
    total = re.search(r"^\s*100\.00\s+\S+\s+\d+\s+(\d+)(?:\s+\d+)?\s+total$", text, re.MULTILINE)
    return int(total[1]) if total else None
