"""What a data path keeps: over a stop, a SIGKILL, damage, a new version, and while messages wait for long."""

from __future__ import annotations

import base64
import errno
import json
import logging
import os
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from gevent import Timeout
from support.http import ask
from support.waiting import WAIT, until
from support.wire import Consumer, WireClient, sized

from nsq_fast.broker import Broker, NsqdOptions, NsqdServer, RedesignedCluster
from nsq_fast.broker.journal import OPEN_FILES, Journal, Position
from nsq_fast.broker.message import DataPathError, SnowflakeIds, encode_frames
from nsq_fast.broker.nsqd import Nsqd
from nsq_fast.broker.queue import InFlight
from nsq_fast.broker.servers import ServerGroup
from nsq_fast.broker.store import Store, take_checkpoint
from nsq_fast.broker.topic import Topic

# What survives with a data path: a stop, a SIGKILL, and files that were not written whole.


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NsqdServer]:
    server = NsqdServer(NsqdOptions(data_path=str(tmp_path), sync_timeout=60.0, mem_queue_size=20, preserve_order=True))
    server.start()
    yield server
    server.kill()


def publish(server: NsqdServer, topic: str, first: int, count: int) -> None:
    server.nsqd.get_topic(topic).put_many([b"%d" % n for n in range(first, first + count)])


def subscribe(server: Any, channel: str = "c", rdy: int = 10) -> WireClient:
    client = WireClient(server.tcp_address)
    client.subscribe("t", channel, rdy)
    return client


def consume(client: WireClient, count: int) -> list[int]:
    return [int(client.message().body) for _ in range(count)]


def stop(server: NsqdServer) -> None:
    server.stop()
    server.start()


def kill(server: NsqdServer) -> None:
    server.kill()
    server.start()


@pytest.mark.parametrize("again", [stop, kill])
def test_what_there_is_comes_back_and_what_was_deleted_or_emptied_does_not(server: NsqdServer, again: Any) -> None:
    topic, paused = server.nsqd.get_topic("t"), server.nsqd.get_topic("..")
    for name in ("c", "d", "e#ephemeral"):
        topic.get_channel(name)
    paused.get_channel("c").set_paused(True)
    paused.set_paused(True)
    for name in ("gone", "e#ephemeral"):
        server.nsqd.get_topic(name).put(b"x")
    server.nsqd.delete_topic("gone")
    publish(server, "t", 0, 50)
    topic.channels["c"].empty()
    topic.delete_channel("d")
    publish(server, "t", 50, 1)
    again(server)
    topics = server.nsqd.topics
    assert {name: topic.is_paused for name, topic in topics.items()} == {"t": False, "..": True}
    assert {name: channel.is_paused for name, channel in topics[".."].channels.items()} == {"c": True}
    assert set(topics["t"].channels) == {"c"}
    assert consume(subscribe(server), 1) == [50]
    assert [server.nsqd.get_topic(name).depth for name in ("gone", "e#ephemeral")] == [0, 0]


def test_a_checkpoint_costs_what_has_changed_and_not_what_waits(tmp_path: Path) -> None:
    nsqd = Nsqd(NsqdOptions(data_path=str(tmp_path), sync_timeout=3600.0, mem_queue_size=200_000))
    nsqd.start()
    topic = nsqd.get_topic("t")
    channel, consumer = topic.get_channel("c"), bare_client()
    channel.add_client(consumer)
    for _ in range(100):
        topic.put_many([b"x"] * 1000)

    def taken() -> float:
        began = time.thread_time()
        take_checkpoint(topic)
        return time.thread_time() - began

    first, later = taken(), []
    for _ in range(5):
        (frame,) = channel.deliver(consumer, 1)
        channel.finish(consumer, [frame[18:34]])
        topic.put(b"x")
        later.append(taken())
    assert min(later) * 10 < first
    nsqd.close()


def test_data_path_is_for_one_nsqd(server: NsqdServer, tmp_path: Path) -> None:
    with pytest.raises(DataPathError, match="in use"):
        Nsqd(NsqdOptions(data_path=str(tmp_path))).start()
    with pytest.raises(DataPathError, match="not a folder"):
        Nsqd(NsqdOptions(data_path=str(tmp_path / "missing"))).start()


