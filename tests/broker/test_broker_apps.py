"""The original's own programs work against the embedded broker unchanged."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.http import ask
from support.servers import SERVERS, find_server
from support.waiting import until

from nsq_fast.broker import BrokerProcess

TIMEOUT = 20


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(nsqds=2) as process:
        yield process


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start one of the original's programs, by name and arguments; ended after the test."""
    running: list[subprocess.Popen[str]] = []

    def make(name: str, *arguments: object) -> subprocess.Popen[str]:
        binary = find_server(name)
        if binary is None:
            pytest.skip(f"no {name} below {SERVERS}")
        pipe = subprocess.PIPE
        command = [str(binary), *map(str, arguments)]
        running.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        return running[-1]

    yield make
    for process in running:
        process.kill()
        process.communicate()


def post(address: Any, path: str, body: bytes = b"") -> None:
    assert ask(address, "POST", path, body).status == 200


def channel(address: Any, topic: str, name: str) -> Any:
    answer = ask(address, "GET", f"/stats?format=json&topic={topic}&channel={name}").json
    return answer["topics"] and answer["topics"][0]["channels"][0]


def is_looked_up(broker: BrokerProcess, topic: str) -> bool:
    return bool(ask(broker.lookupd.http, "GET", f"/lookup?topic={topic}").json.get("producers"))


def test_to_nsq_publishes_lines(broker: BrokerProcess, start: Callable[..., Any]) -> None:
    program = start("to_nsq", "-topic=to_nsq", f"-nsqd-tcp-address={broker.nsqd.tcp}")
    program.communicate("one\ntwo\nthree\n", timeout=TIMEOUT)
    assert program.returncode == 0
    topic = ask(broker.nsqd.http, "GET", "/stats?format=json&topic=to_nsq").json["topics"][0]
    assert (topic["message_count"], topic["message_bytes"]) == (3, 11)


def test_nsq_tail_finds_the_topic_and_prints_it(broker: BrokerProcess, start: Callable[..., Any]) -> None:
    post(broker.nsqd.http, "/mpub?topic=tailed", b"first\nsecond")
    until(lambda: is_looked_up(broker, "tailed"))
    program = start("nsq_tail", "-topic=tailed", f"-lookupd-http-address={broker.lookupd.http}", "-n=2")
    output, _ = program.communicate(timeout=TIMEOUT)
    assert sorted(output.split()) == ["first", "second"]
    assert program.returncode == 0


def test_nsq_to_file_writes_every_message(broker: BrokerProcess, start: Callable[..., Any], tmp_path: Path) -> None:
    bodies = [b"line %d" % number for number in range(1000)]
    post(broker.nsqd.http, "/mpub?topic=filed", b"\n".join(bodies))
    until(lambda: is_looked_up(broker, "filed"))
    program = start(
        "nsq_to_file", "-topic=filed", f"-lookupd-http-address={broker.lookupd.http}", f"-output-dir={tmp_path}"
    )

    def figures() -> Any:
        return channel(broker.nsqd.http, "filed", "nsq_to_file") or {"clients": []}

    until(lambda: sum(client["message_count"] for client in figures()["clients"]) == 1000)
    program.terminate()  # writes and finishes what it holds
    program.communicate(timeout=TIMEOUT)
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir()).splitlines()
    assert sorted(written) == sorted(bodies)
    until(lambda: figures()["client_count"] == 0)
    assert (figures()["depth"], figures()["in_flight_count"]) == (0, 0)


def test_nsq_stat_shows_a_channel(broker: BrokerProcess, start: Callable[..., Any]) -> None:
    post(broker.nsqd.http, "/topic/create?topic=statted")
    post(broker.nsqd.http, "/channel/create?topic=statted&channel=c")
    post(broker.nsqd.http, "/mpub?topic=statted", b"a\nb\nc")
    until(lambda: channel(broker.nsqd.http, "statted", "c")["depth"] == 3)
    for source in (f"-nsqd-http-address={broker.nsqd.http}", f"-lookupd-http-address={broker.lookupd.http}"):
        program = start("nsq_stat", "-topic=statted", "-channel=c", source, "-count=2", "-interval=50ms")
        output, errors = program.communicate(timeout=TIMEOUT)
        figures = [re.findall(r"\d+", line) for line in output.splitlines() if re.match(r"^\s*\d", line)]
        assert figures, (output, errors)
        assert figures[0] == ["0", "0", "3", "3", "0", "0", "0", "0", "0", "3", "0"]


