"""Describe the machine of a run: hardware, versions, commit."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from nsq_fast._version import __version__

from .results import About


def about(clients: dict[str, str]) -> About:
    """Describe this machine; ``clients`` are the versions of the others."""
    return About(
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        nsq_fast=__version__,
        git_commit=git_commit(),
        python=platform.python_version(),
        gevent=_version("gevent"),
        system=f"{platform.system()} {platform.release()}",
        cpu=_field("/proc/cpuinfo", "model name") or platform.machine(),
        cores=os.cpu_count() or 1,
        memory_mib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        scheduling=scheduling(),
        clients=clients,
    )


def scheduling() -> str:
    """The policy of the system's scheduler for this process and those that it starts; empty where that is unknown."""
    if not hasattr(os, "sched_getscheduler"):
        return ""
    is_real_time = os.sched_getscheduler(0) in (os.SCHED_RR, os.SCHED_FIFO)
    return "real time" if is_real_time else "ordinary"


def loop_ms() -> float:
    """How fast the machine is at the moment: milliseconds that Python takes for a million additions, best of three."""
    return min(_loop_ms() for _ in range(3))


def _loop_ms() -> float:
    began = time.perf_counter()
    total = 0
    for number in range(1_000_000):
        total += number
    return (time.perf_counter() - began) * 1000


def git_commit() -> str:
    """The commit of the checkout that this package is in, ``+`` behind it when files differ; empty elsewhere."""
    here = Path(__file__).parent
    commit = _git(here, "rev-parse", "--short=12", "HEAD")
    if not commit or not _git(here, "ls-files", "--", str(here / "machine.py")):
        return ""
    return commit + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no", "--", str(here.parent)) else "")


def _git(where: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=where, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _field(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
