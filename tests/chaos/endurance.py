"""Very many messages through one producer and one consumer: nothing is lost, and memory and files stay level.

    PYTHONPATH=tests python -m chaos.endurance [--servers DIR] [--messages N] [--chunk N] [--state FILE]

A run may end at any moment and go on later: what it has done stands in the state file, a line for each chunk of
messages. Each program that adds to the file is a segment of its own, since another process begins with other memory.
The exit code is 1 when something grew.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from time import monotonic

import msgspec
from gevent import spawn
from gevent.event import Event

from nsq_fast._codec import Message
from nsq_fast.bench.results import Settings
from nsq_fast.bench.servers import embedded, from_folder
from nsq_fast.consumer import Consumer
from nsq_fast.errors import ConfigError, NsqError
from nsq_fast.names import Address
from nsq_fast.producer import Producer

from .invariants import Resources, growth

TOPIC, CHANNEL = "endurance", "all"
BATCH = 200
CHUNK_TIMEOUT = 600.0
FILLING = 2
"""Chunks at the start of a segment that fill what is kept for reuse."""

_NUMBER_BYTES = 8


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk that is done.

    Attributes:
        segment: number of the process, from 0; total: messages of all segments so far, each handled at least once.
        again: deliveries beyond the first, of this chunk.
        held: what the process has behind it.
    """

    segment: int
    total: int
    again: int
    seconds: float
    held: Resources


LEVEL = {"resident_kib": 8192, "files": 4, "greenlets": 8, "objects": 2000}
"""How much more of each the later half of a segment may hold than the earlier one, at its most."""


def load(path: Path) -> list[Sample]:
    """The samples of a file; none where there is no file. A last line that is cut off does not count.

    Raises ConfigError where it is the file of something else.
    """
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    try:
        return [msgspec.json.decode(line, type=Sample) for line in lines]
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no file of an endurance run: {error}") from error


def endure(nsqd: Address, messages: int, chunk: int, path: Path) -> Iterator[Sample]:
    """Go on with the run of a file until it has ``messages``; a sample for each chunk that is done.

    Raises NsqError when a message of a chunk does not come within ten minutes.
    """
    before = load(path)
    total = before[-1].total if before else 0
    segment = before[-1].segment + 1 if before else 0
    if path.exists():  # what was cut off would spoil the next line
        path.write_bytes(b"".join(msgspec.json.encode(sample) + b"\n" for sample in before))
    if total >= messages:
        return
    with _Flow(nsqd) as flow, path.open("ab") as file:
        while total < messages:
            began = monotonic()
            count = min(chunk, messages - total)
            again = flow.take(total, count)
            total += count
            taken = monotonic() - began
            sample = Sample(segment=segment, total=total, again=again, seconds=taken, held=Resources.now())
            file.write(msgspec.json.encode(sample) + b"\n")
            file.flush()
            yield sample


class _Flow:
    """A producer and a consumer of this process. Each message has its number; whether it has come is a byte."""

    def __init__(self, nsqd: Address) -> None:
        self._producer = Producer([nsqd])
        self._consumer = Consumer(TOPIC, CHANNEL, [nsqd], message_handler=self._handle, max_in_flight=2500)
        self._first = 0
        self._seen = bytearray()
        self._left = self._again = 0
        self._done = Event()

    def __enter__(self) -> _Flow:
        self._producer.start()
        self._consumer.start(block=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()
        self._producer.close()

    def take(self, first: int, count: int) -> int:
        """Publish messages of these numbers, and wait for all; how many came again. Raises NsqError."""
        self._first, self._seen, self._left, self._again = first, bytearray(count), count, 0
        self._done.clear()
        publishing = spawn(self._publish, first, count)
        if not self._done.wait(CHUNK_TIMEOUT):
            raise NsqError(f"{self._left} of {count} messages from number {first} on did not come in {CHUNK_TIMEOUT} s")
        publishing.get()
        return self._again

    def _publish(self, first: int, count: int) -> None:
        padding = b"x" * (200 - _NUMBER_BYTES)
        for begin in range(first, first + count, BATCH):
            numbers = range(begin, min(begin + BATCH, first + count))
            self._producer.multipublish(TOPIC, [each.to_bytes(_NUMBER_BYTES, "big") + padding for each in numbers])

    def _handle(self, consumer: Consumer, message: Message) -> None:
        place = int.from_bytes(message.body[:_NUMBER_BYTES], "big") - self._first
        if not 0 <= place < len(self._seen) or self._seen[place]:
            self._again += 1  # of an earlier chunk, or of this one once more
            return
        self._seen[place] = 1
        self._left -= 1
        if not self._left:
            self._done.set()


def grown(samples: Iterable[Sample]) -> Iterator[str]:
    for segment, found in groupby(samples, key=lambda sample: sample.segment):
        kept = [sample.held for sample in found][FILLING:]
        half = len(kept) // 2
        if half:
            yield from (f"segment {segment}: {text}" for text in growth(kept[:half], kept[half:], LEVEL))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=Path, help="a folder with nsqd; default: the embedded one")
    parser.add_argument("--messages", type=int, default=100_000_000)
    parser.add_argument("--chunk", type=int, default=250_000)
    parser.add_argument("--state", type=Path, default=Path("build/endurance.jsonl"))
    told = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped, too
    told.state.parent.mkdir(parents=True, exist_ok=True)
    source = from_folder(told.servers) if told.servers else embedded
    try:
        with source(Settings(kind="consume")) as server:
            sys.stderr.write(f"{server.name}; the state is kept in {told.state}\n")
            for sample in endure(server.nsqds[0], told.messages, told.chunk, told.state):
                sys.stderr.write(_line(sample) + "\n")
        samples = load(told.state)
    except NsqError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(_summary(samples) + "\n")
    problems = list(grown(samples))
    sys.stdout.write("\n".join(problems or ["nothing grew"]) + "\n")
    return 1 if problems else 0


def _line(sample: Sample) -> str:
    return f"{sample.total:,} messages, {sample.held}, {sample.held.objects:,} objects"


def _summary(samples: list[Sample]) -> str:
    seconds = sum(sample.seconds for sample in samples)
    again = sum(sample.again for sample in samples)
    segments = samples[-1].segment + 1
    return (
        f"{samples[-1].total:,} messages in {segments} segment{'' if segments == 1 else 's'} and {seconds:,.0f} s, "
        f"none lost, {again:,} delivered again"
    )


if __name__ == "__main__":
    raise SystemExit(main())
