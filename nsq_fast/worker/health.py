"""Whether a worker is alive and ready, from what its processes said last. Functions of that and of the time."""

from __future__ import annotations

from typing import NamedTuple

from .reports import Report


class ProcessState(NamedTuple):
    """One process at a moment.

    Attributes:
        reported_at: when ``report`` came, monotonic; when it was started before the first one.
        is_leaving: whether it was asked to end.
    """

    number: int
    pid: int
    report: Report
    reported_at: float
    is_leaving: bool = False


class Snapshot(NamedTuple):
    """A worker at a moment.

    Attributes:
        at: when; monotonic. The supervisor makes one each second.
        missing: numbers of the processes that are not there: they have ended, and are started again after a pause.
        processes: those that are, the ones that are leaving included.
        restarts: how often a process was started in the place of one that had ended by itself.
    """

    at: float
    processes: tuple[ProcessState, ...] = ()
    missing: tuple[int, ...] = ()
    restarts: int = 0
    is_stopping: bool = False


class Verdict(NamedTuple):
    """The answer to a probe, with its reasons."""

    is_well: bool
    reasons: list[str]


def liveness(snapshot: Snapshot, now: float, timeout: float) -> Verdict:
    """Whether the supervisor and each process have turned their loops less than ``timeout`` seconds ago."""
    reasons = []
    if now - snapshot.at > timeout:
        reasons.append(f"the supervisor has done nothing for {now - snapshot.at:.0f} s")
    for each in snapshot.processes:
        silence = now - each.reported_at + each.report.loop_age
        if silence > timeout:
            reasons.append(f"process {each.number} (pid {each.pid}): its loop has not turned for {silence:.0f} s")
    return Verdict(not reasons, reasons)


def readiness(snapshot: Snapshot, now: float, timeout: float) -> Verdict:
    """Whether messages can arrive at each consumer of each process, and all are alive."""
    reasons = liveness(snapshot, now, timeout).reasons
    if snapshot.is_stopping:
        reasons.append("the worker is ending")
    reasons += [f"process {number} is to be started again" for number in snapshot.missing]
    ready = {each.number for each in snapshot.processes if each.report.is_ready and not each.is_leaving}
    for each in snapshot.processes:
        if each.number not in ready and not each.is_leaving:
            reasons += _what_is_missing(each)
    return Verdict(not reasons, reasons)


def _what_is_missing(process: ProcessState) -> list[str]:
    head = f"process {process.number} (pid {process.pid})"
    waiting = [f"{head}: {each}" for each in process.report.consumers if not each.is_ready]
    return waiting or [f"{head} is {process.report.phase.value}"]
