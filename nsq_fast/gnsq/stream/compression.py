"""Sockets whose bytes are compressed on their way."""

from __future__ import annotations

from typing import Any

from nsq_fast.client.layers import DeflateLayer, Layer, SnappyLayer

READ_SIZE = 64 * 1024


class CompressionSocket:
    """Wraps a socket with a compression layer of nsq_fast. Every other attribute is the socket's."""

    def __init__(self, socket: Any, layer: Layer) -> None:
        self._socket = socket
        self._layer = layer
        self._ready = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def bootstrap(self, data: bytes) -> None:
        """Take compressed bytes that were received before."""
        if data:
            self._layer.feed(data)

    def recv(self, size: int) -> bytes:
        """Read at most ``size`` bytes; blocks until there are some, ``b""`` at the end of the stream."""
        while not self._ready:
            self._ready = self._layer.read()
            if self._ready:
                break
            received = self._socket.recv(READ_SIZE)
            if not received:
                return b""
            self._layer.feed(received)
        data, self._ready = self._ready[:size], self._ready[size:]
        return data

    def sendall(self, data: bytes) -> None:
        self._socket.sendall(self.compress(data))

    def compress(self, data: bytes) -> bytes:
        return self._layer.encode(data)

    def decompress(self, data: bytes) -> bytes:
        """As much of the data as these compressed bytes complete."""
        self._layer.feed(data)
        return b"".join(iter(self._layer.read, b""))


class DefalteSocket(CompressionSocket):
    """A socket with raw deflate of the given level."""

    def __init__(self, socket: Any, level: int) -> None:
        super().__init__(socket, DeflateLayer(level))


class SnappySocket(CompressionSocket):
    """A socket with snappy in its framing format."""

    def __init__(self, socket: Any) -> None:
        super().__init__(socket, SnappyLayer())
