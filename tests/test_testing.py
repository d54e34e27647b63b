"""The plugin's fixtures serve programs of every kind, and misbehave as they are told; one message there and back."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest
import yaml
from gevent import socket
from gevent.server import StreamServer
from support.cluster import Standalone
from support.processes import until_async
from support.servers import RealLookupd, RealNsqd
from support.waiting import PROCESS, until
from support.wire import WireClient, sized

import nsq_fast.aio
import nsq_fast.threads
from nsq_fast import Consumer, NsqdHTTPClient, Producer
from nsq_fast.broker import Broker, BrokerProcess, ClusterProcess, RedesignedCluster
from nsq_fast.errors import ConfigError, NsqError

ROOT = Path(__file__).parent.parent


@pytest.fixture
def echo():
    def serve(sock, _peer):
        while data := sock.recv(4096):
            sock.sendall(data)

    server = StreamServer(("127.0.0.1", 0), serve)
    server.start()
    yield ("127.0.0.1", server.server_port)
    server.stop()


def test_bytes_pass_unchanged_however_they_are_cut_and_wait_while_a_link_is_stalled(echo, nsq_link):
    link = nsq_link(echo)
    link.chunk = 1
    with socket.create_connection(link.address) as sock:
        sock.sendall(b"hello")
        received = b""
        while len(received) < 5:
            received += sock.recv(10)
        assert received == b"hello"
        link.stall()
        sock.sendall(b"x")
        with gevent.Timeout(0.05, False):
            sock.recv(1)
            pytest.fail("the link passed data on")
        link.flow()
        assert sock.recv(1) == b"x"


def test_cut_and_refuse_close_connections(echo, nsq_link):
    link = nsq_link(echo)
    with socket.create_connection(link.address) as sock:
        sock.sendall(b"x")
        assert sock.recv(1) == b"x"
        link.cut()
        assert sock.recv(1) == b""
    link.refuse()
    with socket.create_connection(link.address) as sock:
        assert sock.recv(1) == b""
    assert link.connections == 2


@pytest.mark.nsq_broker(nsqds=2, preserve_order=True)
def test_the_broker_fixture_takes_options_from_its_marker(nsq_broker):
    assert [server.nsqd.options.preserve_order for server in nsq_broker.nsqds] == [True, True]


def test_a_garbled_link_sends_bytes_that_are_no_protocol_and_nothing_after_them(echo, nsq_link):
    link = nsq_link(echo)
    with socket.create_connection(link.address) as sock:
        sock.sendall(b"x")
        assert sock.recv(1) == b"x"
        link.garble()
        sock.sendall(b"z")  # the server hears it, and its reply is garbage
        received = b""
        while len(received) < 64:
            received += sock.recv(64)
        assert received == b"\xff" * 64
        sock.sendall(b"swallowed")
        with gevent.Timeout(0.05, False):
            sock.recv(1)
            pytest.fail("the link passed on what it should have swallowed")
    with socket.create_connection(link.address) as sock:
        sock.sendall(b"y")
        assert sock.recv(1) == b"y"


def test_a_producer_behind_a_garbled_link_sees_it_at_once(nsq_broker, nsq_link):
    link = nsq_link(nsq_broker.nsqd.tcp_address)
    with nsq_fast.threads.Producer(str(link.address), attempt_timeout=600.0, publish_timeout=600.0) as producer:
        producer.publish("t", b"before")
        link.garble()
        assert producer.publish("t", b"x") == b"OK"
    assert nsq_broker.messages("t") == [b"before", b"x", b"x"]  # the reply to the first copy was garbage


def test_the_broker_fixture_serves_asyncio(nsq_broker):
    async def main():
        address = str(nsq_broker.nsqd.tcp_address)
        async with nsq_fast.aio.Producer([address]) as producer:
            await producer.publish("t", b"x")
        await asyncio.to_thread(nsq_broker.nsqd.restart)
        async with nsq_fast.aio.Producer([address]) as producer:
            await producer.publish("t", b"y")

    asyncio.run(main())
    assert nsq_broker.messages("t") == [b"y"]  # without a data path a restart begins empty


@pytest.mark.nsq_broker(nsqds=2)
def test_a_publish_survives_that_all_nsqds_are_killed_at_once(nsq_broker):
    """It is sent before anybody has read that they are gone, and is not what ended them."""

    async def main():
        async with nsq_fast.aio.Producer([str(nsqd.tcp_address) for nsqd in nsq_broker.nsqds]) as producer:
            for _ in range(5):
                await until_async(lambda: len(producer.stats()["connected"]) == 2)
                await producer.publish("t", b"before")
                with nsq_broker.fault("kill"):
                    published = producer.publish_nowait("t", b"x")
                assert await published == b"OK"

    asyncio.run(main())


def test_the_broker_fixture_serves_what_blocks_its_thread(nsq_broker):
    with nsq_fast.threads.Producer([str(nsq_broker.nsqd.tcp_address)]) as producer:
        producer.publish("t", b"1")
    http = f"http://{nsq_broker.nsqd.http_address}"
    with urllib.request.urlopen(f"{http}/pub?topic=t", b"2") as reply:  # the real socket, which lets no greenlet run
        assert reply.read() == b"OK"
    program = f"import urllib.request as r; r.urlopen('{http}/pub?topic=t', b'3')"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
    assert nsq_broker.messages("t") == [b"1", b"2", b"3"]
    found = []
    thread = threading.Thread(target=lambda: found.append(nsq_broker.depth("t")))
    thread.start()
    thread.join(10)
    assert found == [3]


@pytest.mark.nsq_cluster(nodes=2, lookupds=1, kind=True)
def test_the_cluster_fixture_serves(nsq_cluster):
    nsq_cluster.create_topic("t", 1, 2, channels=["ch"])
    client = WireClient(nsq_cluster.leader_of("t", 0).tcp_address)
    assert client.command(b"PUB t 0\n\x00\x00\x00\x01x") == b"OK"
    assert (nsq_cluster.messages("t"), nsq_cluster.depth("t", "ch"), nsq_cluster.depth("t", "none")) == ([b"x"], 1, 0)
    consumer = WireClient(nsq_cluster.leader_of("t", 0).tcp_address)
    assert consumer.command(b"SUB t ch 0\n") == b"OK"
    consumer.send(b"RDY 1\n")
    assert consumer.message().body == b"x"
    nsq_cluster.wait_empty("t", "ch")
    with nsq_cluster.fault("refuse_publishes"):
        assert client.command(b"PUB t 0\n\x00\x00\x00\x01y").startswith(b"E_FAILED_ON_NOT_WRITABLE")
    nsq_cluster.kill_node(nsq_cluster.leader_of("t", 0))
    consumer.close()
    client.close()


def test_messages_are_those_that_are_not_finished(nsq_broker):
    client = WireClient(nsq_broker.nsqd.tcp_address)
    for n in range(3):
        client.publish("t", b"%d" % n)
    assert nsq_broker.messages("t") == nsq_broker.messages("t", "first") == [b"0", b"1", b"2"]
    consumer = WireClient(nsq_broker.nsqd.tcp_address)
    consumer.subscribe("t", "c", 1)
    with pytest.raises(TimeoutError, match="3 messages of t/c are not finished"):
        nsq_broker.wait_empty("t", "c", timeout=0.0)
    assert consumer.message().body == b"0"
    assert consumer.frame().body == b"1"
    assert sorted(nsq_broker.messages("t", "c")) == [b"1", b"2"]
    assert (nsq_broker.depth("t"), nsq_broker.depth("t", "other"), nsq_broker.depth("none")) == (2, 0, 0)
    consumer.close()
    client.close()


@pytest.mark.nsq_broker(mem_queue_size=2)
def test_messages_on_disk_count(nsq_broker):
    client = WireClient(nsq_broker.nsqd.tcp_address)
    consumer = WireClient(nsq_broker.nsqd.tcp_address)
    consumer.subscribe("t", "c", 0)
    for n in range(9):
        client.publish("t", b"%d" % n)
    assert nsq_broker.messages("t", "c") == [b"%d" % n for n in range(9)]
    consumer.send(b"RDY 9\n")
    for _ in range(9):
        consumer.message()
    nsq_broker.wait_empty("t")
    consumer.close()
    client.close()


@pytest.fixture(params=["nsq_broker", "nsq_cluster"])
def servers(request):
    servers = request.getfixturevalue(request.param)
    if request.param == "nsq_cluster":
        servers.create_topic("t", channels=["c"])
    return servers


@pytest.mark.nsq_cluster(nodes=1, lookupds=1, kind=True)
def test_faults_have_the_same_names_in_both_dialects(servers):
    def client():
        return WireClient(servers.nsqds[0].tcp_address)

    place = b"t" if isinstance(servers, Broker) else b"t 0"
    publish = b"PUB " + place + b"\n" + sized(b"x")
    with servers.fault("refuse_publishes"):
        assert client().command(publish).startswith(b"E_")
    assert client().command(publish) == b"OK"
    consumer = client()
    assert consumer.command(b"SUB " + place.replace(b"t", b"t c") + b"\nRDY 1\n") == b"OK"
    id = consumer.frame().id
    with servers.fault("fail_fin"):
        assert b"refused by the switch fail_fin" in consumer.command(b"FIN " + id + b"\n")
    assert servers.depth("t", "c") == 1
    assert consumer.command(b"FIN " + id + b"\nNOP\nCLS\n") == b"CLOSE_WAIT"
    servers.wait_empty("t", "c")
    with servers.fault("delay", 0.01):
        assert client().command(publish) == b"OK"
    with servers.fault("drop"):
        silent = client()
        silent.send(publish)  # which is stored, and not confirmed
        until(lambda: servers.depth("t", "c") == 2)
        with gevent.Timeout(0.05, False):
            silent.frame()
            pytest.fail("it was confirmed")
    with servers.fault("kill"), pytest.raises(ConnectionRefusedError):
        client().command(publish)
    until(lambda: client().command(publish) == b"OK")


def test_a_fault_that_does_not_fit_is_refused(nsq_broker):
    for name, value, said in [
        (None, None, "None is no fault; there are"),
        ("delay", -1, "delay_replies=-1: must be a number of seconds, 0 or more"),
        ("delay", float("nan"), "delay_replies=nan: must be"),
        ("delay", "long", "delay_replies='long': must be"),
        ("drop", 5, "5: the fault 'drop' takes no value"),
        ("kill", 3, "3: the fault 'kill' takes no value"),
    ]:
        with pytest.raises(ConfigError, match=said), nsq_broker.fault(name, value):
            pytest.fail("it has begun")
    assert WireClient(nsq_broker.nsqd.tcp_address).command(b"PUB t\n" + sized(b"x")) == b"OK"


def test_a_switch_that_does_not_fit_is_refused(nsq_broker):
    faults = nsq_broker.nsqd.faults.tcp
    for switch, value, said in [
        ("drop_reply", True, "unknown option 'drop_reply'; did you mean 'drop_replies'"),
        ("drop_replies", "no", "drop_replies='no': must be True or False"),
        ("delay_replies", -0.1, "delay_replies=-0.1: must be a number of seconds, 0 or more"),
        ("close_after", -5, "close_after=-5: must be a whole number, 0 or more"),
        ("lie", "text", "lie='text': must be bytes, or None"),
        ("lie_status", "500", "lie_status='500': must be a whole number"),
    ]:
        with pytest.raises(ConfigError, match=said):
            setattr(faults, switch, value)
        with pytest.raises(ConfigError, match=said):
            faults.set(hold_messages=True, **{switch: value})
        assert not faults.hold_messages
        assert not faults.active


def test_what_a_link_cannot_do_is_refused(echo, nsq_link):
    link = nsq_link(echo)
    for name, value, error in [
        ("delay", -1, ConfigError),
        ("delay", "x", ConfigError),
        ("chunk", -1, ConfigError),
        ("chunks", 1, AttributeError),
    ]:
        with pytest.raises(error, match=name):
            setattr(link, name, value)


@pytest.mark.nsq_cluster(nodes=2, lookupds=1, kind=True)
def test_a_topic_that_cannot_be_is_refused(nsq_cluster):
    for arguments, options, said in [
        (("t", 0), {}, "partitions=0: must be a whole number, 1 or more"),
        (("t", 1, -2), {}, "replicas=-2: must be a whole number, 1 or more"),
        (("t", "2"), {}, "partitions='2': must be"),
        (("t", 1, True), {}, "replicas=True: must be"),
        (("t", 1, 3), {}, "'t' needs 3 nodes, and there are 2"),
        (("t", 3, 1), {}, "'t' needs 3 nodes, and there are 2"),
        (("t", 3, 3), {"ordered": True}, "'t' needs 3 nodes, and there are 2"),
        (("t", 300), {"ordered": True}, "max partition allowed exceed"),
        (("t",), {"ordered": "no"}, "ordered='no': must be True or False"),
        (("t",), {"channels": "ch"}, "channels='ch': must be several names"),
        (("t",), {"channels": ["a b"]}, "invalid channel name 'a b'"),
        (("t!",), {}, "invalid topic name 't!'"),
        ((5,), {}, "topic name must be str"),
    ]:
        with pytest.raises(NsqError, match=said):
            nsq_cluster.create_topic(*arguments, **options)
    with pytest.raises(TypeError, match="order"):
        nsq_cluster.create_topic("t", order=True)
    assert not nsq_cluster.state.topics


@pytest.mark.parametrize("subscribes", ["before", "meanwhile"])
def test_a_pause_holds_every_message_and_leaves_channels_as_they_are(nsq_broker, subscribes):
    nsqd = nsq_broker.nsqd
    publisher, consumer, other = (WireClient(nsqd.tcp_address) for _ in range(3))
    other.subscribe("t", "paused", 1)
    nsqd.nsqd.existing_topic("t").existing_channel("paused").set_paused(True)
    if subscribes == "before":
        consumer.subscribe("t", "c", 1)
    with nsq_broker.fault("pause"):
        if subscribes == "meanwhile":
            consumer.subscribe("t", "c", 1)
        publisher.publish("t", b"x")
        for client in (consumer, other):
            with gevent.Timeout(0.05, False):
                client.frame()
                pytest.fail("a message was delivered")
    assert consumer.message().body == b"x"
    with gevent.Timeout(0.05, False):
        other.frame()
        pytest.fail("a channel that was paused delivers")
    for client in (publisher, consumer, other):
        client.close()


def test_a_kill_starts_no_server_that_was_stopped_before(nsq_broker):
    nsq_broker.nsqd.stop()
    with nsq_broker.fault("kill"):
        pass
    assert not nsq_broker.nsqd.is_running


@pytest.mark.parametrize("make", [BrokerProcess, ClusterProcess])
def test_servers_in_a_process_of_their_own_answer_the_same_questions(make, tmp_path):
    options = {} if make is BrokerProcess else {"nodes": 1, "lookupds": 1, "kind": True}
    with make(data_path=tmp_path, **options) as servers:
        command = b"PUB t\n" if make is BrokerProcess else b"PUB t 0\n"
        if make is ClusterProcess:
            servers.create_topic("t", channels=["c"])
        assert (servers.nsqd.tcp_address, servers.nsqd.http_address) == (servers.nsqd.tcp, servers.nsqd.http)
        client = WireClient(servers.nsqds[0].tcp)
        with servers.fault("refuse_publishes"):
            assert client.command(command + sized(b"x")).startswith(b"E_")
        client = WireClient(servers.nsqds[0].tcp)
        assert client.command(command + sized(b"\xff")) == b"OK"
        assert (servers.messages("t"), servers.depth("t"), servers.depth("none")) == ([b"\xff"], 1, 0)
        with pytest.raises(TimeoutError, match="1 messages of t are not finished"):
            servers.wait_empty("t", timeout=0.0)
        with servers.fault("kill"), pytest.raises(ConnectionRefusedError):
            WireClient(servers.nsqds[0].tcp).command(command)
        with pytest.raises(NsqError, match="is no fault; there are"), servers.fault("nothing"):
            pass
        with servers.fault("pause"):
            servers.restart()  # with its data; and the new process has no fault to end
        assert servers.messages("t") == [b"\xff"]
        servers.wait_empty("none")
        client.close()


def test_the_workflow_of_the_page_tests_a_program_that_reads_its_environment(tmp_path):
    page = (ROOT / "docs" / "testing.md").read_text()
    (workflow,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    run = yaml.safe_load(workflow)["steps"][-1]["run"]
    (tmp_path / "test_orders.py").write_text(
        "import os\n"
        "from nsq_fast import NsqdHTTPClient\n"
        "from nsq_fast.threads import Producer\n"
        "def test_an_order_is_published():\n"
        "    with Producer(lookupd_http_addresses=os.environ['NSQ_LOOKUPD_HTTP_ADDRESSES']) as producer:\n"
        "        producer.publish('orders', b'a book')\n"
        "    with NsqdHTTPClient.from_url(os.environ['NSQD_HTTP_ADDRESSES']) as client:\n"
        "        channels = client.stats()['topics'][0]['channels']\n"
        "    assert [(each['channel_name'], each['depth']) for each in channels] == [('billing', 1)]\n"
    )
    here = {"nsq-fast": [sys.executable, "-m", "nsq_fast"], "python": [sys.executable]}
    command = [part for word in shlex.split(run) for part in here.get(word, [word])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PROCESS)
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout + done.stderr


# One message there and back through each kind of server that there is: what `make quick` knows of servers.


BODIES = [b"%d" % number for number in range(100)]


@pytest.fixture
def embedded_original() -> Iterator[str]:
    with Broker() as broker:
        yield str(broker.lookupd.http_address)


@pytest.fixture
def embedded_redesigned() -> Iterator[str]:
    with RedesignedCluster(nodes=1, lookupds=1) as cluster:
        cluster.create_topic("t", partitions=1, replicas=1, channels=["c"])
        yield str(cluster.lookupds[0].http_address)


@pytest.fixture
def real_original(real_nsqd: Callable[..., RealNsqd], real_lookupd: Callable[..., RealLookupd]) -> str:
    lookupd = real_lookupd()
    nsqd = real_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}")
    with NsqdHTTPClient(*nsqd.http_address) as client:
        client.create_topic("t")
        client.create_channel("t", "c")
    return str(lookupd.http_address)


@pytest.fixture
def real_redesigned(standalone_nsqd: Standalone) -> str:
    standalone_nsqd.create_topic("t")
    return str(standalone_nsqd.lookupd_address)


@pytest.mark.round_trip
@pytest.mark.parametrize(
    "servers", ["embedded_original", "embedded_redesigned", "real_original", "real_redesigned"], ids=str
)
def test_what_is_published_is_consumed_once(servers: str, request: pytest.FixtureRequest) -> None:
    lookupd: str = request.getfixturevalue(servers)
    handled: list[bytes] = []

    def handle(_consumer: Any, message: Any) -> None:
        handled.append(message.body)

    with Producer(lookupd_http_addresses=[lookupd]) as producer:
        producer.multipublish("t", BODIES[1:])
        producer.publish("t", BODIES[0])
    with Consumer("t", "c", (), [lookupd], message_handler=handle, max_in_flight=10) as consumer:
        until(lambda: len(handled) >= len(BODIES))
    assert sorted(handled) == sorted(BODIES)
    assert consumer.stats().totals.finished == len(BODIES)
