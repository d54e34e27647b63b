"""[TRACE] lines: the embedded nsqd and the real one write the same of traced messages, but for times and ports."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from gevent import sleep
from support.http import ask
from support.redesigned import Consumer, many, sized, traced
from support.waiting import until
from support.wire import WireClient

from nsq_fast.broker import RedesignedCluster

LINE = re.compile(r"\[TRACE\] .*")
NUMBERS = re.compile(r"(time:? |ts: |cost: |pri:)-?[1-9][0-9]*")
ADDRESS = re.compile(r"127\.0\.0\.1:[0-9]+")
CLIENT = re.compile(r"(CLIENT|from client )\([1-9][0-9]*\)")
# The ids of a real nsqd without a cluster begin at another number.
MESSAGE = re.compile(r"message ([0-9]+)")


class Traced(NamedTuple):
    """An nsqd with the topic ``t``, the channel ``c``, and the lines that it has logged."""

    node: Any
    lines: Callable[[], list[str]]

    def switch(self, what: str, **arguments: str) -> None:
        query = "&".join(f"{name}={value}" for name, value in arguments.items())
        answer = ask(self.node.http_address, "POST", f"/message/trace/{what}?{query}")
        assert (answer.status, answer.body) == (200, b"")

    def command(self, command: bytes) -> None:
        client = WireClient(self.node.tcp_address)
        assert client.command(command).startswith(b"OK")
        client.close()

    def deliveries(self) -> list[str]:
        """The lines about deliveries of the channel ``c``, as far as they are not the same in each."""
        start = "[TRACE] topic t channel c trace id "
        found = [line.removeprefix(start) for line in masked(self.lines()) if line.startswith(start)]
        return [re.sub(r"at time: N cost: (N|0), ", "", line.replace(" consume state ", " ")) for line in found]


@pytest.fixture(params=["embedded", "real"])
def traced_node(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> Iterator[Traced]:
    if request.param == "real":
        server = request.getfixturevalue("standalone_nsqd")
        server.create_topic("t")
        yield Traced(server, lambda: LINE.findall((tmp_path / "nsqd.INFO").read_text()))
    else:
        with caplog.at_level(logging.INFO, "nsq_fast.broker.redesigned.channel"), RedesignedCluster(1, 1) as cluster:
            cluster.create_topic("t", channels=["c"])
            yield Traced(cluster.nsqds[0], lambda: [line for line in caplog.messages if LINE.match(line)])


def masked(lines: list[str]) -> list[str]:
    """Lines without what is different each time."""
    ids = [int(found[1]) for line in lines if (found := MESSAGE.search(line))]
    lines = [MESSAGE.sub(lambda found: f"message {int(found[1]) - min(ids)}", line) for line in lines]
    return [CLIENT.sub(r"\1(ID)", ADDRESS.sub("CLIENT", NUMBERS.sub(r"\1N", line))) for line in lines]


def put(offset: int, message: int, count: int, trace_id: int = 0) -> str:
    return (
        f"[TRACE] topic t-0 trace id {trace_id}: message {message}( 0) put PUB at offset: {offset},"
        f" current count: {count} at time N, delayed: 0"
    )


def success(offset: int, message: int, trace_id: int = 0) -> str:
    return (
        f"[TRACE] topic t-0 trace id {trace_id}: message {message} put success from client CLIENT"
        f" at offset: {offset}, at time N"
    )


def test_what_is_published_with_a_trace_id_is_traced(traced_node: Traced) -> None:
    traced_node.command(b"PUB t 0\n" + sized(b"not traced"))
    traced_node.command(b"PUB_TRACE t 0\n" + sized(traced(77, b"x")))
    traced_node.command(b"MPUB_TRACE t 0\n" + many(traced(8, b"x"), traced(9, b"y")))
    expected = [put(40, 0, 2, 77), success(40, 0, 77), put(71, 1, 3, 8), put(102, 2, 4, 9)]
    until(lambda: len(traced_node.lines()) >= 4)
    lines = [line for line in traced_node.lines() if " put " in line]
    assert masked(lines) == expected


def test_a_topic_is_traced_while_that_is_on(traced_node: Traced) -> None:
    traced_node.switch("enable", topic="t")
    traced_node.command(b"PUB t 0\n" + sized(b"x"))
    traced_node.command(b"MPUB t 0\n" + many(b"x", b"y"))
    assert ask(traced_node.node.http_address, "POST", "/pub?topic=t&partition=0", b"x").status == 200
    traced_node.switch("disable", topic="t")
    traced_node.command(b"PUB t 0\n" + sized(b"x"))
    expected = [put(0, 0, 1), success(0, 0), put(31, 1, 2), put(62, 2, 3), put(93, 3, 4), success(93, 3)]
    until(lambda: masked(traced_node.lines()) == expected)


def test_deliveries_of_a_message_with_a_trace_id_are_traced(traced_node: Traced) -> None:
    traced_node.command(b"PUB_TRACE t 0\n" + sized(traced(77, b"x")))
    consumer = Consumer(traced_node.node, "SUB t c 0", msg_timeout=60_000)
    consumer.requeue(consumer.receive())
    consumer.requeue(consumer.receive(), 10)
    consumer.finish(consumer.receive())
    message = "77: message 0 (ts: N, offset: 0, pri:"
    expected = [
        f"{message}0) READ_QUEUE from client 0(0) attempt: 0",
        f"{message}N) START from client CLIENT(ID) attempt: 1",
        f"{message}N) REQ from client CLIENT(0) attempt: 1",
        f"{message}N) READ_REQ from client 0(0) attempt: 1",
        f"{message}N) START from client CLIENT(ID) attempt: 2",
        f"{message}N) REQ_DEFER from client CLIENT(ID) attempt: 2",
        f"{message}N) REQ from client 0(0) attempt: 2",
        f"{message}N) DELAY_TIMEOUT from client (0) attempt: 2",
        f"{message}N) READ_REQ from client 0(0) attempt: 2",
        f"{message}N) START from client CLIENT(ID) attempt: 3",
        f"{message}N) FIN from client CLIENT(ID) attempt: 3",
    ]
    until(lambda: len(traced_node.deliveries()) >= len(expected))
    assert traced_node.deliveries() == expected
    consumer.close()


def test_a_channel_is_traced_while_that_is_on(traced_node: Traced) -> None:
    consumer = Consumer(traced_node.node, "SUB t c 0", rdy=0)
    traced_node.switch("enable", topic="t", channel="c")
    traced_node.switch("enable", topic="t", channel="none")
    traced_node.switch("enable", topic="none")
    traced_node.switch("enable")
    traced_node.command(b"PUB t 0\n" + sized(b"x"))
    consumer.send(b"RDY 1\n")
    frame = consumer.receive()
    path = f"/message/finish?topic=t&partition=0&channel=c&msgid={int.from_bytes(frame.id[:8], 'big')}"
    assert ask(traced_node.node.http_address, "POST", path).status == 200
    message = "0: message 0 (ts: N, offset: 0, pri:"
    expected = [
        f"{message}0) READ_QUEUE from client 0(0) attempt: 0",
        f"{message}N) START from client CLIENT(ID) attempt: 1",
        f"{message}N) FIN_INTERNAL from client (ID) attempt: 1",
    ]
    until(lambda: traced_node.deliveries() == expected)
    traced_node.switch("disable", topic="t", channel="c")
    traced_node.command(b"PUB t 0\n" + sized(b"not traced"))
    consumer.finish(consumer.receive())
    consumer.close()
    assert len(traced_node.lines()) == len(expected)


def test_a_timeout_is_logged_of_any_message(traced_node: Traced) -> None:
    traced_node.command(b"PUB t 0\n" + sized(b"x"))
    consumer = Consumer(traced_node.node, "SUB t c 0", msg_timeout=1000)
    consumer.receive()
    consumer.finish(consumer.receive())
    message = "0: message 0 (ts: N, offset: 0, pri:N) TIMEOUT from client CLIENT(0) attempt: 1"
    until(lambda: traced_node.deliveries() == [message])
    consumer.close()


def test_a_slow_fin_is_logged_where_that_is_on(traced_node: Traced) -> None:
    traced_node.switch("enable", topic="t", channel="c", slow="true")
    consumer = Consumer(traced_node.node, "SUB t c 0")
    traced_node.command(b"PUB t 0\n" + sized(b"fast"))
    consumer.finish(consumer.receive())
    traced_node.command(b"PUB t 0\n" + sized(b"slow"))
    frame = consumer.receive()
    sleep(1.05)  # sleep: a FIN is slow after a second
    consumer.finish(frame)
    slow = "0: message 0 (ts: N, offset: 34, pri:N) SLOW_ACK from client CLIENT(ID) attempt: 1"
    until(lambda: traced_node.deliveries() == [slow])
    consumer.close()


def test_what_a_node_traces_ends_with_it_and_is_not_known_to_others() -> None:
    with RedesignedCluster(2, 1, kind=True, move_step=0.0) as cluster:
        cluster.create_topic("t", 1, 2, channels=["c"])
        partition, leader = cluster.partition("t", 0), cluster.leader_of("t", 0)
        assert ask(leader.http_address, "POST", "/message/trace/enable?topic=t").status == 200
        assert ask(leader.http_address, "POST", "/message/trace/enable?topic=t&channel=c").status == 200
        assert (partition.trace.is_on, "c" in partition.trace.channels) == (True, True)
        cluster.move_leader("t", 0)
        assert (partition.trace.is_on, "c" in partition.trace.channels) == (False, False)
        cluster.move_leader("t", 0)
        assert (partition.trace.is_on, "c" in partition.trace.channels) == (True, True)
        cluster.restart_node(leader)
        until(lambda: len(partition.in_sync) == 2)
        if cluster.leader_of("t", 0) is not leader:
            cluster.move_leader("t", 0, leader)
        assert (partition.trace.is_on, "c" in partition.trace.channels) == (False, False)
