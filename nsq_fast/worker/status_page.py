"""What a worker answers to probes and to Prometheus, from the last snapshot that the supervisor took."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from time import monotonic
from typing import Any

from nsq_fast.errors import ConfigError
from nsq_fast.log_events import WORKER_LISTENING
from nsq_fast.names import parse_listen_address

from .health import Snapshot, Verdict, liveness, readiness
from .reports import Family
from .status_server import TEXT, Answer, StatusServer
from .totals import Totals

logger = logging.getLogger(__name__)

JSON = "application/json"


class StatusPage:
    """The pages of a worker.

    Args:
        timeout: ``alive_timeout``.

    Attributes:
        shown: of now: the processes, and what those that have ended had counted. The supervisor replaces it, and the
            threads of requests read it.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._server: StatusServer | None = None
        self.shown = Snapshot(monotonic()), Totals()

    def listen(self, address: str | None) -> None:
        """Serve at ``host:port`` or ``:port``; None: nowhere. Raises ConfigError."""
        if address is None:
            return
        host, port = parse_listen_address(address, "http")
        pages = {"/healthz": self._healthz, "/readyz": self._readyz, "/metrics": self._metrics}
        try:
            self._server = StatusServer((host, port), pages)
        except OSError as error:
            raise ConfigError(f"http={address!r}: cannot listen there: {error.strerror or error}") from error
        logger.info(
            "http://%s:%d has %s", host or "0.0.0.0", self._server.port, " ".join(pages), extra=WORKER_LISTENING
        )

    def close(self) -> None:
        """Serve no longer."""
        if self._server is not None:
            self._server.close()

    def _healthz(self) -> Answer:
        return self._answer(liveness(self.shown[0], monotonic(), self._timeout))

    def _readyz(self) -> Answer:
        return self._answer(readiness(self.shown[0], monotonic(), self._timeout))

    def _answer(self, verdict: Verdict) -> Answer:
        status = 200 if verdict.is_well else 503
        processes = [
            {"number": each.number, "pid": each.pid, "phase": each.report.phase.value, "leaving": each.is_leaving}
            for each in self.shown[0].processes
        ]
        body = {"ok": verdict.is_well, "reasons": verdict.reasons, "processes": processes}
        return Answer(status, json.dumps(body) + "\n", JSON)

    def _metrics(self) -> Answer:
        try:
            from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
        except ImportError:
            return Answer(501, "metrics need prometheus-client: pip install 'nsq-fast[metrics]'\n", TEXT)
        snapshot, past = self.shown
        families = [*past.now(each.report.metrics for each in snapshot.processes), *_own(snapshot)]
        return Answer(200, generate_latest(_Collected(families)), CONTENT_TYPE_LATEST)


def _own(snapshot: Snapshot) -> Iterator[Family]:
    """Of the worker itself."""
    running = [each for each in snapshot.processes if not each.is_leaving]
    ready = sum(each.report.is_ready for each in running)
    for name, help, value in (
        ("nsq_fast_worker_processes", "Processes that run and were not asked to end.", len(running)),
        ("nsq_fast_worker_processes_ready", "Those of them at whose consumers messages can arrive.", ready),
    ):
        yield Family(name, help, "gauge", [(name, {}, float(value))])
    name = "nsq_fast_worker_restarts"
    help = "Processes started in place of one that ended by itself."
    yield Family(name, help, "counter", [(f"{name}_total", {}, float(snapshot.restarts))])


class _Collected:
    """Families as prometheus_client's ``generate_latest`` takes them."""

    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Any]:
        from prometheus_client.metrics_core import Metric

        for each in self._families:
            metric = Metric(each.name, each.help, each.kind)
            for name, labels, value in each.samples:
                metric.add_sample(name, labels, value)
            yield metric
