"""What the HTTP faces of the original's nsqd and of the redesigned one have in common."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from nsq_fast.broker.http.router import Request
from nsq_fast.names import Address

from .config import Settings
from .host import Host

_SIZE = 4
_SMALLEST_MESSAGE = 5  # in an MPUB body: a length and one byte


class HostRoutes:
    """Handlers for ``Router`` that every nsqd has, and what others are made of.

    Args:
        addresses: called for the TCP and HTTP address of the server.
        settings: what GET and PUT /config show and change.
    """

    def __init__(self, host: Host, addresses: Callable[[], tuple[Address | None, Address | None]], settings: Settings):
        self._host = host
        self._addresses = addresses
        self._settings = settings

    def health(self) -> str:
        """What /ping answers: OK, or what is wrong."""
        return "OK" if self._host.error is None else f"NOK - {self._host.error}"

    def ping(self, request: Request) -> str:
        """GET /ping."""
        if self._host.error is not None:
            raise request.refuse(500, self.health())
        return self.health()

    def info(self, request: Request) -> dict[str, Any]:
        """GET /info."""
        options = self._host.options
        tcp, http = self._addresses()
        return {
            "version": options.version,
            "broadcast_address": options.broadcast_address,
            "hostname": socket.gethostname(),
            "http_port": -1 if http is None else http.port,
            "tcp_port": -1 if tcp is None else tcp.port,
            "start_time": int(self._host.started_at),
            "max_heartbeat_interval": round(options.max_heartbeat_interval * 1e9),
            "max_output_buffer_size": options.max_output_buffer_size,
            "max_output_buffer_timeout": round(options.max_output_buffer_timeout * 1e9),
            "max_deflate_level": options.max_deflate_level,
            "topology_zone": options.topology_zone,
            "topology_region": options.topology_region,
        }

    def split_lines(self, request: Request, body: bytes) -> list[bytes]:
        """The messages of a body with one on each line."""
        lines = [line for line in body.split(b"\n") if line]
        if lines and max(map(len, lines)) > self._host.options.max_msg_size:
            raise request.refuse(413, "MSG_TOO_BIG")
        return lines

    def split_binary(self, request: Request, body: bytes) -> list[bytes]:
        """The messages of a body that is one of MPUB."""
        count = int.from_bytes(body[:_SIZE], "big", signed=True)
        most = (self._host.options.max_body_size - _SIZE) // _SMALLEST_MESSAGE
        if len(body) < _SIZE or not 0 < count <= most:
            raise request.refuse(413, "BAD_BODY")
        bodies = []
        at = _SIZE
        for _ in range(count):
            size = int.from_bytes(body[at : at + _SIZE], "big", signed=True)
            at += _SIZE
            message = body[at : at + max(size, 0)]
            if not 0 < size == len(message) or size > self._host.options.max_msg_size:
                raise request.refuse(413, "BAD_MESSAGE")
            bodies.append(message)
            at += size
        return bodies

    def get_config(self, request: Request) -> Any:
        """GET /config/<option>."""
        return self._settings.get(request)

    def put_config(self, request: Request) -> Any:
        """PUT /config/<option>."""
        self._settings.put(request, request.body(self._host.options.max_msg_size, "INVALID_VALUE"))
        return self._settings.get(request)
