"""gnsq's clients of TCP and HTTP, its protocol functions, errors, timer, addresses and messages."""

from __future__ import annotations

import json
import ssl
import struct
import warnings

import pytest
from gevent.ssl import SSLSocket
from support.waiting import until
from support.wire import frame, message_frame

from nsq_fast import _codec, errors, gnsq
from nsq_fast.broker import NsqdOptions, NsqdServer
from nsq_fast.gnsq import protocol, states
from nsq_fast.gnsq.errors import (
    ERROR_CODES,
    NSQErrorCode,
    NSQException,
    NSQFinishFailed,
    NSQInvalid,
    NSQRequeueFailed,
    NSQSocketError,
    make_error,
)
from nsq_fast.gnsq.httpclient import USERAGENT, HTTPClient
from nsq_fast.gnsq.stream import DefalteSocket, SnappySocket, Stream
from nsq_fast.gnsq.util import normalize_nsqd_address, parse_lookupds, parse_nsqds


@pytest.fixture
def client(nsqd):
    client = gnsq.NsqdTCPClient(*nsqd.address, timeout=5)
    client.connect()
    yield client
    client.close_stream()


@pytest.fixture
def peer(nsqd, client):
    """The other end of the client's connection."""
    nsqd.wait_for(lambda: nsqd.connections)
    return nsqd.connections[0]


def test_a_connection_is_made_once_and_closed_once(nsqd):
    client, closed = gnsq.NsqdTCPClient(*nsqd.address), []
    client.on_close.connect(closed.append, weak=False)
    assert client.state == states.INIT
    client.connect()
    client.connect()
    assert client.is_connected
    assert len(nsqd.connections) <= 1
    client.close_stream()
    client.close_stream()
    assert client.state == states.DISCONNECTED
    assert closed == [client]
    with pytest.raises(NSQException, match="already closed"):
        client.connect()
    for call in (client.nop, client.read_response):
        with pytest.raises(NSQSocketError):
            call()
    nsqd.stop()
    with pytest.raises(NSQSocketError):
        gnsq.NsqdTCPClient(*nsqd.address).connect()


def test_identify_tells_who_we_are_and_learns_what_the_server_is(nsqd, client, peer):
    nsqd.info = {"max_rdy_count": 7, "version": "1.3.0"}
    assert client.identify() == nsqd.info
    assert client.max_ready_count == 7
    assert peer.identify["heartbeat_interval"] == 30_000
    assert peer.identify["feature_negotiation"] is True
    assert "gnsq" in peer.identify["user_agent"]


def test_identify_of_a_server_without_features_and_of_a_broken_one(nsqd, client):
    nsqd.replies[b"IDENTIFY"] = frame(0, b"OK")
    assert client.identify() is None
    nsqd.replies[b"IDENTIFY"] = frame(0, b"{")
    with pytest.raises(NSQException, match="parse IDENTIFY"):
        client.identify()
    assert not client.is_connected


def test_auth_follows_when_the_server_asks_for_it(nsqd):
    nsqd.info["auth_required"] = True
    nsqd.replies[b"AUTH"] = frame(0, json.dumps({"identity": "me"}).encode())
    client, heard = gnsq.NsqdTCPClient(*nsqd.address, auth_secret="secret"), []
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
    with pytest.raises(ValueError, match="negative"):
        client.ready(-1)
    assert client.ready_count == 5


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
    peer.send(struct.pack(">ii", 4, 9))
    with pytest.raises(gnsq.errors.NSQFrameError, match="unknown frame 9"):
        client.read_response()


@pytest.mark.parametrize("end", ["an error", "the server goes"])
def test_listening_ends_with_the_connection(client, peer, end):
    peer.send(message_frame(1))
    if end == "an error":
        peer.send(frame(1, b"E_INVALID no"))
        client.listen()
    else:
        peer.close()
        client.read_response()
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


