"""A pytest plugin for programs that use nsq_fast, and for nsq_fast itself.

Fixtures:
    nsq_broker    an embedded nsqd with an nsqlookupd, fresh for the test
    nsq_link      a factory of faulty links: TCP proxies that delay, split, stall and cut

Nothing of gevent is imported before a fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from .names import DEFAULT_NSQD_TCP_PORT, Address, parse_address

if TYPE_CHECKING:
    from .broker import Broker


class FaultyLink:
    """A TCP proxy on loopback whose faults are switched while it runs.

    Attributes:
        address: where clients connect.
        delay: seconds that each chunk waits, in both directions.
        chunk: most bytes passed on at once; 0 passes them as they come.
        connections: how many connections were accepted so far.
    """

    def __init__(self, target: Address | str) -> None:
        from gevent.event import Event
        from gevent.server import StreamServer

        self.target = parse_address(target, DEFAULT_NSQD_TCP_PORT)
        self.delay = 0.0
        self.chunk = 0
        self.connections = 0
        self._refusing = False
        self._flowing = Event()
        self._flowing.set()
        self._pairs: set[tuple[Any, Any]] = set()
        self._server = StreamServer(("127.0.0.1", 0), self._serve)
        self._server.start()
        self.address = Address(*self._server.address)

    def stall(self) -> None:
        """Pass nothing on, with every connection left open."""
        self._flowing.clear()

    def flow(self) -> None:
        """End ``stall`` and ``refuse``."""
        self._refusing = False
        self._flowing.set()

    def refuse(self) -> None:
        """Close new connections at once."""
        self._refusing = True

    def cut(self) -> None:
        """Close every connection that is open now."""
        for pair in list(self._pairs):
            self._close(pair)

    def close(self) -> None:
        """Stop the proxy and close its connections."""
        self._server.stop()
        self.cut()

    def _serve(self, client: Any, _peer: object) -> None:
        from gevent import joinall, spawn

        self.connections += 1
        if self._refusing:
            client.close()
            return
        server = self._connect(client)
        if server is None:
            return
        pair = (client, server)
        self._pairs.add(pair)
        joinall([spawn(self._pump, client, server, pair), spawn(self._pump, server, client, pair)])

    def _connect(self, client: Any) -> Any:
        from gevent import socket

        try:
            return socket.create_connection(self.target)
        except OSError:
            client.close()
            return None

    def _pump(self, source: Any, sink: Any, pair: tuple[Any, Any]) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self._pass_on(data, sink)
        self._close(pair)

    def _pass_on(self, data: bytes, sink: Any) -> None:
        from gevent import sleep

        size = self.chunk or len(data)
        for start in range(0, len(data), size):
            self._flowing.wait()
            if self.delay or self.chunk:
                sleep(self.delay)
            sink.sendall(data[start : start + size])

    def _close(self, pair: tuple[Any, Any]) -> None:
        from gevent import socket

        self._pairs.discard(pair)
        for sock in pair:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


@pytest.fixture
def nsq_broker() -> Iterator[Broker]:
    """An embedded nsqd and nsqlookupd in this process, stopped after the test."""
    from .broker import Broker

    with Broker() as broker:
        yield broker


@pytest.fixture
def nsq_link() -> Iterator[Callable[[Address | str], FaultyLink]]:
    """A factory: ``nsq_link(address)`` gives a FaultyLink to that address, closed after the test."""
    links: list[FaultyLink] = []

    def make(target: Address | str) -> FaultyLink:
        links.append(FaultyLink(target))
        return links[-1]

    yield make
    for link in links:
        link.close()
