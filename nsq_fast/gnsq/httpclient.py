"""HTTPClient: what the clients of nsqd and nsqlookupd share. Requests never block other greenlets."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

from nsq_fast._version import __version__ as our_version
from nsq_fast.client.admin import AdminClient
from nsq_fast.errors import ConfigError

from .version import __version__

__all__ = ["USERAGENT", "HTTPClient"]

USERAGENT = f"gnsq/{__version__} nsq_fast/{our_version}"
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
