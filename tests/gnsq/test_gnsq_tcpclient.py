"""NsqdTCPClient and its streams: what they send, what they make of what comes, and how they end."""

from __future__ import annotations

import json
import struct
import warnings

import pytest
from gevent.ssl import SSLSocket
from support.scripted_nsqd import frame, message_frame
from support.waiting import until

from nsq_fast import gnsq
from nsq_fast.broker import NsqdOptions, NsqdServer
from nsq_fast.gnsq import protocol, states
from nsq_fast.gnsq.errors import NSQErrorCode, NSQException, NSQFinishFailed, NSQInvalid, NSQSocketError
from nsq_fast.gnsq.stream import DefalteSocket, SnappySocket, Stream


@pytest.fixture
def client(scripted):
    client = gnsq.NsqdTCPClient(*scripted.address, timeout=5)
    client.connect()
    yield client
    client.close_stream()


@pytest.fixture
def peer(scripted, client):
    """The other end of the client's connection."""
    scripted.wait_for(lambda: scripted.connections)
    return scripted.connections[0]


def test_a_connection_is_made_once_and_closed_once(scripted):
    client, closed = gnsq.NsqdTCPClient(*scripted.address), []
    client.on_close.connect(closed.append, weak=False)
    assert client.state == states.INIT
    client.connect()
    client.connect()
    assert client.is_connected
    assert len(scripted.connections) <= 1
    client.close_stream()
    client.close_stream()
    assert client.state == states.DISCONNECTED
    assert closed == [client]
    with pytest.raises(NSQException, match="already closed"):
        client.connect()
    with pytest.raises(NSQSocketError):
        client.nop()
    with pytest.raises(NSQSocketError):
        client.read_response()


def test_nobody_there_is_a_socket_error(scripted):
    scripted.stop()
    with pytest.raises(NSQSocketError):
        gnsq.NsqdTCPClient(*scripted.address).connect()


def test_identify_tells_who_we_are_and_learns_what_the_server_is(scripted, client, peer):
    scripted.info = {"max_rdy_count": 7, "version": "1.3.0"}
    assert client.identify() == scripted.info
    assert client.max_ready_count == 7
    assert peer.identify["heartbeat_interval"] == 30_000
    assert peer.identify["feature_negotiation"] is True
    assert "gnsq" in peer.identify["user_agent"]


def test_identify_of_a_server_without_features_and_of_a_broken_one(scripted, client):
    scripted.replies[b"IDENTIFY"] = frame(0, b"OK")
    assert client.identify() is None
    scripted.replies[b"IDENTIFY"] = frame(0, b"{")
    with pytest.raises(NSQException, match="parse IDENTIFY"):
        client.identify()
    assert not client.is_connected


def test_auth_follows_when_the_server_asks_for_it(scripted):
    scripted.info["auth_required"] = True
    scripted.replies[b"AUTH"] = frame(0, json.dumps({"identity": "me"}).encode())
    client, heard = gnsq.NsqdTCPClient(*scripted.address, auth_secret="secret"), []
    client.on_auth.connect(lambda client, response: heard.append(response), weak=False)
    client.connect()
    client.identify()
    assert heard == [{"identity": "me"}]
    client.close_stream()


def test_commands_leave_at_once(client, peer):
    client.ready(5)
    client.finish("id")
    client.requeue(b"id", 3)
    client.touch("id")
    client.close()
    peer.wait_for(lambda: len(peer.commands) == 5)
    assert peer.commands == [(b"RDY", b"5"), (b"FIN", b"id"), (b"REQ", b"id", b"3"), (b"TOUCH", b"id"), (b"CLS",)]
    assert client.ready_count == 5


def test_a_rejected_rdy_changes_nothing(client):
    with pytest.raises(ValueError, match="negative"):
        client.ready(-1)
    assert client.ready_count == 0


