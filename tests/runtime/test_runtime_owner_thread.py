"""An object is used in the thread in which it runs; from another one each method fails before it has done anything."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gevent import subprocess
from support.waiting import until

from nsq_fast import ColumnProducer, ColumnSubscription, Consumer, Message, NsqdHTTPClient, Producer
from nsq_fast.broker import NsqdServer
from nsq_fast.client.admin import LookupPoller
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import WrongThread

NSQD = NsqdServer


# They change nothing, and a monitoring thread may call them.
READING = {"answering", "asked_at", "failure", "progress", "stats", "topology"}


# Called by our own greenlets, or by the fork, and by nobody else.
# The last are what a consumer asks of its face.
INTERNAL = {
    "fail", "forked", "apart", "begin_closing", "check_handler", "dead_letters", "escaped", "give_back",
    "is_failure", "new_connection", "new_loop", "new_pool", "new_worker", "start_worker",
}  # fmt: skip


KINDS: list[Any] = [Consumer, Producer, ColumnProducer, ColumnSubscription, LookupPoller]
SETTERS = {Consumer: ["max_in_flight"]}


def elsewhere(call: Callable[[], Any]) -> Any:
    """What ``call()`` returns, or the exception that it raises, in another thread."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, name="another")
    thread.start()
    until(lambda: not thread.is_alive())
    return results[0]


def methods_of(kind: type) -> list[str]:
    special = {"__enter__", "__exit__", "__iter__"}
    found = [name for name, value in inspect.getmembers(kind, inspect.isfunction)]
    return [name for name in found if name in special or not (name.startswith("_") or name in READING | INTERNAL)]


class Running:
    """One object of each kind, at work."""

    def __init__(self, nsqd: NsqdServer) -> None:
        address = str(nsqd.tcp_address)
        self.bodies: list[bytes] = []
        self.kept: list[Message] = []
        self.consumer = Consumer("topic", "channel", address, message_handler=self.handle, max_in_flight=10)
        self.producer = Producer(address)
        self.columns = ColumnProducer(address)
        self.poller = LookupPoller("127.0.0.1:1")
        self.subscription = ColumnSubscription(nsqd.tcp_address, "columns", "channel", ConnectionConfig())
        self.producer.start()
        self.columns.start()
        self.poller.start()
        self.subscription.open()
        self.producer.publish("topic", b"first")
        self.consumer.start(block=False)
        until(lambda: self.bodies == [b"first"])

    def handle(self, consumer: Consumer, message: Message) -> None:
        self.bodies.append(message.body)
        if message.body == b"keep":
            message.enable_async()
            self.kept.append(message)

    def of(self, kind: type) -> Any:
        made = (self.consumer, self.producer, self.columns, self.poller, self.subscription)
        return next(each for each in made if type(each) is kind)

    def check(self) -> None:
        """All still work."""
        self.producer.publish("topic", b"last")
        until(lambda: self.bodies[-1] == b"last")
        assert self.columns.layout("columns").is_partitioned is False
        self.columns.publish("columns", b"row")
        self.subscription.set_rdy(1)
        assert self.subscription.fetch(10.0).count == 1
        assert self.consumer.is_running
        assert self.poller.is_running

    def close(self) -> None:
        for each in (self.consumer, self.producer, self.columns, self.subscription):
            each.close()
        self.poller.stop()


@pytest.fixture
def objects(nsqd: NsqdServer) -> Iterator[Running]:
    made = Running(nsqd)
    yield made
    made.close()


def with_any_arguments(method: Callable[..., Any]) -> Callable[[], Any]:
    parameters = inspect.signature(method).parameters.values()
    required = [each for each in parameters if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    return lambda: method(*["topic"] * len(required))


@pytest.mark.parametrize("kind", KINDS)
def test_every_method_fails_in_another_thread_and_does_no_harm(kind: type, objects: Running) -> None:
    thing = objects.of(kind)
    for name in methods_of(kind):
        error = elsewhere(with_any_arguments(getattr(thing, name)))
        if name == "__exit__" and kind is ColumnSubscription:
            continue  # it logs why it could not close
        assert isinstance(error, WrongThread), (name, error)
        assert "'another'" in str(error)
        assert "nsq_fast.threads" in str(error)
        assert "run_callback_threadsafe" in str(error)
    for name in SETTERS.get(kind, ()):
        assert isinstance(elsewhere(lambda name=name: setattr(thing, name, 1)), WrongThread), name
    objects.check()


def test_nothing_of_a_refused_publish_is_stored(objects: Running, nsqd: NsqdServer) -> None:
    before = nsqd.nsqd.topics["topic"].message_count
    for call in (
        lambda: objects.producer.publish("topic", b"x"),
        lambda: objects.producer.publish("unheard-of", b"x"),
        lambda: objects.producer.publish("topic", b"x", raise_error=False),
        lambda: objects.producer.publish_nowait("topic", b"x"),
        lambda: objects.producer.multipublish("topic", [b"x", b"y"]),
    ):
        assert isinstance(elsewhere(call), WrongThread)
    objects.producer.publish("topic", b"last")
    until(lambda: objects.bodies[-1] == b"last")
    assert nsqd.nsqd.topics["topic"].message_count == before + 1


@pytest.mark.parametrize("answer", ["finish", "requeue", "touch"])
def test_a_message_is_not_answered_in_another_thread(objects: Running, answer: str) -> None:
    objects.producer.publish("topic", b"keep")
    (message,) = until(lambda: objects.kept)
    assert isinstance(elsewhere(getattr(message, answer)), WrongThread)
    assert not message.has_responded()
    message.finish()
    objects.check()


def test_reading_is_allowed_everywhere(objects: Running) -> None:
    assert elsewhere(objects.consumer.stats).in_flight == 0
    assert elsewhere(objects.consumer.progress).topics[0].topic == "topic"
    assert elsewhere(objects.producer.progress).reason == "idle"
    assert elsewhere(lambda: objects.consumer.is_running) is True
    assert elsewhere(objects.producer.stats)["pending"] == 0
    assert elsewhere(lambda: objects.poller.topology("topic")) is None


def test_what_is_made_in_one_thread_may_run_in_another(nsqd: NsqdServer) -> None:
    producer = Producer(str(nsqd.tcp_address), linger=0.001)
    consumer = Consumer("topic", "channel", str(nsqd.tcp_address), message_handler=lambda consumer, _: consumer.close())

    def run() -> str:
        with producer:
            producer.publish("topic", b"x")
        consumer.start()
        return "closed"

    assert elsewhere(run) == "closed"


def test_http_clients_serve_every_thread(nsqd: NsqdServer) -> None:
    client = NsqdHTTPClient(*nsqd.http_address)
    assert [client.ping(), elsewhere(client.ping), client.ping(), elsewhere(client.ping)] == [b"OK"] * 4
    elsewhere(client.close)
    assert client.ping() == b"OK"
    client.close()


def test_a_program_that_is_patched_is_served_in_its_only_thread(nsqd: NsqdServer) -> None:
    """After patch_all the threads of ``threading`` are greenlets of one native thread."""
    program = """
from gevent import monkey
monkey.patch_all()
import sys, threading
from nsq_fast import Producer
producer = Producer(sys.argv[1])
producer.start()
results = []
thread = threading.Thread(target=lambda: results.append(producer.publish("topic", b"x")))
thread.start()
thread.join()
producer.close()
print(results)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(nsqd.tcp_address)], stdout=subprocess.PIPE, timeout=60, check=True
    )
    assert done.stdout.strip() == b"[b'OK']"
