"""The end of the demo: a report on the trace records of its ordered part.

Spark runs in a process of its own, after the cluster has ended: its calls would block the hub of gevent.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from .trace_report import why_not

_TIMEOUT = 300.0
_ARGUMENTS = ("--window", "200ms", "--grace", "0", "--json", "--memory", "512m", "--master", "local[2]")


class NoReport(Exception):
    """There is no report, for the reason that is its text."""


class TraceReport(NamedTuple):
    """The figures of a report, and the page that was written."""

    figures: dict[str, Any]
    page: Path


def report_on(log: Path, page: Path | None) -> TraceReport:
    """Write the report on a trace log to ``page``, by default into a new folder. Raises NoReport."""
    if reason := why_not():
        raise NoReport(reason)
    folder = None if page else Path(tempfile.mkdtemp(prefix="nsq-fast-traces-"))
    page = page or Path(str(folder), "traces.html")
    try:
        return TraceReport(_figures(log, page), page)
    except NoReport:
        if folder:
            shutil.rmtree(folder)
        raise


def _figures(log: Path, page: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "nsq_fast", "trace-report", str(log), "--html", str(page), *_ARGUMENTS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        raise NoReport(f"Spark took longer than {_TIMEOUT:.0f} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"Spark ended with {done.returncode}"]
        raise NoReport(lines[-1].removeprefix("Error: "))
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures
