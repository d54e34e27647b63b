"""Conversations recorded from a real nsqd, had again with the embedded one and with a real one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gevent import socket

TRANSCRIPTS = Path(__file__).parents[1] / "data" / "original.jsonl"
CONVERSATIONS = [json.loads(line) for line in TRANSCRIPTS.read_text().splitlines()]
TIMEOUT = 5.0
MESSAGE = b"\0\0\0\2"
HEARTBEAT = b"_heartbeat_"
_VERSION = re.compile(rb'"version":"[^"]*"')


class Replay:
    """One conversation: ids and timestamps are those of today, ids of the record are replaced by them."""

    def __init__(self, address: Any) -> None:
        self.sock = socket.create_connection(address, timeout=TIMEOUT)
        self.ids: dict[bytes, bytes] = {}

    def send(self, data: str) -> None:
        self.sock.sendall(self._of_today(bytes.fromhex(data)))

    def recv(self, data: str) -> None:
        recorded = bytes.fromhex(data)
        try:
            seen = self._frame()
        except EOFError:
            # The last heartbeat to a mute client and its end are due at once; either may come first.
            assert recorded.endswith(HEARTBEAT)
            return
        if recorded[4:8] == MESSAGE:
            self.ids[recorded[18:34]] = seen[18:34]
            recorded = recorded[:8] + seen[8:16] + recorded[16:]
        assert _without_version(seen) == _without_version(self._of_today(recorded))

    def closed(self) -> None:
        assert self.sock.recv(1) == b""

    def silence(self, seconds: float) -> None:
        self.sock.settimeout(seconds)
        with pytest.raises(TimeoutError):
            self.sock.recv(1)
        self.sock.settimeout(TIMEOUT)

    def _frame(self) -> bytes:
        size = self._read(4)
        return size + self._read(int.from_bytes(size, "big"))

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            chunk = self.sock.recv(count - len(data))
            if not chunk:
                raise EOFError("closed by the server")
            data += chunk
        return data

    def _of_today(self, data: bytes) -> bytes:
        for recorded, seen in self.ids.items():
            data = data.replace(recorded, seen)
        return data


def _without_version(frame: bytes) -> bytes:
    # Builds of one release differ in what they call themselves, and so in the frame's size.
    return _VERSION.sub(b"", frame[4:])


@pytest.fixture
def replay(address: Any) -> Iterator[Replay]:
    """A conversation with an nsqd that holds what the recorded one held."""
    publisher = Replay(address)
    publisher.sock.sendall(b"  V2")
    for body in (b"one", b"two", b"three"):
        publisher.sock.sendall(b"PUB r2\n" + len(body).to_bytes(4, "big") + body)
        assert publisher._frame()[8:] == b"OK"
    conversation = Replay(address)
    yield conversation
    conversation.sock.close()
    publisher.sock.close()


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda conversation: conversation["name"])
def test_conversation(replay: Replay, conversation: dict[str, Any]) -> None:
    for step, *arguments in conversation["steps"]:
        getattr(replay, step)(*arguments)
