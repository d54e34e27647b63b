"""What partitions and order cost: on one redesigned nsqd, in one run.

    python bench/ordered.py [--server embedded|real] [--count N] [--rounds N]

    ordered    one ordered partition: our consumer against a bare socket loop that sends FIN and waits for the next
    consume    a topic of three partitions found by lookup, against one partition of a named nsqd
    publish    the same for publishes: MPUB of 200, from 100 greenlets, and one at a time

Each client runs in a process of its own; clients take turns, several rounds. The
real server is an nsqd and an nsqlookupd without a cluster (NSQ_FAST_SERVERS).
Only ratios of one run mean anything.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from rich.console import Console
from rich.table import Table

from nsq_fast import _codec
from nsq_fast.names import Address

CHANNEL = "bench"
TIMEOUT = 300
TOPICS = {"ordered": 1, "parts": 3, "plain": 1}
PUBLISH_SHARE = {"mpub": 1, "greenlets": 10, "single": 50}


class Servers(NamedTuple):
    """Where it runs."""

    name: str
    nsqd: Address
    lookupd: Address


# The clients, each in a process of its own.


class Meter:
    """Clocks the messages after the first ones."""

    def __init__(self, count: int) -> None:
        self.left = count
        self._clocked = count - count // 10
        self._began = self._cpu = 0.0
        self.is_done = False

    def tick(self) -> bool:
        """Count one message; whether it was the last."""
        self.left -= 1
        if self.left == self._clocked:
            self.start()
        if self.left == 0:
            self.report(self._clocked)
        return self.left == 0

    def start(self) -> None:
        """Begin to clock."""
        self._began, self._cpu = time.perf_counter(), cpu_seconds()

    def report(self, messages: int) -> None:
        """Print the result."""
        seconds, cpu = time.perf_counter() - self._began, cpu_seconds() - self._cpu
        sys.stdout.write(json.dumps({"messages": messages, "seconds": seconds, "cpu_seconds": cpu}) + "\n")
        sys.stdout.flush()


def cpu_seconds() -> float:
    """CPU time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def floor_ordered(told: dict[str, Any]) -> None:
    """A bare socket loop: read one message, send its FIN, wait for the next."""
    meter = Meter(told["count"])
    sock = socket.create_connection(told["nsqd"])
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(b"  V2" + _codec.sub_ordered(told["topic"], CHANNEL, 0) + b"RDY 1\n")
    header = struct.Struct(">ii")
    buffer, done = b"", False
    while not done:
        while len(buffer) < 8 or len(buffer) < 4 + header.unpack_from(buffer)[0]:
            data = sock.recv(65536)
            if not data:
                raise SystemExit("closed by the server")
            buffer += data
        size, kind = header.unpack_from(buffer)
        if kind == 2:
            sock.sendall(b"FIN " + buffer[18:34] + b"\n")
            done = meter.tick()
        buffer = buffer[4 + size :]


def consume(told: dict[str, Any]) -> None:
    """Our consumer with a trivial handler."""
    from nsq_fast import Consumer

    meter = Meter(told["count"])

    def handle(consumer: Any, message: Any) -> None:
        if meter.tick():
            consumer.close(drain=False)

    options = {"max_in_flight": told["max_in_flight"], "ordered": told.get("ordered")}
    where: dict[str, Any] = _where(told)
    Consumer(told["topic"], CHANNEL, message_handler=handle, **where, **options).start()


