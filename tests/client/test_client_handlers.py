"""Handlers that block: the rest of the client lives on, on native threads and where they block the process itself.

Where they do, servers are processes of their own: an embedded one in this process would be blocked, too.
"""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from typing import Any

import gevent
import pytest
from support.partitions import answers, push_record, topology
from support.processes import run_quietly
from support.scripted_nsqd import heard
from support.servers import RealNsqd
from support.waiting import WAIT, block_until, until

from nsq_fast import Consumer, Producer, RequeueMessage
from nsq_fast._codec import Message
from nsq_fast.errors import AlreadyResponded, ConfigError, HandlerDeferred, WrongThread


class Server:
    """An nsqd, asked without a turn of the hub."""

    def __init__(self, tcp: object, http: object) -> None:
        self.tcp = str(tcp)
        self._http = http

    def channel(self) -> dict[str, Any]:
        """The stats of the channel "c" of the topic "t"."""
        with urllib.request.urlopen(f"http://{self._http}/stats?format=json&topic=t", timeout=5) as reply:
            (topic,) = json.load(reply)["topics"]
        (channel,) = topic["channels"]
        return channel

    def finished(self) -> int:
        """FINs that came from consumers that are connected."""
        return sum(client["finish_count"] for client in self.channel()["clients"])

    def wait_finished(self, count: int) -> None:
        """Block the process until so many FINs came."""
        block_until(lambda: self.finished() >= count, f"{count} FINs")


@pytest.fixture
def server(nsqd_process: RealNsqd) -> Server:
    return Server(nsqd_process.tcp_address, nsqd_process.http_address)


@pytest.fixture
def handle_many(server: Server) -> Iterator[Callable[..., Consumer]]:
    """A factory: publish so many messages, and handle them."""
    consumers: list[Consumer] = []

    def make(count: int, **options: Any) -> Consumer:
        consumers.append(Consumer("t", "c", server.tcp, **{"max_in_flight": count, **options}))
        with Producer([server.tcp]) as producer:
            producer.multipublish("t", [b"%d" % number for number in range(count)])
        if "message_handler" in options or "batch_handler" in options:
            consumers[-1].start(block=False)
        return consumers[-1]

    yield make
    for consumer in consumers:
        consumer.close(drain=False)


CONSUME = {"max_in_flight": 100, "handler_threads": 2}
HUB_THREAD = threading.get_ident()


class Gate:
    """Handlers that block their thread until they are let go."""

    def __init__(self):
        self.running = []
        self.most = 0
        self.threads = set()  # the native ids of those in which it ran
        self._open = threading.Event()

    def __call__(self, consumer, message):
        assert threading.get_ident() != HUB_THREAD
        self.threads.add(threading.get_native_id())
        self.running.append(message)
        self.most = max(self.most, len(self.running))
        self._open.wait(WAIT)
        self.running.remove(message)

    def open(self):
        self._open.set()

    def is_gone(self):
        """All its threads have ended. Others of this process may end at any moment, too."""
        return not self.threads & {int(name) for name in os.listdir("/proc/self/task")}


def test_handlers_that_block_run_at_once_and_the_hub_goes_on(handle_many):
    gate = Gate()
    consumer = handle_many(20, message_handler=gate, handler_threads=5, heartbeat_interval=1.0)
    until(lambda: len(gate.running) == 5)
    gevent.sleep(3)  # sleep: longer than a server bears without an answer to its heartbeats
    gate.open()
    until(lambda: consumer.stats().totals.finished == 20)
    assert gate.most == 5
    assert consumer.stats().totals.received == 20


def test_the_fin_of_a_slow_handler_does_not_wait_for_others(nsqd, consume):
    go_on = threading.Semaphore(0)
    consume(lambda c, m: go_on.acquire(timeout=WAIT), handler_threads=1)
    connection = nsqd.connection()
    connection.push(1, 2, 3)
    for number in (1, 2, 3):
        go_on.release()
        connection.wait_for(lambda number=number: connection.answered(b"FIN") == list(range(1, number + 1)))


def test_when_quick_handlers_become_slow_the_others_do_not_wait_behind_one(nsqd, consume):
    gate = Gate()
    consume(lambda c, m: m.body == b"slow" and gate(c, m), max_in_flight=2500)
    connection = nsqd.connection()
    connection.push(*range(2000))
    connection.wait_for(lambda: len(connection.answered(b"FIN")) == 2000)
    connection.push(3000, body=b"slow")
    until(lambda: len(gate.running) == 1)
    connection.push(*range(2000, 2100))
    connection.wait_for(lambda: len(connection.answered(b"FIN")) == 2100)
    gate.open()
    connection.wait_for(lambda: 3000 in connection.answered(b"FIN"))


