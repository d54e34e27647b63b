"""Damaged files in a data path: what is whole is served, what is lost is said once, and the file is kept."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from gevent import Timeout
from support.waiting import until
from support.wire import WireClient

from nsq_fast.broker import BrokerProcess, NsqdOptions, NsqdServer
from nsq_fast.broker.diskqueue.damage import number, whole_spans
from nsq_fast.broker.diskqueue.files import replace_file
from nsq_fast.broker.diskqueue.log import SegmentLog
from nsq_fast.broker.diskqueue.record import MARKER, deferred_frame, parse
from nsq_fast.broker.diskqueue.segments import Position
from nsq_fast.broker.message import encode_frames
from nsq_fast.broker.nsqd.guid import SnowflakeIds
from nsq_fast.broker.nsqd.nsqd import Nsqd

ALL = 10**9
FLIPS = (0x01, 0x02, 0x10, 0x80, 0xFF)


class Small(NamedTuple):
    """A small log: its records, and where each begins."""

    records: list[bytes]
    starts: list[int]

    @property
    def data(self) -> bytes:
        return b"".join(self.records)

    def hit(self, first: int, end: int) -> set[int]:
        """The numbers of the records that have one of these bytes."""
        return {
            number
            for number, (record, start) in enumerate(zip(self.records, self.starts, strict=True))
            if start < end and first < start + len(record)
        }


def small_log(bodies: list[bytes], *, deferred: bool = False) -> Small:
    records = encode_frames(SnowflakeIds(7).take(len(bodies)), bodies, 1_700_000_000_000_000_000)
    if deferred:
        records = [deferred_frame(record, 1_700_000_100.0) if n % 2 else record for n, record in enumerate(records)]
    records = [record + MARKER for record in records]
    starts = [sum(map(len, records[:n])) for n in range(len(records))]
    return Small(records, starts)


LOGS = {
    "text": small_log([b"a", b"second", b"a message of some length " * 3, b"next", b"last one"]),
    "equal": small_log([b"%030d" % n for n in range(6)]),
    "equal sizes of a power of two": small_log([b"%030d" % n for n in range(5)] + [b"x" * 94]),
    "zeros": small_log([bytes(20), b"x" + bytes(30), bytes(1), b"\0\0\0\2" * 9, bytes(8)]),
    "deferred": small_log([b"one", b"two two", b"three", b"four" * 9, b"five"], deferred=True),
}


@pytest.fixture(params=LOGS)
def small(request: pytest.FixtureRequest) -> Small:
    return LOGS[request.param]


def found_in(data: bytes) -> dict[int, bytes]:
    """The whole records of a segment, by where they begin."""
    found: dict[int, bytes] = {}
    for span in whole_spans(data).spans:
        at = span.start
        for message in parse(data[span.start : span.end], 0, ALL, is_checked=True).messages:
            size = 4 + int.from_bytes(data[at : at + 4], "big") + len(MARKER)
            found[at] = data[at : at + size]
            assert found[at].endswith(message.frame + MARKER)
            at += size
        assert at == span.end
    return found


def check(small: Small, data: bytes, hit: set[int]) -> None:
    """What was not hit is there as it was, and what was hit is not longer or shorter than it was."""
    found = found_in(data)
    for n, (record, start) in enumerate(zip(small.records, small.starts, strict=True)):
        if n not in hit:
            assert found.pop(start, None) == record, f"record {n}"
    for start, record in found.items():
        assert any(start + len(record) == small.starts[n] + len(small.records[n]) for n in hit), (start, record)


@pytest.mark.parametrize("flip", FLIPS)
def test_a_changed_byte_costs_no_other_record(small: Small, flip: int) -> None:
    for at in range(len(small.data)):
        data = bytearray(small.data)
        data[at] ^= flip
        check(small, bytes(data), small.hit(at, at + 1))


def test_a_cut_costs_only_what_it_cuts(small: Small) -> None:
    for at in range(len(small.data)):
        check(small, small.data[:at], small.hit(at, len(small.data)))


@pytest.mark.parametrize("length", [1, 8, 40, 4096])
def test_zeros_cost_only_what_they_cover(small: Small, length: int) -> None:
    for at in range(len(small.data)):
        end = min(at + length, len(small.data))
        data = small.data[:at] + bytes(end - at) + small.data[end:]
        found = found_in(data)
        # Zeros may stand where zeros stood: a record that ends in them is not known to be damaged.
        for n in set(range(len(small.records))) - small.hit(at, end):
            assert found[small.starts[n]] == small.records[n]


@pytest.mark.parametrize(
    "tail", [bytes(4096), bytes(3), b"\xff" * 100, os.urandom(500)], ids=["page", "3", "ff", "noise"]
)
def test_what_is_behind_the_last_record_costs_nothing(small: Small, tail: bytes) -> None:
    found = found_in(small.data + tail)
    assert [found[start] for start in small.starts] == small.records


def test_nothing_is_made_of_noise() -> None:
    assert whole_spans(os.urandom(100_000)).spans == []
    assert whole_spans(bytes(100_000)).spans == []


@pytest.mark.parametrize("lost", [{0}, {1}, {2}, {4}, {0, 1}, {1, 3}, {0, 2, 4}, {1, 2, 3}])
@pytest.mark.parametrize("is_end_known", [True, False])
def test_no_record_gets_a_smaller_number_than_it_had(lost: set[int], is_end_known: bool) -> None:
    small = LOGS["equal"]
    data = b"".join(b"\xee" * len(record) if n in lost else record for n, record in enumerate(small.records))
    end = 100 + len(small.records) if is_end_known else None
    pieces = number(whole_spans(data).spans, len(data), 100, end)
    given = {
        piece.span.start + index * len(small.records[0]): piece.first + index
        for piece in pieces
        for index in range(piece.span.records)
    }
    real = {small.starts[n]: 100 + n for n in range(len(small.records)) if n not in lost}
    assert given.keys() == real.keys()
    assert all(given[start] >= real[start] for start in real)
    assert sorted(given.values()) == [given[start] for start in sorted(given)]
    for piece in pieces:
        if piece.is_exact:
            assert given[piece.span.start] == real[piece.span.start]
    if is_end_known and len(lost) == 1:
        assert given == real


# --- the log ---------------------------------------------------------------------------------------------------------


def read_all(log: SegmentLog) -> list[bytes]:
    frames: list[bytes] = []
    position = log.seek(log.first)
    while position.sequence < log.end.sequence:
        messages, position = log.read(position, 3)
        frames += [message.frame for message in messages]
    return frames


@pytest.mark.parametrize("flip", [0x80, 0x01])
def test_a_log_is_read_and_written_to_with_any_byte_damaged(tmp_path: Path, flip: int) -> None:
    small = LOGS["text"]
    for at in range(len(small.data)):
        folder = tmp_path / str(at)
        log = SegmentLog(folder, 1 << 20)
        log.append([record.removesuffix(MARKER) for record in small.records])
        log.close()
        [path] = folder.glob("*.log")
        data = bytearray(small.data)
        data[at] ^= flip
        path.write_bytes(data)
        expected = [
            small.records[n].removesuffix(MARKER) for n in range(len(small.records)) if n not in small.hit(at, at + 1)
        ]
        new = encode_frames(SnowflakeIds(7).take(2), [b"new", b"newer"], 1)
        for n in range(2):
            log = SegmentLog(folder, 1 << 20)
            log.append(new[n : n + 1])
            frames = read_all(log)
            assert [frame for frame in frames if frame in expected] == expected
            assert frames[-1 - n :] == new[: n + 1]
            assert log.count(log.first, log.end.sequence) == len(frames)
            log.close()


def test_damage_between_segments_keeps_the_numbers_of_the_others(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path / "log", 4096)
    ids = SnowflakeIds(1)
    for n in range(400):
        log.append(encode_frames(ids.take(1), [b"%020d" % n], 1))
    log.close()
    paths = sorted((tmp_path / "log").glob("*.log"))
    damage(paths[0], 0, b"\x7f\xff\xff\xff")
    damage(paths[1], 58 * 10, b"\xff" * 58 * 3)
    paths[3].unlink()
    os.truncate(paths[5], 58 * 2 + 5)
    firsts = [int(path.stem) for path in paths]
    lost = {0, *range(firsts[1] + 10, firsts[1] + 13), *range(firsts[3], firsts[4]), *range(firsts[5] + 2, 400)}
    log = SegmentLog(tmp_path / "log", 4096)
    assert (len(paths), log.end.sequence) == (6, firsts[5] + 2)
    position, numbers = Position(0, 0), []
    while position.sequence < log.end.sequence:
        messages, position = log.read(position, 1000)
        assert all(message.sequence == int(message.body) for message in messages)
        numbers += [message.sequence for message in messages]
    assert numbers == sorted(set(range(400)) - lost)
    assert log.count(0, log.end.sequence) == len(numbers)
    for n in lost:
        behind = log.read(log.seek(n), 1)[0]
        assert [message.sequence for message in behind] == [number for number in numbers if number > n][:1]
    assert {path.name for path in (tmp_path / "log").glob("*.bad")} == {f"{paths[n].name}.bad" for n in (0, 1, 5)}


def test_a_file_that_is_missing_behind_a_damaged_one_makes_no_number_smaller(tmp_path: Path) -> None:
    log = SegmentLog(tmp_path / "log", 4096)
    ids = SnowflakeIds(1)
    for n in range(300):
        log.append(encode_frames(ids.take(1), [b"%020d" % n], 1))
    log.close()
    paths = sorted((tmp_path / "log").glob("*.log"))
    damage(paths[0], 58 * 10, b"\xff" * 58)
    paths[1].unlink()
    log = SegmentLog(tmp_path / "log", 4096)
    messages, _ = log.read(log.seek(20), 1000)
    assert messages
    assert all(message.sequence >= int(message.body) for message in messages)
    assert set(log.inexact_numbers()) >= {message.sequence for message in messages}


def damage(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


# --- an nsqd ---------------------------------------------------------------------------------------------------------


def count_errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


class Consumer:
    """A client of a channel without a connection."""

    id = 1

    def __init__(self) -> None:
        from nsq_fast.broker.nsqd.in_flight import InFlight

        self.in_flight = InFlight(self, 60.0)

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


def drain(nsqd: Nsqd, topic: str, channel: str) -> list[bytes]:
    """Consume and finish everything."""
    consumer = Consumer()
    queue = nsqd.topics[topic].channels[channel]
    queue.add_client(consumer)  # type: ignore[arg-type]
    bodies = []
    while frames := queue.deliver(consumer, 100):  # type: ignore[arg-type]
        for frame in frames:
            bodies.append(frame[34:])
            queue.finish(consumer, frame[18:34])  # type: ignore[arg-type]
    assert (queue.depth, queue.in_flight_count) == (0, 0)
    return bodies


UNFINISHED = {b"1", b"3", b"4", b"5", b"6", b"7"}


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data path with a topic and a channel, of whose messages 0 to 7 all but 0 and 2 are unfinished."""
    monkeypatch.setattr("nsq_fast.broker.diskqueue.files.os.fsync", lambda fd: None)  # takes time, proves nothing here
    with in_nsqd(tmp_path) as nsqd:
        topic = nsqd.get_topic("t")
        channel = topic.get_channel("c")
        topic.put_many([b"%d" % n for n in range(8)])
        consumer = Consumer()
        channel.add_client(consumer)  # type: ignore[arg-type]
        for frame in channel.deliver(consumer, 3):  # type: ignore[arg-type]
            if frame[34:] != b"1":
                channel.finish(consumer, frame[18:34])  # type: ignore[arg-type]
    return tmp_path