def publish(told: dict[str, Any]) -> None:
    """Our producer."""
    import gevent

    from nsq_fast import Producer

    body, topic, count = b"x" * told["size"], told["topic"], told["count"]
    meter = Meter(count)

    def many(producer: Any, messages: int) -> None:
        for _ in range(messages):
            producer.publish(topic, body)

    where: dict[str, Any] = _where(told)
    with Producer(**where) as producer:
        producer.publish(topic, body)
        meter.start()
        if told["mode"] == "single":
            many(producer, count)
        elif told["mode"] == "greenlets":
            gevent.joinall([gevent.spawn(many, producer, count // 100) for _ in range(100)])
        else:
            for _ in range(count // 200):
                producer.multipublish(topic, [body] * 200)
        meter.report(count)


def _where(told: dict[str, Any]) -> dict[str, Any]:
    if told["found"] == "lookup":
        return {"lookupd_http_addresses": [":".join(map(str, told["lookupd"]))]}
    return {"nsqd_tcp_addresses": [tuple(told["nsqd"])]}


CLIENTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "floor_ordered": floor_ordered,
    "consume": consume,
    "publish": publish,
}


# The servers.


@contextlib.contextmanager
def embedded() -> Iterator[Servers]:
    """A cluster of one node."""
    from nsq_fast.broker import ClusterProcess

    with ClusterProcess(nodes=1, lookupds=1) as cluster:
        for topic, partitions in TOPICS.items():
            kind = {"ordered": True} if topic == "ordered" else {"multi_part": True}
            cluster.create_topic(topic, partitions, 1, channels=[CHANNEL], **kind)
        yield Servers("embedded cluster of one node", cluster.nsqd.tcp, cluster.lookupd.http)


@contextlib.contextmanager
def real() -> Iterator[Servers]:
    """A real nsqd and nsqlookupd of the redesigned, without a cluster."""
    from support.cluster import Standalone

    with tempfile.TemporaryDirectory() as path:
        standalone = Standalone(Path(path))
        try:
            with socket.create_connection(standalone.tcp_address) as sock:
                sock.sendall(b"  V2")
                for topic, partitions in TOPICS.items():
                    for partition in range(partitions):
                        sock.sendall(_codec.internal_create_topic(topic, partition))
                        expect_ok(sock)
            for topic, partitions in TOPICS.items():
                for partition in range(partitions):
                    create_channel(standalone.tcp_address, topic, partition)
            yield Servers("real nsqd without a cluster", standalone.tcp_address, standalone.lookupd_address)
        finally:
            standalone.stop()


def create_channel(address: Address, topic: str, partition: int) -> None:
    """Create the channel, which begins where the topic ends now."""
    with socket.create_connection(address) as sock:
        sock.sendall(b"  V2" + _codec.sub(topic, CHANNEL, partition))
        expect_ok(sock)


def fill(address: Address, topic: str, count: int, size: int) -> None:
    """Publish to all partitions of a topic, evenly."""
    batches = [_codec.mpub(topic, [b"x" * size] * 1000, partition) for partition in range(TOPICS[topic])]
    with socket.create_connection(address) as sock:
        sock.sendall(b"  V2")
        for number in range(-(-count // 1000)):
            sock.sendall(batches[number % len(batches)])
            expect_ok(sock)


def expect_ok(sock: socket.socket) -> None:
    """Read an OK."""
    reply = sock.recv(10, socket.MSG_WAITALL)
    if reply != struct.pack(">ii", 6, 0) + b"OK":
        raise SystemExit(f"nsqd answered {reply!r}")


# The rounds.


def plan(args: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Group and name of each client, what it is told; the first of a group is what the others are compared with."""
    rest = {"size": args.size, "max_in_flight": 2500}
    ordered = {**rest, "topic": "ordered", "count": args.count // 10}
    yield "ordered", "bare socket: FIN and wait", {**ordered, "client": "floor_ordered"}
    ours = {"client": "consume", "found": "address", "ordered": True, "max_in_flight": 1}
    yield "ordered", "nsq_fast, ordered", {**ordered, **ours}
    for topic, found in (("plain", "address"), ("parts", "lookup")):
        name = "one nsqd, by address" if topic == "plain" else "3 partitions, by lookup"
        told = {**rest, "topic": topic, "found": found}
        yield "consume", name, {**told, "client": "consume", "count": args.count}
        for mode, share in PUBLISH_SHARE.items():
            yield f"publish {mode}", name, {**told, "client": "publish", "mode": mode, "count": args.count // share}


def run(servers: Callable[[], Any], args: argparse.Namespace) -> tuple[str, dict[str, dict[str, list[dict[str, Any]]]]]:
    """Every client in every round, each on servers of its own."""
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    where = ""
    for _ in range(args.rounds):
        for group, name, told in plan(args):
            if args.only and not group.startswith(args.only):
                continue
            with servers() as found:
                where = found.name
                if told["client"] != "publish":
                    fill(found.nsqd, told["topic"], told["count"] + 1000 * TOPICS[told["topic"]], args.size)
                told = {**told, "nsqd": list(found.nsqd), "lookupd": list(found.lookupd)}
                results.setdefault(group, {}).setdefault(name, []).append(run_client(told))
    return where, results


def run_client(told: dict[str, Any]) -> dict[str, Any]:
    """One client in a process of its own."""
    command = [sys.executable, __file__, "--client", json.dumps(told)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            return dict(json.loads(line))
    raise SystemExit(f"{told} gave no result:\n{done.stderr[-2000:]}")


def show(where: str, results: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    """Medians, and ratios to the first of each group."""
    table = Table(title=where)
    for column in ("", "client", "messages/s", "spread", "CPU us/message", "rate x", "CPU x"):
        table.add_column(column, justify="left" if column in ("", "client") else "right")
    for group, clients in results.items():
        first: tuple[float, float] | None = None
        for name, rounds in clients.items():
            rates = [each["messages"] / each["seconds"] for each in rounds]
            rate = statistics.median(rates)
            cpu = statistics.median(each["cpu_seconds"] / each["messages"] * 1e6 for each in rounds)
            first = first or (rate, cpu)
            spread = (max(rates) - min(rates)) / rate
            ratios = (f"{rate / first[0]:.2f}", f"{cpu / first[1]:.2f}")
            table.add_row(group, name, f"{rate:,.0f}", f"{spread:.0%}", f"{cpu:.2f}", *ratios)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", choices=("embedded", "real"), default="embedded")
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=int, default=200)
    parser.add_argument("--only", help="ordered, consume, publish")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        told = json.loads(args.client)
        told["nsqd"] = tuple(told["nsqd"])
        CLIENTS[told["client"]](told)
        return
    show(*run(embedded if args.server == "embedded" else real, args))


if __name__ == "__main__":
    main()
