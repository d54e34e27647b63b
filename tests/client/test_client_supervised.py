"""Greenlets of ours, and the thread of an object: a fault in one, and a call in another, are told and do no harm."""

from __future__ import annotations

import gc
import inspect
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gevent.event import Event
from support.http import channel_figures
from support.waiting import WAIT, until

import nsq_fast
from nsq_fast import ColumnProducer, ColumnSubscription, ConfigDocument, Consumer, Message, Producer
from nsq_fast.broker import LookupdServer, NsqdOptions, NsqdServer
from nsq_fast.client.admin import LookupPoller
from nsq_fast.client.greenlets import SupervisedLoop
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import InternalError, LookupFailed, WrongThread

# A fault of ours in a background greenlet is logged and told, and ends nothing for good: shown for each loop there is.
#
# The loops are found by reflection: a loop that is added, and is not at work in the scenario below, fails this file.


PACKAGE = Path(nsq_fast.__file__).parent
FACES = ["bridge.py", "columns.py", "consumer.py", "producer.py"]
SOURCES = [path for path in sorted((PACKAGE / "client").glob("*.py")) if path.name != "greenlets.py"]
SOURCES += [PACKAGE / name for name in FACES]

KEPT = ["worker", "nsq_fast subscriber", "topics", "nsq_fast lookup"]
"""In the names of all that runs for as long as its owner does, but for config: what a config source raises, whatever it
is, is told by its keeper, and never gets to the supervisor (tests/client/test_client_config_source.py)."""


class Injected(Exception):
    """The fault that the tests inject."""


def test_no_greenlet_is_made_without_supervision() -> None:
    makers = re.compile(r"\b(Greenlet|spawn(_later|_raw)?)\(")
    assert [path.name for path in SOURCES if makers.search(path.read_text())] == []


class Told:
    """A config source that says something once."""

    document = ConfigDocument({"trace": {"another": True}}, 1)

    def next(self, last: ConfigDocument | None) -> ConfigDocument:
        if last is not None:
            Event().wait()
        return self.document


class Scenario:
    """A consumer and a producer on embedded servers, and what was told of faults."""

    def __init__(self) -> None:
        self.others = loops()  # what other tests of this process have left running
        self.lookupd = LookupdServer()
        self.lookupd.start()
        self.nsqds = [self.new_nsqd()]
        self.calls: Counter[bytes] = Counter()
        self.kept: list[Message] = []
        self.told: list[Any] = []
        lookupds = [str(self.lookupd.http_address)]
        options: dict[str, Any] = {"lookupd_poll_interval": 0.2, "lookupd_refresh_interval": 0.05}
        self.producer = Producer([self.nsqds[0].tcp_address], lookupds, heartbeat_interval=1, **options)
        self.consumer = Consumer(
            re.compile("topic"), "channel", [], lookupds, message_handler=self.handle, max_in_flight=10,
            auto_touch=True, max_backoff_duration=0, concurrency=2, config_source=Told(), heartbeat_interval=1,
            **options,
        )  # fmt: skip
        self.consumer.on_error.connect(self.told_of, weak=False)
        self.producer.on_error.connect(self.told_of, weak=False)
        self.producer.start()
        self.producer.publish("topic", b"first")
        self.consumer.start(block=False)
        until(lambda: self.calls[b"first"])

    def new_nsqd(self) -> NsqdServer:
        server = NsqdServer(NsqdOptions(msg_timeout=2.0))
        server.register_at(self.lookupd.tcp_address)
        server.start()
        return server

    def told_of(self, sender: object, error: Exception) -> None:
        if isinstance(error, InternalError):
            self.told.append(error)

    def handle(self, consumer: Consumer, message: Message) -> None:
        self.calls[message.body] += 1
        if message.body == b"keep":
            message.enable_async()
            self.kept.append(message)

    def check(self) -> None:
        """Everything works: publishing, discovery of a new nsqd, consuming from both."""
        self.nsqds.append(self.new_nsqd())
        bodies = [b"%d" % number for number in range(100)]
        for body in bodies:
            self.producer.publish("topic", body)
        with Producer([self.nsqds[-1].tcp_address]) as other:
            other.publish("topic", b"elsewhere")
        until(lambda: all(self.calls[body] for body in [*bodies, b"elsewhere"]))
        until(lambda: self.consumer.total_in_flight == 0)

    def has_one_connection_to_each(self) -> bool:
        """Whether the consumer has left none open that it uses no more."""
        return all(len(channel_figures(nsqd, "topic", "channel")["clients"]) == 1 for nsqd in self.nsqds)

    def close(self) -> None:
        self.producer.close(timeout=5)
        self.consumer.close(drain=False)
        for server in [*self.nsqds, self.lookupd]:
            server.kill()


