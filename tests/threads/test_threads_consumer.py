"""The Consumer of threads: handlers block their own threads, any thread responds, iterates and closes."""

from __future__ import annotations

import ctypes
import subprocess
import threading
import time
from collections import defaultdict, deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes import FORKING_PYTHON
from support.scripted_nsqd import ScriptedNsqd
from support.waiting import PROCESS, promptly, until

from nsq_fast import Message
from nsq_fast.broker import ClusterProcess
from nsq_fast.errors import ConfigError, ConnectionLost, RequeueMessage
from nsq_fast.threads import Consumer, Producer

ROOT = Path(__file__).parent.parent.parent
WAIT = 30.0


@pytest.fixture
def filled(nsqd_process: Any) -> str:
    """An nsqd with the messages 0 to 99 in the topic t."""
    with Producer(nsqd_process.address) as producer:
        producer.multipublish("t", [b"%d" % number for number in range(100)])
    return str(nsqd_process.address)


def all_of(found: set[bytes]) -> bool:
    return found == {b"%d" % number for number in range(100)}


def test_handlers_run_on_their_threads_at_the_same_time(filled: str) -> None:
    together = threading.Barrier(4)
    threads: set[int] = set()
    found: set[bytes] = set()

    def handle(consumer: Consumer, message: Message) -> None:
        if len(found) < 4:
            together.wait(WAIT)  # four block at once, or this breaks
        threads.add(threading.get_ident())
        found.add(message.body)

    with Consumer("t", "c", filled, message_handler=handle, handler_threads=4, max_in_flight=4) as consumer:
        until(lambda: all_of(found))
        assert consumer.is_running
    assert len(threads) == 4
    assert not consumer.is_running


def test_a_handler_that_fails_has_its_message_again(filled: str) -> None:
    seen: dict[bytes, int] = {}

    def handle(consumer: Consumer, message: Message) -> None:
        seen[message.body] = message.attempts
        if message.attempts == 1:
            raise RequeueMessage(0, backoff=False)

    with Consumer("t", "c", filled, message_handler=handle, max_in_flight=10) as consumer:
        until(lambda: len(seen) == 100 and set(seen.values()) == {2})
        until(lambda: consumer.stats().totals.finished == 100)


def test_batches(filled: str) -> None:
    found: list[bytes] = []

    def handle(consumer: Consumer, messages: list[Message]) -> None:
        found.extend(message.body for message in messages)

    with Consumer("t", "c", filled, batch_handler=handle, max_in_flight=50, batch_size=20) as consumer:
        until(lambda: consumer.stats().totals.finished == 100)
    assert all_of(set(found))


def test_any_thread_responds_to_asynchronous_messages(filled: str) -> None:
    held: deque[Message] = deque()

    def handle(consumer: Consumer, message: Message) -> None:
        message.enable_async()
        held.append(message)

    with Consumer("t", "c", filled, message_handler=handle, max_in_flight=100) as consumer:
        until(lambda: len(held) == 100)

        def respond() -> None:
            for message in held:
                message.touch()
                message.finish()

        thread = threading.Thread(target=respond)
        thread.start()
        thread.join(WAIT)
        until(lambda: consumer.stats().totals.finished == 100)
        assert consumer.total_in_flight == 0


def test_several_threads_iterate(filled: str) -> None:
    found: set[bytes] = set()
    with Consumer("t", "c", filled, max_in_flight=20, concurrency=3) as consumer:

        def take() -> None:
            for message in consumer:
                found.add(message.body)

        threads = [threading.Thread(target=take) for _ in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: all_of(found) and consumer.stats().totals.finished == 100)
        consumer.close()
        for thread in threads:
            thread.join(WAIT)
            assert not thread.is_alive()


def test_a_loop_that_is_left_gives_its_message_back(filled: str) -> None:
    with Consumer("t", "c", filled, max_in_flight=5) as consumer:
        for message in consumer:
            left = message.body
            break
        until(lambda: consumer.stats().totals.requeued >= 1)
    found: dict[bytes, int] = {}
    with Consumer("t", "c", filled, max_in_flight=5) as consumer:
        for message in consumer:
            found[message.body] = message.attempts
            if len(found) == 100:
                message.finish()
                break
    assert found[left] >= 2  # nsqd may have brought it to the first consumer again, before that was closed


