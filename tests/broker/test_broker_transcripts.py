"""Conversations recorded from a real nsqd, had again with the embedded one and with a real one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.replay import Replay, conversations


@pytest.fixture
def replay(address: Any) -> Iterator[Replay]:
    """A conversation with an nsqd that holds what the recorded one held."""
    publisher = Replay(address)
    publisher.sock.sendall(b"  V2")
    for body in (b"one", b"two", b"three"):
        publisher.sock.sendall(b"PUB r2\n" + len(body).to_bytes(4, "big") + body)
        assert publisher.frame()[8:] == b"OK"
    conversation = Replay(address)
    yield conversation
    conversation.sock.close()
    publisher.sock.close()


@pytest.mark.parametrize("conversation", conversations("original.jsonl"), ids=lambda conversation: conversation["name"])
def test_conversation(replay: Replay, conversation: dict[str, Any]) -> None:
    replay.play(conversation)