def test_a_message_is_answered_over_its_connection(client, peer):
    heard = []
    client.on_message.connect(lambda client, message: heard.append(message.body), weak=False)
    client.on_finish.connect(lambda client, message_id: heard.append(message_id), weak=False)
    client.on_requeue.connect(lambda client, **values: heard.append(values), weak=False)
    client.ready(1)
    peer.wait_for(lambda: peer.commands)
    peer.send(message_frame(1, b"first", 40_000) + message_frame(2, b"second"))
    kind, first = client.read_response()
    assert (kind, first.attempts) == (protocol.FRAME_TYPE_MESSAGE, 40_000)
    assert isinstance(first, gnsq.Message)
    assert client.is_starved
    first.touch()
    first.finish()
    _, second = client.read_response()
    second.requeue(9, backoff=False)
    assert (client.in_flight, client.is_starved) == (0, False)
    peer.wait_for(lambda: len(peer.commands) == 4)
    ids = [b"%016x" % 1, b"%016x" % 2]
    assert peer.commands[1:] == [(b"TOUCH", ids[0]), (b"FIN", ids[0]), (b"REQ", ids[1], b"9")]
    assert heard == [b"first", ids[0], b"second", {"message_id": ids[1], "timeout": 9, "backoff": False}]


def test_an_answer_that_could_not_be_sent_can_be_given_again(client, peer):
    peer.send(message_frame(1))
    _, message = client.read_response()
    client.close_stream()
    with pytest.raises(NSQSocketError):
        message.finish()
    assert not message.has_responded()


def test_a_heartbeat_is_answered_and_told(client, peer):
    heard = []
    client.on_response.connect(lambda client, response: heard.append(response), weak=False)
    peer.send(frame(0, b"_heartbeat_"))
    assert client.read_response() == (protocol.FRAME_TYPE_RESPONSE, b"_heartbeat_")
    peer.wait_for(lambda: peer.words() == [b"NOP"])
    assert heard == [b"_heartbeat_"]


@pytest.mark.parametrize(
    ("data", "kind", "is_left_open"),
    [(b"E_INVALID no", NSQInvalid, False), (b"E_FIN_FAILED no", NSQFinishFailed, True), (b"hm", NSQErrorCode, False)],
)
def test_an_error_is_returned_told_and_closes_if_it_is_fatal(client, peer, data, kind, is_left_open):
    heard = []
    client.on_error.connect(lambda client, error: heard.append(error), weak=False)
    peer.send(frame(1, data))
    assert client.read_response() == (protocol.FRAME_TYPE_ERROR, heard[0])
    assert type(heard[0]) is kind
    assert client.is_connected is is_left_open


def test_check_ok_takes_nothing_else(client, peer):
    peer.send(frame(0, b"OK") + frame(0, b"no") + frame(1, b"E_FIN_FAILED no") + message_frame(1))
    client.check_ok()
    for expected in ("unexpected response", "E_FIN_FAILED", "expected response frame"):
        with pytest.raises(NSQException, match=expected):
            client.check_ok()


def test_what_is_no_frame_is_an_error(client, peer):
    peer.send(struct.pack(">ii", 4, 9))
    with pytest.raises(gnsq.errors.NSQFrameError, match="unknown frame 9"):
        client.read_response()


def test_listening_ends_with_the_connection(client, peer):
    peer.send(message_frame(1) + frame(1, b"E_INVALID no"))
    client.listen()
    assert not client.is_connected


def test_a_server_that_goes_away_is_a_socket_error(client, peer):
    peer.close()
    with pytest.raises(NSQSocketError):
        client.read_response()
    assert not client.is_connected


def test_equal_addresses_are_equal_connections():
    one, same, other = (gnsq.NsqdTCPClient("host", port) for port in (1, 1, 2))
    assert one == same != other
    assert len({one, same, other}) == 2
    assert str(one) == "host:1"
    assert (one < other) is not (other < one)


