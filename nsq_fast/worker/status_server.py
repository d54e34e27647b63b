"""The HTTP of a worker: /healthz, /readyz and /metrics, in native threads of the supervisor."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

TEXT = "text/plain; charset=utf-8"
REQUEST_TIMEOUT = 10.0


class Answer(NamedTuple):
    """What is answered."""

    status: int
    body: str | bytes
    kind: str = TEXT


class StatusServer:
    """Answers requests; listens as soon as it is made. Raises OSError when it cannot.

    Args:
        address: host and port; an empty host for all interfaces.
        pages: by path; each is made anew for each request, in a thread of its own.
    """

    def __init__(self, address: tuple[str, int], pages: Mapping[str, Callable[[], Answer]]) -> None:
        self._server = _Server(_listen(*address), pages)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="nsq_fast status", daemon=True).start()

    def close(self) -> None:
        """Listen no longer."""
        self._server.shutdown()
        self._server.server_close()


def _listen(host: str, port: int) -> socket.socket:
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, listening: socket.socket, pages: Mapping[str, Callable[[], Answer]]) -> None:
        super().__init__(listening.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.server_address = listening.getsockname()
        self.pages = pages

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is none."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_TIMEOUT
    server_version = "nsq-fast"
    sys_version = ""

    def do_GET(self) -> None:
        make = self.server.pages.get(self.path.partition("?")[0])
        known = " ".join(self.server.pages)
        page = make() if make is not None else Answer(404, f"there is no such page; there are {known}\n")
        body = page.body.encode() if isinstance(page.body, str) else page.body
        self.send_response(page.status)
        self.send_header("Content-Type", page.kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *arguments: Any) -> None:
        """Probes come every few seconds."""
