"""The HTTP clients of nsqd and nsqlookupd, and administration by name, against real and scripted servers.

What HTTP itself bounds stands in tests/client/test_client_lookup.py.
"""

from __future__ import annotations

import json
import ssl
from datetime import datetime
from types import SimpleNamespace

import msgspec
import pytest
from support.http import ask
from support.http_server import reply, scripted_http
from support.waiting import WAIT, until
from support.wire import Consumer, WireClient, publish, sized

from nsq_fast import ClusterAdmin, LookupdHTTPClient, NsqdHTTPClient
from nsq_fast.broker import Broker, RedesignedCluster
from nsq_fast.client.admin import LookupPoller
from nsq_fast.client.http import HttpClient
from nsq_fast.config import LookupConfig
from nsq_fast.errors import BodyInvalid, ConfigError, HttpError, NameInvalid, NsqError, RemoteProtocolError


@pytest.fixture
def recorder():
    """An HTTP server that notes questions, and answers ``reply``, or what ``reply_of(path)`` gives as JSON."""
    noted = SimpleNamespace(questions=[], reply=reply(b"OK"), reply_of=None)

    def script(question):
        noted.questions.append(question)
        path = question.target.partition("?")[0]
        question.send(reply(json.dumps(noted.reply_of(path)).encode()) if noted.reply_of else noted.reply)

    with scripted_http(script) as [server]:
        noted.port = server.address.port
        noted.asked = lambda: [(each.method, each.target, each.body) for each in noted.questions]
        yield noted


@pytest.fixture
def nsqd_client(recorder):
    with NsqdHTTPClient("127.0.0.1", recorder.port) as client:
        yield client


@pytest.fixture
def lookupd(recorder):
    with LookupdHTTPClient("127.0.0.1", recorder.port) as client:
        yield client


# What goes out, where real servers do not show it below

REQUESTS = [
    (lambda c: c.publish("t#ephemeral", memoryview(b"x")), "POST /pub?topic=t%23ephemeral", b"x"),
    (lambda c: c.publish("t", b"x", partition=2), "POST /pub?topic=t&partition=2", b"x"),
    (lambda c: c.multipublish("t", iter([b"x", b"y"])), "POST /mpub?topic=t", b"x\ny"),
    (lambda c: c.unpause_channel("t", "c", partition=0), "POST /channel/unpause?topic=t&channel=c&partition=0", b""),
    (
        lambda c: c.stats("t", "c", True, include_clients=False, include_mem=True),
        "GET /stats?topic=t&channel=c&include_clients=false&include_mem=true",
        b"",
    ),
    (lambda c: c.call("POST", "/channel/skip", topic="t", channel="c"), "POST /channel/skip?topic=t&channel=c", b""),
]
OF_LOOKUPD = [
    (
        lambda c: c.create_topic("t", partition_num=2, replicator=1, orderedmulti=True),
        "POST /topic/create?topic=t&partition_num=2&replicator=1&orderedmulti=true",
    ),
    (lambda c: c.delete_topic("t", partition="**"), "POST /topic/delete?topic=t&partition=%2A%2A"),
    (lambda c: c.tombstone_topic("t", ("::1", 1)), "POST /topic/tombstone?topic=t&node=%5B%3A%3A1%5D%3A1"),
    (lambda c: c.lookup("t", access="w", metainfo=True), "GET /lookup?topic=t&access=w&metainfo=true"),
    (lambda c: c.list_lookupds(), "GET /listlookup"),
]


@pytest.mark.parametrize(("use", "target", "body"), REQUESTS, ids=[target for _, target, _ in REQUESTS])
def test_requests_to_nsqd(nsqd_client, recorder, use, target, body):
    use(nsqd_client)
    assert recorder.asked() == [(*target.split(" "), body)]
    for line in (
        "Accept: application/vnd.nsq; version=1.0",
        f"Host: 127.0.0.1:{recorder.port}",
        "User-Agent: nsq_fast/",
    ):
        assert f"\r\n{line}" in recorder.questions[0].head


@pytest.mark.parametrize(("use", "target"), OF_LOOKUPD, ids=[target for _, target in OF_LOOKUPD])
def test_requests_to_nsqlookupd(lookupd, recorder, use, target):
    """What there is comes bare, or wrapped, as old versions do."""
    data = {"topics": ["t"], "version": "1.3.0"}
    for answer in (data, {"status_code": 200, "status_txt": "OK", "data": data}):
        recorder.reply = reply(b"" if target.startswith("POST") else json.dumps(answer).encode())
        assert use(lookupd) == (None if target.startswith("POST") else data)
    assert recorder.asked() == [(*target.split(" "), b"")] * 2


