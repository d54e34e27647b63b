"""A fault of ours in a background greenlet is logged and told, and ends nothing for good: shown for each loop there is.

The loops are found by reflection: a loop that is added, and is not at work in the scenario below, fails this file.
"""

from __future__ import annotations

import ast
import gc
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gevent
import pytest
from gevent import Timeout
from gevent.event import Event
from support.sources import parsed
from support.waiting import WAIT, until

import nsq_fast
from nsq_fast import ConfigDocument, Consumer, Message, Producer
from nsq_fast.broker import LookupdServer, NsqdOptions, NsqdServer
from nsq_fast.client import greenlets
from nsq_fast.client import loop as port
from nsq_fast.client.deadlines import Deadlines
from nsq_fast.client.flow import Flow
from nsq_fast.client.greenlets import Job, Loop, Supervisor
from nsq_fast.client.sender import Pending, ProducerConnection
from nsq_fast.errors import InternalError, NsqError

PACKAGE = Path(nsq_fast.__file__).parent
FACES = ["bridge.py", "columns.py", "consumer.py", "handler_threads.py", "producer.py"]
SOURCES = [path for path in sorted((PACKAGE / "client").glob("*.py")) if path.name != "greenlets.py"]
SOURCES += [PACKAGE / name for name in FACES]

KEPT = ["worker", "nsq_fast subscriber", "topics", "nsq_fast lookup"]
"""In the names of all that runs for as long as its owner does, but for config: what a config source raises, whatever it
is, is told by its keeper, and never gets to the supervisor (tests/runtime/test_runtime_config_source.py)."""


class Injected(Exception):
    """The fault that the tests inject."""


def calls_of(name: str) -> Iterator[tuple[Path, ast.Call]]:
    """Every call of a function or method ``name`` in client/ and the faces of gevent."""
    for path in SOURCES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call):
                function = node.func
                called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
                if called == name:
                    yield path, node


@pytest.mark.parametrize("maker", ["Greenlet", "spawn", "spawn_later", "spawn_raw"])
def test_no_greenlet_is_made_without_supervision(maker: str) -> None:
    assert [f"{path.name}:{call.lineno}" for path, call in calls_of(maker)] == []


