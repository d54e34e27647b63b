"""NSQ's wire by hand, for tests of servers of both kinds."""

from __future__ import annotations

import json
import struct
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

from gevent import Timeout, socket

from support.waiting import WAIT

RESPONSE, ERROR, MESSAGE = 0, 1, 2


def frame(kind: int, data: bytes) -> bytes:
    return struct.pack(">II", len(data) + 4, kind) + data


def error_frame(text: bytes) -> bytes:
    return frame(ERROR, text)


OK = frame(RESPONSE, b"OK")


def message_frame(message_id: int | bytes, body: bytes = b"body", attempts: int = 1, timestamp: int = 1) -> bytes:
    if isinstance(message_id, int):
        message_id = b"%016x" % message_id
    return frame(MESSAGE, struct.pack(">qH", timestamp, attempts) + message_id + body)


# nsqd's TCP protocol by hand: enough to subscribe, publish and see frames, with no client in between.


class Frame(NamedTuple):
    type: int
    data: bytes

    @property
    def id(self) -> bytes:
        return self.data[10:26]

    @property
    def attempts(self) -> int:
        return int.from_bytes(self.data[8:10], "big")

    @property
    def body(self) -> bytes:
        return self.data[26:]


class WireClient:
    """One connection to an nsqd; every wait fails after WAIT seconds.

    Attributes:
        early: messages that came before the response to a command; ``frame`` returns them first.
    """

    OPEN: ClassVar[WeakSet[WireClient]] = WeakSet()
    """Those that nobody has closed: a folder of tests may close them behind each test."""

    def __init__(self, address: Any, **identify: Any) -> None:
        self.sock = socket.create_connection(address)
        self.reader = self.sock.makefile("rb")
        self.OPEN.add(self)
        self.early: list[Frame] = []
        self.sock.sendall(b"  V2")
        if identify:
            body = json.dumps(identify).encode()
            self.command(b"IDENTIFY\n" + struct.pack(">i", len(body)) + body)

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def command(self, data: bytes) -> bytes:
        self.send(data)
        while (frame := self._read()).type == MESSAGE:
            self.early.append(frame)
        return frame.data

    def subscribe(self, topic: str, channel: str, rdy: int = 1) -> None:
        assert self.command(f"SUB {topic} {channel}\n".encode()) == b"OK"
        self.send(f"RDY {rdy}\n".encode())

    def publish(self, topic: str, body: bytes) -> None:
        assert self.command(f"PUB {topic}\n".encode() + struct.pack(">i", len(body)) + body) == b"OK"

    def frame(self) -> Frame:
        """The next frame that is no heartbeat."""
        return self.early.pop(0) if self.early else self._read()

    def _read(self) -> Frame:
        with Timeout(WAIT, TimeoutError("no frame")):
            while True:
                size, kind = struct.unpack(">ii", self.reader.read(8))
                frame = Frame(kind, self.reader.read(size - 4))
                if frame.data != b"_heartbeat_":
                    return frame
                self.send(b"NOP\n")

    def message(self) -> Frame:
        frame = self.frame()
        assert frame.type == MESSAGE
        self.send(b"FIN " + frame.id + b"\n")
        return frame

    def close(self) -> None:
        self.OPEN.discard(self)
        self.reader.close()
        self.sock.close()


# The redesigned dialect by hand: commands as bytes, and a client that takes its frames apart.


def sized(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def many(*messages: bytes) -> bytes:
    return sized(struct.pack(">I", len(messages)) + b"".join(map(sized, messages)))


def split(data: bytes) -> list[bytes]:
    """The messages in the body of an MPUB."""
    (count,) = struct.unpack_from(">I", data)
    messages, at = [], 4
    for _ in range(count):
        (size,) = struct.unpack_from(">I", data, at)
        messages.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    assert at == len(data)
    return messages


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
        assert frame.type == MESSAGE, frame.data[:100]
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
