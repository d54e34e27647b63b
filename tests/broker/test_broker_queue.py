"""More messages than memory is meant for: the log of a topic, and channels that read from it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.waiting import until
from support.wire import WireClient

from nsq_fast.broker import NsqdServer
from nsq_fast.broker.journal import Journal, Position
from nsq_fast.broker.message import SnowflakeIds, encode_frames

IDS = SnowflakeIds(1)


def records(first: int, count: int, size: int = 20) -> list[bytes]:
    bodies = [b"%0*d" % (size, n) for n in range(first, first + count)]
    return encode_frames(IDS.take(count), bodies, 0)


def read_all(log: Journal, position: Position) -> list[int]:
    numbers: list[int] = []
    while position.sequence < log.end.sequence:
        messages, position = log.read(position, 1000)
        assert messages
        assert [message.sequence for message in messages] == [int(message.body[-9:]) for message in messages]
        numbers += [message.sequence for message in messages]
    return numbers


def test_ids_are_unique_and_increase_also_when_more_are_taken_than_a_millisecond_has() -> None:
    ids = SnowflakeIds(1023)
    taken = [id for count in (1, 20000, 1, 5000) for id in ids.take(count)]
    assert sorted(set(taken)) == taken
    assert {len(id) for id in taken} == {16}


def test_ids_go_on_behind_those_of_an_earlier_life_whatever_its_node_was() -> None:
    [last] = SnowflakeIds(1023).take(1)
    ids = SnowflakeIds(0)
    ids.skip(last)
    assert ids.take(1)[0] > last


@pytest.mark.parametrize("last", [b"", b"f" * 16, b"g" * 16, b"\xff" * 16])
def test_an_id_that_a_disk_has_changed_is_not_followed(last: bytes) -> None:
    ids = SnowflakeIds(1)
    ids.skip(last)
    [id] = ids.take(1)
    assert id[:1] == SnowflakeIds(1).take(1)[0][:1]


def test_log_gives_back_what_it_took_over_many_files(tmp_path: Path) -> None:
    log = Journal(tmp_path / "log", 4096)
    for first in range(0, 1000, 10):
        log.append(records(first, 10))
    assert len(list(log.folder.iterdir())) > 5
    assert read_all(log, Position(0, 0)) == list(range(1000))
    assert read_all(log, log.seek(777)) == list(range(777, 1000))


def test_log_reads_records_that_are_larger_than_a_read(tmp_path: Path) -> None:
    log = Journal(tmp_path / "log", 4096)
    for n in range(3):
        log.append(records(n, 1, size=700_000))
    assert read_all(log, Position(0, 0)) == [0, 1, 2]


def test_log_reads_a_few_of_a_large_publish(tmp_path: Path) -> None:
    log = Journal(tmp_path / "log", 1 << 20)
    log.append(records(0, 3000))
    position, numbers = Position(0, 0), []
    for count in (1, 499, 1, 700, 3000):
        messages, position = log.read(position, count)
        assert len(messages) == min(count, 3000 - len(numbers))
        numbers += [message.sequence for message in messages]
    assert numbers == list(range(3000))
    for n in (0, 1, 499, 500, 501, 2999):
        assert log.read(Position(n, 0), 1)[0][0].sequence == n
        assert log.read(log.seek(n), 1)[0][0].sequence == n


def test_log_removes_whole_files_only(tmp_path: Path) -> None:
    log = Journal(tmp_path / "log", 4096)
    for n in range(400):
        log.append(records(n, 1))
    log.remove_before(250)
    assert 150 < log.first <= 250
    assert read_all(log, log.seek(0)) == list(range(log.first, 400))
    log.remove_before(400)
    log.append(records(400, 1))
    assert read_all(log, log.seek(400)) == [400]


def test_log_that_is_opened_again_goes_on(tmp_path: Path) -> None:
    log = Journal(tmp_path / "log", 4096)
    for n in range(200):
        log.append(records(n, 1))
    log.close()
    log = Journal(tmp_path / "log", 4096)
    assert log.end.sequence == 200
    log.append(records(200, 1))
    assert read_all(log, log.seek(0)) == list(range(201))


@pytest.mark.parametrize("cut", [1, 5, 30, 57])
def test_log_drops_a_record_that_was_not_written_whole(tmp_path: Path, cut: int) -> None:
    log = Journal(tmp_path / "log", 1 << 20)
    for n in range(10):
        log.append(records(n, 1))
    log.close()
    [path] = log.folder.glob("*.log")
    os.truncate(path, path.stat().st_size - cut)
    log = Journal(tmp_path / "log", 1 << 20)
    assert log.end.sequence == 9
    log.append(records(9, 1))
    assert read_all(log, log.seek(0)) == list(range(10))


def test_log_keeps_when_a_message_is_due(tmp_path: Path) -> None:
    log = Journal(tmp_path / "log", 4096)
    log.append(records(0, 1), 1234.5)
    log.append(records(1, 1))
    messages, _ = log.read(Position(0, 0), 10)
    assert [(message.due, int(message.body)) for message in messages] == [(1234.5, 0), (0.0, 1)]


def consume(client: WireClient, count: int) -> list[bytes]:
    return [client.message().body for _ in range(count)]


def publish(server: NsqdServer, topic: str, first: int, count: int) -> None:
    server.nsqd.get_topic(topic).put_many([b"%d" % n for n in range(first, first + count)])


@pytest.mark.parametrize("mem_queue_size", [0, 1, 50])
@pytest.mark.parametrize("preserve_order", [False, True])
def test_overflow_loses_nothing_and_keeps_order_if_it_should(
    embedded: Any, mem_queue_size: int, preserve_order: bool
) -> None:
    server = embedded(mem_queue_size=mem_queue_size, max_bytes_per_file=4096, preserve_order=preserve_order)
    channel = server.nsqd.get_topic("t").get_channel("c")
    for first in range(0, 500, 100):
        publish(server, "t", first, 100)
    assert (channel.depth, len(channel.backend)) == (500, 500 - mem_queue_size)
    client = WireClient(server.tcp_address)
    client.subscribe("t", "c", rdy=7)
    got = consume(client, 300)
    publish(server, "t", 500, 10)
    got += consume(client, 210)
    # Without a queue in memory there is one on disk only: that is in order, too.
    assert (got if preserve_order or not mem_queue_size else sorted(got, key=int)) == [b"%d" % n for n in range(510)]
    until(lambda: channel.in_flight_count == 0)
    assert (channel.depth, len(channel.backend)) == (0, 0)


def test_channels_overflow_each_on_its_own(embedded: Any) -> None:
    server = embedded(mem_queue_size=10, preserve_order=True)
    topic = server.nsqd.get_topic("t")
    fast, slow = topic.get_channel("fast"), topic.get_channel("slow")
    client = WireClient(server.tcp_address)
    client.subscribe("t", "fast", rdy=50)
    for first in range(0, 200, 5):
        publish(server, "t", first, 5)
        assert consume(client, 5) == [b"%d" % n for n in range(first, first + 5)]
    assert fast.depth == len(fast.backend) == 0
    assert (slow.depth, len(slow.backend)) == (200, 190)
    other = WireClient(server.tcp_address)
    other.subscribe("t", "slow", rdy=50)
    assert consume(other, 200) == [b"%d" % n for n in range(200)]


def test_requeued_messages_come_back_while_others_wait_on_disk(embedded: Any) -> None:
    server = embedded(mem_queue_size=2)
    topic = server.nsqd.get_topic("t")
    channel = topic.get_channel("c")
    publish(server, "t", 0, 100)
    client = WireClient(server.tcp_address)
    client.subscribe("t", "c")
    for _ in range(5):
        client.send(b"REQ " + client.frame().id + b" 0\n")
    seen = [client.message() for _ in range(100)]
    assert sorted(int(frame.body) for frame in seen) == list(range(100))
    assert sum(frame.attempts for frame in seen) == 105
    assert channel.requeue_count == 5


def test_paused_topic_holds_back_for_channels_that_are_behind_too(embedded: Any) -> None:
    server = embedded(mem_queue_size=5, preserve_order=True)
    topic = server.nsqd.get_topic("t")
    behind = topic.get_channel("behind")
    publish(server, "t", 0, 20)
    topic.set_paused(True)
    publish(server, "t", 20, 20)
    level = topic.get_channel("level")
    assert (behind.depth, level.depth, topic.depth) == (20, 0, 20)
    client = WireClient(server.tcp_address)
    client.subscribe("t", "behind", rdy=10)
    assert consume(client, 20) == [b"%d" % n for n in range(20)]
    topic.set_paused(False)
    assert (level.depth, topic.depth) == (20, 0)
    assert consume(client, 20) == [b"%d" % n for n in range(20, 40)]


def test_emptied_topic_and_channel_on_disk(embedded: Any) -> None:
    server = embedded(mem_queue_size=5)
    topic = server.nsqd.get_topic("t")
    publish(server, "t", 0, 20)
    topic.empty()
    assert topic.depth == 0
    channel = topic.get_channel("c")
    publish(server, "t", 20, 20)
    channel.empty()
    publish(server, "t", 40, 1)
    client = WireClient(server.tcp_address)
    client.subscribe("t", "c")
    assert consume(client, 1) == [b"40"]


def test_ephemeral_channel_keeps_what_memory_has_room_for(embedded: Any) -> None:
    server = embedded(mem_queue_size=5)
    topic = server.nsqd.get_topic("t")
    ephemeral, lasting = topic.get_channel("e#ephemeral"), topic.get_channel("c")
    publish(server, "t", 0, 20)
    assert (ephemeral.depth, len(ephemeral.backend), lasting.depth) == (5, 0, 20)


def test_ephemeral_topic_without_channel_keeps_what_memory_has_room_for(embedded: Any) -> None:
    server = embedded(mem_queue_size=5)
    publish(server, "t#ephemeral", 0, 20)
    assert server.nsqd.get_topic("t#ephemeral").get_channel("c").depth == 5


def test_deferred_message_of_a_topic_without_channel_is_not_lost(embedded: Any) -> None:
    server = embedded()
    server.nsqd.get_topic("t").put(b"later", 300)
    client = WireClient(server.tcp_address)
    client.subscribe("t", "c")
    assert consume(client, 1) == [b"later"]


def test_log_is_removed_when_everybody_has_read_it(embedded: Any) -> None:
    server = embedded(mem_queue_size=0, max_bytes_per_file=4096, sync_timeout=0.05)
    topic = server.nsqd.get_topic("t")
    topic.get_channel("c")
    for first in range(0, 1000, 10):
        publish(server, "t", first, 10)
    client = WireClient(server.tcp_address)
    client.subscribe("t", "c", rdy=100)
    consume(client, 1000)
    until(lambda: topic.log.first > 900)
    publish(server, "t", 1000, 1)
    assert consume(client, 1) == [b"1000"]
