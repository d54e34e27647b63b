"""What every Consumer does, whichever face it has; and what no handler gets."""

from __future__ import annotations

import asyncio
import re
import struct
import sys
import threading
from collections import deque
from contextlib import aclosing
from time import time_ns
from typing import Any

import pytest
from gevent.event import Event
from gevent.pywsgi import WSGIServer
from hypothesis import given, settings
from hypothesis import strategies as st
from support.contract import BODIES, FACES, AsyncioFace, Face, Topic
from support.scripted_nsqd import ScriptedConnection, ScriptedNsqd
from support.servers import free_address
from support.waiting import promptly
from support.wire import OK, error_frame, frame, message_frame

from nsq_fast import HttpConfigSource, Message, NsqdHTTPClient, aio
from nsq_fast.client.give_up import PublishTo
from nsq_fast.errors import ConfigError, ConnectionLost, NotRunning, RequeueMessage

NOBODY = "127.0.0.1:1"


def is_ready(nsqd: ScriptedNsqd, number: int) -> bool:
    """Whether so many connections came, and the last of them has asked for messages."""
    return len(nsqd.connections) >= number and nsqd.connections[number - 1].rdy is not None


def is_connected(consumer: Any) -> bool:
    return any(connection.is_connected for connection in consumer.stats().connections)


async def test_handlers_run_one_at_a_time_and_in_order(face: Face, topic: Topic) -> None:
    found: list[bytes] = []
    running: list[int] = []

    async def handle(consumer: Any, message: Message) -> None:
        running.append(1)
        assert len(running) == 1
        if len(found) % 10 == 0:
            await face.sleep(0.001)  # sleep: a handler that waits
        found.append(message.body)
        running.pop()

    async with topic.consumer(face, message_handler=handle, max_in_flight=50) as consumer:
        await face.until(lambda: consumer.stats().totals.finished == 100)
        assert consumer.is_running
    assert not consumer.is_running
    assert set(found) == BODIES


async def test_receivers_of_on_message_get_each_message_beside_the_handler(face: Face, filled: str) -> None:
    found: list[bytes] = []
    heard: list[bytes] = []

    async def handle(consumer: Any, message: Message) -> None:
        found.append(message.body)

    def hear(consumer: Any, message: Message) -> None:
        heard.append(message.body)

    async with face.consuming("one by one", handle, filled, max_in_flight=0) as consumer:
        consumer.on_message.connect(hear)
        consumer.max_in_flight = 50
        await face.until(lambda: consumer.stats().totals.finished == 100)
    assert set(found) == BODIES
    assert heard == found


async def test_several_iterate_until_it_is_closed_and_finish_what_they_are_at(face: Face, filled: str) -> None:
    found: set[bytes] = set()
    async with face.client("Consumer", "t", "c", filled, max_in_flight=30, concurrency=3) as consumer:

        async def take() -> None:
            async with aclosing(face.messages(consumer)) as messages:
                async for message in messages:
                    found.add(message.body)
                    await face.sleep(0)

        jobs = [await face.begin(take) for _ in range(3)]
        await face.until(lambda: consumer.stats().totals.finished >= 50)
        await face(consumer.close())
        for join in jobs:
            await join()
        totals = consumer.stats().totals
        assert totals.finished == len(found)
        assert totals.requeued == totals.received - len(found)


async def test_a_server_that_restarts_loses_no_message(face: Face, nsqd_process: Any, filled: str) -> None:
    found: set[bytes] = set()
    restarted: list[int] = []

    async def handle(consumer: Any, message: Message) -> None:
        while len(found) >= 50 and not restarted:
            await face.sleep(0.001)  # sleep: looks again and again
        found.add(message.body)

    async with face.consuming("one by one", handle, filled, max_in_flight=10, max_reconnect_delay=0.1) as consumer:
        # A real nsqd that is stopped while it sends may lose a message that is in none of its queues just then
        # (nsqio/nsq: nsqd/protocol_v2.go, messagePump, and channel.go, flush). Killed, it loses what is in flight.
        await face.until(lambda: len(found) >= 50 and consumer.stats().in_flight == 10)
        await face.do(nsqd_process.stop)
        await face.do(nsqd_process.start)
        restarted.append(1)
        await face.until(lambda: found == BODIES, about=lambda: f"{len(found)} came; {consumer.stats()}")


