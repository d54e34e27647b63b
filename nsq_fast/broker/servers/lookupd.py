"""An nsqlookupd in this process: its state with a TCP and an HTTP face."""

from __future__ import annotations

import socket
from typing import Any

from nsq_fast.broker.http.router import HttpFace, Router
from nsq_fast.broker.lookupd.http import LookupdRoutes
from nsq_fast.broker.lookupd.registration_db import LookupDB
from nsq_fast.broker.lookupd.tcp import LookupdProtocol
from nsq_fast.broker.net.faults import ServerFaults
from nsq_fast.broker.net.listener import Listener, bind
from nsq_fast.broker.options import LookupdOptions
from nsq_fast.names import Address

from .faces import Faces
from .startable import Startable


class LookupdServer(Startable):
    """An embedded nsqlookupd. Use it in a ``with``, or call ``start`` and ``stop``.

    Args:
        options: what the original's command line would say; port 0 takes a free port.

    Attributes:
        db: what it knows. Empty again after each start, as it would be in a new process.
        faults: switches that make it misbehave.
    """

    def __init__(self, options: LookupdOptions | None = None) -> None:
        self.options = options or LookupdOptions()
        self.faults = ServerFaults()
        self.db = LookupDB()
        self._faces = Faces("nsqlookupd", {"tcp": self.options.tcp_address, "http": self.options.http_address})
        self._is_running = False

    @property
    def tcp_address(self) -> Address:
        """Where nsqds register. Known once it has been started."""
        return self._faces.known("tcp")

    @property
    def http_address(self) -> Address:
        """Where clients look up. Known once it has been started."""
        return self._faces.known("http")

    @property
    def is_running(self) -> bool:
        """Whether it serves."""
        return self._is_running

    def start(self) -> None:
        """Listen; a start after a stop takes the same ports again. Raises OSError when they are in use."""
        if self._is_running:
            return
        self.db = LookupDB(self.options.inactive_producer_timeout, self.options.tombstone_lifetime)
        protocol = LookupdProtocol(self.db, self._identity, self.faults.tcp)
        faces, faults = self._faces, self.faults
        try:
            faces.open("tcp", lambda address: Listener("nsqlookupd tcp", bind(address), protocol.handle, faults.tcp))
            faces.open("http", lambda address: HttpFace("nsqlookupd http", address, self._make_router(), faults.http))
        except OSError:
            self.stop()
            raise
        faces.start()
        self._is_running = True

    def stop(self) -> None:
        """Stop listening and end every connection. It may be started again."""
        self._faces.stop()
        self._is_running = False

    kill = stop

    def _make_router(self) -> Router:
        return LookupdRoutes(self.db, self.options.version).router()

    def _identity(self) -> dict[str, Any]:
        return {
            "tcp_port": self.tcp_address.port,
            "http_port": self.http_address.port,
            "version": self.options.version,
            "broadcast_address": self.options.broadcast_address,
            "hostname": socket.gethostname(),
        }
