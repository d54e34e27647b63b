"""Recorded conversations with an nsqd, had again with another: what was sent is sent, what came must come."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from gevent import socket

from support.waiting import WAIT

DATA = Path(__file__).parents[1] / "data"
MESSAGE = b"\0\0\0\2"
HEARTBEAT = b"\0\0\0\x0f\0\0\0\0_heartbeat_"
_VERSION = re.compile(rb'"version":"[^"]*"')


def conversations(name: str) -> list[dict[str, Any]]:
    """The recorded conversations of a file, without what was recorded over HTTP."""
    recorded = [json.loads(line) for line in (DATA / name).read_text().splitlines()]
    return [conversation for conversation in recorded if "steps" in conversation]


class Replay:
    """One conversation: timestamps are those of today, and ids, unless they are to be as recorded."""

    def __init__(self, address: Any, *, same_ids: bool = False) -> None:
        self.sock = socket.create_connection(address, timeout=WAIT)
        self.ids: dict[bytes, bytes] = {}
        self._same_ids = same_ids

    def play(self, conversation: dict[str, Any]) -> None:
        steps = conversation["steps"]
        for (step, *arguments), following in zip(steps, [*steps[1:], []], strict=True):
            if arguments == [HEARTBEAT.hex()] and following == ["closed"]:
                # The next heartbeat is due when the patience of the server ends: a real one may be too late for it.
                assert self.sock.recv(len(HEARTBEAT)) in (HEARTBEAT, b"")
            else:
                getattr(self, step)(*arguments)

    def send(self, data: str) -> None:
        self.sock.sendall(self._of_today(bytes.fromhex(data)))

    def recv(self, data: str) -> None:
        recorded = bytes.fromhex(data)
        seen = self.frame()
        if recorded[4:8] == MESSAGE:
            if not self._same_ids:
                self.ids[recorded[18:34]] = seen[18:34]
            recorded = recorded[:8] + seen[8:16] + recorded[16:]
        assert _without_version(seen) == _without_version(self._of_today(recorded))

    def closed(self) -> None:
        assert self.sock.recv(1) == b""

    def silence(self, seconds: float) -> None:
        self.sock.settimeout(seconds)
        with pytest.raises(TimeoutError):
            self.sock.recv(1)
        self.sock.settimeout(WAIT)

    def frame(self) -> bytes:
        size = self._read(4)
        return size + self._read(int.from_bytes(size, "big"))

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            chunk = self.sock.recv(count - len(data))
            assert chunk, "closed by the server"
            data += chunk
        return data

    def _of_today(self, data: bytes) -> bytes:
        for recorded, seen in self.ids.items():
            data = data.replace(recorded, seen)
        return data


def _without_version(frame: bytes) -> bytes:
    # Builds of one release differ in what they call themselves, and so in the frame's size.
    return _VERSION.sub(b"", frame[4:])
