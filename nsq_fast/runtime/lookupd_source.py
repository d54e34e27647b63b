"""Where the addresses of nsqlookupds come from when they are not configured: the etcd of a redesigned cluster.

Every nsqlookupd of a cluster registers itself in the cluster's etcd, with a key
that vanishes when it does not refresh it for a while.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from nsq_fast.config import LookupConfig
from nsq_fast.errors import ConfigError
from nsq_fast.names import parse_address

from .lookupd import LookupdOrigin
from .net.etcd import EtcdClient, EtcdNode
from .net.http import Endpoint

# youzan/nsq: consistence/struct.go, NSQ_ROOT_DIR; consistence/nsq_lookupd_etcd.go, createLookupdRootPath
_ROOT = "/NSQMetaData"
_LOOKUPDS = "NsqlookupdInfo/NsqlookupdNodes"
_SCHEMES = {"etcd": "http", "etcds": "https"}
_URL = re.compile(r"(etcds?)://([^/?#]+)/([^/?#]+)")
_CLUSTER = re.compile(r"[A-Za-z0-9._-]{1,255}")
_PORT = re.compile(r"[0-9]{1,5}")
WATCH_LIMIT = 60.0
"""Seconds after which the addresses are read again although no change was told."""


class EtcdLookupds(LookupdOrigin):
    """The nsqlookupds of a redesigned cluster, as its etcd names them: for ``lookupd_http_addresses``.

    ``"etcd://host:2379/cluster"`` says the same; this class is for etcds that want a password or a certificate.

    Args:
        addresses: members of the etcd cluster, as ``host:port``, ``http://...`` or ``https://...``. Default port 2379.
        cluster: the id of the NSQ cluster: the flag ``-cluster-id`` of its servers.
        username, password: of etcd's basic authentication.
        tls_options: for https: an ssl.SSLContext or a mapping: cafile, certfile, keyfile, server_hostname, verify.

    Raises ConfigError for what cannot be used.
    """

    def __init__(
        self,
        addresses: Any,
        cluster: str,
        *,
        username: str | None = None,
        password: str | None = None,
        tls_options: Any = None,
    ) -> None:
        if not isinstance(cluster, str) or not _CLUSTER.fullmatch(cluster):
            raise ConfigError(
                f"cluster={cluster!r}: must be the -cluster-id of the servers: letters, digits, '.', '_', '-'"
            )
        self.cluster = cluster
        self._given: dict[str, Any] = {"username": username, "password": password, "tls_options": tls_options}
        self._addresses = addresses
        self._shown = str(EtcdClient(addresses, timeout=1.0, **self._given))

    def __iter__(self) -> Iterator[Any]:
        """Itself: it stands where several addresses may."""
        yield self

    def __str__(self) -> str:
        return f"etcd {self._shown}, cluster {self.cluster}"

    def __repr__(self) -> str:
        return f"<EtcdLookupds {self}>"

    def client(self, timeout: float) -> EtcdClient:
        """A client of the etcd; each poller has its own."""
        return EtcdClient(self._addresses, timeout=timeout, **self._given)


class LookupdSource:
    """What one poller knows of the nsqlookupds that an etcd names.

    Attributes:
        found: those that it named the last time that it answered.
        problem: why there are none, or why they may be out of date; empty when all is well.
    """

    def __init__(self, origin: EtcdLookupds, config: LookupConfig) -> None:
        self.found: tuple[Endpoint, ...] = ()
        self.problem = f"{origin} has not answered yet"
        self._origin = origin
        self._client = origin.client(config.lookupd_timeout)
        self._key = f"{_ROOT}/{origin.cluster}/{_LOOKUPDS}"
        self._state = 0

    def __str__(self) -> str:
        return str(self._origin)

    def read(self) -> None:
        """Ask. Sets ``found`` and ``problem``. Raises HttpError and RemoteProtocolError, after ``problem`` is set."""
        try:
            answer = self._client.get(self._key)
        except Exception as error:
            self.problem = f"{self}: {error}"
            raise
        if answer is None:
            self._state = 0
            self.problem = f"{self}: no nsqlookupd is registered: there is no key {self._key}"
            return
        self._state = answer.state
        named = tuple(endpoint for node in answer.node.nodes if (endpoint := _endpoint(node)) is not None)
        if named:
            self.found, self.problem = named, ""
        else:
            self.problem = f"{self}: no nsqlookupd is registered below {self._key}"

    def wait(self) -> None:
        """Return when it may name others. Raises HttpError."""
        self._client.changed(self._key, self._state, WATCH_LIMIT)

    def close(self) -> None:
        """Close the connections that are kept."""
        self._client.close()


class _WireLookupd(msgspec.Struct):
    # youzan/nsq: consistence/leadership.go, NsqLookupdNodeInfo
    NodeIP: str = ""
    HttpPort: str = ""


def _endpoint(node: EtcdNode) -> Endpoint | None:
    """The HTTP address of a registered nsqlookupd; None where the value is no registration."""
    try:
        wire = msgspec.json.decode(node.value, type=_WireLookupd)
        if not _PORT.fullmatch(wire.HttpPort):
            return None
        return Endpoint("http", parse_address((wire.NodeIP, int(wire.HttpPort)), 0))
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ConfigError):
        return None


def etcds_of(urls: Iterable[str], config: LookupConfig) -> list[EtcdLookupds]:
    """What addresses such as ``etcd://host:port/cluster`` name; those of one cluster are members of one etcd.

    ``etcds`` is TLS, with ``lookupd_tls_options``. Raises ConfigError.
    """
    members: dict[tuple[str, str], list[str]] = {}
    for url in urls:
        if "@" in url:
            raise ConfigError("an etcd:// address must hold no user name or password: give EtcdLookupds instead")
        found = _URL.fullmatch(url)
        if found is None:
            raise ConfigError(f"invalid address {url!r}: must be etcd://host:port/cluster, or etcds:// for TLS")
        scheme, host, cluster = found.groups()
        members.setdefault((_SCHEMES[scheme], cluster), []).append(f"{_SCHEMES[scheme]}://{host}")
    tls = config.lookupd_tls_options
    return [EtcdLookupds(hosts, cluster, tls_options=tls) for (_, cluster), hosts in members.items()]
