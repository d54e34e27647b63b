"""What judges the bad days sees what it is there to see: each count from rows that are made by hand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.bad_days import audit
from support.bad_days.check import AGAIN, Check, Counts, Pair, is_refused_by_cluster
from support.bad_days.faults import NAMES, ROUND
from support.bad_days.records import PROBE_KEY, Kind, Log, Row, merged, read
from support.bad_days.report import WIDTH, Event, Findings, as_json, as_markdown
from support.bad_days.watch import READ, WRITE, Change, Watch
from support.bad_days.windows import Firsts, Window, Windows, measure, percentile
from support.judge import STORED_TWICE
from support.waiting import until

from nsq_fast import Producer, Receipt
from nsq_fast.broker import RedesignedCluster
from nsq_fast.names import Address

SECOND = 1_000_000_000
HERE, THERE = Address("127.0.0.1", 1), Address("127.0.0.1", 2)


def row(kind: Kind, number: int, at: int = 0, **other: Any) -> Row:
    fields = {"node": 1, "partition": 0, "key": 7, "since": 0, "internal_id": number, "offset": -1, **other}
    return Row(kind=kind, number=number, at=at, **fields)


def counted(*rows: Row) -> Counts:
    check = Check()
    check.take_all(rows)
    return check.counts()


def handled(*numbers: int) -> Iterator[Row]:
    for number in numbers:
        yield row(Kind.BEGUN, number)
        yield row(Kind.FINISHED, number)


def test_what_was_answered_ok_and_not_finished_is_missing() -> None:
    stored = [row(Kind.STORED, number) for number in range(4)]
    counts = counted(*stored, *handled(0, 2), row(Kind.BEGUN, 3))
    assert counts.missing == [(7, 1), (7, 3)]
    assert (counts.stored, counts.handled, counts.distinct) == (4, 3, 3)


def test_a_message_after_a_later_one_of_its_key_is_out_of_order() -> None:
    assert counted(*handled(0, 2, 1, 3)).disordered == [Pair(7, 1, 2)]
    other = [each._replace(key=8) for each in handled(1)]
    assert counted(*handled(2), *other).disordered == []


def test_a_message_begun_before_the_last_was_finished_is_too_early() -> None:
    begun = [row(Kind.BEGUN, 0), row(Kind.BEGUN, 1), row(Kind.FINISHED, 0), row(Kind.FINISHED, 1)]
    assert counted(*begun, *handled(2)).too_early == [Pair(7, 1, 0)]


def test_a_message_that_a_dead_consumer_had_is_begun_again_before_the_next() -> None:
    counts = counted(row(Kind.BEGUN, 0), *handled(0, 1))
    assert (counts.too_early, counts.disordered, counts.duplicates) == ([], [], {AGAIN: 1})
    assert counted(row(Kind.BEGUN, 0), *handled(1)).too_early == [Pair(7, 1, 0)]


def test_duplicates_have_a_cause() -> None:
    twice = [each._replace(internal_id=99) for each in handled(0)]
    assert counted(*handled(0), *handled(0), *twice).duplicates == {AGAIN: 1, STORED_TWICE: 1}


def test_keys_in_two_partitions_and_partitions_that_went_back_are_counted() -> None:
    counts = counted(*handled(0), row(Kind.BEGUN, 1, partition=1), row(Kind.ROLLBACK, 1, partition=1))
    assert (counts.split_keys, counts.rollbacks) == (1, 1)


def test_probes_are_not_judged() -> None:
    probes = [each._replace(key=PROBE_KEY) for each in handled(3, 1)]
    assert counted(*probes).handled == 0


@pytest.mark.parametrize(
    ("accepted", "is_refused"),
    [([], True), ([5], False), ([1, 29], True), ([1, 12, 29], False)],
    ids=["never", "in between", "at both ends", "also between"],
)
def test_a_failure_is_the_cluster_s_when_nobody_could_publish(accepted: list[int], is_refused: bool) -> None:
    failed = row(Kind.FAILED, 1, at=30 * SECOND, since=0)
    assert is_refused_by_cluster(failed, [at * SECOND for at in accepted], 2.0) is is_refused


def test_a_failure_at_once_is_never_the_cluster_s() -> None:
    assert not is_refused_by_cluster(row(Kind.FAILED, 1, at=3 * SECOND, since=0), [], 2.0)


def test_rows_outlive_a_process_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    program = (
        "import os, signal, sys; from pathlib import Path; from support.bad_days.records import *\n"
        "log = Log(Path(sys.argv[1]))\n"
        "for number in range(100): log.add(Row(Kind.STORED, 1, 2, 7, number, number, 0, number, -1))\n"
        "os.write(log._file, b'part of a row')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", program, path], env=environment).returncode == -signal.SIGKILL
    assert [each.number for each in read(path)] == list(range(100))


def test_logs_are_merged_by_time(tmp_path: Path) -> None:
    for name, times in (("a", (1, 4)), ("b", (2, 3))):
        log = Log(tmp_path / name)
        for at in times:
            log.add(row(Kind.BEGUN, at, at))
    assert [each.at for each in merged(read(tmp_path / name) for name in "ab")] == [1, 2, 3, 4]


def change(**fields: Any) -> Change:
    ready = {"publishable": 12 * SECOND, "subscribable": 11 * SECOND, **fields}
    return Change(0, HERE, THERE, named={READ: 10 * SECOND, WRITE: 10 * SECOND}, **ready)


def measured(each: Change, *seconds: float, access: str = WRITE, accepted: Sequence[float] = ()) -> Windows:
    rows = [row(Kind.STORED, 0, int(at * SECOND)) for at in seconds]
    return measure(
        [each], Firsts(rows, Kind.STORED), (HERE, THERE), access, 5.0, {0: [int(at * SECOND) for at in accepted]}
    )


def test_a_window_ends_with_the_first_success_at_the_new_leader() -> None:
    windows = measured(change(), 3.0, 13.5, 14.0)
    assert (windows.named, windows.ready) == ([3.5], [1.5])


def test_a_leader_that_stalls_is_ready_when_it_takes_publishes_again() -> None:
    assert measured(change(), 17.0, accepted=[12.0, 12.5, 16.0, 16.3, 20.0]).ready == [1.0]
    assert measured(change(), 17.0, accepted=[12.0, 12.9, 13.8, 14.7, 15.6, 16.5]).ready == [5.0]
    assert measured(change(), 17.0, accepted=[12.0]).ready == [5.0]


def test_a_client_that_is_there_before_a_plain_connection_has_no_window() -> None:
    assert measured(change(), 9.9).ready == [0.0]


def test_a_client_that_never_comes_is_seen() -> None:
    assert measured(change()).never == [change()]
    assert measured(change(ended=40 * SECOND), 41.0).never == [change(ended=40 * SECOND)]


@pytest.mark.parametrize("fields", [{"publishable": None}, {"ended": 13 * SECOND}], ids=["never ready", "soon over"])
def test_a_leader_that_was_not_there_counts_for_nothing(fields: dict[str, Any]) -> None:
    windows = measured(change(**fields))
    assert (windows.passed_over, windows.never, windows.ready) == (1, [], [])


def test_a_consumer_needs_a_message_and_a_subscription() -> None:
    assert measured(change(subscribable=20 * SECOND), 20.5, access=READ).ready == [0.5]
    assert measured(change(subscribable=None), 20.5, access=READ).passed_over == 1


def test_percentiles() -> None:
    assert percentile([], 99) == 0.0
    assert percentile([2.0], 99) == 2.0
    assert percentile([float(number) for number in range(101)], 99) == 99.0


def late(*windows: tuple[float, float]) -> Windows:
    return Windows([Window(change(), named, ready) for named, ready in windows])


def findings(**fields: Any) -> Findings:
    events = [Event(name, 0, 5 * SECOND, "a long story of what happened there " * 4, 1.0) for name in NAMES.values()]
    counts = {"failed": 0, "refused": 3, "lost": 0, "lost_by_servers": 70, "lost_unexplained": 0, "disordered": 0}
    whole = {
        "cluster": "etcd, 2 nsqlookupds, 3 nsqds", "seconds": 1234.5, "keys": 60, "partitions": 12, "events": events,
        "skipped": {"x": "not here " * 20}, "stored": 1_000_000, "handled": 1_000_009, "distinct": 1_000_000, **counts,
        "too_early": 0, "split_keys": 0, "rollbacks": 1, "duplicates": {AGAIN: 9}, "errors": {"E" * 90: 3},
        "leader_changes": 50, "windows": {"publish": late((1.0, 0.5)), "consume": late((2.0, 0.1), (3.0, 0.2))},
    }  # fmt: skip
    return Findings(**{**whole, **fields})


def test_the_report_fits_80_columns_and_names_every_fault() -> None:
    text = as_markdown(findings(errors={"an error of many words " * 9: 3}))
    assert max(map(len, text.splitlines())) <= WIDTH
    assert all(name in text for name in NAMES.values())
    assert "1,000,000" in text
    assert "What is promised was so." in text
    assert "consume: 0.20 s after the leader was ready" in text


@pytest.mark.parametrize("count", ["lost", "lost_unexplained", "failed", "disordered", "too_early", "split_keys"])
def test_what_is_promised_is_not_proved_by_a_run_that_broke_it(count: str) -> None:
    assert findings().is_proved
    broken = findings(**{count: 1})
    assert not broken.is_proved
    assert "WAS NOT SO" in as_markdown(broken)


def test_a_client_that_did_not_come_breaks_the_promise() -> None:
    assert not findings(windows={"publish": Windows(never=[change()])}).is_proved


def test_json_has_the_percentiles_and_the_faults() -> None:
    told = as_json(findings())
    assert told["windows"]["consume"]["named"] == {"n": 2, "p50": 2.5, "p99": pytest.approx(2.99), "most": 3.0}
    assert [event["seconds"] for event in told["events"]] == [5.0] * len(ROUND)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedesignedCluster]:
    with RedesignedCluster(nodes=2, kind=True) as running:
        yield running


def test_the_watch_sees_a_leader_move(cluster: RedesignedCluster) -> None:
    cluster.create_topic("watched", 1, 2, channels=("ch", "probe"), ordered=True)
    lookupds = [str(lookupd.http_address) for lookupd in cluster.lookupds]
    watch = Watch(lookupds, "watched", 1, "probe")
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
    assert audit.gone(lookupds[0], "audited", [*there, taken, unknown]) == [taken, unknown]
