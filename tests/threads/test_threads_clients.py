"""Clients of threads: any thread publishes, responds, iterates and closes, and its calls block it alone."""

from __future__ import annotations

import ctypes
import threading
import warnings
from contextlib import suppress
from itertools import islice
from typing import Any

import pytest
from support.processes import run_python, run_quietly
from support.waiting import WAIT, promptly, until

from nsq_fast import Message
from nsq_fast.threads import Consumer, Producer


def all_of(found: set[bytes]) -> bool:
    return found == {b"%d" % number for number in range(100)}


def bodies_of(address: str, topic: str, count: int) -> list[bytes]:
    """The bodies of so many messages."""
    with Consumer(topic, "c", address, max_in_flight=200) as consumer:
        return [message.body for message in islice(consumer, count)]


# Consumers


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


def test_one_that_is_iterated_and_nobody_can_reach_is_closed_with_a_warning(filled: str) -> None:
    def take_one() -> None:
        for message in Consumer("t", "c", filled, max_in_flight=50):
            assert message.body
            break

    with pytest.warns(ResourceWarning, match="unclosed consumer <nsq_fast.threads.Consumer t c>") as warned:
        take_one()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        consumer = Consumer("t", "c", filled)
        for message in consumer:  # what the other held is there, and it could not be without a close
            found = {message.body}
            break
        for message in consumer:
            found.add(message.body)
            if all_of(found):
                message.finish()
                break
        consumer.close()
        del consumer
        Consumer("t", "c", filled)  # not started
        Consumer("t", "c", filled, message_handler=lambda consumer, message: None).start(block=False)
    assert len(warned) == 1


@pytest.mark.parametrize("package", ["nsq_fast", "nsq_fast.threads"])
def test_the_end_of_the_interpreter_warns_of_those_that_run(nsqd_process: Any, package: str) -> None:
    done = run_python(f"""
import os, warnings
warnings.simplefilter("always")
from {package} import Consumer
def make(channel):
    return Consumer("t", channel, {nsqd_process.address!r}, message_handler=lambda consumer, message: None)
never_ran, in_a_block, is_closed, runs = map(make, ("never", "block", "closed", "runs"))
with in_a_block:
    pass
is_closed.start(block=False)
is_closed.close()
runs.start(block=False)
if os.fork():  # a child has none that runs
    os.wait()
""")
    assert done.returncode == 0
    (line,) = (line for line in done.stderr.splitlines() if "ResourceWarning: unclosed consumer" in line)
    assert "t runs" in line


@pytest.mark.parametrize("hub", ["", "import gevent; gevent.get_hub()"])
def test_a_signal_handler_publishes_and_closes(filled: str, hub: str) -> None:
    printed = run_quietly(f"""
import os, signal
from nsq_fast.threads import Consumer, Producer
{hub}
def handle(consumer, message):
    if message.body == b"0":
        os.kill(os.getpid(), signal.SIGTERM)
def publish_and_close(*_):
    print(producer.publish("u", b"x"), producer.multipublish("u", [b"y"]), flush=True)
    consumer.close()
consumer = Consumer("t", "c", {filled!r}, message_handler=handle)
with Producer({filled!r}) as producer:
    signal.signal(signal.SIGTERM, publish_and_close)
    os.kill(os.getpid(), signal.SIGTERM)  # one that is not started
    consumer = Consumer("t", "c", {filled!r}, message_handler=handle)
    consumer.start()
    print(producer.publish("u", b"z"))
""")
    assert printed == 2 * "b'OK' b'OK'\n" + "b'OK'\n"


def test_a_handler_that_exits_ends_nothing_and_one_that_never_ends_keeps_no_interpreter(filled: str) -> None:
    done = run_python(f"""
import sys, threading, time
from nsq_fast.threads import Consumer, Producer
again, began = threading.Event(), threading.Event()
def exit(consumer, message):
    if message.body == b"0":
        if message.attempts == 1:
            sys.exit(3)
        again.set()
def stay(consumer, message):
    began.set()
    time.sleep(100)  # sleep: a handler that never ends
options = {{"requeue_delay": 0, "max_backoff_duration": 0.1}}
with Consumer("t", "c", {filled!r}, message_handler=exit, **options), Producer({filled!r}) as producer:
    assert again.wait(20)
    consumer = Consumer("u", "c", {filled!r}, message_handler=stay, handler_threads=2)
    consumer.start(block=False)
    assert producer.publish("u", b"x", timeout=20) == b"OK"
    assert began.wait(20)
""")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("SystemExit(3)") == 1
    assert "handler failed on message" in done.stderr  # as with any other exception, whose backoff it has
    assert "backoff level 1" in done.stderr


# Producers


def test_a_greenlet_of_a_thread_with_a_hub_lets_the_others_run(nsqd_process: Any) -> None:
    import gevent

    with Producer(nsqd_process.address) as producer:
        producer.publish("t", b"first")
        nsqd_process.freeze()
        ran: list[int] = []
        publishing = gevent.spawn(producer.publish, "t", b"x")
        gevent.spawn(ran.append, 1)
        until(lambda: ran)
        nsqd_process.thaw()
        assert publishing.get(timeout=WAIT) == b"OK"


