"""The HTTP of a worker, in native threads of the supervisor: what it answers to browsers, to probes and to Prometheus,
from the last snapshot that the supervisor took."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any, NamedTuple

from nsq_fast._lazy import get_logger
from nsq_fast.errors import ConfigError
from nsq_fast.log_events import WORKER_LISTENING
from nsq_fast.names import Address, parse_listen_address
from nsq_fast.page import STYLE

from .health import Snapshot, Totals, not_alive, not_ready

logger: logging.Logger = get_logger(__name__)

TEXT = "text/plain; charset=utf-8"
HTML = "text/html; charset=utf-8"
REQUEST_TIMEOUT = 10.0
_NO_DESCRIPTOR_PAUSE = 0.1
RATE_SECONDS = 5
"""Rates are those over about so long."""


def listen(address: str, name: str) -> tuple[socket.socket, str]:
    """Listen at ``host:port``, or at ``:port`` or ``[::]:port`` on all interfaces, of IPv4 and IPv6; and the URL.

    Raises ConfigError, which calls the address ``name``.
    """
    host, port = parse_listen_address(address, name)
    both = host in ("", "::") and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise ConfigError(f"{name}={address!r}: cannot listen there: {error.strerror or error}") from error
    return listening, f"http://{Address(host or '0.0.0.0', listening.getsockname()[1])}"


class Answer(NamedTuple):
    status: int
    body: bytes
    kind: str = TEXT


Pages = Mapping[str, Callable[[], Answer]]
"""By path; each is made anew for each request."""


def answer(pages: Pages, path: str) -> Answer:
    """What is answered to a GET of a path, whatever its query."""
    make = pages.get(path.partition("?")[0])
    return make() if make else Answer(404, f"there is no such page; there are {' '.join(pages)}\n".encode())


class _Server(ThreadingHTTPServer):
    """Answers requests, as soon as it is made.

    Args:
        listening: what it accepts from.
        pages: each is made in a thread of its own.
    """

    daemon_threads = True

    def __init__(self, listening: socket.socket, pages: Pages) -> None:
        super().__init__(listening.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.pages = pages
        threading.Thread(target=self.serve_forever, name="nsq_fast status", daemon=True).start()

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:  # there is no descriptor for it: the connection waits, and the socket can be read at once again
            sleep(_NO_DESCRIPTOR_PAUSE)
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is none."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_TIMEOUT
    server_version = "nsq-fast"
    sys_version = ""

    def do_GET(self) -> None:
        status, body, kind = answer(self.server.pages, self.path)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *arguments: Any) -> None:
        """Probes come every few seconds."""


class StatusPage:
    """The pages of a worker.

    Args:
        timeout: ``alive_timeout``.
        scrape: called in the thread of a request; when it returns, ``show`` was given the metrics of now.

    The supervisor says how it is with ``show``; the threads of requests read what it said last.
    """

    def __init__(self, timeout: float, scrape: Callable[[], object] = bool) -> None:
        self._timeout = timeout
        self._scrape = scrape
        self._server: _Server | None = None
        self._now = Snapshot(monotonic())
        self._earlier = deque([self._now], RATE_SECONDS + 1)
        self._past = Totals()

    def show(self, snapshot: Snapshot, past: Totals) -> None:
        """Answer from these: the processes of now, and what those that have ended had counted."""
        self._past = past
        self._now = snapshot
        if snapshot.at - self._earlier[-1].at >= 1.0:
            self._earlier.append(snapshot)

    def listen(self, address: str | None) -> None:
        """Serve at ``host:port`` or ``:port``; None: nowhere. Raises ConfigError."""
        if address is None:
            return
        listening, url = listen(address, "http")
        pages = {
            "/": lambda: Answer(200, self.html().encode(), HTML),
            "/healthz": lambda: self._probe(not_alive),
            "/readyz": lambda: self._probe(not_ready),
            "/metrics": self._metrics,
        }
        self._server = _Server(listening, pages)
        logger.info("%s has %s", url, " ".join(pages), extra=WORKER_LISTENING)

    def close(self) -> None:
        """Serve no longer."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def html(self) -> str:
        """The page for people."""
        now = self._now
        return _html(now, self._earlier[0], not_ready(now, monotonic(), self._timeout))

    def _probe(self, find_reasons: Callable[[Snapshot, float, float], list[str]]) -> Answer:
        reasons = find_reasons(self._now, monotonic(), self._timeout)
        processes = [
            {"number": each.number, "pid": each.pid, "phase": each.report.phase.value, "leaving": each.is_leaving}
            for each in self._now.processes
        ]
        body = {"ok": not reasons, "reasons": reasons, "processes": processes}
        return Answer(503 if reasons else 200, json.dumps(body).encode() + b"\n", "application/json")

    def _metrics(self) -> Answer:
        try:
            from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
        except ImportError:
            return Answer(501, b"metrics need prometheus-client: pip install 'nsq-fast[metrics]'\n")
        self._scrape()
        snapshot, past = self._now, self._past
        metrics = [*past.now(each.report.metrics for each in snapshot.processes), *_own(snapshot)]
        return Answer(200, generate_latest(SimpleNamespace(collect=lambda: metrics)), CONTENT_TYPE_LATEST)


