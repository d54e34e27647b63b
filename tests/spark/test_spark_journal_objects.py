"""The journal in an object store: requests that fail, are repeated, come late or are ignored; and their number."""

from __future__ import annotations

import pickle
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.journal import CHANNEL, TOPIC, Query, Server, check_killed_attempt, check_late_attempt
from support.ports import free_address
from support.s3 import BUCKET, CREDENTIALS, REGION, UNAVAILABLE, answers, cuts_its_answer, loses_its_answer
from support.spark_ledger import account

from nsq_fast.errors import ConfigError, JournalClosed, JournalMissing, JournalStorageFailed, JournalTaken
from nsq_fast.spark.journal import JournalStreamReader
from nsq_fast.spark.journal.files import Storage
from nsq_fast.spark.journal.slot import open_storage
from nsq_fast.spark.journal.stream import LISTING_INTERVAL
from nsq_fast.spark.options import ObjectStore, SourceOptions

if TYPE_CHECKING:
    from support.s3_server import S3Server

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


# Requests


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


# What is told


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


# A query


@OURS
@pytest.mark.parametrize("place", ["after claim 0", "before claim 1"])
def test_an_executor_that_is_killed_loses_and_doubles_nothing(
    server: Server, query: Query, tmp_path: Path, place: str
) -> None:
    check_killed_attempt(server, query, lambda task: task, place, tmp_path)


@OURS
@pytest.mark.parametrize("is_committed", [False, True])
def test_of_two_attempts_on_two_machines_one_is_kept(
    server: Server, query: Query, tmp_path: Path, is_committed: bool
) -> None:
    check_late_attempt(server, query, lambda task: task, is_committed, tmp_path)


@OURS
@pytest.mark.parametrize("number", [1, 2])
def test_a_store_that_fails_in_the_middle_of_a_task_loses_and_doubles_nothing(
    s3: S3Server, server: Server, query: Query, number: int
) -> None:
    """A claim fails for good, and was carried out."""
    bodies = server.publish(ROWS)
    query.plan()
    (task,) = query.tasks()
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
    query.plan()
    (task,) = query.tasks()
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
