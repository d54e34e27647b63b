"""Every nsqd that the lookupds know, whatever its topics: asked for when nobody has a topic yet."""

from __future__ import annotations

from time import monotonic
from typing import cast

from gevent import joinall

from nsq_fast.errors import LookupFailed, NsqError
from nsq_fast.protocol.topology import Nsqd, distinct

from .lookupd import Lookupd
from .lookupd_list import LookupdList
from .supervised import Job, JobGroup

# What the other lookupds said is not kept waiting longer than this (s) for a slow one.
STRAGGLER_GRACE = 0.25


class NodeList:
    """The answer to /nodes of all lookupds that work, which callers share.

    Args:
        jobs: run the question; they end with the poller.
        lifetime: seconds for which an answer holds.
    """

    def __init__(self, lookupds: LookupdList, jobs: JobGroup, lifetime: float) -> None:
        self._lookupds = lookupds
        self._jobs = jobs
        self._lifetime = lifetime
        self._job: Job | None = None
        self._nodes: tuple[Nsqd, ...] = ()
        self._asked_at = float("-inf")

    def get(self, timeout: float | None) -> tuple[Nsqd, ...]:
        """Ask, or wait for the answer that is on its way. Raises LookupFailed."""
        if monotonic() - self._asked_at < self._lifetime:
            return self._nodes
        if self._job is None or self._job.ready():
            self._job = self._jobs.start(self._ask)
        self._job.join(timeout)
        found = self._job.value
        if not isinstance(found, tuple):  # too late, killed by stop, or nobody answered
            reason = self._lookupds.failure() or "no reply yet"
            raise LookupFailed(f"no lookupd answered for the list of nsqds: {reason}")
        return cast("tuple[Nsqd, ...]", found)

    def _ask(self) -> tuple[Nsqd, ...] | None:
        jobs = [self._jobs.start(_nodes_of, lookupd) for lookupd in self._lookupds.working()]
        joinall(jobs, timeout=STRAGGLER_GRACE)
        good = _results(jobs)
        if not good:
            joinall(jobs)
            good = _results(jobs)
        if not good:
            return None
        self._nodes = distinct(nsqd for answer in good for nsqd in answer)
        self._asked_at = monotonic()
        return self._nodes


def _nodes_of(lookupd: Lookupd) -> tuple[Nsqd, ...] | None:
    try:
        return lookupd.nodes()
    except NsqError as error:
        lookupd.last_error = str(error)
        return None
    finally:
        lookupd.close()


def _results(jobs: list[Job]) -> list[tuple[Nsqd, ...]]:
    """What the jobs that are done returned; those that failed or were killed left no tuple."""
    return [job.value for job in jobs if isinstance(job.value, tuple)]
