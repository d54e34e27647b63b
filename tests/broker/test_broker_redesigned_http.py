"""HTTP of the redesigned dialect: lookups, administration, figures, topics' meta data, [TRACE] lines."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from gevent import sleep
from support.http import ask, post
from support.waiting import until
from support.wire import Consumer, WireClient, many, publish, sized, traced

from nsq_fast.broker import NsqdOptions, NsqdServer, RedesignedCluster
from nsq_fast.broker.go import decode_json_header

# HTTP of the redesigned dialect: lookups by access, administration, publishing, figures.


ACCEPT = {"Accept": "application/vnd.nsq; version=1.0"}


@pytest.fixture
def lookup(cluster: RedesignedCluster) -> Callable[..., Any]:
    """Ask the first nsqlookupd: ``lookup(path, method="GET")`` gives status and JSON."""

    def get(path: str, method: str = "GET") -> Any:
        reply = ask(cluster.lookupds[0].http_address, method, path, **ACCEPT)
        return reply.status, reply.json if reply.body else None

    return get


def test_lookup_of_what_is_not_there_and_without_the_accept_header(
    cluster: RedesignedCluster, lookup: Callable[..., Any]
) -> None:
    nothing = {"channels": [], "partitions": {}, "producers": []}
    assert lookup("/lookup?topic=nope") == (200, nothing)
    status, reply = lookup("/lookup?topic=nope&metainfo=1")
    assert (status, reply["meta"]["partition_num"]) == (200, 0)
    assert lookup("/lookup") == (400, {"message": "MISSING_ARG_TOPIC"})
    assert lookup("/lookup?topic=ord&partition=9&access=w") == (200, nothing)
    address = cluster.lookupds[0].http_address
    failed = ask(address, "GET", "/lookup?topic=nope&access=w")
    assert (failed.status, failed.body) == (500, b'{"status_code":500,"status_txt":"Key not found","data":null}')
    old = ask(address, "GET", "/lookup?topic=ord&partition=1")
    assert (old.json["status_txt"], set(old.json["data"]["partitions"])) == ("OK", {"1"})
    assert "x-nsq-content-type" not in old.headers


def test_lookup_for_writing_needs_a_channel(cluster: RedesignedCluster, lookup: Callable[..., Any]) -> None:
    cluster.create_topic("bare", 3, 1, ordered=True)
    assert set(lookup("/lookup?topic=bare")[1]["partitions"]) == {"0", "1", "2"}
    no_channel = "Topic has no channel, should init at least one for the new topic"
    assert lookup("/lookup?topic=bare&access=w") == (404, {"message": no_channel})
    node = cluster.leader_of("bare", 1)
    query = "topic=bare&partition=1&channel=ch"
    assert ask(node.http_address, "POST", f"/channel/create?{query}").status == 200
    reply = lookup("/lookup?topic=bare&access=w&metainfo=true")[1]
    assert set(reply["partitions"]) == {"1"}
    assert reply["meta"]["partition_num"] == 3
    assert reply["partitions"]["1"]["distributed_id"] == node.id


def test_an_original_nsqd_beside_the_cluster(cluster: RedesignedCluster, lookup: Callable[..., Any]) -> None:
    options = NsqdOptions(lookupd_tcp_addresses=(str(cluster.lookupds[0].tcp_address),))
    with NsqdServer(options) as nsqd:
        ask(nsqd.http_address, "POST", "/topic/create?topic=ord")
        until(lambda: len(lookup("/lookup?topic=ord")[1]["producers"]) == 4)
        reply = lookup("/lookup?topic=ord")[1]
        ports = [node["tcp_port"] for node in reply["producers"]]
        assert nsqd.tcp_address.port in ports
        assert nsqd.tcp_address.port not in [node["tcp_port"] for node in reply["partitions"].values()]
        assert len(lookup("/lookup?topic=ord&access=w")[1]["producers"]) == 3
        assert len(lookup("/nodes")[1]["producers"]) == 4


def test_what_there_is(lookup: Callable[..., Any]) -> None:
    assert lookup("/topics")[1]["topics"] == ["ext", "ord", "plain"]
    meta = lookup("/topics?metaInfo=true")[1]["meta_info"][1]
    assert (meta["topic_name"], meta["ordered"], meta["registered_channels"]) == ("ord", True, None)
    assert lookup("/channels?topic=ord&partition=1")[1] == {"channels": ["ch"]}
    assert lookup("/info")[1] == {"version": "0.3.7-HA.1.13.0", "ha_support": True}
    assert lookup("/cluster/stats")[1]["stable"] is True
    rows = lookup("/nodes")[1]["producers"]
    assert sorted(number for row in rows for number in row["partitions"]["ord"]) == ["0", "1", "2"]


def test_channels_that_must_be_registered(cluster: RedesignedCluster, lookup: Callable[..., Any]) -> None:
    assert lookup("/channel/create?topic=ord&channel=q", "POST") == (
        400,
        {"message": "channel auto create NOT disabled in topic ord"},
    )
    query = "topic=strict&partition_num=1&replicator=1&disable_channel_auto_create=true"
    assert lookup(f"/topic/create?{query}", "POST")[0] == 200
    node = cluster.leader_of("strict", 0)
    with pytest.raises(AssertionError):
        Consumer(node, "SUB strict c 0")
    refused = ask(node.http_address, "POST", "/channel/create?topic=strict&channel=c")
    assert refused.status == 403
    assert lookup("/channel/create?topic=strict&channel=c", "POST")[0] == 200
    Consumer(node, "SUB strict c 0").close()
    assert lookup("/channel/delete?topic=strict&channel=c", "POST")[0] == 200
    assert lookup("/channels?topic=strict")[1] == {"channels": []}


def test_an_upgrade_to_ext(cluster: RedesignedCluster, lookup: Callable[..., Any]) -> None:
    consumer = Consumer(cluster.leader_of("plain", 0), "SUB plain ch 0")
    assert lookup("/topic/meta/update?topic=plain&upgradeext=true", "POST")[0] == 200
    assert consumer.reader.read() == b""
    consumer.close()
    Consumer(cluster.leader_of("plain", 0), "SUB plain ch 0", extend_support=True).close()
    assert lookup("/topic/meta/update?topic=no&upgradeext=true", "POST") == (400, {"message": "topic is not created"})


def test_publishing_over_http(cluster: RedesignedCluster) -> None:
    address = cluster.leader_of("ord", 0).http_address

    def post(path: str, body: bytes = b"x", **headers: str) -> Any:
        reply = ask(address, "POST", path, body, **ACCEPT, **headers)
        return reply.status, reply.body if reply.status == 200 else reply.json["message"]

    assert post("/pub?topic=ord&partition=0", b"hello") == (200, b"OK")
    assert post("/mpub?topic=ord&partition=0", b"a\n\nb") == (200, b"OK")
    traced = b'{"status":"OK","id":5,"trace_id":"123","queue_offset":97,"rawsize":31}'
    assert post("/pubtrace?topic=ord&partition=0&trace_id=123") == (200, traced)
    assert post("/pubtrace?topic=ord&partition=0&trace_id=x") == (400, "INVALID_TRACE_ID")
    assert post("/pub?topic=ord&partition=x") == (404, "E_TOPIC_NOT_EXIST")
    assert post("/pub?topic=ord&partition=0", b"") == (406, "MSG_EMPTY")
    assert post("/pub_ext?topic=ord&partition=0") == (400, "E_INVALID_JSON_HEADER")
    deep = "%7B%22a%22:" + "%5B" * 3000
    assert post(f"/pub_ext?topic=ord&partition=0&ext={deep}") == (400, "E_INVALID_JSON_HEADER")
    replica = cluster.node(cluster.partition("ord", 0).replicas[1])
    orders = [f"/channel/{order}?channel=ch" for order in ("pause", "create", "delete", "setoffset")]
    # Before what is wrong with the arguments.
    for path in ("/pub?", "/pub_ext?ext=x", "/pubtrace?trace_id=x", "/message/finish?channel=ch&msgid=1", *orders):
        refused = ask(replica.http_address, "POST", f"{path}&topic=ord&partition=0", b"special:-1", **ACCEPT)
        assert (refused.status, refused.json) == (400, {"message": "E_FAILED_ON_NOT_LEADER"}), path


def test_ext_headers_over_http(cluster: RedesignedCluster) -> None:
    node = cluster.leader_of("ext", 0)
    path = "/pub_ext?topic=ext&ext=%7B%22a%22:%22b%22%7D"
    assert ask(node.http_address, "POST", path, b"x", X_Nsqext_Foo="v").body == b"OK"
    path = "/pub_ext?topic=ext&ext=%7B%22%23%23trace_id%22:%2277%22%7D"
    assert ask(node.http_address, "POST", path, b"x", **ACCEPT).json["trace_id"] == "77"
    consumer = Consumer(node, "SUB ext ch 0", extend_support=True)
    assert consumer.receive().data[29:] == b'{"a":"b","foo":"v"}x'


def test_rows_of_stats(cluster: RedesignedCluster) -> None:
    publish(cluster, "ord", b"a", b"bb")
    partition = cluster.partition("ord", 0)
    consumer = Consumer(cluster.leader_of("ord", 0), "SUB_ORDERED ord ch 0")
    consumer.receive()
    path = "/stats?format=json&topic=ord&partition=0"
    [row] = ask(cluster.node(partition.replicas[0]).http_address, "GET", path, **ACCEPT).json["topics"]
    assert (row["topic_partition"], row["is_leader"], row["is_multi_ordered"]) == ("0", True, True)
    assert (row["depth"], row["message_count"], row["statsd_name"]) == (63, 2, "ord.0")
    [channel] = row["channels"]
    assert (channel["depth"], channel["depth_size"], channel["in_flight_count"]) == (2, 63, 1)
    assert channel["clients"][0]["in_flight_count"] == 1
    [row] = ask(cluster.node(partition.replicas[1]).http_address, "GET", path, **ACCEPT).json["topics"]
    assert row["is_leader"] is False
    node = cluster.leader_of("ord", 0)
    rows = ask(node.http_address, "GET", "/stats?format=json&leaderOnly=true", **ACCEPT).json["topics"]
    assert all(row["is_leader"] for row in rows)
    stats = ask(node.http_address, "GET", "/coordinator/stats?topic=ord&partition=0").json["topic_coord_stats"]
    assert [item["node_id"] for item in stats[0]["isr_stats"]] == partition.replicas
    assert ask(node.http_address, "GET", "/info", **ACCEPT).json["ha_support"] is True


def test_depths_are_ends_whatever_is_forgotten(cluster: RedesignedCluster) -> None:
    publish(cluster, "ord", b"a", b"bb", b"ccc")
    cluster.forget_log("ord", 0, 32)
    path = "/stats?format=json&topic=ord&partition=0"
    [row] = ask(cluster.leader_of("ord", 0).http_address, "GET", path, **ACCEPT).json["topics"]
    assert [row[name] for name in ("backend_start", "backend_depth", "depth", "message_count")] == [63, 96, 96, 3]
    [channel] = row["channels"]
    assert [channel[name] for name in ("depth", "depth_size", "message_count")] == [1, 33, 3]
    consumer = Consumer(cluster.leader_of("ord", 0), "SUB_ORDERED ord ch 0")
    assert consumer.receive().body.endswith(b"ccc")


def test_messages_are_found(cluster: RedesignedCluster) -> None:
    publish(cluster, "ord", b"a", b"bb", partition=1)
    node = cluster.leader_of("ord", 1)

    def get(query: str) -> Any:
        return ask(node.http_address, "GET", f"/message/get?topic=ord&partition=1&{query}").json

    second = get("search_mode=count&search_pos=2")
    assert (second["id"], second["body"], second["offset"], second["queue_cnt_index"]) == ((1 << 50) + 3, "bb", 31, 2)
    assert get(f"search_mode=id&search_pos={second['id']}") == second
    assert get("search_mode=virtual_offset&search_pos=10") == second
    assert get("search_mode=count&search_pos=1")["body"] == "a"
    assert get("search_mode=x&search_pos=1")["message"].startswith("search mode should be one of")


def test_a_message_is_finished_and_a_channel_emptied_and_deleted(cluster: RedesignedCluster) -> None:
    node, channel = cluster.leader_of("plain", 0), cluster.partition("plain", 0).channel("ch")
    query = "topic=plain&partition=0&channel=ch"
    consumer = Consumer(node, "SUB plain ch 0")
    publish(cluster, "plain", b"1", b"2")
    first, _ = consumer.receive(), consumer.receive()
    post(node, f"/message/finish?{query}&msgid={int.from_bytes(first.id[:8], 'big')}")
    assert channel.depth == 1
    refused = ask(node.http_address, "POST", f"/channel/setoffset?{query}", b"foo:1")
    assert refused.json == {"message": "invalid consume offset:foo:1"}
    post(node, f"/channel/empty?{query}")
    assert channel.depth == 0
    post(node, f"/channel/delete?{query}")
    assert consumer.reader.read() == b""


def test_there_are_no_routes_for_topics(cluster: RedesignedCluster) -> None:
    reply = ask(cluster.nsqds[0].http_address, "POST", "/topic/create?topic=t")
    assert (reply.status, reply.json) == (404, {"message": "NOT_FOUND"})


# What the faces of the redesigned cluster answer at their edges, as the real servers do.


def test_headers_are_read_as_the_server_reads_them() -> None:
    for header, value in {
        b'{"k":01}': {"k": 0},
        b'{"k":"\n\xff\\q\\u0041\\ud800"}': {"k": "\n\ufffd\\qA\\ud800"},
        b" [ -inf , {} ] ": [0, {}],
        b'{"a":true,"b":NaN}': {"a": True, "b": 0},
    }.items():
        assert decode_json_header(header) == value
    for header in (b"", b"{", b"{}x", b'{"a" 1}', b"tru", b"-x", b'["a', b"[1 2]", b"[" * 100_000):
        with pytest.raises(ValueError, match="cannot parse JSON"):
            decode_json_header(header)


def test_a_tombstone_hides_a_node_from_those_who_publish(
    cluster: RedesignedCluster, lookup: Callable[..., Any]
) -> None:
    node = cluster.leader_of("plain", 0).http_address

    def partitions(access: str) -> list[str]:
        return list(lookup(f"/lookup?topic=plain&access={access}")[1]["partitions"])

    assert lookup(f"/topic/tombstone?topic=plain&node={node}", "POST")[0] == 200
    assert (partitions("w"), partitions("r")) == ([], ["0"])
    rows = lookup("/nodes")[1]["producers"]
    [row] = [row for row in rows if row["http_port"] == node.port]
    assert dict(zip(row["topics"], row["tombstones"], strict=True))["plain"] is True
    assert lookup(f"/topic/tombstone?topic=plain&node={node}&restore=true", "POST")[0] == 200
    assert partitions("w") == ["0"]


# What a topic is created with, and what that means: retention, and how often messages go to the disk.


DAY = 24 * 3600 * 1_000_000_000


@pytest.fixture
def durable_cluster() -> Iterator[RedesignedCluster]:
    with RedesignedCluster(2, 2, readiness=0.0) as durable_cluster:
        durable_cluster.create_topic("a", 1, 1, channels=["ch"])
        yield durable_cluster


def test_what_is_set_is_kept(durable_cluster: RedesignedCluster) -> None:
    lookupd = durable_cluster.lookupds[0]
    create = "/topic/create?topic=t&partition_num=2&replicator=2&syncdisk=5000&retention=3"
    for _ in range(2):  # again, it is that topic
        post(lookupd, f"{create}&orderedmulti=true&extend=true")
    meta = durable_cluster.partition("t", 0).meta
    assert (meta.partition_num, meta.replica, meta.ordered, meta.ext) == (2, 2, True, True)
    assert (meta.sync_every, meta.retention_days) == (4000, 3)
    post(lookupd, "/topic/meta/update?topic=t&syncdisk=10")
    assert (meta.sync_every, meta.retention_days) == (10, 3)
    post(lookupd, "/topic/meta/update?topic=t&syncdisk=-1&retention=9")
    assert (meta.sync_every, meta.retention_days) == (10, 9)


def test_messages_go_after_their_retention_when_all_channels_are_done(durable_cluster: RedesignedCluster) -> None:
    partition = durable_cluster.partition("a", 0)
    durable_cluster.create_topic("bare")
    publish(durable_cluster, "bare", b"1")
    publish(durable_cluster, "a", b"1", b"2", b"3")
    post(durable_cluster.lookupds[0], "/topic/meta/update?topic=a&retention=2")
    later = time.time_ns() + 2 * DAY
    partition.clean(later)
    assert partition.log.first == 0  # nobody is done with them
    consumer = Consumer(durable_cluster.leader_of("a", 0), "SUB a ch 0", rdy=1)
    for _ in range(2):
        consumer.finish(consumer.receive())
    until(lambda: partition.channel("ch").depth == 1)
    partition.clean(later - DAY)
    assert partition.log.first == 0  # too young
    for each in (partition, durable_cluster.partition("bare", 0)):
        each.clean(later)
    assert partition.log.first == 2
    assert durable_cluster.partition("bare", 0).log.first == 0  # nobody is done with anything
    consumer.finish(consumer.receive())


# [TRACE] lines: the embedded nsqd and the real one write the same of traced messages, but for times and ports.


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
        yield Traced(server, lambda: LINE.findall((tmp_path / "nsqd" / "nsqd.INFO").read_text()))
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


def test_what_is_published_is_traced_with_a_trace_id_or_while_its_topic_is(traced_node: Traced) -> None:
    traced_node.command(b"PUB t 0\n" + sized(b"not traced"))
    traced_node.command(b"PUB_TRACE t 0\n" + sized(traced(77, b"x")))
    traced_node.command(b"MPUB_TRACE t 0\n" + many(traced(8, b"x"), traced(9, b"y")))
    traced_node.switch("enable", topic="t")
    traced_node.command(b"PUB t 0\n" + sized(b"x"))
    traced_node.command(b"MPUB t 0\n" + many(b"x", b"y"))
    assert ask(traced_node.node.http_address, "POST", "/pub?topic=t&partition=0", b"x").status == 200
    traced_node.switch("disable", topic="t")
    traced_node.command(b"PUB t 0\n" + sized(b"x"))
    expected = [put(40, 0, 2, 77), success(40, 0, 77), put(71, 1, 3, 8), put(102, 2, 4, 9)]
    expected += [put(133, 3, 5), success(133, 3), put(164, 4, 6), put(195, 5, 7), put(226, 6, 8), success(226, 6)]
    until(lambda: [line for line in masked(traced_node.lines()) if " put " in line] == expected)


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
        f"{message}N) READ_REQ from client 0(0) attempt: 2",
        f"{message}N) START from client CLIENT(ID) attempt: 3",
        f"{message}N) FIN from client CLIENT(ID) attempt: 3",
    ]
    end_of_deferral = f"{message}N) DELAY_TIMEOUT from client (0) attempt: 2"
    until(lambda: len(traced_node.deliveries()) > len(expected))
    lines = traced_node.deliveries()
    # A real nsqd writes this line from its timer, after it gave the message to the consumers: beside what these do.
    place = lines.index(end_of_deferral)
    assert place > lines.index(f"{message}N) REQ from client 0(0) attempt: 2")
    del lines[place]
    assert lines == expected


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


def test_a_timeout_is_logged_of_any_message_and_a_slow_fin_where_that_is_on(traced_node: Traced) -> None:
    traced_node.command(b"PUB t 0\n" + sized(b"x"))
    consumer = Consumer(traced_node.node, "SUB t c 0", msg_timeout=1000)
    consumer.receive()
    consumer.finish(consumer.receive())
    consumer.close()
    timeout = "0: message 0 (ts: N, offset: 0, pri:N) TIMEOUT from client CLIENT(0) attempt: 1"
    until(lambda: traced_node.deliveries() == [timeout])
    traced_node.switch("enable", topic="t", channel="c", slow="true")
    consumer = Consumer(traced_node.node, "SUB t c 0")
    traced_node.command(b"PUB t 0\n" + sized(b"fast"))
    consumer.finish(consumer.receive())
    traced_node.command(b"PUB t 0\n" + sized(b"slow"))
    frame = consumer.receive()
    sleep(1.05)  # sleep: a FIN is slow after a second
    consumer.finish(frame)
    slow = "0: message 2 (ts: N, offset: 65, pri:N) SLOW_ACK from client CLIENT(ID) attempt: 1"
    until(lambda: traced_node.deliveries() == [timeout, slow])


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
