"""Handlers on native threads: they may block, and every guarantee is kept."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest
from support.outside_nsqd import Server, handle_many, server
from support.partitions import PartitionNsqd, ScriptedLookup, answers, push_record, topology
from support.processes import FORKING_PYTHON
from support.scripted_nsqd import ScriptedNsqd
from support.waiting import holds, until

from nsq_fast import Consumer, RequeueMessage
from nsq_fast._codec import Message
from nsq_fast.errors import AlreadyResponded, ConfigError, ConnectionLost, HandlerDeferred, WrongThread

__all__ = ["handle_many", "server"]  # fixtures

HUB_THREAD = threading.get_ident()


@pytest.fixture
def start(nsqd: ScriptedNsqd) -> Iterator[Callable[..., Consumer]]:
    """Start a consumer with two threads on the scripted nsqd; close it at the end."""
    consumers: list[Consumer] = []

    def make(handler: Any = None, **options: Any) -> Consumer:
        options = {"max_in_flight": 100, "max_backoff_duration": 0, "handler_threads": 2} | options
        consumers.append(Consumer("t", "c", str(nsqd.address), message_handler=handler, **options))
        consumers[-1].start(block=False)
        return consumers[-1]

    yield make
    for consumer in consumers:
        consumer.close(drain=False)


class Gate:
    """Handlers that block their thread until they are let go."""

    def __init__(self) -> None:
        self.running: list[Message] = []
        self.most = 0
        self.threads: set[int] = set()  # the native ids of those in which it ran
        self._open = threading.Event()

    def __call__(self, consumer: Consumer, message: Message) -> None:
        assert threading.get_ident() != HUB_THREAD
        self.threads.add(threading.get_native_id())
        self.running.append(message)
        self.most = max(self.most, len(self.running))
        self._open.wait(20)
        self.running.remove(message)

    def open(self) -> None:
        self._open.set()


@pytest.mark.parametrize("options", [{}, {"concurrency": 3}, {"batch": True}], ids=str)
def test_each_message_is_handled_once_and_finished(
    server: Server, handle_many: Callable[..., Consumer], options: dict[str, Any]
) -> None:
    seen: Counter[bytes] = Counter()
    threads: set[int] = set()

    def handle(message: Message) -> None:
        threads.add(threading.get_ident())
        seen[message.body] += 1

    handlers: dict[str, Any] = {"message_handler": lambda c, m: handle(m)}
    if options.pop("batch", False):
        handlers = {"batch_handler": lambda c, messages: [handle(message) for message in messages]}
    consumer = handle_many(3000, handler_threads=4, **handlers, **options)
    until(lambda: consumer.stats().totals.finished == 3000, 30)
    assert len(seen) == 3000
    assert set(seen.values()) == {1}
    assert HUB_THREAD not in threads
    server.wait_finished(3000)


def test_handlers_that_block_run_at_once_and_the_hub_goes_on(
    server: Server, handle_many: Callable[..., Consumer]
) -> None:
    gate = Gate()
    consumer = handle_many(20, message_handler=gate, handler_threads=5, heartbeat_interval=1.0)
    until(lambda: len(gate.running) == 5)
    gevent.sleep(3)  # sleep: longer than a server bears without an answer to its heartbeats
    gate.open()
    until(lambda: consumer.stats().totals.finished == 20)
    assert gate.most == 5
    assert consumer.stats().totals.received == 20


@pytest.mark.parametrize(("max_in_flight", "most"), [(1, 1), (2, 2), (100, 3)])
def test_never_more_at_once_than_max_in_flight(
    nsqd: ScriptedNsqd, start: Callable[..., Consumer], max_in_flight: int, most: int
) -> None:
    gate = Gate()
    start(gate, handler_threads=3, max_in_flight=max_in_flight)
    connection = nsqd.connection()
    connection.push(*range(6))  # more than RDY allows, as after time-outs
    until(lambda: len(gate.running) == most)
    holds(lambda: gate.most == most, 0.05)
    gate.open()
    connection.wait_for(lambda: len(connection.answered(b"FIN")) == 6)


def test_the_fin_of_a_slow_handler_does_not_wait_for_others(nsqd: ScriptedNsqd, start: Callable[..., Consumer]) -> None:
    go_on = threading.Semaphore(0)
    start(lambda c, m: go_on.acquire(timeout=20), handler_threads=1)
    connection = nsqd.connection()
    connection.push(1, 2, 3)
    for number in (1, 2, 3):
        go_on.release()
        connection.wait_for(lambda number=number: connection.answered(b"FIN") == list(range(1, number + 1)))


def test_when_quick_handlers_become_slow_the_others_do_not_wait_behind_one(
    nsqd: ScriptedNsqd, start: Callable[..., Consumer]
) -> None:
    gate = Gate()
    is_slow: list[bool] = []
    handler = lambda c, m: gate(c, m) if m.body == b"slow" else is_slow.append(False)  # noqa: E731
    start(handler, handler_threads=2, max_in_flight=2500)
    connection = nsqd.connection()
    connection.push(*range(2000))
    connection.wait_for(lambda: len(connection.answered(b"FIN")) == 2000)
    connection.push(3000, body=b"slow")
    until(lambda: len(gate.running) == 1)
    connection.push(*range(2000, 2100))
    connection.wait_for(lambda: len(connection.answered(b"FIN")) == 2100)
    gate.open()
    connection.wait_for(lambda: 3000 in connection.answered(b"FIN"))


def test_failures_requeue_and_are_told_in_the_hubs_thread(nsqd: ScriptedNsqd, start: Callable[..., Consumer]) -> None:
    told: list[tuple[str, int]] = []

    def handler(consumer: Consumer, message: Message) -> object:
        number = int(message.id, 16)
        if number == 1:
            raise ValueError("on purpose")
        if number == 2:
            raise RequeueMessage(7)
        return (each for each in ()) if number == 3 else None

    consumer = start(handler, requeue_delay=5000)
    failures: list[Exception] = []
    consumer.on_exception.connect(lambda c, message, error: failures.append(error), weak=False)
    for name in ("on_exception", "on_requeue", "on_finish"):
        getattr(consumer, name).connect(
            lambda c, name=name, **values: told.append((name, threading.get_ident())), weak=False
        )
    connection = nsqd.connection()
    connection.push(1, 2, 3, 4)
    connection.wait_for(lambda: len(connection.answered(b"REQ")) == 3 and connection.answered(b"FIN") == [4])
    delays = {int(command[1], 16): command[2] for command in connection.commands if command[0] == b"REQ"}
    assert delays == {1: b"5000", 2: b"7000", 3: b"5000"}
    assert sorted(type(error).__name__ for error in failures) == [HandlerDeferred.__name__, "ValueError"]
    assert {thread for _, thread in told} == {HUB_THREAD}
    assert Counter(name for name, _ in told) == {"on_exception": 2, "on_requeue": 3, "on_finish": 1}


def test_a_batch_handler_that_fails_requeues_all(nsqd: ScriptedNsqd, start: Callable[..., Consumer]) -> None:
    def handler(consumer: Consumer, messages: list[Message]) -> None:
        messages[0].finish()
        raise ValueError("on purpose")

    start(batch_handler=handler)
    connection = nsqd.connection()
    connection.push(1, 2, 3)
    connection.wait_for(lambda: sorted(connection.answered(b"FIN") + connection.answered(b"REQ")) == [1, 2, 3])
    assert connection.answered(b"FIN")


def test_give_up_policies_run_in_the_hubs_thread(nsqd: ScriptedNsqd, start: Callable[..., Consumer]) -> None:
    given_up: list[int] = []
    start(lambda c, m: None, max_tries=2, give_up=lambda c, m: given_up.append(threading.get_ident()))
    connection = nsqd.connection()
    connection.push(1, attempts=3)
    connection.wait_for(lambda: connection.answered(b"FIN") == [1])
    assert given_up == [HUB_THREAD]


def test_messages_are_answered_and_touched_from_the_threads(nsqd: ScriptedNsqd, start: Callable[..., Consumer]) -> None:
    errors: list[Exception] = []

    def handler(consumer: Consumer, message: Message) -> None:
        message.touch()
        if message.body == b"requeue":
            message.requeue(11)
        elif message.body == b"async":
            message.enable_async()
        else:
            message.finish()
            try:
                message.finish()
            except AlreadyResponded as error:
                errors.append(error)

    start(handler)
    connection = nsqd.connection()
    connection.push(1)
    connection.push(2, body=b"requeue")
    connection.push(3, body=b"async")
    connection.wait_for(lambda: sorted(connection.answered(b"TOUCH")) == [1, 2, 3])
    connection.wait_for(lambda: connection.answered(b"FIN") == [1] and connection.answered(b"REQ") == [2])
    assert len(errors) == 1
    words = [command[0] for command in connection.commands if command[1:2] == (b"%016x" % 1,)]
    assert words == [b"TOUCH", b"FIN"]


def test_an_answer_on_a_lost_connection_raises_in_the_thread(
    nsqd: ScriptedNsqd, start: Callable[..., Consumer]
) -> None:
    lost = threading.Event()
    errors: list[Exception] = []

    def handler(consumer: Consumer, message: Message) -> None:
        lost.wait(20)
        try:
            message.finish()
        except ConnectionLost as error:
            errors.append(error)

    consumer = start(handler)
    connection = nsqd.connection()
    connection.push(1)
    until(lambda: consumer.stats().unstarted == 0 and consumer.stats().totals.received == 1)
    connection.close()
    until(lambda: not consumer.stats().connections[0].is_connected)
    lost.set()
    until(lambda: len(errors) == 1)


def test_other_threads_may_not_answer(nsqd: ScriptedNsqd, start: Callable[..., Consumer]) -> None:
    errors: list[Exception] = []

    def elsewhere(message: Message) -> None:
        try:
            message.finish()
        except WrongThread as error:
            errors.append(error)

    def handler(consumer: Consumer, message: Message) -> None:
        other = threading.Thread(target=elsewhere, args=(message,))
        other.start()
        other.join(20)

    start(handler)
    connection = nsqd.connection()
    connection.push(1)
    connection.wait_for(lambda: connection.answered(b"FIN") == [1])
    assert len(errors) == 1


def test_close_waits_for_the_handlers_and_gives_the_others_back(
    nsqd: ScriptedNsqd, start: Callable[..., Consumer]
) -> None:
    gate = Gate()
    consumer = start(gate)
    connection = nsqd.connection()
    connection.push(*range(10))
    until(lambda: len(gate.running) == 2)
    closing = gevent.spawn(consumer.close)
    connection.wait_for(lambda: len(connection.answered(b"REQ")) == 8)
    assert not closing.ready()
    gate.open()
    closing.get(timeout=10)
    assert len(connection.answered(b"FIN")) == 2
    assert gate.most == 2


def test_a_handler_may_close_the_consumer(nsqd: ScriptedNsqd, start: Callable[..., Consumer]) -> None:
    consumer = start(lambda c, m: c.close())
    connection = nsqd.connection()
    connection.push(1)
    assert consumer.join(10)
    assert connection.answered(b"FIN") == [1]


def test_the_threads_end_with_the_consumer(nsqd: ScriptedNsqd, start: Callable[..., Consumer]) -> None:
    gate = Gate()
    consumer = start(gate, handler_threads=7)
    nsqd.connection().push(*range(7))
    until(lambda: len(gate.threads) == 7)
    gate.open()
    consumer.close()
    until(lambda: not gate.threads & native_threads())


def native_threads() -> set[int]:
    """The ids of all of this process: others' threads, too, which may end at any moment."""
    return {int(name) for name in os.listdir("/proc/self/task")}