# What comes back


def test_replies_of_both_formats_and_none(nsqd_client, recorder):
    for body in (b"OK", b'{"status_code":200,"status_txt":"OK","data":"OK"}'):
        recorder.reply = reply(body)
        assert nsqd_client.publish("t", b"x") == b"OK"
        assert nsqd_client.ping() == b"OK"
    recorder.reply = reply(b"")
    assert nsqd_client.info() == nsqd_client.stats() == {}
    for body in (b"<html>", b"[1]", b'{"a":', b'"text"', b"\xff"):
        recorder.reply = reply(body)
        with pytest.raises(RemoteProtocolError, match="/info"):
            nsqd_client.info()


# What is refused before anything is sent


@pytest.mark.parametrize(
    ("use", "error", "match"),
    [
        (lambda c: c.publish("bad topic!", b"x"), NameInvalid, "topic"),
        (lambda c: c.publish("t", "text"), TypeError, "data must be bytes, not str"),
        (lambda c: c.publish("t", b""), BodyInvalid, "data must not be empty"),
        (lambda c: c.publish("t", b"x", 1.5), ConfigError, "defer"),
        (lambda c: c.publish("t", b"x", True), ConfigError, "defer"),
        (lambda c: c.multipublish("t", []), BodyInvalid, "no messages"),
        (lambda c: c.multipublish("t", [b"a\nb"]), BodyInvalid, "binary=True"),
        (lambda c: c.multipublish("t", [b"a", b""]), BodyInvalid, "empty"),
        (lambda c: c.multipublish("t", ["a"]), TypeError, "bytes"),
        (lambda c: c.stats(topic="a/b"), NameInvalid, "topic"),
        (lambda c: c.get_config("../ping"), ConfigError, "option"),
        (lambda c: c.set_config("a?b", 1), ConfigError, "option"),
    ],
)
def test_bad_arguments_never_reach_the_wire(nsqd_client, lookupd, recorder, use, error, match):
    with pytest.raises(error, match=match):
        use(nsqd_client)
    with pytest.raises(ConfigError):
        lookupd.tombstone_topic("t", "host:port")
    assert recorder.questions == []


def test_options_that_cannot_be_used_are_refused():
    https = [{"scheme": "https", "tls_options": each} for each in ({"ca": "x"}, {"cafile": "/does/not/exist"}, 5)]
    hosts = [{"host": "http://h"}, {"host": ""}, {"port": 70000}, {"scheme": "ftp"}]
    for options in (*hosts, {"timeout": "5"}, {"authorization": "a\r\nX: y"}, *https):
        with pytest.raises(ConfigError):
            NsqdHTTPClient(**options)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://h:1", "http://h:1/"),
        ("https://h:1/", "https://h:1/"),
        ("h", "http://h:4151/"),
        ("[::1]:5", "http://[::1]:5/"),
        ("http://[::1]", "http://[::1]:4151/"),
        (("::1", 7), "http://[::1]:7/"),
    ],
)
def test_a_client_from_a_url(url, address):
    client = NsqdHTTPClient.from_url(url)
    assert client.address == address
    assert f"{client.scheme}://" in address
    assert str(client.port) in address
    assert client.host in address
    assert repr(LookupdHTTPClient("h")) == "<LookupdHTTPClient http://h:4161/>"


def test_https_with_a_client_certificate(authority, tls_files, tmp_path):
    pem = str(tmp_path / "client.pem")
    authority.issue_cert("client").private_key_and_cert_chain_pem.write_to_path(pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls_files["cert"], tls_files["key"])
    context.verify_mode = ssl.CERT_REQUIRED
    authority.configure_trust(context)
    options = {"cafile": tls_files["ca"], "certfile": pem}
    asked = []

    def script(question):
        asked.append(question.head)
        question.answer({"channels": ["c"], "producers": []} if "lookup" in question.target else b"OK")

    with scripted_http(script, ssl_context=context) as [server]:
        url = f"https://localhost:{server.address.port}"
        with NsqdHTTPClient.from_url(url, tls_options=options) as client:
            assert client.ping() == b"OK"
        config = LookupConfig(lookupd_tls_options=options, lookupd_authorization="Bearer s3cret")
        poller = LookupPoller(url, config)
        poller.start()
        assert poller.wait_topology("t", WAIT).channels == ("c",)
        poller.stop()
    assert "Authorization: Bearer s3cret\r\n" in asked[1]


