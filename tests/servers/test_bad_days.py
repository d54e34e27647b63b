"""The redesigned NSQ on its bad days: every fault, one after the other, while messages are published and consumed.

On the embedded cluster a round takes half a minute. With ``--run-real-cluster`` there are
a million messages with 60 keys, and four rounds, in which leaders change more than fifty
times: half an hour (``make proof``). ``--bad-days-messages`` asks for fewer messages, and
then for one round. The report says all that was done and counted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.bad_days.faults import LEADERS, NAMES, ROUND, Fault, kill_a_leader, move_leaders
from support.bad_days.run import Findings, Plan, prove
from support.bad_days.watch import percentile
from support.fleet import Fleet, RealFleet

FULL = 1_000_000
CHANGES = 50
FOLLOWED_WITHIN = 2.0
"""Seconds, as docs/redesigned.md says."""


def rounds(messages: int) -> Sequence[Fault]:
    """Every fault once; then those that change leaders again and again, if all messages are asked for."""
    return [*ROUND, *LEADERS * 3] if messages >= FULL else ROUND


@pytest.mark.timeout(7200)
def test_a_real_cluster(
    real_cluster: RealFleet, request: pytest.FixtureRequest, tmp_path: Path, printed: list[str]
) -> None:
    messages: int = request.config.getoption("--bad-days-messages")
    plan = Plan(messages, rounds(messages), rate=1200.0 if messages >= FULL else 500.0)
    findings = prove(real_cluster, plan, tmp_path, "etcd, 2 nsqlookupds, 3 nsqds")
    printed.extend(write(findings, request.config.getoption("--bad-days-report") or tmp_path).splitlines())
    assert findings.is_proved
    assert findings.counts["stored"] >= messages
    for windows in findings.windows.values():
        assert len(windows.all) >= (CHANGES if messages >= FULL else 1)
        assert percentile(windows.ready, 99) < FOLLOWED_WITHIN


def test_the_embedded_cluster(embedded_fleet: Fleet, tmp_path: Path) -> None:
    plan = Plan(1000, ROUND, keys=24, partitions=6, rate=100.0, patience=60.0)
    findings = prove(embedded_fleet, plan, tmp_path, embedded_fleet.name)
    text = write(findings, tmp_path)
    assert findings.is_proved, text
    assert findings.counts["stored"] >= 1000
    assert {event.name for event in findings.events} | findings.skipped.keys() == set(NAMES.values())
    assert findings.counts["leader_changes"] > 0
    assert all(windows.all for windows in findings.windows.values()), text


def test_an_unordered_topic_in_trouble_loses_nothing(fleet: Fleet, tmp_path: Path, printed: list[str]) -> None:
    faults = (move_leaders, kill_a_leader, move_leaders)
    plan = Plan(3000, faults, keys=24, partitions=3, rate=100.0, ordered=False, patience=120.0)
    findings = prove(fleet, plan, tmp_path, fleet.name)
    printed.append(str(findings))
    assert findings.is_proved, str(findings)
    assert findings.counts["stored"] >= 3000
    assert len(findings.events) == 3


def write(findings: Findings, folder: Path) -> str:
    """Leave the report in a folder; its text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bad-days.md").write_text(str(findings))
    (folder / "bad-days.json").write_text(json.dumps(findings.as_json(), indent=2) + "\n")
    return str(findings)