def test_failures_requeue_and_are_told_in_the_hubs_thread(nsqd, consume):
    told = []

    def handler(consumer, message):
        number = int(message.id, 16)
        if number == 1:
            raise ValueError("on purpose")
        if number == 2:
            raise RequeueMessage(7)
        return (each for each in ()) if number == 3 else None

    def tell(name):
        told.append((name, threading.get_ident()))

    consumer = consume(handler, requeue_delay=5000, max_tries=2, give_up=lambda c, m: tell("give_up"))
    failures = heard(consumer, "on_exception")
    for name in ("on_exception", "on_requeue", "on_finish"):
        getattr(consumer, name).connect(lambda c, name=name, **values: tell(name), weak=False)
    connection = nsqd.connection()
    connection.push(1, 2, 3, 4)
    connection.push(5, attempts=3)
    connection.wait_for(lambda: len(connection.answered(b"REQ")) == 3 and sorted(connection.answered(b"FIN")) == [4, 5])
    delays = {int(command[1], 16): command[2] for command in connection.commands if command[0] == b"REQ"}
    assert delays == {1: b"5000", 2: b"7000", 3: b"5000"}
    assert sorted(type(error).__name__ for error in failures) == [HandlerDeferred.__name__, "ValueError"]
    assert {thread for _, thread in told} == {HUB_THREAD}
    counts = {"on_exception": 2, "on_requeue": 3, "on_finish": 2, "give_up": 1}
    assert Counter(name for name, _ in told) == counts


def test_messages_are_answered_and_touched_from_their_threads_alone(nsqd, consume):
    errors = []

    def finish(message):
        try:
            message.finish()
        except (AlreadyResponded, WrongThread) as error:
            errors.append(type(error))

    def handler(consumer, message):
        other = threading.Thread(target=finish, args=(message,))
        other.start()
        other.join(WAIT)
        message.touch()
        if message.body == b"requeue":
            message.requeue(11)
        elif message.body == b"async":
            message.enable_async()
        else:
            finish(message)
            finish(message)

    consume(handler)
    connection = nsqd.connection()
    for number, body in enumerate((b"finish", b"requeue", b"async"), 1):
        connection.push(number, body=body)
    connection.wait_for(lambda: sorted(connection.answered(b"TOUCH")) == [1, 2, 3])
    connection.wait_for(lambda: connection.answered(b"FIN") == [1] and connection.answered(b"REQ") == [2])
    assert Counter(errors) == {WrongThread: 3, AlreadyResponded: 1}
    words = [command[0] for command in connection.commands if command[1:2] == (b"%016x" % 1,)]
    assert words == [b"TOUCH", b"FIN"]


def test_close_waits_for_the_handlers_and_gives_the_others_back(nsqd, consume):
    gate = Gate()
    consumer = consume(gate)
    connection = nsqd.connection()
    connection.push(*range(10))
    until(lambda: len(gate.running) == 2)
    closing = gevent.spawn(consumer.close)
    connection.wait_for(lambda: len(connection.answered(b"REQ")) == 8)
    assert not closing.ready()
    gate.open()
    closing.get(timeout=WAIT)
    assert len(connection.answered(b"FIN")) == 2
    assert gate.most == 2
    until(gate.is_gone)


def test_what_waits_for_a_thread_when_the_consumer_is_closed_is_not_handled(nsqd, consume):
    gate = Gate()
    consumer = consume(gate, handler_threads=1, concurrency=5)
    nsqd.connection().push(*range(5))
    until(lambda: len(gate.running) == 1 and consumer.stats().unstarted == 0)
    consumer.close(drain=False)
    gate.open()
    until(gate.is_gone)
    assert gate.most == 1
    assert not gate.running


def test_an_ordered_partition_has_one_handler_at_a_time_in_order(nsqds, consume):
    leaders = {number: nsqds() for number in range(2)}
    seen, running, most = {0: [], 1: []}, Counter(), Counter()

    def handler(consumer, message):
        running[message.partition] += 1
        most[message.partition] = max(most[message.partition], running[message.partition])
        time.sleep(0.001)  # sleep: long enough for another thread to begin
        seen[message.partition].append(message.internal_id & ((1 << 50) - 1))
        running[message.partition] -= 1

    consume(handler, found=topology(leaders), ordered=True, handler_threads=4)
    for count in range(1, 6):
        for number, each in leaders.items():
            push_record(each.subscriber(number), count)
        for number, each in leaders.items():
            connection = each.subscriber(number)
            connection.wait_for(lambda connection=connection, count=count: len(answers(connection, b"FIN")) == count)
    assert seen == {0: [1, 2, 3, 4, 5], 1: [1, 2, 3, 4, 5]}
    assert set(most.values()) == {1}


