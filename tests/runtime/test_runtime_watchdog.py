"""Handlers that keep the hub from running are named while they do it; the thread ends with the consumers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import gevent
import pytest
from gevent.event import Event
from support.scripted_nsqd import ScriptedNsqd
from support.waiting import block_until, until

from nsq_fast import Consumer
from nsq_fast.runtime.consuming import watchdog as module
from nsq_fast.runtime.consuming.watchdog import WARN_AFTER, watchdog


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "kept the hub from running" in record.getMessage()]


def block_until_warned(caplog: pytest.LogCaptureFixture, count: int = 1) -> None:
    """Block the process, as an ordinary library does."""
    block_until(lambda: len(warnings(caplog)) >= count, "a warning")


def test_a_handler_that_blocks_is_named_while_it_does(nsqd: ScriptedNsqd, caplog: pytest.LogCaptureFixture) -> None:
    blocked: list[float] = []

    def handler(consumer: Consumer, message: object) -> None:
        began = time.monotonic()
        block_until_warned(caplog)
        blocked.append(time.monotonic() - began)

    with Consumer("t", "c", str(nsqd.address), message_handler=handler):
        connection = nsqd.connection()
        connection.push(1)
        connection.wait_for(lambda: connection.answered(b"FIN") == [1], 30)
    assert blocked[0] >= WARN_AFTER - 0.01
    (warning,) = warnings(caplog)
    assert "in block_until_warned" in warning
    assert "in handler" in warning
    assert "handler_threads=N" in warning
    assert "_handle_some" not in warning


def test_so_is_a_program_that_takes_messages_by_itself(nsqd: ScriptedNsqd, caplog: pytest.LogCaptureFixture) -> None:
    with Consumer("t", "c", str(nsqd.address)) as consumer:
        nsqd.connection().push(1)
        for _ in consumer:
            block_until_warned(caplog)
            break
    assert "in block_until_warned" in warnings(caplog)[0]


def test_a_handler_that_waits_with_gevent_is_not(
    nsqd: ScriptedNsqd, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WARN_AFTER", 0.1)

    def handler(consumer: Consumer, message: object) -> None:
        gevent.sleep(1)  # sleep: ten times as long as the limit

    with Consumer("t", "c", str(nsqd.address), message_handler=handler):
        connection = nsqd.connection()
        connection.push(1)
        connection.wait_for(lambda: connection.answered(b"FIN") == [1], 30)
    assert warnings(caplog) == []


def test_one_warning_a_minute(
    nsqd: ScriptedNsqd, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WARN_AFTER", 0.1)
    handled: list[object] = []

    def handler(consumer: Consumer, message: object) -> None:
        if handled:
            time.sleep(0.5)  # sleep: blocks five times as long as the limit
        else:
            block_until_warned(caplog)
        handled.append(message)

    with Consumer("t", "c", str(nsqd.address), message_handler=handler, max_in_flight=5):
        nsqd.connection().push(1, 2, 3)
        until(lambda: len(handled) == 3, 30)
    assert len(warnings(caplog)) == 1


def test_one_warning_tells_of_a_thread_with_several_consumers(
    nsqd: ScriptedNsqd, caplog: pytest.LogCaptureFixture
) -> None:
    def handler(consumer: Consumer, message: object) -> None:
        block_until_warned(caplog)
        time.sleep(2 * module.PAUSE)  # sleep: blocks; the others have been looked at by then

    address = str(nsqd.address)
    with (
        Consumer("u", "c", address, message_handler=lambda consumer, message: Event().wait()) as idle,
        Consumer("t", "c", address, message_handler=handler) as blocking,
    ):
        until(lambda: len(nsqd.connections) == 2 and all(each.rdy for each in nsqd.connections))
        for connection in sorted(nsqd.connections, key=lambda each: (b"SUB", b"t", b"c") in each.commands):
            connection.push(1)
        until(lambda: blocking.stats().totals.finished == 1)
        idle.close(drain=False)
    assert len(warnings(caplog)) == 1


def test_the_thread_ends_with_the_last_consumer(nsqd: ScriptedNsqd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_watches", [])  # without the consumers that other tests have left
    with Consumer("t", "c", str(nsqd.address), message_handler=lambda c, m: None):
        with Consumer("u", "c", str(nsqd.address), message_handler=lambda c, m: None):
            assert watchdog.is_running
        assert watchdog.is_running
    until(lambda: not watchdog.is_running)
    with Consumer("t", "c", str(nsqd.address), message_handler=lambda c, m: None):
        assert watchdog.is_running


PROGRAM = """
import logging, os, sys, time
{patch}
import gevent
from nsq_fast import Consumer
from nsq_fast.broker import Broker
from nsq_fast import Producer
logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format="%(message)s")
slow = get_original("time", "sleep")
with Broker() as broker:
    address = str(broker.nsqd.tcp_address)
    consumer = Consumer("t", "c", address, message_handler=lambda c, m: slow(2.5), max_in_flight=1)
    consumer.start(block=False)
    if os.fork():
        os.wait()
    else:
        consumer = Consumer("t", "c2", address, message_handler=lambda c, m: None)
        os._exit(0)
    with Producer(address) as producer:
        producer.publish("t", b"x")
    while not consumer.stats().totals.finished:
        gevent.sleep(0.01)  # sleep: looks again and again
    consumer.close()
print("done")
"""


@pytest.mark.parametrize("patch", ["", "from gevent import monkey; monkey.patch_all()"], ids=["unpatched", "patched"])
def test_it_works_in_programs_that_are_patched_and_that_fork(patch: str) -> None:
    program = PROGRAM.format(patch=f"{patch}\nfrom gevent.monkey import get_original")
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=40, env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("kept the hub from running") == 1
    assert done.stdout.endswith("done\n")
