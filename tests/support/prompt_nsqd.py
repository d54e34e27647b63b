"""A program: an nsqd that sends the next ordered message when it has the FIN of the one before. Prints its port."""

from __future__ import annotations

import socket
import struct
import sys
from typing import BinaryIO


def frame(kind: int, data: bytes) -> bytes:
    return struct.pack(">II", len(data) + 4, kind) + data


def wait_for_fin(lines: BinaryIO) -> None:
    """Read up to the end of a FIN, past other commands. Its id is binary: it may hold what ends a line."""
    while (word := lines.read(4)) != b"FIN ":
        assert word, "the client has gone"
        lines.readline()
    lines.read(16 + len(b"\n"))


def main(count: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with sock, sock.makefile("rb") as lines:
        lines.read(len(b"  V2IDENTIFY\n"))
        lines.read(struct.unpack(">I", lines.read(4))[0])
        sock.sendall(frame(0, b'{"version": "0.3.7-HA.1.13.0", "max_rdy_count": 2500}'))
        lines.readline()
        sock.sendall(frame(0, b"OK"))
        lines.readline()  # RDY
        for sequence in range(1, count + 1):
            sock.sendall(frame(2, struct.pack(">qHQQQI", 1, 1, sequence, 0, 40 * sequence, 40) + b"body"))
            wait_for_fin(lines)


if __name__ == "__main__":
    main(int(sys.argv[1]))