def test_long_handlers_are_touched(nsqd: ScriptedNsqd, start: Callable[..., Consumer]) -> None:
    gate = Gate()
    nsqd.info["msg_timeout"] = 1000
    start(gate, auto_touch=True)
    connection = nsqd.connection()
    connection.push(1)
    connection.wait_for(lambda: 1 in connection.answered(b"TOUCH"))
    gate.open()
    connection.wait_for(lambda: connection.answered(b"FIN") == [1])


def test_an_ordered_partition_has_one_handler_at_a_time_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsq_fast.client.lookup.LookupPoller", ScriptedLookup)
    nsqds = {number: PartitionNsqd() for number in range(2)}
    seen: dict[int | None, list[int]] = {0: [], 1: []}
    running: Counter[int | None] = Counter()
    most: Counter[int | None] = Counter()

    def handler(consumer: Consumer, message: Message) -> None:
        running[message.partition] += 1
        most[message.partition] = max(most[message.partition], running[message.partition])
        time.sleep(0.001)  # sleep: long enough for another thread to begin
        seen[message.partition].append(message.internal_id & ((1 << 50) - 1))
        running[message.partition] -= 1

    consumer = Consumer(
        "t", "c", (), "lookup:4161", message_handler=handler, ordered=True, handler_threads=4, max_in_flight=10
    )
    consumer.start(block=False)
    consumer._subscriptions.lookup.tell(topology(nsqds))  # type: ignore[union-attr]
    for count in range(1, 6):
        for number, each in nsqds.items():
            push_record(each.subscriber(number), count)
        for number, each in nsqds.items():
            connection = each.subscriber(number)
            connection.wait_for(lambda connection=connection, count=count: len(answers(connection, b"FIN")) == count)
    assert seen == {0: [1, 2, 3, 4, 5], 1: [1, 2, 3, 4, 5]}
    assert set(most.values()) == {1}
    consumer.close()
    for each in nsqds.values():
        each.stop()


