"""What a message costs a consumer in instructions of its process, and whether that is more than at another commit; or
what ``histograms=True`` adds to it.

    python bench/instructions.py [--base COMMIT] [--histograms] [--messages 10000]

Instructions are counted by valgrind and not timed, so it does not matter what else the machine does. What starting and
ending takes is taken off by running the process with few messages, too. Its nsqd is a program that sends as many
messages at once as may be in flight, and the next ones when it has a FIN for each: so every run reads and responds in
the same portions. Publishes are not counted: how often a producer looks for a reply before it waits is up to the nsqd,
and two runs differ by half.

Valgrind makes the process some fifty times slower. So faketime makes its clock as much slower, since what a client does
depends on how long things take. Both are packages of Debian. Two runs are 1 % apart, on a machine that does ten other
things, too.

With ``--base`` that commit is built and counted here as well, with the same interpreter, compiler and libraries. The
exit code is 1 where a message costs 3 % more than there.

With ``--histograms`` a sample is counted by itself: either none is due but the first, or one in each portion. What
remains is arithmetic, since a consumer takes a hundred samples a second at most.
"""

from __future__ import annotations

import argparse
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

FEW = 2000
PORTION = 100
BODY = b"x" * 200
ALLOWED = 1.03
SLOWER = 50
ROOT = Path(__file__).resolve().parent.parent
KINDS = {"off": None, "never": float("inf"), "each portion": 0.0}
"""With histograms or without -> the seconds between two samples; None: without."""

RATES = (10_000, 100_000, 400_000)
SAMPLES_A_SECOND = 100


# The nsqd


def frame(kind: int, data: bytes) -> bytes:
    return struct.pack(">II", len(data) + 4, kind) + data


def serve(count: int, portion: int) -> None:
    """Print a port; send so many messages to who subscribes there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        sock, _ = listener.accept()
    with sock, sock.makefile("rb") as lines:
        lines.read(len(b"  V2IDENTIFY\n"))
        lines.read(struct.unpack(">I", lines.read(4))[0])
        sock.sendall(frame(0, b'{"version": "1.3.0", "max_rdy_count": 2500}'))
        lines.readline()  # SUB
        sock.sendall(frame(0, b"OK"))
        lines.readline()  # RDY
        for first in range(0, count, portion):
            numbers = range(first, first + portion)
            heads = [struct.pack(">qH16s", time.time_ns(), 1, b"%016d" % number) for number in numbers]
            sock.sendall(b"".join(frame(2, head + BODY) for head in heads))
            wait_for_fins(lines, portion)
        lines.read()


def wait_for_fins(lines: BinaryIO, count: int) -> None:
    """Read as many FINs, past other commands."""
    while count:
        line = lines.readline()
        if not line:
            raise SystemExit
        count -= line.startswith(b"FIN ")


# The client


def consume(port: int, count: int, kind: str) -> None:
    """What is counted."""
    from nsq_fast import Consumer

    options = {}
    if (every := KINDS[kind]) is not None:
        from nsq_fast.client import workers

        workers.SAMPLE_EVERY = every
        options["histograms"] = True
    left = count

    def handle(consumer: Consumer, message: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            consumer.close(drain=False)

    options |= {"message_handler": handle, "max_in_flight": PORTION}
    Consumer("topic", "channel", f"127.0.0.1:{port}", **options).start()


# The measurement


def slow_clock() -> dict[str, str]:
    """The environment in which time passes more slowly."""
    for library in Path("/usr/lib").glob("*/faketime/libfaketime.so.1"):
        return {"LD_PRELOAD": str(library), "FAKETIME": f"+0 x{1 / SLOWER}"}
    raise SystemExit("there is no libfaketime: apt-get install faketime")


def per_message(messages: int, where: Path = ROOT, kind: str = "off") -> float:
    """Instructions for a message, in a process that runs the code of a folder."""
    from nsq_fast.bench import runner  # not in that process

    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(where), **slow_clock()}
    this = [sys.executable, __file__]

    def run(count: int, words: list[str]) -> None:
        with subprocess.Popen([*this, "--serve", str(count), str(PORTION)], stdout=subprocess.PIPE, text=True) as nsqd:
            assert nsqd.stdout is not None
            client = [*this, "--consume", nsqd.stdout.readline().strip(), str(count), kind]
            done = subprocess.run(
                [*words, *client], env=environment, cwd=where, capture_output=True, text=True, check=False
            )
            nsqd.kill()
        if done.returncode:
            raise SystemExit(f"valgrind: exit code {done.returncode}: {done.stderr[-2000:]}")

    found = runner.per_message(run, FEW, FEW + messages)
    if found is None:
        raise SystemExit("nothing was counted")
    return found


def count_histograms(messages: int) -> None:
    off, never, each = (per_message(messages, kind=kind) for kind in KINDS)
    sample = (each - never) * PORTION
    text = f"{off:,.0f} without histograms, {never / off - 1:+.2%} with; a sample: {sample:,.0f}\n"
    for rate in RATES:
        with_samples = never + sample * SAMPLES_A_SECOND / rate
        text += f"at {rate:,} messages/s and {SAMPLES_A_SECOND} samples/s: {with_samples / off - 1:+.2%}\n"
    sys.stdout.write(text)


def is_well(messages: int, base: Path | None) -> bool:
    """Count, and say how much; whether that is not too much more than in ``base``."""
    now = per_message(messages)
    line, allowed = f"{now:,.1f} instructions a message", now
    if base is not None:
        before = per_message(messages, base)
        allowed = ALLOWED * before
        line += f", {before:,.1f} before: {now / before - 1:+.2%}"
    sys.stdout.write(line + "\n")
    return now <= allowed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", metavar="COMMIT", help="compare with this commit")
    parser.add_argument("--histograms", action="store_true", help="count what they add")
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--serve", nargs=2, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--consume", nargs=3, help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.serve:
        serve(*told.serve)
        return 0
    if told.consume:
        port, count, kind = told.consume
        consume(int(port), int(count), kind)
        return 0
    if told.histograms:
        count_histograms(told.messages)
        return 0
    if not told.base:
        return 0 if is_well(told.messages, None) else 1
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        subprocess.run(["git", "worktree", "add", "--detach", base, told.base], cwd=ROOT, check=True)
        try:
            build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
            subprocess.run(build, cwd=base, check=True)
            return 0 if is_well(told.messages, base) else 1
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", base], cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main())