def test_a_connection_of_a_producer_survives_a_fault(
    no_unseen_errors: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = ProducerConnection._opened
    faults = [Injected("once")]

    def failing(link: ProducerConnection, conn: Any) -> None:
        if faults:
            raise faults.pop()
        opened(link, conn)

    monkeypatch.setattr(ProducerConnection, "_opened", failing)
    with NsqdServer() as nsqd, Producer(nsqd.tcp_address) as producer:
        assert producer.publish("topic", b"x", timeout=WAIT) == b"OK"
    assert [kind for _, kind, _ in no_unseen_errors] == [Injected]
    no_unseen_errors.clear()


# The scenario: a consumer and a producer, lookup, messages under way


class Told:
    """A config source that says something once."""

    document = ConfigDocument({"trace": {"another": True}}, 1)

    def next(self, last: ConfigDocument | None) -> ConfigDocument:
        if last is not None:
            Event().wait()
        return self.document


class Scenario:
    """A consumer and a producer on embedded servers, and what was told of faults."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.others = loops()  # what other tests of this process have left running
        self.lookupd = LookupdServer()
        self.lookupd.start()
        self.nsqds = [self.new_nsqd()]
        self.calls: Counter[bytes] = Counter()
        self.finished = 0
        self.told: list[Any] = []
        lookupds = [str(self.lookupd.http_address)]
        options: dict[str, Any] = {
            "lookupd_poll_interval": 0.2,
            "lookupd_refresh_interval": 0.05,
            "heartbeat_interval": 1,
        }
        self.producer = Producer([str(self.nsqds[0].tcp_address)], lookupds, **options)
        self.consumer = Consumer(
            re.compile("topic"), "channel", [], lookupds, message_handler=self.handle, max_in_flight=10,
            auto_touch=True, max_backoff_duration=0, concurrency=2, config_source=Told(), **options,
        )  # fmt: skip
        self.consumer.on_error.connect(self.told_of, weak=False)
        self.producer.on_error.connect(self.told_of, weak=False)
        self.producer.start()
        self.producer.publish("topic", b"first")
        self.consumer.start(block=False)
        until(lambda: self.calls[b"first"])

    def new_nsqd(self) -> NsqdServer:
        path = self.path / f"nsqd{gevent.get_hub().loop.now()}"
        path.mkdir()
        server = NsqdServer(NsqdOptions(data_path=str(path), msg_timeout=2.0))
        server.register_at(self.lookupd.tcp_address)
        server.start()
        return server

    def told_of(self, sender: object, error: Exception) -> None:
        if isinstance(error, InternalError):
            self.told.append(error)

    def handle(self, consumer: Consumer, message: Message) -> None:
        self.calls[message.body] += 1
        if message.body == b"long":
            gevent.sleep(3.0)  # sleep: a handler that takes its time

    def check(self) -> None:
        """Everything works: publishing, discovery of a new nsqd, consuming from both."""
        self.nsqds.append(self.new_nsqd())
        bodies = [b"%d" % number for number in range(100)]
        for body in bodies:
            self.producer.publish("topic", body)
        with Producer([str(self.nsqds[-1].tcp_address)]) as other:
            other.publish("topic", b"elsewhere")
        until(lambda: all(self.calls[body] for body in [*bodies, b"elsewhere"]))
        until(lambda: self.consumer.total_in_flight == 0)

    def check_touch(self) -> None:
        """A handler that runs longer than the message timeout keeps its message."""
        self.producer.publish("topic", b"long")
        until(lambda: self.calls[b"long"] and self.consumer.total_in_flight == 0)
        assert self.calls[b"long"] == 1

    def close(self) -> None:
        self.producer.close(timeout=5)
        self.consumer.close(drain=False)
        for server in [*self.nsqds, self.lookupd]:
            server.kill()


@pytest.fixture
def scenario(tmp_path: Path) -> Iterator[Scenario]:
    made = Scenario(tmp_path)
    yield made
    made.close()


def loops() -> list[Loop]:
    """All that run in this process."""
    return [each for each in gc.get_objects() if type(each) is Loop and each]


def running(name: str, scenario: Scenario) -> list[Loop]:
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


@pytest.mark.parametrize(("owner", "look"), [(Flow, "update"), (Deadlines, "look")])
def test_a_fault_in_what_is_looked_at_again_and_again_ends_nothing(
    owner: type, look: str, scenario: Scenario, no_unseen_errors: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [Injected(look)]
    right = getattr(owner, look)

    def failing(self: Any, now: float) -> object:
        if faults:
            raise faults.pop()
        return right(self, now)

    parts = [each for each in gc.get_objects() if type(each) is port.Repeated and look in repr(each._look)]
    for part in parts:
        monkeypatch.setattr(part, "_look", partial(failing, part._look.__self__))
        part.ask()
    until(lambda: scenario.told)
    no_unseen_errors.clear()
    scenario.check()
    scenario.check_touch()


def test_closing_ends_the_loops_that_pause_after_a_fault(scenario: Scenario, no_unseen_errors: list[Any]) -> None:
    found = [loop for name in KEPT for loop in running(name, scenario)]
    for loop in found:
        loop.kill(Injected("all"), block=False)
    until(lambda: len(no_unseen_errors) >= len(found))
    no_unseen_errors.clear()
    scenario.close()
    until(lambda: not any(found), WAIT)


def test_a_fault_of_a_timer_loses_no_other_deadline(
    no_unseen_errors: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = Pending._ring
    faults = [Injected("once")]

    def failing(pending: Pending) -> None:
        if faults:
            raise faults.pop()
        ring(pending)

    monkeypatch.setattr(Pending, "_ring", failing)
    with Producer("127.0.0.1:1") as producer:  # nobody listens there
        result = producer.publish_nowait("topic", b"late", timeout=0.2)
        with pytest.raises(NsqError):
            result.get(timeout=10)
    assert [kind for _, kind, _ in no_unseen_errors] == [Injected]
    no_unseen_errors.clear()


def test_a_consumer_of_a_real_nsqd_survives_a_fault_in_its_flow(
    real_nsqd: Callable[..., Any], no_unseen_errors: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    nsqd = real_nsqd()
    handled: list[bytes] = []
    update = Flow.update
    faults: list[Exception] = []

    def failing(flow: Flow, now: float) -> float | None:
        if faults:
            raise faults.pop()
        return update(flow, now)

    monkeypatch.setattr(Flow, "update", failing)
    consumer = Consumer(
        "topic", "channel", str(nsqd.tcp_address), message_handler=lambda _, message: handled.append(message.body)
    )
    consumer.start(block=False)
    with Producer(str(nsqd.tcp_address)) as producer:
        producer.publish("topic", b"before")
        until(lambda: handled == [b"before"])
        consumer.pause()
        until(lambda: consumer.total_ready_count == 0)
        faults.append(Injected())
        consumer.resume()
        producer.publish("topic", b"after")
        until(lambda: handled == [b"before", b"after"])
    consumer.close()
    assert [kind for _, kind, _ in no_unseen_errors] == [Injected]
    no_unseen_errors.clear()


# The supervisor itself


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "FIRST_PAUSE", 0.001)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("fault", [Injected, RecursionError, Timeout, UnicodeError])
def test_pauses_grow_while_a_loop_fails_again_and_again(
    fault: type[BaseException], monkeypatch: pytest.MonkeyPatch, no_unseen_errors: list[Any]
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(greenlets, "sleep", pauses.append)
    told: list[Any] = []

    def body() -> None:
        if len(pauses) < 20:
            raise fault

    loop = Supervisor(logging.getLogger("test"), told.append).loop("the loop", body)
    loop.start()
    loop.join()
    assert pauses == sorted(pauses)
    assert pauses[-1] == port.LONGEST_PAUSE
    assert len(told) == 20
    assert str(told[0]).startswith("nsq_fast itself failed in the loop: ")
    no_unseen_errors.clear()


@pytest.mark.usefixtures("quick")
def test_who_is_told_may_fail(no_unseen_errors: list[Any]) -> None:
    def tell(error: Exception) -> None:
        raise Injected

    runs = []

    def body() -> None:
        runs.append(1)
        if len(runs) == 1:
            raise Injected

    Supervisor(logging.getLogger("test"), tell).loop("the loop", body).start()
    until(lambda: len(runs) == 2)
    no_unseen_errors.clear()


def test_a_job_that_fails_is_reported_and_has_no_value(no_unseen_errors: list[Any]) -> None:
    told: list[Any] = []
    supervisor = Supervisor(logging.getLogger("test"), told.append)
    job: Job = supervisor.job("the job", int, "no number")
    job.start()
    job.join()
    assert job.value is None
    (error,) = told
    assert isinstance(error.__cause__, ValueError)
    no_unseen_errors.clear()
    job = supervisor.job("the job", int, "7")
    job.start()
    assert job.get() == 7


def test_a_loop_that_is_killed_ends() -> None:
    loop = Supervisor(logging.getLogger("test")).loop("the loop", Event().wait)
    loop.start()
    gevent.sleep(0)
    loop.kill()
    assert loop.dead
