"""Delivery over TCP, and the output buffer of a client: the same tests on the embedded nsqd and on the original."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from gevent import Timeout, socket
from support.http import ask, channel_figures, create, post
from support.waiting import PROMPT, promptly, until
from support.wire import MESSAGE, Consumer, WireClient, many, sized


@pytest.fixture
def server(start_nsqd: Callable[..., Any]) -> Any:
    return start_nsqd()


@pytest.fixture
def publisher(server: Any) -> WireClient:
    return WireClient(server.tcp_address)


def subscribed(server: Any, rdy: int = 1, **identify: Any) -> Consumer:
    return Consumer(server, "SUB t c", rdy, **identify)


def pub_many(client: WireClient, *bodies: bytes) -> None:
    assert client.command(b"MPUB t\n" + many(*bodies)) == b"OK"


def is_silent(client: WireClient, seconds: float = 0.2) -> bool:
    if client.early:
        return False
    with Timeout(seconds, False):
        client.reader.peek(1)
        return False
    return True


def test_no_more_than_rdy_in_flight(server: Any, publisher: WireClient) -> None:
    before, consumer = time.time_ns(), subscribed(server, 0)
    pub_many(publisher, b"0", b"1", b"2")
    for n in range(3, 10):
        publisher.publish("t", b"%d" % n)
    assert is_silent(consumer)
    consumer.send(b"RDY 3\n")
    frames = [consumer.receive() for _ in range(3)]
    assert is_silent(consumer)
    consumer.finish(frames[1])
    frames.append(consumer.receive())
    consumer.send(b"RDY 1\n")
    consumer.finish(frames[0])
    assert is_silent(consumer)
    consumer.finish(frames[2])
    consumer.finish(frames[3])
    frames.append(consumer.receive())
    assert [frame.body for frame in frames] == [b"0", b"1", b"2", b"3", b"4"]
    assert {frame.attempts for frame in frames} == {1}
    for frame, following in pairwise(frames):  # hex ids that increase, and times
        assert b"%016x" % int(frame.id, 16) == frame.id < following.id
        assert before - 10**9 < int.from_bytes(frame.data[:8], "big") < time.time_ns() + 10**9


def test_a_message_comes_back_after_its_timeout_whether_its_client_is_there_or_gone(
    server: Any, publisher: WireClient
) -> None:
    there, gone = (Consumer(server, f"SUB t {channel}", 1, msg_timeout=1000) for channel in ("there", "gone"))
    start = time.monotonic()
    publisher.publish("t", b"x")
    firsts = there.receive(), gone.receive()
    gone.close()
    heir = Consumer(server, "SUB t gone", 1)
    for channel, client, frame in zip(("there", "gone"), (there, heir), firsts, strict=True):
        again = client.receive()
        assert time.monotonic() - start > 0.8
        assert (again.id, again.attempts, again.data[:8]) == (frame.id, 2, frame.data[:8])
        assert channel_figures(server, channel=channel)["timeout_count"] == 1
        client.finish(again)
    assert is_silent(there)


def test_touch_puts_the_timeout_off_as_far_as_max_msg_timeout(start_nsqd: Any) -> None:
    client = subscribed(start_nsqd(max_msg_timeout=1.5), msg_timeout=1000)
    start = time.monotonic()
    client.publish("t", b"x")
    first = client.receive()

    def comes_back() -> bool:
        client.send(b"TOUCH " + first.id + b"\n")
        return not is_silent(client, 0.3)

    until(comes_back, PROMPT)  # before a heartbeat breaks the silence
    again = next(frame for frame in iter(client.frame, None) if frame.type == MESSAGE)  # an error may be before it
    assert time.monotonic() - start > 1.3
    assert again.attempts == 2


def test_requeue_at_once_and_as_late_as_max_req_timeout(start_nsqd: Any) -> None:
    client = subscribed(start_nsqd(max_req_timeout=0.4))
    client.publish("t", b"x")
    first = client.receive()
    client.requeue(first)
    second = client.receive()
    start = time.monotonic()
    client.requeue(second, 3_600_000)
    third = client.receive()
    assert time.monotonic() - start > 0.35
    assert [first.attempts, second.attempts, third.attempts] == [1, 2, 3]
    assert first.id == second.id == third.id


def test_messages_one_by_one_go_to_clients_in_turn(embedded: Any) -> None:
    server = embedded()
    consumers, publisher = [subscribed(server, 10) for _ in range(3)], WireClient(server.tcp_address)
    bodies = {b"%d" % n for n in range(9)}
    for body in bodies:
        publisher.publish("t", body)
    assert {consumer.receive().body for consumer in consumers for _ in range(3)} == bodies


def test_after_cls_nothing_comes_whatever_rdy_says_but_answers_count(server: Any, publisher: WireClient) -> None:
    consumer = subscribed(server, 2)
    pub_many(publisher, b"a", b"b", b"c")
    frames = [consumer.receive(), consumer.receive()]
    assert consumer.command(b"CLS\n") == b"CLOSE_WAIT"
    consumer.send(b"RDY 99999\n")
    consumer.finish(frames[0])
    consumer.requeue(frames[1])
    assert is_silent(consumer)
    stats = channel_figures(server)
    assert (stats["depth"], stats["in_flight_count"], stats["requeue_count"]) == (2, 0, 1)


def test_paused_channel_and_topic_deliver_nothing(server: Any, publisher: WireClient) -> None:
    consumer = subscribed(server, 1)  # so that no message waits in the output buffer
    for what in ("channel", "topic"):
        post(server, f"/{what}/pause?topic=t&channel=c")
        publisher.publish("t", what.encode())
        assert is_silent(consumer)
        post(server, f"/{what}/unpause?topic=t&channel=c")
        assert consumer.message().body == what.encode()


def test_what_is_ephemeral_goes_with_its_last_client_or_the_last_channel_that_is_deleted(server: Any) -> None:
    def left() -> dict[str, int]:
        topics = ask(server.http_address, "GET", "/stats?format=json").json["topics"] or ()
        return {each["topic_name"]: len(each["channels"]) for each in topics}

    clients = [Consumer(server, "SUB u#ephemeral c#ephemeral", 1) for _ in range(2)]
    clients[0].close()
    clients[1].publish("u#ephemeral", b"x")
    clients[1].close()
    until(lambda: not left())
    for topic in ("t", "t#ephemeral"):
        for channel in "cd":
            create(server, topic.replace("#", "%23"), channel)
    for channel in "cd":
        assert set(left()) == {"t", "t#ephemeral"}
        for topic in ("t", "t%23ephemeral"):
            post(server, f"/channel/delete?topic={topic}&channel={channel}")
    until(lambda: left() == {"t": 0})


def test_sample_rate_drops_the_others(server: Any, publisher: WireClient) -> None:
    consumer = subscribed(server, 2500, sample_rate=30)
    pub_many(publisher, *[b"x"] * 2000)
    # The topic hands messages on in its own time: a channel without any may be one that has not got them yet.
    until(lambda: (stats := channel_figures(server))["message_count"] == 2000 and not stats["depth"])
    assert 400 < channel_figures(server)["in_flight_count"] < 850
    consumer.close()


def test_commands_split_anywhere_and_many_at_once(address: Any) -> None:
    consumer = WireClient(address)
    script = b"PUB t\n" + sized(b"one") + b"MPUB t\n" + many(b"tw", b"th") + b"NOP\n" + b"SUB t c\nRDY 10\n"
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


# Messages wait in the buffer of a client for more, until there are enough, or something else is to go out.


WAITS_FOR_EVER = {"heartbeat_interval": 60000, "output_buffer_timeout": -1}


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


def test_messages_wait_for_others_until(server: Any, publisher: WireClient) -> None:
    for cause, behind in LETS_OUT.items():
        client = subscribed(server, 3, **WAITS_FOR_EVER)
        publisher.publish("t", b"1")
        publisher.publish("t", b"2")
        until(lambda: channel_figures(server)["in_flight_count"] == 2)
        assert not has_come(client), cause
        if isinstance(cause, bytes):
            client.send(cause)
        else:
            post(server, cause, b"x")
        frames = [client.frame() for _ in range(2 + len(behind))]
        assert [frame.body if frame.type == MESSAGE else frame.data for frame in frames] == [b"1", b"2", *behind]
        client.close()
        post(server, "/topic/delete?topic=t")


def test_what_lets_a_buffer_out(server: Any, publisher: WireClient) -> None:
    full = subscribed(server, 100, output_buffer_size=1000, **WAITS_FOR_EVER)
    for _ in range(10):
        publisher.publish("t", b"x" * 300)
    assert [full.frame().body for _ in range(3)] == [b"x" * 300] * 3
    full.close()
    post(server, "/topic/delete?topic=t")
    none = subscribed(server, 100, output_buffer_size=-1)
    publisher.publish("t", b"1")
    assert none.frame().body == b"1"
    none.close()
    client = subscribed(server, 100, output_buffer_timeout=25)
    for body in (b"1", b"2", b"3"):
        publisher.publish("t", body)
        with promptly():  # a heartbeat, in 30 s, would take them along
            assert client.frame().body == body


def test_a_broker_may_have_nothing_wait(embedded: Callable[..., Any]) -> None:
    server = embedded(output_buffer_timeout=0.0)
    client, publisher = subscribed(server, 100), WireClient(server.tcp_address)
    for body in (b"1", b"2"):
        publisher.publish("t", body)
        assert client.frame().body == body
