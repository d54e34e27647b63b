"""The journal's folder on a disk: its files, what damages them, and where else they may be."""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.journal import forked
from support.journal_places import race
from support.s3 import BUCKET, REGION

from nsq_fast._codec import encode_message
from nsq_fast._frame import ColumnReader, join_columns
from nsq_fast.client.http import Endpoint
from nsq_fast.errors import ConfigError, JournalClosed, JournalError, JournalMissing, JournalStorageFailed, JournalTaken
from nsq_fast.names import Address
from nsq_fast.spark.arrow_rows import to_batch
from nsq_fast.spark.discovery import Nsqd, TopicServers
from nsq_fast.spark.journal.collect import ClaimedSegments, Connections, take
from nsq_fast.spark.journal.files import FileStorage, Storage, check_links, check_path, open_storage
from nsq_fast.spark.journal.plan import (
    Depth,
    Offset,
    Target,
    find_source,
    plan_rows,
    plan_slots,
    source_of,
)
from nsq_fast.spark.journal.query import About, QueryJournal
from nsq_fast.spark.journal.slot import (
    Head,
    SegmentLog,
    Suspects,
    batches,
    keys_of,
    read,
    seal,
    seals,
    uncertain,
    unjoined,
)
from nsq_fast.spark.options import NAMES, ObjectStore, SourceOptions

# The journal on disk: a name is claimed once, whoever races; what is sealed stays; a folder that is gone fences.


ABOUT = About("orders", "spark")


def columns_of(bodies, start=0, attempts=1, ext=None, detail=False):
    reader = ColumnReader(detail=detail, ext=ext is not None)
    extra = {} if ext is None else {"ext_version": 4, "ext": ext}
    if detail:
        extra |= {"offset": 7, "raw_size": 9}
    frames = [
        encode_message(1_000 + row, attempts, b"%016x" % (start + row), body, **extra)
        for row, body in enumerate(bodies)
    ]
    return reader.feed(b"".join(frames))


def choosing(columns, **given):
    """Options with these columns."""
    where = {"topic": "orders", "channel": "c", "lookupd_http_addresses": "127.0.0.1:1"}
    return SourceOptions.parse({**where, "columns": columns, **given})


def bodies_of(segments):
    return [row for batch in batches(segments, choosing("body"), "orders") for row in batch["body"].to_pylist()]


@pytest.fixture
def batch(tmp_path):
    storage = FileStorage(str(tmp_path / "b1"))
    storage.make()
    return storage


@pytest.fixture
def journal(tmp_path):
    made = QueryJournal(FileStorage(str(tmp_path / "journal")), "j1")
    made.create(ABOUT)
    return made


@pytest.mark.parametrize("ext", [None, b'{"a":"b"}', b""])
@pytest.mark.parametrize("detail", [False, True])
def test_a_segment_gives_the_rows_that_its_columns_gave(batch, ext, detail):
    given_columns = columns_of([b"one", b"", b"three" * 100], ext=ext, detail=detail)
    head = Head(rows=3, nsqd="h:1", partition=2, is_redesigned=True)
    stored = SegmentLog(batch, 0).claim(0, head, given_columns)
    facts = {"topic": "t", "partition": 2, "nsqd": "h:1", "is_redesigned": True}
    assert to_batch(read(batch, stored.name).columns(), NAMES, **facts).equals(to_batch(given_columns, NAMES, **facts))
    assert read(batch, stored.name).message_keys() == keys_of(given_columns)


def test_a_segment_of_several_reads_has_their_rows_one_after_another(batch):
    parts = [columns_of([b"a" * 300_000, b""]), columns_of([]), columns_of([b"b" * 300_000])]  # more than one write
    stored = SegmentLog(batch, 0).claim(0, Head(rows=3), unjoined(parts))
    found = read(batch, stored.name)
    facts = {"topic": "t", "partition": None, "nsqd": "h:1", "is_redesigned": False}
    assert to_batch(found.columns(), NAMES, **facts).equals(to_batch(join_columns(parts), NAMES, **facts))
    assert found.message_keys() == keys_of(join_columns(parts))


def test_segments_are_joined_into_larger_batches(batch):
    segment_log = SegmentLog(batch, 0)
    stored = [segment_log.claim(n, Head(rows=1_500), columns_of([b"%d" % n] * 1_500)) for n in range(4)]
    assert [each.num_rows for each in batches(stored, choosing("body,topic"), "t")] == [4_500, 1_500]


