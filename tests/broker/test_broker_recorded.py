"""Conversations, lookups and random sequences that were recorded with the real servers: ours answer the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.differential import OriginalStage as Stage
from support.differential import embedded_stage
from support.replay import DATA, Replay, conversations
from support.transcripts import Transcript, differences, perform
from support.waiting import WAIT


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


CORPUS = [json.loads(line) for line in (DATA / "original_sequences.jsonl").open()]


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with embedded_stage() as stage:
        yield stage


@pytest.mark.parametrize("recorded", CORPUS, ids=lambda recorded: f"{recorded['kind']} {recorded['seed']}")
def test_answers_are_those_of_the_real_servers(stage: Stage, recorded: dict[str, Any]) -> None:
    real = Transcript(recorded["answers"], recorded["pace"])
    ours = perform(recorded["steps"], stage, recorded["run"], pace=real.pace, quiet=0.005, patience=WAIT)
    assert differences(stage, ours, real) == []
