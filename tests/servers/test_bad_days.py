"""The redesigned NSQ on its bad days: every fault, one after the other, while messages are published and consumed.

On the embedded cluster a round takes half a minute. With ``--run-real-cluster`` there are
a million messages with 60 keys, and four rounds, in which leaders change more than fifty
times: half an hour (``make proof``). ``--bad-days-messages`` asks for fewer messages, and
then for one round. The report says all that was done and counted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from bad_days.faults import LEADERS, NAMES, ROUND, Fault, kill_a_leader, move_leaders
from bad_days.run import MEANINGS, PROMISED, Event, Findings, Plan, gone, prove
from bad_days.watch import READ, WRITE, Change, Watch, Window, Windows, measure, percentile
from support.cluster import RealCluster
from support.fleet import Fleet
from support.ledger import (
    AGAIN,
    PROBE_KEY,
    STORED_TWICE,
    Kind,
    Ledger,
    Log,
    Pair,
    Row,
    is_refused_by_cluster,
    merged,
    read,
)
from support.waiting import until

from nsq_fast import Producer, Receipt
from nsq_fast.broker import RedesignedCluster
from nsq_fast.names import Address

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


# What judges the bad days sees what it is there to see: each count from rows that are made by hand.


SECOND = 1_000_000_000
HERE, THERE = Address("127.0.0.1", 1), Address("127.0.0.1", 2)


def row(kind: Kind, number: int, at: int = 0, **other: Any) -> Row:
    return Row(**{"node": 1, "partition": 0, "key": 7, "internal_id": number, **other}, kind=kind, number=number, at=at)


def handled(*numbers: int, **other: Any) -> Iterator[Row]:
    for number in numbers:
        yield row(Kind.BEGUN, number, **other)
        yield row(Kind.FINISHED, number, **other)


BEGUN_TWICE = [row(Kind.BEGUN, 0), row(Kind.BEGUN, 1), row(Kind.FINISHED, 0), row(Kind.FINISHED, 1)]
LEDGERS: list[tuple[list[Row], dict[str, Any]]] = [
    # What was answered OK and not finished is missing.
    ([*(row(Kind.STORED, number) for number in range(4)), *handled(0, 2), row(Kind.BEGUN, 3)],
     {"missing": [(7, 1), (7, 3)], "distinct": 3}),
    # A message after a later one of its key is out of order.
    ([*handled(0, 2, 1, 3)], {"disordered": [Pair(7, 1, 2)]}),
    ([*handled(2), *handled(1, key=8)], {"disordered": []}),
    # A message begun before the last was finished is too early.
    ([*BEGUN_TWICE, *handled(2)], {"too_early": [Pair(7, 1, 0)]}),
    # A message that a dead consumer had is begun again before the next.
    ([row(Kind.BEGUN, 0), *handled(0, 1)], {"too_early": [], "disordered": [], "duplicates": {AGAIN: 1}}),
    ([row(Kind.BEGUN, 0), *handled(1)], {"too_early": [Pair(7, 1, 0)]}),
    # Duplicates have a cause.
    ([*handled(0), *handled(0), *handled(0, internal_id=99)], {"duplicates": {AGAIN: 1, STORED_TWICE: 1}}),
    # Keys in two partitions are counted, and probes are not.
    ([*handled(0), row(Kind.BEGUN, 1, partition=1)], {"split_keys": 1, "totals": {Kind.BEGUN: 2, Kind.FINISHED: 1}}),
    ([*handled(3, 1, key=PROBE_KEY)], {"totals": {}}),
]  # fmt: skip


def test_the_ledger_counts_what_is_wrong() -> None:
    for rows, expected in LEDGERS:
        ledger = Ledger(rows)
        assert {name: getattr(ledger, name) for name in expected} == expected, rows


@pytest.mark.parametrize(
    ("ended", "accepted", "is_refused"),
    [(30, [], True), (30, [5], False), (30, [1, 29], True), (30, [1, 12, 29], False), (3, [], False)],
    ids=["never", "in between", "at both ends", "also between", "failed at once"],
)
def test_a_failure_is_the_cluster_s_when_nobody_could_publish(
    ended: int, accepted: list[int], is_refused: bool
) -> None:
    failed = row(Kind.FAILED, 1, at=ended * SECOND)
    assert is_refused_by_cluster(failed, [at * SECOND for at in accepted], 2.0) is is_refused


def test_rows_outlive_a_process_that_is_killed_and_are_merged_by_time(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    program = (
        "import os, signal, sys; from pathlib import Path; from support.ledger import *\n"
        "log = Log(Path(sys.argv[1]))\n"
        "for number in range(100): log.add(Row(Kind.STORED, 7, number, 1, 2, number, 5, 1 << 62, -1))\n"
        "os.write(log._file, b'part of a row')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", program, path], env=environment).returncode == -signal.SIGKILL
    rows = [Row(Kind.STORED, 7, number, 1, 2, number, 5, 1 << 62, -1) for number in range(100)]
    assert list(read(path)) == rows
    later = Log(tmp_path / "later")
    later.add(row(Kind.BEGUN, 1, 50))
    assert [each.at for each in merged([read(path), read(tmp_path / "later")])] == sorted([*range(100), 50])


def change(**fields: Any) -> Change:
    ready = {"publishable": 12 * SECOND, "subscribable": 11 * SECOND, **fields}
    return Change(0, HERE, THERE, named={READ: 10 * SECOND, WRITE: 10 * SECOND}, **ready)


def measured(
    each: Change, *seconds: float, access: str = WRITE, accepted: Sequence[float] = (), over: float = 60.0
) -> Windows:
    rows = [row(kind, 0, int(at * SECOND)) for at in seconds for kind in (Kind.STORED, Kind.BEGUN)]
    rows.append(row(Kind.FAILED, 1, int(over * SECOND)))
    return measure([each], rows, (HERE, THERE), access, 5.0, {0: [int(at * SECOND) for at in accepted]})


@pytest.mark.parametrize(
    ("windows", "ready"),
    [
        (measured(change(), 3.0, 13.5, 14.0), 1.5),
        (measured(change(), 9.9), 0.0),  # there before a plain connection
        (measured(change(), 17.0, accepted=[12.0, 12.5, 16.0, 16.3, 20.0]), 1.0),  # it stalled
        (measured(change(), 17.0, accepted=[12.0, 12.9, 13.8, 14.7, 15.6, 16.5]), 5.0),
        (measured(change(), 17.0, accepted=[12.0]), 5.0),
        (measured(change(subscribable=20 * SECOND), 20.5, access=READ), 0.5),
    ],
    ids=["first success", "before", "stalled", "did not stall", "stalled to the end", "a consumer subscribes"],
)
def test_a_window_ends_with_the_first_success_at_a_leader_that_is_ready(windows: Windows, ready: float) -> None:
    assert windows.ready == [ready]


WITHOUT_SUCCESS = {  # what is passed over, and what never came
    "never comes": (measured(change()), 0, [change()]),
    "never comes to one that led on": (measured(change(ended=40 * SECOND), 41.0), 0, [change(ended=40 * SECOND)]),
    "the run is over soon": (measured(change(), over=13.0), 1, []),
    "never ready": (measured(change(publishable=None)), 1, []),
    "it leads no more soon": (measured(change(ended=13 * SECOND)), 1, []),
    "no subscription": (measured(change(subscribable=None), access=READ), 1, []),
}


def test_a_client_that_never_comes_is_seen_where_there_was_a_leader_for_it() -> None:
    for name, (windows, passed_over, never) in WITHOUT_SUCCESS.items():
        assert (windows.passed_over, windows.never, windows.ready) == (passed_over, never, []), name


def test_percentiles() -> None:
    assert [percentile(values, 99) for values in ([], [2.0], [*map(float, range(101))])] == [0.0, 2.0, 99.0]


def findings(windows: dict[str, Windows] | None = None, **counts: int) -> Findings:
    event = Event("a fault", 0, 5 * SECOND, "what happened", 1.0)
    late = {"consume": Windows([Window(change(), 2.0, 0.1), Window(change(), 3.0, 0.2)])}
    return Findings("three nsqds", 9.5, {**dict.fromkeys(MEANINGS, 0), **counts}, [event], {"x": "not here"},
                    {AGAIN: 9}, {"E_FAILED": 3}, windows or late)  # fmt: skip


@pytest.mark.parametrize(
    "broken", [*({name: 1} for name in PROMISED), {"windows": {"publish": Windows(never=[change()])}}], ids=str
)
def test_a_run_that_broke_a_promise_proves_nothing(broken: dict[str, Any]) -> None:
    assert findings(lost_by_servers=70, refused=3).is_proved
    assert not findings(**broken).is_proved
    assert "WAS NOT SO" in str(findings(**broken))


def test_a_report_has_all_of_it() -> None:
    told = findings(lost_by_servers=70)
    for text in ("What is promised was so.", "gone after a kill: 70", "a fault: what happened", "x: not here", AGAIN):
        assert text in str(told)
    assert "consume, 0.20 s after the leader was ready: partition 0, a fault" in str(told)
    figures = json.loads(json.dumps(told.as_json()))["windows"]["consume"]["named"]
    assert figures == {"n": 2, "p50": 2.5, "p99": pytest.approx(2.99), "most": 3.0}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedesignedCluster]:
    with RedesignedCluster(nodes=2, kind=True) as running:
        yield running


def test_the_watch_sees_a_leader_move(cluster: RedesignedCluster) -> None:
    cluster.create_topic("watched", 1, 2, channels=("ch", "probe"), ordered=True)
    watch = Watch([str(lookupd.http_address) for lookupd in cluster.lookupds], "watched", 1, "probe")
    try:
        until(lambda: watch.accepted[0])
        before = watch.leaders()[0]
        cluster.move_leader("watched", 0)
        until(lambda: watch.changes and watch.changes[0].publishable and watch.changes[0].subscribable)
    finally:
        watch.close()
    (seen,) = watch.changes
    assert (seen.partition, seen.left, seen.leader != before) == (0, before, True)
    assert seen.named.keys() == {READ, WRITE}
    assert seen.publishable is not None
    assert seen.named[WRITE] <= seen.publishable
    assert seen.ended is None


def test_the_audit_finds_what_is_there_and_misses_what_is_not(cluster: RedesignedCluster) -> None:
    cluster.create_topic("audited", 2, 1, channels=("ch",), ordered=True)
    lookupds = [str(lookupd.http_address) for lookupd in cluster.lookupds]
    with Producer((), lookupds) as producer:
        receipts = [producer.publish("audited", b"x", partition=1, trace_id=7 << 40 | number) for number in range(3)]
    ids = [receipt.internal_id for receipt in receipts if isinstance(receipt, Receipt)]
    there = [row(Kind.STORED, number, internal_id=each, partition=1) for number, each in enumerate(ids)]
    taken = there[0]._replace(number=9)
    unknown = there[0]._replace(internal_id=ids[2] + 1000)
    assert gone(lookupds[0], "audited", [*there, taken, unknown]) == [taken, unknown]
