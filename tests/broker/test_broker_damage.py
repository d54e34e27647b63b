"""Damaged files in a data path: a file is read up to the damage, the rest is said once and kept."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gevent import Timeout
from support.waiting import until
from support.wire import WireClient

from nsq_fast.broker import BrokerProcess, NsqdOptions, NsqdServer
from nsq_fast.broker.journal import Journal, Position, replace_file
from nsq_fast.broker.message import SnowflakeIds, encode_frames
from nsq_fast.broker.nsqd import Nsqd

HEAD = 36
RECORD = 24 + 4 + 35
"""Bytes of a message of one byte that was published alone, with what a batch begins with."""


def write_log(folder: Path, count: int, file_size: int = 1 << 20) -> list[Path]:
    """A log of messages that are their numbers, each published alone; its files."""
    log, ids = Journal(folder, file_size), SnowflakeIds(1)
    for n in range(count):
        log.append(encode_frames(ids.take(1), [b"%020d" % n], 1))
    log.close()
    return sorted(folder.glob("*.log"))


def read_all(log: Journal) -> list[int]:
    numbers: list[int] = []
    position = Position(0, 0)
    while position.sequence < log.end:
        messages, position = log.read(position)
        assert all(message.sequence == int(message.body) for message in messages)
        numbers += [message.sequence for message in messages]
    return numbers


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_any_byte_that_has_changed_ends_what_can_be_read(tmp_path: Path, flip: int) -> None:
    [path] = write_log(tmp_path / "log", 4)
    whole = path.read_bytes()
    size = (len(whole) - HEAD) // 4
    for at in range(len(whole)):
        data = bytearray(whole)
        data[at] ^= flip
        path.write_bytes(data)
        log = Journal(path.parent, 1 << 20)
        expected = list(range((at - HEAD) // size)) if at >= HEAD else []
        assert read_all(log) == expected
        log.start_at(4)  # as a checkpoint says
        log.append(encode_frames(SnowflakeIds(1).take(1), [b"%020d" % 4], 1))
        assert read_all(log) == [*expected, 4]
        assert log.count(0, 5) == len(expected) + 1
        log.close()
        rest = HEAD + len(expected) * size if at >= HEAD else 0
        assert path.with_name(path.name + ".bad").read_bytes() == data[rest:]
        log = Journal(path.parent, 1 << 20)
        assert read_all(log) == [*expected, 4]
        log.close()


def test_damage_in_some_files_keeps_the_numbers_of_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = write_log(tmp_path / "log", 400, 4096)
    firsts = [int(path.stem) for path in paths]
    size = (paths[0].stat().st_size - HEAD) // firsts[1]
    damage(paths[0], HEAD, b"\x7f\xff\xff\xff")
    damage(paths[1], HEAD + size * 10, b"\xff" * size * 3)
    paths[3].unlink()
    os.truncate(paths[5], HEAD + size * 2 + 5)
    lost = {
        *range(firsts[1]), *range(firsts[1] + 10, firsts[2]), *range(firsts[3], firsts[4]),
        *range(firsts[5] + 2, firsts[6]),
    }  # fmt: skip
    log = Journal(tmp_path / "log", 4096)
    assert log.end == 400
    numbers = read_all(log)
    assert numbers == sorted(set(range(400)) - lost)
    assert log.count(0, log.end) == len(numbers)
    for n in lost:
        behind = log.read(log.at(n))[0][:1]
        assert [message.sequence for message in behind] == [number for number in numbers if number > n][:1]
    assert {path.name for path in (tmp_path / "log").glob("*.bad")} == {f"{paths[n].name}.bad" for n in (0, 1, 5)}
    assert len([error for error in count_errors(caplog) if "is damaged" in error]) == 3


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
        from nsq_fast.broker.queue import InFlight

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
            queue.finish(consumer, [frame[18:34]])  # type: ignore[arg-type]
    assert (queue.depth, queue.in_flight_count) == (0, 0)
    return bodies


UNFINISHED = {b"1", b"3", b"4", b"5", b"6", b"7"}


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data path with a topic and a channel, of whose messages 0 to 7 all but 0 and 2 are unfinished."""
    monkeypatch.setattr("nsq_fast.broker.journal.os.fsync", lambda fd: None)  # takes time, proves nothing here
    with in_nsqd(tmp_path) as nsqd:
        topic = nsqd.get_topic("t")
        channel = topic.get_channel("c")
        for n in range(8):
            topic.put(b"%d" % n)
        consumer = Consumer()
        channel.add_client(consumer)  # type: ignore[arg-type]
        for frame in channel.deliver(consumer, 3):  # type: ignore[arg-type]
            if frame[34:] != b"1":
                channel.finish(consumer, [frame[18:34]])  # type: ignore[arg-type]
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


