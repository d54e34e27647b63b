"""The other end of one connection, played by a function: a server that follows a script, byte by byte.

For tests of transport and connection. ``script(peer)`` runs in a greenlet for
every accepted connection; when it returns, the connection is closed.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

import snappy
from gevent import socket
from gevent.server import StreamServer

from nsq_fast.names import Address
from support.wire import frame, message_frame


class Peer:
    """One accepted connection."""

    def __init__(self, sock: Any) -> None:
        self.sock = sock
        self._encode: Callable[[bytes], bytes] = bytes
        self._decode: Callable[[bytes], bytes] = bytes
        self._buffer = b""

    def send(self, data: bytes) -> None:
        self.sock.sendall(self._encode(data))

    def recv(self) -> bytes:
        """One read, decoded; b"" at the end."""
        while True:
            data = self.sock.recv(65536)
            decoded = self._decode(data)
            if decoded or not data:
                return decoded

    def read(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._fill()
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data

    def read_line(self) -> bytes:
        while b"\n" not in self._buffer:
            self._fill()
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _fill(self) -> None:
        data = self.recv()
        if not data:
            raise EOFError(f"more was wanted, then came the end after {self._buffer!r}")
        self._buffer += data

    def read_all(self) -> bytes:
        """Everything until the end of the stream."""
        data, self._buffer = self._buffer, b""
        while piece := self.recv():
            data += piece
        return data

    def read_body(self) -> bytes:
        return self.read(struct.unpack(">I", self.read(4))[0])

    def frame(self, kind: int, data: bytes) -> None:
        self.send(frame(kind, data))

    def ok(self) -> None:
        self.frame(0, b"OK")

    def messages(self, *numbers: int, body: bytes = b"body") -> None:
        self.send(b"".join(message_frame(number, body) for number in numbers))

    def handshake(self, **fields: Any) -> dict[str, Any]:
        """Read the magic and IDENTIFY, answer with ``fields``; what IDENTIFY said."""
        identify = self.read_identify()
        self.frame(0, json.dumps({"version": "1.3.0", "max_rdy_count": 2500, **fields}).encode())
        return identify

    def read_identify(self) -> dict[str, Any]:
        assert self.read(4) == b"  V2"
        assert self.read_line() == b"IDENTIFY"
        identify: dict[str, Any] = json.loads(self.read_body())
        return identify

    def accept_sub(self, **fields: Any) -> None:
        """The handshake, then OK to SUB."""
        self.handshake(**fields)
        assert self.read_line().startswith(b"SUB ")
        self.ok()

    def start_tls(self, context: Any) -> None:
        self.sock = context.wrap_socket(self.sock, server_side=True)

    def start_deflate(self) -> None:
        compressor = zlib.compressobj(1, zlib.DEFLATED, -15)
        self._decode = zlib.decompressobj(-15).decompress
        self._encode = lambda data: compressor.compress(data) + compressor.flush(zlib.Z_SYNC_FLUSH)

    def start_snappy(self) -> None:
        self._decode = snappy.StreamDecompressor().decompress
        self._encode = snappy.StreamCompressor().compress

    def reset(self) -> None:
        """Close so that the other end gets a reset."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


class PeerServer:
    """Listens on a free port and runs ``script(peer)`` for every connection.

    ``stop()`` raises what a script failed with; connections that we broke are no failure.
    """

    def __init__(self, script: Callable[[Any], Any], host: str = "127.0.0.1") -> None:
        self._script = script
        self._failures: list[BaseException] = []
        self.count = 0
        self._server = StreamServer((host, 0), self._serve)
        self._server.start()
        self.address = Address(*self._server.address[:2])
        self.listener = self._server.socket

    def make_peer(self, sock: Any) -> Peer:
        """One connection has come."""
        return Peer(sock)

    def _serve(self, sock: Any, _: object) -> None:
        self.count += 1
        peer = self.make_peer(sock)
        try:
            self._script(peer)
        except (OSError, EOFError):
            pass
        except Exception as error:
            self._failures.append(error)
        finally:
            peer.sock.close()

    def stop(self) -> None:
        self._server.stop(timeout=0.1)
        self._check()

    def _check(self) -> None:
        if self._failures:
            raise self._failures[0]
