"""The compiled core: time per message, beside what plain Python takes for the same in the same run.

The workloads are those of `nsq-fast bench codec`. ``extra_info`` has nanoseconds per message and millions of messages
a second, from the fastest round.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from support.oracle import decode_plain

from nsq_fast import _codec
from nsq_fast._codec import Message
from nsq_fast.bench.core import MPUBS, SIZES, Workload, stream, workloads

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


@pytest.mark.parametrize("workload", workloads(), ids=lambda workload: f"{workload.group}: {workload.name}")
def test_core(benchmark: Any, workload: Workload) -> None:
    benchmark.group = workload.group
    measure(benchmark, workload.prepare, workload.count)


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


@pytest.mark.benchmark(group="MPUB")
@pytest.mark.parametrize(("count", "size"), MPUBS)
@pytest.mark.parametrize("how", ["generator", "bytearray", "join in Python"])
def test_mpub_of_others(benchmark: Any, count: int, size: int, how: str) -> None:
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
        "bytearray": lambda: _codec.mpub("topic", arrays),
        "generator": lambda: _codec.mpub("topic", (body for body in bodies)),
        "join in Python": join,
    }
    measure(benchmark, lambda: work[how], count, rounds=100)


@pytest.mark.benchmark(group="answers")
@pytest.mark.parametrize("how", ["ids", "one by one in Python"])
def test_fin_of_others(benchmark: Any, how: str) -> None:
    messages = [Message(1, 1, ID, b"") for _ in range(1000)]
    ids = [message.id for message in messages]
    work: dict[str, Callable[[], bytes]] = {
        "ids": lambda: _codec.fin_many(ids),
        "one by one in Python": lambda: b"".join([b"FIN " + message.id + b"\n" for message in messages]),
    }
    measure(benchmark, lambda: work[how], len(messages), rounds=100)
