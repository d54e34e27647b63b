"""An nsqd in this process: its state with TCP, HTTP and HTTPS faces, registration, and statsd."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

from nsq_fast.broker.http.router import HttpFace, Router
from nsq_fast.broker.net.faults import ServerFaults
from nsq_fast.broker.net.listener import Listener, bind
from nsq_fast.broker.nsqd.config import Settings
from nsq_fast.broker.nsqd.http import NsqdRoutes, require_tls
from nsq_fast.broker.nsqd.lookup_peer import Registrar
from nsq_fast.broker.nsqd.nsqd import Nsqd
from nsq_fast.broker.nsqd.statsd import StatsdPusher, key_prefix
from nsq_fast.broker.options import NsqdOptions
from nsq_fast.broker.tcp.dialect import ORIGINAL
from nsq_fast.broker.tcp.server import NsqdTcp
from nsq_fast.broker.tcp.upgrade import server_context
from nsq_fast.errors import ConfigError
from nsq_fast.names import Address

from .faces import Faces
from .startable import Startable


class NsqdServer(Startable):
    """An embedded nsqd. Use it in a ``with``, or call ``start`` and ``stop``.

    Args:
        options: what the original's command line would say; port 0 takes a free port.

    Attributes:
        faults: switches that make it misbehave.
        dialect: how its TCP face speaks.
        nsqd: its state, while it runs. Without a data path a new start begins empty.
        registrar: keeps it registered at its nsqlookupds, while it runs.
    """

    dialect = ORIGINAL
    nsqd: Nsqd
    registrar: Registrar

    def __init__(self, options: NsqdOptions | None = None) -> None:
        self.options = options or NsqdOptions()
        self.faults = ServerFaults()
        addresses = {name: getattr(self.options, f"{name}_address") for name in ("tcp", "http", "https")}
        self._faces = Faces("nsqd", addresses)
        self._tcp: NsqdTcp | None = None
        self._statsd: StatsdPusher | None = None

    @property
    def tcp_address(self) -> Address:
        """Where clients connect. Known once it has been started."""
        return self._faces.known("tcp")

    @property
    def http_address(self) -> Address:
        """Where HTTP is served. Known once it has been started."""
        return self._faces.known("http")

    @property
    def https_address(self) -> Address | None:
        """Where HTTPS is served, if it is."""
        return self._faces.known("https") if self._faces.is_wanted("https") else None

    @property
    def is_running(self) -> bool:
        """Whether it serves."""
        return self._tcp is not None

    def start(self) -> None:
        """Load what was saved, listen, begin to register; a start after a stop takes the same ports again.

        Raises OSError when a port is in use or data_path cannot be used, ConfigError when options do not fit.
        """
        if self.is_running:
            return
        context = server_context(self.options)
        if self.options.https_address and context is None:
            raise ConfigError("https_address: needs tls_cert and tls_key")
        self.nsqd = self._make_nsqd()
        self.registrar = Registrar(
            self.options.lookupd_tcp_addresses, self._identity, lambda: _registrations(self.nsqd)
        )
        try:
            self._listen(context)
            self.nsqd.start()
            self._register()
            self._push_stats()
        except BaseException:
            self.kill()
            raise
        self._faces.start()

    def stop(self) -> None:
        """End connections, save metadata and messages where there is a data path. It may be started again."""
        if self._tcp is not None:
            self._leave()
            self.nsqd.close()

    def kill(self) -> None:
        """End as SIGKILL would: nothing more is written. It may be started again."""
        if self._tcp is not None:
            self._leave()
            self.nsqd.kill()

    def restart(self) -> None:
        """Kill, and start again on the same ports and data path."""
        self.kill()
        self.start()

    def register_at(self, lookupd: Address) -> None:
        """Register at one more nsqlookupd, from the next start on."""
        known = self.options.lookupd_tcp_addresses
        if str(lookupd) not in known:
            self.options = self.options.replace(lookupd_tcp_addresses=(*known, str(lookupd)))

    def wait_registered(self, timeout: float | None = None) -> bool:
        """Block until its nsqlookupds know all it has; False if ``timeout`` seconds passed first."""
        return self.registrar.wait_registered(timeout)

    def _listen(self, context: Any) -> None:
        faces, faults = self._faces, self.faults
        self._tcp = tcp = NsqdTcp(self.nsqd, faults.tcp, context, self.dialect)
        faces.open("tcp", lambda address: Listener("nsqd tcp", bind(address), tcp.handle, faults.tcp))
        routes = self._make_router()
        faces.open("https", lambda address: HttpFace("nsqd https", address, routes, faults.http, context))
        plain: Any = routes
        if self.options.tls_required == "true":
            https = faces.optional("https")
            plain = require_tls(https.port if https else 0)
        faces.open("http", lambda address: HttpFace("nsqd http", address, plain, faults.http))

    def _make_nsqd(self) -> Nsqd:
        return Nsqd(self.options)

    def _make_router(self) -> Router:
        settings = Settings(self.nsqd, lambda addresses: self.registrar.set_addresses(addresses))
        return NsqdRoutes(
            self.nsqd, lambda: (self._faces.optional("tcp"), self._faces.optional("http")), settings
        ).router()

    def _leave(self) -> None:
        self.registrar.stop()
        if self._statsd is not None:
            self._statsd.stop()
        if self._tcp is not None:
            self._tcp.close()
        self._faces.stop()
        self._tcp = None

    def _register(self) -> None:
        self.nsqd.subscribe(self._on_change)
        self.nsqd.lookup_channels = lambda topic: sorted(self.registrar.channels_of(topic))
        self.registrar.start()

    def _on_change(self, event: str, topic: str, channel: str | None) -> None:
        tell = self.registrar.register if event == "create" else self.registrar.unregister
        tell(topic, channel or "")

    def _identity(self) -> dict[str, Any]:
        tcp, http = self._faces.optional("tcp"), self._faces.optional("http")
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
        if not self.options.statsd_address:
            return
        prefix = key_prefix(
            self.options.statsd_prefix, self.options.broadcast_address, int(self._identity()["http_port"])
        )
        self._statsd = StatsdPusher(self.nsqd, prefix)
        self._statsd.start()


def _registrations(nsqd: Nsqd) -> Iterator[tuple[str, str]]:
    for topic in list(nsqd.topics.values()):
        for channel in list(topic.channels) or [""]:
            yield topic.name, channel