# Real servers


def test_real_servers(real_nsqd, real_lookupd):
    def channel():
        return client.stats("t", "c")["topics"][0]["channels"][0]

    def refusal(call, *arguments):
        with pytest.raises(HttpError) as error:
            call(*arguments)
        return error.value.status, error.value.text

    server = real_lookupd()
    nsqd = real_nsqd(f"-lookupd-tcp-address={server.tcp_address}")
    with NsqdHTTPClient(*nsqd.http_address) as client, LookupdHTTPClient(*server.http_address) as lookupd:
        for each in (client, lookupd):
            assert each.ping() == b"OK"
            assert each.info()["version"].startswith("1.")
        assert refusal(lookupd.lookup, "t") == (404, "TOPIC_NOT_FOUND")
        client.create_topic("t")
        client.create_channel("t", "c")
        assert client.publish("t", b"one") == b"OK"
        assert client.publish("t", b"late", 60_000) == b"OK"
        assert client.multipublish("t", [b"two", b"three"]) == b"OK"
        assert client.multipublish("t", [b"with\nnewline"], binary=True) == b"OK"
        until(lambda: channel()["depth"] == 4 and channel()["deferred_count"] == 1)
        assert b"[c" in client.stats(text=True)
        client.pause_channel("t", "c")
        assert channel()["paused"]
        client.unpause_channel("t", "c")
        assert not channel()["paused"]
        client.empty_channel("t", "c")
        assert channel()["depth"] == 0
        client.pause_topic("t")
        assert client.stats("t")["topics"][0]["paused"]
        client.unpause_topic("t")
        client.empty_topic("t")
        until(lambda: lookupd.topics()["topics"] == ["t"] and lookupd.channels("t")["channels"] == ["c"])
        assert lookupd.lookup("t")["producers"][0]["tcp_port"] == nsqd.tcp_address.port
        lookupd.tombstone_topic("t", nsqd.http_address)
        assert lookupd.lookup("t")["producers"] == []
        assert lookupd.nodes()["producers"][0]["tombstones"] == [True]
        client.delete_channel("t", "c")
        client.delete_topic("t")
        assert client.stats()["topics"] == []
        assert refusal(client.empty_topic, "t") == (404, "TOPIC_NOT_FOUND")
        for addresses in ([], ["127.0.0.1:1"], []):
            client.set_config("nsqlookupd_tcp_addresses", addresses)
            assert client.get_config("nsqlookupd_tcp_addresses") == addresses
        client.set_config("log_level", "warn")
        lookupd.create_topic("new")
        lookupd.create_channel("new", "channel")
        assert "new" in lookupd.topics()["topics"]
        lookupd.delete_channel("new", "channel")
        lookupd.delete_topic("new")
        assert "new" not in lookupd.topics()["topics"]
        assert refusal(lookupd.list_lookupds)[0] == 404


# By name: on every partition, with a result for each


@pytest.fixture(params=["embedded", "real"])
def place(request):
    """An nsqd that leads partition 0 of ``t``, which has the channel ``c``, and the administration of its cluster."""
    if request.param == "real":
        server = request.getfixturevalue("standalone_nsqd")
        server.create_topic("t", "c")
        yield SimpleNamespace(nsqd=server, admin=ClusterAdmin(str(server.lookupd_address)))
        return
    with RedesignedCluster(nodes=1, lookupds=1) as cluster:
        cluster.create_topic("t", channels=["c"])
        yield SimpleNamespace(nsqd=cluster.nsqds[0], admin=ClusterAdmin(str(cluster.lookupds[0].http_address)))


@pytest.fixture
def cluster():
    """Three nodes; ``t`` has two partitions with two replicas, and the channel ``c``."""
    with RedesignedCluster(nodes=3, lookupds=2, readiness=0.02, move_step=0.0) as cluster:
        cluster.create_topic("t", 2, 2, ordered=True, channels=["c"])
        cluster.wait_stable()
        yield cluster


@pytest.fixture
def admin(cluster):
    """By the lookupd that does not lead: it finds the one that does."""
    return ClusterAdmin([str(cluster.lookupds[1].http_address)])


def put(place, *bodies):
    client = WireClient(place.nsqd.tcp_address)
    for body in bodies:
        assert client.command(b"PUB t 0\n" + sized(body)) == b"OK"
    client.close()