REAL = "t.diskqueue.000000.dat", "t:c.diskqueue.meta.dat"


@pytest.mark.parametrize(
    ("name", "make", "whose"),
    [
        *((name, Broker, "the original nsqd") for name in REAL),
        *((name, RedesignedCluster, "the original nsqd") for name in REAL),
        ("nsqd1/" + REAL[0], partial(Broker, nsqds=2), "the original nsqd"),
        ("t/t-0.diskqueue.meta.writer.dat", Broker, "the redesigned nsqd"),
        ("t/t-0.diskqueue.meta.writer.dat", RedesignedCluster, "the redesigned nsqd"),
        ("nsqd0/nsqd.dat", Broker, "several embedded nsqds"),
        ("nsqd0/nsqd.dat", RedesignedCluster, "several embedded nsqds"),
        ("nsqd0/cluster.json", Broker, "an embedded cluster"),
        ("nsqd0/cluster.json", partial(Broker, nsqds=2), "an embedded cluster"),
        ("nsqd.dat", partial(Broker, nsqds=2), "one embedded nsqd"),
        ("nsqd.dat", RedesignedCluster, "an embedded nsqd"),
    ],
)
def test_a_data_path_of_others_is_refused_and_left_as_it_is(
    tmp_path: Path, name: str, make: Callable[..., ServerGroup], whose: str
) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"messages")
    said = f"'{tmp_path}.* is of {whose}, as .*{file.name} in it shows: its messages .* give another folder"
    with pytest.raises(DataPathError, match=said), make(data_path=tmp_path):
        pass
    assert file.read_bytes() == b"messages"


@pytest.mark.parametrize("make", [Broker, RedesignedCluster])
def test_a_data_path_that_cannot_be_written_is_refused(make: Callable[..., ServerGroup]) -> None:
    with tempfile.TemporaryDirectory() as folder:  # a name that other users reach, as tmp_path is not
        Path(folder).chmod(0o555)
        user = os.geteuid()
        try:
            if not user:
                os.seteuid(65534)  # root writes everywhere
            with pytest.raises(DataPathError, match="nothing can be written there"), make(data_path=folder):
                pass
        finally:
            os.seteuid(user)


@pytest.mark.parametrize(("sync_every", "expected"), [(1, 5), (3, 1), (2500, 0)])
def test_messages_are_synced_before_ok_whenever_sync_every_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync_every: int, expected: int
) -> None:
    options = NsqdOptions(data_path=str(tmp_path), sync_every=sync_every, sync_timeout=60.0)
    with NsqdServer(options) as server:
        server.nsqd.get_topic("t")
        synced: list[int] = []
        monkeypatch.setattr("nsq_fast.broker.nsqd.os.fsync", synced.append)
        client = WireClient(server.tcp_address)
        for n in range(5):
            client.publish("t", b"%d" % n)
        assert len(synced) == expected


def open_files(folder: Path) -> int:
    links = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    return sum(link.startswith(str(folder)) and link.endswith(".log") for link in links)


@pytest.mark.parametrize("again", [stop, kill])
def test_there_may_be_more_topics_than_files_may_be_open(
    server: NsqdServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: Any
) -> None:
    monkeypatch.setattr(OPEN_FILES, "most", 3)
    names = [f"t{number}" for number in range(10)]
    for _ in range(2):
        for name in names:
            server.nsqd.get_topic(name).get_channel("c")
            publish(server, name, 0, 30)  # more than memory has room for
        assert open_files(tmp_path) <= 3
        again(server)
    for name in names:
        assert server.nsqd.get_topic(name).get_channel("c").depth == 60
        client = WireClient(server.tcp_address)
        client.subscribe(name, "c", 60)
        assert sorted(consume(client, 60)) == sorted([*range(30)] * 2)
        client.close()
    assert open_files(tmp_path) <= 3


