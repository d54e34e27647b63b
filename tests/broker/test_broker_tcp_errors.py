"""Every refusal of the TCP protocol, with its text, and whether the connection lives on; same on a real nsqd."""

from __future__ import annotations

import contextlib
import json
import struct
from typing import Any

import pytest
from gevent import Timeout
from support.waiting import WAIT
from support.wire import ERROR, WireClient

SUB = b"SUB t c\n"
NO_ID = b"0123456789abcdef"


def body(data: bytes) -> bytes:
    return struct.pack(">i", len(data)) + data


def mpub(*bodies: bytes) -> bytes:
    inner = struct.pack(">i", len(bodies)) + b"".join(map(body, bodies))
    return b"MPUB t\n" + body(inner)


def identify(**fields: Any) -> bytes:
    return b"IDENTIFY\n" + body(json.dumps(fields).encode())


FATAL = {
    "unknown": (b"HELLO\n", "E_INVALID invalid command HELLO"),
    "identify twice after sub": (SUB + identify(), "E_INVALID cannot IDENTIFY in current state"),
    "identify huge": (b"IDENTIFY\n" + struct.pack(">i", 6000000), "E_BAD_BODY IDENTIFY body too big 6000000 > 5242880"),
    "heartbeat high": (
        identify(heartbeat_interval=60001),
        "E_BAD_BODY IDENTIFY heartbeat interval (60001) is invalid",
    ),
    "buffer size high": (
        identify(output_buffer_size=65537),
        "E_BAD_BODY IDENTIFY output buffer size (65537) is invalid",
    ),
    "buffer timeout high": (
        identify(output_buffer_timeout=30001),
        "E_BAD_BODY IDENTIFY output buffer timeout (30001) is invalid",
    ),
    "sample rate": (identify(sample_rate=100), "E_BAD_BODY IDENTIFY sample rate (100) is invalid"),
    "msg timeout high": (identify(msg_timeout=900001), "E_BAD_BODY IDENTIFY msg timeout (900001) is invalid"),
    "two compressions": (
        identify(feature_negotiation=True, snappy=True, deflate=True),
        "E_IDENTIFY_FAILED cannot enable both deflate and snappy compression",
    ),
    "auth disabled": (b"AUTH\n" + body(b"secret"), "E_AUTH_DISABLED AUTH disabled"),
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
    "rdy early": (b"RDY 1\n", "E_INVALID cannot RDY in current state"),
    "rdy high": (SUB + b"RDY 2501\n", "E_INVALID RDY count 2501 out of range 0-2500"),
    "fin long": (SUB + b"FIN " + NO_ID + b"0\n", "E_INVALID invalid message ID"),
    "req delay": (SUB + b"REQ " + NO_ID + b" x\n", "E_INVALID REQ could not parse timeout x"),
    "cls twice": (SUB + b"CLS\nCLS\n", "E_INVALID cannot CLS in current state"),
    "sub params": (b"SUB t\n", "E_INVALID SUB insufficient number of parameters"),
    "rdy word": (SUB + b"RDY x\n", "E_INVALID RDY could not parse count x"),
    "fin params": (SUB + b"FIN\n", "E_INVALID FIN insufficient number of params"),
    "cls early": (b"CLS\n", "E_INVALID cannot CLS in current state"),
    "pub params": (b"PUB\n", "E_INVALID PUB insufficient number of parameters"),
    "mpub params": (b"MPUB\n", "E_INVALID MPUB insufficient number of parameters"),
    "dpub params": (b"DPUB t\n", "E_INVALID DPUB insufficient number of parameters"),
    "pub big": (b"PUB t\n" + struct.pack(">i", 1048577), "E_BAD_MESSAGE PUB message too big 1048577 > 1048576"),
    "mpub big": (b"MPUB t\n" + struct.pack(">i", 5242881), "E_BAD_BODY MPUB body too big 5242881 > 5242880"),
    "mpub count": (
        b"MPUB t\n" + body(struct.pack(">i", 1048576) + b"x" * 10),
        "E_BAD_BODY MPUB invalid message count 1048576",
    ),
    "mpub empty message": (mpub(b"a", b""), "E_BAD_MESSAGE MPUB invalid message(1) body size 0"),
    "dpub far": (b"DPUB t 3600001\n", "E_INVALID DPUB timeout 3600001 out of range 0-3600000"),
}


