"""``Broker``: some nsqds and an nsqlookupd together, in this process, ready to use."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from gevent import signal_handler
from gevent.event import Event

from nsq_fast.errors import ConfigError
from nsq_fast.names import Address

from .faults import Faults
from .lookupd_server import LookupdServer
from .nsqd_server import NsqdServer
from .options import LookupdOptions, NsqdOptions

REGISTER_TIMEOUT = 10.0


class Broker:
    """Embedded NSQ: ``with Broker() as broker: broker.nsqd.tcp_address``.

    Everything listens on free ports of loopback unless told otherwise, and runs
    in the hub of the thread that starts it: block that thread, and nothing is served.

    Args:
        nsqds: how many nsqds.
        lookupd: whether there is an nsqlookupd, at which the nsqds register.
        data_path: folder where messages and metadata survive; each nsqd of several has a folder below it.
            It is made if there is none.
        lookupd_options: of the nsqlookupd.
        addresses: where to listen, as ``{"nsqds": [{"tcp": (host, port), "http": ..., "https": ...}],
            "lookupd": {...}}``; what is left out is as the options say.
        options: of every nsqd; an address with a port of its own is for the first, others count up from it.

    Attributes:
        nsqds: the ``NsqdServer``s.
        lookupd: the ``LookupdServer``, or None.
    """

    def __init__(
        self,
        nsqds: int = 1,
        lookupd: bool = True,
        data_path: str | os.PathLike[str] | None = None,
        *,
        lookupd_options: Mapping[str, Any] | None = None,
        addresses: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if nsqds < 0:
            raise ConfigError(f"nsqds={nsqds}: must be 0 or more")
        self._addresses = addresses or {}
        self._stopped = Event()
        self.lookupd: LookupdServer | None = None
        if lookupd:
            fixed = _listen_options(self._addresses.get("lookupd"))
            self.lookupd = LookupdServer(LookupdOptions.of({**(lookupd_options or {}), **fixed}))
        paths = _data_paths(data_path, nsqds)
        self.nsqds = [NsqdServer(self._nsqd_options(number, path, options)) for number, path in enumerate(paths)]

    @property
    def nsqd(self) -> NsqdServer:
        """The first nsqd."""
        return self.nsqds[0]

    @property
    def faults(self) -> dict[str, Faults]:
        """The fault switches of every face: ``nsqd0.tcp``, ``nsqd0.http``, ..., ``lookupd.tcp``, ``lookupd.http``."""
        servers: dict[str, Any] = {f"nsqd{number}": nsqd for number, nsqd in enumerate(self.nsqds)}
        if self.lookupd is not None:
            servers["lookupd"] = self.lookupd
        return {
            f"{name}.{face}": getattr(server.faults, face)
            for name, server in servers.items()
            for face in ("tcp", "http")
        }

    def start(self) -> None:
        """Start all, and return when the nsqds are registered. Raises OSError when a port is in use."""
        self._stopped.clear()
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop all, saving what there is a data path for."""
        for nsqd in self.nsqds:
            nsqd.stop()
        if self.lookupd is not None:
            self.lookupd.stop()
        self.end()

    def kill(self) -> None:
        """Stop all as SIGKILL would."""
        for nsqd in self.nsqds:
            nsqd.kill()
        if self.lookupd is not None:
            self.lookupd.kill()
        self.end()

    def end(self) -> None:
        """Make ``wait`` return."""
        self._stopped.set()

    def wait(self) -> None:
        """Block until the broker is stopped, or ``end`` is called."""
        self._stopped.wait()

    def __enter__(self) -> Broker:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self) -> None:
        if self.lookupd is not None:
            self.lookupd.start()
            for nsqd in self.nsqds:
                nsqd.register_at(self.lookupd.tcp_address)
        for nsqd in self.nsqds:
            if nsqd.options.data_path is not None:
                Path(nsqd.options.data_path).mkdir(parents=True, exist_ok=True)
            nsqd.start()
        if self.lookupd is not None:
            for nsqd in self.nsqds:
                nsqd.wait_registered(REGISTER_TIMEOUT)

    def _nsqd_options(self, number: int, data_path: str | None, options: Mapping[str, Any]) -> NsqdOptions:
        base = NsqdOptions.of({**options, "data_path": data_path})
        changes: dict[str, Any] = {"node_id": (base.node_id + number) % 1024}
        if number:
            for name in ("tcp_address", "http_address", "https_address"):
                changes[name] = _count_up(getattr(base, name), number)
        fixed = self._addresses.get("nsqds", ())
        if number < len(fixed):
            changes.update(_listen_options(fixed[number]))
        return base.replace(**changes)


def serve(broker: Broker, ready: Callable[[], object]) -> None:
    """Run a broker until SIGTERM or SIGINT, or until it is stopped; ``ready`` is called when it serves."""
    watchers = [signal_handler(number, broker.end) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        with broker:
            ready()
            broker.wait()
    finally:
        for watcher in watchers:
            watcher.cancel()


def _data_paths(data_path: str | os.PathLike[str] | None, count: int) -> Sequence[str | None]:
    if data_path is None:
        return [None] * count
    if count == 1:
        return [os.fspath(data_path)]
    return [os.fspath(Path(data_path) / f"nsqd{number}") for number in range(count)]


def _listen_options(addresses: Mapping[str, Any] | None) -> dict[str, str]:
    return {
        f"{face}_address": str(Address(*address)) for face, address in (addresses or {}).items() if address is not None
    }


def _count_up(address: str, number: int) -> str:
    host, _, port = address.rpartition(":")
    if not address or int(port) == 0:
        return address
    return f"{host}:{int(port) + 10 * number}"
