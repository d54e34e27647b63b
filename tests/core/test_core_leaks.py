"""Ten thousand messages come and go, and nothing of them stays."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from support.core import pieces

from nsq_fast import _codec
from nsq_fast._codec import Message, encode_frame, encode_message
from nsq_fast._frame import ColumnReader, FrameReader, join_columns
from nsq_fast.errors import RemoteProtocolError

COUNT = 10_000
ID = b"0123456789abcdef"
STREAM = b"".join(
    encode_message(n, 1, ID, b"x" * 200, ext_version=4, ext=b'{"k":"v"}', offset=n, raw_size=240) for n in range(COUNT)
) + encode_frame(1, b"E_FIN_FAILED x")
CHUNKS = pieces(STREAM, 65536)


class Responder:
    def finish(self, message: Message) -> None: ...


def read_messages() -> None:
    responder = Responder()
    reader = FrameReader(detail=True, ext=True, responder=responder)
    for chunk in CHUNKS:
        for frame in reader.feed(chunk):
            if isinstance(frame, Message):
                frame.finish()
                assert frame.headers == {"k": "v"}
    assert reader.buffered == 0


def read_columns() -> None:
    reader = ColumnReader(detail=True, ext=True)
    parts = [reader.feed(chunk) for chunk in CHUNKS]
    columns = join_columns(parts)
    assert columns.count == sum(part.count for part in parts) == COUNT
    assert len(_codec.fin_columns(columns.ids)) == 21 * COUNT
    assert _codec.req_columns(columns.ids, 0).endswith(b" 0\n")


def read_garbage() -> None:
    for n in range(COUNT // 10):
        for reader in (FrameReader(), ColumnReader()):
            reader.feed(STREAM[: 20 + n])
            reader.feed(STREAM[20 + n : 5000] + b"\xff" * 5000)
            with pytest.raises(RemoteProtocolError):
                reader.feed(b"")


def build_commands() -> None:
    bodies: list[Any] = [b"x" * 100, bytearray(100), memoryview(b"x" * 100)]
    for _ in range(COUNT // 10):
        _codec.mpub("t", bodies)
        _codec.mpub_ext("t", [(b"{}", body) for body in bodies])
        _codec.fin_many([ID] * 10)
        for bad in ([*bodies, None], None):
            with pytest.raises(TypeError):
                _codec.mpub("t", bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("work", [read_messages, read_columns, read_garbage, build_commands])
def test_nothing_stays(work: Callable[[], None]) -> None:
    work()  # caches fill
    gc.collect()
    before = len(gc.get_objects())
    tracemalloc.start()
    try:
        work()
        gc.collect()
        left = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(gc.get_objects()) - before < 50
    assert left < 20_000


def test_references_to_what_is_passed_around_balance() -> None:
    responder, body = Responder(), b"a body of its own"
    counts = sys.getrefcount(responder), sys.getrefcount(body), sys.getrefcount(None)
    frames = FrameReader(responder=responder).feed(STREAM[:65536])
    assert sys.getrefcount(responder) > counts[0] + 200
    del frames
    for _ in range(100):
        _codec.mpub("t", [body, body])
        _codec.pub_ext("t", body, body)
        Message(1, 1, ID, body, responder=responder)
    assert (sys.getrefcount(responder), sys.getrefcount(body)) == counts[:2]
    assert abs(sys.getrefcount(None) - counts[2]) < 50
