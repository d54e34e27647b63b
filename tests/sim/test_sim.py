"""The real client through hours of faults, in virtual time; see ``runner``.

Each run is a process of its own: which order a set has must be the same when a seed is replayed. ``make quick`` runs
``QUICK`` seeds of each scenario, ``make test`` those of ``MORE`` besides; ``make sim SEEDS=0:100000`` is for nights.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.waiting import PROCESS

from .runner import SCENARIOS

TESTS = Path(__file__).parents[1]


def simulation(*arguments: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(TESTS.parent), **variables}
    done = subprocess.run(
        [sys.executable, "-m", "sim", *arguments],
        cwd=TESTS, env=environment, capture_output=True, text=True, timeout=4 * PROCESS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


QUICK = 75
MORE = {"connection": 1400, "producer": 2400, "consumer": 850, "lookup": 350}
"""Each to its end: 5,000 seeds, in 100 s of CPU, about."""


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_rules_hold_through_faults(scenario: str) -> None:
    assert f"{scenario}: {QUICK} seeds" in simulation(scenario, f"0:{QUICK}")


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_rules_hold_through_more_faults(scenario: str) -> None:
    end = MORE[scenario]
    assert f"{scenario}: {end - QUICK} seeds" in simulation(scenario, f"{QUICK}:{end}")


@pytest.mark.slow
def test_planted_faults_are_found() -> None:
    assert "MISSED" not in simulation("planted", "0:150")


def test_a_seed_does_the_same_again() -> None:
    """Also where objects have other addresses, and so sets of them another order."""
    first, second = (simulation("all", "0:8", "--digest", PYTHONMALLOC=kind) for kind in ("pymalloc", "malloc"))
    of_seeds = [line for line in first.splitlines() if " of CPU" not in line]
    assert of_seeds == [line for line in second.splitlines() if " of CPU" not in line]
    assert of_seeds