@pytest.mark.kill
async def test_an_nsqd_that_hangs_while_it_is_consumed_costs_no_message(
    face: Face, nsqd_process: Any, filled: str
) -> None:
    found: set[bytes] = set()

    async def handle(consumer: Any, message: Message) -> None:
        found.add(message.body)
        if len(found) == 50:
            nsqd_process.freeze()

    # The shortest interval that nsqd takes. Thawed, it sends messages to the old connection still, and has them again
    # when they time out (nsqio/nsq: nsqd/channel.go, RemoveClient): sooner than this test gives up.
    options: dict[str, Any] = {"max_reconnect_delay": 0.1, "heartbeat_interval": 1.0, "msg_timeout": 10.0}
    async with face.consuming("one by one", handle, filled, max_in_flight=10, **options) as consumer:
        await face.until(lambda: len(found) >= 50 and not is_connected(consumer))  # nothing came for two intervals
        nsqd_process.thaw()
        await face.until(lambda: found == BODIES and is_connected(consumer) and consumer.total_in_flight == 0)


@pytest.mark.kill
async def test_an_nsqd_that_is_killed_while_it_is_consumed_costs_no_message(
    face: Face, nsqd_process: Any, filled: str, request: pytest.FixtureRequest
) -> None:
    found: set[bytes] = set()
    later = {b"later %d" % number for number in range(50)}
    # Killed, the real one comes back without some messages that it had begun to send.
    wanted = BODIES | later if "embedded" in request.node.callspec.id else later
    over: list[int] = []

    async def handle(consumer: Any, message: Message) -> None:
        found.add(message.body)
        while len(found) == 50 and not over:
            await face.sleep(0.001)  # sleep: looks again and again

    async with face.consuming("one by one", handle, filled, max_in_flight=10, max_reconnect_delay=0.1) as consumer:
        await face.until(lambda: len(found) >= 50)
        await face.do(nsqd_process.kill)
        over.append(1)
        await face.until(lambda: not is_connected(consumer))
        await face.do(nsqd_process.start)
        async with face.client("Producer", nsqd_process.address) as producer:
            await face(producer.multipublish("t", sorted(later)))
        await face.until(lambda: wanted <= found, about=lambda: wanted - found)
        await face.until(lambda: consumer.total_in_flight == 0)


async def test_before_start_and_after_close(face: Face) -> None:
    consumer = face.package.Consumer("t", "c", NOBODY)
    with pytest.raises(NotRunning, match="start"):
        await face(consumer.join())
    await face(consumer.close())
    with pytest.raises((NotRunning, RuntimeError)):
        await face(consumer.start())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"message_handler": 1}, "callable"),
        ({"max_in_fligt": 1}, "did you mean 'max_in_flight'"),
        ({"message_handler": True, "batch_handler": True}, "both given"),
        ({"tls_options": {"verify": False}}, "tls_options without tls_v1=True"),
        ({"ordered": "true", "sample_rate": 10}, "ordered messages cannot be sampled"),
        *(({"max_age_policy": policy}, "max_age_policy") for policy in ("drop", None, 5)),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_where_it_is_made(face: Face, options: dict[str, Any], match: str) -> None:
    async def handle(consumer: Any, item: Any) -> None: ...

    given = face.taken({name: handle if value is True else value for name, value in options.items()})
    with pytest.raises(ConfigError, match=match):
        face.package.Consumer("t", "c", NOBODY, **given)