def test_who_iterates_needs_no_threads(nsqd):
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
def test_it_works_in_programs_that_are_patched_and_that_fork(server, patch):
    assert run_quietly(patch + PROGRAM, server.tcp) == "done\n"


BLOCK = 0.02


@pytest.mark.slow
@pytest.mark.parametrize("way", ["on its own", "shared", "concurrent", "answers itself", "batches", "iteration"])
def test_the_fin_of_a_slow_handler_leaves_before_the_next_handler_begins(
    server: Server, handle_many: Callable[..., Consumer], way: str
) -> None:
    handled: list[Message] = []

    def handle_batch(consumer: Consumer, messages: list[Message]) -> None:
        server.wait_finished(len(handled))
        handled.extend(messages)
        if way == "answers itself":
            messages[0].finish()
        time.sleep(BLOCK)  # sleep: a handler that blocks

    def handle(consumer: Consumer, message: Message) -> None:
        handle_batch(consumer, [message])

    options: dict[str, Any] = {
        "shared": {"message_handler": handle, "concurrency": 1},
        "concurrent": {"message_handler": handle, "concurrency": 20},
        "batches": {"batch_handler": handle_batch, "batch_size": 3},
        "iteration": {},
    }.get(way, {"message_handler": handle})
    consumer = handle_many(20, **options)
    if way == "iteration":
        for message in islice(consumer, 20):
            handle(consumer, message)
    until(lambda: len(handled) == 20, 30)
    until(lambda: consumer.stats().totals.finished >= 20 - (way == "iteration"))
    assert consumer.stats().totals.received == 20


@pytest.mark.slow
def test_where_slow_and_quick_handlers_take_turns_no_fin_waits_for_a_slow_one(
    server: Server, handle_many: Callable[..., Consumer]
) -> None:
    handled: list[Message] = []
    slow: list[int] = []

    def handler(consumer: Consumer, message: Message) -> None:
        if len(handled) % 5 == 0:
            if slow:  # the first slow one nobody could know of
                server.wait_finished(len(handled))
            slow.append(len(handled))
            time.sleep(BLOCK)  # sleep: a handler that blocks
        handled.append(message)

    handle_many(30, message_handler=handler)
    until(lambda: len(handled) == 30, 30)
    assert len(slow) == 6


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"concurrency": 50}], ids=str)
def test_heartbeats_are_answered_between_handlers(
    server: Server, handle_many: Callable[..., Consumer], options: dict[str, Any]
) -> None:
    handled: list[Message] = []

    def handler(consumer: Consumer, message: Message) -> None:
        time.sleep(0.3)  # sleep: a handler that blocks
        handled.append(message)

    options |= {"heartbeat_interval": 1.0, "message_handler": handler}
    consumer = handle_many(9, **options)
    errors = heard(consumer)
    until(lambda: len(handled) == 9, 30)
    until(lambda: consumer.stats().totals.finished == 9)
    assert errors == []
    assert consumer.stats().totals.received == 9


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"concurrency": 50}, {"raises": True}, {"batch": True}], ids=str)
def test_timers_have_their_turn_between_handlers(
    server: Server, handle_many: Callable[..., Consumer], options: dict[str, Any]
) -> None:
    handled = 0
    at_turns = [0]
    is_raising, is_batch = options.pop("raises", False), options.pop("batch", False)

    def handler(consumer: Consumer, message: object) -> None:
        nonlocal handled
        time.sleep(0.012)  # sleep: a handler that blocks for two time slices
        handled += 1
        if is_raising:
            message.enable_async()  # type: ignore[attr-defined]
            raise RuntimeError("on purpose")

    def take_turns() -> None:
        while handled < 60:
            gevent.sleep(0.0001)  # sleep: a timer that is always due
            at_turns.append(handled)

    turns = gevent.spawn(take_turns)
    name = "batch_handler" if is_batch else "message_handler"
    consumer = handle_many(60, **{name: handler}, **options, batch_size=1, max_backoff_duration=0, requeue_delay=60_000)
    assert consumer.is_running
    turns.get(timeout=30)
    between = [after - before for before, after in pairwise(at_turns)]
    assert max(between) <= 2
