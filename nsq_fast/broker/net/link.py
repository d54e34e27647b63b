"""A TCP proxy that misbehaves on demand: between a client and a server that behave."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from gevent import joinall, sleep, socket, spawn
from gevent.event import Event
from gevent.server import StreamServer

from nsq_fast.names import DEFAULT_NSQD_TCP_PORT, Address, parse_address

_GARBAGE = b"\xff" * 64


class FaultyLink:
    """A TCP proxy whose faults are switched while it runs.

    Args:
        target: the server behind it.
        listen: where clients connect; port 0 is a free port.

    Attributes:
        address: where clients connect.
        delay: seconds that each chunk waits, in both directions.
        chunk: most bytes passed on at once; 0 passes them as they come.
        connections: how many connections were accepted so far.
    """

    def __init__(self, target: Address | str, listen: Address | tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.target = parse_address(target, DEFAULT_NSQD_TCP_PORT)
        self.delay = 0.0
        self.chunk = 0
        self.connections = 0
        self._refusing = False
        self._flowing = Event()
        self._flowing.set()
        self._pairs: set[tuple[Any, Any]] = set()
        self._garbled: set[tuple[Any, Any]] = set()
        self._server = StreamServer(listen, self._serve)
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

    def garble(self) -> None:
        """Put bytes that are no protocol into what the server sends next on each open connection; then stay silent.

        What follows the garbage is swallowed, so that no real bytes are misread as something else.
        """
        self._garbled.update(self._pairs)

    def close(self) -> None:
        """Stop the proxy and close its connections."""
        self._server.stop()
        self.cut()

    def _serve(self, client: Any, _peer: object) -> None:
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
        try:
            return socket.create_connection(self.target)
        except OSError:
            client.close()
            return None

    def _pump(self, source: Any, sink: Any, pair: tuple[Any, Any]) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if pair in self._garbled:
                    sink.sendall(b"" if source is pair[0] else _GARBAGE)
                else:
                    self._pass_on(data, sink)
        self._close(pair)

    def _pass_on(self, data: bytes, sink: Any) -> None:
        size = self.chunk or len(data)
        for start in range(0, len(data), size):
            self._flowing.wait()
            if self.delay or self.chunk:
                sleep(self.delay)
            sink.sendall(data[start : start + size])

    def _close(self, pair: tuple[Any, Any]) -> None:
        self._pairs.discard(pair)
        self._garbled.discard(pair)
        for sock in pair:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
