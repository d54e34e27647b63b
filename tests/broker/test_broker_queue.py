"""More messages than memory is meant for: the log of a topic, channels that read from it, and the scan of channels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.http import ask
from support.waiting import until
from support.wire import WireClient

from nsq_fast.broker import NsqdServer
from nsq_fast.broker.journal import Journal, Position
from nsq_fast.broker.message import SnowflakeIds, encode_frames
from nsq_fast.broker.queue import InFlight

IDS = SnowflakeIds(1)


def records(first: int, count: int, size: int = 20) -> list[bytes]:
    bodies = [b"%0*d" % (size, n) for n in range(first, first + count)]
    return encode_frames(IDS.take(count), bodies, 0)


def read_all(log: Journal, position: Position) -> list[int]:
    numbers: list[int] = []
    while position.sequence < log.end:
        messages, position = log.read(position)
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


def test_log_reads_records_that_are_larger_than_a_read(tmp_path: Path) -> None:
    log = Journal(tmp_path / "log", 4096)
    for n in range(3):
        log.append(records(n, 1, size=700_000))
    assert read_all(log, Position(0, 0)) == [0, 1, 2]


def test_log_reads_a_few_of_a_large_publish(tmp_path: Path) -> None:
    log = Journal(tmp_path / "log", 1 << 20)
    log.append(records(0, 3000))
    for n in (0, 1, 499, 500, 501, 2999):
        assert log.read(Position(n, 0))[0][0].sequence == log.read(log.at(n))[0][0].sequence == n
        first, behind = log.read(Position(n, 0), n + 1)
        assert [message.sequence for message in first] == [n]
        assert read_all(log, behind) == list(range(n + 1, 3000))


def consume(client: WireClient, count: int) -> list[bytes]:
    return [client.message().body for _ in range(count)]


def publish(server: NsqdServer, topic: str, first: int, count: int) -> None:
    server.nsqd.get_topic(topic).put_many([b"%d" % n for n in range(first, first + count)])


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


def test_what_a_channel_leaves_out_of_the_log_is_bounded(embedded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages pass those on disk as long as there is room in memory, which is known of each."""
    monkeypatch.setattr("nsq_fast.broker.channel._MOST_LEFT_OUT", 20)
    monkeypatch.setattr("nsq_fast.broker.channel.random.getrandbits", lambda bits: 1)  # from memory
    server = embedded(mem_queue_size=1)
    topic = server.nsqd.get_topic("t")
    channel = topic.get_channel("c")
    client = SimpleNamespace(in_flight=InFlight(None, 60.0))
    taken: list[int] = []
    for n in range(100):
        publish(server, "t", 2 * n, 2)
        assert len(channel.backend.unread()) <= 21
        taken += [int(frame[34:]) for frame in channel.deliver(client, 1)]
    assert taken[:20] == list(range(0, 40, 2))
    assert channel.depth == 100
    taken += [int(frame[34:]) for frame in channel.deliver(client, 1000)]
    assert sorted(taken) == list(range(200))
    assert channel.depth == 0


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


def test_a_deferred_message_of_a_new_channel_does_not_wait_for_a_refresh(embedded: Any) -> None:
    server = embedded(queue_scan_interval=0.01, queue_scan_refresh_interval=3600.0)
    topic = server.nsqd.get_topic("t")
    channel = topic.get_channel("c")
    topic.put(b"x", 20)
    until(lambda: channel.depth == 1)


CHANNEL = "c%23ephemeral"


def channel(server: Any) -> dict[str, Any]:
    [topic] = ask(server.http_address, "GET", f"/stats?format=json&topic=t&channel={CHANNEL}").json["topics"]
    return dict(topic["channels"][0])


def post(server: Any, path: str) -> None:
    assert ask(server.http_address, "POST", path).status == 200


def test_a_ready_client_gets_messages_without_a_memory_queue(start_nsqd: Callable[..., Any]) -> None:
    server = start_nsqd(mem_queue_size=0)
    client = WireClient(server.tcp_address)
    client.subscribe("t", "c#ephemeral", 1)

    def published() -> bool:
        # A client of the original that is not quite back at its wait misses a message: that one is dropped.
        WireClient(server.tcp_address).publish("t", b"1")
        return bool(channel(server)["in_flight_count"] == 1)

    until(published)
    assert client.frame().body == b"1"


def test_without_a_ready_client_and_a_memory_queue_messages_are_dropped(start_nsqd: Callable[..., Any]) -> None:
    server = start_nsqd(mem_queue_size=0)
    client = WireClient(server.tcp_address)
    client.subscribe("t", "c#ephemeral", 1)
    client.send(b"RDY 0\n")
    until(lambda: channel(server)["clients"][0]["ready_count"] == 0)
    WireClient(server.tcp_address).publish("t", b"1")
    until(lambda: channel(server)["message_count"] == 1)
    assert channel(server)["depth"] == 0


def test_a_new_channel_gets_what_fits_into_its_memory(start_nsqd: Callable[..., Any]) -> None:
    server = start_nsqd(mem_queue_size=3)
    publisher = WireClient(server.tcp_address)
    for n in range(10):
        publisher.publish("t", b"%d" % n)
    post(server, f"/channel/create?topic=t&channel={CHANNEL}")
    until(lambda: channel(server)["message_count"] == 10)
    assert channel(server)["depth"] == 3


def test_deferred_messages_need_no_room(start_nsqd: Callable[..., Any]) -> None:
    server = start_nsqd(mem_queue_size=3)
    post(server, "/topic/create?topic=t")
    post(server, f"/channel/create?topic=t&channel={CHANNEL}")
    for _ in range(5):
        ask(server.http_address, "POST", "/pub?topic=t&defer=60000", b"x")
    until(lambda: channel(server)["deferred_count"] == 5)
