"""An nsqd keeps itself registered, at our nsqlookupd and at the original's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.http import ask
from support.servers import of_release
from support.waiting import until

from nsq_fast.broker import LookupdServer
from nsq_fast.broker.lookupd import Registrar
from nsq_fast.names import Address

IDENTITY = {
    "version": "1.3.0",
    "tcp_port": 4150,
    "http_port": 4151,
    "hostname": "h",
    "broadcast_address": "nsqd.example",
    "topology_zone": "",
    "topology_region": "",
}


class FakeNsqd:
    """Topics and channels, and a registrar that tells of them."""

    def __init__(self, *addresses: Address, ping_interval: float = 15.0) -> None:
        self.has: set[tuple[str, str]] = set()
        self.registrar = Registrar(
            [str(address) for address in addresses],
            lambda: IDENTITY,
            lambda: iter(sorted(self.has)),
            ping_interval=ping_interval,
        )
        self.registrar.start()


@pytest.fixture
def make_nsqd() -> Iterator[Callable[..., FakeNsqd]]:
    made: list[FakeNsqd] = []

    def make(*addresses: Address, **options: float) -> FakeNsqd:
        made.append(FakeNsqd(*addresses, **options))
        return made[-1]

    yield make
    for nsqd in made:
        nsqd.registrar.stop()


def nodes(lookupd: Any) -> Any:
    return ask(lookupd.http_address, "GET", "/nodes").json["producers"]


def channels(lookupd: Any, topic: str) -> Any:
    return sorted(ask(lookupd.http_address, "GET", f"/channels?topic={topic}").json["channels"])


def test_everything_is_told_on_connect(lookupd: Any, make_nsqd: Callable[..., FakeNsqd]) -> None:
    nsqd = make_nsqd(lookupd.tcp_address)
    nsqd.has = {("t", "c1"), ("t", "c2"), ("lone", "")}
    assert nsqd.registrar.wait_registered(5)
    (node,) = nodes(lookupd)
    assert sorted(node["topics"]) == ["lone", "t"]
    assert channels(lookupd, "t") == ["c1", "c2"]
    expected = of_release(IDENTITY, node)
    assert {name: node[name] for name in expected} == expected


def test_changes_are_told_as_they_come(lookupd: Any, make_nsqd: Callable[..., FakeNsqd]) -> None:
    nsqd = make_nsqd(lookupd.tcp_address)
    assert nsqd.registrar.wait_registered(5)
    nsqd.registrar.register("t")
    nsqd.registrar.register("t", "c")
    assert nsqd.registrar.wait_registered(5)
    assert nodes(lookupd)[0]["topics"] == ["t"]
    assert channels(lookupd, "t") == ["c"]
    nsqd.registrar.unregister("t", "c")
    nsqd.registrar.unregister("t")
    assert nsqd.registrar.wait_registered(5)
    assert nodes(lookupd)[0]["topics"] == []


def test_ten_thousand_channels_are_told_at_once(lookupd: Any, make_nsqd: Callable[..., FakeNsqd]) -> None:
    nsqd = make_nsqd(lookupd.tcp_address)
    nsqd.has = {("t", f"c{number}") for number in range(10_000)}
    assert nsqd.registrar.wait_registered(20)
    assert len(channels(lookupd, "t")) == 10_000


def test_a_stopped_registrar_is_forgotten(lookupd: Any, make_nsqd: Callable[..., FakeNsqd]) -> None:
    nsqd = make_nsqd(lookupd.tcp_address)
    assert nsqd.registrar.wait_registered(5)
    nsqd.registrar.stop()
    until(lambda: not nodes(lookupd))


def test_addresses_may_change(lookupd: Any, make_nsqd: Callable[..., FakeNsqd]) -> None:
    with LookupdServer() as other:
        nsqd = make_nsqd(lookupd.tcp_address)
        assert nsqd.registrar.wait_registered(5)
        nsqd.registrar.set_addresses([str(other.tcp_address)])
        assert nsqd.registrar.wait_registered(5)
        assert len(nodes(other)) == 1
        until(lambda: not nodes(lookupd))


def test_the_channels_known_elsewhere_are_asked_for(lookupd: Any, make_nsqd: Callable[..., FakeNsqd]) -> None:
    nsqd = make_nsqd(lookupd.tcp_address)
    assert nsqd.registrar.wait_registered(5)
    for channel in ("c", "e%23ephemeral"):
        ask(lookupd.http_address, "POST", f"/channel/create?topic=t&channel={channel}")
    assert nsqd.registrar.channels_of("t") == {"c"}
    assert nsqd.registrar.channels_of("unknown") == set()


def test_a_restarted_lookupd_is_told_everything_again(make_nsqd: Callable[..., FakeNsqd]) -> None:
    with LookupdServer() as lookupd:
        nsqd = make_nsqd(lookupd.tcp_address)
        nsqd.has = {("t", "c")}
        assert nsqd.registrar.wait_registered(5)
        lookupd.stop()
        nsqd.has = {("t", "c"), ("u", "")}
        nsqd.registrar.register("u")
        lookupd.start()
        until(lambda: nodes(lookupd))
        assert nsqd.registrar.wait_registered(5)
        assert sorted(nodes(lookupd)[0]["topics"]) == ["t", "u"]


def test_pings_keep_it_alive_and_find_a_mute_lookupd(make_nsqd: Callable[..., FakeNsqd]) -> None:
    with LookupdServer() as lookupd:
        nsqd = make_nsqd(lookupd.tcp_address, ping_interval=0.02)
        assert nsqd.registrar.wait_registered(5)
        (peer,) = lookupd.db.peers.values()
        before = peer.last_update
        until(lambda: peer.last_update > before)
        connections = lookupd.faults.tcp.accepted
        lookupd.faults.tcp.drop_replies = True
        until(lambda: lookupd.faults.tcp.accepted > connections)
        lookupd.faults.clear()
        until(lambda: nodes(lookupd))


@pytest.mark.parametrize("lie", [b"\x00\x00\x00\x02{}", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x00\x00\x00\x01x"])
def test_a_lying_lookupd_is_tried_again(make_nsqd: Callable[..., FakeNsqd], lie: bytes) -> None:
    with LookupdServer() as lookupd:
        lookupd.faults.tcp.lie = lie
        nsqd = make_nsqd(lookupd.tcp_address)
        until(lambda: lookupd.faults.tcp.accepted)
        nsqd.registrar.register("t")
        lookupd.faults.clear()
        nsqd.has = {("t", "")}
        assert nsqd.registrar.channels_of("t") == set()
        until(lambda: [node["topics"] for node in nodes(lookupd)] == [["t"]])
