"""The Consumer of threads: handlers block their own threads, any thread responds, iterates and closes."""

from __future__ import annotations

import ctypes
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.processes import FORKING_PYTHON
from support.waiting import PROCESS, promptly, until

from nsq_fast import Message
from nsq_fast.errors import ConfigError
from nsq_fast.threads import Consumer, Producer

ROOT = Path(__file__).parent.parent.parent
WAIT = 30.0


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


def test_a_coroutine_function_is_no_handler_of_threads() -> None:
    async def handle(consumer: Any, message: Any) -> None: ...

    with pytest.raises(ConfigError, match="async function"):
        Consumer("t", "c", "127.0.0.1:1", message_handler=handle)


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