class in_nsqd:
    """An nsqd on a data path, for the time of a ``with``; it must start within a second or so."""

    def __init__(self, path: Path, *, preserve_order: bool = True) -> None:
        self.nsqd = Nsqd(
            NsqdOptions(data_path=str(path), sync_timeout=60.0, mem_queue_size=2, preserve_order=preserve_order)
        )

    def __enter__(self) -> Nsqd:
        with Timeout(10):
            self.nsqd.start()
        return self.nsqd

    def __exit__(self, *_: object) -> None:
        self.nsqd.close()


def files_of(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def put_back(path: Path, files: dict[Path, bytes]) -> None:
    for file in path.rglob("*"):
        if file.is_file() and file not in files:
            file.unlink()
    for file, data in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


@pytest.mark.parametrize("name", ["log", "checkpoint", "nsqd.dat"])
@pytest.mark.parametrize("flip", [0x01, 0x80])
def test_an_nsqd_starts_and_serves_with_any_byte_of_a_file_damaged(
    prepared: Path, caplog: pytest.LogCaptureFixture, name: str, flip: int
) -> None:
    files = files_of(prepared)
    [victim] = [file for file in files if file.name == name or file.suffix == f".{name}"]
    for at in range(len(files[victim])):
        put_back(prepared, files)
        data = bytearray(files[victim])
        data[at] ^= flip
        victim.write_bytes(data)
        caplog.clear()
        with in_nsqd(prepared) as nsqd:
            errors = count_errors(caplog)
            topic = nsqd.get_topic("t")
            topic.put(b"new")
            bodies = drain(nsqd, "t", "c")
        lost = UNFINISHED - set(bodies)
        assert len(lost) <= (1 if name == "log" else 0), (at, lost)
        assert b"new" in bodies
        assert len(errors) <= 1
        if lost and name == "log" and at % 39 != 34:  # a body that has changed is delivered as it is
            assert [error for error in errors if str(victim) in error], at
            assert Path(f"{victim}.bad").read_bytes() == bytes(data)
        with in_nsqd(prepared) as nsqd:
            assert drain(nsqd, "t", "c") == []


@pytest.mark.parametrize("name", ["log", "checkpoint", "nsqd.dat"])
def test_an_nsqd_starts_and_serves_with_a_file_cut_anywhere_or_missing(
    prepared: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    files = files_of(prepared)
    [victim] = [file for file in files if file.name == name or file.suffix == f".{name}"]
    for at in range(-1, len(files[victim])):
        put_back(prepared, files)
        victim.unlink()
        if at >= 0:
            victim.write_bytes(files[victim][:at])
        caplog.clear()
        with in_nsqd(prepared) as nsqd:
            topic = nsqd.get_topic("t")
            topic.put(b"new")
            bodies = drain(nsqd, "t", "c")
        whole = {b"%d" % n for n in range(8) if 39 * (n + 1) <= at} if name == "log" else UNFINISHED
        assert (UNFINISHED & whole) | {b"new"} <= set(bodies), at
        assert count_errors(caplog), at
        with in_nsqd(prepared) as nsqd:
            assert drain(nsqd, "t", "c") == []


@pytest.fixture
def turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data path with a channel that has delivered and finished what was in memory, while others waited on disk."""
    monkeypatch.setattr("nsq_fast.broker.diskqueue.files.os.fsync", lambda fd: None)  # takes time, proves nothing here
    monkeypatch.setattr("nsq_fast.broker.nsqd.backlog.random.getrandbits", lambda bits: 1)  # from memory
    with in_nsqd(tmp_path, preserve_order=False) as nsqd:
        topic = nsqd.get_topic("t")
        channel = topic.get_channel("c")
        consumer = Consumer()
        channel.add_client(consumer)  # type: ignore[arg-type]
        topic.put_many([b"0", b"1", b"2"])
        for n in range(3, 9, 2):
            for frame in channel.deliver(consumer, 2):  # type: ignore[arg-type]
                channel.finish(consumer, frame[18:34])  # type: ignore[arg-type]
            topic.put_many([b"%d" % n, b"%d" % (n + 1)])
        assert (len(channel.backlog.memory), len(channel.backlog.backend)) == (2, 1)
    return tmp_path


@pytest.mark.parametrize("name", ["log", "checkpoint"])
@pytest.mark.parametrize("how", ["flip", "cut"])
def test_damage_costs_no_more_where_messages_came_in_turns(turns: Path, name: str, how: str) -> None:
    files = files_of(turns)
    [victim] = [file for file in files if file.name == name or file.suffix == f".{name}"]
    for at in range(len(files[victim])):
        put_back(turns, files)
        data = bytearray(files[victim])
        data[at] ^= 0x80
        victim.write_bytes(data if how == "flip" else data[:at])
        with in_nsqd(turns, preserve_order=False) as nsqd:
            nsqd.get_topic("t").put(b"new")
            bodies = drain(nsqd, "t", "c")
        whole = {b"2", b"7", b"8"}
        if name == "log":
            whole = {body for body in whole if (int(body) != at // 39 if how == "flip" else 39 * (int(body) + 1) <= at)}
        assert whole | {b"new"} <= set(bodies), (at, bodies)
        with in_nsqd(turns, preserve_order=False) as nsqd:
            assert drain(nsqd, "t", "c") == []


def test_new_messages_do_not_get_the_numbers_of_lost_ones(prepared: Path) -> None:
    [path] = prepared.rglob("*.log")
    os.truncate(path, 39 * 2)
    nsqd = Nsqd(NsqdOptions(data_path=str(prepared), sync_timeout=60.0))
    nsqd.start()
    nsqd.get_topic("t").put(b"new")
    nsqd.kill()  # before any checkpoint: the old one names the lost messages
    with in_nsqd(prepared) as nsqd:
        assert set(drain(nsqd, "t", "c")) == {b"1", b"new"}


@pytest.fixture
def process(tmp_path: Path) -> Iterator[BrokerProcess]:
    broker = BrokerProcess(nsqds=1, lookupd=False, data_path=tmp_path, mem_queue_size=10)
    broker.start()
    yield broker
    broker.kill()


def test_a_first_record_of_two_gigabytes_stops_nothing(process: BrokerProcess, tmp_path: Path) -> None:
    client = WireClient(process.nsqd.tcp)
    client.subscribe("t", "c", 1)
    for n in range(50):
        WireClient(process.nsqd.tcp).publish("t", b"%d" % n)
    client.message()
    process.kill()
    [path] = tmp_path.rglob("*.log")
    damage(path, 0, b"\x7f\xff\xff\xff")
    process.start()
    client = WireClient(process.nsqd.tcp)
    client.subscribe("t", "c", 100)
    assert {client.message().body for _ in range(49)} == {b"%d" % n for n in range(1, 50)}
    pid = process.pid
    process.stop()
    assert not Path(f"/proc/{pid}").exists()


# --- a disk that fills and empties -----------------------------------------------------------------------------------


def test_a_file_that_is_written_in_part_does_not_replace_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    replace_file(path, b"old", sync=False)
    write = os.write
    left = [4]

    def nearly_full(fd: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(28, "No space left on device")
        written = write(fd, bytes(data)[: left[0]])
        left[0] -= written
        return written

    monkeypatch.setattr("nsq_fast.broker.diskqueue.files.os.write", nearly_full)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, b"new content", sync=False)
    assert path.read_bytes() == b"old"
    left[0] = 100
    replace_file(path, b"new content", sync=False)
    assert path.read_bytes() == b"new content"


def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let every write fail; call the result to make room again."""
    patch = pytest.MonkeyPatch()

    def fail(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    patch.setattr("nsq_fast.broker.diskqueue.files.os.write", fail)
    patch.setattr("nsq_fast.broker.diskqueue.segment.os.pwrite", fail)
    return patch.undo


def test_a_full_disk_is_said_once_and_what_could_not_be_written_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = NsqdOptions(data_path=str(tmp_path), sync_timeout=0.02)
    with NsqdServer(options) as server:
        server.nsqd.get_topic("t").get_channel("c")
        make_room = full_disk(monkeypatch)
        try:
            server.nsqd.get_topic("u").get_channel("d")
            WireClient(server.tcp_address).command(b"PUB t\n\0\0\0\x01x")
            until(lambda: server.nsqd.error is not None)
        finally:
            make_room()
        until(lambda: server.nsqd.error is None)
        until(lambda: b'"u"' in (tmp_path / "nsqd.dat").read_bytes())
        server.kill()
    assert len([error for error in count_errors(caplog) if "No space" in error]) == 1
    with in_nsqd(tmp_path) as nsqd:
        assert set(nsqd.topics["u"].channels) == {"d"}


def test_an_nsqd_ends_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = NsqdServer(NsqdOptions(data_path=str(tmp_path)))
    server.start()
    for name in "tu":
        server.nsqd.get_topic(name).get_channel("c")
        server.nsqd.get_topic(name).put(b"x")
    make_room = full_disk(monkeypatch)
    try:
        server.stop()
    finally:
        make_room()
    with in_nsqd(tmp_path) as nsqd:
        assert [drain(nsqd, name, "c") for name in "tu"] == [[b"x"], [b"x"]]
