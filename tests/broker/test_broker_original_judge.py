"""Sequences that a real nsqd and nsqlookupd have answered: the embedded ones answer as they did.

``original_sequences.jsonl`` holds the steps, and what was answered: of those in which they differed once, and of some
in which every command and route is used. More of them are found by tests/servers/test_original_judge.py, which has
random sequences performed on both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.original_stage import Stage, embedded_stage
from support.replay import DATA
from support.transcripts import Transcript, differences, perform
from support.waiting import WAIT

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
