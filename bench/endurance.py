"""A hundred million messages through one producer and one consumer: nothing is lost, and nothing grows.

    python bench/endurance.py [--servers DIR] [--messages N] [--chunk N] [--state FILE]

What is done stands in the state file: a run that was stopped, or killed, goes on where it was when it is started again.
The exit code is 1 when something grew.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from nsq_fast.bench.servers import embedded, from_folder
from nsq_fast.bench.settings import Settings
from nsq_fast.errors import NsqError
from nsq_fast.soak.endurance import Sample, endure, growth, load


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
    problems = list(growth(samples))
    sys.stdout.write("\n".join(problems or ["nothing grew"]) + "\n")
    return 1 if problems else 0


def _line(sample: Sample) -> str:
    return (
        f"{sample.total:,} messages, {sample.resident_kib / 1024:.1f} MiB, {sample.files} files, "
        f"{sample.greenlets} greenlets, {sample.objects:,} objects"
    )


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
