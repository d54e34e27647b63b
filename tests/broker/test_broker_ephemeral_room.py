"""What an ephemeral channel keeps: what fits into its memory, and what a ready client takes at once; ours and nsqd's.

nsqio/nsq: nsqd/channel.go, put: what the memory channel does not take goes to a backend that drops it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.http import ask
from support.waiting import until
from support.wire import WireClient

CHANNEL = "c%23ephemeral"


def channel(server: Any) -> dict[str, Any]:
    [topic] = ask(server.http_address, "GET", f"/stats?format=json&topic=t&channel={CHANNEL}").json["topics"]
    return dict(topic["channels"][0])


def post(server: Any, path: str) -> None:
    assert ask(server.http_address, "POST", path).status == 200


def test_a_ready_client_gets_messages_without_a_memory_queue(start_nsqd: Callable[..., Any]) -> None:
    server = start_nsqd(mem_queue_size=0)
    client = WireClient(server.tcp_address)
    client.subscribe("t", "c#ephemeral", 1)

    def published() -> bool:
        # A client of the original that is not quite back at its wait misses a message: that one is dropped.
        WireClient(server.tcp_address).publish("t", b"1")
        return bool(channel(server)["in_flight_count"] == 1)

    until(published)
    assert client.frame().body == b"1"


def test_without_a_ready_client_and_a_memory_queue_messages_are_dropped(start_nsqd: Callable[..., Any]) -> None:
    server = start_nsqd(mem_queue_size=0)
    client = WireClient(server.tcp_address)
    client.subscribe("t", "c#ephemeral", 1)
    client.send(b"RDY 0\n")
    until(lambda: channel(server)["clients"][0]["ready_count"] == 0)
    WireClient(server.tcp_address).publish("t", b"1")
    until(lambda: channel(server)["message_count"] == 1)
    assert channel(server)["depth"] == 0


def test_a_new_channel_gets_what_fits_into_its_memory(start_nsqd: Callable[..., Any]) -> None:
    server = start_nsqd(mem_queue_size=3)
    publisher = WireClient(server.tcp_address)
    for n in range(10):
        publisher.publish("t", b"%d" % n)
    post(server, f"/channel/create?topic=t&channel={CHANNEL}")
    until(lambda: channel(server)["message_count"] == 10)
    assert channel(server)["depth"] == 3


def test_deferred_messages_need_no_room(start_nsqd: Callable[..., Any]) -> None:
    server = start_nsqd(mem_queue_size=3)
    post(server, "/topic/create?topic=t")
    post(server, f"/channel/create?topic=t&channel={CHANNEL}")
    for _ in range(5):
        ask(server.http_address, "POST", "/pub?topic=t&defer=60000", b"x")
    until(lambda: channel(server)["deferred_count"] == 5)
