"""What a process of a worker says of itself: one line of JSON each second, and at every turn of its life."""

from __future__ import annotations

import enum

import msgspec

REPORT_INTERVAL = 1.0
"""Seconds between reports."""

WRONG_PROGRAM = 78
"""Exit code of a process whose module cannot be imported or declares nothing to run (EX_CONFIG)."""

UNFINISHED = 75
"""Exit code of a process that had to end before its handlers had finished (EX_TEMPFAIL)."""

EXIT_GRACE = 3.0
"""Seconds that a process has after ``drain_timeout`` to close its connections and end by itself."""

DRAIN = b"drain\n"
"""What the supervisor asks of a process. There is nothing else to ask, and the end of the socket says the same."""


class Phase(str, enum.Enum):
    """Where a process is in its life."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"


class ConsumerReport(msgspec.Struct, frozen=True):
    """One consumer: how many of its targets, nsqds or partitions, it is connected to."""

    name: str
    is_running: bool
    connected: int
    targets: int

    @property
    def is_ready(self) -> bool:
        """Whether messages can arrive."""
        return self.is_running and self.connected > 0

    def __str__(self) -> str:
        if not self.is_running:
            return f"{self.name} does not run"
        return f"{self.name} is connected to {self.connected} of {self.targets}"


class Family(msgspec.Struct, frozen=True):
    """One metric of prometheus_client with its samples: name, labels, value."""

    name: str
    help: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]


class Report(msgspec.Struct, frozen=True):
    """One report.

    Attributes:
        loop_age: seconds since the event loops of the process last turned.
        metrics: of now.
        failure: why it is about to end by itself; empty when it is not.
    """

    phase: Phase = Phase.STARTING
    loop_age: float = 0.0
    consumers: list[ConsumerReport] = []
    metrics: list[Family] = []
    failure: str = ""

    @property
    def is_ready(self) -> bool:
        """Whether messages can arrive at each of its consumers."""
        return self.phase is Phase.RUNNING and bool(self.consumers) and all(each.is_ready for each in self.consumers)

    def line(self) -> bytes:
        """As it is sent."""
        return msgspec.json.encode(self) + b"\n"


def parse_report(line: bytes) -> Report:
    """A report from its line."""
    return msgspec.json.decode(line, type=Report)
