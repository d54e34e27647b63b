"""What a redesigned nsqd does that is not kind: the same test on the embedded one and on the real one."""

from __future__ import annotations

from typing import Any

import pytest
from support.http import ask
from support.redesigned import Consumer, headed, identify, sized
from support.waiting import promptly
from support.wire import WireClient

EXT = {"extend_support": True}
TAG = "##client_dispatch_tag"


def publish(node: Any, *messages: tuple[dict[str, Any], bytes]) -> None:
    client = WireClient(node.tcp_address)
    for header, body in messages:
        assert client.command(b"PUB_EXT ext 0\n" + sized(headed(header, body))) == b"OK"
    client.close()


def consume(node: Any, rdy: int = 10, **identity: Any) -> Consumer:
    return Consumer(node, "SUB ext ch 0", rdy=rdy, **EXT, **identity)


def take(consumer: Consumer) -> bytes:
    frame = consumer.receive()
    consumer.finish(frame)
    return frame.data[-1:]


def test_an_untagged_message_blocks_a_lone_tagged_client(node: Any) -> None:
    tagged = consume(node, desired_tag="red")
    publish(node, ({TAG: "red"}, b"1"), ({"k": "v"}, b"2"), ({TAG: "red"}, b"3"))
    assert take(tagged) == b"1"
    assert tagged.is_quiet()
    untagged = consume(node)
    assert take(untagged) == b"2"
    assert take(tagged) == b"3"
    tagged.close()
    untagged.close()


def test_a_tagged_message_blocks_the_others_while_its_client_is_not_ready(node: Any) -> None:
    tagged, untagged = consume(node, rdy=0, desired_tag="red"), consume(node)
    publish(node, ({TAG: "red"}, b"1"), ({"k": "v"}, b"2"))
    assert untagged.is_quiet()
    tagged.send(b"RDY 1\n")
    assert take(tagged) == b"1"
    assert take(untagged) == b"2"
    tagged.close()
    untagged.close()


def test_untagged_clients_get_the_messages_of_a_tag_that_has_gone(node: Any) -> None:
    tagged, untagged = consume(node, rdy=0, desired_tag="red"), consume(node)
    publish(node, ({TAG: "red"}, b"1"), ({"k": "v"}, b"2"))
    tagged.close()
    assert [take(untagged), take(untagged)] == [b"1", b"2"]
    untagged.close()


@pytest.mark.parametrize(
    ("kind", "pattern", "passed"),
    [
        (2, "^a$", b"1"),  # the $ of Go is not before a newline at the end
        (2, r"^\d$", b"3"),  # of ASCII
        (2, r"^\p{Arabic}$", b"4"),
        (2, r"^\p{Greek}$", b""),
        (2, r"\C", b"12345"),  # of RE2 alone
        (2, "(?!a)", b"12345"),  # no regular expression for Go: the filter is ignored
        (2, "", b"12345"),
        (3, "[v", b"12345"),
        (3, "[!b-z]*", b"12345"),
        (3, "{b,a}?", b"25"),
    ],
)
def test_filters_are_read_as_go_does(node: Any, kind: int, pattern: str, passed: bytes) -> None:
    ext_filter = {"type": kind, "filter_ext_key": "k", "filter_data": pattern}
    consumer = consume(node, ext_filter=ext_filter)
    values = ["a", "a\n", "3", "٣", "ab"]
    publish(node, *(({"k": value}, b"%d" % number) for number, value in enumerate(values, 1)))
    assert b"".join(take(consumer) for _ in passed) == passed
    assert consumer.is_quiet(0.05)
    consumer.close()


def test_no_regular_expression_keeps_a_server_busy(node: Any) -> None:
    consumer = consume(node, ext_filter={"type": 2, "filter_ext_key": "k", "filter_data": "(a+)+$"})
    with promptly():
        publish(node, ({"k": "a" * 60 + "!"}, b"1"), ({"k": "a" * 60}, b"2"))
        assert take(consumer) == b"2"
    consumer.close()


def test_a_tag_means_nothing_where_there_are_no_headers(node: Any) -> None:
    client = WireClient(node.tcp_address)
    assert client.command(identify(desired_tag="red", heartbeat_interval=5000)) == b"OK"
    assert client.command(b"SUB t c 0\n") == b"OK"
    client.send(b"RDY 1\n")
    publisher = WireClient(node.tcp_address)
    assert publisher.command(b"PUB t 0\n" + sized(b"x")) == b"OK"
    assert client.frame().body == b"x"
    client.close()
    publisher.close()


@pytest.mark.parametrize(("path", "body"), [("/pub", b"x"), ("/mpub", b"x\ny")])
def test_text_is_not_wrapped_for_clients_of_old(node: Any, path: str, body: bytes) -> None:
    answer = ask(node.http_address, "POST", f"{path}?topic=t&partition=0", body)
    assert (answer.status, answer.body) == (200, b"OK")
    assert "x-nsq-content-type" not in answer.headers
    refused = ask(node.http_address, "POST", f"{path}?topic=none&partition=0", body)
    assert (refused.status, refused.json["status_txt"], refused.json["data"]) == (500, "E_TOPIC_NOT_EXIST", None)


@pytest.mark.parametrize("header", [b'{"k":01}', b'{"k":"\n\xff\\q\\u0041\\ud800"}', b'{"a":[],"a":NaN}'])
def test_headers_that_are_no_json_are_taken_as_the_server_takes_them(node: Any, header: bytes) -> None:
    client, consumer = WireClient(node.tcp_address), consume(node)
    assert client.command(b"PUB_EXT ext 0\n" + sized(headed(header, b"x"))) == b"OK"
    assert consumer.receive().data.endswith(header + b"x")
    client.close()
    consumer.close()


def test_messages_of_an_mpub_may_end_before_its_size_says(node: Any) -> None:
    client = WireClient(node.tcp_address)
    client.send(b"MPUB t 0\n\0\0\0\x63\0\0\0\1" + sized(b"m") + b"PUB t 0\n" + sized(b"n"))
    assert [client.frame().data, client.frame().data] == [b"OK", b"OK"]
    client.close()


def test_a_line_goes_on_until_its_id_is_there(node: Any) -> None:
    client = WireClient(node.tcp_address)
    assert client.command(b"SUB t c 0\n") == b"OK"
    client.send(b"FIN 1234567890\nNOP\nN\n")
    assert client.frame().data.startswith(b"E_FIN_FAILED FIN [49 50 51 52 53 54 55 56 57 48 10 78 79 80 10 78] failed")
    client.close()


def limit_clients(node: Any, ready: int, prefix: str = "") -> None:
    path = f"/channel/setclientlimit?topic=t&partition=0&channel=c&ready={ready}&client_prefix={prefix}"
    assert ask(node.http_address, "POST", path).status == 200


def test_figures_for_people(node: Any) -> None:
    assert ask(node.http_address, "POST", "/pub?topic=t&partition=0", b"x").status == 200
    text = ask(node.http_address, "GET", "/stats").body.decode()
    assert "Health: OK" in text
    assert "[t              ] depth: 31" in text
    assert "[c                        ] depth: 1" in text
    assert "NO_TOPICS" in ask(node.http_address, "GET", "/stats?topic=none").body.decode()
