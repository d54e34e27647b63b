"""What looking for messages that have timed out costs: nsqd's random scan beside a plain loop over every channel.

    python bench/queue_scan.py [--channels N] [--seconds S] [--busy N]

Both look each 100 ms. It shows the share of a core that each takes while nothing happens, and how soon deferred
messages in ``busy`` of the channels are ready. While more than a quarter of the channels have some that are due, the
random scan goes on at once; below that it chooses 20 channels each 100 ms, as nsqd does.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager

import gevent
from rich.console import Console
from rich.table import Table

from nsq_fast.broker import NsqdOptions, NsqdServer
from nsq_fast.broker.message import Message, encode_frames
from nsq_fast.broker.nsqd.channel import Channel

INTERVAL = 0.1
DEFER = 1.0
READY_AFTER = (0.5, 2.0, 10.0)


@contextmanager
def running(plain: bool, count: int) -> Iterator[list[Channel]]:
    """An nsqd with so many channels, a topic for each hundred; ``plain``: scanned by a loop of ours alone."""
    server = NsqdServer(NsqdOptions(queue_scan_interval=1e6 if plain else INTERVAL))
    server.start()
    loop = None
    try:
        topics = [server.nsqd.get_topic(f"t{n}") for n in range(max(1, count // 100))]
        channels = [topics[n % len(topics)].get_channel(f"c{n}") for n in range(count)]
        loop = gevent.spawn(scan_all, channels) if plain else None
        gevent.sleep(2 * INTERVAL)
        yield channels
    finally:
        if loop is not None:
            loop.kill()
        server.stop()


def scan_all(channels: list[Channel]) -> None:
    while True:
        gevent.sleep(INTERVAL)
        now, wall_now = time.monotonic(), time.time()
        for channel in channels:
            channel.scan(now, wall_now)


def idle_share(channels: list[Channel], seconds: float) -> float:
    """The share of a core that the process takes while nothing happens."""
    before = time.process_time()
    gevent.sleep(seconds)
    return (time.process_time() - before) / seconds


def shares_ready(channels: list[Channel], busy: int) -> list[float]:
    """Which share of ``busy`` channels has its deferred message ready so many seconds after it was due."""
    due = time.time() + DEFER
    for channel in channels[:busy]:
        channel.backlog.defer(deferred_message(due))
    shares = []
    for seconds in READY_AFTER:
        gevent.sleep(due + seconds - time.time())
        shares.append(sum(channel.depth for channel in channels[:busy]) / busy)
    return shares


def deferred_message(due: float) -> Message:
    id = b"%016x" % time.time_ns()
    return Message(id, encode_frames([id], [b"x"], time.time_ns())[0], due=due)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--channels", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--busy", type=int, default=5_000)
    arguments = parser.parse_args()
    columns = [f"ready after {seconds:g} s" for seconds in READY_AFTER]
    table = Table("", "of a core, idle", *columns, title=f"{arguments.channels} channels, {arguments.busy} busy")
    for name, plain in (("random scan", False), ("plain loop", True)):
        with running(plain, arguments.channels) as channels:
            share = idle_share(channels, arguments.seconds)
            ready = shares_ready(channels, arguments.busy)
        table.add_row(name, f"{share:.2%}", *(f"{each:.0%}" for each in ready))
    Console().print(table)


if __name__ == "__main__":
    main()