NOT_DELIVERED = {
    "not answered, and waits for room": (8, """
producers = Producer({address!r}), Producer({address!r}, max_pending=1)
for each in producers:
    each.start()
futures = [producers[0].publish_nowait("t", b"x") for _ in range(4)]
futures += [producers[1].multipublish("t", bodies, raise_error=False) for bodies in ([b"x"], [b"x"], [b"x", b"x"])]
"""),
    "not taken by a stuck hub thread": (4, """
hub_thread.END_TIMEOUT = 0.1
producer = Producer({address!r})
producer.start()
stuck = threading.Event()
producer.publish_nowait("t", b"x").add_done_callback(lambda _: (stuck.set(), threading.Event().wait()))
assert stuck.wait(50)
futures = [producer.publish_nowait("t", b"x"), producer.multipublish("t", [b"x", b"x", b"x"], raise_error=False)]
"""),
}  # fmt: skip


@pytest.mark.parametrize(("count", "program"), NOT_DELIVERED.values(), ids=NOT_DELIVERED)
def test_the_end_of_the_interpreter_tells_in_one_line_what_was_not_delivered(
    nsqd_process: Any, count: int, program: str
) -> None:
    if "stuck" not in program:
        nsqd_process.freeze()
    head = "import threading; from nsq_fast import bridge as hub_thread; from nsq_fast.threads import Producer"
    done = run_python(head + program.format(address=nsqd_process.address))
    nsqd_process.thaw()
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert f"before the confirmation of {count} publish" in line


def test_the_end_of_the_interpreter_delivers_what_is_pending(nsqd_process: Any) -> None:
    run_quietly(f"""
from nsq_fast.threads import Producer
producer = Producer({nsqd_process.address!r})
producer.start()
for number in range(100):
    producer.publish_nowait("t", b"%d" % number)
""")
    assert len(bodies_of(nsqd_process.address, "t", 100)) == 100


# What else there is in the program


@pytest.mark.parametrize("patch", ["", "from gevent import monkey; monkey.patch_all()"], ids=["plain", "patched"])
def test_native_threads_and_greenlets_publish_and_iterate_beside_each_other(nsqd_process: Any, patch: str) -> None:
    run_quietly(f"""
{patch}
import gevent
from gevent.threadpool import ThreadPool
from nsq_fast.threads import Consumer, Producer
found = []
def take(consumer):
    for message in consumer:
        found.append(message.body)
with Producer({nsqd_process.address!r}) as producer, Consumer("t", "c", {nsqd_process.address!r}) as consumer:
    takers = [gevent.spawn(take, consumer) for _ in range(3)] + [ThreadPool(1).spawn(take, consumer)]
    for number in range(20):
        gevent.sleep(0.001)  # sleep: those who iterate wait
        assert producer.publish("t", b"%d" % number) == b"OK"
    pool = ThreadPool(4)
    publishes = [spawn(producer.publish, "t", b"x") for spawn in (gevent.spawn, pool.spawn) for _ in range(20)]
    futures = [producer.publish_nowait("t", b"x") for _ in range(20)]
    assert [each.get(timeout=20) for each in publishes] == 40 * [b"OK"]
    assert [each.result(20) for each in futures] == 20 * [b"OK"]
    while consumer.stats().totals.finished < 80:
        gevent.sleep(0.005)  # sleep: looks again and again
    consumer.close()
    gevent.joinall(takers, raise_error=True)
assert sorted(found) == sorted([*(b"%d" % number for number in range(20)), *60 * [b"x"]]), found
""")


TWO_FIRST_CLIENTS = """
import time
from gevent import joinall, spawn
from nsq_fast import threads
from nsq_fast import bridge as hub_thread

start = hub_thread._start_thread

def start_late(function, arguments):
    def late(*arguments):
        time.sleep(0.2)  # sleep: the second greenlet has its turn before the thread is there
        function(*arguments)
    return start(late, arguments)

hub_thread._start_thread = start_late
producers = [spawn(threads.Producer, "127.0.0.1:1") for _ in range(2)]
joinall(producers, raise_error=True)
print("made")
"""


def test_two_greenlets_may_make_the_first_clients_at_once() -> None:
    done = run_python(TWO_FIRST_CLIENTS)
    assert done.stdout == "made\n", done.stderr


ON_LIBUV = """
import sys
from concurrent.futures import ThreadPoolExecutor
from nsq_fast.threads import Consumer, Producer

address = sys.argv[1]
got, taken = set(), set()

def handle(consumer, message):
    got.add(message.body)
    if len(got) == 400:
        consumer.close()

left_to_the_interpreter, producer = Producer(address), Producer(address)
for each in (left_to_the_interpreter, producer):
    each.start()
with ThreadPoolExecutor(4) as pool:
    for topic, publish in (("t", producer.publish), ("u", left_to_the_interpreter.publish)):
        assert set(pool.map(lambda n: publish(topic, b"%d" % n), range(400))) == {b"OK"}
consumer = Consumer("t", "threads", address, message_handler=handle, concurrency=4)
consumer.start()
assert consumer.join(60)
with Consumer("u", "iterated", address) as iterated:
    for message in iterated:
        taken.add(message.body)
        if len(taken) == 400:
            break
producer.close()
print(len(got), len(taken))
"""


def test_producers_and_consumers_work_on_libuv(nsqd_process: Any) -> None:
    ran = run_python(ON_LIBUV, nsqd_process.address, GEVENT_LOOP="libuv")
    assert (ran.returncode, ran.stdout.split(), ran.stderr) == (0, ["400", "400"], "")
