"""The embedded nsqlookupd answers as the original does, and nsqds keep themselves registered there."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gevent import Timeout, socket
from support.http import ask, shape
from support.servers import of_release
from support.waiting import until

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


class Nsqd:
    """The nsqd side of the TCP protocol, by hand."""

    def __init__(self, lookupd: Any, magic: bytes = b"  V1") -> None:
        self.sock = socket.create_connection(lookupd.tcp_address)
        self.sock.sendall(magic)
        self.reader = self.sock.makefile("rb")

    def identify(self, body: Any = IDENTITY) -> bytes:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.command(b"IDENTIFY\n" + struct.pack(">i", len(data)) + data)

    def command(self, data: bytes) -> bytes:
        with Timeout(10):
            self.sock.sendall(data)
            return self.reply()

    def reply(self) -> bytes:
        head = self.reader.read(4)
        return self.reader.read(struct.unpack(">i", head)[0]) if head else b""

    def is_closed(self) -> bool:
        with Timeout(10):
            return self.reader.read(1) == b""

    def close(self) -> None:
        self.reader.close()
        self.sock.close()

    @property
    def remote_address(self) -> str:
        host, port = self.sock.getsockname()
        return f"{host}:{port}"


@pytest.fixture
def registered(lookupd: Any) -> Iterator[Nsqd]:
    client = Nsqd(lookupd)
    client.identify()
    yield client
    client.close()


def get(lookupd: Any, path: str) -> Any:
    answer = ask(lookupd.http_address, "GET", path)
    assert answer.status == 200
    return answer.json


@pytest.mark.parametrize(
    ("method", "path", "status", "body"),
    [  # what is in no recorded sequence: test_answers_are_those_of_the_real_servers has the others
        ("GET", "/channels", 400, b'{"message":"MISSING_ARG_TOPIC"}'),
        ("GET", "/lookup?topic=%zz", 400, b'{"message":"INVALID_REQUEST"}'),
        ("GET", "/lookup?topic=", 404, b'{"message":"TOPIC_NOT_FOUND"}'),
        ("POST", "/topic/create", 400, b'{"message":"MISSING_ARG_TOPIC"}'),
        ("POST", "/topic/tombstone", 400, b'{"message":"MISSING_ARG_TOPIC"}'),
    ],
)
def test_status_and_body_of_routes_at_their_edges(
    lookupd: Any, method: str, path: str, status: int, body: bytes
) -> None:
    answer = ask(lookupd.http_address, method, path)
    assert (answer.status, answer.body) == (status, body)


def test_headers_say_the_kind_of_the_content(lookupd: Any) -> None:
    ping, info, wrong = (
        ask(lookupd.http_address, *route) for route in [("GET", "/ping"), ("GET", "/info"), ("POST", "/info")]
    )
    assert ping.headers["content-type"] == "text/plain; charset=utf-8"
    assert "x-nsq-content-type" not in ping.headers
    assert info.headers["content-type"] == "application/json; charset=utf-8"
    assert info.headers["x-nsq-content-type"] == "nsq; version=1.0"
    assert wrong.headers["allow"] == "GET, OPTIONS"


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


def test_the_answer_to_identify_says_who_the_lookupd_is(lookupd: Any) -> None:
    answer = json.loads(Nsqd(lookupd).identify())
    assert answer["tcp_port"] == lookupd.tcp_address.port
    assert answer["http_port"] == lookupd.http_address.port
    assert answer["broadcast_address"] == "127.0.0.1"
    assert set(answer) == {"tcp_port", "http_port", "version", "broadcast_address", "hostname"}


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
    registered.close()
    until(lambda: not get(lookupd, "/nodes")["producers"])
    assert get(lookupd, "/lookup?topic=t") == {"channels": ["c"], "producers": []}


def test_a_tombstone_hides_an_nsqd_for_one_topic(lookupd: Any, registered: Nsqd) -> None:
    registered.command(b"REGISTER t\n")
    registered.command(b"REGISTER u\n")
    ask(lookupd.http_address, "POST", "/topic/tombstone?topic=t&node=nsqd.example:4151")
    assert get(lookupd, "/lookup?topic=t")["producers"] == []
    assert len(get(lookupd, "/lookup?topic=u")["producers"]) == 1
    (node,) = get(lookupd, "/nodes")["producers"]
    assert dict(zip(node["topics"], node["tombstones"], strict=True)) == {"t": True, "u": False}


def test_a_tombstone_wears_off(make_lookupd: Any) -> None:
    lookupd = make_lookupd(tombstone_lifetime=0.2)
    registered = Nsqd(lookupd)
    registered.identify()
    registered.command(b"REGISTER t\n")
    ask(lookupd.http_address, "POST", "/topic/tombstone?topic=t&node=nsqd.example:4151")
    assert get(lookupd, "/lookup?topic=t")["producers"] == []
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


def test_debug_lists_every_registration(lookupd: Any, registered: Nsqd) -> None:
    registered.command(b"REGISTER t c\n")
    debug = get(lookupd, "/debug")
    assert set(debug) == {"client::", "topic:t:", "channel:t:c"}
    (entry,) = debug["topic:t:"]
    expected = {
        "id": "str",
        "hostname": "str",
        "broadcast_address": "str",
        "tcp_port": "int",
        "http_port": "int",
        "version": "str",
        "topology_zone": "str",
        "topology_region": "str",
        "last_update": "int",
        "tombstoned": "bool",
        "tombstoned_at": "int",
    }
    assert shape(entry) == of_release(expected, entry)
    assert entry["id"] == registered.remote_address
    assert entry["tombstoned_at"] == -6795364578871345152


@pytest.mark.parametrize(
    ("command", "reply"),
    [
        (b"REGISTER\n", b"E_INVALID REGISTER insufficient number of params"),
        (b"UNREGISTER b@d\n", b"E_BAD_TOPIC UNREGISTER topic name 'b@d' is not valid"),
    ],
)
def test_an_error_is_told_and_ends_the_connection(lookupd: Any, registered: Nsqd, command: bytes, reply: bytes) -> None:
    assert registered.command(command) == reply
    assert registered.is_closed()


@pytest.mark.parametrize(
    ("body", "reply"),
    [
        (b'{"tcp_port":"x"}', b"E_BAD_BODY IDENTIFY failed to decode JSON body"),
        ({**IDENTITY, "version": ""}, b"E_BAD_BODY IDENTIFY missing fields"),
    ],
)
def test_a_bad_identify_ends_the_connection(lookupd: Any, body: Any, reply: bytes) -> None:
    client = Nsqd(lookupd)
    assert client.identify(body) == reply
    assert client.is_closed()


def test_a_null_in_identify_is_as_good_as_nothing(lookupd: Any) -> None:
    client = Nsqd(lookupd)
    assert json.loads(client.identify({**IDENTITY, "topology_zone": None, "hostname": None, "more": [1]}))
    (node,) = get(lookupd, "/nodes")["producers"]
    assert (node["hostname"], node.get("topology_zone", "")) == ("", "")


def test_commands_before_identify_are_refused_except_ping(lookupd: Any) -> None:
    client = Nsqd(lookupd)
    assert client.command(b"PING\n") == b"OK"
    assert client.command(b"REGISTER t\n") == b"E_INVALID client must IDENTIFY"
    assert client.is_closed()


def test_another_magic_is_refused(lookupd: Any) -> None:
    client = Nsqd(lookupd, magic=b"  V2")
    with Timeout(10):
        assert client.reply() == b"E_BAD_PROTOCOL"
    assert client.is_closed()


@pytest.mark.parametrize("size", [-1, 2**31 - 1])
def test_a_lying_length_costs_no_memory(size: int) -> None:
    # The original takes that memory, or panics; ours must not.
    with LookupdServer(LookupdOptions(tcp_address="127.0.0.1:0", http_address="127.0.0.1:0")) as server:
        client = Nsqd(server)
        assert client.command(b"IDENTIFY\n" + struct.pack(">i", size)) == b"E_BAD_BODY IDENTIFY failed to read body"
        assert client.is_closed()


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
