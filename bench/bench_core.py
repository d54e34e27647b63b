"""The compiled core: time per message or per call, beside what plain Python takes for the same in the same run.

``make bench`` runs it. The decoders read a stream of 64 KiB chunks, as a connection receives it; ``extra_info`` has
nanoseconds per message and millions of messages a second, from the fastest round.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from support.core import LAYOUTS, layout_id, pieces
from support.oracle import decode_plain

from nsq_fast import _codec
from nsq_fast._codec import Message, encode_message
from nsq_fast._frame import ColumnReader, FrameReader

CHUNK = 65536
ID = b"0123456789abcdef"
SIZES = [100, 200, 1024, 16384]
STREAM_SIZE = 2 << 20


def stream(size: int, detail: bool = False, ext: bool = False) -> tuple[list[bytes], int]:
    """Chunks of about 2 MiB of messages with bodies of ``size`` bytes, and how many messages that is."""
    count = STREAM_SIZE // (size + 34)
    message = encode_message(
        1_700_000_000_000_000_000, 1, ID, b"x" * size,
        ext_version=4 if ext else None, ext=b'{"##trace_id":"77"}' if ext else b"",
        offset=1000 if detail else None, raw_size=240 if detail else None,
    )  # fmt: skip
    return pieces(message * count, CHUNK), count


def measure(benchmark: Any, work: Callable[[], object], count: int, rounds: int = 30) -> None:
    """Time ``work``, which handles ``count`` messages."""
    benchmark.pedantic(work, rounds=rounds, iterations=1, warmup_rounds=2)
    if benchmark.stats is not None:
        fastest = benchmark.stats.stats.min
        benchmark.extra_info["ns_per_message"] = round(fastest / count * 1e9, 1)
        benchmark.extra_info["million_per_s"] = round(count / fastest / 1e6, 2)


def feed(make_reader: Callable[[], FrameReader | ColumnReader], chunks: list[bytes], count: int) -> Callable[[], None]:
    def work() -> None:
        reader = make_reader()
        got = 0
        for chunk in chunks:
            got += len(reader.feed(chunk))
        assert got == count

    return work


@pytest.mark.benchmark(group="decode")
@pytest.mark.parametrize("size", SIZES)
def test_decode_messages(benchmark: Any, size: int) -> None:
    chunks, count = stream(size)
    responder = object()
    measure(benchmark, feed(lambda: FrameReader(responder=responder), chunks, count), count)


@pytest.mark.benchmark(group="decode")
@pytest.mark.parametrize("size", SIZES)
def test_decode_oracle(benchmark: Any, size: int) -> None:
    chunks, count = stream(size)

    def work() -> None:
        got, rest = 0, b""
        for chunk in chunks:
            messages, rest = decode_plain(rest + chunk)
            got += len(messages)
        assert got == count

    measure(benchmark, work, count, rounds=10)


@pytest.mark.benchmark(group="decode")
@pytest.mark.parametrize("size", SIZES)
def test_decode_columns(benchmark: Any, size: int) -> None:
    chunks, count = stream(size)
    measure(benchmark, feed(ColumnReader, chunks, count), count)


@pytest.mark.benchmark(group="layouts, 200 bytes")
@pytest.mark.parametrize("reader_type", [FrameReader, ColumnReader], ids=["messages", "columns"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_id)
def test_decode_layout(benchmark: Any, reader_type: Any, layout: tuple[bool, bool]) -> None:
    detail, ext = layout
    chunks, count = stream(200, detail, ext)
    measure(benchmark, feed(lambda: reader_type(detail=detail, ext=ext), chunks, count), count)


@pytest.mark.benchmark(group="mpub")
@pytest.mark.parametrize(("count", "size"), [(10, 200), (200, 200), (1000, 100), (2000, 1000)])
@pytest.mark.parametrize("how", ["mpub", "generator", "bytearray", "join"])
def test_mpub(benchmark: Any, count: int, size: int, how: str) -> None:
    bodies: list[Any] = [b"x" * size] * count
    if how == "bytearray":
        bodies = [bytearray(size) for _ in range(count)]
    pack = struct.Struct(">I").pack

    def join() -> bytes:
        parts = [pack(count)]
        for body in bodies:
            parts += (pack(len(body)), body)
        data = b"".join(parts)
        return b"MPUB topic\n" + pack(len(data)) + data

    work: dict[str, Callable[[], bytes]] = {
        "mpub": lambda: _codec.mpub("topic", bodies),
        "bytearray": lambda: _codec.mpub("topic", bodies),
        "generator": lambda: _codec.mpub("topic", (body for body in bodies)),
        "join": join,
    }
    assert work[how]()[:11] == b"MPUB topic\n"
    measure(benchmark, work[how], count, rounds=300)


@pytest.mark.benchmark(group="fin")
@pytest.mark.parametrize("how", ["fin_many", "fin_many of ids", "fin each"])
def test_fin(benchmark: Any, how: str) -> None:
    count = 1000
    messages = [Message(1, 1, ID, b"") for _ in range(count)]
    ids = [message.id for message in messages]
    work: dict[str, Callable[[], bytes]] = {
        "fin_many": lambda: _codec.fin_many(messages),
        "fin_many of ids": lambda: _codec.fin_many(ids),
        "fin each": lambda: b"".join([b"FIN " + message.id + b"\n" for message in messages]),
    }
    assert len(work[how]()) == 21 * count
    measure(benchmark, work[how], count, rounds=300)


class Responder:
    """The least that an answer can cost."""

    def finish(self, message: Message) -> None:
        pass


@pytest.mark.benchmark(group="answer")
def test_finish(benchmark: Any) -> None:
    """What a message costs between the reader and the writer: claim the answer, call the responder."""
    responder = Responder()
    batches = [[Message(1, 1, ID, b"", responder=responder) for _ in range(1000)] for _ in range(60)]

    def work() -> None:
        for message in batches.pop():
            message.finish()

    measure(benchmark, work, 1000)


BODY = b"x" * 200
COMMANDS: dict[str, Callable[[], bytes]] = {
    "pub": lambda: _codec.pub("topic", BODY),
    "dpub": lambda: _codec.dpub("topic", 1000, BODY),
    "pub_trace": lambda: _codec.pub_trace("topic", 77, BODY, 1),
    "pub_ext": lambda: _codec.pub_ext("topic", b"{}", BODY, 1),
    "fin": lambda: _codec.fin(ID),
    "req": lambda: _codec.req(ID, 90_000),
    "touch": lambda: _codec.touch(ID),
    "rdy": lambda: _codec.rdy(2500),
    "encode_message": lambda: _codec.encode_message(1, 1, ID, BODY),
}


@pytest.mark.benchmark(group="commands")
@pytest.mark.parametrize("name", COMMANDS)
def test_command(benchmark: Any, name: str) -> None:
    command = COMMANDS[name]

    def work() -> None:
        for _ in range(1000):
            command()

    measure(benchmark, work, 1000, rounds=50)