@pytest.mark.parametrize(
    ("tls", "compression", "kind"),
    [(True, None, None), (False, "snappy", SnappySocket), (True, "deflate", DefalteSocket)],
)
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
    seen, address = [], str(secure_nsqd.tcp_address)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        producer = gnsq.Producer(address, **options)
        consumer = gnsq.Consumer("topic", "channel", address, **options, timeout=10)
    consumer.on_message.connect(lambda consumer, message: seen.append(message.body), weak=False)
    with producer, consumer:
        producer.publish("topic", b"secret")
        until(lambda: seen == [b"secret"])


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


# gnsq's protocol functions, errors, timer, addresses and messages: what goes in, what comes out.


def sized(data: bytes) -> bytes:
    return struct.pack(">i", len(data)) + data


BATCH = struct.pack(">i", 2) + sized(b"a") + sized(b"bc")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (protocol.identify({"a": "é"}), b"IDENTIFY\n" + sized(b'{"a": "\\u00e9"}')),
        (protocol.auth("secret"), b"AUTH\n" + sized(b"secret")),
        (protocol.subscribe("t", "c#ephemeral"), b"SUB t c#ephemeral\n"),
        (protocol.publish("t", b""), b"PUB t\n" + sized(b"")),
        (protocol.deferpublish("t", b"x", 7), b"DPUB t 7\n" + sized(b"x")),
        (protocol.ready(0), b"RDY 0\n"),
        (protocol.finish("any é"), "FIN any é\n".encode()),
        (protocol.requeue(b"id", -1), b"REQ id -1\n"),
        (protocol.touch("id"), b"TOUCH id\n"),
        (protocol.close(), b"CLS\n"),
        (protocol.nop(), b"NOP\n"),
        (protocol.multipublish("t", iter([b"a", b"bc"])), b"MPUB t\n" + sized(BATCH)),  # any iterable
        (protocol.multipublish_body(iter([b"a", b"bc"])), BATCH),
    ],
)
def test_commands(command, expected):
    assert command == expected


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: protocol.publish("no topic", b"x"), ValueError),
        (lambda: protocol.subscribe("t", "no channel"), ValueError),
        (lambda: protocol.publish("t", "text"), TypeError),
        (lambda: protocol.multipublish("t", [b"x", "text"]), TypeError),
        (lambda: protocol.ready("1"), TypeError),
        (lambda: protocol.ready(-1), ValueError),
        (lambda: protocol.requeue(b"id", 1.5), TypeError),
    ],
)
def test_wrong_arguments_are_refused(call, error):
    with pytest.raises(error):
        call()


def test_a_message_is_taken_apart_with_unsigned_attempts():
    frame = _codec.encode_message(5, 40_000, b"0123456789abcdef", b"body")
    assert protocol.unpack_size(frame[:4]) == len(frame) - 4
    kind, data = protocol.unpack_response(frame[4:])
    assert kind == protocol.FRAME_TYPE_MESSAGE
    assert protocol.unpack_message(data) == (5, 40_000, b"0123456789abcdef", b"body")
    for data in (b"", b"short"):
        with pytest.raises(gnsq.errors.NSQFrameError):
            protocol.unpack_message(data)


@pytest.mark.parametrize(
    ("data", "kind", "is_fatal"),
    [
        (b"E_INVALID no", errors.Invalid, True),
        (b"E_PUT_FAILED no", errors.PutFailed, True),
        (b"E_FIN_FAILED no", NSQFinishFailed, False),
        (b"E_FINISH_FAILED no", NSQFinishFailed, False),
        (b"E_REQUEUE_FAILED no", NSQRequeueFailed, False),
        (b"what is this", NSQErrorCode, True),
        (b"E_TOPIC_NOT_EXIST", errors.TopicNotExist, True),
    ],
)
def test_make_error(data, kind, is_fatal):
    error = make_error(data)
    assert type(error) is kind
    assert error.fatal is is_fatal
    assert ERROR_CODES[b"E_BAD_TOPIC"] is errors.BadTopic