def last_error(client: WireClient) -> str:
    """Read replies until the connection ends; the last one is an error."""
    frame = client.frame()
    while frame.type != ERROR:
        frame = client.frame()
    return frame.data.decode()


@pytest.mark.parametrize("name", FATAL)
def test_fatal_error(address: Any, name: str) -> None:
    commands, expected = FATAL[name]
    client = WireClient(address)
    client.send(commands)
    assert last_error(client) == expected
    with Timeout(WAIT, AssertionError("not closed")):
        assert client.reader.read(1) == b""


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (b"FIN " + NO_ID + b"\n", b"E_FIN_FAILED FIN " + NO_ID + b" failed ID not in flight"),
        (b"FIN " + NO_ID + b"\r\n", b"E_FIN_FAILED FIN " + NO_ID + b" failed ID not in flight"),
        (b"REQ " + NO_ID + b" 0\n", b"E_REQ_FAILED REQ " + NO_ID + b" failed ID not in flight"),
        (b"TOUCH " + NO_ID + b"\n", b"E_TOUCH_FAILED TOUCH " + NO_ID + b" failed ID not in flight"),
    ],
)
def test_answers_to_what_is_not_in_flight_are_not_fatal(address: Any, command: bytes, expected: bytes) -> None:
    client = WireClient(address)
    assert client.command(SUB) == b"OK"
    client.send(command)
    assert client.frame() == (ERROR, expected)
    client.publish("t", b"still there")


def test_answers_of_another_client_are_not_fatal(address: Any) -> None:
    owner, other = WireClient(address), WireClient(address)
    owner.subscribe("t", "c")
    owner.publish("t", b"body")
    id = next(frame.id for frame in iter(owner.frame, None) if frame.data != b"OK")
    assert other.command(SUB) == b"OK"
    other.send(b"FIN " + id + b"\n")
    assert other.frame() == (ERROR, b"E_FIN_FAILED FIN " + id + b" failed client does not own message")


def test_line_that_never_ends_is_dropped_without_a_word(address: Any) -> None:
    client = WireClient(address)
    client.send(b"PUB " + b"t" * 20000)
    with Timeout(WAIT, AssertionError("not closed")), contextlib.suppress(ConnectionError):
        assert client.reader.read(1) == b""


def test_surplus_parameters_and_carriage_returns_are_ignored(address: Any) -> None:
    client = WireClient(address)
    assert client.command(b"PUB t 0 x\r\n" + body(b"x")) == b"OK"
    assert client.command(b"SUB t c 0\r\n") == b"OK"
    client.send(b"RDY 1 2 3\r\n")
    assert client.message().body == b"x"


def test_rdy_after_cls_is_ignored(address: Any) -> None:
    client = WireClient(address)
    client.subscribe("t", "c", rdy=0)
    assert client.command(b"CLS\n") == b"CLOSE_WAIT"
    client.send(b"RDY 99999\n")
    client.publish("t", b"x")
    with Timeout(0.3, False):
        raise AssertionError(client.frame())


def test_mpub_of_a_message_that_is_too_big(start_nsqd: Any) -> None:
    client = WireClient(start_nsqd(max_msg_size=100).tcp_address)
    assert client.command(mpub(b"x" * 100)) == b"OK"
    client.send(mpub(b"x" * 101))
    assert last_error(client) == "E_BAD_MESSAGE MPUB message too big 101 > 100"


def test_max_channel_consumers(start_nsqd: Any) -> None:
    address = start_nsqd(max_channel_consumers=1).tcp_address
    first = WireClient(address)
    first.subscribe("t", "c")
    second = WireClient(address)
    second.send(SUB)
    assert last_error(second) == "E_SUB_FAILED SUB failed consumers for t:c exceeds limit of 1"
    first.close()


def test_unknown_commands_of_any_bytes(embedded: Any) -> None:
    client = WireClient(embedded().tcp_address)
    client.send(b"\xff\x00 \n")
    assert client.frame() == (ERROR, b"E_INVALID invalid command \xff\x00")
