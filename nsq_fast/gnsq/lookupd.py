"""HTTP clients of nsqlookupd."""

from __future__ import annotations

from typing import Any

from nsq_fast.client.admin import LookupdHTTPClient
from nsq_fast.client.http import parse_endpoint
from nsq_fast.names import DEFAULT_LOOKUPD_HTTP_PORT

from .decorators import deprecated
from .httpclient import HTTPClient

__all__ = ["Lookupd", "LookupdClient"]


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
