"""The same faults of a real nsqd and of the network to it, for each client in turn: what comes of its publishes, and
how soon it goes on. go-nsq is the peer that everybody knows; gnsq is asked where NSQ_FAST_PEER_PYTHON has it.

Each client publishes and consumes as its documents show, with its defaults, through a link of its own. nsqd is told to
end, and never killed, so that it loses nothing by itself.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from time import sleep, time
from typing import Any, NamedTuple

import pytest
from chaos.faults import Links
from support.servers import RealNsqd
from support.waiting import PROCESS, block_until, until

from nsq_fast import Consumer, Message
from nsq_fast.client.admin import NsqdHTTPClient

BESIDE = Path(__file__).parent / "beside"
WORKERS, PAUSE = 8, 0.02
CALM = 6.0
"""Seconds before the first fault, and after each: longer than the pauses of all clients between attempts to connect."""

SWALLOWED, REFUSED, FROZEN, AWAY = 8.0, 3.0, 3.0, 1.0


class Fault(NamedTuple):
    name: str
    ended_at: float


class Result(NamedTuple):
    """What came of one client. Of publishes unless it says otherwise."""

    client: str
    publishes: int
    ok: int
    refused: int
    refused_but_stored: int
    stored_twice: int
    lost: int
    silence: float
    handled: int
    handled_again: int
    silence_of_consumer: float


class Program:
    """A publisher or a consumer in a process of its own."""

    def __init__(self, command: list[str], role: str, address: str, topic: str) -> None:
        self._process = subprocess.Popen(
            [*command, role, address, topic, str(WORKERS), str(PAUSE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            text=True,
        )

    def end(self) -> list[tuple[int, str, float]]:
        said, _ = self._process.communicate("end\n", timeout=PROCESS)
        return [tuple(json.loads(line)) for line in said.splitlines()]

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def programs() -> Iterator[Callable[..., Program]]:
    started: list[Program] = []

    def start(*arguments: Any) -> Program:
        started.append(Program(*arguments))
        return started[-1]

    yield start
    for program in started:
        program.kill()


def clients(folder: Path) -> dict[str, list[str]]:
    """Client -> its program. Those that cannot be had here are left out."""
    program = str(BESIDE / "program.py")
    found = {"nsq_fast": [sys.executable, program, "nsq_fast"]}
    if shutil.which("go"):
        binary = folder / "beside_go"
        built = subprocess.run(["go", "build", "-o", str(binary), "."], cwd=BESIDE / "go_nsq", check=False)
        if built.returncode == 0:
            found["go-nsq"] = [str(binary)]
    peers = os.environ.get("NSQ_FAST_PEER_PYTHON")
    if peers and subprocess.run([peers, "-c", "import gnsq"], check=False).returncode == 0:
        found["gnsq"] = [peers, program, "gnsq"]
    return found


def faults(nsqd: RealNsqd, links: Links) -> Iterator[Fault]:
    """Every fault once, each with the time at which it was over."""
    names = ("publisher", "consumer")
    sleep(CALM)  # sleep: nothing is wrong
    for kind, seconds in (("cut", 0.0), ("blackhole", SWALLOWED), ("refuse", REFUSED)):
        for name in names:
            links.fault(name, kind)
        sleep(seconds)  # sleep: the fault
        for name in names:
            links.clear(name)
        yield Fault(kind, time())
        sleep(CALM)  # sleep: nothing is wrong
    nsqd.freeze()
    sleep(FROZEN)  # sleep: the fault
    nsqd.thaw()
    yield Fault("frozen", time())
    sleep(CALM)  # sleep: nothing is wrong
    nsqd.stop()
    sleep(AWAY)  # sleep: the fault
    nsqd.start()
    yield Fault("restarted", time())
    sleep(CALM)  # sleep: nothing is wrong


def stored_in(nsqd: RealNsqd, http: NsqdHTTPClient) -> Counter[int]:
    """How often nsqd has each message: on the channel that nobody has consumed."""
    found: Counter[int] = Counter()

    def count(consumer: Consumer, message: Message) -> None:
        found[int(message.body)] += 1

    with Consumer("t", "all", nsqd_tcp_addresses=[nsqd.address], max_in_flight=500, message_handler=count):
        until(lambda: waiting(http, "all") == 0)
    return found


def shown(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def waiting(http: NsqdHTTPClient, name: str) -> int:
    """Messages that a channel has, and nobody has finished."""
    [channel] = [each for each in http.stats(topic="t")["topics"][0]["channels"] if each["channel_name"] == name]
    return int(channel["depth"] + channel["in_flight_count"] + channel["deferred_count"])


def longest_silence(times: list[float], faults: list[Fault]) -> float:
    """Seconds from the end of a fault to the first good thing behind it, in the worst case."""
    return max(
        min((at for at in times if at > fault.ended_at), default=float("inf")) - fault.ended_at for fault in faults
    )


@pytest.mark.timeout(900)
def test_faults_beside_other_clients(
    wants_real: None,
    real_nsqd: Callable[..., RealNsqd],
    programs: Callable[..., Program],
    tmp_path: Path,
    printed: list[str],
) -> None:
    results = [
        tried(client, command, real_nsqd("-mem-queue-size=100000", "-msg-timeout=10s"), programs)
        for client, command in clients(tmp_path).items()
    ]
    rows = (Result._fields, ["---"] * len(Result._fields), *results)
    printed.extend(f"| {' | '.join(map(shown, row))} |" for row in rows)
    ours = results[0]
    assert (ours.refused, ours.lost, ours.handled) == (0, 0, ours.ok)
    assert ours.silence < CALM
    assert ours.silence_of_consumer < CALM


def tried(client: str, command: list[str], nsqd: RealNsqd, programs: Callable[..., Program]) -> Result:
    http = NsqdHTTPClient(nsqd.http.host, nsqd.http.port)
    http.create_topic("t")
    for channel in ("channel", "all"):
        http.create_channel("t", channel)
    with Links() as links:
        addresses = {name: str(links.open(name, nsqd.tcp_address)) for name in ("publisher", "consumer")}
        consumer = programs(command, "consume", addresses["consumer"], "t")
        publisher = programs(command, "publish", addresses["publisher"], "t")
        happened = list(faults(nsqd, links))
        published = publisher.end()
        block_until(lambda: waiting(http, "channel") == 0, "everything is consumed", PROCESS)
        handled = consumer.end()
    stored = stored_in(nsqd, http)
    nsqd.stop()
    ok = {number for number, outcome, _ in published if outcome == "OK"}
    others = {number for number, outcome, _ in published if outcome != "OK"}
    times_handled = Counter(number for number, _, _ in handled)
    return Result(
        client,
        publishes=len(published),
        ok=len(ok),
        refused=len(others),
        refused_but_stored=sum(1 for number in others if number in stored),
        stored_twice=sum(1 for count in stored.values() if count > 1),
        lost=sum(1 for number in ok if number not in stored),
        silence=longest_silence([at for _, outcome, at in published if outcome == "OK"], happened),
        handled=sum(1 for number in ok if number in times_handled),
        handled_again=sum(count - 1 for count in times_handled.values()),
        silence_of_consumer=longest_silence([at for _, _, at in handled], happened),
    )
