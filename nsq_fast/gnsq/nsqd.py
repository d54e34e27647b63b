"""Low level clients of one nsqd: TCP, HTTP, and the deprecated two in one."""

from __future__ import annotations

from collections.abc import Iterable
from functools import total_ordering
from typing import Any

from nsq_fast.runtime import NsqdHTTPClient as _NsqdHTTPClient

from .decorators import deprecated
from .httpclient import HTTPClient
from .tcpclient import HOSTNAME, SHORTNAME, NsqdTCPClient

__all__ = ["HOSTNAME", "SHORTNAME", "Nsqd", "NsqdHTTPClient", "NsqdTCPClient"]

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


@total_ordering
class Nsqd:
    """Use NsqdTCPClient or NsqdHTTPClient instead: this is both."""

    @deprecated
    def __init__(self, address: str = "127.0.0.1", tcp_port: int = 4150, http_port: int = 4151, **options: Any) -> None:
        """Use NsqdTCPClient or NsqdHTTPClient instead."""
        self.address = address
        self.tcp_port = tcp_port
        self.http_port = http_port
        self._tcp = NsqdTCPClient(address, tcp_port, **options)
        self._http = NsqdHTTPClient(address, http_port)

    @property
    def base_url(self) -> str:
        """The URL of its HTTP side."""
        return f"http://{self.address}:{self.http_port}/"

    @deprecated
    def publish_tcp(self, topic: str, data: bytes, **options: Any) -> None:
        """Use NsqdTCPClient.publish instead."""
        self._tcp.publish(topic, data, **options)

    @deprecated
    def publish_http(self, topic: str, data: Body, **options: Any) -> bytes:
        """Use NsqdHTTPClient.publish instead."""
        return self._http.publish(topic, data, **options)

    def publish(self, topic: str, data: Any, *args: Any, **options: Any) -> Any:
        """Publish over TCP when that is connected, over HTTP otherwise."""
        return self._publisher.publish(topic, data, *args, **options)

    @deprecated
    def multipublish_tcp(self, topic: str, messages: Iterable[bytes], **options: Any) -> None:
        """Use NsqdTCPClient.multipublish instead."""
        self._tcp.multipublish(topic, messages, **options)

    @deprecated
    def multipublish_http(self, topic: str, messages: Iterable[Body], **options: Any) -> bytes:
        """Use NsqdHTTPClient.multipublish instead."""
        return self._http.multipublish(topic, messages, **options)

    def multipublish(self, topic: str, messages: Iterable[Any], *args: Any, **options: Any) -> Any:
        """Publish over TCP when that is connected, over HTTP otherwise."""
        return self._publisher.multipublish(topic, messages, *args, **options)

    @property
    def _publisher(self) -> Any:
        return self._tcp if self._tcp.is_connected else self._http

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        client = self._tcp if hasattr(self._tcp, name) else self._http
        return getattr(client, name)

    def __str__(self) -> str:
        return f"{self.address}:{self.tcp_port}"

    def __hash__(self) -> int:
        return hash(str(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and str(self) == str(other)

    def __lt__(self, other: Nsqd) -> bool:
        return hash(self) < hash(other)
