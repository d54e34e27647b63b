"""What a journal needs of its storage holds of a file system and of an object store alike."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest
from support.s3 import BUCKET, REGION
from support.waiting import PROCESS

from nsq_fast.errors import ConfigError, JournalClosed, JournalTaken
from nsq_fast.spark.journal.files import Storage
from nsq_fast.spark.journal.slot import check_path, open_storage
from nsq_fast.spark.options import ObjectStore


@pytest.fixture(params=["files", "objects"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, ObjectStore]:
    """Where nothing is yet."""
    if request.param == "files":
        return str(tmp_path / "a" / "journal"), ObjectStore()
    return f"s3://{BUCKET}/{uuid.uuid4().hex}/journal", ObjectStore(request.getfixturevalue("s3").url, REGION)


@pytest.fixture
def root(place: tuple[str, ObjectStore]) -> Storage:
    made = open_storage(*place)
    made.make(parents=True)
    return made


@pytest.fixture
def batch(root: Storage) -> Storage:
    made = root.below("b1")
    made.make()
    return made


def test_a_name_is_claimed_once_and_what_was_there_stays(batch: Storage) -> None:
    batch.claim("s0-0", [b"the ", memoryview(b"first")])
    with pytest.raises(JournalTaken, match="b1/s0-0 has been written by another attempt"):
        batch.claim("s0-0", [b"the second"])
    assert bytes(batch.view("s0-0")) == b"the first"
    assert batch.names() == ["s0-0"]


def test_where_no_place_was_made_nothing_is_claimed(root: Storage) -> None:
    with pytest.raises(JournalClosed, match="b7 is not there: the batch has been committed by another attempt"):
        root.below("b7").claim("s0-0", [b"x"])
    assert root.names() == []
    assert root.below("b7").names() == []


def test_where_a_place_was_retired_nothing_is_claimed(
    root: Storage, batch: Storage, place: tuple[str, ObjectStore]
) -> None:
    batch.claim("s0-0", [b"first"])
    before = batch.view("s0-0")
    root.retire("b1")
    for name in ("s0-0", "s0-1"):
        with pytest.raises((JournalClosed, JournalTaken)):
            batch.claim(name, [b"late"])
    root.sweep()
    with pytest.raises(JournalClosed):
        batch.claim("s0-0", [b"late"])
    assert (root.names(), root.tree("b"), batch.names()) == ([], [], [])
    assert bytes(before) == b"first"
    with pytest.raises(FileNotFoundError):
        open_storage(batch.path, place[1]).view("s0-0")


def test_a_claim_that_races_the_end_of_its_place_is_swept_or_refused(root: Storage, batch: Storage) -> None:
    """A writer claims until it is refused: what it was told that it has was there before the end."""
    claimed: list[tuple[int, float]] = []

    def write() -> None:
        try:
            for number in range(10_000):
                began = time.monotonic()
                batch.claim(f"s0-{number}", [b"x"])
                claimed.append((number, began))
                some.set()
        except JournalClosed:
            pass

    some = threading.Event()
    writer = threading.Thread(target=write)
    writer.start()
    assert some.wait(60)
    root.retire("b1")
    retired = time.monotonic()
    writer.join()
    root.sweep()
    assert all(began < retired for _, began in claimed)
    assert root.tree("b") == []


def test_what_is_swept_is_what_was_retired(root: Storage, batch: Storage) -> None:
    other = root.below("b2")
    other.make()
    for storage in (root, batch, other):
        storage.claim("s0-0", [b"x"])
    root.retire("b1")
    root.retire("b1")
    root.sweep()
    root.sweep()
    assert root.names() == ["b2", "s0-0"]
    assert other.names() == ["s0-0"]
    other.claim("s0-1", [b"y"])


def test_an_entry_is_replaced_as_a_whole(root: Storage) -> None:
    for data in (b"one", b"", b"three"):
        root.replace("committed", data)
        assert bytes(root.view("committed")) == data
    assert root.names() == ["committed"]


def test_what_is_not_there_is_told(root: Storage) -> None:
    with pytest.raises(FileNotFoundError):
        root.view("none")
    root.remove("none")
    root.replace("some", b"x")
    root.remove("some")
    assert root.names() == []
    assert root.below("none").names() == []
    assert root.below("none").tree("") == []


def test_the_tree_tells_names_sizes_and_times(root: Storage, batch: Storage) -> None:
    root.below("b12").make()
    root.below("b12").claim("s0-0", [b"1234"])
    root.claim("about.json", [b"{}"])
    batch.claim("s0-0", [b"12"])
    batch.claim("s0-1", [b""])
    assert sorted((each.name, each.size) for each in root.tree("b")) == [
        ("b1/s0-0", 2),
        ("b1/s0-1", 0),
        ("b12/s0-0", 4),
    ]
    assert sorted(each.name for each in root.tree("b1/")) == ["b1/s0-0", "b1/s0-1"]
    assert all(abs(each.written_at - time.time()) < 600 for each in root.tree("b"))


def test_making_a_place_twice_changes_nothing(root: Storage, batch: Storage) -> None:
    batch.claim("s0-0", [b"x"])
    root.make(parents=True)
    batch.make()
    assert batch.names() == ["s0-0"]


def test_a_good_storage_is_left_as_it_was(root: Storage) -> None:
    root.check()
    assert root.names() == []


RACER = """
import sys
from nsq_fast.errors import JournalTaken
from nsq_fast.spark.journal.slot import open_storage
from nsq_fast.spark.options import ObjectStore
storage = open_storage(sys.argv[1], ObjectStore(*sys.argv[3:]))
print("ready", flush=True)
sys.stdin.readline()
won = 0
for slot in range(40):
    try:
        storage.claim(f"s{slot}-0", [sys.argv[2].encode()])
    except JournalTaken:
        continue
    won += 1
print(won, flush=True)
"""


def test_of_two_processes_that_race_one_wins_each_name_and_all_see_whose_it_is(
    batch: Storage, place: tuple[str, ObjectStore]
) -> None:
    told = [each for each in (place[1].endpoint, place[1].region) if each]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, batch.path, name, *told],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in "ab"
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    wins = {name: int(process.communicate(timeout=PROCESS)[0]) for name, process in zip("ab", processes, strict=True)}
    owners = [bytes(batch.view(f"s{slot}-0")).decode() for slot in range(40)]
    assert {name: owners.count(name) for name in "ab"} == wins


# What the option may be


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("s3://bucket/a/b", "s3://bucket/a/b"),
        ("s3a://bucket//a/", "s3://bucket/a"),
        ("s3n://bucket", "s3://bucket"),
    ],
)
def test_a_place_in_an_object_store_has_one_spelling(given: str, path: str) -> None:
    assert check_path(given) == path


@pytest.mark.parametrize(
    ("given", "reason"),
    [("s3:///a", "names no bucket"), ("s3://", "names no bucket"), ("s3://k:hush@b/a", "credentials")],
)
def test_what_names_no_bucket_is_refused(given: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as told:
        check_path(given)
    assert "hush" not in str(told.value)