def test_large_rows_are_handed_on_before_a_column_is_too_large_for_arrow(batch):
    """2 GiB. A join beyond them is in parts, of which the first was taken for all."""
    segment_log, body = SegmentLog(batch, 0), bytes(1024 * 1024)
    stored = [segment_log.claim(n, Head(rows=6), columns_of([body] * 6)) for n in range(3)]
    assert [each.num_rows for each in batches(stored, choosing("body"), "t")] == [12, 6]


def test_rows_of_segments_have_their_headers_as_the_options_say(batch):
    stored = SegmentLog(batch, 0).claim(0, Head(rows=1), columns_of([b"x"], ext=b'{"a":"b"}'))
    for headers_as, expected in (("json", '{"a":"b"}'), ("map", [("a", "b")])):
        [rows] = batches([stored], choosing("headers", headersAs=headers_as), "t")
        assert rows["headers"].to_pylist() == [expected]


@pytest.mark.parametrize(
    "data", [b"", b"NSQ", b"x" * 100, b"NSQJ0001\x02\x00\x00\x00{!", b"NSQJ0001\xff\xff\x00\x00{}"]
)
def test_what_is_no_segment_is_an_error_that_names_it(tmp_path, data):
    path = tmp_path / "s0-0"
    path.write_bytes(data)
    with pytest.raises(JournalError, match=r"s0-0: (damaged|not a file)"):
        read(FileStorage(str(tmp_path)), "s0-0")


def test_a_segment_that_was_cut_is_an_error(batch):
    stored = SegmentLog(batch, 0).claim(0, Head(rows=100), columns_of([b"body"] * 100))
    os.truncate(stored.path, 1_500)
    with pytest.raises(JournalError, match="damaged: it has 1500 bytes of"):
        read(batch, stored.name).columns()


def test_the_byte_order_is_part_of_a_segment(batch):
    order = "big" if sys.byteorder == "little" else "little"
    stored = SegmentLog(batch, 0).claim(0, Head(order=order))
    with pytest.raises(JournalError, match="byte order"):
        read(batch, stored.name)


def test_what_is_written_in_parts_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "writev", lambda fd, buffers: os.write(fd, bytes(buffers[0])[:3]))
    FileStorage(str(tmp_path)).claim("f", [b"abcdef", b"ghi"])
    assert (tmp_path / "f").read_bytes() == b"abcdefghi"


def test_a_folder_that_goes_away_between_writing_and_claiming_fences(batch, monkeypatch):
    link = os.link

    def late(*names):
        os.rename(batch.path, f"{batch.path}-away")
        return link(*names)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(JournalClosed):
        SegmentLog(batch, 0).claim(0, Head())
    assert not os.path.exists(batch.path)


def test_a_stale_handle_of_a_network_file_system_is_a_folder_that_is_gone(batch, monkeypatch):
    def stale(*names):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(os, "link", stale)
    with pytest.raises(JournalClosed):
        SegmentLog(batch, 0).claim(0, Head())


def test_a_link_whose_answer_was_lost_and_that_was_repeated_is_ours(batch, monkeypatch):
    link = os.link

    def twice(*names):
        link(*names)
        link(*names)

    monkeypatch.setattr(os, "link", twice)
    SegmentLog(batch, 0).claim(0, Head(rows=1), columns_of([b"ours"]))
    monkeypatch.undo()
    assert bodies_of(SegmentLog(batch, 0).read()) == [b"ours"]


