"""The end of the demo: a report on the trace records of its ordered part.

Spark runs in a process of its own, after the cluster has ended: its calls would block the hub of gevent.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from .trace_report import why_not

_TIMEOUT = 300.0
_ARGUMENTS = ("--window", "200ms", "--grace", "0", "--json", "--memory", "512m", "--master", "local[2]")


def report_on(log: Path, page: Path) -> tuple[dict[str, Any] | None, str]:
    """Write the report to ``page``. Return its figures; None where there is none, and why."""
    if reason := why_not():
        return None, reason
    command = [sys.executable, "-m", "nsq_fast", "trace-report", str(log), "--html", str(page), *_ARGUMENTS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return None, f"Spark took longer than {_TIMEOUT:.0f} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"Spark ended with {done.returncode}"]
        return None, lines[-1].removeprefix("Error: ")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found, ""