GARBAGE = (b"\x00\x00\x00\x06\x00\x00\x00\x09xx", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff" * 64)


async def test_an_nsqd_that_sends_garbage_is_asked_again(face: Face, nsqd: ScriptedNsqd) -> None:
    found: list[bytes] = []

    async def handle(consumer: Any, message: Message) -> None:
        found.append(message.body)

    async with face.consuming("one by one", handle, nsqd.address, max_reconnect_delay=0.1):
        for number, garbage in enumerate(GARBAGE):
            await face.until(lambda number=number: is_ready(nsqd, number + 1))  # type: ignore[misc]
            await face.do(lambda garbage=garbage: nsqd.connections[-1].send(garbage))  # type: ignore[misc]
        await face.until(lambda: is_ready(nsqd, len(GARBAGE) + 1))
        await face.do(lambda: nsqd.connections[-1].push(1, body=b"after"))
        await face.until(lambda: found == [b"after"])


async def test_a_response_that_is_lost_with_its_connection_makes_room_for_another_message(
    face: Face, nsqd: ScriptedNsqd
) -> None:
    taken: deque[Message] = deque()

    async def handle(consumer: Any, message: Message) -> None:
        message.enable_async()
        taken.append(message)

    async with face.consuming("one by one", handle, nsqd.address, max_in_flight=1, max_reconnect_delay=0.1) as consumer:
        connection = await send(face, nsqd, 1)
        await face.until(lambda: taken)
        await face.do(connection.close)
        await face.until(lambda: len(nsqd.connections) == 2 and b"SUB" in nsqd.connections[1].words())
        await face.until(lambda: consumer.stats().orphaned == 1)
        message = taken.popleft()
        with pytest.raises(ConnectionLost):
            message.finish()
        await face.until(lambda: nsqd.connections[1].rdy == 1 and consumer.stats().orphaned == 0)


def ordered_frame(number: int) -> bytes:
    """A message of an ordered partition, with its place there."""
    place = struct.pack(">QI", 100 * number, 100)
    return frame(2, struct.pack(">qH", 1, 1) + b"%016x" % number + place + b"body")


def holding(face: Face, handled: list[int], over: list[int], is_answering: bool = False) -> Any:
    """A handler that notes each message and keeps it until there is something in ``over``; or finishes it at once."""

    async def handle(consumer: Any, message: Message) -> None:
        if is_answering:
            message.finish()
        handled.append(int(message.id, 16))
        while not over:
            await face.sleep(0.001)  # sleep: looks again and again

    return handle


async def send(face: Face, server: ScriptedNsqd, *numbers: int) -> ScriptedConnection:
    """Push messages of these numbers to the first connection, once it is ready."""
    await face.until(lambda: is_ready(server, 1))
    connection = server.connections[0]
    await face.do(lambda: connection.push(*numbers))
    return connection


async def test_the_log_says_that_messages_expire_as_nobody_iterates(face: Face, servers: Any, told: Any) -> None:
    """Who leaves a loop leaves the consumer as it is: what it holds comes to nobody until its time is over."""
    server = await face.do(lambda: servers({"msg_timeout": 300}))
    async with face.client("Consumer", "t", "c", str(server.address), max_in_flight=10) as consumer:
        await send(face, server, 1, 2, 3)
        async with aclosing(face.messages(consumer)) as messages:
            message = await anext(messages)
            message.finish()
        await face.until(lambda: consumer.stats().totals.expired == 2)
        await face.until(lambda: told("messages_expired"))
    assert re.match(r"2 messages not answered .*as nobody iterates", told("messages_expired")[0])


async def test_what_a_closing_consumer_gives_back_costs_one_attempt(face: Face, servers: Any) -> None:
    """CLS goes before the REQ of a loop that was left: nsqd would else send the message once more, to who closes."""
    if face.name == "threads":
        pytest.skip("between two calls of a thread its hub may run")
    server = await face.do(lambda: servers(replies={b"CLS": frame(0, b"CLOSE_WAIT")}))
    async with face.client("Consumer", "t", "c", str(server.address)) as consumer:
        await send(face, server, 1)
        async with aclosing(face.messages(consumer)) as messages:
            await anext(messages)
    assert server.connections[0].words()[-2:] == [b"CLS", b"REQ"]


@pytest.mark.parametrize("is_loop", [False, True])
@pytest.mark.filterwarnings("ignore:unclosed consumer")
async def test_what_a_cancelled_consumer_gives_back_costs_one_attempt(face: Face, servers: Any, is_loop: bool) -> None:
    """Also one that nobody closes before ``asyncio.run`` cancels all tasks: nsqd would hold on to it for a minute."""
    if not isinstance(face, AsyncioFace):
        pytest.skip("of asyncio alone")
    server = await face.do(lambda: servers(replies={b"CLS": frame(0, b"CLOSE_WAIT")}))
    handled: list[int] = []
    consumer = aio.Consumer("t", "c", str(server.address), message_handler=holding(face, handled, []))
    task = asyncio.ensure_future(consumer.start() if is_loop else within(consumer))
    await send(face, server, 1)
    await face.until(lambda: handled)
    for each in asyncio.all_tasks() - {asyncio.current_task()} if is_loop else {task}:
        each.cancel()
    await face.until(lambda: len(server.connections[0].words()) > 4)
    assert server.connections[0].words()[-2:] == [b"CLS", b"REQ"]


async def within(consumer: aio.Consumer) -> None:
    async with consumer:
        await consumer.join()


@pytest.mark.parametrize("is_told", [True, False], ids=["refused", "taken back"])
async def test_a_handler_runs_once_while_a_leader_cannot_record_that_its_message_is_done(
    face: Face, servers: Any, is_told: bool
) -> None:
    """It has too few replicas: it refuses the FIN, ends the connection, and sends the message again to the next. Or it
    waits for a replica, takes the FIN back, and sends the message again meanwhile."""
    handled: list[int] = []
    fins: list[ScriptedConnection] = []

    def finished(connection: ScriptedConnection, _: Any) -> None:
        fins.append(connection)
        if is_told and len(fins) < 3:
            connection.send(error_frame(b"E_FAILED_ON_NOT_WRITABLE "))
            connection.close()
        elif len(fins) < 4:
            connection.send(ordered_frame(1 if len(fins) < 3 else 2))

    server = await face.do(lambda: servers({"version": "0.3.7-HA.1.9.9"}, {b"SUB_ORDERED": OK, b"FIN": finished}))
    handle = holding(face, handled, [True])
    async with face.consuming("ordered", handle, server.address, **WAYS["ordered"]):
        for number in range(3 if is_told else 1):
            await face.until(lambda number=number: is_ready(server, number + 1))  # type: ignore[misc]
            await face.do(lambda number=number: server.connections[number].send(ordered_frame(1)))  # type: ignore[misc]
            await face.until(lambda number=number: len(fins) > number)  # type: ignore[misc]
        await face.until(lambda: 2 in handled)
    assert handled == [1, 2]


WAYS: dict[str, dict[str, Any]] = {
    "one by one": {},
    "shared pool": {"concurrency": 1},
    "batches": {"batch_size": 1},
    "ordered": {"ordered": True, "partitions": [0]},
    "iterated": {},
    "at a thread": {"concurrency": 3, "handler_threads": 1},
    "kept": {"drop_expired": False},
}


async def test_what_is_answered_is_let_go(face: Face, servers: Any) -> None:
    """With its body, however long no other message comes."""
    bodies: list[bytes] = []
    alone = [object()]

    async def handle(consumer: Any, message: Message) -> None:
        bodies.append(message.body)

    server = await face.do(servers)
    async with face.consuming("one by one", handle, server.address):
        connection = await send(face, server, 1)
        await face.until(lambda: connection.answered(b"FIN"))
        await face.until(lambda: sys.getrefcount(bodies[0]) == sys.getrefcount(alone[0]))


@pytest.mark.parametrize("way", WAYS)
async def test_no_handler_gets_a_message_whose_time_is_over(face: Face, servers: Any, way: str) -> None:
    """It expired while it waited for the handler of another one. Unless ``drop_expired=False`` says so."""
    if way == "at a thread" and face.name != "gevent":
        pytest.skip("of gevent alone")
    handled: list[int] = []
    expired: list[int] = []
    over: list[int] = []
    version = {"version": "0.3.7-HA.1.9.9"} if way == "ordered" else {}
    server = await face.do(lambda: servers({"msg_timeout": 300, **version}, {b"SUB_ORDERED": OK}))

    def push(*numbers: int) -> None:
        server.connections[0].send(b"".join(map(ordered_frame if way == "ordered" else message_frame, numbers)))

    handle = holding(face, handled, over)
    async with face.consuming(way, handle, server.address, max_in_flight=10, **WAYS[way]) as consumer:
        try:
            consumer.on_expired.connect(lambda _, message: expired.append(int(message.id, 16)), weak=False)
            await face.until(lambda: is_ready(server, 1))
            (connection,) = server.connections
            await face.do(lambda: push(1, 2, 3))
            await face.until(lambda: expired == [1, 2, 3])
            kept = [1, 2, 3] if way == "kept" else [1]
            assert consumer.stats().unstarted == len(kept) - 1
            over.append(1)
            await face.until(lambda: connection.answered(b"FIN") == kept)
            await face.do(lambda: push(4))
            await face.until(lambda: handled == [*kept, 4])
            assert consumer.stats().totals.expired == 3
        finally:
            over.append(1)
    assert not connection.answered(b"REQ")


@pytest.mark.parametrize(
    ("way", "busy", "options"),
    [("one by one", 1, {}), ("shared pool", 2, {"concurrency": 2}), ("batches", 2, {"batch_size": 2})],
)
async def test_nothing_is_asked_for_that_would_wait_behind_a_handler_that_touches(
    face: Face, servers: Any, way: str, busy: int, options: dict[str, Any]
) -> None:
    """It would expire unseen, again and again, until its attempts are used up."""
    handled: list[int] = []
    over: list[int] = []
    handle = holding(face, handled, over)
    server = await face.do(lambda: servers({"msg_timeout": 1500, "max_msg_timeout": 600_000}))
    options = {**options, "max_in_flight": 10, "auto_touch": True}
    async with face.consuming(way, handle, server.address, **options) as consumer:
        try:
            connection = await send(face, server, *range(1, 7))
            await face.until(lambda: consumer.stats().totals.expired == 6 - busy)
            await face.until(lambda: connection.rdy == busy)
        finally:
            over.append(1)
        await face.until(lambda: sorted(connection.answered(b"FIN")) == list(range(1, busy + 1)))
        await send(face, server, 7)
        await face.until(lambda: handled[busy:] == [7])


@pytest.mark.parametrize("way", ["expired", "answered", "lost"])
async def test_close_waits_for_a_handler_whose_message_is_in_flight_no_more(face: Face, servers: Any, way: str) -> None:
    ended: list[str] = []
    begun: list[str] = []

    async def handle(consumer: Any, message: Message) -> None:
        begun.append(way)
        if way == "answered":
            message.finish()
        while consumer.is_running:
            await face.sleep(0.01)  # sleep: looks again and again
        await face.sleep(0.2)  # sleep: what a handler does with the program's things
        ended.append(way)

    server = await face.do(lambda: servers({"msg_timeout": 300 if way == "expired" else 60_000}))
    async with face.consuming("one by one", handle, server.address) as consumer:
        connection = await send(face, server, 1)
        await face.until(lambda: begun)
        if way == "expired":
            await face.until(lambda: consumer.stats().totals.expired == 1)
        elif way == "lost":
            await face.do(connection.close)
            await face.until(lambda: len(server.connections) == 2)
        await face(consumer.close())
        assert ended == [way]


@pytest.mark.parametrize("owes", ["CLOSE_WAIT", "a response", "the end of its handler"])
async def test_close_says_once_what_it_waits_for(face: Face, servers: Any, told: Any, owes: str) -> None:
    begun: list[Message] = []

    async def handle(_: Any, message: Message) -> None:
        begun.append(message)
        if owes == "the end of its handler":
            message.finish()
        while owes != "CLOSE_WAIT" and not told("close_waits"):
            await face.sleep(0.01)  # sleep: looks again and again

    server = await face.do(lambda: servers(replies={b"CLS": b"" if owes == "CLOSE_WAIT" else frame(0, b"CLOSE_WAIT")}))
    async with face.consuming("one by one", handle, server.address) as consumer:
        await send(face, server, 1)
        await face.until(lambda: begun)
        await face(consumer.close(timeout=2.0 if owes == "CLOSE_WAIT" else None))
    (text,) = told("close_waits")
    waits_for = {
        "CLOSE_WAIT": f"CLOSE_WAIT of {server.address}; at most",
        "a response": "1 message without a response; there is no timeout",
        "the end of its handler": "the end of 1 handler; there is no timeout",
    }
    assert f"closing waits for {waits_for[owes]}" in text


@pytest.mark.parametrize("way", ["close", "the end of the block"])
async def test_close_ends_in_time_while_a_handler_runs_and_says_so(
    face: Face, servers: Any, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    begun: list[int] = []
    over: list[int] = []
    handle = holding(face, begun, over, is_answering=way == "close")
    server = await face.do(servers)
    with promptly():  # less than the 30 s that it is without the option
        async with face.consuming("one by one", handle, server.address, close_timeout=0.3) as consumer:
            await send(face, server, 1)
            await face.until(lambda: begun)
            if way == "close":
                await face(consumer.close(timeout=0.2))
    over.append(1)
    assert "closed while handlers run" in caplog.text


async def test_a_line_of_the_log_is_one_event_and_names_the_nsqd_once(
    face: Face, nsqd_process: Any, caplog: pytest.LogCaptureFixture, told: Any
) -> None:
    async def handle(_consumer: Any, _message: Any) -> None: ...

    address = nsqd_process.address
    caplog.set_level("INFO", "nsq_fast")
    options = {"message_handler": handle, "max_reconnect_delay": 0.1}
    async with (
        face.client("Producer", address) as producer,
        face.client("Consumer", "t", "c", address, **options) as consumer,
    ):
        await face(producer.publish("t", b"x"))
        await face.until(lambda: consumer.stats().totals.finished)
        await face.do(nsqd_process.stop)
        await face.until(lambda: told("connect_failed") and told("subscription_failed"))
    ended = told("disconnected", "connection_lost", "subscription_lost", "connect_failed", "subscription_failed")
    connected = told("connected")
    assert len(connected) == 2
    assert [line for line in connected + ended if line.count("127.0.0.1") != 1] == []


# What no handler gets: messages that failed too often, or are too old


async def test_messages_given_up_at_once_share_one_producer_that_is_slow_to_start_and_closes_with_the_consumer(
    face: Face, nsqd_process: Any
) -> None:
    asked: list[str] = []
    may_answer = Event()

    def serve(request: dict[str, Any], begin: Any) -> list[bytes]:
        asked.append(request["PATH_INFO"])
        if len(asked) > 1:  # the first is the consumer's own
            may_answer.wait()
        begin("200 OK", [])
        return [b"{}"]

    async def fail(_consumer: Any, _message: Any) -> None:
        raise ValueError("a handler's own")

    converted: list[bytes] = []

    def convert(message: Message) -> bytes:
        converted.append(message.body)
        return message.body

    def stats() -> tuple[int, int]:
        """Messages in the topic, and producers that are connected."""
        with NsqdHTTPClient(*nsqd_process.http) as client:
            said = client.stats()
        stored = sum(each["message_count"] for each in said["topics"] if each["topic_name"] == "dead")
        return stored, len(said["producers"] or ())

    async with face.client("Producer", nsqd_process.address) as producer:
        await face(producer.multipublish("t", [b"1", b"2"]))
    address = await face.do(free_address)
    # Made where it serves, too: it belongs to the hub of the thread that makes it.
    source = await face.do(lambda: WSGIServer(tuple(address), serve, log=None, error_log=None))
    await face.do(source.start)
    options = {
        **{"max_tries": 1, "requeue_delay": 0, "max_backoff_duration": 0, "concurrency": 2, "max_in_flight": 2},
        "config_source": HttpConfigSource(f"http://{address}/", 3600.0),
        "give_up": PublishTo("dead", convert=convert),
    }
    try:
        async with face.client("Consumer", "t", "c", nsqd_process.address, message_handler=fail, **options) as consumer:
            await face.until(lambda: len(converted) == 2)
            await face.do(may_answer.set)
            await face.until(lambda: consumer.stats().given_up == 2)
            assert consumer.stats().totals.requeued == 2  # each of them once, when its handler had failed
            await face.until(lambda: stats() == (2, 1))
        await face.until(lambda: stats() == (2, 0))
    finally:
        await face.do(lambda: source.stop(timeout=0))


HOUR = 3600 * 10**9
AGES = {1: 0, 2: 3, 3: 1, 4: 5, 5: 0, 6: 9}
"""Message -> hours since its publish; two hours are allowed."""
OLD, YOUNG = [2, 4, 6], [1, 3, 5]
OPTIONS = {"max_age": 7200, "max_in_flight": 10, "max_backoff_duration": 0, "requeue_delay": 0}


async def push(face: Face, nsqd: ScriptedNsqd, failed_too_often: int = 0) -> Any:
    """Send all of them; the connection."""
    await face.until(lambda: nsqd.connections and nsqd.connections[0].rdy)
    connection = nsqd.connections[0]

    def send() -> None:
        for number, hours in AGES.items():
            attempts = 9 if number == failed_too_often else 1
            connection.push(number, body=b"%d" % number, timestamp=time_ns() - hours * HOUR, attempts=attempts)

    await face.do(send)
    return connection


@pytest.mark.parametrize("way", ["one by one", "batches", "iterated", "concurrent"])
async def test_no_handler_gets_what_is_too_old_and_the_rest_is_handled(
    face: Face, nsqd: ScriptedNsqd, way: str, told: Any
) -> None:
    found: list[int] = []

    async def handle(consumer: Any, message: Message) -> None:
        found.append(int(message.body))

    options: dict[str, Any] = OPTIONS | ({"concurrency": 3} if way == "concurrent" else {})
    async with face.consuming(way, handle, nsqd.address, **options) as consumer:
        connection = await push(face, nsqd, failed_too_often=6)  # it goes where those go that are too old
        await face.until(lambda: sorted(connection.answered(b"FIN")) == sorted(AGES), consumer.stats)
        assert sorted(found) == YOUNG
        assert (consumer.stats().outdated, consumer.outdated, consumer.stats().given_up) == (3, 3, 0)
        assert not connection.answered(b"REQ")
    first, _ = told("message_outdated")  # and nothing of the third
    assert re.search(r"of t/c is 10,8\d\d s old, max_age=7200; it is number 1", first)


@pytest.mark.parametrize(("way", "policy"), [("one by one", None), ("batches", None), ("one by one", "give_up")])
async def test_what_is_too_old_may_go_to_a_policy_and_stays_if_that_fails(
    face: Face, nsqd: ScriptedNsqd, way: str, policy: str | None
) -> None:
    """To one of its own, or to that of messages which failed too often."""
    got: list[int] = []

    def take(consumer: Any, message: Message) -> None:
        got.append(int(message.body))
        if message.body == b"4":
            raise OSError("no room")

    async def handle(consumer: Any, item: Any) -> None: ...

    policies = {"max_age_policy": policy or take, "give_up": take if policy else None}
    failed = [7] if policy else []  # too often: it is young
    async with face.consuming(way, handle, nsqd.address, **OPTIONS, **policies) as consumer:
        connection = await push(face, nsqd)
        await face.do(lambda: connection.push(*failed, body=b"7", attempts=6, timestamp=time_ns()))
        finished = [1, 2, 3, 5, 6, *failed]
        await face.until(lambda: sorted(connection.answered(b"FIN")) == finished, consumer.stats)
        await face.until(lambda: connection.answered(b"REQ") == [4])
        assert got == [*OLD, *failed]
        assert (consumer.stats().outdated, consumer.stats().given_up) == (2, len(failed))


@settings(max_examples=15)
@given(
    limit=st.integers(1, 8),
    concurrency=st.integers(1, 6),
    steps=st.lists(st.sampled_from(["finish", "requeue", "wait", "raise", "async"]), min_size=1, max_size=40),
)
@pytest.mark.parametrize("face", FACES, ids=lambda face: str(face.name))
def test_no_more_than_max_in_flight_are_held(face: Face, limit: int, concurrency: int, steps: list[str]) -> None:
    """An nsqd that pushes as RDY allows never has more in flight than ``max_in_flight``, whatever handlers do."""
    server = ScriptedNsqd()
    seen: list[int] = []
    held: deque[Message] = deque()
    lock = threading.Lock()
    running = 0

    async def handle(consumer: Any, message: Message) -> None:
        nonlocal running
        with lock:
            running += 1
            seen.append(running + len(held))
        step = message.body.decode()
        try:
            if step == "finish":
                await face(message.finish())
            elif step == "requeue":
                message.requeue(0)
            elif step == "wait":
                await face.sleep(0.001)  # sleep: a handler that waits
            elif step == "async":
                message.enable_async()
                held.append(message)
            else:
                raise RequeueMessage(0, backoff=False)
        finally:
            with lock:
                running -= 1

    async def main() -> None:
        options: dict[str, Any] = {
            "max_in_flight": limit,
            "concurrency": concurrency,
            "max_backoff_duration": 0,
            "message_handler": handle,
        }
        async with face.client("Consumer", "t", "c", str(server.address), **options) as consumer:
            await face.until(lambda: is_ready(server, 1))
            (connection,) = server.connections
            pending, sent = deque(steps), 0

            def answered() -> list[int]:
                return connection.answered(b"FIN") + connection.answered(b"REQ")

            def push() -> bool:
                nonlocal sent
                while pending and sent - len(answered()) < (connection.rdy or 0):
                    sent += 1
                    connection.push(sent, body=pending.popleft().encode())
                while held:
                    held.popleft().finish()
                assert consumer.total_in_flight <= limit
                return len(answered()) == len(steps)

            await face.until(push)
            assert sorted(answered()) == list(range(1, len(steps) + 1))

    try:
        face.run(main())
    finally:
        server.stop()
    assert max(seen) <= limit