def test_a_topic_without_a_data_path_takes_no_file_for_a_few_messages() -> None:
    def nameless() -> int:
        links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        return sum(link.endswith("(deleted)") for link in links)

    server = NsqdServer(NsqdOptions(mem_queue_size=20, preserve_order=True))
    server.start()
    before = nameless()
    for number in range(10):
        server.nsqd.get_topic(f"few{number}").put_many([b"x"] * 30)
    assert nameless() == before
    topic = server.nsqd.get_topic("t")
    for number in range(300):
        topic.put_many([b"%d" % number, b"x" * 200])
    assert nameless() == before + 1
    client = subscribe(server, rdy=2500)
    bodies = [client.message().body for _ in range(600)]
    assert bodies[::2] == [b"%d" % number for number in range(300)]
    assert set(bodies[1::2]) == {b"x" * 200}
    client.close()
    server.kill()


def test_topics_that_are_made_in_great_numbers_come_back_before_they_are_named_in_nsqd_dat(
    server: NsqdServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsq_fast.broker.nsqd._MANY_TOPICS", 3)
    monkeypatch.setattr("nsq_fast.broker.nsqd._SAVE_SHARE", 1e-9)
    for number in range(20):
        server.nsqd.get_topic(f"t{number}").get_channel("c")
        publish(server, f"t{number}", 0, 1)
    assert b'"t19"' not in (tmp_path / "nsqd.dat").read_bytes()  # it is not written for each
    server.nsqd.get_topic("t5").get_channel("c").set_paused(True)
    assert b'"t19"' in (tmp_path / "nsqd.dat").read_bytes()
    server.nsqd.get_topic("t20").get_channel("c")
    publish(server, "t20", 0, 1)
    kill(server)
    depths = {name: topic.channels["c"].depth for name, topic in server.nsqd.topics.items()}
    assert depths == {f"t{number}": 1 for number in range(21)}
    assert server.nsqd.get_topic("t5").get_channel("c").is_paused


def test_a_log_that_cannot_be_synced_at_the_end_keeps_no_other_from_it(
    server: NsqdServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names, fsync, synced = [f"t{number}" for number in range(140)], os.fsync, []  # more than are synced together
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # takes time, proves nothing here
    for name in names:
        server.nsqd.get_topic(name).get_channel("c")
        publish(server, name, 0, 1)

    def fails_once(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if "t7/" in path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        synced.append(path)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", fails_once)
    server.stop()
    monkeypatch.undo()
    assert sum(path.endswith(".log") for path in synced) == len(names) - 1
    assert caplog.text.count("failed to write to") == 1
    server.start()
    assert {server.nsqd.get_topic(name).get_channel("c").depth for name in names} == {1}


def test_a_topic_that_is_deleted_while_checkpoints_are_written_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[str] = []
    save_checkpoint = Store.save_checkpoint

    def save(store: Store, topic: Topic) -> None:
        saved.append(topic.name)
        if topic.name == "a" and "b" in nsqd.topics:
            nsqd.delete_topic("b")
        save_checkpoint(store, topic)

    monkeypatch.setattr("nsq_fast.broker.nsqd._TURN", 0.0)  # others have their turn after each topic
    nsqd = Nsqd(NsqdOptions(data_path=str(tmp_path), sync_timeout=0.01))
    nsqd.start()
    for name in ("a", "b", "c"):
        nsqd.get_topic(name).put(b"x")
    monkeypatch.setattr(Store, "save_checkpoint", save)
    until(lambda: {"a", "c"} <= set(saved))
    nsqd.close()
    with in_nsqd(tmp_path) as again:
        assert set(again.topics) == {"a", "c"}


# Damaged files in a data path: a file is read up to the damage, the rest is said once and kept.


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


def count_errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def bare_client() -> Any:
    """A client of a channel without a connection."""
    client = SimpleNamespace(id=1, wake=lambda: None, close=lambda: None)
    client.in_flight = InFlight(client, 60.0)
    return client


def drain(nsqd: Nsqd, topic: str, channel: str) -> list[bytes]:
    consumer = bare_client()
    queue = nsqd.topics[topic].channels[channel]
    queue.add_client(consumer)
    bodies = []
    while frames := queue.deliver(consumer, 100):
        for frame in frames:
            bodies.append(frame[34:])
            queue.finish(consumer, [frame[18:34]])
    assert (queue.depth, queue.in_flight_count) == (0, 0)
    return bodies


@contextmanager
def in_nsqd(path: Path) -> Iterator[Nsqd]:
    """An nsqd on a data path; it must start within a second or so."""
    with closing(Nsqd(NsqdOptions(data_path=str(path), sync_timeout=60.0, mem_queue_size=2))) as nsqd:
        with Timeout(10):
            nsqd.start()
        yield nsqd


def files_of(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def put_back(path: Path, files: dict[Path, bytes]) -> None:
    for file in path.rglob("*"):
        if file.is_file() and file not in files:
            file.unlink()
    for file, data in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


class Prepared(NamedTuple):
    """A data path with a topic and a channel, and the messages of it that are not finished."""

    path: Path
    unfinished: set[bytes]

    def file(self, name: str) -> Path:
        [found] = [file for file in files_of(self.path) if file.name == name or file.suffix == f".{name}"]
        return found


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    """Messages were delivered and finished from memory while others waited on disk; one is in flight at the end."""
    monkeypatch.setattr("nsq_fast.broker.journal.os.fsync", lambda fd: None)  # takes time, proves nothing here
    monkeypatch.setattr("nsq_fast.broker.channel.random.getrandbits", lambda bits: 1)  # from memory
    with in_nsqd(tmp_path) as nsqd:
        topic, channel, consumer = nsqd.get_topic("t"), nsqd.get_topic("t").get_channel("c"), bare_client()
        channel.add_client(consumer)
        for n in range(3):
            topic.put(b"%d" % n)
        for n in range(3, 7, 2):
            for frame in channel.deliver(consumer, 2):
                channel.finish(consumer, [frame[18:34]])
            topic.put(b"%d" % n)
            topic.put(b"%d" % (n + 1))
        channel.deliver(consumer, 1)
        assert (len(channel.memory), len(channel.backend), channel.in_flight_count) == (1, 1, 1)
    return Prepared(tmp_path, {b"2", b"5", b"6"})


@pytest.mark.parametrize("name", ["log", "checkpoint", "nsqd.dat"])
@pytest.mark.parametrize("how", ["flip", "cut"])
def test_an_nsqd_starts_and_serves_with_any_byte_of_a_file_damaged(
    prepared: Prepared, caplog: pytest.LogCaptureFixture, name: str, how: str
) -> None:
    files, victim = files_of(prepared.path), prepared.file(name)
    for at in range(len(files[victim])):
        put_back(prepared.path, files)
        data = bytearray(files[victim])
        data[at] ^= 0x80
        victim.write_bytes(data if how == "flip" else data[:at])
        caplog.clear()
        with in_nsqd(prepared.path) as nsqd:
            nsqd.get_topic("t").put(b"new")
            bodies = drain(nsqd, "t", "c")
        if name != "log":
            assert prepared.unfinished | {b"new"} <= set(bodies), at
        else:  # what is before the damage, and nothing else
            whole = max(0, at - HEAD) // RECORD
            assert set(bodies) == {body for body in prepared.unfinished if int(body) < whole} | {b"new"}, at
            if how == "flip":
                rest = HEAD + RECORD * whole if at >= HEAD else 0
                assert victim.with_name(victim.name + ".bad").read_bytes() == data[rest:]
        assert count_errors(caplog) or name == "nsqd.dat", at  # a name that is another one is no damage
        with in_nsqd(prepared.path) as nsqd:
            assert drain(nsqd, "t", "c") == []


@pytest.mark.parametrize("name", ["log", "checkpoint", "nsqd.dat"])
def test_an_nsqd_starts_and_serves_without_a_file(
    prepared: Prepared, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    prepared.file(name).unlink()
    with in_nsqd(prepared.path) as nsqd:
        nsqd.get_topic("t").put(b"new")
        bodies = drain(nsqd, "t", "c")
    assert (set() if name == "log" else prepared.unfinished) | {b"new"} <= set(bodies)
    assert count_errors(caplog)


def test_a_full_disk_refuses_publishes_is_said_once_and_what_was_not_written_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = NsqdOptions(data_path=str(tmp_path), sync_timeout=0.02)
    with NsqdServer(options) as server:
        SmallDisk(monkeypatch, tmp_path, 0)
        server.nsqd.get_topic("u").get_channel("d")
        client = WireClient(server.tcp_address)
        assert client.command(b"PUB t\n\0\0\0\x012") == b"E_PUB_FAILED PUB failed [Errno 28] No space left on device"
        for route in ("pub", "mpub"):
            answer = ask(server.http_address, "POST", f"/{route}?topic=t", b"2")
            assert (answer.status, answer.json) == (503, {"message": "EXITING"})
        answer = ask(server.http_address, "GET", "/ping")
        assert (answer.status, answer.body) == (500, b"NOK - [Errno 28] No space left on device")
        assert ask(server.http_address, "GET", "/stats?format=json").json["health"].startswith("NOK - ")
        until(lambda: count_errors(caplog)[1:])
        monkeypatch.undo()
        until(lambda: server.nsqd.error is None)  # a checkpoint may be the first that is written
        until(lambda: (tmp_path / "nsqd.dat").exists() and b'"u"' in (tmp_path / "nsqd.dat").read_bytes())
        WireClient(server.tcp_address).publish("t", b"3")
        assert consume(subscribe(server), 1) == [3]
        server.kill()
    told = [error.partition(":")[0] for error in count_errors(caplog) if "No space" in error]
    assert sorted(told) == [f"failed to write to {tmp_path}", "publishes are refused"]
    assert "publishes are taken again" in caplog.messages
    with in_nsqd(tmp_path) as nsqd:
        assert set(nsqd.topics["u"].channels) == {"d"}


def test_a_sync_that_began_before_the_disk_was_full_does_not_say_that_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    fsync, here = os.fsync, threading.get_ident()

    def slow(fd: int) -> None:
        if threading.get_ident() != here:  # that of a log, and not of a checkpoint
            begun.set()
            assert go_on.wait(WAIT)
        fsync(fd)

    with NsqdServer(NsqdOptions(data_path=str(tmp_path), sync_timeout=0.02)) as server:
        server.nsqd.get_topic("t").get_channel("c")
        monkeypatch.setattr("nsq_fast.broker.nsqd.os.fsync", slow)
        assert takes(server, b"1")
        until(begun.is_set)
        disk = SmallDisk(monkeypatch, tmp_path, 0)
        server.nsqd.get_topic("u").get_channel("d")  # which is written down at once
        assert not takes(server, b"2")
        refused = disk.refused
        go_on.set()
        until(lambda: disk.refused > refused)  # after the sync: that, and what follows it, are one loop
        assert server.nsqd.error is not None
        assert ask(server.http_address, "GET", "/ping").status == 500
        disk.size = 1 << 20
        until(lambda: server.nsqd.error is None)
    told = [text.partition(":")[0] for text in caplog.messages if "o write" in text or "writing" in text]
    assert told == [f"failed to write to {tmp_path}", f"writing to {tmp_path} succeeds again"]


class SmallDisk:
    """Has room for so many bytes of files in a folder: a write beyond that is done in part, and the next one fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, size: int) -> None:
        self.folder, self.size, self.refused = folder, size, 0
        write, pwrite = os.write, os.pwrite
        monkeypatch.setattr("nsq_fast.broker.journal.os.write", lambda fd, data: write(fd, self._part(data)))
        monkeypatch.setattr("nsq_fast.broker.journal.os.pwrite", lambda fd, data, at: pwrite(fd, self._part(data), at))

    @property
    def used(self) -> int:
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def _part(self, data: Any) -> memoryview:
        if (free := self.size - self.used) <= 0:
            self.refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return memoryview(data)[:free]


def fill(server: NsqdServer) -> int:
    """Publish until the disk is full; how many messages there are."""
    client, count = WireClient(server.tcp_address), 0
    while (answer := client.command(b"PUB t\n" + sized(b"%01000d" % count))) == b"OK":
        count += 1
    assert b"No space" in answer
    client.close()
    return count


def takes(server: NsqdServer, body: bytes) -> bool:
    client = WireClient(server.tcp_address)
    answer = client.command(b"PUB t\n" + sized(body))
    client.close()
    return answer == b"OK"


@pytest.mark.parametrize("file_size", [20_000, 1 << 20])
def test_a_full_disk_has_room_again_when_its_messages_are_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, file_size: int
) -> None:
    options = NsqdOptions(data_path=str(tmp_path), sync_timeout=0.02, max_bytes_per_file=file_size)
    with NsqdServer(options) as server:
        server.nsqd.get_topic("t").get_channel("c")
        disk = SmallDisk(monkeypatch, tmp_path, 400_000)
        count = fill(server)
        disk.size = disk.used  # not a byte is left, for a checkpoint either
        assert sorted(consume(subscribe(server, rdy=100), count)) == list(range(count))
        until(lambda: disk.used < 100_000)
        until(lambda: server.nsqd.error is None)
        assert takes(server, b"-1")
        assert consume(subscribe(server), 1) == [-1]
        assert takes(server, b"-2")
        kill(server)
        assert consume(subscribe(server), 1)[-1] in {-1, -2}
    assert "damaged" not in caplog.text
    assert "missing" not in caplog.text


@pytest.mark.parametrize(
    ("file_size", "share", "expected"), [(20_000, 2, 300_000), (20_000, 1, 50_000), (1 << 20, 1, 50_000)]
)
def test_what_made_room_for_others_is_not_missed_if_the_process_is_killed_before_that_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_size: int, share: int, expected: int
) -> None:
    options = NsqdOptions(data_path=str(tmp_path), sync_timeout=0.02, max_bytes_per_file=file_size, preserve_order=True)
    with NsqdServer(options) as server:
        server.nsqd.get_topic("t").get_channel("c")
        server.nsqd.get_topic("t").get_channel("slow")
        disk = SmallDisk(monkeypatch, tmp_path, 400_000)
        count = fill(server)
        disk.size = 0  # it stays full, whatever is removed
        assert sorted(consume(subscribe(server, rdy=100), count)) == list(range(count))
        left = set(range(count)) - set(consume(subscribe(server, "slow"), count // share))
        until(lambda: disk.used < expected)
        server.kill()
        monkeypatch.undo()
        server.start()
        slow = subscribe(server, "slow")
        came: list[int] = []
        while not left <= set(came):
            came += consume(slow, 1)
        assert takes(server, b"-1")
        until(lambda: consume(slow, 1) == [-1])
        until(lambda: server.nsqd.topics["t"].channels["slow"].in_flight_count == 0)
        assert server.nsqd.topics["t"].channels["slow"].depth == 0


# Data folders that earlier versions have written start: nothing in them is lost, or comes again for nothing.
#
# ``older_data.json`` has the files of version 0.2 as they were, ``journal_data.json`` those in the format of today: of
# an nsqd after its end, of one after SIGKILL, and of a cluster of two nodes after its end. The files of a topic are
# small, so each has several; what is deferred is so until 2074.


FOLDERS = {
    f"{format}-{folder}": files
    for format in ("older", "journal")
    for folder, files in json.loads((Path(__file__).parents[1] / "data" / f"{format}_data.json").read_text()).items()
}

OPTIONS = {"max_bytes_per_file": 4096, "mem_queue_size": 10, "queue_scan_interval": 0.01}


def write(folder: str, path: Path) -> Path:
    for name, content in FOLDERS[folder].items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(zlib.decompress(base64.b64decode(content)))
    return path


@pytest.fixture(params=[folder for folder in FOLDERS if "cluster" not in folder])
def restarted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NsqdServer]:
    with NsqdServer(NsqdOptions(data_path=str(write(request.param, tmp_path)), **OPTIONS)) as server:
        yield server


def consume_old(server: NsqdServer, topic: str, channel: str, count: int) -> list[tuple[bytes, int]]:
    client = WireClient(server.tcp_address)
    client.subscribe(topic, channel, 50)
    frames = [client.message() for _ in range(count)]
    client.close()
    return sorted((frame.body[:3], frame.attempts) for frame in frames)


def test_what_was_not_finished_is_there_and_what_comes_then_is_behind_it(restarted: NsqdServer) -> None:
    client = WireClient(restarted.tcp_address)
    client.publish("orders", b"600")
    client.close()
    for again in (restarted.restart, lambda: stop(restarted)):
        channels = {name: sorted(topic.channels) for name, topic in restarted.nsqd.topics.items() if name != "late"}
        assert channels == {"orders": ["a", "b"], "held": []}
        assert restarted.nsqd.topics["held"].depth == 5  # as there was no channel
        a, b = (restarted.nsqd.topics["orders"].channels[name] for name in "ab")
        assert (a.is_paused, b.is_paused) == (False, True)
        assert (len(a.deferred), len(b.deferred)) == (2, 1)  # 007 by REQ, 500 by DPUB
        again()
    tried = {9, 200}  # they were in flight
    expected = [(b"%03d" % n, 2 if n in tried else 1) for n in [9, *range(200, 250), 600]]
    assert consume_old(restarted, "orders", "a", 52) == expected
    a, b = (restarted.nsqd.topics["orders"].channels[name] for name in "ab")
    until(lambda: a.in_flight_count == 0)
    assert (a.depth, b.depth) == (0, 251)
    b.set_paused(False)
    assert consume_old(restarted, "orders", "b", 251) == [(b"%03d" % n, 1) for n in [*range(250), 600]]
    assert consume_old(restarted, "held", "new", 5) == [(b"%03d" % n, 1) for n in range(5)]
    stop(restarted)
    a = restarted.nsqd.topics["orders"].channels["a"]
    assert (a.depth, len(a.deferred)) == (0, 2)


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if "cluster" in folder])
def test_a_cluster_goes_on_where_it_was(tmp_path: Path, folder: str) -> None:
    path = write(folder, tmp_path)
    for expected in ([*range(20, 40)], []):
        with RedesignedCluster(2, 1, data_path=path, readiness=0.0, takeover_delay=0.02) as cluster:
            for number in range(2):
                partition = cluster.partition("orders", number)
                assert (partition.meta.ordered, partition.meta.ext, len(partition.replicas)) == (True, True, 2)
                assert len(partition.in_sync) == 2
                consumer = Consumer(
                    cluster.leader_of("orders", number), f"SUB_ORDERED orders ch {number}", extend_support=True
                )
                for n in expected:
                    frame = consumer.receive()
                    assert frame.body[13:] == b"%d" % n  # behind the ext field and the detail header
                    consumer.finish(frame)
                consumer.close()
                until(lambda channel=partition.channels["ch"]: channel.depth == 0)


# A message that waits for long does not hold what came later on the disk, and is not lost for that.


BATCH = 500

BODY = bytes(2000)

MOST = 1 << 20

"""Bytes on disk that nsqd stays below in this test."""


@pytest.fixture
def log_server(tmp_path: Path) -> Iterator[NsqdServer]:
    options = NsqdOptions(data_path=str(tmp_path), sync_timeout=0.02, max_bytes_per_file=1 << 22, max_req_timeout=36e3)
    log_server = NsqdServer(options)
    log_server.start()
    log_server.nsqd.get_topic("t").get_channel("c")
    yield log_server
    log_server.kill()


def publish_raw(log_server: NsqdServer, *commands: bytes) -> None:
    client = WireClient(log_server.tcp_address)
    for command in commands:
        assert client.command(command) == b"OK"
    client.close()


def pass_through(log_server: NsqdServer, batches: int = 10) -> None:
    topic = log_server.nsqd.get_topic("t")
    held = topic.channels["c"].in_flight_count
    consumer = Consumer(log_server, "SUB t c", rdy=BATCH)
    for _ in range(batches):
        topic.put_many([BODY] * BATCH)
        for _ in range(BATCH):
            frame = consumer.receive()
            assert frame.body == BODY
            consumer.finish(frame)
    until(lambda: log_server.nsqd.get_topic("t").channels["c"].in_flight_count == held)
    consumer.close()


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def settle(folder: Path, tried: int) -> None:
    """Wait until a checkpoint says that only ``tried`` messages are not finished, and the disk holds only those."""

    def is_settled() -> bool:
        content = json.loads(next(folder.rglob("checkpoint")).read_text().splitlines()[0])
        ((next_one, fresh, of_channel),) = content["channels"].values()
        return (next_one, fresh, len(of_channel)) == (content["end"], [], tried) and on_disk(folder) < MOST

    until(is_settled)


def channel_of(log_server: NsqdServer) -> Any:
    return log_server.nsqd.get_topic("t").channels["c"]


def deferred(log_server: NsqdServer) -> int:
    return len(channel_of(log_server).deferred)


@pytest.mark.parametrize("again", ["stop", "kill"])
def test_a_message_deferred_by_an_hour_holds_nothing_else_and_comes_when_it_is_due(
    log_server: NsqdServer, tmp_path: Path, again: str
) -> None:
    publish_raw(log_server, b"DPUB t 3600000\n" + sized(b"much later"))
    consumer = Consumer(log_server, "SUB t c", rdy=1)
    publish_raw(log_server, b"PUB t\n" + sized(b"put back"))
    consumer.requeue(consumer.receive(), 3_600_000)
    until(lambda: deferred(log_server) == 2)
    consumer.close()
    for _ in range(2):
        pass_through(log_server)
        settle(tmp_path, 2)
        assert deferred(log_server) == 2
        getattr(log_server, again)()
        log_server.start()
        assert deferred(log_server) == 2
    channel = channel_of(log_server)
    heap = sorted(channel.deferred, key=lambda message: message.sequence)
    assert [(message.body, message.attempts) for message in heap] == [(b"much later", 0), (b"put back", 1)]
    assert all(3000 < message.due - time.time() <= 3600 for message in heap)
    for message in channel.deferred.pop_due(heap[-1].due):
        message.due = 0.0
        channel.put_back([message])
    consumer = Consumer(log_server, "SUB t c")
    frames = [consumer.receive() for _ in heap]
    assert sorted((frame.body, frame.attempts) for frame in frames) == [(b"much later", 1), (b"put back", 2)]
    for frame in frames:
        consumer.finish(frame)
    settle(tmp_path, 0)
    assert next(tmp_path.rglob("kept")).stat().st_size == 4  # of nothing
    consumer.close()
    getattr(log_server, again)()
    log_server.start()
    assert (channel_of(log_server).depth, deferred(log_server)) == (0, 0)


def test_a_message_that_is_touched_holds_nothing_else(log_server: NsqdServer, tmp_path: Path) -> None:
    slow = Consumer(log_server, "SUB t c", rdy=1)
    publish_raw(log_server, b"PUB t\n" + sized(b"slow"))
    held = slow.receive()
    slow.send(b"RDY 0\n")
    pass_through(log_server)
    settle(tmp_path, 1)
    log_server.kill()
    log_server.start()
    consumer = Consumer(log_server, "SUB t c")
    frame = consumer.receive()
    assert (frame.id, frame.body) == (held.id, b"slow")
    assert frame.attempts == 2


def leave_one_deferred(log_server: NsqdServer, folder: Path) -> None:
    """Stop the server when it keeps a message that is deferred beside a log from which all others are gone."""
    publish_raw(log_server, b"DPUB t 3600000\n" + sized(b"later"))
    pass_through(log_server)
    settle(folder, 1)
    log_server.stop()


def test_without_a_checkpoint_every_kept_message_comes_again(log_server: NsqdServer, tmp_path: Path) -> None:
    leave_one_deferred(log_server, tmp_path)
    next(tmp_path.rglob("checkpoint")).unlink()
    log_server.start()
    consumer = Consumer(log_server, "SUB t c", rdy=BATCH)
    until(lambda: channel_of(log_server).depth == 0)
    assert b"later" in {consumer.receive().body for _ in range(channel_of(log_server).in_flight_count)}


def test_a_kept_file_that_is_damaged_is_said(
    log_server: NsqdServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leave_one_deferred(log_server, tmp_path)
    kept = next(tmp_path.rglob("kept"))
    kept.write_bytes(kept.read_bytes()[:-1])
    log_server.start()
    assert "kept cannot be read: its checksum is wrong; the messages in it are lost; the file is kept as" in caplog.text
    assert deferred(log_server) == 0
