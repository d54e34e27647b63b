"""The Reply that a thread waits for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.waiting import PROCESS, WAIT

from nsq_fast.runtime import Reply

ROOT = Path(__file__).parent.parent.parent


def test_a_signal_is_handled_by_the_thread_that_waits() -> None:
    program = f"""
import signal, sys
sys.path.insert(0, {str(ROOT)!r})
from nsq_fast.runtime import Reply
reply = Reply()
signal.signal(signal.SIGALRM, lambda *_: reply.set())
signal.setitimer(signal.ITIMER_REAL, 0.05)
assert reply.wait({WAIT})
signal.signal(signal.SIGALRM, lambda *_: sys.exit(7))
signal.setitimer(signal.ITIMER_REAL, 0.05)
Reply().wait()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PROCESS)
    assert (done.returncode, done.stderr) == (7, "")


def test_a_reply_may_be_waited_for_again() -> None:
    reply = Reply(blocks_thread=True)
    assert not reply.wait(0.0)
    reply.set("value")
    assert reply.wait(0.0)
    assert reply.wait(0.0)
    assert reply.get() == "value"
