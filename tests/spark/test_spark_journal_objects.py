"""Journals in objects of S3, on mounts, and those of other checkpoints of the same channel."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from click.testing import CliRunner, Result
from support.journal import CHANNEL, TOPIC, Attempt, Query, Server
from support.s3 import BUCKET, CREDENTIALS, REGION, UNAVAILABLE, answers, cuts_its_answer, loses_its_answer
from support.servers import free_address
from support.spark_ledger import account

from nsq_fast.cli import main
from nsq_fast.errors import ConfigError, JournalClosed, JournalError, JournalMissing, JournalStorageFailed, JournalTaken
from nsq_fast.spark.journal import JournalStreamReader
from nsq_fast.spark.journal.files import Storage, open_storage
from nsq_fast.spark.journal.stream import LISTING_INTERVAL
from nsq_fast.spark.options import ObjectStore, SourceOptions

if TYPE_CHECKING:
    from support.s3_server import S3Server


# The journal in an object store: requests that fail, are repeated, come late or are ignored; and their number.


ROWS = 6_000

OURS = pytest.mark.parametrize("server", ["ours"], indirect=True)

CONFLICT = answers("409 Conflict", "ConditionalRequestConflict")

DENIED = answers("403 Forbidden", "AccessDenied")


@pytest.fixture
def batch(s3: S3Server) -> Storage:
    made = open_storage(f"s3://{BUCKET}/{uuid.uuid4().hex}", ObjectStore(s3.url, REGION)).below("b1")
    made.make()
    return made


@pytest.fixture
def given(s3: S3Server) -> dict[str, str]:
    """The options of a journal of its own."""
    return {
        "journal": f"s3://{BUCKET}/{uuid.uuid4().hex}",
        "journalEndpoint": s3.url,
        "journalRegion": REGION,
        "nsq.msg_timeout": "2",
    }


@pytest.fixture
def query(server: Server, given: dict[str, str]) -> Query:
    return Query(given["journal"], {**server.options, **given})


@pytest.mark.parametrize(
    "faults", [[loses_its_answer], [UNAVAILABLE], [CONFLICT, CONFLICT], [CONFLICT, loses_its_answer]]
)
def test_a_claim_that_had_to_be_repeated_is_ours(s3: S3Server, batch: Storage, faults: list[Any]) -> None:
    s3.fail("PUT", *faults)
    batch.claim("s0-0", [b"ours"])
    assert bytes(batch.view("s0-0")) == b"ours"
    assert not s3.faults["PUT"]


@pytest.mark.parametrize("fault", [loses_its_answer, UNAVAILABLE, CONFLICT])
def test_a_claim_that_had_to_be_repeated_and_finds_that_of_another_is_refused(
    s3: S3Server, batch: Storage, fault: Any
) -> None:
    batch.claim("s0-0", [b"theirs"])
    s3.fail("PUT", fault)
    with pytest.raises(JournalTaken):
        batch.claim("s0-0", [b"ours"])
    assert bytes(batch.view("s0-0")) == b"theirs"


def test_a_claim_that_is_carried_out_after_the_commit_does_not_count(s3: S3Server, batch: Storage) -> None:
    (key,) = s3.find(batch.path.partition(BUCKET + "/")[2])

    def late(carry_out: Callable[[], Any], _: Any) -> Any:
        s3.remove(key)  # the marker
        return carry_out()

    s3.fail("PUT", late)
    with pytest.raises(JournalClosed):
        batch.claim("s0-0", [b"late"])
    assert batch.names() == []


def test_what_a_late_claim_has_left_is_swept_at_the_next_commit(s3: S3Server, batch: Storage) -> None:
    root = open_storage(batch.path.rpartition("/")[0], ObjectStore(s3.url, REGION))
    root.retire("b1")
    s3.fail("POST", *[DENIED])  # it cannot delete what it has written
    with pytest.raises(JournalClosed):
        batch.claim("s0-0", [b"late"])
    assert batch.names() == ["s0-0"]
    root.sweep()
    assert root.names() == []


def test_a_store_that_ignores_the_condition_is_refused(s3: S3Server, server: Server, given: dict[str, str]) -> None:
    s3.ignores_conditions = True
    try:
        with pytest.raises(ConfigError, match=r"replaces an object although it is asked not to \(If-None-Match\)"):
            Query(given["journal"], {**server.options, **given})
    finally:
        s3.ignores_conditions = False


def test_listings_of_many_objects_are_whole(s3: S3Server, batch: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(7):
        batch.claim(f"s0-{number}", [b"x"])
    s3.page = 3
    try:
        assert batch.names() == [f"s0-{number}" for number in range(7)]
    finally:
        s3.page = None


def test_an_outage_is_told_with_what_and_where_and_what_to_do(batch: Storage) -> None:
    url = f"http://{free_address()}"
    with pytest.raises(JournalStorageFailed) as told:
        open_storage(batch.path, ObjectStore(url, REGION)).claim("s0-1", [b"x"])
    for part in (f"{batch.path}/s0-1", "PUT", url, "nothing was acknowledged that is not stored", "run the"):
        assert part in str(told.value)


def test_an_answer_that_ends_early_is_told(s3: S3Server, batch: Storage) -> None:
    batch.claim("s0-0", [b"x"])
    s3.fail("GET", cuts_its_answer)
    with pytest.raises(JournalStorageFailed, match=r"s0-0: .*body error; .* run the task"):
        open_storage(batch.path, ObjectStore(s3.url, REGION)).view("s0-0")


def test_settings_that_cannot_be_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="journal=s3://bucket: Invalid endpoint: http://; see journalEndpoint"):
        open_storage("s3://bucket/a", ObjectStore("http://", REGION))
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ConfigError, match=r"journal=s3://bucket: .*nobody.* see journalEndpoint and boto3's settings"):
        open_storage("s3://bucket/a", ObjectStore("http://127.0.0.1:1", "eu-north-1"))


@OURS
@pytest.mark.parametrize(
    ("bucket", "fault", "told"),
    [("nobody-has-it", None, "create the bucket"), (BUCKET, DENIED, "s3:PutObject, .* must be allowed")],
)
def test_a_bucket_that_cannot_be_written_is_told_at_the_start(
    s3: S3Server, server: Server, given: dict[str, str], bucket: str, fault: Any, told: str
) -> None:
    if fault is not None:
        s3.fail("PUT", fault)
    given["journal"] = given["journal"].replace(BUCKET, bucket)
    with pytest.raises(ConfigError, match=rf"journal='s3://{bucket}/.*{told}"):
        Query(given["journal"], {**server.options, **given})


def test_without_credentials_the_error_says_where_they_belong(
    s3: S3Server, batch: Storage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(JournalStorageFailed, match="no credentials; give them to driver and executors"):
        open_storage(batch.path, ObjectStore(s3.url, "eu-west-1"))  # with a client of its own


def test_a_library_that_is_missing_is_told_at_load(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"needs obstore: pip install 'nsq-fast\[spark-s3\]'"):
        make_reader(given)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"journal": "/var/lib/journal"}, "journalEndpoint, journalRegion: are for a journal in an object store"),
        ({"journalEndpoint": "localhost:9000"}, "journalEndpoint='localhost:9000': must begin with https://"),
        ({"journalEndpoint": "http://me:hush@host"}, "journalEndpoint: must hold no credentials"),
    ],
)
def test_options_that_do_not_fit_are_refused(given: dict[str, str], change: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as error:
        make_reader({**given, **change})
    assert "hush" not in str(error.value)


def make_reader(given: dict[str, str]) -> JournalStreamReader:
    servers = {"nsqd_tcp_addresses": "127.0.0.1:1", "nsqd_http_addresses": "127.0.0.1:2"}
    return JournalStreamReader(SourceOptions.parse({"topic": TOPIC, "channel": CHANNEL, **servers, **given}))


@OURS
def test_credentials_are_neither_in_tasks_nor_in_offsets(server: Server, query: Query) -> None:
    server.publish(10)
    query.plan()
    told = pickle.dumps((query.tasks(), query.reader, query.planned))
    assert not [secret for secret in CREDENTIALS.values() if secret.encode() in told]


@OURS
@pytest.mark.parametrize("number", [1, 2])
def test_a_store_that_fails_in_the_middle_of_a_task_loses_and_doubles_nothing(
    s3: S3Server, server: Server, query: Query, number: int
) -> None:
    """A claim fails for good, and was carried out."""
    bodies = server.publish(ROWS)
    task = query.plan_task()
    s3.lose_answers_after(number)
    with pytest.raises(JournalStorageFailed):
        query.run_task(task)
    s3.faults.clear()
    query.start()
    rows = query.run_task(task)
    assert query.run_task(task) == rows
    query.done(rows)
    query.drain(server)
    account(bodies, query.rows).check()


@OURS
def test_a_journal_that_was_deleted_stops_the_query(s3: S3Server, server: Server, query: Query) -> None:
    server.publish(5)
    query.plan()
    query.run()
    for key in s3.find():
        s3.remove(key)
    query.start()
    with pytest.raises(JournalMissing, match="what was acknowledged and not committed would be lost"):
        query.plan()


@OURS
def test_a_commit_leaves_two_small_objects_and_the_markers(s3: S3Server, server: Server, query: Query) -> None:
    server.publish(100)
    query.batch()
    prefix = query.reader.journal.partition(BUCKET + "/")[2] + f"/{query.offset['j']}/"  # type: ignore[index]
    assert [key[len(prefix) :] for key in s3.find(prefix)] == [".open", "about.json", "committed", "suspects/.open"]


@OURS
def test_a_segment_is_one_put_and_one_look_and_is_not_fetched(s3: S3Server, server: Server, query: Query) -> None:
    server.publish(ROWS)
    task = query.plan_task()
    s3.requests.clear()
    segments = query.reader.make_collector(task).run()
    rows = sum(segment.head.rows for segment in segments)
    more = len(segments) + 1  # the seal
    # once each: is there an earlier attempt's segment? are there suspects?
    assert s3.requests == Counter({"PUT": more, "HEAD": more, "GET": 1, "LIST": 1})
    s3.requests.clear()
    assert sum(segment.columns().count for segment in segments) == rows > 0
    assert s3.requests == Counter()


@OURS
def test_the_requests_of_a_batch_are_those_of_the_docs(s3: S3Server, server: Server, query: Query) -> None:
    """``docs/spark.md``, "A journal in an object store": one slot with one segment; the second batch of a query."""
    for _ in range(2):
        server.publish(100)
        s3.requests.clear()
        query.plan()
        query.done(query.run())
    assert s3.requests == Counter({"PUT": 4, "LIST": 7, "GET": 6, "HEAD": 2, "POST": 2})


@OURS
def test_a_query_that_waits_asks_the_store_for_metrics_alone_and_seldom(s3: S3Server, query: Query) -> None:
    query.plan()
    s3.requests.clear()
    began = time.monotonic()
    for _ in range(3):
        assert not query.plan()
        query.reader.reportLatestOffset()
    listed = s3.requests.pop("LIST")  # for the metrics
    assert listed <= 1 + (time.monotonic() - began) / LISTING_INTERVAL
    assert s3.requests == Counter()


# A journal on a file system that driver and executors share: each process sees it through a mount of its own.
#
# Here the mounts are two paths of one folder. ``NSQ_FAST_TEST_MOUNTS=/mnt/a:/mnt/b`` names two mounts of a network
# file system in their place.


class Mounts(NamedTuple):
    """Two paths of one folder: where the driver sees it, and where executors do."""

    driver: Path
    executor: Path

    def seen_by_executor(self, task: Any) -> Any:
        """A task, with its paths as an executor with the other mount has them."""
        moved = copy.copy(task)
        moved.path = task.path.replace(str(self.driver), str(self.executor), 1)
        moved.suspects = task.suspects.replace(str(self.driver), str(self.executor), 1)
        assert moved.path != task.path
        return moved


@pytest.fixture
def mounts(tmp_path: Path) -> Mounts:
    if given := os.environ.get("NSQ_FAST_TEST_MOUNTS"):
        name = uuid.uuid4().hex
        first, second = (Path(path) / name for path in given.split(":"))
        first.mkdir()
        return Mounts(first, second)
    (tmp_path / "shared").mkdir()
    (tmp_path / "other").symlink_to(tmp_path / "shared")
    return Mounts(tmp_path / "shared", tmp_path / "other")


@pytest.fixture
def mounted(server: Server, mounts: Mounts) -> Query:
    return Query(mounts.driver / "journal", {**server.options, "nsq.msg_timeout": "2"})


class Shared(NamedTuple):
    """A query whose journal several machines see, and a task of it as another one has it."""

    query: Query
    seen: Callable[[Any], Any]


@pytest.fixture
def shared(request: pytest.FixtureRequest) -> Shared:
    if request.param == "objects":
        return Shared(request.getfixturevalue("query"), lambda task: task)
    return Shared(request.getfixturevalue("mounted"), request.getfixturevalue("mounts").seen_by_executor)


KILLED = [("mounts", f"{when} claim {number}") for when in ("before", "after") for number in (0, 1)]
KILLED += [("objects", "after claim 0"), ("objects", "before claim 1")]


@OURS
@pytest.mark.parametrize(("shared", "place"), KILLED, indirect=["shared"])
def test_an_executor_that_is_killed_loses_and_doubles_nothing(
    server: Server, shared: Shared, tmp_path: Path, place: str
) -> None:
    query, seen = shared
    bodies = server.publish(ROWS)
    task = query.plan_task()
    Attempt(seen(task), place).kill()
    query.done(query.run_task(task))
    query.drain(server)
    account(bodies, query.rows).check()


@OURS
@pytest.mark.parametrize("shared", ["mounts", "objects"], indirect=True)
@pytest.mark.parametrize("is_committed", [False, True])
def test_of_two_attempts_on_two_machines_one_is_kept(
    server: Server, shared: Shared, tmp_path: Path, is_committed: bool
) -> None:
    """Another one has finished its work, or Spark has committed it, when the first wakes up."""
    query, seen = shared
    bodies = server.publish(2_000)
    task = query.plan_task()
    task.rows = 1_000
    first = Attempt(seen(task), "before claim 0")
    rows = query.run_task(task)
    if is_committed:
        query.done(rows)
    assert first.go_on() == (JournalClosed if is_committed else JournalTaken).__name__
    if not is_committed:
        assert query.run_task(seen(task)) == rows
        query.done(rows)
    query.drain(server)
    account(bodies, query.rows).check()


@OURS
def test_a_driver_on_another_machine_goes_on(server: Server, mounted: Query, mounts: Mounts) -> None:
    bodies = server.publish(ROWS)
    task = mounted.plan_task()
    rows = mounted.run_task(mounts.seen_by_executor(task))
    mounted.move(mounts.executor / "journal")
    assert mounted.run() == rows
    mounted.done(rows)
    mounted.drain(server)
    account(bodies, mounted.rows).check()


@OURS
def test_an_executor_that_has_another_file_system_there_says_so(
    server: Server, mounted: Query, mounts: Mounts, tmp_path: Path
) -> None:
    server.publish(10)
    task = mounted.plan_task()
    task.path = task.path.replace(str(mounts.driver), str(tmp_path / "local"), 1)
    with pytest.raises(JournalError, match="not on a file system that the driver and all executors share"):
        mounted.run_task(task)
    server.wait_depth(10, 0, 0)


# A new checkpoint with the journal of an old one: what was acknowledged and not committed reaches somebody.


LEFT_ROWS = 1_000


def dead(server: Server, journal: Path, count: int = LEFT_ROWS) -> tuple[Query, list[bytes]]:
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
    """And commits it where it lay."""
    old, bodies = dead(server, tmp_path / "j")
    query = Query(tmp_path / "j", server.options)
    assert len(query.batch()) == LEFT_ROWS
    assert not folders(tmp_path / "j")
    assert not Query(tmp_path / "j", server.options).plan()
    with pytest.raises(JournalMissing, match="committed and deleted"):
        old.tasks()
    bodies += server.publish(100, "n")
    query.batch()
    account(bodies, query.rows).check()


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


@pytest.mark.parametrize("restarts", [False, True])
def test_what_a_sink_has_left_out_is_adopted_once_more(server: Server, tmp_path: Path, restarts: bool) -> None:
    """As Spark's files do with a batch whose number they have of the checkpoint before."""
    _, bodies = dead(server, tmp_path / "j")
    query = Query(tmp_path / "j", server.options)
    for _ in range(2):
        assert query.plan()
        assert query.tasks()
        query.done([])
        if restarts:
            query.start()
    query.drain(server)
    account(bodies, query.rows).check()
    assert not folders(tmp_path / "j")


