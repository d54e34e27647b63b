"""Addresses as gnsq reads them, IPv6 ones included; its options of connections and of TLS as those of nsq_fast."""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping
from typing import Any

from nsq_fast.names import DEFAULT_NSQD_TCP_PORT, parse_address

from .httpclient import USERAGENT, LookupdClient

_SAYS_HOW_TO_VERIFY = {"ca_certs", "cafile", "cert_reqs", "verify"}


def normalize_nsqd_address(address: str) -> str:
    """'host:port', with the default port where none is given. Raises TypeError, or ValueError for a bad port."""
    if not isinstance(address, str):
        raise TypeError("nsqd address must be a string")
    return str(parse_address(address, DEFAULT_NSQD_TCP_PORT))


def parse_nsqds(nsqd_tcp_addresses: Any) -> set[str]:
    """One address or several, as a set of 'host:port'."""
    return {normalize_nsqd_address(address) for address in _several("nsqd_tcp_addresses", nsqd_tcp_addresses)}


def parse_lookupds(lookupd_http_addresses: Any) -> list[LookupdClient]:
    """One URL or several, as clients in random order."""
    urls = _several("lookupd_http_addresses", lookupd_http_addresses)
    clients = [LookupdClient.from_url(url) for url in urls]
    random.shuffle(clients)
    return clients


def _several(name: str, value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise TypeError(f"{name} must be a list, set or tuple")
    return list(value)


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
