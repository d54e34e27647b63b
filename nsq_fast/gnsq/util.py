"""Addresses as gnsq reads them, IPv6 ones included."""

from __future__ import annotations

import random
from typing import Any

from nsq_fast.names import DEFAULT_NSQD_TCP_PORT, parse_address

from .lookupd import LookupdClient


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
