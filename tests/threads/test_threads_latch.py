"""A Latch: closed until it is opened, for good; and the Reply that a thread waits for in one."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.waiting import PROCESS, WAIT

from nsq_fast._latch import Latch, open_all
from nsq_fast.runtime import Reply

ROOT = Path(__file__).parent.parent.parent


def test_one_that_is_open_stays_open() -> None:
    latch = Latch()
    assert not latch.is_open
    assert not latch.wait(0.0)
    assert not latch.wait(-1.0)
    latch.open()
    latch.open()
    assert latch.is_open
    assert all(latch.wait(timeout) for timeout in (None, 0.0, WAIT, None))


@pytest.mark.parametrize("count", [0, 1, 2, 300])
def test_open_all_wakes_every_thread(count: int) -> None:
    latches = [Latch() for _ in range(count)]
    woken: list[bool] = []
    threads = [threading.Thread(target=lambda latch=latch: woken.append(latch.wait(WAIT))) for latch in latches * 2]
    for thread in threads:
        thread.start()
    open_all([*latches, *latches])
    for thread in threads:
        thread.join(WAIT)
    assert woken == [True] * len(threads)


def test_who_does_not_wait_again_keeps_none_of_those_that_were_woken_with_it() -> None:
    latches = [Latch() for _ in range(8)]
    all_woken = threading.Barrier(len(latches))

    def wait(latch: Latch) -> None:
        latch.wait(WAIT)
        all_woken.wait(WAIT)  # each of them goes on only when all were woken

    threads = [threading.Thread(target=wait, args=(latch,)) for latch in latches]
    for thread in threads:
        thread.start()
    open_all(latches)
    for thread in threads:
        thread.join(WAIT)
    assert not all_woken.broken


def test_open_all_takes_latches_only() -> None:
    with pytest.raises(TypeError):
        open_all(["latch"])  # type: ignore[list-item]


def test_a_signal_is_handled_by_the_thread_that_waits() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"""
import signal, sys
sys.path.insert(0, {str(ROOT)!r})
from nsq_fast._latch import Latch
latch = Latch()
signal.signal(signal.SIGALRM, lambda *_: latch.open())
signal.setitimer(signal.ITIMER_REAL, 0.05)
assert latch.wait({WAIT})
signal.signal(signal.SIGALRM, lambda *_: sys.exit(7))
signal.setitimer(signal.ITIMER_REAL, 0.05)
Latch().wait()
""",
        ],
        capture_output=True,
        text=True,
        timeout=PROCESS,
    )
    assert (done.returncode, done.stderr) == (7, "")


def test_a_reply_may_be_waited_for_again() -> None:
    reply = Reply(blocks_thread=True)
    assert not reply.wait(0.0)
    reply.set("value")
    assert reply.wait(0.0)
    assert reply.wait(0.0)
    assert reply.get() == "value"
