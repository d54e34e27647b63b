"""The state of an nsqd: its topics. No sockets; the TCP server and the HTTP server work on it.

nsqd = Nsqd(options); nsqd.start()  (loads, starts the queue scan)   nsqd.close()  (flushes)   nsqd.kill() (as SIGKILL: nothing is flushed)
tcp = NsqdTcp(nsqd, faults)         (broker/tcp.py)   Listener("nsqd", sock, tcp.handle, faults.tcp)   tcp.close() drops all clients
server_context(options) -> SSLContext | None          (broker/upgrade.py; also for HTTPS)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .options import NsqdOptions
from .topic import Topic


class NotFound(KeyError):
    """No such topic or channel."""


class Exiting(RuntimeError):
    """The topic or nsqd is closing."""


class Nsqd:
    options: NsqdOptions
    topics: dict[str, Topic]
    clients: set[Any]  # every TCP connection; client.stats(); client.pub_counts: dict[str, int] (producers have some)
    started_at: float  # seconds since the epoch
    error: Exception | None  # last disk error: /ping says NOK
    # new topics: called with the topic name, blocking; channels to create first (register.py sets it from lookupd)
    lookup_channels: Callable[[str], list[str]] | None

    def __init__(self, options: NsqdOptions) -> None: ...
    def start(self) -> None: ...
    def close(self) -> None: ...
    def kill(self) -> None: ...
    def get_topic(self, name: str) -> Topic:  # creates
        ...

    def existing_topic(self, name: str) -> Topic:  # raises NotFound
        ...

    def delete_topic(self, name: str) -> None:  # raises NotFound
        ...

    def subscribe(self, listener: Callable[[str, str, str | None], None]) -> None:
        """Call ``listener(event, topic, channel)`` for "create" and "delete"; channel None means the topic itself."""

    def set_options(self, **changes: Any) -> None:
        """Change options at run time (PUT /config)."""
