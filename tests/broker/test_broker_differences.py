"""Differences between the embedded and the real nsqd that were found once, each as a test of both."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from support.http import ask, exchange
from support.waiting import until
from support.wire import WireClient

from nsq_fast.broker import NsqdServer


def body(data: bytes, size: int | None = None) -> bytes:
    return struct.pack(">i", len(data) if size is None else size) + data


def mpub(count: int, messages: bytes, extra: bytes = b"") -> bytes:
    return b"MPUB t\n" + body(struct.pack(">i", count) + messages + extra)


def replies(client: WireClient, data: bytes, count: int) -> list[bytes]:
    client.send(data)
    return [client.frame().data for _ in range(count)]


def test_what_is_behind_the_messages_of_an_mpub_is_the_next_command(address: Any) -> None:
    data = mpub(1, body(b"a"), b"NOP\n") + b"PUB t\n" + body(b"b")
    assert replies(WireClient(address), data, 2) == [b"OK", b"OK"]
    data = mpub(1, body(b"a"), b"xyz") + b"NOP\n"
    assert replies(WireClient(address), data, 2) == [b"OK", b"E_INVALID invalid command xyzNOP"]


@pytest.mark.parametrize(
    "begin", [mpub(1, body(b"abc", 10)), mpub(2, body(b"a") + body(b"abc", 10)), mpub(2, body(b"a")), mpub(1, b"\0\0")]
)
def test_messages_of_an_mpub_may_reach_beyond_its_size(address: Any, begin: bytes) -> None:
    client = WireClient(address)
    missing = {
        mpub(1, b"\0\0"): b"\0\x01x",
        mpub(2, body(b"a")): body(b"x"),
    }.get(begin, b"1234567")
    client.send(begin)
    client.send(missing)
    assert client.frame().data == b"OK"
    client.publish("t", b"next")


@pytest.mark.parametrize("milliseconds", [10**23, 2**64 - 1, 2**63])
def test_numbers_overflow_as_those_of_go(address: Any, milliseconds: int) -> None:
    client = WireClient(address)
    client.send(b"DPUB t %d\n" % milliseconds + body(b"a"))
    shown = milliseconds % 2**64
    delay_ns = (shown * 10**6 + 2**63) % 2**64 - 2**63
    if 0 <= delay_ns <= 3600 * 10**9:
        assert client.frame().data == b"OK"
    else:
        assert client.frame().data == b"E_INVALID DPUB timeout %d out of range 0-3600000" % shown


@pytest.mark.parametrize(
    "client_id", [b"\\ud800x", b"x\\udc00", b"\xff\xfe", b"\\ud83d\\ude00"], ids=["high", "low", "bytes", "pair"]
)
def test_text_in_json_that_is_no_unicode_is_replaced(address: Any, client_id: bytes) -> None:
    client = WireClient(address)
    client.send(b"IDENTIFY\n" + body(b'{"client_id":"' + client_id + b'"}'))
    assert client.frame().data == b"OK"


@pytest.mark.parametrize(
    ("method", "path", "status", "location"),
    [
        ("GET", "//ping", 301, "/ping"),
        ("GET", "/a/../ping", 301, "/ping"),
        ("GET", "/./ping?x=%20", 301, "/ping?x=%20"),
        ("GET", "/stats/?format=json", 301, "/stats?format=json"),
        ("GET", "/STATS?format=json&a=b", 301, "/stats?format=json&a=b"),
        ("GET", "//stats//?x=1", 301, "/stats?x=1"),
        ("POST", "//pub?topic=t", 307, "/pub?topic=t"),
        ("POST", "/PUB/?topic=t", 307, "/pub?topic=t"),
        ("GET", "/Config//log_level", 301, "/config/log_level"),
        ("GET", "/config/LOG_level/", 301, "/config/LOG_level"),
        ("GET", "/CONFIG/Log_level", 301, "/config/Log_level"),
        ("GET", "/PUB/", 404, ""),
        ("GET", "//nothing", 404, ""),
    ],
)
def test_redirects_clean_the_path_and_keep_the_query(
    start_nsqd: Any, method: str, path: str, status: int, location: str
) -> None:
    request = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    head, _, text = exchange(start_nsqd().http_address, request.encode()).decode().partition("\r\n\r\n")
    assert int(head.split()[1]) == status
    found = [line.removeprefix("Location: ") for line in head.split("\r\n") if line.startswith("Location: ")]
    assert found == ([location] if location else [])
    if status == 301:
        assert text == f'<a href="{location.replace("&", "&amp;")}">Moved Permanently</a>.\n\n'


def figures(server: Any) -> tuple[int, int, int]:
    """Depth of the topic, depth of its channel, and how many of the channel's messages are deferred."""
    [topic] = ask(server.http_address, "GET", "/stats?format=json&topic=t").json["topics"]
    [channel] = topic["channels"]
    return topic["depth"], channel["depth"], channel["deferred_count"]


