"""The embedded nsqlookupd answers as the original does, and nsqds keep themselves registered there."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gevent import socket
from support.http import ask
from support.peers import Peer
from support.servers import of_release
from support.waiting import WAIT, until

from nsq_fast.broker import LookupdOptions, LookupdServer, NsqdServer
from nsq_fast.broker.lookupd import Registrar

# The embedded nsqlookupd answers as the original does: the same tests run against both.


IDENTITY = {
    "version": "1.3.0",
    "tcp_port": 4150,
    "http_port": 4151,
    "hostname": "h",
    "broadcast_address": "nsqd.example",
    "topology_zone": "z",
    "topology_region": "r",
}


def identify(body: Any) -> bytes:
    data = json.dumps(body).encode()
    return b"IDENTIFY\n" + struct.pack(">i", len(data)) + data


IDENTIFY = identify(IDENTITY)


class Nsqd(Peer):
    """The nsqd side of the TCP protocol, by hand."""

    def __init__(self, lookupd: Any, magic: bytes = b"  V1") -> None:
        super().__init__(socket.create_connection(lookupd.tcp_address, timeout=WAIT))
        self.send(magic)

    def identify(self, body: Any = IDENTITY) -> bytes:
        return self.command(identify(body))

    def command(self, data: bytes) -> bytes:
        self.send(data)
        return self.read_body()

    @property
    def remote_address(self) -> str:
        host, port = self.sock.getsockname()
        return f"{host}:{port}"


@pytest.fixture
def registered(lookupd: Any) -> Iterator[Nsqd]:
    client = Nsqd(lookupd)
    client.identify()
    yield client
    client.sock.close()


def get(lookupd: Any, path: str) -> Any:
    answer = ask(lookupd.http_address, "GET", path)
    assert answer.status == 200
    return answer.json


# What is in no recorded sequence: test_answers_are_those_of_the_real_servers has the others.
ROUTES = [
    ("GET", "/channels", 400, b'{"message":"MISSING_ARG_TOPIC"}'),
    ("GET", "/lookup?topic=%zz", 400, b'{"message":"INVALID_REQUEST"}'),
    ("GET", "/lookup?topic=", 404, b'{"message":"TOPIC_NOT_FOUND"}'),
    ("POST", "/topic/create", 400, b'{"message":"MISSING_ARG_TOPIC"}'),
    ("POST", "/topic/tombstone", 400, b'{"message":"MISSING_ARG_TOPIC"}'),
]


def test_status_and_body_of_routes_at_their_edges(lookupd: Any) -> None:
    answers = [ask(lookupd.http_address, method, path) for method, path, *_ in ROUTES]
    assert [(answer.status, answer.body) for answer in answers] == [(status, body) for *_, status, body in ROUTES]


def test_topics_and_channels_made_by_hand_are_known_until_they_are_deleted(lookupd: Any) -> None:
    ask(lookupd.http_address, "POST", "/channel/create?topic=b&channel=c2")
    ask(lookupd.http_address, "POST", "/channel/create?topic=b&channel=c1")
    ask(lookupd.http_address, "POST", "/topic/create?topic=a")
    assert sorted(get(lookupd, "/topics")["topics"]) == ["a", "b"]
    assert sorted(get(lookupd, "/channels?topic=b")["channels"]) == ["c1", "c2"]
    assert get(lookupd, "/lookup?topic=a") == {"channels": [], "producers": []}

    ask(lookupd.http_address, "POST", "/channel/delete?topic=b&channel=c2")
    assert get(lookupd, "/channels?topic=b") == {"channels": ["c1"]}
    ask(lookupd.http_address, "POST", "/topic/delete?topic=b")
    assert get(lookupd, "/channels?topic=b") == {"channels": []}
    assert get(lookupd, "/topics") == {"topics": ["a"]}


def test_what_an_nsqd_registers_is_looked_up(lookupd: Any, registered: Nsqd) -> None:
    assert registered.command(b"REGISTER t c\n") == b"OK"
    assert registered.command(b"REGISTER lone\r\n") == b"OK"
    peer = of_release({**IDENTITY, "remote_address": registered.remote_address}, get(lookupd, "/lookup?topic=t"))
    assert get(lookupd, "/lookup?topic=t") == {"channels": ["c"], "producers": [peer]}
    assert get(lookupd, "/lookup?topic=lone") == {"channels": [], "producers": [peer]}
    (node,) = get(lookupd, "/nodes")["producers"]
    assert sorted(node.pop("topics")) == ["lone", "t"]
    assert node.pop("tombstones") == [False, False]
    assert node == peer


def test_unregister_takes_a_channel_or_a_topic_away(lookupd: Any, registered: Nsqd) -> None:
    for command in (b"REGISTER t c\n", b"REGISTER t e#ephemeral\n", b"REGISTER u#ephemeral\n"):
        registered.command(command)
    assert registered.command(b"UNREGISTER t e#ephemeral\n") == b"OK"
    assert get(lookupd, "/channels?topic=t") == {"channels": ["c"]}
    assert registered.command(b"UNREGISTER t c\n") == b"OK"
    assert get(lookupd, "/channels?topic=t") == {"channels": ["c"]}
    assert registered.command(b"UNREGISTER t\n") == b"OK"
    assert registered.command(b"UNREGISTER u#ephemeral\n") == b"OK"
    assert registered.command(b"UNREGISTER never\n") == b"OK"
    assert get(lookupd, "/lookup?topic=t") == {"channels": ["c"], "producers": []}
    assert get(lookupd, "/topics") == {"topics": ["t"]}


def test_an_nsqd_that_leaves_is_forgotten_but_its_topics_stay_known(lookupd: Any, registered: Nsqd) -> None:
    registered.command(b"REGISTER t c\n")
    registered.sock.close()
    until(lambda: not get(lookupd, "/nodes")["producers"])
    assert get(lookupd, "/lookup?topic=t") == {"channels": ["c"], "producers": []}


def test_a_tombstone_hides_an_nsqd_for_one_topic_and_wears_off(make_lookupd: Any) -> None:
    lookupd = make_lookupd(tombstone_lifetime=0.5)
    registered = Nsqd(lookupd)
    registered.identify()
    registered.command(b"REGISTER t\n")
    registered.command(b"REGISTER u\n")
    ask(lookupd.http_address, "POST", "/topic/tombstone?topic=t&node=nsqd.example:4151")
    assert get(lookupd, "/lookup?topic=t")["producers"] == []
    assert len(get(lookupd, "/lookup?topic=u")["producers"]) == 1
    (node,) = get(lookupd, "/nodes")["producers"]
    assert dict(zip(node["topics"], node["tombstones"], strict=True)) == {"t": True, "u": False}
    until(lambda: get(lookupd, "/lookup?topic=t")["producers"])


def test_a_silent_nsqd_is_left_out_until_it_pings(make_lookupd: Any) -> None:
    lookupd = make_lookupd(inactive_producer_timeout=0.2)
    registered = Nsqd(lookupd)
    registered.identify()
    registered.command(b"REGISTER t\n")
    until(lambda: not get(lookupd, "/lookup?topic=t")["producers"])
    assert get(lookupd, "/nodes") == {"producers": []}
    assert registered.command(b"PING\n") == b"OK"
    assert len(get(lookupd, "/lookup?topic=t")["producers"]) == 1


FATAL = {  # the magic, what is sent behind it, and the last reply
    "registers nothing": (b"  V1", IDENTIFY + b"REGISTER\n", b"E_INVALID REGISTER insufficient number of params"),
    "a bad name": (b"  V1", IDENTIFY + b"UNREGISTER b@d\n", b"E_BAD_TOPIC UNREGISTER topic name 'b@d' is not valid"),
    "a port of text": (
        b"  V1",
        identify({"tcp_port": "x"}),
        b"E_BAD_BODY IDENTIFY failed to decode JSON body",
    ),
    "no version": (b"  V1", identify({**IDENTITY, "version": ""}), b"E_BAD_BODY IDENTIFY missing fields"),
    "not identified": (b"  V1", b"PING\nREGISTER t\n", b"E_INVALID client must IDENTIFY"),
    "another magic": (b"  V2", b"", b"E_BAD_PROTOCOL"),
}


def test_an_error_is_told_and_ends_the_connection(lookupd: Any) -> None:
    for name, (magic, data, expected) in FATAL.items():
        client = Nsqd(lookupd, magic)
        client.send(data)
        replies = []
        with contextlib.suppress(EOFError):
            while True:
                replies.append(client.read_body())
        assert replies[-1] == expected, name


def test_a_null_in_identify_is_as_good_as_nothing(lookupd: Any) -> None:
    client = Nsqd(lookupd)
    assert json.loads(client.identify({**IDENTITY, "topology_zone": None, "hostname": None, "more": [1]}))
    (node,) = get(lookupd, "/nodes")["producers"]
    assert (node["hostname"], node.get("topology_zone", "")) == ("", "")


def test_a_lying_length_costs_no_memory() -> None:
    # The original takes that memory, or panics; ours must not.
    with LookupdServer() as server:
        for size in (-1, 2**31 - 1):
            client = Nsqd(server)
            assert client.command(b"IDENTIFY\n" + struct.pack(">i", size)) == b"E_BAD_BODY IDENTIFY failed to read body"
            assert client.recv() == b""


# An nsqd keeps itself registered, at our nsqlookupd and at the original's.


def nodes(lookupd: Any) -> Any:
    return get(lookupd, "/nodes")["producers"]


def tell(nsqd: NsqdServer, *lookupds: Any) -> None:
    body = json.dumps([str(each.tcp_address) for each in lookupds]).encode()
    assert ask(nsqd.http_address, "PUT", "/config/nsqlookupd_tcp_addresses", body).body == body


def test_an_nsqd_tells_all_that_it_has_where_it_is_told_to(lookupd: Any, embedded: Callable[..., NsqdServer]) -> None:
    nsqd = embedded(broadcast_address="nsqd.example")
    for number in range(2_500):
        nsqd.nsqd.get_topic("t").get_channel(f"c{number:060}")
    nsqd.nsqd.get_topic("lone")
    tell(nsqd, lookupd)
    assert nsqd.wait_registered(60)
    assert len(get(lookupd, "/channels?topic=t")["channels"]) == 2_500
    (node,) = nodes(lookupd)
    assert sorted(node["topics"]) == ["lone", "t"]
    ports = (nsqd.tcp_address.port, nsqd.http_address.port)
    assert (node["version"], node["broadcast_address"]) == ("1.3.0", "nsqd.example")
    assert (node["tcp_port"], node["http_port"]) == ports
    tell(nsqd)  # to register nowhere
    until(lambda: nodes(lookupd) == [])


@pytest.mark.parametrize(
    ("host", "told"),
    [("127.0.0.2", "127.0.0.2"), ("localhost", "localhost"), ("0.0.0.0", "127.0.0.1"), ("", "127.0.0.1")],
)
def test_servers_name_the_host_on_which_they_listen(embedded: Callable[..., NsqdServer], host: str, told: str) -> None:
    place = {"tcp_address": f"{host}:0", "http_address": f"{host}:0"}
    with LookupdServer(LookupdOptions(**place)) as lookupd:
        nsqd = embedded(lookupd_tcp_addresses=(f"{told}:{lookupd.tcp_address.port}",), **place)
        assert nsqd.wait_registered(60)
        (node,) = nodes(lookupd)
        assert node["broadcast_address"] == told
        assert get(nsqd, "/info")["broadcast_address"] == told
        client = Nsqd(lookupd)
        assert json.loads(client.identify())["broadcast_address"] == told
        client.sock.close()


def test_a_new_topic_has_the_channels_that_are_known_elsewhere(lookupd: Any, embedded: Any) -> None:
    nsqd = embedded(lookupd_tcp_addresses=(str(lookupd.tcp_address),))
    assert nsqd.wait_registered(5)
    for channel in ("c", "e%23ephemeral"):
        ask(lookupd.http_address, "POST", f"/channel/create?topic=t&channel={channel}")
    for topic in ("t", "unknown"):
        ask(nsqd.http_address, "POST", f"/topic/create?topic={topic}")
    topics = get(nsqd, "/stats?format=json")["topics"]
    assert {each["topic_name"]: [channel["channel_name"] for channel in each["channels"]] for each in topics} == {
        "t": ["c"],
        "unknown": [],
    }


def test_a_restarted_lookupd_is_told_everything_again(embedded: Callable[..., NsqdServer]) -> None:
    with LookupdServer() as lookupd:
        nsqd = embedded(lookupd_tcp_addresses=(str(lookupd.tcp_address),))
        nsqd.nsqd.get_topic("t")
        until(lambda: [node["topics"] for node in nodes(lookupd)] == [["t"]])
        lookupd.stop()
        nsqd.nsqd.get_topic("u")
        lookupd.start()
        until(lambda: [sorted(node["topics"]) for node in nodes(lookupd)] == [["t", "u"]])


def test_pings_keep_it_alive_and_find_a_mute_lookupd() -> None:
    with LookupdServer() as lookupd:
        where = [str(lookupd.tcp_address)]
        registrar = Registrar(where, lambda: IDENTITY, lambda: iter(()), ping_interval=0.02)
        registrar.start()
        assert registrar.wait_registered(5)
        (peer,) = lookupd.db.peers.values()
        before = peer.last_update
        until(lambda: peer.last_update > before)
        connections = lookupd.faults.tcp.accepted
        lookupd.faults.tcp.drop_replies = True
        until(lambda: lookupd.faults.tcp.accepted > connections)
        lookupd.faults.clear()
        until(lambda: nodes(lookupd))
        registrar.stop()


@pytest.mark.parametrize("lie", [b"\x00\x00\x00\x02{}", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x00\x00\x00\x01x"])
def test_a_lying_lookupd_is_tried_again(embedded: Callable[..., NsqdServer], lie: bytes) -> None:
    with LookupdServer() as lookupd:
        lookupd.faults.tcp.lie = lie
        nsqd = embedded()
        tell(nsqd, lookupd)
        until(lambda: lookupd.faults.tcp.accepted)
        nsqd.nsqd.get_topic("t")  # which asks for channels, too
        lookupd.faults.clear()
        until(lambda: [node["topics"] for node in nodes(lookupd)] == [["t"]])
