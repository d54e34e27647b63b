"""The compiled core: time per message, beside what plain Python takes for the same in the same run.

The decoders read about 2 MiB in chunks of 64 KiB, as a connection receives it. ``extra_info`` has nanoseconds per
message and millions of messages a second, from the fastest round.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from support.oracle import decode_plain

from nsq_fast import _codec
from nsq_fast._codec import Message, encode_message
from nsq_fast._frame import ColumnReader, FrameReader

CHUNK = 65536
STREAM_SIZE = 2 << 20
SIZES = (100, 200, 1024, 16384)
MPUBS = ((10, 200), (200, 200), (1000, 100), (2000, 1000))
MANY = 1000
ID = b"0123456789abcdef"


def measure(benchmark: Any, prepare: Callable[[], Callable[[], object]], count: int, rounds: int = 30) -> None:
    """Time what ``prepare`` gives, anew for each round; it handles ``count`` messages."""
    benchmark.pedantic(
        lambda work: work(), setup=lambda: ((prepare(),), {}), rounds=rounds, iterations=1, warmup_rounds=2
    )
    if benchmark.stats is not None:
        fastest = benchmark.stats.stats.min
        benchmark.extra_info["ns_per_message"] = round(fastest / count * 1e9, 1)
        benchmark.extra_info["million_per_s"] = round(count / fastest / 1e6, 2)


def stream(size: int, detail: bool = False, ext: bool = False) -> tuple[list[bytes], int]:
    """Chunks of messages with bodies of ``size`` bytes, and how many messages that is."""
    header: dict[str, Any] = {"ext_version": 4, "ext": b'{"##trace_id":"77"}'} if ext else {}
    header |= {"offset": 1000, "raw_size": 240} if detail else {}
    message = encode_message(1_700_000_000_000_000_000, 1, ID, b"x" * size, **header)
    count = STREAM_SIZE // (size + 34)
    data = message * count
    return [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)], count


def decode(benchmark: Any, reader_type: type, size: int, **layout: bool) -> None:
    chunks, count = stream(size, **layout)

    def prepare() -> Callable[[], object]:
        reader = reader_type(**layout)
        return lambda: [reader.feed(chunk) for chunk in chunks]

    measure(benchmark, prepare, count)


@pytest.mark.benchmark(group="decode messages")
@pytest.mark.parametrize("size", SIZES)
def test_decode_messages(benchmark: Any, size: int) -> None:
    decode(benchmark, FrameReader, size)


@pytest.mark.benchmark(group="decode messages")
@pytest.mark.parametrize("size", SIZES)
def test_decode_in_python(benchmark: Any, size: int) -> None:
    chunks, count = stream(size)

    def work() -> None:
        got, rest = 0, b""
        for chunk in chunks:
            messages, rest = decode_plain(rest + chunk)
            got += len(messages)
        assert got == count

    measure(benchmark, lambda: work, count, rounds=10)


@pytest.mark.benchmark(group="decode columns")
@pytest.mark.parametrize("size", SIZES)
def test_decode_columns(benchmark: Any, size: int) -> None:
    decode(benchmark, ColumnReader, size)


@pytest.mark.benchmark(group="layouts, 200 bytes")
@pytest.mark.parametrize("ext", [False, True], ids=["", "ext"])
@pytest.mark.parametrize("detail", [False, True], ids=["plain", "detail"])
def test_decode_layouts(benchmark: Any, detail: bool, ext: bool) -> None:
    decode(benchmark, FrameReader, 200, detail=detail, ext=ext)


@pytest.mark.benchmark(group="MPUB")
@pytest.mark.parametrize(("count", "size"), MPUBS)
@pytest.mark.parametrize("how", ["list", "generator", "bytearray", "join in Python"])
def test_mpub(benchmark: Any, count: int, size: int, how: str) -> None:
    bodies = [b"x" * size] * count
    arrays = [bytearray(size) for _ in range(count)]
    pack = struct.Struct(">I").pack

    def join() -> bytes:
        parts = [pack(count)]
        for body in bodies:
            parts += (pack(len(body)), body)
        data = b"".join(parts)
        return b"MPUB topic\n" + pack(len(data)) + data

    work: dict[str, Callable[[], bytes]] = {
        "list": lambda: _codec.mpub("topic", bodies),
        "bytearray": lambda: _codec.mpub("topic", arrays),
        "generator": lambda: _codec.mpub("topic", (body for body in bodies)),
        "join in Python": join,
    }
    measure(benchmark, lambda: work[how], count, rounds=100)


class Responder:
    """A responder that does as little as possible."""

    def finish(self, message: Message) -> None:
        pass


@pytest.mark.benchmark(group="answers")
@pytest.mark.parametrize("how", ["finish()", "call a handler", "messages", "ids", "one by one in Python"])
def test_answers(benchmark: Any, how: str) -> None:
    def prepare() -> Callable[[], object]:
        messages = [Message(1, 1, ID, b"", responder=Responder()) for _ in range(MANY)]
        ids = [message.id for message in messages]

        def handle(consumer: object, message: Message) -> None:
            pass

        def finish() -> None:
            for message in messages:
                message.finish()

        def dispatch() -> None:
            for message in messages:
                handle(None, message)
                message.has_responded()

        work: dict[str, Callable[[], object]] = {
            "finish()": finish,
            "call a handler": dispatch,
            "messages": lambda: _codec.fin_many(messages),
            "ids": lambda: _codec.fin_many(ids),
            "one by one in Python": lambda: b"".join([b"FIN " + message.id + b"\n" for message in messages]),
        }
        return work[how]

    measure(benchmark, prepare, MANY, rounds=100)


@pytest.mark.benchmark(group="commands")
@pytest.mark.parametrize("name", ["PUB", "FIN", "REQ", "RDY"])
def test_commands(benchmark: Any, name: str) -> None:
    body = b"x" * 200
    command: Callable[[], bytes] = {
        "PUB": lambda: _codec.pub("topic", body),
        "FIN": lambda: _codec.fin(ID),
        "REQ": lambda: _codec.req(ID, 90_000),
        "RDY": lambda: _codec.rdy(2500),
    }[name]

    def work() -> None:
        for _ in range(MANY):
            command()

    measure(benchmark, lambda: work, MANY)
