"""Exceptions that handlers of Unix signals raise in the middle of a call: every other thread goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from support.waiting import PROCESS

from nsq_fast.errors import PublishFailed
from nsq_fast.threads import Consumer, Producer

INTERRUPTIONS = int(os.environ.get("NSQ_FAST_INTERRUPTIONS", "300"))
"""By timers, of each call. 10,000 take minutes."""

PACKAGE = str(Path(sys.modules["nsq_fast"].__file__ or "").parent)
WAIT = 30.0


class Interrupted(BaseException):
    """What a signal handler raises."""


class AtLine:
    """Raises at the ``number``-th line that the calling thread runs of nsq_fast."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise Interrupted
        return self


def others_publish(producer: Producer) -> None:
    """Every other thread still publishes."""
    results: list[Future[Any]] = []

    def publish(result: Future[Any]) -> None:
        result.set_result(producer.publish("t", b"of another thread"))

    for _ in range(3):
        results.append(Future())
        threading.Thread(target=publish, args=(results[-1],), daemon=True).start()
    assert not wait(results, WAIT).not_done, "other threads wait for ever"


CALLS: dict[str, Callable[[Producer], object]] = {
    "publish": lambda producer: producer.publish("t", b"one"),
    "publish with arguments": lambda producer: producer.publish("t", b"one", timeout=20.0),
    "publish_nowait": lambda producer: producer.publish_nowait("t", b"one"),
    "multipublish": lambda producer: producer.multipublish("t", [b"one", b"two"]),
    "stats": lambda producer: producer.stats(),
}


def interrupt_at_lines(address: str, call: str) -> None:
    """At each line in turn."""
    with Producer(address) as producer:
        CALLS[call](producer)
        trace = AtLine(0)
        number = 0
        while trace.left <= 0:  # else it has fewer lines
            number += 1
            trace = AtLine(number)
            sys.settrace(trace)
            with suppress(Interrupted):
                CALLS[call](producer)
            sys.settrace(None)
            others_publish(producer)


def interrupt_by_timers(address: str, call: str) -> None:
    """At moments that nobody chose."""

    come: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        come.append(number)  # the timer itself is over before this runs
        raise Interrupted

    signal.signal(signal.SIGALRM, interrupt)
    with Producer(address) as producer:
        CALLS[call](producer)
        for number in range(INTERRUPTIONS):
            come.clear()
            with suppress(Interrupted):
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + number % 37 * 1e-5)
                while not come:
                    with suppress(PublishFailed):  # as many are pending as may be
                        CALLS[call](producer)
            if number % 20 == 0:
                others_publish(producer)
        others_publish(producer)


WAYS = {"lines": interrupt_at_lines, "timers": interrupt_by_timers}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", CALLS)
def test_an_exception_in_the_middle_of_a_call_harms_no_other(nsqd_process: Any, way: str, call: str) -> None:
    # In a process of its own, whose main thread, the one that handles signals, runs no hub of gevent.
    folders = [str(Path(__file__).parent.parent), str(Path(PACKAGE).parent)]
    done = subprocess.run(
        [sys.executable, __file__, nsqd_process.address, way, call],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True, text=True, timeout=PROCESS + INTERRUPTIONS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_an_exception_at_any_line_of_finish_keeps_no_other_message(nsqd_process: Any) -> None:
    lines = 40
    with Producer(nsqd_process.address) as producer:
        producer.multipublish("t", [b"%d" % number for number in range(lines + 1)])
        with Consumer("t", "c", nsqd_process.address, max_in_flight=lines + 1) as consumer:
            for taken, message in enumerate(consumer, 1):
                trace = AtLine(taken)
                sys.settrace(trace)
                try:
                    message.finish()
                except Interrupted:
                    pass
                finally:
                    sys.settrace(None)
                if taken > lines:
                    break
            others_publish(producer)
            assert consumer.stats()


PROGRAM = """
import signal, sys
from nsq_fast.threads import Producer

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored for what runs in its background

with Producer(sys.argv[1]) as producer:
    print("begins", flush=True)
    while True:
        producer.publish("t", b"one")
"""


def test_programs_that_are_ended_by_ctrl_c_end(nsqd_process: Any) -> None:
    for number in range(8):
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM, nsqd_process.address], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as program:
            assert program.stdout is not None
            program.stdout.readline()
            threading.Event().wait(0.001 * number)
            program.send_signal(signal.SIGINT)
            _, said = program.communicate(timeout=PROCESS)
            assert b"KeyboardInterrupt" in said


if __name__ == "__main__":
    WAYS[sys.argv[2]](sys.argv[1], sys.argv[3])
