"""Delivery over TCP, and the output buffer of a client: the same tests on the embedded nsqd and on the original."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from gevent import Timeout, socket
from support.http import ask, channel_figures, post
from support.waiting import WAIT, promptly, until
from support.wire import MESSAGE, Frame, WireClient, many


def pub_many(client: WireClient, topic: str, bodies: list[bytes]) -> None:
    assert client.command(f"MPUB {topic}\n".encode() + many(*bodies)) == b"OK"


def receive(client: WireClient, count: int) -> list[Frame]:
    frames = [client.frame() for _ in range(count)]
    assert all(frame.type == MESSAGE for frame in frames)
    return frames


def is_silent(client: WireClient, seconds: float) -> bool:
    if client.early:
        return False
    with Timeout(seconds, False):
        client.reader.peek(1)
        return False
    return True


@pytest.fixture
def clients(start_nsqd: Any) -> Any:
    """A consumer subscribed to t/c with msg_timeout 1 s and RDY 0, and a publisher."""
    address = start_nsqd().tcp_address
    consumer = WireClient(address, msg_timeout=1000)
    consumer.subscribe("t", "c", rdy=0)
    return consumer, WireClient(address)


def test_no_more_than_rdy_in_flight(clients: Any) -> None:
    consumer, publisher = clients
    before = time.time_ns()
    pub_many(publisher, "t", [b"%d" % n for n in range(4)])
    for n in range(4, 10):
        publisher.publish("t", b"%d" % n)
    assert is_silent(consumer, 0.2)
    consumer.send(b"RDY 3\n")
    frames = receive(consumer, 3)
    assert is_silent(consumer, 0.2)
    consumer.send(b"FIN " + frames[1].id + b"\n")
    frames += receive(consumer, 1)
    consumer.send(b"RDY 1\nFIN " + frames[0].id + b"\n")
    assert is_silent(consumer, 0.2)
    consumer.send(b"FIN " + frames[2].id + b"\nFIN " + frames[3].id + b"\n")
    frames += receive(consumer, 1)
    assert [frame.body for frame in frames] == [b"0", b"1", b"2", b"3", b"4"]
    assert {frame.attempts for frame in frames} == {1}
    for frame, following in pairwise(frames):  # hex ids that increase, and times
        assert b"%016x" % int(frame.id, 16) == frame.id < following.id
        assert before - 10**9 < int.from_bytes(frame.data[:8], "big") < time.time_ns() + 10**9


def test_a_message_comes_back_after_its_timeout_whether_its_client_is_there_or_gone(start_nsqd: Any) -> None:
    server = start_nsqd()
    there, gone = (WireClient(server.tcp_address, msg_timeout=1000) for _ in range(2))
    there.subscribe("t", "there")
    gone.subscribe("t", "gone")
    start = time.monotonic()
    publish(server, b"x")
    [of_there], [of_gone] = receive(there, 1), receive(gone, 1)
    gone.close()
    heir = WireClient(server.tcp_address)
    heir.subscribe("t", "gone")
    for channel, client, frame in (("there", there, of_there), ("gone", heir, of_gone)):
        [again] = receive(client, 1)
        assert time.monotonic() - start > 0.8
        assert (again.id, again.attempts, again.data[:8]) == (frame.id, 2, frame.data[:8])
        assert channel_figures(server, channel=channel)["timeout_count"] == 1
        client.send(b"FIN " + again.id + b"\n")
    assert is_silent(there, 0.2)


def test_touch_puts_the_timeout_off_as_far_as_max_msg_timeout(start_nsqd: Any) -> None:
    client = WireClient(start_nsqd(max_msg_timeout=1.5).tcp_address, msg_timeout=1000)
    client.subscribe("t", "c")
    start = time.monotonic()
    client.publish("t", b"x")
    [first] = receive(client, 1)
    is_silent(client, 0.6)
    client.send(b"TOUCH " + first.id + b"\n")
    [second] = receive(client, 1)
    assert time.monotonic() - start > 1.3
    assert second.attempts == 2


def test_requeue_at_once_and_as_late_as_max_req_timeout(start_nsqd: Any) -> None:
    client = subscribed(start_nsqd(max_req_timeout=0.4), 1)
    client.publish("t", b"x")
    [first] = receive(client, 1)
    client.send(b"REQ " + first.id + b" 0\n")
    [second] = receive(client, 1)
    start = time.monotonic()
    client.send(b"REQ " + second.id + b" 3600000\n")
    [third] = receive(client, 1)
    assert time.monotonic() - start > 0.35
    assert [first.attempts, second.attempts, third.attempts] == [1, 2, 3]
    assert first.id == second.id == third.id


def test_deferred_publish(clients: Any) -> None:
    consumer, publisher = clients
    consumer.send(b"RDY 5\n")
    start = time.monotonic()
    assert publisher.command(b"DPUB t 500\n\0\0\0\5later") == b"OK"
    publisher.publish("t", b"now")
    frames = [consumer.message(), consumer.message()]
    assert [frame.body for frame in frames] == [b"now", b"later"]
    assert time.monotonic() - start > 0.4
    assert frames[1].attempts == 1


def test_what_a_channel_does_with_a_message_is_nothing_to_another(address: Any) -> None:
    first, second = WireClient(address), WireClient(address)
    first.subscribe("t", "a")
    first.send(b"RDY 0\n")
    second.subscribe("t", "b")
    second.publish("t", b"x")
    again = second.frame()
    for attempts in (1, 2, 3):
        assert again.attempts == attempts
        second.send(b"REQ " + again.id + b" 0\n")
        again = second.frame()
    first.send(b"RDY 1\n")
    frame = first.frame()
    assert (frame.id, frame.body, frame.attempts) == (again.id, b"x", 1)


def test_messages_one_by_one_go_to_clients_in_turn(embedded: Any) -> None:
    address = embedded().tcp_address
    publisher, *consumers = [WireClient(address) for _ in range(4)]
    for consumer in consumers:
        consumer.subscribe("t", "c", rdy=10)
    bodies = {b"%d" % n for n in range(9)}
    for body in bodies:
        publisher.publish("t", body)
    assert {frame.body for consumer in consumers for frame in receive(consumer, 3)} == bodies


def test_a_client_that_is_not_ready_blocks_nobody(address: Any) -> None:
    lazy, ready, publisher = WireClient(address), WireClient(address), WireClient(address)
    lazy.subscribe("t", "c", rdy=10)
    ready.subscribe("t", "c", rdy=10)
    lazy.send(b"RDY 0\n")
    assert is_silent(lazy, 0.1)
    for n in range(5):
        publisher.publish("t", b"%d" % n)
    assert len(receive(ready, 5)) == 5
    assert is_silent(lazy, 0.1)


def test_no_messages_after_cls_but_answers_count(start_nsqd: Any) -> None:
    server = start_nsqd()
    consumer, publisher = WireClient(server.tcp_address), WireClient(server.tcp_address)
    consumer.subscribe("t", "c", rdy=2)
    pub_many(publisher, "t", [b"a", b"b", b"c"])
    frames = receive(consumer, 2)
    assert consumer.command(b"CLS\n") == b"CLOSE_WAIT"
    consumer.send(b"FIN " + frames[0].id + b"\nREQ " + frames[1].id + b" 0\n")
    assert is_silent(consumer, 0.2)
    stats = channel_figures(server)
    assert (stats["depth"], stats["in_flight_count"], stats["requeue_count"]) == (2, 0, 1)


def test_paused_channel_and_topic_deliver_nothing(start_nsqd: Any) -> None:
    server = start_nsqd()
    consumer = WireClient(server.tcp_address)
    consumer.subscribe("t", "c", rdy=5)
    publisher = WireClient(server.tcp_address)
    for what in ("channel", "topic"):
        ask(server.http_address, "POST", f"/{what}/pause?topic=t&channel=c")
        publisher.publish("t", what.encode())
        assert is_silent(consumer, 0.2)
        ask(server.http_address, "POST", f"/{what}/unpause?topic=t&channel=c")
        assert consumer.message().body == what.encode()


def test_emptied_channel_forgets_what_waits_and_what_is_in_flight(start_nsqd: Any) -> None:
    server = start_nsqd()
    consumer, publisher = WireClient(server.tcp_address), WireClient(server.tcp_address)
    consumer.subscribe("t", "c", rdy=1)
    pub_many(publisher, "t", [b"a", b"b", b"c"])
    publisher.command(b"DPUB t 60000\n\0\0\0\1d")
    [frame] = receive(consumer, 1)
    # A consumer that is ready may get one more while nsqd empties: nsqio/nsq: nsqd/channel.go, Empty.
    consumer.send(b"RDY 0\n")
    until(lambda: channel_figures(server)["clients"][0]["ready_count"] == 0)
    until(lambda: channel_figures(server)["deferred_count"] == 1)
    ask(server.http_address, "POST", "/channel/empty?topic=t&channel=c")
    stats = channel_figures(server)
    assert (stats["depth"], stats["in_flight_count"], stats["deferred_count"]) == (0, 0, 0)
    consumer.send(b"RDY 1\n")
    publisher.publish("t", b"new")
    assert receive(consumer, 1)[0].body == b"new"
    consumer.send(b"FIN " + frame.id + b"\n")
    assert consumer.frame().data == b"E_FIN_FAILED FIN " + frame.id + b" failed ID not in flight"


def test_ephemeral_channel_and_topic_go_with_their_last_client(start_nsqd: Any) -> None:
    server = start_nsqd()
    clients = [WireClient(server.tcp_address) for _ in range(2)]
    for client in clients:
        client.subscribe("t#ephemeral", "c#ephemeral")
    clients[0].close()
    clients[1].publish("t#ephemeral", b"x")
    clients[1].close()
    until(lambda: not ask(server.http_address, "GET", "/stats?format=json").json["topics"])


def test_an_ephemeral_topic_goes_with_the_last_channel_that_is_deleted(start_nsqd: Any) -> None:
    server = start_nsqd()

    def left() -> dict[str, int]:
        topics = ask(server.http_address, "GET", "/stats?format=json").json["topics"] or ()
        return {each["topic_name"]: len(each["channels"]) for each in topics}

    for topic in ("t", "t%23ephemeral"):
        ask(server.http_address, "POST", f"/topic/create?topic={topic}")
        for channel in "cd":
            ask(server.http_address, "POST", f"/channel/create?topic={topic}&channel={channel}")
    for channel in "cd":
        assert set(left()) == {"t", "t#ephemeral"}
        for topic in ("t", "t%23ephemeral"):
            ask(server.http_address, "POST", f"/channel/delete?topic={topic}&channel={channel}")
    until(lambda: left() == {"t": 0})


def test_sample_rate_drops_the_others(start_nsqd: Any) -> None:
    server = start_nsqd()
    client = WireClient(server.tcp_address, sample_rate=30)
    client.subscribe("t", "c", rdy=2500)
    pub_many(WireClient(server.tcp_address), "t", [b"x"] * 2000)
    # The topic hands messages on in its own time: a channel without any may be one that has not got them yet.
    until(lambda: (stats := channel_figures(server))["message_count"] == 2000 and not stats["depth"])
    in_flight = channel_figures(server)["in_flight_count"]
    assert 400 < in_flight < 850


def test_commands_split_anywhere_and_many_at_once(address: Any) -> None:
    consumer = WireClient(address)
    script = b"PUB t\n\0\0\0\3one" + b"MPUB t\n\0\0\0\x10\0\0\0\2\0\0\0\2tw\0\0\0\2th" + b"NOP\n" + b"SUB t c\nRDY 10\n"
    for at in range(len(script)):
        consumer.send(script[at : at + 1])
    frames = [consumer.frame() for _ in range(6)]
    assert [frame.data for frame in frames if frame.type != MESSAGE] == [b"OK"] * 3
    ids = [frame.id for frame in frames if frame.type == MESSAGE]
    answers = b"".join(b"FIN %b\n" % id for id in ids[:2]) + b"TOUCH %b\nREQ %b 0\n" % (ids[2], ids[2])
    for at in range(0, len(answers), 7):
        consumer.send(answers[at : at + 7])
    again = consumer.message()
    assert (again.id, again.attempts) == (ids[2], 2)
    for _ in range(3):
        consumer.send(b"PUB t\n\0\0\0\1x" * 1000)
    seen = Counter(consumer.frame().type for _ in range(3000 + 9))
    assert seen[MESSAGE] >= 9


def test_heartbeats_come_while_answered(address: Any) -> None:
    client = WireClient(address, heartbeat_interval=1000)
    client.subscribe("t", "c")
    raw = client.sock
    start = time.monotonic()
    for _ in range(3):
        with Timeout(WAIT, TimeoutError("no heartbeat")):
            assert client.reader.read(19)[8:] == b"_heartbeat_"
        raw.sendall(b"NOP\n")
    assert time.monotonic() - start > 2.8


WAITS_FOR_EVER = {"heartbeat_interval": 60000, "output_buffer_timeout": -1}


@pytest.fixture
def server(start_nsqd: Callable[..., Any]) -> Any:
    return start_nsqd()


def publish(server: Any, *bodies: bytes) -> None:
    client = WireClient(server.tcp_address)
    for body in bodies:
        client.publish("t", body)


def subscribed(server: Any, rdy: int, **identify: Any) -> WireClient:
    client = WireClient(server.tcp_address, **identify)
    client.subscribe("t", "c", rdy)
    return client


def in_flight(server: Any) -> int:
    return int(channel_figures(server)["in_flight_count"])


def has_come(client: WireClient) -> bool:
    client.sock.setblocking(False)
    try:
        return bool(client.sock.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False
    finally:
        client.sock.setblocking(True)


LETS_OUT: dict[str | bytes, list[bytes]] = {
    "/pub?topic=t": [b"x"],  # as many as the client may have
    "/channel/pause?topic=t&channel=c": [],
    b"RDY 2\n": [],
    b"RDY 0\n": [],
    b"CLS\n": [b"CLOSE_WAIT"],
    b"FIN 0123456789abcdef\n": [b"E_FIN_FAILED FIN 0123456789abcdef failed ID not in flight"],
    b"NONSENSE\n": [b"E_INVALID invalid command NONSENSE"],
}
"""What a request, or a command, sends behind the messages that it lets out."""


def test_messages_wait_for_others_until(server: Any) -> None:
    for cause, behind in LETS_OUT.items():
        client = subscribed(server, 3, **WAITS_FOR_EVER)
        publish(server, b"1", b"2")
        until(lambda: in_flight(server) == 2)
        assert not has_come(client), cause
        if isinstance(cause, bytes):
            client.send(cause)
        else:
            post(server, cause, b"x")
        frames = [client.frame() for _ in range(2 + len(behind))]
        assert [frame.body if frame.type == MESSAGE else frame.data for frame in frames] == [b"1", b"2", *behind]
        client.close()
        post(server, "/topic/delete?topic=t")


def test_what_lets_a_buffer_out(server: Any) -> None:
    full = subscribed(server, 100, output_buffer_size=1000, **WAITS_FOR_EVER)
    publish(server, *[b"x" * 300] * 10)
    assert [full.frame().body for _ in range(3)] == [b"x" * 300] * 3
    full.close()
    post(server, "/topic/delete?topic=t")
    none = subscribed(server, 100, output_buffer_size=-1)
    publish(server, b"1")
    assert none.frame().body == b"1"


def test_after_the_timeout_messages_go_out(server: Any) -> None:
    client = subscribed(server, 100, output_buffer_timeout=25)
    for body in (b"1", b"2", b"3"):
        publish(server, body)
        with promptly():  # a heartbeat, in 30 s, would take them along
            assert client.frame().body == body


def test_a_broker_may_have_nothing_wait(embedded: Callable[..., Any]) -> None:
    server = embedded(output_buffer_timeout=0.0)
    client = subscribed(server, 100)
    publish(server, b"1", b"2")
    assert [client.frame().body for _ in range(2)] == [b"1", b"2"]
