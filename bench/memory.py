"""Whether memory stays flat: one consumer, many messages, its resident memory on the way.

    python bench/memory.py [--count N] [--steps N] [--size N] [--max-in-flight N]

The server is a real nsqd where there is one (NSQ_FAST_SERVERS), else the
embedded broker. Each step publishes its share and waits until it is consumed,
so that the server needs no memory for all of them either. The consumer is in
this process; what it publishes with is a bare socket.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import gevent
from gevent import socket
from rich.console import Console
from rich.table import Table
from support.servers import RealNsqd, find_server

from nsq_fast import Consumer, _codec
from nsq_fast.broker import BrokerProcess

BATCH = 1000


@contextmanager
def server() -> Iterator[tuple[str, tuple[str, int]]]:
    """A fresh nsqd that keeps everything in memory: its description and TCP address."""
    if find_server("nsqd") is None:
        with BrokerProcess(lookupd=False, mem_queue_size=10_000_000) as broker:
            yield "embedded broker", broker.nsqd.tcp
        return
    with tempfile.TemporaryDirectory() as path:
        nsqd = RealNsqd(Path(path), "-mem-queue-size=10000000")
        try:
            yield "real nsqd", nsqd.tcp_address
        finally:
            nsqd.kill()


def fill(address: tuple[str, int], topic: str, count: int, size: int) -> None:
    """Publish ``count`` bodies of ``size`` bytes."""
    batch = _codec.mpub(topic, [b"x" * size] * BATCH)
    with socket.create_connection(address) as sock:
        sock.sendall(_codec.MAGIC_V2)
        for _ in range(count // BATCH):
            sock.sendall(batch)
            if not sock.recv(10).endswith(b"OK"):
                raise SystemExit("nsqd did not take a batch")


def resident_kib() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


class Counter:
    def __init__(self) -> None:
        self.seen = 0

    def handle(self, _consumer: object, _message: object) -> None:
        self.seen += 1


def measure(address: tuple[str, int], args: argparse.Namespace, table: Table) -> list[int]:
    """Consume step by step; the resident memory after each, in KiB."""
    counter = Counter()
    share = args.count // args.steps // BATCH * BATCH
    levels = []
    consumer = Consumer("bench", "bench", [address], max_in_flight=args.max_in_flight, message_handler=counter.handle)
    for step in range(1, args.steps + 1):
        consumer.pause()
        fill(address, "bench", share, args.size)
        began, cpu = time.perf_counter(), time.process_time()
        if step == 1:
            consumer.start(block=False)
        consumer.resume()
        while counter.seen < share * step:
            gevent.sleep(0.01)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        levels.append(resident_kib())
        table.add_row(
            f"{counter.seen:,}", f"{levels[-1] / 1024:.1f}", f"{share / seconds:,.0f}", f"{cpu / share * 1e6:.2f}"
        )
    consumer.close()
    return levels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5_000_000)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--size", type=int, default=200)
    parser.add_argument("--max-in-flight", type=int, default=2500)
    args = parser.parse_args()
    if args.steps < 2 or args.count // args.steps < BATCH:
        parser.error("at least 2 steps of 1000 messages are needed")
    with server() as (kind, address):
        table = Table(title=f"one consumer, {args.size}-byte messages, {kind}")
        for column in ("messages", "resident MiB", "messages/s", "CPU us/message"):
            table.add_column(column, justify="right")
        levels = measure(address, args, table)
    Console().print(table)
    growth = levels[-1] - levels[0]
    Console().print(f"grown by {growth / 1024:+.1f} MiB from the first step to the last")


if __name__ == "__main__":
    main()
