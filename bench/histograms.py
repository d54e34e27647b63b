"""What `histograms=True` costs a consumer, in instructions of its process for a message.

Needs valgrind and faketime (both packages of Debian).

    python bench/histograms.py [--messages 20000] [--in-flight 100] [--rounds 2]

Instructions are counted by valgrind (callgrind) and not timed, so it does not matter what else the machine does. What
starting and ending takes is taken off by running the process with few messages, too. Its nsqd is a program that sends
as many messages at once as may be in flight, and the next ones when it has a FIN for each: so every run reads and
responds in the same portions.

Valgrind makes the process some fifty times slower. So faketime makes its clock as much slower, since what a consumer
does depends on how long handlers take. A sample is counted by itself: either none is due but the first, or one in each
portion. What remains is arithmetic, since a consumer takes a hundred samples a second at most.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from statistics import median

from instructions import FEW, VALGRIND, serve, slow_clock
from rich.console import Console

from nsq_fast import Consumer
from nsq_fast.client import handlers

RATES = (10_000, 100_000, 400_000)
PER_SECOND = 100
KINDS = {"off": None, "never": float("inf"), "each portion": 0.0}
"""What is compared -> the seconds between two samples; None: without histograms."""

console = Console(highlight=False)


# The consumer


def consume(port: int, kind: str, messages: int, in_flight: int) -> None:
    """What is counted: consume so many messages, and write how many were sampled."""
    every = KINDS[kind]
    handlers.EVERY = 0.0 if every is None else every
    left = messages

    def handle(consumer: Consumer, message: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            consumer.close(drain=False)

    address = f"127.0.0.1:{port}"
    consumer = Consumer(
        "topic", "channel", address, message_handler=handle, max_in_flight=in_flight, histograms=every is not None
    )
    consumer.start()
    times = consumer.stats().handler_time
    sys.stdout.write(f"samples: {times.count if times else 0}\n")


# The measurement


def counted(kind: str, messages: int, in_flight: int) -> tuple[int, int]:
    """Instructions of a whole process, and the samples that it took."""
    this = [sys.executable, __file__]
    with subprocess.Popen([*this, "--serve", str(messages), str(in_flight)], stdout=subprocess.PIPE, text=True) as nsqd:
        assert nsqd.stdout is not None
        port = nsqd.stdout.readline().strip()
        ended = subprocess.run(
            [*VALGRIND, *this, "--consume", port, kind, str(messages), str(in_flight)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": "0", **slow_clock()},
            check=False,
        )
    instructions = re.search(r"Collected : (\d+)", ended.stderr)
    samples = re.search(r"samples: (\d+)", ended.stdout)
    if not instructions or not samples:
        raise SystemExit(f"valgrind: exit code {ended.returncode}: {ended.stderr[-2000:]}")
    return int(instructions[1]), int(samples[1])


def per_message(kind: str, messages: int, in_flight: int) -> tuple[float, float]:
    """Instructions and samples for a message, without what starting and ending takes."""
    few, few_samples = counted(kind, FEW, in_flight)
    many, many_samples = counted(kind, FEW + messages, in_flight)
    return (many - few) / messages, (many_samples - few_samples) / messages


def main() -> None:
    """Print what was counted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--in-flight", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--serve", nargs=2, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--consume", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve)
    elif options.consume:
        port, kind, messages, in_flight = options.consume
        consume(int(port), kind, int(messages), int(in_flight))
    else:
        compare(options.messages, options.in_flight, options.rounds)


def compare(messages: int, in_flight: int, rounds: int) -> None:
    """Count each kind ``rounds`` times, in turn."""
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind, results in found.items():
            results.append(per_message(kind, messages, in_flight))
            console.print(f"{kind:14} {results[-1][0]:8.1f} instructions a message, {results[-1][1]:.4f} samples")
    off, never, each = (median(result[0] for result in results) for results in found.values())
    sample = (each - never) / found["each portion"][0][1]
    console.print(f"{in_flight} in flight: {off:.0f} without, {never / off - 1:+.2%} with; a sample: {sample:.0f}")
    for rate in RATES:
        with_samples = never + sample * PER_SECOND / rate
        console.print(f"at {rate:,} messages/s and {PER_SECOND} samples/s: {with_samples / off - 1:+.2%}")


if __name__ == "__main__":
    main()