def post(server: Any, path: str, data: bytes = b"") -> None:
    assert ask(server.http_address, "POST", path, data).status == 200


def test_emptying_a_topic_takes_its_own_messages_and_those_only(start_nsqd: Callable[..., Any]) -> None:
    server = start_nsqd(mem_queue_size=3)
    post(server, "/topic/create?topic=t")
    post(server, "/channel/create?topic=t&channel=c")
    post(server, "/mpub?topic=t", b"\n".join([b"x"] * 11))
    until(lambda: figures(server) == (0, 11, 0))
    post(server, "/topic/pause?topic=t")
    post(server, "/mpub?topic=t", b"y\ny")
    until(lambda: figures(server) == (2, 11, 0))
    post(server, "/topic/empty?topic=t")
    until(lambda: figures(server) == (0, 11, 0))
    post(server, "/topic/unpause?topic=t")
    post(server, "/pub?topic=t", b"z")
    until(lambda: figures(server) == (0, 12, 0))
    client = WireClient(server.tcp_address)
    client.subscribe("t", "c", 12)
    assert sorted(client.frame().body for _ in range(12)) == [b"x"] * 11 + [b"z"]


def test_a_deferred_message_that_a_topic_has_kept_is_deferred_in_a_new_channel(start_nsqd: Callable[..., Any]) -> None:
    server = start_nsqd()
    post(server, "/pub?topic=t&defer=3600000", b"x")
    post(server, "/channel/create?topic=t&channel=c")
    until(lambda: figures(server) == (0, 0, 1))


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_deferred_message_needs_no_room(start_nsqd: Callable[..., Any], is_paused: bool) -> None:
    server = start_nsqd(mem_queue_size=3)
    post(server, "/topic/create?topic=t")
    post(server, "/channel/create?topic=t&channel=c")
    post(server, "/mpub?topic=t", b"x\nx\nx\nx\nx")
    until(lambda: figures(server) == (0, 5, 0))
    if is_paused:
        post(server, "/topic/pause?topic=t")
        post(server, "/mpub?topic=t", b"y\ny")
    post(server, "/pub?topic=t&defer=3600000", b"z")
    if is_paused:
        until(lambda: figures(server) == (3, 5, 0))
        post(server, "/topic/unpause?topic=t")
    until(lambda: figures(server) == (0, 7 if is_paused else 5, 1))


def test_what_commands_before_a_fatal_error_made_ready_arrives(start_nsqd: Callable[..., Any]) -> None:
    """From nsqd mostly: who comes first there is chance."""
    address = start_nsqd().tcp_address

    def arrives() -> bool:
        client = WireClient(address)
        client.send(b"SUB t c\nRDY 1\nPUB t\n" + body(b"x") + b"XYZ\n")
        kinds = []
        while not kinds or kinds[-1] != 1:
            kinds.append(client.frame().type)
        client.close()
        return 2 in kinds

    until(arrives)


def test_a_client_with_a_fatal_error_leaves_its_channel_at_once(start_nsqd: Callable[..., Any]) -> None:
    """Though it has not closed the connection. The real one may still be about to leave when the error has come."""
    server = start_nsqd()
    client = WireClient(server.tcp_address)
    client.subscribe("t", "c")
    client.send(b"XYZ\n")
    assert client.frame().data == b"E_INVALID invalid command XYZ"

    def clients() -> int:
        [topic] = ask(server.http_address, "GET", "/stats?format=json").json["topics"]
        return int(topic["channels"][0]["client_count"])

    if isinstance(server, NsqdServer):
        assert clients() == 0
    until(lambda: clients() == 0)


def test_an_empty_line_stands_between_topics_in_figures_for_people(start_nsqd: Callable[..., Any]) -> None:
    server = start_nsqd()
    for topic in ("t", "u"):
        ask(server.http_address, "POST", f"/topic/create?topic={topic}")
    lines = ask(server.http_address, "GET", "/stats").body.decode().splitlines()
    topics = lines[lines.index("Topics:") :]
    assert [line[:5] for line in topics[1:5]] == ["   [t", "", "   [u", ""]