def _own(snapshot: Snapshot) -> Iterator[Any]:
    """Of the worker itself."""
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

    running = [each for each in snapshot.processes if not each.is_leaving]
    ready = sum(each.report.is_ready for each in running)
    name = "nsq_fast_worker"
    yield GaugeMetricFamily(f"{name}_processes", "Processes that run and were not asked to end.", len(running))
    yield GaugeMetricFamily(f"{name}_processes_ready", "Those of them at whose consumers messages can arrive.", ready)
    text = "Processes started in place of one that ended by itself."
    yield CounterMetricFamily(f"{name}_restarts", text, snapshot.restarts)


# The page for people

_TABLES = """
table{font-size:14px}th:first-child,td:first-child{text-align:left;white-space:normal;overflow-wrap:anywhere}
.well{color:var(--fine)}.ill{color:var(--bad)}a{color:var(--colour1)}
@media(max-width:640px){thead{display:none}tr{display:block;border-bottom:1px solid var(--line);padding:6px 0}
td{display:flex;justify-content:space-between;gap:12px;border:0;padding:2px 7px}td:first-child{font-weight:600}
td:not(:first-child)::before{content:attr(data-name);color:var(--soft)}}
"""


def _html(snapshot: Snapshot, earlier: Snapshot, reasons: list[str]) -> str:
    """The page of a moment; ``earlier`` is what rates are reckoned from. It needs no script, and asks again itself."""
    word = "ending" if snapshot.is_stopping else "not ready" if reasons else "ready"
    listed = "".join(f"<li>{escape(each)}</li>" for each in reasons)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="refresh" content="2"><title>worker: {word}</title><style>{STYLE}{_TABLES}</style></head><body><main>
<h1>Worker: <span class="{"ill" if reasons else "well"}">{word}</span></h1>
<ul>{listed}</ul>
<h2>Consumers</h2>
{_table(CONSUMER_COLUMNS, _consumer_rows(snapshot, earlier))}
<h2>Processes</h2>
{_table(PROCESS_COLUMNS, _process_rows(snapshot))}
<p>Started again: {snapshot.restarts} times. <a href="healthz">healthz</a> <a href="readyz">readyz</a>
<a href="metrics">metrics</a></p>
</main></body></html>
"""


CONSUMER_COLUMNS = ("topic/channel", "finished/s", "finished", "requeued", "in flight", "connected", "processes")
PROCESS_COLUMNS = ("", "pid", "phase", "consumers ready", "loop turned ago")


def _consumer_rows(snapshot: Snapshot, earlier: Snapshot) -> Iterator[tuple[object, ...]]:
    """Of all processes together: what processes that have ended did is not in it."""
    before = {(each.pid, it.name): it.finished for each in earlier.processes for it in each.report.consumers}
    found = [(each.pid, it) for each in snapshot.processes for it in each.report.consumers]
    seconds = max(snapshot.at - earlier.at, 1.0)
    for name in sorted({it.name for _, it in found}):
        own = [(pid, it) for pid, it in found if it.name == name]
        # A process that is new has no figure before: it began at 0.
        rate = sum(it.finished - before.get((pid, name), 0) for pid, it in own) / seconds
        of = [it for _, it in own]
        connected, targets = sum(it.connected for it in of), sum(it.targets for it in of)
        sums = sum(it.finished for it in of), sum(it.requeued for it in of), sum(it.in_flight for it in of)
        yield name, f"{rate:,.1f}", *(f"{each:,}" for each in sums), f"{connected} of {targets}", len(own)


def _process_rows(snapshot: Snapshot) -> Iterator[tuple[object, ...]]:
    for each in snapshot.processes:
        consumers = each.report.consumers
        ready = f"{sum(it.is_ready for it in consumers)} of {len(consumers)}"
        phase = "leaving" if each.is_leaving else each.report.phase.value
        age = snapshot.at - each.reported_at + each.report.loop_age
        yield f"process {each.number}", each.pid, phase, ready, f"{age:.1f} s"
    for number in snapshot.missing:
        yield f"process {number}", "", "to be started again", "", ""


def _table(columns: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    def cell(name: str, value: object) -> str:
        return f'<td data-name="{escape(name)}">{escape(str(value))}</td>'

    head = "".join(f"<th>{escape(each)}</th>" for each in columns)
    body = "".join(f"<tr>{''.join(map(cell, columns, row))}</tr>" for row in rows)
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
