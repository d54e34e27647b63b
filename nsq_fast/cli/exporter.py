"""`nsq-fast exporter`: depth, in flight, clients and latencies of a cluster, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import click
from gevent import socket
from gevent.pywsgi import WSGIServer

from nsq_fast.worker.status_page import Answer, answer, listen

from . import options
from .options import flag, option
from .servers import NSQD_HTTP, Servers, named_servers, stop_signals


@options.command("exporter", "Show Prometheus depth, in flight, clients of a cluster.")
def command(
    servers: Servers = named_servers(NSQD_HTTP),
    http: str = option(default=":9117", metavar="HOST:PORT", help="Where /metrics is served."),
    timeout: float = option(
        type=options.some_time, default=2.0, help="For the answer of one server; others are not kept waiting."
    ),
    ephemeral: bool = flag(help="Show #ephemeral topics and channels, too."),
) -> None:
    """Serve what nsqds say in /stats as metrics, of either dialect: docs/metrics.md lists them. All nsqds that the
    lookupds know are asked at each scrape, at once; one that does not answer is shown as not up. Ctrl-C ends it.
    """
    try:
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        from nsq_fast.exporter import Cluster
    except ImportError as error:
        text = f"{error}; `nsq-fast exporter` needs prometheus-client: pip install 'nsq-fast[metrics]'"
        raise click.ClickException(text) from error
    found = servers.found()
    of_lookup = found.of_lookup(timeout)
    cluster = Cluster(
        found.nsqds, found.lookupds, timeout=timeout, lookup_config=of_lookup, with_ephemeral=ephemeral, **found.of_http
    )

    pages: dict[str, Callable[[], Answer]] = {
        "/metrics": lambda: Answer(200, generate_latest(SimpleNamespace(collect=cluster.scrape)), CONTENT_TYPE_LATEST),
        "/healthz": lambda: Answer(200, b"ok\n"),
    }

    def application(environ: dict[str, Any], respond: Callable[[str, list[tuple[str, str]]], object]) -> list[bytes]:
        status, body, kind = answer(pages, environ["PATH_INFO"])
        respond(f"{status} {HTTPStatus(status).phrase}", [("Content-Type", kind), ("Content-Length", str(len(body)))])
        return [body]

    listening, url = listen(http, "--http")
    listener = socket.socket(listening.family, listening.type, fileno=listening.detach())
    server = WSGIServer(listener, application, log=None)
    server.start()
    click.echo(f"{url}/metrics", err=True)
    with stop_signals() as stop:
        stop.wait()
        server.stop(timeout=1)