def test_nsqadmin_shows_and_administers(broker: BrokerProcess, start: Callable[..., Any]) -> None:
    post(broker.nsqd.http, "/topic/create?topic=administered")
    post(broker.nsqd.http, "/channel/create?topic=administered&channel=c")
    post(broker.nsqd.http, "/mpub?topic=administered", b"a\nb\nc")
    until(lambda: is_looked_up(broker, "administered"))
    program = start("nsqadmin", "-http-address=127.0.0.1:0", f"-lookupd-http-address={broker.lookupd.http}")
    admin = None
    while admin is None:
        found = re.search(r"HTTP: listening on ([\d.]+):(\d+)", program.stderr.readline())
        admin = found and (found[1], int(found[2]))

    nodes = ask(admin, "GET", "/api/nodes").json["nodes"]
    assert sorted(node["tcp_port"] for node in nodes) == sorted(nsqd.tcp.port for nsqd in broker.nsqds)
    topic = ask(admin, "GET", "/api/topics/administered").json
    assert (topic["message_count"], topic["channels"][0]["channel_name"], topic["depth"]) == (3, "c", 0)
    assert ask(admin, "GET", "/api/topics/administered/c").json["depth"] == 3
    node = ask(admin, "GET", f"/api/nodes/{broker.nsqd.http}").json
    assert "administered" in [item["topic_name"] for item in node["topics"]]

    action = json.dumps({"action": "pause"}).encode()
    assert ask(admin, "POST", "/api/topics/administered/c", action).status == 200
    assert channel(broker.nsqd.http, "administered", "c")["paused"]
    assert ask(admin, "DELETE", "/api/topics/administered").status == 200
    assert ask(broker.nsqd.http, "GET", "/stats?format=json&topic=administered").json["topics"] is None
    assert "administered" not in ask(broker.lookupd.http, "GET", "/topics").json["topics"]


def test_the_originals_nsqd_registers_at_our_lookupd(broker: BrokerProcess, real_nsqd: Callable[..., Any]) -> None:
    nsqd = real_nsqd(f"-lookupd-tcp-address={broker.lookupd.tcp}")
    ask(nsqd.http_address, "POST", "/topic/create?topic=real")
    ask(nsqd.http_address, "POST", "/channel/create?topic=real&channel=c")
    (producer,) = until(lambda: ask(broker.lookupd.http, "GET", "/lookup?topic=real").json.get("producers"))
    assert (producer["tcp_port"], producer["http_port"]) == (nsqd.tcp_address.port, nsqd.http_address.port)
    until(lambda: ask(broker.lookupd.http, "GET", "/channels?topic=real").json["channels"] == ["c"])
    # A topic that is new to it gets the channels that others have, which it asks our nsqlookupd for.
    post(broker.nsqd.http, "/topic/create?topic=ours")
    post(broker.nsqd.http, "/channel/create?topic=ours&channel=elsewhere")
    until(lambda: ask(broker.lookupd.http, "GET", "/channels?topic=ours").json["channels"])
    ask(nsqd.http_address, "POST", "/topic/create?topic=ours")
    assert channel(nsqd.http_address, "ours", "elsewhere")
    nsqd.stop()
    until(lambda: not ask(broker.lookupd.http, "GET", "/lookup?topic=real").json["producers"])


def test_our_nsqd_registers_at_the_originals_lookupd(real_lookupd: Callable[..., Any]) -> None:
    lookupd = real_lookupd()
    with BrokerProcess(lookupd=False, lookupd_tcp_addresses=[str(lookupd.tcp_address)]) as process:
        until(lambda: ask(lookupd.http_address, "GET", "/nodes").json["producers"])
        post(process.nsqd.http, "/topic/create?topic=t")
        post(process.nsqd.http, "/channel/create?topic=t&channel=c")
        (producer,) = until(lambda: ask(lookupd.http_address, "GET", "/lookup?topic=t").json.get("producers"))
        assert (producer["tcp_port"], producer["http_port"]) == (process.nsqd.tcp.port, process.nsqd.http.port)
        assert producer["broadcast_address"] == "127.0.0.1"
        post(process.nsqd.http, "/channel/delete?topic=t&channel=c")
        post(process.nsqd.http, "/topic/delete?topic=t")
        until(lambda: not ask(lookupd.http_address, "GET", "/lookup?topic=t").json["producers"])