def take(consumer):
    frame = consumer.receive()
    consumer.finish(frame)
    return frame.body


def test_an_offset_is_set_forward_and_back(cluster, admin):
    publish(cluster, "t", b"a", b"b", b"c")
    consumer = Consumer(cluster.leader_of("t", 0), "SUB_ORDERED t c 0")
    assert [take(consumer)[-1:] for _ in range(3)] == [b"a", b"b", b"c"]
    [result] = admin.set_offset("t", "c", "offset:31", partition=0)
    assert (result.partition, result.is_done, result.error) == (0, True, "")
    assert [take(consumer)[-1:] for _ in range(2)] == [b"b", b"c"]
    assert admin.pause("t", "c", partition=0)[0].is_done
    publish(cluster, "t", b"d")
    assert [(result.partition, result.is_done) for result in admin.set_offset("t", "c", {0: "end"})] == [(0, True)]
    assert admin.unpause("t", "c", partition=0)[0].is_done
    publish(cluster, "t", b"e")
    assert take(consumer)[-1:] == b"e"
    consumer.close()


def test_channels_are_paused_skipped_and_ordered(place):
    assert place.admin.pause("t", "c")[0].is_done
    put(place, b"a")
    consumer = Consumer(place.nsqd, "SUB t c 0", rdy=2)
    assert consumer.is_quiet()
    assert place.admin.unpause("t", "c", partition=0)[0].is_done
    frame = consumer.receive()
    consumer.finish(frame)
    consumer.send(b"TOUCH " + frame.id + b"\n")  # refused as soon as the FIN is carried out
    assert (frame.body, consumer.frame().data[:14]) == (b"a", b"E_TOUCH_FAILED")
    assert place.admin.skip("t", "c")[0].is_done
    put(place, b"lost")
    assert consumer.is_quiet()
    assert place.admin.unskip("t", "c")[0].is_done
    put(place, b"kept")
    assert take(consumer) == b"kept"
    consumer.close()
    assert place.admin.set_order("t", "c", True)[0].is_done
    consumer = Consumer(place.nsqd, "SUB t c 0", rdy=2)
    put(place, b"b", b"c")
    first = consumer.receive()
    assert consumer.is_quiet()  # one at a time
    consumer.finish(first)
    assert take(consumer) == b"c"
    consumer.close()
    assert place.admin.limit_rate("t", "c", 1024)[0].is_done
    [result] = place.admin.pause("t", "unknown")
    assert not result.is_done
    assert "CHANNEL_NOT_FOUND" in result.error


def test_what_cannot_be_is_said_before_anything_is_sent(admin):
    for wrong in (None, "somewhere", "offset:-1", {}, datetime):
        with pytest.raises(ConfigError, match=r"^position="):
            admin.set_offset("t", "c", wrong)
    with pytest.raises(ConfigError, match="kilobytes=0"):
        admin.limit_rate("t", "c", 0)
    with pytest.raises(NsqError, match="leads partition 7"):
        admin.pause("t", "c", partition=7)
    with pytest.raises(NsqError, match="leads partition 7, 9"):
        admin.set_offset("t", "c", {0: "end", 7: "end", 9: "end"})
    with pytest.raises(ConfigError, match=r"position=.*partition=1"):
        admin.set_offset("t", "c", {0: "end"}, partition=1)
    with pytest.raises(ConfigError, match="at least one nsqlookupd"):
        ClusterAdmin([])


def test_each_partition_has_a_result_whatever_its_stats_say(cluster, admin, monkeypatch):
    async def ask_for_garbage(self, loop, method, path, *arguments, **options):
        found = await real_ask(self, loop, method, path, *arguments, **options)
        return msgspec.structs.replace(found, body=said[-1]) if path == "/stats" else found

    said, real_ask = [], HttpClient.ask
    monkeypatch.setattr(HttpClient, "ask", ask_for_garbage)
    for number in range(2):
        publish(cluster, "t", b"x", partition=number)
    of_topics = (b"[]", b"null", b"[1]", b'[{"message_count": "x"}]')
    for stats in (b"null", *(b'{"topics": %b}' % topics for topics in of_topics)):
        said.append(stats)
        done = admin.set_offset("t", "c", "count:1")
        assert [(each.partition, each.error) for each in done] == [(0, ""), (1, "")]
    monkeypatch.undo()
    cluster.partition("t", 1).delete_channel("c")
    done, failed = admin.set_offset("t", "c", "end")
    assert (done.partition, done.is_done, failed.partition, failed.is_done) == (0, True, 1, False)
    assert cluster.partition("t", 0).channel("c").depth == 0


