"""Compare clients on one nsqd in one run: messages/s, CPU per message, peak memory.

    python bench/macro.py consume|publish [--count N] [--rounds N] [--size N] [--json FILE]

Each client runs in a process of its own; clients take turns, several rounds;
the table shows medians with their spread, and ratios to the first client.
The server is a real nsqd where there is one (NSQ_FAST_SERVERS), else the
embedded broker. Peers run where they can be found: gnsq and pynsq in the
interpreter named by NSQ_FAST_PEER_PYTHON (default: this one), go-nsq where Go is.
Machines differ and are noisy: only ratios of one run mean anything.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

import socket  # noqa: E402

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from support.servers import RealNsqd, find_server  # noqa: E402

from nsq_fast import __version__, _codec  # noqa: E402

CLIENTS = HERE / "clients"
PEER_PYTHON = os.environ.get("NSQ_FAST_PEER_PYTHON", sys.executable)
CLIENT_TIMEOUT = 300


def available(kind: str) -> dict[str, list[str]]:
    """Name -> command line of each client that can run here, ours first."""
    clients = {"nsq_fast": [sys.executable, str(CLIENTS / f"{kind}_nsq_fast.py")]}
    go = build_go_client()
    if go is not None:
        clients["go-nsq"] = [str(go)]
    for peer, package in (("gnsq", "gnsq"), ("pynsq", "nsq")):
        program = CLIENTS / f"{kind}_{peer}.py"
        if program.exists() and importable(package):
            clients[peer] = [PEER_PYTHON, str(program)]
    if kind == "consume":
        clients["floor: bare socket"] = [sys.executable, str(CLIENTS / "floor_socket.py")]
    return clients


def importable(package: str) -> bool:
    return subprocess.run([PEER_PYTHON, "-c", f"import {package}"], capture_output=True, check=False).returncode == 0


def build_go_client() -> Path | None:
    if shutil.which("go") is None:
        return None
    target = Path(tempfile.gettempdir()) / "nsq_fast_bench_go_nsq"
    built = subprocess.run(["go", "build", "-o", target, "."], cwd=CLIENTS / "go_nsq", capture_output=True, check=False)
    return target if built.returncode == 0 else None


@contextlib.contextmanager
def server() -> Iterator[tuple[str, tuple[str, int]]]:
    """A fresh nsqd that keeps everything in memory: its description and TCP address."""
    if find_server("nsqd") is not None:
        with tempfile.TemporaryDirectory() as path:
            nsqd = RealNsqd(Path(path), "-mem-queue-size=10000000", "-max-rdy-count=10000")
            try:
                yield "real nsqd", nsqd.tcp_address
            finally:
                nsqd.kill()
        return
    from nsq_fast.broker import BrokerProcess

    with BrokerProcess() as broker:
        yield "embedded broker", broker.nsqds[0].tcp


def fill(address: tuple[str, int], topic: str, count: int, size: int) -> None:
    """Create the channel, then publish ``count`` bodies of ``size`` bytes."""
    with socket.create_connection(address) as sock:
        sock.sendall(b"  V2" + _codec.sub(topic, "bench"))
        expect_ok(sock)
    batch = _codec.mpub(topic, [b"x" * size] * 1000)
    with socket.create_connection(address) as sock:
        sock.sendall(b"  V2")
        for _ in range(count // 1000):
            sock.sendall(batch)
            expect_ok(sock)


def expect_ok(sock: socket.socket) -> None:
    reply = sock.recv(10, socket.MSG_WAITALL)
    if reply != struct.pack(">ii", 6, 0) + b"OK":
        raise SystemExit(f"nsqd answered {reply!r}")


def run_client(command: list[str], told: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        [*command, json.dumps(told)], capture_output=True, text=True, timeout=CLIENT_TIMEOUT, check=False
    )
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            return dict(json.loads(line))
    raise SystemExit(f"{command} gave no result:\n{done.stderr[-2000:]}")


def consume_rounds(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    for number in range(args.rounds):
        for name, command in available("consume").items():
            with server() as (_, address):
                topic = f"bench{number}"
                fill(address, topic, args.count, args.size)
                told = {
                    "nsqd": list(address),
                    "topic": topic,
                    "channel": "bench",
                    "count": args.count,
                    "warmup": args.count // 10,
                    "max_in_flight": args.max_in_flight,
                    "mode": "consume",
                }
                yield name, run_client(command, told)


def publish_rounds(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    counts = {"single": args.count // 50, "greenlets": args.count // 10, "mpub": args.count}
    for number in range(args.rounds):
        for mode, count in counts.items():
            for name, command in available("publish").items():
                with server() as (_, address):
                    told = {
                        "nsqd": list(address),
                        "topic": f"bench{number}",
                        "count": count,
                        "size": args.size,
                        "mode": mode,
                    }
                    yield f"{mode}: {name}", run_client(command, told)


def show(results: dict[str, list[dict[str, Any]]], title: str) -> None:
    table = Table(title=title)
    for column in ("client", "messages/s", "spread", "CPU us/message", "peak MiB", "rate x", "CPU x"):
        table.add_column(column, justify="left" if column == "client" else "right")
    base: dict[str, tuple[float, float]] = {}
    for name, rounds in results.items():
        rates = [r["messages"] / r["seconds"] for r in rounds]
        cpu = statistics.median(r["cpu_seconds"] / r["messages"] * 1e6 for r in rounds)
        rate = statistics.median(rates)
        first_rate, first_cpu = base.setdefault(name.partition(":")[0] if ": " in name else "", (rate, cpu))
        table.add_row(
            name,
            f"{rate:,.0f}",
            f"{(max(rates) - min(rates)) / rate:.0%}",
            f"{cpu:.3f}",
            f"{max(r['peak_kib'] for r in rounds) / 1024:.0f}",
            f"{first_rate / rate:.2f}",
            f"{cpu / first_cpu:.1f}",
        )
    Console().print(table)
    Console().print("rate x: how many times faster the first client is; CPU x: how many times its CPU this one takes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("consume", "publish"))
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=int, default=200)
    parser.add_argument("--max-in-flight", type=int, default=2500)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rounds = consume_rounds(args) if args.what == "consume" else publish_rounds(args)
    results: dict[str, list[dict[str, Any]]] = {}
    for name, result in rounds:
        results.setdefault(name, []).append(result)
    kind = "real nsqd" if find_server("nsqd") else "embedded broker"
    show(results, f"{args.what}: {args.size}-byte messages, {kind}, {args.rounds} rounds")
    if args.json:
        about = {
            "version": __version__,
            "python": platform.python_version(),
            "server": kind,
            "settings": {k: v for k, v in vars(args).items() if k != "json"},
        }
        args.json.write_text(json.dumps({**about, "results": results}, indent=1))


if __name__ == "__main__":
    main()