@pytest.fixture
def scenario() -> Iterator[Scenario]:
    made = Scenario()
    yield made
    made.close()


def loops() -> list[SupervisedLoop]:
    """All that run in this process."""
    return [each for each in gc.get_objects() if type(each) is SupervisedLoop and each]


def running(name: str, scenario: Scenario) -> list[SupervisedLoop]:
    """The loops of the scenario that have this in their names."""
    ours = [each for each in loops() if not any(each is other for other in scenario.others)]
    return [each for each in ours if name in each.name]


def test_the_loops_are_known(scenario: Scenario) -> None:
    known = [each for name in (*KEPT, "config") for each in running(name, scenario)]
    assert [each.name for each in running("", scenario) if not any(each is other for other in known)] == []


@pytest.mark.parametrize("name", KEPT)
def test_a_fault_in_a_loop_ends_nothing(
    name: str, scenario: Scenario, no_unseen_errors: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    found = until(lambda: running(name, scenario), WAIT)
    with caplog.at_level(logging.ERROR):
        for loop in found:
            loop.kill(Injected(name), block=False)  # raised where the loop waits
        until(lambda: len(no_unseen_errors) >= len(found))
        until(lambda: len(scenario.told) >= len(found))
    assert {type(fault) for _, _, fault in no_unseen_errors} == {Injected}
    no_unseen_errors.clear()
    assert all(isinstance(error.__cause__, Injected) for error in scenario.told)
    logged = [record for record in caplog.records if record.exc_info and isinstance(record.exc_info[1], Injected)]
    assert len(logged) == len(found)
    assert "begins again" in logged[0].getMessage()
    scenario.check()
    assert running(name, scenario)
    until(scenario.has_one_connection_to_each)


# An object is used in the thread in which it runs; from another one each method fails before it has done anything


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


class Running(Scenario):
    """One object of each kind, at work."""

    def __init__(self) -> None:
        super().__init__()
        address = self.nsqds[0].tcp_address
        self.columns = ColumnProducer(str(address))
        self.poller = LookupPoller("127.0.0.1:1")
        self.subscription = ColumnSubscription(address, "columns", "channel", ConnectionConfig())
        self.columns.start()
        self.poller.start()
        self.subscription.open()

    def of(self, kind: type) -> Any:
        made = (self.consumer, self.producer, self.columns, self.poller, self.subscription)
        return next(each for each in made if type(each) is kind)

    def check(self) -> None:
        """All still work."""
        self.producer.publish("topic", b"last")
        until(lambda: self.calls[b"last"])
        assert self.columns.layout("columns").is_partitioned is False
        self.columns.publish("columns", b"row")
        self.subscription.set_rdy(1)
        assert self.subscription.fetch(10.0).count == 1
        assert self.consumer.is_running
        with pytest.raises(LookupFailed):  # not NotRunning
            self.poller.wait_topology("topic", 0.0)

    def close(self) -> None:
        self.columns.close()
        self.subscription.close()
        self.poller.stop()
        super().close()


@pytest.fixture
def objects() -> Iterator[Running]:
    made = Running()
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


def test_nothing_of_a_refused_publish_is_stored(objects: Running) -> None:
    for call in (
        lambda: objects.producer.publish("topic", b"x"),
        lambda: objects.producer.publish("unheard-of", b"x"),
        lambda: objects.producer.publish("topic", b"x", raise_error=False),
        lambda: objects.producer.publish_nowait("topic", b"x"),
        lambda: objects.producer.multipublish("topic", [b"x", b"y"]),
    ):
        assert isinstance(elsewhere(call), WrongThread)
    objects.producer.publish("topic", b"last")
    until(lambda: objects.calls[b"last"])
    topics = objects.nsqds[0].nsqd.topics
    assert (topics["topic"].message_count, "unheard-of" in topics) == (2, False)  # the first and the last


def test_a_message_is_not_answered_in_another_thread(objects: Running) -> None:
    objects.producer.publish("topic", b"keep")
    (message,) = until(lambda: objects.kept)
    for answer in (message.finish, message.requeue, message.touch):
        assert isinstance(elsewhere(answer), WrongThread)
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
