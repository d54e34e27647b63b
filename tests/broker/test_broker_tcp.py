"""The TCP protocol at its edges: refusals, misbehaving clients, TLS and compression; the same on a real nsqd."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import ssl
import struct
from typing import Any

import pytest
from gevent import Greenlet, Timeout, sleep, socket, spawn
from gevent.ssl import SSLContext
from support.http import ask, channel_figures, post
from support.peers import Peer
from support.waiting import WAIT, until
from support.wire import ERROR, WireClient, identify, many, sized

# Every refusal of the TCP protocol, with its text, and whether the connection lives on; same on a real nsqd.


SUB = b"SUB t c\n"


OK = struct.pack(">ii", 6, 0) + b"OK"


INVALID = {"heartbeat_interval": 60001, "output_buffer_size": 65537, "sample_rate": 100, "msg_timeout": 900001}

# What is in no recorded sequence: test_answers_are_those_of_the_real_servers has the others.
FATAL = {
    "identify huge": (b"IDENTIFY\n" + struct.pack(">i", 6000000), "E_BAD_BODY IDENTIFY body too big 6000000 > 5242880"),
    **{
        name: (identify(**{name: value}), f"E_BAD_BODY IDENTIFY {name.replace('_', ' ')} ({value}) is invalid")
        for name, value in INVALID.items()
    },
    "two compressions": (
        identify(feature_negotiation=True, snappy=True, deflate=True),
        "E_IDENTIFY_FAILED cannot enable both deflate and snappy compression",
    ),
    "auth disabled": (b"AUTH\n" + sized(b"secret"), "E_AUTH_DISABLED AUTH disabled"),
    "sub twice": (SUB + SUB, "E_INVALID cannot SUB in current state"),
    "sub quoted": (b'SUB "\t\xff\xc3\xa9 c\n', 'E_BAD_TOPIC SUB topic name "\\"\\t\\xffé" is not valid'),
    "sub long": (
        b"SUB " + b"t" * 65 + b" c\n",
        f'E_BAD_TOPIC SUB topic name "{"t" * 65}" is not valid',
    ),
    "sub no heartbeat": (
        identify(heartbeat_interval=-1) + SUB,
        "E_INVALID cannot SUB with heartbeats disabled",
    ),
    "rdy high": (SUB + b"RDY 2501\n", "E_INVALID RDY count 2501 out of range 0-2500"),
    "cls twice": (SUB + b"CLS\nCLS\n", "E_INVALID cannot CLS in current state"),
    "rdy word": (SUB + b"RDY x\n", "E_INVALID RDY could not parse count x"),
    "fin params": (SUB + b"FIN\n", "E_INVALID FIN insufficient number of params"),
    "cls early": (b"CLS\n", "E_INVALID cannot CLS in current state"),
    **{
        line: (b"%b\n" % line.encode(), f"E_INVALID {line.split()[0]} insufficient number of parameters")
        for line in ("PUB", "MPUB", "DPUB t", "SUB t")
    },
    "pub big": (b"PUB t\n" + struct.pack(">i", 1048577), "E_BAD_MESSAGE PUB message too big 1048577 > 1048576"),
    "mpub big": (b"MPUB t\n" + struct.pack(">i", 5242881), "E_BAD_BODY MPUB body too big 5242881 > 5242880"),
    "mpub count": (
        b"MPUB t\n" + sized(struct.pack(">i", 1048576) + b"x" * 10),
        "E_BAD_BODY MPUB invalid message count 1048576",
    ),
    "mpub empty message": (b"MPUB t\n" + many(b"a", b""), "E_BAD_MESSAGE MPUB invalid message(1) body size 0"),
}


def last_error(client: WireClient) -> str:
    """Read replies until the connection ends; the last one is an error."""
    frame = client.frame()
    while frame.type != ERROR:
        frame = client.frame()
    return frame.data.decode()


def test_fatal_errors(address: Any) -> None:
    for name, (commands, expected) in FATAL.items():
        client = WireClient(address)
        client.send(commands)
        assert last_error(client) == expected, name
        with Timeout(WAIT, AssertionError(f"{name}: not closed")):
            assert client.reader.read(1) == b""


def test_answers_of_another_client_are_not_fatal(address: Any) -> None:
    owner, other = WireClient(address), WireClient(address)
    owner.subscribe("t", "c")
    owner.publish("t", b"body")
    id = owner.frame().id
    assert other.command(SUB) == b"OK"
    for end in (b"\n", b"\r\n"):
        other.send(b"FIN " + id + end)
        assert other.frame() == (ERROR, b"E_FIN_FAILED FIN " + id + b" failed client does not own message")


def test_line_that_never_ends_is_dropped_without_a_word(address: Any) -> None:
    client = WireClient(address)
    client.send(b"PUB " + b"t" * 20000)
    with Timeout(WAIT, AssertionError("not closed")), contextlib.suppress(ConnectionError):
        assert client.reader.read(1) == b""


def test_surplus_parameters_and_carriage_returns_are_ignored(address: Any) -> None:
    client = WireClient(address)
    assert client.command(b"PUB t 0 x\r\n" + sized(b"x")) == b"OK"
    assert client.command(b"SUB t c 0\r\n") == b"OK"
    client.send(b"RDY 1 2 3\r\n")
    assert client.message().body == b"x"


def test_limits_that_an_nsqd_is_given(start_nsqd: Any) -> None:
    address = start_nsqd(max_msg_size=100, max_channel_consumers=1).tcp_address
    first, second = WireClient(address), WireClient(address)
    assert first.command(b"MPUB t\n" + many(b"x" * 100)) == b"OK"
    first.subscribe("t", "c")
    second.send(SUB)
    assert last_error(second) == "E_SUB_FAILED SUB failed consumers for t:c exceeds limit of 1"
    first.send(b"MPUB t\n" + many(b"x" * 101))
    assert last_error(first) == "E_BAD_MESSAGE MPUB message too big 101 > 100"


# Clients that misbehave, and silent ones.


SEED = 20240607

WORDS = [
    b"IDENTIFY\n", b"\0\0\0\2{}", b"SUB t c\n", b"RDY 5\n", b"FIN ", b"0123456789abcdef", b"\n", b"REQ ", b" 0\n",
    b"TOUCH ", b"CLS\n", b"NOP\n", b"PUB t\n", b"\0\0\0\1x", b"MPUB t\n", b"\0\0\0\x0a\0\0\0\2\0\0\0\1a\0\0\0\1b",
    b"DPUB t 0\n", b"AUTH\n", b"\xff\xff\xff\xff", b"\r\n", b" ", b"\0", b"PUB t#ephemeral\n",
]  # fmt: skip


def talk(address: Any, data: bytes) -> None:
    """Send, half-close, and read what comes until the server closes."""
    with contextlib.closing(socket.create_connection(address, timeout=5)) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(b"  V2" + data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(65536):
            pass


def test_garbage_ends_in_an_error_or_an_end(embedded: Any) -> None:
    server = embedded()
    rng = random.Random(SEED)
    for _ in range(150):
        talk(server.tcp_address, b"".join(rng.choices(WORDS, k=rng.randrange(1, 12))))
        talk(server.tcp_address, rng.randbytes(rng.randrange(1, 200)))
    WireClient(server.tcp_address).publish("still", b"there")


def test_other_protocols(address: Any) -> None:
    for magic in (b"", b" ", b"  V", b"GET / HTTP/1.1\r\n\r\n"):
        with contextlib.closing(socket.create_connection(address, timeout=5)) as sock:
            sock.sendall(magic)
            with contextlib.suppress(OSError):  # the server may have reset the connection by now
                sock.shutdown(socket.SHUT_WR)
            reply = b""
            with contextlib.suppress(ConnectionError):
                while data := sock.recv(1000):
                    reply += data
            assert reply in (b"", struct.pack(">ii", 18, 1) + b"E_BAD_PROTOCOL")


def test_client_that_never_reads_is_dropped_and_its_messages_come_back(start_nsqd: Any) -> None:
    server = start_nsqd()
    deaf = WireClient(server.tcp_address, heartbeat_interval=1000, msg_timeout=1000)
    deaf.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.subscribe("t", "c", rdy=100)
    publisher = WireClient(server.tcp_address)
    for _ in range(40):
        publisher.publish("t", b"x" * 1_000_000)
    for _ in range(20):
        with contextlib.suppress(ConnectionError):
            deaf.send(b"NOP\n")  # as if it had read the heartbeats
        sleep(0.1)  # sleep: longer than a write may take
    until(lambda: channel_figures(server)["client_count"] == 0)
    hungry = WireClient(server.tcp_address)
    hungry.subscribe("t", "c", rdy=10)
    bodies = [len(hungry.message().body) for _ in range(40)]
    assert bodies == [1_000_000] * 40


def test_client_that_publishes_and_never_reads_is_not_listened_to_for_ever(embedded: Any) -> None:
    server = embedded()
    sock = socket.create_connection(server.tcp_address, timeout=1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.sendall(b"  V2")

    def flood() -> None:
        for _ in range(3000):
            sock.sendall(b"PUB t\n\0\0\0\1x" * 1000)

    with pytest.raises(TimeoutError):
        flood()
    WireClient(server.tcp_address).publish("t", b"others go on")


def test_replies_arrive_at_a_client_that_reads_late(start_nsqd: Any) -> None:
    count = 50_000
    with socket.create_connection(start_nsqd().tcp_address) as sock, Timeout(WAIT):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(b"  V2PUB t\n" + sized(b"x"))
        writer = spawn(sock.sendall, (b"PUB t\n" + sized(b"x")) * count)
        writer.join(timeout=0.3)  # sleep: long enough to fill what there is between the two
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)  # it reads late, and no longer slowly
        received = bytearray()
        while len(received) < (count + 1) * len(OK):
            received += sock.recv(65536)
    assert received == OK * (count + 1)


def test_publishes_that_come_in_any_pieces_are_confirmed_in_turn(start_nsqd: Any) -> None:
    server = start_nsqd()
    to_t, to_u = b"PUB t\n" + sized(b"one"), b"PUB u\n" + sized(b"two")
    commands = (
        to_t * 3 + to_u + to_t + b"PUB t\r\n" + sized(b"PUB t\n") + to_t * 2 + b"MPUB t\n" + many(b"a", b"b") + to_u * 2
    )
    for size in (1, 7, 29, len(commands)):
        client = WireClient(server.tcp_address)
        client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(commands), size):
            client.send(commands[at : at + size])
        assert [client.frame().data for _ in range(11)] == [b"OK"] * 11
        client.send(to_t + b"PUB t\n" + sized(b"") + to_t)
        assert client.frame().data == b"OK"
        assert last_error(client) == "E_BAD_MESSAGE PUB invalid message body size 0"
    topics = ask(server.http_address, "GET", "/stats?format=json").json["topics"]
    assert {topic["topic_name"]: topic["message_count"] for topic in topics} == {"t": 4 * 10, "u": 4 * 3}


def test_a_switch_and_a_limit_hold_for_those_who_publish_already(embedded: Any) -> None:
    server = embedded()
    clients = WireClient(server.tcp_address), WireClient(server.tcp_address)
    for client in clients * 3:
        client.publish("t", b"xxx")
    server.faults.tcp.refuse_publishes = True
    clients[0].send(b"PUB t\n" + sized(b"xxx"))
    assert last_error(clients[0]) == "E_PUB_FAILED PUB failed refused by the switch refuse_publishes"
    server.faults.clear()
    server.nsqd.set_options(max_msg_size=2)
    clients[1].send(b"PUB t\n" + sized(b"xxx"))
    assert last_error(clients[1]) == "E_BAD_MESSAGE PUB message too big 3 > 2"


def greenlets() -> int:
    return sum(isinstance(each, Greenlet) for each in gc.get_objects())


def test_a_connection_that_is_only_open_costs_a_socket(embedded: Any) -> None:
    server = embedded()
    before = greenlets()
    opened = [socket.create_connection(server.tcp_address, timeout=WAIT) for _ in range(20)]
    until(lambda: server.faults.tcp.accepted == len(opened))
    assert greenlets() - before < 10
    opened[0].sendall(b"  V2PUB t\n" + sized(b"x"))
    assert opened[0].recv(100) == OK
    for sock in opened:
        sock.close()


# TLS, snappy and deflate from the client's side, by hand; the same on a real nsqd.


COMPRESSIBLE = b"nsq " * 20000


class Layered(Peer):
    """A client whose stream has the layers that IDENTIFY asked for."""

    def __init__(self, address: Any, context: SSLContext | None = None, **fields: Any) -> None:
        super().__init__(socket.create_connection(address))
        fields = {"feature_negotiation": True, "tls_v1": context is not None, **fields}
        self.info = json.loads(self.ask(b"  V2" + identify(**fields)))
        if context is not None:
            self.sock = context.wrap_socket(self.sock, server_hostname="localhost")
            assert self.reply() == b"OK"
        for layer, start in (("snappy", self.start_snappy), ("deflate", self.start_deflate)):
            if fields.get(layer):
                start()
                # The first bytes inside the layer may have come with the last ones outside.
                self._buffer = self._decode(self._buffer) if self._buffer else b""
                assert self.reply() == b"OK"

    def reply(self) -> bytes:
        return self.read_body()[4:]

    def ask(self, data: bytes) -> bytes:
        self.send(data)
        return self.reply()


def exchange(client: Layered) -> None:
    assert client.ask(b"SUB t c\n") == b"OK"
    client.send(b"RDY 10\n")
    for body in (b"small", COMPRESSIBLE):
        client.send(b"PUB t\n" + struct.pack(">i", len(body)) + body)
        frames = [client.reply(), client.reply()]
        frames.remove(b"OK")
        assert frames[0][26:] == body
        client.send(b"FIN " + frames[0][10:26] + b"\n")
    client.send(b"PUB t\n\0\0\0\1x" * 300)
    assert [client.reply() for _ in range(310)].count(b"OK") == 300


LAYERS: list[dict[str, Any]] = [{}, {"snappy": True}, {"deflate": True}, {"deflate": True, "deflate_level": 1}]


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
def test_layers_carry_everything_until_the_server_ends_them(
    start_nsqd: Any, tls: Any, context: SSLContext, encrypted: bool
) -> None:
    server = start_nsqd(**tls)
    for layers in LAYERS:
        client = Layered(server.tcp_address, context if encrypted else None, **layers)
        assert {name: client.info[name] for name in (*layers, "tls_v1")} == {**layers, "tls_v1": encrypted}
        exchange(client)
        post(server, "/channel/delete?topic=t&channel=c")
        with Timeout(WAIT, AssertionError("not closed")), pytest.raises((EOFError, OSError)):
            client.reply()


def test_tls_below_the_lowest_version_is_refused(start_nsqd: Any, tls: Any, context: SSLContext) -> None:
    server = start_nsqd(**tls, tls_min_version="tls1.3")
    assert Layered(server.tcp_address, context).info["tls_v1"] is True
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(OSError):  # noqa: PT011
        exchange(Layered(server.tcp_address, context))


def test_what_is_not_offered_is_not_given(start_nsqd: Any) -> None:
    assert Layered(start_nsqd().tcp_address, deflate=True, deflate_level=9).info["deflate_level"] == 6
    client = WireClient(start_nsqd(deflate=False, snappy=False).tcp_address)
    info = json.loads(client.command(identify(feature_negotiation=True, snappy=True)))
    assert (info["snappy"], info["deflate"], info["tls_v1"]) == (False, False, False)


def test_required_tls(start_nsqd: Any, tls: Any, context: SSLContext) -> None:
    address = start_nsqd(**tls, tls_required="true").tcp_address
    refused = Layered(address)
    assert refused.ask(b"SUB t c\n") == b"E_INVALID cannot SUB in current state (TLS required)"
    exchange(Layered(address, context))


def test_a_broken_stream_ends_the_connection(start_nsqd: Any, tls: Any) -> None:
    server = start_nsqd(**tls)
    for layer in ("snappy", "deflate", "tls_v1"):
        client = Layered(server.tcp_address, **{layer: True})
        client.sock.sendall(b"\xff\xfe this is neither " * 20)
        with Timeout(WAIT, AssertionError(f"{layer}: not closed")), pytest.raises((EOFError, OSError)):
            client.read(1000)


def test_what_inflates_is_read_in_pieces(embedded: Any) -> None:
    client = Layered(embedded(max_msg_size=64 * 1024 * 1024, max_body_size=64 * 1024 * 1024).tcp_address, deflate=True)
    bomb = b"\0" * (32 * 1024 * 1024)
    assert client.ask(b"PUB t\n" + struct.pack(">i", len(bomb)) + bomb) == b"OK"