@pytest.mark.parametrize("steps", ["begun", "planned", "read"])
def test_a_query_killed_before_its_commit_leaves_all_to_the_next_checkpoint(
    server: Server, tmp_path: Path, steps: str
) -> None:
    _, bodies = dead(server, tmp_path / "j")
    killed = Query(tmp_path / "j", server.options)
    if steps != "begun":
        assert killed.plan()
    if steps == "read":
        assert len(killed.run()) == LEFT_ROWS
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


def test_orphans_may_be_refused_or_warned_of(server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, _ = dead(server, tmp_path / "j")
    told = rf"{old.folder} \({LEFT_ROWS:,} rows, the oldest"
    with pytest.raises(JournalError, match=f"{told}.*orphans=adopt"):
        Query(tmp_path / "j", {**server.options, "orphans": "refuse"}).plan()
    assert not Query(tmp_path / "j", {**server.options, "orphans": "warn"}).plan()
    assert re.search(told, caplog.text)


@pytest.mark.parametrize("orphans", ["adopt", "refuse", "warn"])
def test_a_query_killed_in_its_first_batch_takes_its_own_folder_for_no_other(
    server: Server, tmp_path: Path, orphans: str, caplog: pytest.LogCaptureFixture
) -> None:
    bodies = server.publish(10)
    query = Query(tmp_path / "j", {**server.options, "orphans": orphans})
    query.plan()
    query.run()
    query.start()
    query.reader.initialOffset()  # Spark asks for it as long as no batch is committed
    query.done(query.run())
    assert not query.plan()
    assert "another checkpoint" not in caplog.text
    account(bodies, query.rows).check()


@pytest.mark.parametrize("begun", [0, 1])
def test_what_tasks_acknowledge_that_outlive_their_driver_is_adopted(
    server: Server, tmp_path: Path, begun: int
) -> None:
    bodies = server.publish(20)
    old = Query(tmp_path / "j", {**server.options, "minPartitions": "2"})
    old.plan()
    tasks = old.tasks()
    for task in tasks[:begun]:
        old.run_task(task)
    query = Query(tmp_path / "j", server.options)
    assert query.plan()
    old.run_task(tasks[1])
    query.rows, query.offset = query.run(), query.planned
    assert query.plan()  # as Spark, which commits a batch when the next one is planned
    query.reader.commit(query.offset)
    query.done(query.run())
    query.drain(server)
    account(bodies, query.rows).check()


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
    assert named == {
        "folder": old.folder,
        "topic": TOPIC,
        "channel": CHANNEL,
        "committed": 0,
        "batch": 1,
        "rows": LEFT_ROWS,
    }
    assert "1,000" in journal("ls", tmp_path / "j").stdout
    old.done(old.run())
    (found,) = shown(journal("ls", tmp_path / "j", "--json"))
    assert (found["committed"], found["rows"], found["age"]) == (1, 0, None)


def test_read_prints_rows_and_changes_nothing(server: Server, tmp_path: Path) -> None:
    old, bodies = dead(server, tmp_path / "j")
    assert sorted(journal("read", tmp_path / "j", old.folder).stdout.encode().splitlines()) == sorted(bodies)
    rows = shown(journal("read", tmp_path / "j", old.folder, "--json"))
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
    bodies = server.publish(LEFT_ROWS)
    assert old.plan()
    assert len(old.run()) == LEFT_ROWS
    return heir, first + bodies, old.folder


def told(heir: Query, folder: Path, dead: str) -> Result:
    return journal("adopt", folder, dead, "--by", heir.folder)


def test_adopt_gives_rows_to_a_query_that_has_begun(server: Server, tmp_path: Path) -> None:
    heir, bodies, old = later(server, tmp_path)
    found = told(heir, tmp_path, old)
    assert found.exit_code == 0, found.output
    assert f"reads {LEFT_ROWS:,} rows of {old} when it is started again" in found.output
    assert not heir.plan()  # it runs
    heir.start()
    heir.batch()
    account(bodies, heir.rows).check()
    heir.start()
    assert not heir.plan()
    assert not [path for path in folders(tmp_path) if old in str(path)]


def test_adopt_gives_rows_also_to_a_query_whose_sink_has_left_others_out(server: Server, tmp_path: Path) -> None:
    heir, bodies, old = later(server, tmp_path)
    told(heir, tmp_path, old)
    heir.start()
    assert heir.plan()
    assert heir.tasks()
    heir.done([])
    other = Query(tmp_path, {**server.options, "orphans": "warn"})
    bodies += server.publish(LEFT_ROWS, "more")
    assert other.plan()
    assert len(other.run()) == LEFT_ROWS
    told(heir, tmp_path, other.folder)
    heir.start()
    heir.batch()
    account(bodies, heir.rows).check()


def test_adopt_refuses_what_cannot_be(server: Server, tmp_path: Path) -> None:
    heir, _, old = later(server, tmp_path)
    assert "one of them" in journal("adopt", tmp_path, old).output
    assert "no rows" in journal("adopt", tmp_path, heir.folder, "--by", old).output
    assert "no folder none" in journal("adopt", tmp_path, "none", "--by", heir.folder).output
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
    bodies = server.publish(LEFT_ROWS)
    options = {**server.options, "nsq.msg_timeout": "1"}
    old = Query(tmp_path / "j", options)
    task = old.plan_task()
    Attempt(task, place).kill()
    query = Query(tmp_path / "j", options)
    query.drain(server)
    account(bodies, query.rows).check()


@pytest.mark.parametrize("committed", [False, True], ids=["read", "committed"])
def test_a_task_of_the_old_query_that_wakes_up_keeps_nothing(server: Server, tmp_path: Path, committed: bool) -> None:
    bodies = server.publish(LEFT_ROWS)
    old = Query(tmp_path / "j", server.options)
    task = old.plan_task()
    task.rows = 500
    late = Attempt(task, "after claim 0")
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
