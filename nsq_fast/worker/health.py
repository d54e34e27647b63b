"""What a process of a worker says of itself, one line of JSON each second and at every turn of its life, and what
follows from that: whether the worker is alive and ready, and its metrics added up. Functions of reports and the time.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Iterable, Iterator
from operator import add
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from nsq_fast.client.progress import ConsumerProgress
    from nsq_fast.client.subscription import Counters

REPORT_INTERVAL = 1.0
"""Seconds between reports."""

WRONG_PROGRAM = 78
"""Exit code of a process whose module cannot be imported or declares nothing to run (EX_CONFIG)."""

UNFINISHED = 75
"""Exit code of a process that had to end before its handlers had finished (EX_TEMPFAIL)."""

ECHO = 0.5
"""Seconds within which a further signal to end is the first one once more: `timeout`, and what passes Ctrl-C on, signal
a process and its group. A person who insists comes later."""

EXIT_GRACE = 3.0
"""Seconds that a process has after ``drain_timeout`` to close its connections and end by itself."""

DRAIN = b"drain\n"
"""What the supervisor asks of a process at its end. The end of the socket says the same."""

SCRAPE = b"scrape\n"
"""What it asks when its own metrics are asked for: a report with metrics, which costs what the program shows."""


class Phase(str, enum.Enum):
    """Where a process is in its life."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"


class ConsumerReport(msgspec.Struct, frozen=True):
    """One consumer: how many of its targets, nsqds or partitions, it is connected to.

    Attributes:
        stalled: why it has done nothing for too long, for people; empty when that is not so.
    """

    name: str
    is_running: bool
    connected: int
    targets: int
    finished: int = 0
    requeued: int = 0
    in_flight: int = 0
    stalled: str = ""

    @property
    def is_ready(self) -> bool:
        """Whether messages can arrive, and are handled."""
        return self.is_running and self.connected > 0 and not self.stalled

    def __str__(self) -> str:
        if not self.is_running:
            return f"{self.name} does not run"
        if self.stalled and self.connected:
            return f"{self.name} does nothing: {self.stalled}"
        if not self.targets:
            return f"{self.name} knows no nsqd that has its topic"
        return f"{self.name} is connected to {self.connected} of {self.targets}"


NOTHING_TO_DO = (None, "idle", "paused_by_server", "closing")
"""Reasons of ``progress()`` for which readiness does not end: work is done, or there is none."""


PACE = 0.0025
"""Seconds between two looks at the progress of a consumer, for each topic and each connection that it has. A look costs
15 us of each: so those at thousands of topics are seldom, and take no more than the hundredth part of a core."""


class Stall:
    """Since when a consumer has had something to do and has done nothing."""

    def __init__(self, progress: Callable[[], ConsumerProgress]) -> None:
        self._progress = progress
        self._due = 0.0
        self._handled = 0
        self._since: float | None = None
        self._said = "", ""

    def look(self, now: float, late: float = 0.0) -> None:
        """Look at its progress, if that was not done since ``late`` seconds after it was due again: in any thread."""
        if now < self._due + late:
            return
        found = self._progress()
        self._due = now + PACE * sum(1 + len(topic.connections) for topic in found.topics)
        if found.reason in NOTHING_TO_DO:
            self._since = None
        else:
            self._said = found.reason, found.detail
            self._since = now if self._since is None else self._since

    def said(self, totals: Counters, after: float, now: float) -> str:
        """What its progress says, if it has said so for ``after`` seconds (0: never) at ``now``; else nothing.

        Args:
            totals: what it has done until now: what moves between two looks at its progress counts, too.
        """
        handled = totals.received + totals.finished - 2 * (totals.skipped + totals.suppressed)
        if handled != self._handled:
            self._handled, self._since = handled, None
        since = self._since
        if since is None or not after or now - since < after:
            return ""
        reason, detail = self._said
        return f"{reason} for {now - since:.0f} s: {detail}"


