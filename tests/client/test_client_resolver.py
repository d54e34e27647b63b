"""A fork in the middle of a lookup: it waits, since the child's lookups would find libc's locks taken for good."""

from __future__ import annotations

import subprocess

import pytest
from support.processes import FORKING_PYTHON
from support.waiting import PROCESS

PROGRAM = """
import os, threading
from nsq_fast.client import resolver

begun, ended = threading.Event(), threading.Event()

def name_server(*arguments):
    begun.set()
    ended.wait({seconds})
    ended.set()
    return []

def fork(failed):
    child = os.fork()
    if child == 0:
        resolver.getaddrinfo = lambda *arguments: []
        resolver.look_up("localhost", 1)  # nothing of the parent's keeps it
        os._exit(failed())
    assert os.waitpid(child, 0)[1] == 0

resolver.getaddrinfo = name_server
resolver.FORK_PATIENCE = {patience}
thread = threading.Thread(target=resolver.look_up, args=("localhost", 1))
thread.start()
begun.wait()
fork(lambda: {failed})
ended.set()
thread.join()
fork(lambda: False)  # in the parent, too, nothing is left of it
"""


@pytest.mark.fork
@pytest.mark.parametrize(
    ("seconds", "patience", "failed"),
    [(0.3, 60, "not ended.is_set()"), (None, 0.1, "ended.is_set()")],
    ids=["waits for it", "not for ever"],
)
def test_a_fork_waits_for_a_lookup(seconds: float | None, patience: float, failed: str) -> None:
    program = PROGRAM.format(seconds=seconds, patience=patience, failed=failed)
    done = subprocess.run(
        [*FORKING_PYTHON, "-c", program], capture_output=True, text=True, timeout=PROCESS
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
