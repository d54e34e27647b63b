"""Exceptions that handlers of Unix signals raise in the middle of a call: every other thread goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from support.held_publishes import PublishNsqd
from support.processes import complaints
from support.waiting import PROCESS, WAIT, block_until
from support.wire import OK

from nsq_fast.errors import PublishFailed
from nsq_fast.threads import Consumer, Producer

INTERRUPTIONS = int(os.environ.get("NSQ_FAST_INTERRUPTIONS", "300"))
"""By timers, of each call. 10,000 take minutes."""

PACKAGE = str(Path(sys.modules["nsq_fast"].__file__ or "").parent)


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


def interrupt_at_lines(address: str) -> None:
    """Of each call, at each line in turn."""
    with Producer(address) as producer:
        for call in CALLS.values():
            call(producer)
            trace = AtLine(0)
            number = 0
            while trace.left <= 0:  # else it has fewer lines
                number += 1
                trace = AtLine(number)
                sys.settrace(trace)
                with suppress(Interrupted):
                    call(producer)
                sys.settrace(None)
                others_publish(producer)


def interrupt_by_timers(address: str) -> None:
    """Each call, at moments that nobody chose."""

    come: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        come.append(number)  # the timer itself is over before this runs
        raise Interrupted

    signal.signal(signal.SIGALRM, interrupt)
    with Producer(address) as producer:
        for call, number in product(CALLS.values(), range(INTERRUPTIONS)):
            come.clear()
            with suppress(Interrupted):
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + number % 37 * 1e-5)
                while not come:
                    with suppress(PublishFailed):  # as many are pending as may be
                        call(producer)
            if number % 20 == 0:
                others_publish(producer)
        others_publish(producer)


def interrupt_one_of_a_command() -> None:
    """A caller whose publish left with those of other threads, in one command that has no reply yet."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    def interrupt_main() -> None:
        block_until(lambda: nsqd.commands, "the command")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    signal.signal(signal.SIGALRM, interrupt)
    bodies = [b"%d" % number for number in range(8)]
    nsqd = PublishNsqd()
    options = {"linger": WAIT, "linger_max_messages": len(bodies) + 1}
    with Producer(nsqd.address, **options) as producer, ThreadPoolExecutor(len(bodies)) as pool:
        others = [pool.submit(producer.publish, "t", body) for body in bodies]
        threading.Thread(target=interrupt_main).start()
        with pytest.raises(Interrupted):
            producer.publish("t", b"interrupted")
        assert nsqd.bodies == [sorted([*bodies, b"interrupted"])]
        nsqd.react = lambda sock, _: sock.sendall(OK)
        nsqd.reply(0)
        assert [each.result(WAIT) for each in others] == [b"OK"] * len(bodies)
        after = [producer.publish_nowait("t", b"after") for _ in range(len(bodies) + 1)]
        assert [each.result(WAIT) for each in after] == [b"OK"] * (len(bodies) + 1)


WAYS: dict[str, Callable[..., None]] = {
    "lines": interrupt_at_lines,
    "timers": interrupt_by_timers,
    "one of a command": interrupt_one_of_a_command,
}


@pytest.mark.parametrize("way", ["lines", "timers"])
def test_an_exception_in_the_middle_of_a_call_harms_no_other(nsqd_process: Any, way: str) -> None:
    run_apart(way, nsqd_process.address)


def test_one_whose_caller_is_interrupted_leaves_the_others_of_its_command_alone() -> None:
    run_apart("one of a command")


def run_apart(*arguments: str) -> None:
    """In a process of its own, whose main thread, the one that handles signals, runs no hub of gevent."""
    folders = [str(Path(__file__).parent.parent), str(Path(PACKAGE).parent)]
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True, text=True, timeout=PROCESS + len(CALLS) * INTERRUPTIONS,
    )  # fmt: skip
    assert (done.returncode, complaints(done.stderr)) == (0, "")


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


def tell(unraisable: Any) -> None:
    """As the interpreter, but of interruptions that came in a finalizer, which nothing raised in it can leave."""
    if unraisable.exc_type is not Interrupted:
        sys.__unraisablehook__(unraisable)


if __name__ == "__main__":
    sys.unraisablehook = tell
    WAYS[sys.argv[1]](*sys.argv[2:])
