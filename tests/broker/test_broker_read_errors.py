"""A read that fails for a moment is no damage: nothing is lost, and nothing is thought to be lost."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.redesigned import Consumer, sized
from support.waiting import until
from support.wire import WireClient

from nsq_fast.broker import NsqdOptions, NsqdServer, RedesignedCluster

COUNT = 60


class Failing:
    """Lets reads of files in a folder fail, by ``os.pread`` and by ``Path.read_bytes``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.left = 0
        self.failed = 0
        self.number = errno.EIO
        self.suffix = ""  # of the files; one that is given can be opened
        pread, read_bytes, opened = os.pread, Path.read_bytes, os.open

        def may_fail(path: str) -> None:
            if self.left and path.startswith(str(folder)) and path.endswith(self.suffix):
                self.left -= 1
                self.failed += 1
                raise OSError(self.number, os.strerror(self.number), path)

        def failing_pread(fd: int, *arguments: Any) -> bytes:
            may_fail(os.readlink(f"/proc/self/fd/{fd}"))
            return pread(fd, *arguments)

        def failing_read_bytes(path: Path) -> bytes:
            if path.exists():
                may_fail(str(path))
            return read_bytes(path)

        def failing_open(path: Any, *arguments: Any, **keywords: Any) -> int:
            if not self.suffix and os.path.isfile(path):
                may_fail(str(path))
            return opened(path, *arguments, **keywords)

        monkeypatch.setattr(os, "pread", failing_pread)
        monkeypatch.setattr(Path, "read_bytes", failing_read_bytes)
        monkeypatch.setattr(os, "open", failing_open)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Failing:
    return Failing(monkeypatch, tmp_path)


@pytest.fixture
def start(tmp_path: Path) -> Any:
    running: list[NsqdServer] = []

    def start() -> NsqdServer:
        running.append(NsqdServer(NsqdOptions(data_path=str(tmp_path), mem_queue_size=0, max_bytes_per_file=4096)))
        running[-1].start()
        return running[-1]

    yield start
    for server in running:
        server.kill()


def publish(address: Any, topic: bytes = b"t") -> list[bytes]:
    client = WireClient(address)
    bodies = [b"%040d" % number for number in range(COUNT)]
    for body in bodies:
        assert client.command(b"PUB " + topic + b"\n" + sized(body))[:2] == b"OK"
    client.close()
    return bodies


def consume(server: Any, count: int = COUNT, subscription: str = "SUB t c") -> list[bytes]:
    consumer = Consumer(server, subscription)
    bodies = []
    for _ in range(count):
        frame = consumer.receive()
        consumer.finish(frame)
        bodies.append(frame.data[26:])
    assert consumer.is_quiet(0.05)
    consumer.close()
    return bodies


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
def test_messages_come_when_they_can_be_read_again(
    start: Callable[[], NsqdServer], failing: Failing, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    server = start()
    server.nsqd.get_topic("t").get_channel("c")
    bodies = publish(server.tcp_address)
    failing.number = number
    failing.left = 5
    assert consume(server) == bodies
    assert failing.failed == 5
    events = [record.event for record in caplog.records if record.levelno >= logging.WARNING]
    assert events == ["broker_read_failed", "broker_read_recovered"]


def test_what_cannot_be_read_keeps_no_core_busy_and_nothing_else_waiting(
    start: Callable[[], NsqdServer], failing: Failing
) -> None:
    server = start()
    server.nsqd.get_topic("t").get_channel("c")
    bodies = publish(server.tcp_address)
    failing.left = 10**9
    consumer = Consumer(server, "SUB t c")
    assert consumer.is_quiet(0.5)
    assert 0 < failing.failed < 100
    failing.left = 0
    assert consumer.receive().data[26:] == bodies[0]
    consumer.close()


def test_a_pause_that_ends_while_nothing_can_be_read_loses_nothing(
    start: Callable[[], NsqdServer], failing: Failing
) -> None:
    server = start()
    topic = server.nsqd.get_topic("t")
    topic.get_channel("c")
    topic.set_paused(True)
    bodies = publish(server.tcp_address)
    failing.left = 2
    topic.set_paused(False)
    assert sorted(consume(server)) == bodies


def test_an_ephemeral_channel_that_cannot_be_given_messages_keeps_them_from_no_other(
    start: Callable[[], NsqdServer], failing: Failing
) -> None:
    server = start()
    topic = server.nsqd.get_topic("t")
    for name in ("a#ephemeral", "c", "z#ephemeral"):
        topic.get_channel(name)
    topic.set_paused(True)
    bodies = publish(server.tcp_address)
    failing.left = 10**9
    topic.set_paused(False)
    failing.left = 0
    assert sorted(consume(server)) == bodies


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
@pytest.mark.parametrize(("reads", "suffix"), [(1, ""), (3, ".log"), (9, ".log"), (9, "checkpoint")])
def test_a_start_tries_again(
    start: Callable[[], NsqdServer], failing: Failing, tmp_path: Path, number: int, reads: int, suffix: str
) -> None:
    server = start()
    server.nsqd.get_topic("t").get_channel("c")
    server.nsqd.get_topic("paused").set_paused(True)
    bodies = publish(server.tcp_address)
    server.stop()
    failing.number, failing.suffix, failing.left = number, suffix, reads
    again = start()
    assert failing.failed == reads
    opened = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.exists(entry.path)]
    logs = [path for path in opened if path.startswith(f"{tmp_path}/") and path.endswith(".log")]
    assert len(set(logs)) == len(logs)  # what it could not read is open no more
    assert consume(again) == bodies
    assert again.nsqd.topics["paused"].is_paused


def test_a_start_that_cannot_read_says_so_and_changes_nothing(
    start: Callable[[], NsqdServer], failing: Failing, tmp_path: Path
) -> None:
    server = start()
    server.nsqd.get_topic("t").get_channel("c")
    bodies = publish(server.tcp_address)
    server.stop()
    before = {path: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}
    failing.left = 10**9
    with pytest.raises(OSError, match="cannot be read, and is left as it is"):
        start()
    failing.left = 0
    assert {path: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()} == before
    assert consume(start()) == bodies


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
@pytest.mark.parametrize(("reads", "suffix"), [(1, ""), (4, ".log"), (7, ".log")])
def test_a_cluster_that_starts_tries_again(
    tmp_path: Path, failing: Failing, number: int, reads: int, suffix: str
) -> None:
    with RedesignedCluster(1, 1, data_path=tmp_path, kind=True) as cluster:
        cluster.create_topic("t", channels=["c"])
        bodies = publish(cluster.nsqds[0].tcp_address, b"t 0")
    failing.number, failing.suffix, failing.left = number, suffix, reads
    with RedesignedCluster(1, 1, data_path=tmp_path, kind=True) as cluster:
        assert failing.failed == reads
        until(lambda: cluster.partition("t", 0).is_writable)
        assert consume(cluster.nsqds[0], subscription="SUB t c 0") == bodies
    assert not list(tmp_path.rglob("*.bad"))
