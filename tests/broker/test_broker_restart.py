"""What survives with a data path: a stop, a SIGKILL, and files that were not written whole."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.http import ask
from support.waiting import until
from support.wire import WireClient

from nsq_fast.broker import NsqdOptions, NsqdServer
from nsq_fast.broker.journal import OPEN_FILES
from nsq_fast.broker.message import DataPathError
from nsq_fast.broker.nsqd import Nsqd
from nsq_fast.broker.store import Store
from nsq_fast.broker.topic import Topic


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
def test_topics_channels_and_pauses_come_back(server: NsqdServer, again: Any) -> None:
    topic = server.nsqd.get_topic("t")
    topic.get_channel("c").set_paused(True)
    topic.get_channel("e#ephemeral")
    topic.set_paused(True)
    server.nsqd.get_topic("..")
    server.nsqd.get_topic("gone")
    server.nsqd.get_topic("e#ephemeral").put(b"x")
    server.nsqd.delete_topic("gone")
    again(server)
    assert set(server.nsqd.topics) == {"t", ".."}
    topic = server.nsqd.topics["t"]
    assert topic.is_paused
    assert {name: channel.is_paused for name, channel in topic.channels.items()} == {"c": True}
    assert server.nsqd.get_topic("e#ephemeral").depth == 0


def test_metadata_is_what_the_original_writes(server: NsqdServer, tmp_path: Path) -> None:
    server.nsqd.get_topic("t").get_channel("c")
    metadata = json.loads((tmp_path / "nsqd.dat").read_text())
    assert metadata["topics"] == [{"name": "t", "paused": False, "channels": [{"name": "c", "paused": False}]}]


def test_checkpoints_bound_what_comes_again_after_a_kill(tmp_path: Path) -> None:
    server = NsqdServer(NsqdOptions(data_path=str(tmp_path), sync_timeout=0.05, max_bytes_per_file=4096))
    with server:
        publish(server, "t", 0, 500)
        client = subscribe(server, rdy=10)
        done = len(consume(client, 400))
        client.send(b"RDY 0\n")
        until(lambda: server.nsqd.topics["t"].channels["c"].clients and next(iter(server.nsqd.clients)).rdy == 0)
        done += len(consume(client, server.nsqd.topics["t"].channels["c"].in_flight_count))
        path = server.nsqd.topics["t"].log.folder / "checkpoint"
        until(lambda: json.loads(path.read_text().splitlines()[0])["channels"]["c"][1:] == [[[done, 500]], []])
        kill(server)
        assert consume(subscribe(server), 500 - done) == list(range(done, 500))


@pytest.mark.parametrize("again", [stop, kill])
def test_emptied_and_deleted_stays_so(server: NsqdServer, again: Any) -> None:
    topic = server.nsqd.get_topic("t")
    channel = topic.get_channel("c")
    topic.get_channel("d")
    publish(server, "t", 0, 50)
    channel.empty()
    topic.delete_channel("d")
    publish(server, "t", 50, 1)
    server.nsqd.get_topic("other").put(b"x")
    server.nsqd.delete_topic("other")
    again(server)
    assert set(server.nsqd.topics) == {"t"}
    assert set(server.nsqd.topics["t"].channels) == {"c"}
    assert consume(subscribe(server), 1) == [50]
    assert server.nsqd.get_topic("other").depth == 0


@pytest.mark.parametrize("damage", [b"", b"{", b"\0" * 40, b'{"end": "x"}'])
def test_without_a_checkpoint_everything_comes_again(server: NsqdServer, damage: bytes) -> None:
    server.nsqd.get_topic("t").get_channel("c")
    publish(server, "t", 0, 50)
    path = server.nsqd.topics["t"].log.folder / "checkpoint"
    server.kill()
    path.write_bytes(damage)
    server.start()
    assert consume(subscribe(server), 50) == list(range(50))


def test_data_path_is_for_one_nsqd(server: NsqdServer, tmp_path: Path) -> None:
    with pytest.raises(DataPathError, match="in use"):
        Nsqd(NsqdOptions(data_path=str(tmp_path))).start()
    with pytest.raises(DataPathError, match="not a folder"):
        Nsqd(NsqdOptions(data_path=str(tmp_path / "missing"))).start()


def test_a_disk_that_fails_refuses_the_publish_and_is_reported(
    server: NsqdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = WireClient(server.tcp_address)
    client.publish("t", b"1")

    def fail(*arguments: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("nsq_fast.broker.journal.os.pwrite", fail)
        answer = client.command(b"PUB t\n\0\0\0\x012")
        over_http = [ask(server.http_address, "POST", f"/{route}?topic=t", b"2") for route in ("pub", "mpub")]
    assert answer == b"E_PUB_FAILED PUB failed [Errno 28] No space left on device"
    assert [(reply.status, reply.json) for reply in over_http] == [(503, {"message": "EXITING"})] * 2
    assert server.nsqd.error is not None
    WireClient(server.tcp_address).publish("t", b"3")
    assert consume(subscribe(server), 2) == [1, 3]


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
    names = [f"t{number}" for number in range(300)]
    for name in names:
        server.nsqd.get_topic(name).get_channel("c")
        publish(server, name, 0, 1)
    fsync, synced = os.fsync, []

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


class Watched(Store):
    """Calls ``on_save`` with the name of each topic whose checkpoint is to be saved."""

    on_save: Callable[[str], object] = staticmethod(lambda name: None)

    def save_checkpoint(self, topic: Topic) -> None:
        Watched.on_save(topic.name)
        super().save_checkpoint(topic)


@pytest.fixture
def often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nsqd]:
    """An nsqd that writes checkpoints again and again, and gives way after each topic."""
    monkeypatch.setattr("nsq_fast.broker.nsqd.Store", Watched)
    monkeypatch.setattr("nsq_fast.broker.nsqd._TURN", 0.0)
    nsqd = Nsqd(NsqdOptions(data_path=str(tmp_path), sync_timeout=0.01))
    nsqd.start()
    yield nsqd
    nsqd.kill()


def test_a_topic_that_is_deleted_while_checkpoints_are_written_does_not_come_back(
    often: Nsqd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        often.get_topic(name)
    saved: list[str] = []

    def on_save(name: str) -> None:
        saved.append(name)
        if name == "a" and "b" in often.topics:
            often.delete_topic("b")

    for topic in often.topics.values():
        topic.put(b"x")
    monkeypatch.setattr(Watched, "on_save", on_save)
    until(lambda: {"a", "c"} <= set(saved))
    often.close()
    again = Nsqd(NsqdOptions(data_path=str(tmp_path)))
    again.start()
    assert set(again.topics) == {"a", "c"}
    again.kill()
