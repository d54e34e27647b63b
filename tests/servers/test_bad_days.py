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
from support.bad_days.clusters import EmbeddedCluster, RealCluster
from support.bad_days.faults import LEADERS, NAMES, ROUND, Fault
from support.bad_days.report import Findings, as_json, as_markdown
from support.bad_days.run import Plan, prove
from support.bad_days.windows import percentile

from nsq_fast.broker import ClusterProcess

FULL = 1_000_000
CHANGES = 50
FOLLOWED_WITHIN = 2.0
"""Seconds, as docs/redesigned.md says."""


def rounds(messages: int) -> Sequence[Fault]:
    """Every fault once; then those that change leaders again and again, if all messages are asked for."""
    return [*ROUND, *LEADERS * 3] if messages >= FULL else ROUND


@pytest.mark.timeout(7200)
def test_a_real_cluster(
    real_cluster: RealCluster, request: pytest.FixtureRequest, tmp_path: Path, printed: list[str]
) -> None:
    messages: int = request.config.getoption("--bad-days-messages")
    plan = Plan(messages, rounds(messages), rate=1200.0 if messages >= FULL else 500.0)
    findings = prove(real_cluster, plan, tmp_path, "etcd, 2 nsqlookupds, 3 nsqds")
    folder: Path = request.config.getoption("--bad-days-report") or tmp_path
    printed.extend(write(findings, folder).splitlines())
    assert findings.is_proved
    assert findings.stored >= messages
    for windows in findings.windows.values():
        assert len(windows.all) >= (CHANGES if messages >= FULL else 1)
        assert percentile(windows.ready, 99) < FOLLOWED_WITHIN


def test_the_embedded_cluster(tmp_path: Path) -> None:
    with ClusterProcess(nodes=3, lookupds=2) as servers:
        plan = Plan(1000, ROUND, keys=24, partitions=6, rate=100.0, patience=60.0)
        findings = prove(EmbeddedCluster(servers), plan, tmp_path, "the embedded cluster")
    text = write(findings, tmp_path)
    assert findings.is_proved, text
    assert findings.stored >= 1000
    assert {event.name for event in findings.events} | findings.skipped.keys() == set(NAMES.values())
    assert findings.leader_changes > 0
    assert all(windows.named for windows in findings.windows.values()), text


def write(findings: Findings, folder: Path) -> str:
    """Leave the report in a folder; its text."""
    text = as_markdown(findings)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bad-days.md").write_text(text)
    (folder / "bad-days.json").write_text(json.dumps(as_json(findings), indent=2) + "\n")
    return text
