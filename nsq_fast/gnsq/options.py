"""Translate gnsq's options into those of nsq_fast: of a connection, of TLS, and of urllib3's connection pools."""

from __future__ import annotations

import ssl
import warnings
from collections.abc import Mapping
from typing import Any

from nsq_fast._version import __version__ as our_version
from nsq_fast.errors import ConfigError

from .version import __version__

USERAGENT = f"gnsq/{__version__} nsq_fast/{our_version}"

_SAYS_HOW_TO_VERIFY = {"ca_certs", "cafile", "cert_reqs", "verify"}
# Options of urllib3's pools that have no meaning here.
_POOL_OPTIONS = {"block", "headers", "maxsize", "num_pools", "retries", "socket_options", "strict"}


def connection_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of NsqdTCPClient as options of ours. ``timeout`` bounds connecting and writing, each."""
    translated = {"user_agent": USERAGENT, **options}
    timeout = translated.pop("timeout", None)
    if timeout is not None:
        translated.setdefault("connect_timeout", timeout)
        translated.setdefault("write_timeout", timeout)
    if translated.get("tls_options") is not None:
        translated["tls_options"] = tls_options(translated["tls_options"])
    return translated


def tls_options(options: Any) -> Any:
    """TLS options. The server is not verified where gnsq would not verify it and no option asks for it.

    Without any options the server is verified: gnsq could not connect then.
    """
    if not isinstance(options, Mapping) or _SAYS_HOW_TO_VERIFY & options.keys():
        return options
    warnings.warn(
        "tls_options has neither ca_certs nor cert_reqs: the server's certificate is not verified, as in gnsq",
        RuntimeWarning,
        stacklevel=4,
    )
    return {**options, "verify": False}


def http_options(connection_class: Any, options: Mapping[str, Any]) -> dict[str, Any]:
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
