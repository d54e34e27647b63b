"""Where a node of the embedded cluster differs from a real one on purpose: docs/broker.md. Each test runs on both.

What takes a cluster is in tests/servers/test_redesigned_on_purpose.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from gevent import socket
from support.http import ask
from support.redesigned import Consumer, headed, sized
from support.waiting import until
from support.wire import WireClient

from nsq_fast.broker.redesigned.cluster import NodeServer


def is_ours(node: Any) -> bool:
    return isinstance(node, NodeServer)


def publish(node: Any, *values: str) -> None:
    """A message for each value of the header ``k``; the body is the value, too."""
    client = WireClient(node.tcp_address)
    for value in values:
        assert client.command(b"PUB_EXT ext 0\n" + sized(headed({"k": value}, value.encode()))).startswith(b"OK")
    client.close()


def filtered(node: Any, kind: int, pattern: str) -> Consumer:
    """A consumer with a filter on the header ``k``: kind 2 is a regular expression, 3 a glob."""
    ext_filter = {"type": kind, "filter_ext_key": "k", "filter_data": pattern}
    return Consumer(node, "SUB ext ch 0", extend_support=True, ext_filter=ext_filter)


def test_an_empty_brace_at_the_end_kills_no_server_here(node: Any) -> None:
    consumer = filtered(node, 3, "a{")
    if is_ours(node):
        publish(node, "a")
        assert consumer.receive().data.endswith(b"a")
    else:
        client = WireClient(node.tcp_address)  # whether its OK comes is a matter of luck
        client.send(b"PUB_EXT ext 0\n" + sized(headed({"k": "a"}, b"a")))
        assert consumer.reader.read() == b""  # nsqd panics, and the process ends
        client.close()
        until(lambda: not accepts(node))
    consumer.close()


def accepts(node: Any) -> bool:
    try:
        socket.create_connection(node.tcp_address).close()
    except ConnectionRefusedError:
        return False
    return True


def test_delayed_messages_are_not_on_disk_here(node: Any) -> None:
    consumer = Consumer(node, "SUB t c 0")
    client = WireClient(node.tcp_address)
    assert client.command(b"PUB t 0\n" + sized(b"1")) == b"OK"
    consumer.requeue(consumer.receive(), 3_600_000)
    assert consumer.command(b"CLS\n") == b"CLOSE_WAIT"
    answer = ask(node.http_address, "GET", "/delayqueue/backupto?topic=t&partition=0")
    if is_ours(node):
        assert answer.status == 404
    else:
        assert answer.status == 200
        assert len(answer.body) > 4096  # a database
    consumer.close()
    client.close()


def test_what_runs_itself_on_real_servers_is_missing_here(node: Any) -> None:
    assert (ask(node.http_address, "GET", "/serverstats").status == 404) is is_ours(node)


def test_a_route_of_metrics_is_missing_here(node: Any) -> None:
    assert ask(node.http_address, "GET", "/metric").status == (404 if is_ours(node) else 200)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/debug/pprof/cmdline", 404),
        ("POST", "/loglevel/set?loglevel=2", 404),
        ("GET", "/config/log_level", 400),
    ],
)
def test_routes_of_a_nodes_runtime_are_missing_here(node: Any, method: str, path: str, status: int) -> None:
    assert ask(node.http_address, method, path).status == (status if is_ours(node) else 200)


def test_why_a_header_is_no_json_is_said_in_other_words_here(node: Any) -> None:
    client = WireClient(node.tcp_address)
    reply = client.command(b"PUB_EXT ext 0\n" + sized(headed(b"{", b"x")))
    client.close()
    assert reply.startswith(b"E_INVALID_JSON_HEADER fail to parse json header:cannot parse JSON: ")
    assert reply.endswith(b'unparsed tail: ""') is not is_ours(node)
