"""HTTP clients of nsqd and nsqlookupd. Requests never block other greenlets."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Mapping
from typing import Any

from nsq_fast import __version__ as our_version
from nsq_fast.client.admin import AdminClient, LookupdHTTPClient
from nsq_fast.client.admin import NsqdHTTPClient as _NsqdHTTPClient
from nsq_fast.client.http import parse_endpoint
from nsq_fast.errors import ConfigError
from nsq_fast.names import DEFAULT_LOOKUPD_HTTP_PORT

from .basics import __version__, deprecated

USERAGENT: str = f"gnsq/{__version__} nsq_fast/{our_version}"
# Options of urllib3's pools that have no meaning here.
_POOL_OPTIONS = {"block", "headers", "maxsize", "num_pools", "retries", "socket_options", "strict"}


class HTTPClient(AdminClient):
    """An HTTP client of one server.

    Args:
        useragent: value of the User-Agent header.
        connection_class: a pool class of urllib3; only its scheme (http, https) matters.
        options: of such a pool: ``timeout`` (s), ``ca_certs``, ``cert_reqs``, ``cert_file``, ``key_file``. Others
            that urllib3 knows are ignored.
    """

    def __init__(
        self,
        host: str = "localhost",
        port: int | None = None,
        useragent: str = USERAGENT,
        connection_class: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(host, port, user_agent=useragent, **_options(connection_class, options))
        self.useragent = useragent

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address!r}>"


def _options(connection_class: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of urllib3's connection pools as options of our HTTP clients."""
    left = {name: value for name, value in options.items() if name not in _POOL_OPTIONS}
    translated: dict[str, Any] = {"scheme": left.pop("scheme", None) or getattr(connection_class, "scheme", "http")}
    timeout = left.pop("timeout", None)
    timeout = getattr(timeout, "total", timeout)  # a urllib3.Timeout
    if isinstance(timeout, (int, float)):
        translated["timeout"] = timeout
    if "authorization" in left:
        translated["authorization"] = left.pop("authorization")
    tls = left.pop("tls_options", None) or _https_options(left)
    if left:
        raise ConfigError(f"unknown options: {', '.join(sorted(left))}")
    return translated | {"tls_options": tls}


def _https_options(left: dict[str, Any]) -> Any:
    """Take the TLS options of an HTTPSConnectionPool out of ``left``."""
    context = left.pop("ssl_context", None)
    names = {"ca_certs": "cafile", "cert_file": "certfile", "key_file": "keyfile"}
    tls = {ours: left.pop(theirs) for theirs, ours in names.items() if theirs in left}
    if "cert_reqs" in left:
        tls["verify"] = left.pop("cert_reqs") not in (ssl.CERT_NONE, "CERT_NONE", "NONE")
    return context if context is not None else tls or None


Body = bytes | str


class NsqdHTTPClient(HTTPClient, _NsqdHTTPClient):
    """HTTP client of one nsqd (default port 4151). Text is published as UTF-8."""

    def publish(self, topic: str, data: Body, defer: int | None = None, **options: Any) -> bytes:
        """Publish one message, ``defer`` milliseconds from now if given; return ``b"OK"``."""
        return super().publish(topic, _encoded(data), defer, **options)

    def multipublish(self, topic: str, messages: Iterable[Body], binary: bool = False, **options: Any) -> bytes:
        """Publish several messages at once; return ``b"OK"``. Without ``binary`` none may hold a newline."""
        return super().multipublish(topic, map(_encoded, messages), binary, **options)


def _encoded(data: Body) -> bytes:
    return data.encode() if isinstance(data, str) else data


class LookupdClient(HTTPClient, LookupdHTTPClient):
    """HTTP client of one nsqlookupd (default port 4161)."""


class Lookupd(LookupdClient):
    """Use :class:`LookupdClient` instead."""

    @deprecated
    def __init__(self, address: str = "http://localhost:4161/", **options: Any) -> None:
        """Use LookupdClient.from_url instead."""
        endpoint = parse_endpoint(address, DEFAULT_LOOKUPD_HTTP_PORT)
        given = {"host": endpoint.address.host, "port": endpoint.address.port, "scheme": endpoint.scheme}
        super().__init__(**{**given, **options})

    @property
    @deprecated
    def base_url(self) -> str:
        """Use LookupdClient.address instead."""
        return self.address

    @deprecated
    def tombstone_topic_producer(self, topic: str, node: str) -> None:
        """Use LookupdClient.tombstone_topic instead."""
        self.tombstone_topic(topic, node)