def test_the_timer_never_overflows_however_often_it_failed():
    timer = gnsq.BackoffTimer(max_interval=30)
    for _ in range(5000):
        timer.failure()
    assert 0 < timer.get_interval() <= 30
    assert not timer.is_reset()
    assert timer.reset().success().is_reset()
    assert timer.get_interval() == 0
    assert gnsq.BackoffTimer(ratio=2, min_interval=7).get_interval() == 7


def test_addresses_of_all_kinds():
    assert normalize_nsqd_address("host") == "host:4150"
    assert parse_nsqds(["[::1]:4150", "::1", "host:1"]) == {"[::1]:4150", "host:1"}
    assert [client.port for client in parse_lookupds("http://host:9/")] == [9]
    assert len(parse_lookupds({"a:1", "b:2"})) == 2
    with pytest.raises(ValueError, match="port"):
        normalize_nsqd_address("host:port")
    for call in (lambda: parse_nsqds(None), lambda: parse_lookupds(None), lambda: normalize_nsqd_address(4150)):
        with pytest.raises(TypeError):
            call()


# Messages: anything may be id and body, answers go to its signals, and what a consumer gets is one too


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda message: message.finish(), ("on_finish", True, {})),
        (lambda message: message.requeue(), ("on_requeue", True, {"timeout": 0, "backoff": True})),
        (lambda message: message.requeue(9, backoff=False), ("on_requeue", True, {"timeout": 9, "backoff": False})),
    ],
)
def test_a_message_keeps_what_it_was_made_of_and_is_answered_once(answer, expected):
    def hear(name):
        return lambda sender, **values: heard.append((name, sender is message, values))

    heard, message = [], gnsq.Message(1, 2, "id", "text")
    assert (message.timestamp, message.attempts, message.id, message.body) == (1, 2, "id", "text")
    assert not message.is_async()
    message.enable_async()
    assert message.is_async()
    for name in ("on_finish", "on_requeue", "on_touch"):
        getattr(message, name).connect(hear(name), weak=False)
    message.touch()
    assert not message.has_responded()
    answer(message)
    assert message.has_responded()
    for again in (message.finish, message.requeue, message.touch):
        with pytest.raises(gnsq.errors.NSQException):
            again()
    assert heard == [("on_touch", True, {}), expected]


def test_what_a_consumer_hands_over_is_an_instance():
    assert isinstance(_codec.Message(1, 1, b"0" * 16, b"body"), gnsq.Message)
    assert isinstance(gnsq.Message(1, 1, "id", "body"), _codec.Message)
    assert not isinstance("message", gnsq.Message)


# gnsq's HTTP clients, and the two deprecated classes, with the embedded servers.


class Https:
    """As much of urllib3.HTTPSConnectionPool as matters."""

    scheme = "https"


@pytest.fixture
def nsqd_client(nsq_broker):
    return gnsq.NsqdHTTPClient(*nsq_broker.nsqd.http_address)


@pytest.fixture
def lookupd(nsq_broker):
    return gnsq.LookupdClient.from_url(f"http://{nsq_broker.lookupd.http_address}/")


