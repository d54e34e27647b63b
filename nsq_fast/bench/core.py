"""Workloads of the compiled core: nanoseconds per message for decoding, making commands, and responding.

The decoders read about 2 MiB in chunks of 64 KiB, as a connection receives it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter_ns

import msgspec

from nsq_fast import _codec
from nsq_fast._codec import Message, encode_message
from nsq_fast._frame import ColumnReader, FrameReader

from .results import CoreResult

CHUNK = 65536
STREAM_SIZE = 2 << 20
SIZES = (100, 200, 1024, 16384)
LAYOUTS = {
    "plain": (False, False),
    "detail": (True, False),
    "ext": (False, True),
    "detail and ext": (True, True),
}
MPUBS = ((10, 200), (200, 200), (1000, 100), (2000, 1000))
MANY = 1000
_ID = b"0123456789abcdef"
_TIMESTAMP = 1_700_000_000_000_000_000


class Workload(msgspec.Struct, frozen=True):
    """Something to time: ``prepare`` gives what to call once, which handles ``count`` messages."""

    group: str
    name: str
    count: int
    prepare: Callable[[], Callable[[], object]]


def stream(size: int, detail: bool = False, ext: bool = False) -> tuple[list[bytes], int]:
    """Chunks of messages with bodies of ``size`` bytes, and how many messages that is."""
    message = encode_message(
        _TIMESTAMP,
        1,
        _ID,
        b"x" * size,
        ext_version=4 if ext else None,
        ext=b'{"##trace_id":"77"}' if ext else b"",
        offset=1000 if detail else None,
        raw_size=240 if detail else None,
    )
    count = STREAM_SIZE // (size + 34)
    data = message * count
    return [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)], count


def decoding(make_reader: Callable[[], FrameReader | ColumnReader], chunks: list[bytes]) -> Callable[[], int]:
    """Work that reads the chunks with a new reader, and returns how many messages there were."""

    def work() -> int:
        reader = make_reader()
        return sum(len(reader.feed(chunk)) for chunk in chunks)

    return work


def _decode(group: str, name: str, reader_type: type, size: int, detail: bool = False, ext: bool = False) -> Workload:
    chunks, count = stream(size, detail, ext)
    return Workload(group, name, count, lambda: decoding(lambda: reader_type(detail=detail, ext=ext), chunks))


class _Responder:
    """A responder that does as little as possible."""

    def finish(self, message: Message) -> None:
        pass


def _answering() -> Callable[[], None]:
    responder = _Responder()
    messages = [Message(1, 1, _ID, b"", responder=responder) for _ in range(MANY)]

    def work() -> None:
        for message in messages:
            message.finish()

    return work


def _dispatching() -> Callable[[], int]:
    messages = [Message(1, 1, _ID, b"") for _ in range(MANY)]

    def handle(consumer: object, message: Message) -> None:
        pass

    def work() -> int:
        for message in messages:
            handle(None, message)
            message.has_responded()
        return len(messages)

    return work


def _batching(bodies: list[bytes]) -> Callable[[], bytes]:
    return lambda: _codec.mpub("topic", bodies)


def _repeated(command: Callable[[], bytes]) -> Callable[[], None]:
    def work() -> None:
        for _ in range(MANY):
            command()

    return work


def workloads() -> Iterator[Workload]:
    """All of them, those of a group together."""
    for size in SIZES:
        yield _decode("decode messages", f"{size:,} bytes", FrameReader, size)
    for size in SIZES:
        yield _decode("decode columns", f"{size:,} bytes", ColumnReader, size)
    for name, (detail, ext) in LAYOUTS.items():
        yield _decode("layouts, 200 bytes", name, FrameReader, 200, detail, ext)
    for count, size in MPUBS:
        bodies = [b"x" * size] * count
        yield Workload("MPUB", f"{count:,} x {size:,} bytes", count, partial(_batching, bodies))
    ids = [Message(1, 1, _ID, b"") for _ in range(MANY)]
    yield Workload("answers", "gather FINs", MANY, lambda: lambda: _codec.fin_many(ids))
    yield Workload("answers", "finish()", MANY, _answering)
    yield Workload("answers", "call a handler", MANY, _dispatching)
    body = b"x" * 200
    commands: dict[str, Callable[[], bytes]] = {
        "PUB": lambda: _codec.pub("topic", body),
        "FIN": lambda: _codec.fin(_ID),
        "REQ": lambda: _codec.req(_ID, 90_000),
        "RDY": lambda: _codec.rdy(2500),
    }
    for name, command in commands.items():
        yield Workload("commands", name, MANY, partial(_repeated, command))


def measure(rounds: int, repeats: int = 10) -> list[CoreResult]:
    """Time all workloads; a round is the fastest of ``repeats``."""
    return [
        CoreResult(group=each.group, name=each.name, ns_per_message=[_fastest(each, repeats) for _ in range(rounds)])
        for each in workloads()
    ]


def _fastest(workload: Workload, repeats: int) -> float:
    workload.prepare()()
    return min(_once(workload.prepare()) for _ in range(repeats)) / workload.count


def _once(work: Callable[[], object]) -> int:
    start = perf_counter_ns()
    work()
    return perf_counter_ns() - start
