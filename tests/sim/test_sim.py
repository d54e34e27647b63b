"""The real client through hours of faults, in virtual time; see ``runner``.

Each run is a process of its own: which order a set has must be the same when a seed is replayed. ``make sim
SEEDS=0:100000`` is for nights.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.waiting import PROCESS

TESTS = Path(__file__).parents[1]


def simulation(*arguments: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(TESTS.parent)}
    done = subprocess.run(
        [sys.executable, "-m", "sim", *arguments],
        cwd=TESTS, env=environment, capture_output=True, text=True, timeout=4 * PROCESS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("scenario", "seeds"), [("connection", 100), ("producer", 100), ("consumer", 40)])
def test_the_rules_hold_through_faults(scenario: str, seeds: int) -> None:
    assert f"{scenario}: {seeds} seeds" in simulation(scenario, f"0:{seeds}")


def test_planted_faults_are_found() -> None:
    assert "MISSED" not in simulation("planted", "0:150")


def test_a_seed_does_the_same_again() -> None:
    first, second = (simulation("all", "0:5", "--digest") for _ in range(2))
    of_seeds = [line for line in first.splitlines() if " of CPU" not in line]
    assert of_seeds == [line for line in second.splitlines() if " of CPU" not in line]
    assert of_seeds