@pytest.mark.parametrize("call", ["link", "fsync"])
def test_a_failing_disk_is_told_and_leaves_no_temporary_file(batch, monkeypatch, call):
    def fails(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(JournalStorageFailed, match=r"journal: .*/s0-0 cannot be written: No space.*make room"):
        SegmentLog(batch, 0).claim(0, Head())
    assert os.listdir(batch.path) == []


def test_a_disk_that_cannot_be_used_is_told_with_what_to_do(batch, monkeypatch):
    SegmentLog(batch, 0).claim(0, Head())

    def fails(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(mmap, "mmap", fails)
    monkeypatch.setattr(os, "mkdir", fails)
    monkeypatch.setattr(os, "listdir", fails)
    read = r"journal: \S*{} cannot be read: Input/output error\. Its rows are nowhere else: mend the disk"
    with pytest.raises(JournalStorageFailed, match=read.format("b1/s0-0")):
        SegmentLog(batch, 0).read()
    with pytest.raises(JournalStorageFailed, match=read.format("b1")):
        batch.names()
    with pytest.raises(JournalStorageFailed, match=r"journal: \S*b2 cannot be made: Input/output error.*make room"):
        FileStorage(batch.path.removesuffix("b1") + "b2").make()


def test_file_and_folder_are_on_disk_before_a_claim_returns(batch, monkeypatch):
    calls = []
    fsync, link = os.fsync, os.link
    monkeypatch.setattr(
        os, "fsync", lambda fd: (calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd))
    )
    monkeypatch.setattr(os, "link", lambda *names: (calls.append("link"), link(*names)))
    SegmentLog(batch, 0).claim(0, Head())
    assert calls[0].startswith("t-")
    assert calls[1:] == ["link", "b1"]


def test_a_slot_that_an_attempt_left_is_sealed_with_what_there_is(batch):
    segment_log = SegmentLog(batch, 0)
    for number in range(3):
        segment_log.claim(
            number, Head(rows=1, run="dead", open=(1,) if number == 2 else ()), columns_of([b"%d" % number])
        )
    suspected = []
    assert bodies_of(segment_log.settle(suspected.append)) == [b"0", b"1", b"2"]
    assert [each.path[-1] for each in uncertain(suspected[0])] == ["1", "2"]
    assert segment_log.read()[-1].head == seal(segment_log.read()[:-1])
    assert bodies_of(segment_log.settle(lambda segments: pytest.fail("it was sealed"))) == [b"0", b"1", b"2"]


def test_one_who_was_thought_dead_and_claims_before_the_seal_is_part_of_it(batch):
    segment_log = SegmentLog(batch, 0)
    segment_log.claim(0, Head(rows=1), columns_of([b"0"]))
    rounds = []

    def zombie(segments):
        rounds.append(len(segments))
        if len(rounds) == 1:
            segment_log.claim(1, Head(rows=1), columns_of([b"1"]))

    assert bodies_of(segment_log.settle(zombie)) == [b"0", b"1"]
    assert rounds == [1, 2]


def test_whatever_attempts_race_what_was_claimed_is_what_is_sealed(batch, monkeypatch):
    """A writer goes on claiming while others seal: no segment of whose claim it was told may be missing."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # more claims a round
    for slot in range(30):
        segment_log = SegmentLog(batch, slot)
        segment_log.claim(0, Head(rows=1), columns_of([b"0"]))
        claimed, sealed = [b"0"], []

        def write(segment_log=segment_log, claimed=claimed):
            try:
                for number in range(1, 200):
                    body = b"%d" % number
                    segment_log.claim(number, Head(rows=1), columns_of([body]))
                    claimed.append(body)
            except JournalTaken:
                pass

        threads = [threading.Thread(target=write)]
        threads += [threading.Thread(target=lambda c=segment_log, s=sealed: s.append(c.settle(list))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [bodies_of(each) for each in sealed] == [claimed, claimed]


def test_the_seals_of_a_batch_say_what_each_run_took(batch):
    first, second = SegmentLog(batch, 0), SegmentLog(batch, 12)
    stored = [first.claim(n, Head(rows=1, run=run), columns_of([b"x"])) for n, run in enumerate(["a", "b", "a"])]
    first.claim(3, seal(stored, "b", {b"k" * 24}))
    second.claim(0, Head(rows=1), columns_of([b"not sealed"]))
    assert seals(batch) == {0: Head(is_seal=True, fresh={"a": 2, "b": 2}, seen=(b"k" * 24,))}


def test_the_same_id_of_another_time_is_another_message(journal):
    journal.suspects.add([b"%016x" % 0 + struct.pack("=q", 999)])
    columns = columns_of([b"a"])
    journal.open_batch(1)
    segment_log = journal.segment_log(1, 0)
    claimed = ClaimedSegments(segment_log, Head(), segment_log.claim, journal.suspects)
    new, met = claimed.drop_known([columns])
    assert (keys_of(new), met) == (keys_of(columns), frozenset())


def test_suspects_are_kept_until_they_are_seen_or_too_old(journal, monkeypatch):
    keys = keys_of(columns_of([b"a", b"b", b"c"]))
    journal.suspects.add(keys[:2])
    journal.suspects.add(keys[2:])
    again = Suspects(journal.suspects.storage)
    assert again.load() == set(keys)
    again.forget(keys[:1])
    assert again.load() == set(keys[1:])
    again.forget(keys[1:2])
    assert len(again.storage.names()) == 1
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 25 * 3600)
    again.forget([])
    assert again.load() == set()
    assert again.storage.names() == []


def test_a_suspect_file_that_the_driver_just_removed_is_no_error(journal, monkeypatch):
    journal.suspects.add(keys_of(columns_of([b"a"])))
    names = journal.suspects.storage.names()
    journal.suspects.forget(keys_of(columns_of([b"a"])))
    monkeypatch.setattr(os, "listdir", lambda folder: names)
    assert journal.suspects.load() == set()


@settings(max_examples=40)
@given(st.lists(st.tuples(st.binary(max_size=20), st.booleans()), min_size=1, max_size=30), st.booleans())
def test_taking_rows_of_columns_keeps_all_of_them(rows, detail):
    bodies = [body for body, _ in rows]
    columns = columns_of(bodies, ext=b'{"k":1}', detail=detail)
    chosen = [number for number, (_, keep) in enumerate(rows) if keep]
    facts = {"topic": "t", "partition": None, "nsqd": "n", "is_redesigned": True}
    whole = to_batch(columns, NAMES, **facts)
    assert to_batch(take(columns, chosen), NAMES, **facts).to_pylist() == [whole.to_pylist()[row] for row in chosen]


def test_a_journal_is_readable_by_its_owner_only(journal):
    journal.open_batch(1)
    journal.segment_log(1, 0).claim(0, Head())
    modes = {path: path.stat().st_mode & 0o777 for path in Path(journal.path).rglob("*")}
    assert Path(journal.path).stat().st_mode & 0o777 == 0o700
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in modes.items())


def test_commit_takes_a_batch_away_with_all_before_it(journal):
    for number in (1, 2, 3):
        journal.open_batch(number)
        journal.segment_log(number, 0).claim(0, Head(rows=1), columns_of([b"x"]))
    journal.commit(2)
    journal.commit(2)
    assert sorted(os.listdir(journal.path)) == ["about.json", "b3", "committed", "suspects"]
    with pytest.raises(JournalClosed):
        journal.segment_log(2, 0).claim(1, Head())
    with pytest.raises(JournalMissing, match=r"batch 2 .* has been committed and deleted"):
        journal.open_batch(2)
    journal.open_batch(3)


def test_commit_goes_on_where_an_earlier_one_stopped(journal, monkeypatch):
    journal.open_batch(1)
    journal.segment_log(1, 0).claim(0, Head())

    def fails(path):
        raise OSError(errno.EIO, "I/O error", path)

    monkeypatch.setattr("shutil.rmtree", fails)
    journal.commit(1)
    assert any(name.startswith("b1.gone-") for name in os.listdir(journal.path))
    monkeypatch.undo()
    journal.commit(1)
    assert not any(".gone-" in name for name in os.listdir(journal.path))


@pytest.mark.parametrize(
    ("journal", "reason"),
    [
        ("hdfs://name:9000/j", "neither a path nor s3://bucket/prefix; a journal needs a local .* file system"),
        ("gs:/b", "neither a path nor s3://bucket/prefix"),
        ("journal", "must be an absolute path"),
        ("s3:///a", "names no bucket"),
        ("s3://", "names no bucket"),
        ("s3://k:hush@b/a", "credentials"),
    ],
)
def test_what_is_no_place_is_refused_with_the_reason(journal, reason):
    with pytest.raises(ConfigError, match=reason) as told:
        check_path(journal)
    assert "hush" not in str(told.value)


@pytest.mark.parametrize(
    ("place", "spellings"),
    [
        ("/a/b", ["/a/b", "file:///a/b", "file:/a/b", "/a//b/"]),
        ("s3://bucket/a/b", ["s3://bucket/a/b", "s3a://bucket//a/b/"]),
        ("s3://bucket", ["s3n://bucket"]),
    ],
)
def test_a_place_is_the_same_however_it_is_spelt(place, spellings):
    assert {check_path(each) for each in spellings} == {place}


def no_links(*names):
    raise PermissionError(errno.EPERM, "Operation not permitted")


def replacing_links(source, target):
    Path(target).write_bytes(Path(source).read_bytes())


def copying_links(source, target):
    with open(target, "xb"):
        pass


@pytest.mark.parametrize(
    ("link", "reason"),
    [(no_links, "Operation not permitted"), (replacing_links, "replaces a file"), (copying_links, "makes a copy")],
)
def test_a_file_system_whose_links_are_not_what_they_must_be_is_refused(tmp_path, monkeypatch, link, reason):
    monkeypatch.setattr(os, "link", link)
    with pytest.raises(ConfigError, match=f"{reason}.*hard links"):
        check_links(str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file or directory"):
        check_links(str(tmp_path / "none"))


SOURCES = st.dictionaries(st.sampled_from(["h:1", "h:2", "p0", "p1", "p2"]), st.integers(0, 10_000))


def test_an_offset_is_what_spark_keeps_of_it():
    offset = Offset("abc", 3, {"h:2": 5, "h:1": 7})
    assert offset.encode() == {"j": "abc", "batch": 3, "slots": {"h:1": 7, "h:2": 5}}
    assert Offset.decode(json.loads(json.dumps(offset.encode()))) == offset


def test_slots_are_numbered_alike_whatever_order_spark_gives_them_in():
    one, other = Offset("j", 1, {"h:2": 5, "h:1": 7}), Offset("j", 1, {"h:1": 7, "h:2": 5})
    assert one.numbered() == other.numbered() == [(0, "h:1", 7), (1, "h:2", 5)]


@pytest.mark.parametrize(
    "offset", [{}, {"0": 123}, {"j": "a", "batch": "x", "slots": {}}, {"j": "a", "batch": 1, "slots": 3}]
)
def test_an_offset_of_another_reader_is_refused(offset):
    with pytest.raises(ConfigError, match="no offset of the journalled reader"):
        Offset.decode(offset)


@pytest.mark.parametrize(
    ("slot", "partition", "address"),
    [
        ("127.0.0.1:4150", None, Address("127.0.0.1", 4150)),
        ("[::1]:4150#2", None, Address("::1", 4150)),
        ("orders/p12#1", 12, Address("h", 1)),
        ("p0", 0, None),
    ],
)
def test_a_slot_names_its_source(slot, partition, address):
    servers = TopicServers(leaders={12: Nsqd(Address("h", 1), Endpoint("http", Address("h", 2)))})
    assert find_source(source_of(slot), servers) == (partition, address)


@pytest.mark.parametrize(
    ("available", "limit", "planned"),
    [
        ({"a": 10, "b": 0}, None, {"a": 10}),
        ({"a": 10, "b": 20}, 100, {"a": 10, "b": 20}),
        ({"a": 100, "b": 100}, 10, {"a": 5, "b": 5}),
        ({"a": 2, "b": 100}, 10, {"a": 2, "b": 8}),
        ({"a": 100, "b": 100, "c": 100}, 10, {"a": 3, "b": 3, "c": 4}),
        ({"a": 100, "b": 2, "c": 90}, 12, {"a": 5, "b": 2, "c": 5}),
        ({"a": 100, "b": 100, "c": 100}, 1, {"c": 1}),
        ({}, 10, {}),
    ],
)
def test_rows_are_shared_out(available, limit, planned):
    assert plan_rows(available, limit) == planned


@given(SOURCES, st.integers(1, 20_000))
def test_a_plan_uses_the_limit_and_nothing_beyond_it_or_what_there_is(available, limit):
    planned = plan_rows(available, limit)
    assert sum(planned.values()) == min(limit, sum(available.values()))
    assert all(0 < rows <= available[source] for source, rows in planned.items())


@given(SOURCES, st.integers(1, 30), st.none() | st.integers(100, 20_000))
def test_slots_have_all_rows_and_are_as_many_and_as_small_as_asked_for(available, least, most_rows):
    rows = plan_rows(available, None)
    slots = plan_slots(rows, least, most_rows)
    assert most_rows is None or max(slots.values(), default=0) <= most_rows
    assert {source: sum(n for slot, n in slots.items() if source_of(slot) == source) for source in rows} == rows
    assert len(slots) >= min(least, sum(min(n, -(-least // len(rows))) for n in rows.values())) if rows else not slots
    assert all(slots.values())


def test_a_target_is_all_that_was_there_and_is_reached_once():
    target = Target({"h:1": Depth(5, 2, 1), "h:2": Depth()})
    assert target.bound({"h:1": 100, "h:2": 9, "h:3": 9}) == {"h:1": 8, "h:2": 0, "h:3": 0}
    target.subtract({"h:1": 6})
    assert target.bound({"h:1": 100}) == {"h:1": 2}
    target.subtract({"h:1": 6, "h:3": 1})
    assert target.bound({"h:1": 100}) == {"h:1": 0}


@pytest.mark.parametrize("has_some", [False, True])
def test_a_server_that_has_no_time_limit_for_its_buffer_takes_nothing_from_the_patience(has_some: bool) -> None:
    task = Connections(pytest.fail, 10, 1)
    assert task.patience(-1, has_some=has_some) == task.patience(0, has_some=has_some)
    assert task.patience(250, has_some=has_some) == 0.25 + task.patience(0, has_some=has_some)


# What a journal needs of its storage holds of a file system and of an object store alike.


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
def stored_batch(root: Storage) -> Storage:
    made = root.below("b1")
    made.make()
    return made


def test_a_name_is_claimed_once_and_what_was_there_stays(stored_batch: Storage) -> None:
    stored_batch.claim("s0-0", [b"the ", memoryview(b"first")])
    with pytest.raises(JournalTaken, match="b1/s0-0 has been written by another attempt"):
        stored_batch.claim("s0-0", [b"the second"])
    assert bytes(stored_batch.view("s0-0")) == b"the first"
    assert stored_batch.names() == ["s0-0"]


def test_where_no_place_was_made_nothing_is_claimed(root: Storage) -> None:
    with pytest.raises(JournalClosed, match="b7 is not there: the batch has been committed by another attempt"):
        root.below("b7").claim("s0-0", [b"x"])
    assert root.names() == []
    assert root.below("b7").names() == []


def test_where_a_place_was_retired_nothing_is_claimed(
    root: Storage, stored_batch: Storage, place: tuple[str, ObjectStore]
) -> None:
    stored_batch.claim("s0-0", [b"first"])
    before = stored_batch.view("s0-0")
    root.retire("b1")
    for name in ("s0-0", "s0-1"):
        with pytest.raises((JournalClosed, JournalTaken)):
            stored_batch.claim(name, [b"late"])
    root.sweep()
    with pytest.raises(JournalClosed):
        stored_batch.claim("s0-0", [b"late"])
    assert (root.names(), root.tree("b"), stored_batch.names()) == ([], [], [])
    assert bytes(before) == b"first"
    with pytest.raises(FileNotFoundError):
        open_storage(stored_batch.path, place[1]).view("s0-0")


def test_a_claim_that_races_the_end_of_its_place_is_swept_or_refused(root: Storage, stored_batch: Storage) -> None:
    """A writer claims until it is refused: what it was told that it has was there before the end."""
    claimed: list[tuple[int, float]] = []

    def write() -> None:
        try:
            for number in range(10_000):
                began = time.monotonic()
                stored_batch.claim(f"s0-{number}", [b"x"])
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


def test_what_is_swept_is_what_was_retired(root: Storage, stored_batch: Storage) -> None:
    other = root.below("b2")
    other.make()
    for storage in (root, stored_batch, other):
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


def test_the_tree_tells_names_sizes_and_times(root: Storage, stored_batch: Storage) -> None:
    root.below("b12").make()
    root.below("b12").claim("s0-0", [b"1234"])
    root.claim("about.json", [b"{}"])
    stored_batch.claim("s0-0", [b"12"])
    stored_batch.claim("s0-1", [b""])
    assert sorted((each.name, each.size) for each in root.tree("b")) == [
        ("b1/s0-0", 2),
        ("b1/s0-1", 0),
        ("b12/s0-0", 4),
    ]
    assert sorted(each.name for each in root.tree("b1/")) == ["b1/s0-0", "b1/s0-1"]
    assert all(abs(each.written_at - time.time()) < 600 for each in root.tree("b"))


def test_making_a_place_twice_changes_nothing(root: Storage, stored_batch: Storage) -> None:
    stored_batch.claim("s0-0", [b"x"])
    root.make(parents=True)
    stored_batch.make()
    assert stored_batch.names() == ["s0-0"]


def test_a_good_storage_is_left_as_it_was(root: Storage) -> None:
    root.check()
    assert root.names() == []


def test_of_two_processes_that_race_one_wins_each_name_and_all_see_whose_it_is(
    stored_batch: Storage, place: tuple[str, ObjectStore]
) -> None:
    racers = {name: forked(race, stored_batch.path, place[1], name)[1] for name in "ab"}
    for racer in racers.values():
        assert racer.recv() == "ready"
    for racer in racers.values():
        racer.send("go")
    wins = {name: racer.recv() for name, racer in racers.items()}
    owners = [bytes(stored_batch.view(f"s{slot}-0")).decode() for slot in range(40)]
    assert {name: owners.count(name) for name in "ab"} == wins
