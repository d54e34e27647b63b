"""A group of servers in one process: started together, stopped together, waited for."""

from __future__ import annotations

import signal
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from gevent import signal_handler
from gevent.event import Event

from nsq_fast.broker.net.faults import Faults
from nsq_fast.names import Address

from .lookupd import LookupdServer
from .nsqd import NsqdServer
from .startable import Startable


class ServerGroup(Startable):
    """Servers that are started and stopped together. Use it in a ``with``, or call ``start`` and ``stop``."""

    def __init__(self) -> None:
        self._stopped = Event()

    @property
    @abstractmethod
    def servers(self) -> Mapping[str, NsqdServer | LookupdServer]:
        """All servers by name, nsqds first."""

    @property
    def faults(self) -> dict[str, Faults]:
        """The fault switches of every face, by the name of its server: ``nsqd0.tcp``, ``nsqd0.http``, ..."""
        return {
            f"{name}.{face}": getattr(server.faults, face)
            for name, server in self.servers.items()
            for face in ("tcp", "http")
        }

    def start(self) -> None:
        """Start all, and return when everything is known everywhere. Raises OSError when a port is in use."""
        self._stopped.clear()
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop all, saving what there is a data path for."""
        for server in self.servers.values():
            server.stop()
        self.end()

    def kill(self) -> None:
        """Stop all as SIGKILL would."""
        for server in self.servers.values():
            server.kill()
        self.end()

    def end(self) -> None:
        """Make ``wait`` return."""
        self._stopped.set()

    def wait(self) -> None:
        """Block until the group is stopped, or ``end`` is called."""
        self._stopped.wait()

    @abstractmethod
    def _start(self) -> None: ...


def serve(group: ServerGroup, ready: Callable[[], object]) -> None:
    """Run servers until SIGTERM or SIGINT, or until they are stopped; ``ready`` is called when they serve."""
    watchers = [signal_handler(number, group.end) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        with group:
            ready()
            group.wait()
    finally:
        for watcher in watchers:
            watcher.cancel()


def listen_options(addresses: Mapping[str, Any] | None) -> dict[str, str]:
    """Addresses as ``{"tcp": (host, port), ...}`` as options of a server."""
    return {
        f"{face}_address": str(Address(*address)) for face, address in (addresses or {}).items() if address is not None
    }


def count_up(address: str, number: int) -> str:
    """The address of the server of that number: ports of their own count up from the first's."""
    host, _, port = address.rpartition(":")
    if not address or int(port) == 0:
        return address
    return f"{host}:{int(port) + 10 * number}"
