"""Servers that can be started: nsqd, nsqlookupd, and ``Broker``, which has some of them ready to use here."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from gevent import signal_handler, sleep
from gevent.event import Event
from gevent.ssl import SSLContext

from nsq_fast.broker.commands import ORIGINAL
from nsq_fast.broker.connection import ERROR, frame
from nsq_fast.broker.http import HttpFace, Router
from nsq_fast.broker.identify import server_context
from nsq_fast.broker.lookupd import LookupDB, LookupdConnection, LookupdRoutes, Registrar
from nsq_fast.broker.net import Faults, HeldPorts, Listener, ServerFaults, read_exactly
from nsq_fast.broker.nsqd import Nsqd
from nsq_fast.broker.nsqd_http import NsqdRoutes, require_tls
from nsq_fast.broker.options import LookupdOptions, NsqdOptions, check_count, is_path
from nsq_fast.broker.stats import StatsdPusher, key_prefix
from nsq_fast.broker.store import NOT_OF_SEVERAL, refuse_others
from nsq_fast.errors import ConfigError, NotRunning, NsqError
from nsq_fast.names import Address

T = TypeVar("T", bound="Startable")


class Startable(ABC):
    """A server, or several. A ``with`` starts it, and stops it at its end whatever happened inside.

    While it is stopped its ports stay bound, so that nobody else has them at the next start; the end of a ``with``
    lets them go, and so does ``release_ports``.
    """

    @abstractmethod
    def start(self) -> None:
        """Start it, and return when it serves."""

    @abstractmethod
    def stop(self) -> None:
        """Stop it, saving what there is a data path for."""

    @abstractmethod
    def release_ports(self) -> None:
        """Let go of the ports that are held since it stopped."""

    def __enter__(self: T) -> T:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        self.release_ports()


class Watched(Startable):
    """Servers whose messages a test looks at, here or in another process."""

    @abstractmethod
    def messages(self, topic: str, channel: str | None = None) -> list[bytes]:
        """The bodies of the messages that a channel has not finished: those that wait, are deferred, or in flight.

        Without a channel those that some channel has not finished, each once, and those that no channel has got yet.
        """

    def depth(self, topic: str, channel: str | None = None) -> int:
        """How many."""
        return len(self.messages(topic, channel))

    def wait_empty(self, topic: str, channel: str | None = None, timeout: float = 10.0) -> None:
        """Return when every message is finished; raises TimeoutError when that takes longer."""
        give_up_at = time.monotonic() + timeout
        while left := self.depth(topic, channel):
            if time.monotonic() >= give_up_at:
                where = topic if channel is None else f"{topic}/{channel}"
                raise TimeoutError(f"{left} messages of {where} are not finished after {timeout:g} s")
            sleep(_POLL)

    @abstractmethod
    def fault(self, name: str, value: Any = None) -> contextlib.AbstractContextManager[None]:
        """Let every nsqd misbehave while in the ``with``.

        Args:
            name: ``refuse_publishes``: as where a disk is full. ``fail_fin``: FIN is refused, and messages come again
                when they time out. ``delay``: every reply waits ``value`` seconds, 0.1 by default. ``drop``: no reply,
                message or heartbeat leaves. ``pause``: nothing is delivered. ``kill``: they are gone, as by SIGKILL,
                and those that ran start again on their ports at the end.

        Raises NsqError for a name that does not exist, and for a value that does not fit.
        """


_POLL = 0.005


class Server(Startable):
    """A server with a TCP and an HTTP face, and perhaps one of HTTPS. Use it in a ``with``, or call its methods.

    Its ports are held while it is stopped, and taken again at the next start.

    Attributes:
        faults: switches that make it misbehave.
        is_running: whether it was started, and not stopped.
    """

    _name: str

    def __init__(self, options: Any) -> None:
        self.options = options
        self.faults: ServerFaults = ServerFaults()
        self.is_running = False
        # Where each face is to listen, as ``host:port``, and later where it does; an empty one leaves it out.
        self._addresses: dict[str, str | Address] = {
            face: getattr(options, f"{face}_address", "") for face in ("tcp", "http", "https")
        }
        self._open: list[Listener] = []
        self._ports = HeldPorts()

    @property
    def tcp_address(self) -> Address:
        return self._known("tcp")

    @property
    def http_address(self) -> Address:
        return self._known("http")

    def _known(self, face: str) -> Address:
        """Where a face listens, or has listened; raises NotRunning before its first start."""
        address = self._optional(face)
        if address is None:
            raise NotRunning(f"the {self._name} has no {face} address before it is started")
        return address

    def _optional(self, face: str) -> Address | None:
        """Where a face listens, or has listened; None before its first start, or if there is none."""
        address = self._addresses[face]
        return address if isinstance(address, Address) else None

    def _listen(self, face: str, make: Callable[[str, Any], Listener]) -> None:
        """Listen for a face, if it is wanted: ``make`` gets a name, and a bound socket. Raises OSError."""
        if self._addresses[face]:
            listener = make(f"{self._name} {face}", self._ports.take(self._addresses[face]))
            self._addresses[face] = listener.address
            self._open.append(listener)

    def _accept(self) -> None:
        for listener in self._open:
            listener.start()

    def _close_faces(self) -> None:
        for listener in self._open:
            listener.close()
            self._ports.hold(listener.address)  # before anything else runs: the end of connections takes its time
        for listener in self._open:
            listener.stop()
        self._open = []

    def release_ports(self) -> None:
        self._ports.let_go()


MAGIC_V2 = b"  V2"
BAD_PROTOCOL = frame(ERROR, b"E_BAD_PROTOCOL")


class NsqdServer(Server):
    """An embedded nsqd.

    Args:
        options: what the original's command line would say; port 0 takes a free port.

    Attributes:
        dialect: how its TCP face speaks.
        context: TLS; None where there is no certificate.
        nsqd: its state, while it runs. Without a data path a new start begins empty.
        registrar: keeps it registered at its nsqlookupds, while it runs.
    """

    _name = "nsqd"
    dialect = ORIGINAL
    nsqd: Nsqd
    registrar: Registrar

    def __init__(self, options: NsqdOptions | None = None) -> None:
        super().__init__(options or NsqdOptions())
        self.context: SSLContext | None = None
        self._ids = itertools.count(1)
        self._statsd: StatsdPusher | None = None

    @property
    def https_address(self) -> Address | None:
        return self._known("https") if self._addresses["https"] else None

    def start(self) -> None:
        """Load what was saved, listen, begin to register; a start after a stop takes the same ports again, held for it.

        Raises OSError when a port is in use or data_path cannot be used, ConfigError when options do not fit.
        """
        if self.is_running:
            return
        self.context = server_context(self.options)
        if self.options.https_address and self.context is None:
            raise ConfigError("https_address: needs tls_cert and tls_key")
        self.nsqd = self._make_nsqd()
        self.registrar = Registrar(
            self.options.lookupd_tcp_addresses, self._identity, lambda: _registrations(self.nsqd)
        )
        self.is_running: bool = True
        try:
            self._open_faces()
            self.nsqd.start()
            self._register()
            self._push_stats()
        except BaseException:
            self.kill()
            raise
        self._accept()

    def stop(self) -> None:
        """End connections, save metadata and messages where there is a data path. It may be started again."""
        if self.is_running:
            self._leave()
            self.nsqd.close()

    def kill(self) -> None:
        """End as SIGKILL would: nothing more is written. It may be started again."""
        if self.is_running:
            self._leave()
            self.nsqd.kill()

    def restart(self) -> None:
        self.kill()
        self.start()

    def register_at(self, lookupd: Address) -> None:
        """Register at one more nsqlookupd, from the next start on."""
        known = self.options.lookupd_tcp_addresses
        if str(lookupd) not in known:
            self.options: Any = self.options.replace(lookupd_tcp_addresses=(*known, str(lookupd)))

    def wait_registered(self, timeout: float | None = None) -> bool:
        """Block until its nsqlookupds know all it has; False if ``timeout`` seconds passed first."""
        return self.registrar.wait_registered(timeout)

    def _open_faces(self) -> None:
        faults, routes = self.faults, self._make_router()
        self._listen("tcp", lambda name, sock: Listener(name, sock, self._serve_client, faults.tcp))
        self._listen("https", lambda name, sock: HttpFace(name, sock, routes, faults.http, self.context))
        plain: Any = routes
        if self.options.tls_required == "true":
            https = self._optional("https")
            plain = require_tls(https.port if https else 0)
        self._listen("http", lambda name, sock: HttpFace(name, sock, plain, faults.http))

    def _serve_client(self, sock: Any, address: Any) -> None:
        """Serve one connection, which begins with the magic of V2, until it ends (nsqio/nsq: nsqd/tcp.go, Handle)."""
        magic = read_exactly(sock, len(MAGIC_V2))  # before there is anything else: a connection may stay silent
        if magic != MAGIC_V2:
            sock.sendall(BAD_PROTOCOL)
            return
        connection = self.dialect.connection(self, next(self._ids), sock, address)
        clients = self.nsqd.clients
        clients.add(connection)
        try:
            connection.serve()
        finally:
            clients.discard(connection)

    def _make_nsqd(self) -> Nsqd:
        return Nsqd(self.options)

    def _make_router(self) -> Router:
        return NsqdRoutes(
            self.nsqd,
            lambda: (self._optional("tcp"), self._optional("http")),
            lambda addresses: self.registrar.set_addresses(addresses),
        ).router()

    def _leave(self) -> None:
        self.registrar.stop()
        if self._statsd is not None:
            self._statsd.stop()
        for connection in list(self.nsqd.clients):
            connection.close()
        self._close_faces()
        self.is_running = False

    def _register(self) -> None:
        self.nsqd.subscribe(self._on_change)
        self.nsqd.lookup_channels = lambda topic: sorted(self.registrar.channels_of(topic))
        identity = self._identity()
        if identity["tcp_port"] and identity["http_port"]:  # an nsqlookupd refuses one without, as behind Unix sockets
            self.registrar.start()

    def _on_change(self, event: str, topic: str, channel: str | None) -> None:
        tell = self.registrar.register if event == "create" else self.registrar.unregister
        tell(topic, channel or "")

    def _identity(self) -> dict[str, Any]:
        tcp, http = self._optional("tcp"), self._optional("http")
        return {
            "version": self.options.version,
            "tcp_port": self.options.broadcast_tcp_port or (tcp.port if tcp else 0),
            "http_port": self.options.broadcast_http_port or (http.port if http else 0),
            "hostname": socket.gethostname(),
            "broadcast_address": self.options.broadcast_address,
            "topology_zone": self.options.topology_zone,
            "topology_region": self.options.topology_region,
        }

    def _push_stats(self) -> None:
        options = self.options
        if options.statsd_address:
            prefix = key_prefix(options.statsd_prefix, options.broadcast_address, int(self._identity()["http_port"]))
            self._statsd = StatsdPusher(self.nsqd, prefix)
            self._statsd.start()


def _registrations(nsqd: Nsqd) -> Iterator[tuple[str, str]]:
    for topic in list(nsqd.topics.values()):
        for channel in list(topic.channels) or [""]:
            yield topic.name, channel


class LookupdServer(Server):
    """An embedded nsqlookupd.

    Args:
        options: what the original's command line would say; port 0 takes a free port.

    Attributes:
        db: what it knows. Empty again after each start, as it would be in a new process.
    """

    _name = "nsqlookupd"

    def __init__(self, options: LookupdOptions | None = None) -> None:
        super().__init__(options or LookupdOptions())
        self.db: LookupDB = LookupDB()

    def start(self) -> None:
        """Listen; a start after a stop takes the same ports again, held for it. Raises OSError when one is in use."""
        if self.is_running:
            return
        self.db = LookupDB(self.options.inactive_producer_timeout, self.options.tombstone_lifetime)
        faults = self.faults
        try:
            self._listen("tcp", lambda name, sock: Listener(name, sock, self._serve_nsqd, faults.tcp))
            self._listen("http", lambda name, sock: HttpFace(name, sock, self._make_router(), faults.http))
        except OSError:
            self.stop()
            raise
        self._accept()
        self.is_running: bool = True

    def stop(self) -> None:
        """Stop listening and end every connection. It may be started again."""
        self._close_faces()
        self.is_running = False

    kill = stop

    def _serve_nsqd(self, sock: Any, address: Any) -> None:
        LookupdConnection(self.db, self._identity, sock, address).serve()

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


class ServerGroup(Watched):
    """Servers that are started and stopped together. Use it in a ``with``, or call ``start`` and ``stop``."""

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

    def set_faults(self, target: str, **switches: Any) -> None:
        """Turn switches (see ``Faults``) of one of ``faults``. Raises NsqError when there is none, or no switch."""
        faults = self.faults.get(target)
        if faults is None:
            raise NsqError(f"no such target: {target}; there are {', '.join(self.faults)}")
        if isinstance(switches.get("lie"), str):
            switches["lie"] = switches["lie"].encode("latin-1")
        faults.set(**switches)

    def start(self) -> None:
        """Start all, and return when everything is known everywhere. Raises OSError when a port is in use."""
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        for server in self.servers.values():
            server.stop()

    def kill(self) -> None:
        for server in self.servers.values():
            server.kill()

    def release_ports(self) -> None:
        for server in self.servers.values():
            server.release_ports()

    @abstractmethod
    def _start(self) -> None: ...

    # --- what tests ask ----------------------------------------------------------------------------------------------

    def unfinished(self, topic: str, channel: str | None = None) -> Iterator[tuple[bytes, bytes]]:
        """The id and the body of every message that a channel, or some channel, has not finished."""
        yield from ()

    def messages(self, topic: str, channel: str | None = None) -> list[bytes]:
        return list(dict(self.unfinished(topic, channel)).values())

    @contextlib.contextmanager
    def fault(self, name: str, value: Any = None) -> Iterator[None]:
        nsqds = [server for server in self.servers.values() if isinstance(server, NsqdServer)]
        switches: dict[str, dict[str, Any]] = {
            "refuse_publishes": {"refuse_publishes": True},
            "fail_fin": {"fail_fin": True},
            "delay": {"delay_replies": 0.1 if value is None else value},
            "drop": {"drop_replies": True},
            "pause": {"hold_messages": True},
            "kill": {},
        }
        if name not in switches:
            raise ConfigError(f"{name!r} is no fault; there are {', '.join(switches)}")
        if value is not None and name != "delay":
            raise ConfigError(f"{value!r}: the fault {name!r} takes no value")
        before = [{each: getattr(nsqd.faults.tcp, each) for each in switches[name]} for nsqd in nsqds]
        killed = [nsqd for nsqd in nsqds if name == "kill" and nsqd.is_running]
        for nsqd in nsqds:
            nsqd.faults.tcp.set(**switches[name])
        for nsqd in killed:
            nsqd.kill()
        try:
            yield
        finally:
            for nsqd, switched in zip(nsqds, before, strict=True):
                nsqd.faults.tcp.set(**switched)
            for nsqd in killed:
                nsqd.start()


def serve(servers: Startable, ready: Callable[[], object], stopped: Event | None = None) -> None:
    """Run servers until SIGTERM or SIGINT, or until ``stopped`` is set; ``ready`` is called when they serve."""
    stopped = stopped or Event()
    watchers = [signal_handler(number, stopped.set) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        servers.start()
        ready()
        stopped.wait()
    finally:
        servers.stop()  # ports stay held to the very end of the process, from which on its parent may hold them
        for watcher in watchers:
            watcher.cancel()


def counted(base: Any, number: int, fixed: Sequence[Mapping[str, Any]], **changes: Any) -> Any:
    """Options of the server of that number: ports of their own count up from the first's.

    Args:
        fixed: where servers are to listen, as ``{"tcp": (host, port), ...}`` for each.
    """
    for name in ("tcp_address", "http_address", "https_address"):
        address = getattr(base, name, "")
        host, _, port = address.rpartition(":")
        if is_path(address):
            changes[name] = f"{address}.{number}" if number else address
        elif port and int(port):
            changes[name] = f"{host}:{int(port) + 10 * number}"
    for face, address in (fixed[number] if number < len(fixed) else {}).items():
        if address is not None:
            changes[f"{face}_address"] = str(Address(*address))
    return base.replace(**changes)


REGISTER_TIMEOUT = 10.0


class Broker(ServerGroup):
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
        check_count("nsqds", nsqds)
        check_arguments(data_path, {"lookupd_options": lookupd_options, "addresses": addresses})
        self._addresses = addresses or {}
        self._data_path = data_path
        self.lookupd: LookupdServer | None = None
        if lookupd:
            fixed = [self._addresses.get("lookupd") or {}]
            self.lookupd = LookupdServer(counted(LookupdOptions.of(lookupd_options or {}), 0, fixed))
        paths = _data_paths(data_path, nsqds)
        self.nsqds: list[NsqdServer] = [
            NsqdServer(self._nsqd_options(number, path, options)) for number, path in enumerate(paths)
        ]

    @property
    def nsqd(self) -> NsqdServer:
        return self.nsqds[0]

    @property
    def servers(self) -> Mapping[str, NsqdServer | LookupdServer]:
        nsqds: dict[str, NsqdServer | LookupdServer] = {f"nsqd{n}": nsqd for n, nsqd in enumerate(self.nsqds)}
        return nsqds if self.lookupd is None else {**nsqds, "lookupd": self.lookupd}

    def _start(self) -> None:
        if self._data_path is not None and len(self.nsqds) > 1:
            refuse_others(Path(self._data_path), NOT_OF_SEVERAL)
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

    def unfinished(self, topic: str, channel: str | None = None) -> Iterator[tuple[bytes, bytes]]:
        """The id and the body of every message that a channel, or some channel, has not finished."""
        for nsqd in self.nsqds:
            found = nsqd.nsqd.topics.get(topic) if nsqd.is_running else None
            if found is not None:
                channels = [each for each in found.channels.values() if channel in (None, each.name)]
                messages = [message for each in channels for message in each.unfinished()]
                if not channel or not found.channels:  # the first channel gets what the topic has gathered
                    messages.extend(found.unfinished())
                yield from ((each.id, each.body) for each in messages)

    def _nsqd_options(self, number: int, data_path: str | None, options: Mapping[str, Any]) -> NsqdOptions:
        base = NsqdOptions.of({**options, "data_path": data_path})
        node_id = (base.node_id + number) % 1024
        return counted(base, number, self._addresses.get("nsqds", ()), node_id=node_id)  # type: ignore[no-any-return]


def check_arguments(data_path: object, mappings: Mapping[str, object]) -> None:
    """Raise ConfigError for a data path that is none, and for what is no mapping."""
    if data_path is not None and not isinstance(data_path, (str, os.PathLike)):
        raise ConfigError(f"data_path={data_path!r}: must be a path, or None")
    for name, value in mappings.items():
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{name}={value!r}: must be a mapping, or None")


def _data_paths(data_path: str | os.PathLike[str] | None, count: int) -> Sequence[str | None]:
    if data_path is None:
        return [None] * count
    if count == 1:
        return [os.fspath(data_path)]
    return [os.fspath(Path(data_path) / f"nsqd{number}") for number in range(count)]
