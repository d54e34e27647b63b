"""Another project's extension cimports the reader and the codec, with nothing but what the package ships."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import nsq_fast

OUTSIDE = '''
from libc.stdint cimport uint64_t

from nsq_fast._codec cimport LAYOUT_OK, MESSAGE_HEADER_SIZE, Message, MessageView, new_message, read_layout, read_u64
from nsq_fast._frame cimport ErrorFrame, FrameReader, Response


def summary(bytes stream):
    """Sum of the internal ids, bytes of bodies, and what else there was."""
    cdef FrameReader reader = FrameReader()
    cdef Message message
    cdef uint64_t total = 0
    cdef Py_ssize_t size = 0
    others = []
    for frame in reader.feed(stream, 1.5):
        if isinstance(frame, Message):
            message = frame
            total += read_u64(message._id)
            size += len(message.body)
            assert message.mark_responded() and not message.mark_responded()
        elif isinstance(frame, Response):
            others.append((<Response> frame).data.decode())
        else:
            others.append((<ErrorFrame> frame).data.decode())
    return total, size, reader.message_count, others


def decoded(const unsigned char[::1] data):
    cdef MessageView view
    if read_layout(&data[0], data.shape[0], False, True, &view) != LAYOUT_OK:
        return None
    return new_message(&view, True, None, 0.0), MESSAGE_HEADER_SIZE
'''

SETUP = """
from Cython.Build import cythonize
from setuptools import Extension, setup

extension = Extension("outside", ["outside.pyx"], extra_compile_args=["-O0"])
setup(ext_modules=cythonize([extension], compiler_directives={"language_level": 3}))
"""

USE = """
import json
import outside
from nsq_fast._codec import encode_frame, encode_message

id = (7).to_bytes(8, "big") + bytes(8)
frame = encode_message(1, 2, id, b"body", offset=5, raw_size=6)
stream = encode_message(1, 2, id, b"body") * 3 + encode_frame(0, b"OK") + encode_frame(1, b"E_X")
message, header = outside.decoded(frame[8:])
print(json.dumps([outside.summary(stream), message.offset, message.internal_id, header, outside.decoded(bytes(30))]))
"""


@pytest.mark.slow
def test_an_outside_extension(tmp_path: Path) -> None:
    pytest.importorskip("Cython")
    pytest.importorskip("setuptools")
    for name, text in (("outside.pyx", OUTSIDE), ("setup.py", SETUP), ("use.py", USE)):
        (tmp_path / name).write_text(text)
    root = str(Path(nsq_fast.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": root}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("setup.py", "build_ext", "--inplace")
    assert json.loads(run("use.py")) == [[21, 12, 3, ["OK", "E_X"]], 5, 7, 26, None]