def test_close_in_a_handler_only_begins_to_close(filled: str) -> None:
    def handle(consumer: Consumer, message: Message) -> None:
        consumer.close()

    consumer = Consumer("t", "c", filled, message_handler=handle)
    consumer.start()
    assert not consumer.is_running


def test_a_thread_that_iterates_and_is_at_a_message_only_begins_to_close(filled: str) -> None:
    consumer = Consumer("t", "c", filled, max_in_flight=5)
    bodies = []
    with promptly():  # it would wait for its own message
        for message in consumer:
            bodies.append(message.body)
            consumer.close()
        assert consumer.join(WAIT)
    assert len(bodies) == 1  # which is finished, as its loop has gone on
    assert consumer.stats().totals.finished == 1


def test_a_thread_that_dies_at_a_message_leaves_it_to_others(filled: str) -> None:
    dying: list[bytes] = []
    found: dict[bytes, int] = {}

    with Consumer("t", "c", filled, max_in_flight=20, concurrency=2) as consumer:

        def die() -> None:
            for message in consumer:
                dying.append(message.body)
                raise ValueError("what it dies of")

        def die_in_silence() -> None:
            with suppress(ValueError):
                die()

        def take() -> None:
            for message in consumer:
                found[message.body] = message.attempts

        first = threading.Thread(target=die_in_silence)
        first.start()
        first.join(WAIT)
        others = [threading.Thread(target=take) for _ in range(2)]
        for thread in others:
            thread.start()
        until(lambda: all_of(set(found)) and consumer.stats().totals.finished == 100)
        consumer.close()
        for thread in others:
            thread.join(WAIT)
    assert found[dying[0]] == 2


def test_an_exception_that_is_thrown_into_an_idle_thread_costs_no_message(nsqd_process: Any) -> None:
    threads: set[int] = set()
    found: list[bytes] = []

    def handle(consumer: Consumer, message: Message) -> None:
        threads.add(threading.get_ident())
        found.append(message.body)

    with (
        Producer(nsqd_process.address) as producer,
        Consumer("t", "c", nsqd_process.address, message_handler=handle) as consumer,
    ):
        for number in range(20):
            producer.publish("t", b"%d" % number)
            until(lambda number=number: consumer.stats().totals.finished == number + 1)  # type: ignore[misc]
            (thread,) = threads
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeoutError))
    assert sorted(found, key=int) == [b"%d" % number for number in range(20)]