LEADERS = [{"NodeIP": "127.0.0.1", "HttpPort": "http"}, {"NodeIP": "127.0.0.1", "HttpPort": [1]}, [5], "127.0.0.1"]
STATES = [[1], {"node_stat_list": [1]}, {"node_stat_list": [{"node_load_factor": "much"}]}]


def test_nonsense_of_a_lookupd_is_a_mistake_of_the_server(recorder):
    def say(what):
        recorder.reply = reply(json.dumps(what).encode())

    admin = ClusterAdmin(f"127.0.0.1:{recorder.port}")
    for leader in LEADERS:
        say({"lookupdnodes": [], "lookupdleader": leader})
        with pytest.raises(RemoteProtocolError, match="names no leader that can be asked"):
            admin.stats()
    leads = {"NodeIP": "127.0.0.1", "HttpPort": str(recorder.port)}
    for state in STATES:
        recorder.reply_of = lambda path, state=state: state if path == "/cluster/stats" else {"lookupdleader": leads}
        with pytest.raises(RemoteProtocolError, match="not the state of a cluster"):
            admin.stats()
    recorder.reply_of = None
    for leader in (None, 1, {"broadcast_address": 5}):
        say({"channels": [], "producers": [], "partitions": {"0": leader}})
        with pytest.raises(RemoteProtocolError):
            admin.leader_id("t", 0)


def test_the_leading_lookupd_moves_and_expands(cluster, admin):
    partition = cluster.partition("t", 0)
    former = admin.leader_id("t", 0)
    assert former == partition.leader
    follower = next(node for node in partition.replicas if node != former)
    spare = next(node.id for node in cluster.nsqds if node.id not in partition.replicas)
    admin.move_leader("t", 0, follower)
    assert admin.leader_id("t", 0) == follower
    until(lambda: admin.stats().is_stable)
    admin.move_replica("t", 0, former, spare)
    assert set(partition.in_sync) == {follower, spare}
    until(lambda: admin.stats().is_stable)
    admin.expand("t", 3)
    assert len(cluster.state.topics["t"]) == 3
    until(lambda: admin.stats().is_stable)
    assert all(0 <= node.leader_load <= node.node_load for node in admin.stats().nodes)


def test_moves_are_refused_while_the_cluster_is_not_stable():
    with RedesignedCluster(nodes=2, lookupds=1, readiness=30.0) as cluster:
        lookupd = cluster.lookupds[0].http_address
        admin = ClusterAdmin(str(lookupd))
        assert not admin.stats().is_stable
        assert ask(lookupd, "POST", "/topic/create?topic=t&partition_num=1&replicator=1").status == 200
        with pytest.raises(HttpError, match="unstable"):
            admin.move_replica("t", 0, "a", "b")
        with pytest.raises(HttpError):
            admin.expand("t", 2)


def test_a_lookupd_that_answers_nonsense_keeps_no_other_from_being_asked(recorder, cluster):
    recorder.reply = reply(b"[1]")
    admin = ClusterAdmin([f"127.0.0.1:{recorder.port}", str(cluster.lookupds[0].http_address)])
    assert admin.stats().nodes
    assert recorder.questions


def test_all_lookupds_of_the_original_are_asked_where_a_topic_is_and_none_leads():
    """They do not know of each other; one that answers nonsense, or is away, says nothing."""

    def paused():
        return {result.nsqd.tcp for result in admin.pause("t", "c") if result.is_done and result.partition is None}

    with Broker(nsqds=2) as one, Broker() as other, Broker() as neither:
        nsqds = [*one.nsqds, *other.nsqds]
        for nsqd in nsqds:
            with NsqdHTTPClient(*nsqd.http_address) as client:
                client.create_topic("t")
                client.create_channel("t", "c")
        assert all(nsqd.wait_registered(WAIT) for nsqd in nsqds)
        lookupds = [str(broker.lookupd.http_address) for broker in (neither, one, other)]
        admin = ClusterAdmin([*lookupds, "127.0.0.1:1"])
        until(lambda: paused() == {tuple(nsqd.tcp_address) for nsqd in nsqds})
        with pytest.raises(NsqError):
            admin.stats()
        with pytest.raises(HttpError, match="TOPIC_NOT_FOUND"):
            ClusterAdmin(lookupds).pause("unknown", "c")
