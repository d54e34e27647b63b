"""The redesigned dialect by hand: commands as bytes, and a client that takes its frames apart."""

from __future__ import annotations

import json
import struct
from typing import Any

from .wire import Frame, WireClient


def sized(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def many(*messages: bytes) -> bytes:
    return sized(struct.pack(">I", len(messages)) + b"".join(map(sized, messages)))


def traced(trace_id: int, body: bytes) -> bytes:
    return struct.pack(">Q", trace_id) + body


def headed(header: Any, body: bytes) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack(">H", len(encoded)) + encoded + body


def identify(**fields: Any) -> bytes:
    return b"IDENTIFY\n" + sized(json.dumps(fields).encode())


class Consumer(WireClient):
    """A client that has subscribed; ``receive`` does not finish."""

    def __init__(self, server: Any, subscription: str, rdy: int = 10, **identify: Any) -> None:
        super().__init__(server.tcp_address, **identify)
        assert self.command(f"{subscription}\n".encode()) == b"OK"
        if rdy:
            self.send(f"RDY {rdy}\n".encode())

    def receive(self) -> Frame:
        frame = self.frame()
        assert frame.type == 2, frame
        return frame

    def finish(self, frame: Frame) -> None:
        self.send(b"FIN " + frame.id + b"\n")

    def requeue(self, frame: Frame, delay_ms: int = 0) -> None:
        self.send(b"REQ " + frame.id + f" {delay_ms}\n".encode())

    def is_quiet(self, seconds: float = 0.1) -> bool:
        """Whether nothing comes for a while."""
        self.sock.settimeout(seconds)
        try:
            return not self.sock.recv(1)
        except TimeoutError:
            return True
        finally:
            self.sock.settimeout(None)


def detail(frame: Frame) -> tuple[int, int, bytes]:
    """Offset, size and body of a message with the detail header."""
    offset, size = struct.unpack(">QI", frame.data[26:38])
    return offset, size, frame.data[38:]


def publish(cluster: Any, topic: str, *bodies: bytes, partition: int = 0) -> None:
    client = WireClient(cluster.leader_of(topic, partition).tcp_address)
    for body in bodies:
        assert client.command(f"PUB {topic} {partition}\n".encode() + sized(body)) == b"OK"
    client.close()