def test_a_signal_handler_closes_it(filled: str) -> None:
    done = _run(
        f"""
import os, signal
from nsq_fast.threads import Consumer
def handle(consumer, message):
    os.kill(os.getpid(), signal.SIGTERM)
consumer = Consumer("t", "c", {filled!r}, message_handler=handle)
signal.signal(signal.SIGTERM, lambda *_: consumer.close())
consumer.start()
print("closed")
"""
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


def test_the_interpreter_ends_while_handlers_run(filled: str) -> None:
    done = _run(
        f"""
import threading, time
from nsq_fast.threads import Consumer
began = threading.Event()
def handle(consumer, message):
    began.set()
    time.sleep(100)  # sleep: a handler that never ends
consumer = Consumer("t", "c", {filled!r}, message_handler=handle, handler_threads=2)
consumer.start(block=False)
assert began.wait(20)
"""
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_an_ordered_topic_keeps_its_order_on_several_threads() -> None:
    seen: dict[int | None, list[int]] = defaultdict(list)
    running: set[int | None] = set()
    overlaps: list[int | None] = []

    def handle(consumer: Consumer, message: Message) -> None:
        if message.partition in running:
            overlaps.append(message.partition)
        running.add(message.partition)
        time.sleep(0.001)  # sleep: a handler that blocks
        seen[message.partition].append(int(message.body))
        running.discard(message.partition)

    with ClusterProcess(nodes=2, lookupds=1) as cluster:
        cluster.create_topic("orders", 2, 1, channels=("c",), ordered=True)
        servers = {"lookupd_http_addresses": str(cluster.lookupds[0].http)}
        with Producer(**servers) as producer:
            for number in range(40):
                producer.publish("orders", b"%d" % number, key=str(number % 5), trace_id=number + 1)
        options: dict[str, Any] = {"ordered": True, "handler_threads": 4, "max_in_flight": 20}
        with Consumer("orders", "c", message_handler=handle, **servers, **options):
            until(lambda: sum(map(len, seen.values())) == 40)
    assert overlaps == []
    assert all(numbers == sorted(numbers) for numbers in seen.values())


def test_a_handler_that_exits_ends_nothing(filled: str) -> None:
    done = _run(
        f"""
import sys, threading
from nsq_fast.threads import Consumer, Producer
again = threading.Event()
def handle(consumer, message):
    if message.body == b"0":
        if message.attempts == 1:
            sys.exit(3)
        again.set()
options = {{"requeue_delay": 0, "max_backoff_duration": 0}}
with Consumer("t", "c", {filled!r}, message_handler=handle, **options), Producer({filled!r}) as producer:
    assert again.wait(20)
    assert producer.publish("t", b"x", timeout=20) == b"OK"
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("SystemExit(3)") == 1  # one line says so


def test_a_server_that_restarts_loses_no_message(nsqd_process: Any) -> None:
    found: set[bytes] = set()
    has_restarted = threading.Event()
    with Producer(nsqd_process.address) as producer:
        producer.multipublish("t", [b"%d" % number for number in range(100)])

        def handle(consumer: Consumer, message: Message) -> None:
            if len(found) >= 50:
                has_restarted.wait(WAIT)
            found.add(message.body)

        options: dict[str, Any] = {"max_in_flight": 10, "max_reconnect_delay": 0.1, "handler_threads": 2}
        with Consumer("t", "c", nsqd_process.address, message_handler=handle, **options) as consumer:
            # A real nsqd that is stopped while it sends may lose a message that is in none of its queues just then
            # (nsqio/nsq: nsqd/protocol_v2.go, messagePump, and channel.go, flush). Killed, it loses what is in flight.
            until(lambda: len(found) >= 50 and consumer.stats().in_flight == 10)
            nsqd_process.stop()
            nsqd_process.start()
            has_restarted.set()
            until(lambda: all_of(found), about=lambda: f"{len(found)} of 100 came; {consumer.stats()}")


@pytest.mark.parametrize(
    "garbage", [b"\x00\x00\x00\x06\x00\x00\x00\x09xx", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff" * 64]
)
def test_garbage_does_not_end_it(garbage: bytes) -> None:
    server = ScriptedNsqd()
    found: list[bytes] = []
    consumer = Consumer(
        "t",
        "c",
        str(server.address),
        message_handler=lambda _, message: found.append(message.body),
        max_reconnect_delay=0.1,
    )
    try:
        consumer.start(block=False)
        server.connection(0).send(garbage)
        server.connection(1).push(1, body=b"after")
        until(lambda: found == [b"after"])
    finally:
        consumer.close(drain=False)
        server.stop()


@settings(max_examples=25)
@given(
    limit=st.integers(1, 8),
    threads=st.integers(1, 6),
    steps=st.lists(st.sampled_from(["finish", "requeue", "async", "raise"]), min_size=1, max_size=40),
)
def test_no_more_than_max_in_flight_cross_over(limit: int, threads: int, steps: list[str]) -> None:
    """An nsqd that pushes as RDY allows never has more in flight than ``max_in_flight``, whatever handlers do."""
    server = ScriptedNsqd()
    pending = deque(steps)
    running, most = 0, 0
    lock = threading.Lock()
    held: deque[Message] = deque()

    def handle(consumer: Consumer, message: Message) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running + len(held))
        step = message.body.decode()
        try:
            if step == "finish":
                message.finish()
            elif step == "requeue":
                message.requeue(0)
            elif step == "async":
                message.enable_async()
                held.append(message)
            else:
                raise RequeueMessage(0, backoff=False)
        finally:
            with lock:
                running -= 1

    consumer = Consumer(
        "t",
        "c",
        str(server.address),
        message_handler=handle,
        max_in_flight=limit,
        handler_threads=threads,
        max_backoff_duration=0,
    )
    try:
        consumer.start(block=False)
        connection = server.connection()
        connection.wait_rdy(limit)
        sent = 0
        while pending:
            answered = len(connection.answered(b"FIN")) + len(connection.answered(b"REQ"))
            while pending and sent - answered < (connection.rdy or 0):
                sent += 1
                connection.push(sent, body=pending.popleft().encode())
            while held:
                held.popleft().finish()
            assert consumer.total_in_flight <= limit

        def is_over() -> bool:
            while held:
                held.popleft().finish()
            return len(connection.answered(b"FIN")) + len(connection.answered(b"REQ")) == len(steps)

        until(is_over)
        assert most <= limit
        answered_ids = connection.answered(b"FIN") + connection.answered(b"REQ")
        assert sorted(answered_ids) == list(range(1, len(steps) + 1))
    finally:
        consumer.close(drain=False)
        server.stop()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"message_handler": 1}, "callable"),
        ({"max_in_fligt": 1}, "did you mean 'max_in_flight'"),
        ({"message_handler": print, "batch_handler": print}, "both given"),
    ],
    ids=["handler", "option", "both"],
)
def test_wrong_arguments_are_refused_where_it_is_made(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Consumer("t", "c", "127.0.0.1:1", **options)


def test_a_coroutine_function_is_no_handler_of_threads() -> None:
    async def handle(consumer: Any, message: Any) -> None: ...

    with pytest.raises(ConfigError, match="async function"):
        Consumer("t", "c", "127.0.0.1:1", message_handler=handle)


def test_flow_is_changed_from_any_thread(filled: str) -> None:
    consumer = Consumer("t", "c", filled, message_handler=lambda *_: None, max_in_flight=3)
    with consumer:
        consumer.pause()
        until(lambda: consumer.is_paused)
        consumer.resume()
        consumer.max_in_flight = 7
        until(lambda: not consumer.is_paused and consumer.max_in_flight == 7)
        with pytest.raises(ConfigError):
            consumer.max_in_flight = -1
    assert (consumer.topic, consumer.channel, consumer.max_tries) == ("t", "c", 5)


@pytest.mark.fork
def test_a_child_of_a_fork_consumes_with_a_thread_of_its_own(filled: str) -> None:
    done = _run(
        f"""
import os, threading
from nsq_fast.threads import Consumer
got = threading.Event()
def handle(consumer, message):
    message.enable_async()  # one message is held, the others are for the child
    got.set()
consumer = Consumer("t", "c", {filled!r}, message_handler=handle, max_in_flight=1)
consumer.start(block=False)
assert got.wait(20)
child = os.fork()
if not child:
    got.clear()
    assert not consumer.is_running
    consumer.start(block=False)
    assert got.wait(20)
    consumer.close(drain=False)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
consumer.close(drain=False)
"""
    )
    assert (done.returncode, done.stderr) == (0, "")


def _run(program: str) -> subprocess.CompletedProcess[str]:
    command = [*FORKING_PYTHON, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=PROCESS, check=False, cwd=ROOT)


def test_one_consumer_takes_several_topics(filled: str) -> None:
    with Producer(filled) as producer:
        producer.multipublish("u", [b"%d" % number for number in range(100)])
    found: dict[str | None, set[bytes]] = {"t": set(), "u": set()}
    handle = lambda _, message: found[message.topic].add(message.body)  # noqa: E731
    with Consumer(["t", "u"], "c", filled, message_handler=handle, max_in_flight=10) as consumer:
        until(lambda: all(map(all_of, found.values())))
        assert consumer.topics == ("t", "u")
        assert set(consumer.stats().topics) == {"t", "u"}


def test_a_response_that_is_lost_with_its_connection_makes_room_for_another_message(nsqd: ScriptedNsqd) -> None:
    taken: deque[Message] = deque()

    def handle(consumer: Consumer, message: Message) -> None:
        message.enable_async()
        taken.append(message)

    options = {"max_in_flight": 1, "max_reconnect_delay": 0.1}
    with Consumer("t", "c", str(nsqd.address), message_handler=handle, **options) as consumer:
        first = nsqd.connection()
        first.push(1)
        until(lambda: len(taken) == 1)
        first.close()
        nsqd.wait_for(lambda: len(nsqd.connections) == 2 and b"SUB" in nsqd.connections[1].words())
        until(lambda: consumer.stats().orphaned == 1)
        message = taken.popleft()
        with pytest.raises(ConnectionLost):
            message.finish()
        nsqd.connections[1].wait_rdy(1)
        assert consumer.stats().orphaned == 0
