"""A message that waits for long does not hold what came later on the disk, and is not lost for that."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.redesigned import Consumer, sized
from support.waiting import until
from support.wire import WireClient

from nsq_fast.broker import NsqdOptions, NsqdServer

BATCH = 500
BODY = bytes(2000)
MOST = 1 << 20
"""Bytes on disk that nsqd stays below in this test."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NsqdServer]:
    options = NsqdOptions(data_path=str(tmp_path), sync_timeout=0.02, max_bytes_per_file=1 << 22, max_req_timeout=36e3)
    server = NsqdServer(options)
    server.start()
    server.nsqd.get_topic("t").get_channel("c")
    yield server
    server.kill()


def publish(server: NsqdServer, *commands: bytes) -> None:
    client = WireClient(server.tcp_address)
    for command in commands:
        assert client.command(command) == b"OK"
    client.close()


def pass_through(server: NsqdServer, batches: int = 10) -> None:
    """Publish and finish 10 MB."""
    topic = server.nsqd.get_topic("t")
    held = topic.channels["c"].in_flight_count
    consumer = Consumer(server, "SUB t c", rdy=BATCH)
    for _ in range(batches):
        topic.put_many([BODY] * BATCH)
        for _ in range(BATCH):
            frame = consumer.receive()
            assert frame.data[26:] == BODY
            consumer.finish(frame)
    until(lambda: server.nsqd.get_topic("t").channels["c"].in_flight_count == held)
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


def deferred(server: NsqdServer) -> int:
    return len(server.nsqd.get_topic("t").channels["c"].deferred)


@pytest.mark.parametrize("again", ["stop", "kill"])
def test_a_message_deferred_by_an_hour_holds_nothing_else(server: NsqdServer, tmp_path: Path, again: str) -> None:
    publish(server, b"DPUB t 3600000\n" + sized(b"much later"))
    consumer = Consumer(server, "SUB t c", rdy=1)
    publish(server, b"PUB t\n" + sized(b"put back"))
    consumer.requeue(consumer.receive(), 3_600_000)
    until(lambda: deferred(server) == 2)
    consumer.close()
    for _ in range(2):
        pass_through(server)
        settle(tmp_path, 2)
        assert deferred(server) == 2
        getattr(server, again)()
        server.start()
        assert deferred(server) == 2
    heap = sorted(server.nsqd.get_topic("t").channels["c"].deferred, key=lambda message: message.sequence)
    assert [(message.body, message.attempts) for message in heap] == [(b"much later", 0), (b"put back", 1)]
    assert all(3000 < message.due - time.time() <= 3600 for message in heap)


@pytest.mark.parametrize("again", ["stop", "kill"])
def test_it_comes_when_it_is_due(server: NsqdServer, tmp_path: Path, again: str) -> None:
    publish(server, b"DPUB t 3600000\n" + sized(b"later"))
    pass_through(server)
    settle(tmp_path, 1)
    getattr(server, again)()
    server.start()
    (message,) = server.nsqd.get_topic("t").channels["c"].deferred
    server.nsqd.get_topic("t").channels["c"].deferred.pop_due(message.due)
    message.due = 0.0
    server.nsqd.get_topic("t").channels["c"].put_back([message])
    consumer = Consumer(server, "SUB t c")
    frame = consumer.receive()
    assert frame.data[26:] == b"later"
    consumer.finish(frame)
    settle(tmp_path, 0)
    assert next(tmp_path.rglob("kept")).stat().st_size == 4  # of nothing
    consumer.close()
    getattr(server, again)()
    server.start()
    assert server.nsqd.get_topic("t").channels["c"].depth == 0
    assert deferred(server) == 0


def test_a_message_that_is_touched_holds_nothing_else(server: NsqdServer, tmp_path: Path) -> None:
    slow = Consumer(server, "SUB t c", rdy=1)
    publish(server, b"PUB t\n" + sized(b"slow"))
    held = slow.receive()
    slow.send(b"RDY 0\n")
    pass_through(server)
    settle(tmp_path, 1)
    server.kill()
    server.start()
    consumer = Consumer(server, "SUB t c")
    frame = consumer.receive()
    assert (frame.id, frame.data[26:]) == (held.id, b"slow")
    assert frame.attempts == 2
    consumer.close()
    slow.close()


def test_without_a_checkpoint_every_kept_message_comes_again(server: NsqdServer, tmp_path: Path) -> None:
    publish(server, b"DPUB t 3600000\n" + sized(b"later"))
    pass_through(server)
    settle(tmp_path, 1)
    server.stop()
    next(tmp_path.rglob("checkpoint")).unlink()
    server.start()
    consumer = Consumer(server, "SUB t c", rdy=BATCH)
    until(lambda: server.nsqd.get_topic("t").channels["c"].depth == 0)
    assert b"later" in {consumer.receive().data[26:] for _ in range(consumer_has(server))}
    consumer.close()


def consumer_has(server: NsqdServer) -> int:
    return server.nsqd.get_topic("t").channels["c"].in_flight_count


def test_a_kept_file_that_is_damaged_is_said(
    server: NsqdServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish(server, b"DPUB t 3600000\n" + sized(b"later"))
    pass_through(server)
    settle(tmp_path, 1)
    server.stop()
    kept = next(tmp_path.rglob("kept"))
    kept.write_bytes(kept.read_bytes()[:-1])
    server.start()
    assert "kept cannot be read: its checksum is wrong; the messages in it are lost; the file is kept as" in caplog.text
    assert deferred(server) == 0