def test_who_iterates_needs_no_threads(nsqd: ScriptedNsqd) -> None:
    consumer = Consumer("t", "c", str(nsqd.address), handler_threads=2)
    with pytest.raises(ConfigError, match="handler_threads=2 needs a handler"):
        iter(consumer)


PROGRAM = """
import os, sys, threading, time
import gevent
from gevent.monkey import get_original
from nsq_fast import Consumer, Producer
block, ident = get_original("time", "sleep"), get_original("_thread", "get_ident")
address, seen, main = sys.argv[1], [], ident()

def handler(consumer, message):
    time.sleep(0.001)  # sleep: the handler waits, by gevent where it is patched
    block(0.001)
    assert ident() != main
    seen.append(message.body)

def consume(channel):
    seen.clear()
    consumer = Consumer("t", channel, address, message_handler=handler, handler_threads=3, max_in_flight=50)
    consumer.start(block=False)
    while len(seen) < 100:
        gevent.sleep(0.01)  # sleep: looks again and again
    return consumer

with Producer(address) as producer:
    for channel in ("a", "b"):  # made before the messages
        with Consumer("t", channel, address, message_handler=handler) as first:
            while not first.stats().connections[0].is_connected:
                gevent.sleep(0.01)  # sleep: looks again and again
    producer.multipublish("t", [b"%d" % number for number in range(100)])
consumer = consume("a")
child = os.fork()
if not child:
    consume("b").close()
    os._exit(0)
while os.waitpid(child, os.WNOHANG) == (0, 0):
    gevent.sleep(0.01)  # sleep: looks again and again
consumer.close()
assert consumer.stats().totals.finished == 100, consumer.stats()
print("done")
"""


@pytest.mark.parametrize("patch", ["", "from gevent import monkey; monkey.patch_all()"], ids=["unpatched", "patched"])
def test_it_works_in_programs_that_are_patched_and_that_fork(server: Server, patch: str) -> None:
    done = subprocess.run(
        [*FORKING_PYTHON, "-c", patch + PROGRAM, server.tcp],
        capture_output=True, text=True, timeout=50, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_what_waits_for_a_thread_when_the_consumer_is_closed_is_not_handled(
    nsqd: ScriptedNsqd, start: Callable[..., Consumer]
) -> None:
    gate = Gate()
    consumer = start(gate, handler_threads=1, concurrency=5)
    connection = nsqd.connection()
    connection.push(*range(5))
    until(lambda: len(gate.running) == 1 and consumer.stats().unstarted == 0)
    consumer.close(drain=False)
    gate.open()
    until(lambda: not gate.threads & native_threads())
    assert gate.most == 1
    assert not gate.running
