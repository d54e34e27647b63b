"""System calls per message, where perf or strace can count them.

Both count a whole program, start and end included. So it runs twice, with few messages and with many, and the
difference is what the messages cost. strace stops the program at every call: its count is right, but a slowed program
gathers more in each call than it would otherwise, so perf is tried first.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

_PERF_EVENT = "raw_syscalls:sys_enter"


@cache
def tool() -> str:
    """``perf``, ``strace``, or an empty string where neither can count."""
    for name, probe in (("perf", ["perf", "stat", "-e", _PERF_EVENT, "true"]), ("strace", ["strace", "-c", "true"])):
        if shutil.which(name) and subprocess.run(probe, capture_output=True, check=False).returncode == 0:
            return name
    return ""


def count_syscalls(run: Callable[[int, list[str]], int], few: int, many: int) -> float | None:
    """``run(count, wrapper)`` runs the client behind a command; returns calls a message, or None."""
    if not tool() or many <= few:
        return None
    counts = []
    for count in (few, many):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report"
            run(count, _wrapper(report))
            found = read_report(report.read_text()) if report.exists() else None
        if found is None:
            return None
        counts.append(found)
    return max(0.0, (counts[1] - counts[0]) / (many - few))


def _wrapper(report: Path) -> list[str]:
    if tool() == "perf":
        return ["perf", "stat", "-x", ";", "-o", str(report), "-e", _PERF_EVENT, "--"]
    return ["strace", "-f", "-c", "-o", str(report)]


def read_report(text: str) -> int | None:
    """The number of calls in what ``perf stat -x ;`` or ``strace -c`` wrote."""
    for line in text.splitlines():
        if _PERF_EVENT in line:
            number = line.split(";")[0]
            return int(number) if number.isdigit() else None
    total = re.search(r"^\s*100\.00\s+\S+\s+\d+\s+(\d+)(?:\s+\d+)?\s+total$", text, re.MULTILINE)
    return int(total[1]) if total else None
