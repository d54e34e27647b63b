"""A new checkpoint with the journal of an old one: what was acknowledged and not committed reaches somebody."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.journal import CHANNEL, TOPIC, Attempt, Query, Server
from support.spark_ledger import account

from nsq_fast.cli import main
from nsq_fast.errors import JournalClosed, JournalError, JournalMissing, JournalTaken

ROWS = 1_000


def dead(server: Server, journal: Path, count: int = ROWS) -> tuple[Query, list[bytes]]:
    """A query that has acknowledged all there is, and whose driver died before the commit."""
    bodies = server.publish(count)
    query = Query(journal, server.options)
    assert query.plan()
    assert len(query.run()) == count
    server.wait_depth(0, 0, 0)
    return query, bodies


def folders(journal: Path) -> list[Path]:
    return sorted(journal.glob("*/b*"))


def test_a_new_checkpoint_reads_what_the_old_one_has_not_committed(server: Server, tmp_path: Path) -> None:
    _, bodies = dead(server, tmp_path / "j")
    query = Query(tmp_path / "j", server.options)
    assert len(query.batch()) == ROWS
    account(bodies, query.rows).check()
    more = server.publish(100, "n")
    query.batch()
    account(bodies + more, query.rows).check()


def test_what_is_adopted_is_committed_where_it_lay(server: Server, tmp_path: Path) -> None:
    old, _ = dead(server, tmp_path / "j")
    query = Query(tmp_path / "j", server.options)
    query.batch()
    assert not folders(tmp_path / "j")
    assert not Query(tmp_path / "j", server.options).plan()
    with pytest.raises(JournalMissing, match="committed and deleted"):
        old.tasks()


def test_a_query_killed_between_adoption_and_commit_goes_on(server: Server, tmp_path: Path) -> None:
    _, bodies = dead(server, tmp_path / "j")
    query = Query(tmp_path / "j", server.options)
    assert query.plan()
    first = query.run()
    query.start()  # killed with its batch in the sink; the checkpoint has the plan
    again = query.run()
    assert again == first
    query.done(again)
    account(bodies, query.rows).check()


@pytest.mark.parametrize("steps", ["begun", "planned", "read"])
def test_a_query_killed_before_its_commit_leaves_all_to_the_next_checkpoint(
    server: Server, tmp_path: Path, steps: str
) -> None:
    _, bodies = dead(server, tmp_path / "j")
    killed = Query(tmp_path / "j", server.options)
    if steps != "begun":
        assert killed.plan()
    if steps == "read":
        assert len(killed.run()) == ROWS
    query = Query(tmp_path / "j", server.options)
    query.batch()
    account(bodies, query.rows).check()


def test_a_kill_between_the_commits_of_both_folders_is_made_good(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead(server, tmp_path / "j")
    query = Query(tmp_path / "j", server.options)
    assert query.plan()
    rows = query.run()
    query.rows, query.offset = rows, query.planned  # Spark has committed, and was killed before it told the source
    query.start()
    server.publish(10, "n")
    query.batch()
    assert not Query(tmp_path / "j", server.options).plan()


def test_orphans_may_be_refused(server: Server, tmp_path: Path) -> None:
    old, _ = dead(server, tmp_path / "j")
    with pytest.raises(JournalError, match=rf"{old.offset['j']} \({ROWS:,} rows.*orphans=adopt"):  # type: ignore[index]
        Query(tmp_path / "j", {**server.options, "orphans": "refuse"})


def test_orphans_may_be_warned_of(server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, _ = dead(server, tmp_path / "j")
    query = Query(tmp_path / "j", {**server.options, "orphans": "warn"})
    assert f"{old.offset['j']} ({ROWS:,} rows, the oldest" in caplog.text  # type: ignore[index]
    assert not query.plan()


@pytest.mark.parametrize("other", [{"topic": "others"}, {"channel": "other"}])
def test_folders_of_another_topic_or_channel_are_left_alone(
    server: Server, tmp_path: Path, other: dict[str, Any]
) -> None:
    dead(server, tmp_path / "j")
    server.client.create_topic("others")
    server.client.create_channel(TOPIC, "other")
    server.client.create_channel("others", CHANNEL)
    before = folders(tmp_path / "j")
    assert not Query(tmp_path / "j", {**server.options, **other}).plan()
    assert folders(tmp_path / "j") == before


# By hand


def journal(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["journal", *map(str, arguments)])


def shown(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_ls_shows_what_is_not_committed(server: Server, tmp_path: Path) -> None:
    old, _ = dead(server, tmp_path / "j")
    (found,) = shown(journal("ls", tmp_path / "j", "--json"))
    assert found["age"] >= 0
    named = {name: found[name] for name in ("folder", "topic", "channel", "committed", "batch", "rows")}
    assert old.offset is not None
    assert named == {
        "folder": old.offset["j"],
        "topic": TOPIC,
        "channel": CHANNEL,
        "committed": 0,
        "batch": 1,
        "rows": ROWS,
    }
    assert "1,000" in journal("ls", tmp_path / "j").stdout
    old.done(old.run())
    (found,) = shown(journal("ls", tmp_path / "j", "--json"))
    assert (found["committed"], found["rows"], found["age"]) == (1, 0, None)


def test_read_prints_rows_and_changes_nothing(server: Server, tmp_path: Path) -> None:
    old, bodies = dead(server, tmp_path / "j")
    assert old.offset is not None
    folder = old.offset["j"]
    assert sorted(journal("read", tmp_path / "j", folder).stdout.encode().splitlines()) == sorted(bodies)
    rows = shown(journal("read", tmp_path / "j", folder, "--json"))
    assert sorted(row["body"].encode() for row in rows) == sorted(bodies)
    assert {(row["topic"], row["nsqd"], row["partition"], row["attempts"]) for row in rows} == {
        (TOPIC, str(server.tcp), None, 1)
    }
    query = Query(tmp_path / "j", server.options)
    query.batch()
    account(bodies, query.rows).check()
    assert "no folder nobody" in journal("read", tmp_path / "j", "nobody").output


def later(server: Server, folder: Path) -> tuple[Query, list[bytes], str]:
    """A query with a batch behind it, and another that was left to die; what it holds, and its folder."""
    heir = Query(folder, server.options)
    first = server.publish(10, "first")
    account(first, heir.batch()).check()
    old = Query(folder, {**server.options, "orphans": "warn"})
    bodies = server.publish(ROWS)
    assert old.plan()
    assert len(old.run()) == ROWS
    assert old.offset is not None
    return heir, first + bodies, old.offset["j"]


def told(heir: Query, folder: Path, dead: str) -> Result:
    assert heir.offset is not None
    return journal("adopt", folder, dead, "--by", heir.offset["j"])


def test_adopt_gives_rows_to_a_query_that_has_begun(server: Server, tmp_path: Path) -> None:
    heir, bodies, old = later(server, tmp_path)
    found = told(heir, tmp_path, old)
    assert found.exit_code == 0, found.output
    assert f"reads {ROWS:,} rows of {old} when it is started again" in found.output
    assert not heir.plan()  # it runs
    heir.start()
    heir.batch()
    account(bodies, heir.rows).check()
    heir.start()
    assert not heir.plan()
    assert not [path for path in folders(tmp_path) if old in str(path)]


def test_adopt_refuses_what_cannot_be(server: Server, tmp_path: Path) -> None:
    heir, _, old = later(server, tmp_path)
    assert heir.offset is not None
    own = heir.offset["j"]
    assert "one of them" in journal("adopt", tmp_path, old).output
    assert "no rows" in journal("adopt", tmp_path, own, "--by", old).output
    assert "no folder none" in journal("adopt", tmp_path, "none", "--by", own).output
    assert "is that query's own" in journal("adopt", tmp_path, old, "--by", old).output


@pytest.mark.parametrize("kill", ["told", "planned", "read", "in the sink"])
def test_a_query_told_to_adopt_and_killed_reads_all_once(server: Server, tmp_path: Path, kill: str) -> None:
    heir, bodies, old = later(server, tmp_path)
    told(heir, tmp_path, old)
    heir.start()
    if kill != "told":
        assert heir.plan()
    if kill in ("read", "in the sink"):
        rows = heir.run()
    heir.start()
    if kill == "in the sink":  # the plan is in the checkpoint, so Spark runs it again, and commits it then
        assert heir.run() == rows
        assert heir.planned is not None
        before, heir.offset = heir.offset, heir.planned
        assert heir.reader.latestOffset(heir.offset) == heir.offset  # not adopted once more
        heir.offset = before
        heir.done(rows)
    bodies += server.publish(10, "n")
    heir.batch()
    heir.batch()
    account(bodies, heir.rows).check()
    assert not [path for path in folders(tmp_path) if old in str(path)]


@pytest.mark.parametrize("place", ["before claim 0", "after claim 0"])
def test_a_task_killed_while_it_collects_leaves_what_it_claimed_to_a_new_checkpoint(
    server: Server, tmp_path: Path, place: str
) -> None:
    """What it has claimed and not finished comes again by its timeout, too, and is known then."""
    bodies = server.publish(ROWS)
    options = {**server.options, "nsq.msg_timeout": "1"}
    old = Query(tmp_path / "j", options)
    old.plan()
    (task,) = old.tasks()
    Attempt(task, place, tmp_path).kill()
    query = Query(tmp_path / "j", options)
    query.drain(server)
    account(bodies, query.rows).check()


@pytest.mark.parametrize("committed", [False, True], ids=["read", "committed"])
def test_a_task_of_the_old_query_that_wakes_up_keeps_nothing(server: Server, tmp_path: Path, committed: bool) -> None:
    bodies = server.publish(ROWS)
    old = Query(tmp_path / "j", server.options)
    old.plan()
    (task,) = old.tasks()
    task.rows = 500
    late = Attempt(task, "after claim 0", tmp_path)
    query = Query(tmp_path / "j", server.options)
    assert query.plan()
    rows = query.run()
    assert len(rows) == 500
    if committed:
        query.done(rows)
    assert late.go_on() == (JournalClosed if committed else JournalTaken).__name__
    if not committed:
        query.done(rows)
    query.drain(server)
    account(bodies, query.rows).check()
