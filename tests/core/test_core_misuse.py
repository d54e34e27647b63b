"""Misuse of the compiled modules from Python: an exception, whatever is called with whatever, and never a crash."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
from support.compiled import NAMES
from support.waiting import PROCESS

from nsq_fast._codec import HeldMessages, Message
from nsq_fast._frame import ColumnReader
from nsq_fast._snappy_chunks import SnappyChunks

CALL_ALL = """
import inspect, sys
from contextlib import suppress
from importlib import import_module

BLOCKING = {"wait"}
module = import_module(sys.argv[1])
ours = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]

def try_all(get):
    for wrong in (None, 0, b"", "", [], (None,), [None]):
        for count in range(7):
            with suppress(Exception):
                get()(*[wrong] * count)

for value in ours:
    if not inspect.isclass(value):
        try_all(lambda: value)
        continue
    for name in {"__init__", *(name for name in dir(value) if not name.startswith("__"))} - BLOCKING:
        print(value.__name__, name, flush=True)
        try_all(lambda: getattr(value.__new__(value), name))
print("all were called")
"""


@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_called_on_what_was_not_initialised_is_an_exception(name: str) -> None:
    command = [sys.executable, "-c", CALL_ALL, f"nsq_fast.{name}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS, check=False)
    last = (done.stdout.splitlines() or ["import"])[-1]
    assert (done.returncode, last) == (0, "all were called"), done.stderr[-2000:]


@pytest.mark.parametrize("wrong", [None, object(), b"x" * 16, 1], ids=["None", "object", "id", "int"])
@pytest.mark.parametrize("name", ["received", "keep"])
def test_what_is_held_is_messages(name: str, wrong: object) -> None:
    """Whatever is held is taken for a Message later; an embedder's list is looked at before anything is kept."""
    held, good = HeldMessages(), Message(1, 1, b"x" * 16, b"body")
    for messages in ([wrong], [good, wrong], [wrong, good]):
        with pytest.raises(TypeError, match="messages must hold Message, not"):
            getattr(held, name)(messages)
    assert (held.count, len(held), held.unanswered(), held.unreachable()) == (0, 0, [], [])


def test_nothing_compiled_is_unpickled() -> None:
    """It has sizes and places that must be its own."""
    columns = ColumnReader().feed(b"")
    for each in (columns, HeldMessages(), ColumnReader(), SnappyChunks(print)):
        with pytest.raises(TypeError):
            pickle.dumps(each)
        with pytest.raises((TypeError, AttributeError)):
            each.__setstate_cython__(())  # type: ignore[union-attr]
