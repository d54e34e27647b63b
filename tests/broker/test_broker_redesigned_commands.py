"""What the redesigned dialect answers: codes, texts, which of them end the connection. Observed on a real cluster."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from support.redesigned import Consumer, headed, identify, many, publish, sized, traced
from support.wire import ERROR, Frame, WireClient

from nsq_fast.broker import RedesignedCluster

SUB = b"SUB plain ch 0\n"
ID = b"\0" * 7 + b"c" + b"\0" * 8
NEXT = b"PUB plain 0\n" + sized(b"next")

FATAL = {
    "unknown command": (b"FOO\n", "E_INVALID"),
    "delayed publish": (b"DPUB plain 9\n", "E_INVALID"),
    "publish without topic": (b"PUB\n", "E_INVALID"),
    "illegal topic": (b"PUB b@d 0\n" + sized(b"x"), "E_TOPIC_NOT_EXIST"),
    "no such partition": (b"PUB plain 9\n" + sized(b"x"), "E_TOPIC_NOT_EXIST"),
    "negative partition": (b"PUB plain -2\n" + sized(b"x"), "E_TOPIC_NOT_EXIST"),
    "huge partition": (b"PUB plain 99999999999999999999\n" + sized(b"x"), "E_BAD_PARTITION"),
    "message too big": (b"PUB plain 0\n\x40\0\0\0", "E_BAD_MESSAGE"),
    "body too big": (b"MPUB plain 0\n\x40\0\0\0", "E_BAD_BODY"),
    "no messages": (b"MPUB plain 0\n" + many(), "E_BAD_BODY"),
    "empty message": (b"MPUB plain 0\n" + many(b"a", b""), "E_BAD_MESSAGE"),
    "trace id only": (b"PUB_TRACE plain 0\n" + sized(traced(7, b"")), "E_BAD_BODY"),
    "trace ids only": (b"MPUB_TRACE plain 0\n" + many(traced(7, b"")), "E_BAD_MESSAGE"),
    "header length only": (b"PUB_EXT plain 0\n" + sized(b"\0\0"), "E_BAD_BODY"),
    "header beyond body": (b"PUB_EXT plain 0\n" + sized(b"\0\x20abc"), "E_BAD_BODY"),
    "too few words": (b"SUB plain\n", "E_INVALID"),
    "illegal topic to subscribe": (b"SUB b@d c\n", "E_BAD_TOPIC"),
    "illegal channel": (b"SUB plain c@\n", "E_BAD_CHANNEL"),
    "no topic to subscribe": (b"SUB nix ch\n", "E_TOPIC_NOT_EXIST"),
    "unknown position": (b"SUB_ADVANCED plain ch 0 foo:1\n", "E_INVALID"),
    "unknown special": (b"SUB_ADVANCED plain ch 0 special:2\n", "E_INVALID"),
    "too many colons": (b"SUB_ADVANCED plain ch 0 a:b:c\n", "E_INVALID"),
    "ordered topic": (b"SUB_ADVANCED ord ch 0\n", "E_SUB_ORDER_IS_MUST"),
    "ext support for a plain topic": (identify(extend_support=True) + SUB, "E_SUB_EXTEND_FORBIDDON"),
    "sampling in order": (identify(sample_rate=50) + b"SUB_ORDERED plain ch 0\n", "E_INVALID"),
    "subscribed twice": (SUB + SUB, "E_INVALID"),
    "finish without subscription": (b"FIN " + ID + b"\n", "E_INVALID"),
    "id zero": (SUB + b"FIN " + bytes(16) + b"\n", "E_INVALID"),
    "negative id": (SUB + b"FIN " + b"\xff" * 16 + b"\n", "E_INVALID"),
    "negative delay": (SUB + b"REQ " + ID + b" -1\n", "E_INVALID"),
    "carriage return after a delay": (SUB + b"REQ " + ID + b" 100\r\n", "E_INVALID"),
    "too many ready": (SUB + b"RDY 2501\n", "E_INVALID"),
    "closed twice": (SUB + b"CLS\nCLS\n", "E_INVALID"),
    "create illegal topic": (b"INTERNAL_CREATE_TOPIC z@ 0\n", "E_BAD_TOPIC"),
    "create negative partition": (b"INTERNAL_CREATE_TOPIC z -1\n", "E_BAD_PARTITION"),
    "create odd ext": (b"INTERNAL_CREATE_TOPIC z 0 q\n", "E_BAD_EXT"),
    "small buffer": (identify(output_buffer_size=10), "E_BAD_BODY"),
    "slow buffer": (identify(output_buffer_timeout=2000), "E_BAD_BODY"),
    "long tag": (identify(desired_tag="x" * 101), "E_BAD_BODY"),
}

NOT_FATAL = {
    "header where there is no ext": (b"PUB_EXT plain 0\n" + sized(headed({"a": "b"}, b"x")), "E_EXT_NOT_SUPPORT"),
    "trace id is a number": (b"PUB_EXT plain 0\n" + sized(headed({"##trace_id": 5}, b"x")), "INVALID_TRACE_ID"),
    "trace id is no number": (b"PUB_EXT plain 0\n" + sized(headed({"##trace_id": "-1"}, b"x")), "INVALID_TRACE_ID"),
    "last header of several": (
        b"MPUB_EXT plain 0\n" + many(headed(b"", b"y"), headed({"a": "b"}, b"x")),
        "E_EXT_NOT_SUPPORT",
    ),
    "create topic": (b"INTERNAL_CREATE_TOPIC zz 0\n", "E_CREATE_TOPIC_FAILED"),
    "unknown message to finish": (SUB + b"FIN " + ID + b"\n", "E_FIN_FAILED"),
    "unknown message to requeue": (SUB + b"REQ " + ID + b" 0\n", "E_REQ_FAILED"),
    "unknown message to touch": (SUB + b"TOUCH " + ID + b"\n", "E_TOUCH_FAILED"),
}


@pytest.fixture
def client(cluster: RedesignedCluster, request: pytest.FixtureRequest) -> WireClient:
    """A client of the node that leads the partition the test is about."""
    parameters = getattr(request.node, "callspec", None)
    sent = b"" if parameters is None else parameters.params.get("sent", b"")
    topic = "ord" if b" ord " in sent else "plain"
    return WireClient(cluster.leader_of(topic, 0).tcp_address)


def errors(client: WireClient) -> list[Frame]:
    """The error frames until the end of the connection, or until a message was published."""
    frames: list[Frame] = []
    while True:
        try:
            frame = client.frame()
        except (struct.error, OSError):
            return frames
        if frame.type == ERROR:
            frames.append(frame)
        elif frames and frame.data == b"OK":
            return frames


@pytest.mark.parametrize(("sent", "error"), FATAL.values(), ids=FATAL)
def test_fatal_error(client: WireClient, sent: bytes, error: str) -> None:
    client.send(sent)
    assert [frame.data.split(b" ")[0].decode() for frame in errors(client)] == [error]
    assert client.reader.read() == b""
    client.close()


@pytest.mark.parametrize(("sent", "error"), NOT_FATAL.values(), ids=NOT_FATAL)
def test_error_that_is_not_fatal(client: WireClient, sent: bytes, error: str) -> None:
    client.send(sent + NEXT)
    assert [frame.data.split(b" ")[0].decode() for frame in errors(client)] == [error]
    client.close()


def test_bad_json_is_not_fatal(client: WireClient) -> None:
    reply = client.command(b"PUB_EXT plain 0\n" + sized(headed(b"{a}", b"x")))
    assert reply.startswith(b"E_INVALID_JSON_HEADER fail to parse json header:")
    assert client.command(NEXT) == b"OK"
    client.close()


def test_what_follows_a_bad_message_of_several_is_read_as_a_command(client: WireClient) -> None:
    client.send(b"MPUB_EXT plain 0\n" + many(headed({"a": "b"}, b"x"), headed(b"", b"y")) + b"NOP\n")
    first, second = errors(client)
    assert first.data.startswith(b"E_EXT_NOT_SUPPORT ")
    assert second.data.startswith(b"E_INVALID invalid command")
    client.close()


def test_a_long_line_ends_the_connection_without_a_word(client: WireClient) -> None:
    client.send(b"x" * 5000 + b"\n")
    assert errors(client) == []
    client.close()


@pytest.mark.parametrize("line", [b"PUB plain 7 0\n", b"PUB plain 9 \n", b"PUB plain -1\n", b"PUB plain\n"])
def test_a_partition_counts_only_as_the_third_of_three_words(client: WireClient, line: bytes) -> None:
    assert client.command(line + sized(b"x")) == b"OK"
    client.close()


def test_a_start_position_hides_the_partition(cluster: RedesignedCluster) -> None:
    cluster.create_topic("two", 2, 1, multi_part=True)
    node = cluster.leader_of("two", 1)
    if cluster.leader_of("two", 0) is not node:
        cluster.move_leader("two", 0, node)
    consumer = Consumer(node, "SUB_ADVANCED two ch 1 special:-1")
    publish(cluster, "two", b"in 0", partition=0)
    publish(cluster, "two", b"in 1", partition=1)
    assert consumer.receive().data.endswith(b"in 0")
    assert consumer.is_quiet()
    consumer.close()


def test_a_replica_refuses(cluster: RedesignedCluster) -> None:
    partition = cluster.partition("plain", 0)
    replica = cluster.node(next(node for node in partition.replicas if node != partition.leader))
    client = WireClient(replica.tcp_address)
    assert client.command(b"PUB plain 0\n" + sized(b"x")) == b"E_FAILED_ON_NOT_LEADER "
    assert client.command(b"MPUB_TRACE plain 0\n" + many(traced(1, b"x"))) == b"E_FAILED_ON_NOT_LEADER "
    assert client.command(b"PUB plain\n" + sized(b"x")) == b"E_TOPIC_NOT_EXIST "
    assert client.reader.read() == b""
    client.close()


def test_traces_tell_where_a_message_is(client: WireClient, cluster: RedesignedCluster) -> None:
    def told(command: bytes) -> tuple[Any, ...]:
        return struct.unpack(">2sQQQI", client.command(command))

    assert told(b"PUB_TRACE plain 0\n" + sized(traced(77, b"hello"))) == (b"OK", 2, 77, 0, 35)
    assert told(b"PUB_TRACE plain\n" + sized(traced(2**64 - 1, b"x"))) == (b"OK", 3, 2**64 - 1, 35, 31)
    # Several: the first id, no trace id, the first offset, the size of all.
    assert told(b"MPUB_TRACE plain 0\n" + many(traced(1, b"ab"), traced(2, b"c"))) == (b"OK", 4, 0, 66, 63)
    assert told(b"PUB_TRACE plain 0\n" + sized(traced(0, b"y"))) == (b"OK", 6, 0, 129, 31)
    client.close()


def test_ids_have_the_partition_in_them(cluster: RedesignedCluster) -> None:
    client = WireClient(cluster.leader_of("ord", 2).tcp_address)
    reply = client.command(b"PUB_TRACE ord 2\n" + sized(traced(1, b"x")))
    assert struct.unpack(">Q", reply[2:10]) == ((2 << 50) + 2,)
    client.close()


def test_sizes_of_an_ext_topic(cluster: RedesignedCluster) -> None:
    client = WireClient(cluster.leader_of("ext", 0).tcp_address)
    assert client.command(b"PUB ext 0\n" + sized(b"plainbody")) == b"OK"
    header = b'{"##trace_id":"77","k":"v"}'
    reply = client.command(b"PUB_EXT ext 0\n" + sized(headed(header, b"EB")))
    assert struct.unpack(">2sQQQI", reply) == (b"OK", 3, 77, 40, 62)
    assert client.command(b"MPUB_EXT ext 0\n" + many(headed(header, b"a"), headed(b"", b"b"))) == b"OK"
    assert client.command(b"PUB_EXT ext 0\n" + sized(headed(b"123", b"odd"))) == b"OK"
    client.close()


def test_identify_clamps_and_confirms(client: WireClient) -> None:
    fields = {"output_buffer_size": 1 << 24, "output_buffer_timeout": 5, "desired_tag": "abc"}
    reply = client.command(identify(feature_negotiation=True, **fields))
    assert b'"output_buffer_size":65536,"output_buffer_timeout":10,"desired_tag":"abc"}' in reply
    client.close()