class Report(msgspec.Struct, frozen=True):
    """One report.

    Attributes:
        loop_age: seconds since the event loops of the process last turned.
        metrics: of now, as Prometheus reads them; empty without prometheus_client. None: nobody has asked for them.
        failure: why it is about to end by itself; empty when it is not.
    """

    phase: Phase = Phase.STARTING
    loop_age: float = 0.0
    consumers: list[ConsumerReport] = []
    metrics: str | None = None
    failure: str = ""

    @property
    def is_ready(self) -> bool:
        """Whether messages can arrive at each of its consumers."""
        return self.phase is Phase.RUNNING and bool(self.consumers) and all(each.is_ready for each in self.consumers)

    def line(self) -> bytes:
        """As it is sent."""
        return msgspec.json.encode(self) + b"\n"


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

    def __str__(self) -> str:
        return f"process {self.number} (pid {self.pid})"


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


def not_alive(snapshot: Snapshot, now: float, timeout: float) -> list[str]:
    """Why a restart may help: that the supervisor, or the loop of a process, has not turned for ``timeout`` seconds."""
    reasons = []
    if now - snapshot.at > timeout:
        reasons.append(f"the supervisor has done nothing for {now - snapshot.at:.0f} s")
    for each in snapshot.processes:
        silence = now - each.reported_at + each.report.loop_age
        if silence > timeout:
            reasons.append(f"{each}: its loop has not turned for {silence:.0f} s")
    return reasons


def not_ready(snapshot: Snapshot, now: float, timeout: float) -> list[str]:
    """Why messages cannot arrive at each consumer of each process, or are not handled."""
    reasons = not_alive(snapshot, now, timeout)
    if snapshot.is_stopping:
        reasons.append("the worker is ending")
    reasons += [f"process {number} is to be started again" for number in snapshot.missing]
    ready = {each.number for each in snapshot.processes if each.report.is_ready and not each.is_leaving}
    for each in snapshot.processes:
        if each.number not in ready and not each.is_leaving:
            waiting = [f"{each}: {consumer}" for consumer in each.report.consumers if not consumer.is_ready]
            reasons += waiting or [f"{each} is {each.report.phase.value}"]
    return reasons


KEPT = ("counter", "histogram", "summary")
"""Kinds of metrics that count: what a process has counted is counted when it has ended."""

HIGHEST = (
    "nsq_fast_consumer_backoff_level", "nsq_fast_consumer_backoff_seconds", "nsq_fast_consumer_paused",
    "nsq_fast_consumer_running", "nsq_fast_consumer_starved", "process_start_time_seconds", "process_max_fds",
)  # fmt: skip
"""Gauges of which the highest is shown, as of those that say what runs (``..._info``). The others are added up."""

Series = tuple[str, tuple[tuple[str, str], ...]]
Sums = dict[str, tuple["Metric", dict[Series, float]]]


class Totals:
    """What processes that have ended had counted. It never changes: threads may read it.

    There are as many series as one process has. Metrics come as texts, see ``Report``.
    """

    def __init__(self, past: Sums | None = None) -> None:
        self._past: Sums = past or {}

    def with_ended(self, metrics: str | None) -> Totals:
        """These, and what another process had counted when it said so last."""
        sums = self._copy()
        _add(sums, metrics, KEPT)
        return Totals(sums)

    def _copy(self) -> Sums:
        return {name: (family, dict(values)) for name, (family, values) in self._past.items()}

    def now(self, processes: Iterable[str | None]) -> Iterator[Metric]:
        """The sums of those that run, and of what those that have ended had counted."""
        sums = self._copy()
        for metrics in processes:
            _add(sums, metrics)
        for family, values in sums.values():
            shown = type(family)(family.name, family.documentation, family.type)
            for (name, labels), value in values.items():
                shown.add_sample(name, dict(labels), value)
            yield shown


def _add(sums: Sums, metrics: str | None, kinds: Container[str] | None = None) -> None:
    if not metrics:
        return
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families(metrics):
        if family.name.endswith("_created") or (kinds is not None and family.type not in kinds):
            continue
        _, values = sums.setdefault(family.name, (family, {}))
        both = max if family.name in HIGHEST or family.name.endswith("_info") else add
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            values[key] = both(sample.value, values[key]) if key in values else sample.value
