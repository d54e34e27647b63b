"""The compiled core in other interpreters of a process, and in many threads at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.threads import THREADS, in_threads

import nsq_fast
from nsq_fast._codec import encode_frame, encode_message
from nsq_fast._frame import ColumnReader, FrameReader

ID = b"0123456789abcdef"
ROUNDS = 200

# An interpreter of its own either runs the core, or refuses to import it with a reason; the first goes on in any case.
INTERPRETERS = """
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
from nsq_fast._codec import encode_message
from nsq_fast._frame import FrameReader

def frames():
    return len(FrameReader().feed(encode_message(1, 1, b"0123456789abcdef", b"body") * 10))

assert frames() == 10
code = '''
try:
    from nsq_fast._codec import encode_message
    from nsq_fast._frame import FrameReader
except ImportError as error:
    assert "interpreter" in str(error), error
else:
    assert len(FrameReader().feed(encode_message(1, 1, b"0123456789abcdef", b"body") * 10)) == 10
'''
for _ in range(3):
    other = interpreters.create()
    failed = (getattr(interpreters, "exec", None) or interpreters.run_string)(other, code)
    assert failed is None, failed
    interpreters.destroy(other)
    assert frames() == 10
print("went on")
"""


def test_another_interpreter_is_refused_with_a_reason_and_harms_nothing() -> None:
    path = {**os.environ, "PYTHONPATH": str(Path(nsq_fast.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", INTERPRETERS], capture_output=True, text=True, timeout=120, env=path)
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr


def test_threads_with_a_reader_each_do_not_disturb_one_another() -> None:
    def work(number: int) -> None:
        body = b"%d" % number * 100
        data = encode_message(1, 1, ID, body) * 20
        reader = FrameReader()
        for turn in range(ROUNDS):
            cut = 1 + turn % (len(data) - 1)
            messages = [*reader.feed(data[:cut]), *reader.feed(data[cut:])]
            assert [each.body for each in messages] == [body] * 20

    assert in_threads(work) == []


def test_threads_that_read_columns_do_not_disturb_one_another() -> None:
    """They decode without the interpreter's lock, so at the same time."""

    def work(number: int) -> None:
        data = encode_message(number, 1, ID, b"%d" % number * 100) * 200
        for _ in range(ROUNDS // 4):
            columns = ColumnReader().feed(data)
            assert columns.count == 200
            assert columns.body == b"%d" % number * 100 * 200

    assert in_threads(work) == []


def test_threads_that_share_a_reader_lose_no_frame() -> None:
    """Whole frames, so that it does not matter whose come first: each call gives back as many as it was fed."""
    reader, data = FrameReader(), encode_frame(0, b"OK") * 50
    counts: list[int] = []
    assert in_threads(lambda _: counts.extend(len(reader.feed(data)) for _ in range(ROUNDS))) == []
    assert counts == [50] * (THREADS * ROUNDS)
    assert reader.buffered == 0
