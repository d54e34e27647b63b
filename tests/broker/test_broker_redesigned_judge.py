"""Sequences in which the embedded cluster answered otherwise than the real one: it answers as that one did.

``redesigned_differences.jsonl`` holds for each of them the steps, and what the real cluster answered. More of them are
found by tests/servers/test_judge.py, which has random sequences performed on both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.differential import Stage, open_stage
from support.replay import DATA
from support.transcripts import Place, Transcript, differences, perform
from support.waiting import WAIT

from nsq_fast.broker import RedesignedCluster

CORPUS = [json.loads(line) for line in (DATA / "redesigned_differences.jsonl").open()]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedesignedCluster]:
    with RedesignedCluster(2, 2, readiness=0.0) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def stages(cluster: RedesignedCluster) -> dict[str, Stage]:
    """One for each slot that sequences were recorded on."""
    first, second = (lookupd.http_address for lookupd in cluster.lookupds)
    one, other = (Place(node.tcp_address, node.http_address) for node in cluster.nsqds)
    return {slot: open_stage(slot, (first, second), (one, other)) for slot in {each["slot"] for each in CORPUS}}


@pytest.mark.parametrize("recorded", CORPUS, ids=lambda recorded: f"{recorded['kind']} {recorded['seed']}")
def test_answers_are_those_of_the_real_cluster(stages: dict[str, Stage], recorded: dict[str, Any]) -> None:
    real = Transcript(recorded["answers"], recorded["pace"])
    stage, run = stages[recorded["slot"]], recorded["run"]
    ours = perform(recorded["steps"], stage, run, pace=real.pace, quiet=0.005, patience=WAIT)
    assert differences(stage, ours, real) == []
