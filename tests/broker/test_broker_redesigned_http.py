"""HTTP of the redesigned dialect: lookups by access, administration, publishing, figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.http import ask
from support.redesigned import Consumer, publish
from support.waiting import until

from nsq_fast.broker import NsqdOptions, NsqdServer, RedesignedCluster

ACCEPT = {"Accept": "application/vnd.nsq; version=1.0"}


@pytest.fixture
def lookup(cluster: RedesignedCluster) -> Callable[..., Any]:
    """Ask the first nsqlookupd: ``lookup(path, method="GET")`` gives status and JSON."""

    def get(path: str, method: str = "GET") -> Any:
        reply = ask(cluster.lookupds[0].http_address, method, path, **ACCEPT)
        return reply.status, reply.json if reply.body else None

    return get


def test_lookup_of_a_topic_that_is_not(lookup: Callable[..., Any]) -> None:
    nothing = {"channels": [], "partitions": {}, "producers": []}
    assert lookup("/lookup?topic=nope") == (200, nothing)
    status, reply = lookup("/lookup?topic=nope&metainfo=1")
    assert (status, reply["meta"]["partition_num"]) == (200, 0)
    assert lookup("/lookup?topic=nope&access=w") == (404, {"message": "Key not found"})
    assert lookup("/lookup?topic=ord&access=x") == (400, {"message": "INVALID_ACCESS_MODE"})
    assert lookup("/lookup") == (400, {"message": "MISSING_ARG_TOPIC"})
    assert lookup("/lookup?topic=ord&partition=9&access=w") == (200, {**nothing, "channels": []})


def test_lookup_without_the_accept_header(cluster: RedesignedCluster) -> None:
    address = cluster.lookupds[0].http_address
    failed = ask(address, "GET", "/lookup?topic=nope&access=w")
    assert (failed.status, failed.body) == (500, b'{"status_code":500,"status_txt":"Key not found","data":null}')
    reply = ask(address, "GET", "/lookup?topic=ord&partition=1")
    assert reply.json["status_txt"] == "OK"
    assert set(reply.json["data"]["partitions"]) == {"1"}
    assert "x-nsq-content-type" not in reply.headers


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


def test_topics_come_and_go(cluster: RedesignedCluster, lookup: Callable[..., Any]) -> None:
    query = "topic=t&partition_num=2&replicator=2&orderedmulti=true&extend=true"
    assert lookup(f"/topic/create?{query}", "POST")[0] == 200
    assert lookup(f"/topic/create?{query}", "POST")[0] == 200
    meta = lookup("/lookup?topic=t&metainfo=1")[1]["meta"]
    assert (meta["ordered"], meta["extend_support"], meta["replica"]) == (True, True, 2)
    assert lookup("/topic/partition/expand?topic=t&partition_num=3", "POST")[0] == 200
    assert len(lookup("/lookup?topic=t")[1]["partitions"]) == 3
    assert lookup("/topic/delete?topic=t", "POST")[1] == {"message": "MISSING_ARG_TOPIC_PARTITION"}
    assert lookup("/topic/delete?topic=t&partition=**", "POST")[0] == 200
    assert lookup("/topic/delete?topic=t&partition=**", "POST") == (500, {"message": "Key not found"})
    assert "t" not in cluster.state.topics


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


# --- nsqd ------------------------------------------------------------------------------------------------------------


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
    assert post("/pub?topic=none") == (404, "E_TOPIC_NOT_EXIST")
    assert post("/pub?topic=ord&partition=x") == (404, "E_TOPIC_NOT_EXIST")
    assert post("/pub?topic=ord&partition=0", b"") == (406, "MSG_EMPTY")
    assert post("/mpub?topic=none") == (404, "E_TOPIC_NOT_EXIST")
    assert post("/pub_ext?topic=ord&partition=0") == (400, "E_INVALID_JSON_HEADER")
    assert post("/pub_ext?topic=ord&partition=0&ext=%7B%22a%22:1%7D") == (400, "E_EXT_NOT_SUPPORT")
    replica = cluster.node(cluster.partition("ord", 0).replicas[1])
    refused = ask(replica.http_address, "POST", "/pub?topic=ord&partition=0", b"x", **ACCEPT)
    assert (refused.status, refused.json) == (400, {"message": "E_FAILED_ON_NOT_LEADER"})
    assert ask(replica.http_address, "POST", "/pub?topic=ord&partition=0", b"x").status == 500


def test_ext_headers_over_http(cluster: RedesignedCluster) -> None:
    node = cluster.leader_of("ext", 0)
    path = "/pub_ext?topic=ext&ext=%7B%22a%22:%22b%22%7D"
    assert ask(node.http_address, "POST", path, b"x", X_Nsqext_Foo="v").body == b"OK"
    path = "/pub_ext?topic=ext&ext=%7B%22%23%23trace_id%22:%2277%22%7D"
    assert ask(node.http_address, "POST", path, b"x", **ACCEPT).json["trace_id"] == "77"
    consumer = Consumer(node, "SUB ext ch 0", extend_support=True)
    assert consumer.receive().data[29:] == b'{"a":"b","foo":"v"}x'
    consumer.close()


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
    consumer.close()


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
    consumer.close()


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


def test_switches_of_a_channel(cluster: RedesignedCluster) -> None:
    node = cluster.leader_of("plain", 0)

    def post(route: str, channel: str = "ch") -> Any:
        return ask(node.http_address, "POST", f"/channel/{route}?topic=plain&channel={channel}").status

    consumer = Consumer(node, "SUB plain ch 0")
    assert post("pause") == 200
    publish(cluster, "plain", b"1")
    assert consumer.is_quiet(0.03)
    assert post("unpause") == 200
    first = consumer.receive()
    assert first.body == b"1"
    message_id = int.from_bytes(first.id[:8], "big")
    path = f"/message/finish?topic=plain&channel=ch&msgid={message_id}"
    assert ask(node.http_address, "POST", path).status == 200
    assert post("skip") == 200
    publish(cluster, "plain", b"2")
    assert consumer.is_quiet(0.03)
    assert post("unskip") == 200
    publish(cluster, "plain", b"3")
    assert consumer.receive().body == b"3"
    assert post("empty") == 200
    assert cluster.partition("plain", 0).channel("ch").depth == 0
    assert post("pause", "none") == 404
    assert post("delete") == 200
    assert consumer.reader.read() == b""
    consumer.close()


def test_there_are_no_routes_for_topics(cluster: RedesignedCluster) -> None:
    reply = ask(cluster.nsqds[0].http_address, "POST", "/topic/create?topic=t")
    assert (reply.status, reply.json) == (404, {"message": "NOT_FOUND"})
