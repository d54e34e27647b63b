"""A fault of ours in a background greenlet is logged and told, and ends nothing for good: shown for each loop there is.

The loops are found by reflection: a loop that is added, and is not at work in the scenario below, fails this file.
"""

from __future__ import annotations

import ast
import gc
import logging
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest
from gevent.event import Event
from support.sources import parsed
from support.waiting import WAIT, until

import nsq_fast
from nsq_fast import ConfigDocument, Consumer, Message, Producer
from nsq_fast.broker import LookupdServer, NsqdOptions, NsqdServer
from nsq_fast.client.greenlets import Loop
from nsq_fast.errors import InternalError

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
    """Every call of a function or method ``name`` in client/ and runtime/."""
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