def test_a_heartbeat_interval_above_the_timeout_ends_no_connection():
    client = gnsq.NsqdTCPClient(timeout=1, heartbeat_interval=40)
    assert client._read_timeout() == 80


# TLS and compression, with the embedded nsqd


@pytest.fixture
def secure_nsqd(tls_files):
    with NsqdServer(NsqdOptions(tls_cert=tls_files["cert"], tls_key=tls_files["key"])) as server:
        yield server


@pytest.mark.parametrize("tls", [True, False])
@pytest.mark.parametrize(("compression", "kind"), [(None, None), ("snappy", SnappySocket), ("deflate", DefalteSocket)])
def test_upgrades_carry_messages(secure_nsqd, tls_files, tls, compression, kind):
    options = {"tls_v1": True, "tls_options": {"ca_certs": tls_files["ca"]}} if tls else {}
    if compression:
        options[compression] = True
    client = gnsq.NsqdTCPClient(*secure_nsqd.tcp_address, **options)
    client.connect()
    reply = client.identify()
    assert reply["tls_v1"] is tls
    layers = client.stream.socket if kind is None else client.stream.socket._socket
    assert isinstance(layers, SSLSocket) is tls
    assert kind is None or isinstance(client.stream.socket, kind)
    body = b"body " * 50_000
    client.publish("topic", body)
    client.check_ok()
    client.publish("topic", b"later", defer=1)
    client.check_ok()
    client.multipublish("topic", iter([body]))
    client.check_ok()
    client.subscribe("topic", "channel")
    client.check_ok()
    client.ready(3)
    got = []
    while len(got) < 3:
        _, message = client.read_response()
        got.append(message.body)
        message.finish()
    assert sorted(got) == sorted([body, body, b"later"])
    client.close_stream()


def connected(server, **options):
    client = gnsq.NsqdTCPClient(*server.tcp_address, tls_v1=True, **options)
    client.connect()
    client.identify()
    client.close_stream()


def test_a_certificate_is_verified_unless_the_options_are_silent_about_it(secure_nsqd, tls_files):
    connected(secure_nsqd, tls_options={"ca_certs": tls_files["ca"]})
    for options in (None, {"cert_reqs": 2}):
        with pytest.raises(NSQSocketError, match="certificate"):
            connected(secure_nsqd, tls_options=options)
    connected(secure_nsqd, tls_options={"cert_reqs": 0})
    with pytest.warns(RuntimeWarning, match="not verified"):
        connected(secure_nsqd, tls_options={"certfile": tls_files["cert"], "keyfile": tls_files["key"]})


def test_consumer_and_producer_take_gnsqs_tls_options(secure_nsqd, tls_files):
    options = {"tls_v1": True, "tls_options": {"ca_certs": tls_files["ca"], "cert_reqs": 2, "ssl_version": 5}}
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        producer = gnsq.Producer(str(secure_nsqd.tcp_address), **options)
        consumer = gnsq.Consumer("topic", "channel", str(secure_nsqd.tcp_address), **options, timeout=10)
    consumer.on_message.connect(lambda consumer, message: seen.append(message.body), weak=False)
    producer.start()
    consumer.start(block=False)
    producer.publish("topic", b"secret")
    until(lambda: seen == [b"secret"])
    consumer.close()
    producer.close()


def test_both_compressions_are_the_servers_error(secure_nsqd):
    client = gnsq.NsqdTCPClient(*secure_nsqd.tcp_address, snappy=True, deflate=True)
    client.connect()
    with pytest.raises(NSQErrorCode):
        client.identify()


def test_a_stream_that_is_not_connected_says_so():
    stream = Stream("127.0.0.1", 1, 1)
    for call in (lambda: stream.read(1), lambda: stream.send(b"x"), stream.upgrade_to_tls, stream.upgrade_to_snappy):
        with pytest.raises(NSQSocketError, match="not connected"):
            call()
    stream.close()
    assert stream.consume_buffer() == b""