def test_nsqd_is_published_to_and_administered(nsqd_client):
    assert nsqd_client.ping() == b"OK"
    assert "version" in nsqd_client.info()
    assert nsqd_client.publish("topic", "text is sent as UTF-8: é") == b"OK"
    assert nsqd_client.multipublish("topic", iter([b"a", "b"])) == b"OK"
    assert nsqd_client.multipublish("topic", [b"a\nb", b"c"], binary=True) == b"OK"
    with pytest.raises(gnsq.errors.NSQException, match="newline"):
        nsqd_client.multipublish("topic", [b"a\nb"])
    nsqd_client.create_channel("topic", "channel")
    nsqd_client.pause_channel("topic", "channel")
    (topic,) = nsqd_client.stats(topic="topic")["topics"]
    assert topic["message_count"] == 5
    assert topic["channels"][0]["paused"] is True
    assert b"topic" in nsqd_client.stats(text=True)
    for call in (nsqd_client.unpause_channel, nsqd_client.empty_channel, nsqd_client.delete_channel):
        call("topic", "channel")
    for call in (nsqd_client.pause_topic, nsqd_client.unpause_topic, nsqd_client.empty_topic, nsqd_client.delete_topic):
        call("topic")
    with pytest.raises(gnsq.errors.NSQHttpError, match="404"):
        nsqd_client.delete_topic("topic")
    with pytest.raises(ValueError, match="topic"):
        nsqd_client.publish("no topic", b"x")


def test_nsqlookupd_is_asked_and_administered(lookupd, nsqd_client, nsq_broker):
    assert lookupd.ping() == b"OK"
    with pytest.raises(gnsq.errors.NSQHttpError):
        lookupd.lookup("topic")
    lookupd.create_topic("topic")
    lookupd.create_channel("topic", "channel")
    assert lookupd.topics() == {"topics": ["topic"]}
    assert lookupd.channels("topic") == {"channels": ["channel"]}
    assert lookupd.lookup("topic")["channels"] == ["channel"]
    assert len(lookupd.nodes()["producers"]) == 1
    lookupd.tombstone_topic("topic", str(nsq_broker.nsqd.http_address))
    lookupd.delete_channel("topic", "channel")
    lookupd.delete_topic("topic")


def test_options_of_connection_pools_are_understood(tmp_path):
    client = HTTPClient("host", 1, connection_class=Https, timeout=3.5, maxsize=4, retries=0, cert_reqs="CERT_NONE")
    assert (client.scheme, client.host, client.port, client.address) == ("https", "host", 1, "https://host:1/")
    assert repr(client) == "<HTTPClient 'https://host:1/'>"
    assert client.useragent == USERAGENT
    assert gnsq.NsqdHTTPClient.from_url("https://host:7", ssl_context=ssl.create_default_context()).scheme == "https"
    with pytest.raises(ValueError, match="no_such"):
        HTTPClient("host", 1, no_such=1)


def test_lookupd_can_be_made(nsq_broker):
    with pytest.deprecated_call():
        lookupd = gnsq.Lookupd(f"http://{nsq_broker.lookupd.http_address}/")
    assert lookupd.ping() == b"OK"
    with pytest.deprecated_call():
        assert lookupd.base_url == lookupd.address
    lookupd.create_topic("topic")
    with pytest.deprecated_call():
        lookupd.tombstone_topic_producer("topic", "127.0.0.1:4151")


def test_nsqd_speaks_http_until_it_is_connected(nsq_broker):
    tcp, http = nsq_broker.nsqd.tcp_address, nsq_broker.nsqd.http_address
    with pytest.deprecated_call():
        nsqd_client = gnsq.Nsqd(tcp.host, tcp.port, http.port)
        same = gnsq.Nsqd(tcp.host, tcp.port, http.port)
    assert nsqd_client == same
    assert str(nsqd_client) == str(tcp)
    assert nsqd_client.base_url == f"http://{http}/"
    assert nsqd_client.publish("topic", b"over http") == b"OK"
    assert nsqd_client.multipublish("topic", [b"over", b"http"]) == b"OK"
    with pytest.deprecated_call():
        assert nsqd_client.publish_http("topic", b"x") == b"OK"
    nsqd_client.connect()
    nsqd_client.publish("topic", b"over tcp")
    nsqd_client.check_ok()
    nsqd_client.multipublish("topic", [b"over", b"tcp"])
    nsqd_client.check_ok()
    assert nsqd_client.stats()["topics"][0]["message_count"] == 7
    nsqd_client.close_stream()
    with pytest.raises(AttributeError):
        _ = nsqd_client.no_such_attribute