def whole_of(at: int) -> set[bytes]:
    """The unfinished messages that are before a byte of the log."""
    return {body for body in UNFINISHED if HEAD + RECORD * (int(body) + 1) <= at}


@pytest.mark.parametrize("name", ["log", "checkpoint", "nsqd.dat"])
@pytest.mark.parametrize("how", ["flip", "cut"])
def test_an_nsqd_starts_and_serves_with_any_byte_of_a_file_damaged(
    prepared: Path, caplog: pytest.LogCaptureFixture, name: str, how: str
) -> None:
    files = files_of(prepared)
    [victim] = [file for file in files if file.name == name or file.suffix == f".{name}"]
    for at in range(len(files[victim])):
        put_back(prepared, files)
        data = bytearray(files[victim])
        data[at] ^= 0x80
        victim.write_bytes(data if how == "flip" else data[:at])
        caplog.clear()
        with in_nsqd(prepared) as nsqd:
            topic = nsqd.get_topic("t")
            topic.put(b"new")
            bodies = drain(nsqd, "t", "c")
        assert (whole_of(at) if name == "log" else UNFINISHED) | {b"new"} <= set(bodies), at
        assert count_errors(caplog) or name == "nsqd.dat", at  # a name that is another one is no damage
        with in_nsqd(prepared) as nsqd:
            assert drain(nsqd, "t", "c") == []


@pytest.mark.parametrize("name", ["log", "checkpoint", "nsqd.dat"])
def test_an_nsqd_starts_and_serves_without_a_file(prepared: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    [victim] = [file for file in files_of(prepared) if file.name == name or file.suffix == f".{name}"]
    victim.unlink()
    with in_nsqd(prepared) as nsqd:
        nsqd.get_topic("t").put(b"new")
        bodies = drain(nsqd, "t", "c")
    assert (set() if name == "log" else UNFINISHED) | {b"new"} <= set(bodies)
    assert count_errors(caplog)


@pytest.fixture
def turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data path with a channel that has delivered and finished what was in memory, while others waited on disk."""
    monkeypatch.setattr("nsq_fast.broker.journal.os.fsync", lambda fd: None)  # takes time, proves nothing here
    monkeypatch.setattr("nsq_fast.broker.channel.random.getrandbits", lambda bits: 1)  # from memory
    with in_nsqd(tmp_path, preserve_order=False) as nsqd:
        topic = nsqd.get_topic("t")
        channel = topic.get_channel("c")
        consumer = Consumer()
        channel.add_client(consumer)  # type: ignore[arg-type]
        for n in range(3):
            topic.put(b"%d" % n)
        for n in range(3, 9, 2):
            for frame in channel.deliver(consumer, 2):  # type: ignore[arg-type]
                channel.finish(consumer, [frame[18:34]])  # type: ignore[arg-type]
            topic.put(b"%d" % n)
            topic.put(b"%d" % (n + 1))
        assert (len(channel.memory), len(channel.backend)) == (2, 1)
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
            whole = {body for body in whole if HEAD + RECORD * (int(body) + 1) <= at}
        assert whole | {b"new"} <= set(bodies), (at, bodies)
        with in_nsqd(turns, preserve_order=False) as nsqd:
            assert drain(nsqd, "t", "c") == []


def test_new_messages_do_not_get_the_numbers_of_lost_ones(prepared: Path) -> None:
    [path] = prepared.rglob("*.log")
    os.truncate(path, HEAD + RECORD * 2)
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


def test_a_record_of_two_gigabytes_stops_nothing(process: BrokerProcess, tmp_path: Path) -> None:
    client = WireClient(process.nsqd.tcp)
    client.subscribe("t", "c", 1)
    for n in range(50):
        client.publish("t", b"%d" % n)
    client.message()
    process.kill()
    [path] = tmp_path.rglob("*.log")
    damage(path, HEAD + 5 * RECORD + 4, b"\x7f\xff\xff\xff")
    process.start()
    client = WireClient(process.nsqd.tcp)
    client.subscribe("t", "c", 100)
    assert {client.message().body for _ in range(5)} == {b"%d" % n for n in range(5)}
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

    monkeypatch.setattr("nsq_fast.broker.journal.os.write", nearly_full)
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

    patch.setattr("nsq_fast.broker.journal.os.write", fail)
    patch.setattr("nsq_fast.broker.journal.os.pwrite", fail)
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
