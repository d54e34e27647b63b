"""The HTTP face of the embedded nsqd answers as the original's does; its figures, and those it pushes to statsd."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gevent import Timeout, socket, spawn
from gevent.ssl import SSLContext
from support.http import ask, channel_figures, exchange, parse, post, shape
from support.waiting import WAIT, promptly, until
from support.wire import Consumer, WireClient

from nsq_fast.broker import NsqdOptions, NsqdServer
from nsq_fast.broker.executable import parse_flags
from nsq_fast.broker.nsqd import Nsqd
from nsq_fast.broker.queue import ACCURACY, LatencyWindow, latency_stats
from nsq_fast.broker.stats import StatsdPusher, key_prefix, packets
from nsq_fast.errors import ConfigError

# The HTTP face of the embedded nsqd answers as the original's does: the same tests run against both.


@pytest.fixture
def served(start_nsqd: Any) -> Any:
    return start_nsqd()


def stats(served: Any, query: str = "") -> Any:
    answer = ask(served.http_address, "GET", f"/stats?format=json{query}")
    assert answer.status == 200
    return answer.json


# What is in no recorded sequence: test_answers_are_those_of_the_real_servers has the others.
ROUTES = [
    ("POST", "/ping", b"", 405, b'{"message":"METHOD_NOT_ALLOWED"}'),
    ("POST", "/pub?topic=t&topic=%2A", b"x", 200, b"OK"),
    ("POST", "/pub?topic=t&defer=0", b"x", 200, b"OK"),
    ("POST", "/pub?topic=t&defer=+5", b"x", 400, b'{"message":"INVALID_DEFER"}'),
    ("POST", "/pub?topic=t&defer=%2B5", b"x", 200, b"OK"),
    ("POST", "/pub?topic=t&defer=1.5", b"x", 400, b'{"message":"INVALID_DEFER"}'),
    ("POST", "/pub?topic=t&defer=-1", b"x", 400, b'{"message":"INVALID_DEFER"}'),
    ("POST", "/pub?topic=t&defer=3600000", b"x", 200, b"OK"),
    ("POST", "/pub?topic=t&defer=3600001", b"x", 400, b'{"message":"INVALID_DEFER"}'),
    ("POST", "/mpub?topic=t", b"", 200, b"OK"),
    ("POST", "/mpub?topic=t&binary=yes", b"\0\0\0\1\0\0\0\1a and more", 200, b"OK"),
    ("POST", "/mpub?topic=t&binary=1", b"\0\0", 413, b'{"message":"BAD_BODY"}'),
    ("POST", "/mpub?topic=t&binary=1", b"\0\0\0\0", 413, b'{"message":"BAD_BODY"}'),
    ("POST", "/mpub?topic=t&binary=1", b"\xff\xff\xff\xff", 413, b'{"message":"BAD_BODY"}'),
    ("POST", "/mpub?topic=t&binary=1", b"\0\0\0\1", 413, b'{"message":"BAD_MESSAGE"}'),
    ("POST", "/mpub?topic=t&binary=1", b"\0\0\0\1\0\0\0\0", 413, b'{"message":"BAD_MESSAGE"}'),
    ("POST", "/mpub?topic=t&binary=1", b"\0\0\0\1\xff\xff\xff\xff", 413, b'{"message":"BAD_MESSAGE"}'),
    ("POST", "/mpub?topic=t&binary=1", b"\0\0\0\1\0\0\0\2a", 413, b'{"message":"BAD_MESSAGE"}'),
    ("POST", "/topic/create?topic=%2A", b"", 400, b'{"message":"INVALID_TOPIC"}'),
    ("POST", "/channel/create?topic=%2A&channel=c", b"", 400, b'{"message":"INVALID_ARG_TOPIC"}'),
    ("POST", "/channel/create?topic=has&channel=%2A", b"", 400, b'{"message":"INVALID_ARG_CHANNEL"}'),
    ("GET", "/stats?format=json&topic=%zz", b"", 400, b'{"message":"INVALID_REQUEST"}'),
    ("GET", "/config/nsqlookupd_tcp_addresses", b"", 200, b"[]"),
    ("PUT", "/config/log_level", b"", 413, b'{"message":"INVALID_VALUE"}'),
]


def test_status_and_body_of_routes_at_their_edges(served: Any) -> None:
    post(served, "/topic/create?topic=has")
    wrong = []
    for method, path, body, status, reply in ROUTES:
        answer = ask(served.http_address, method, path, body)
        if (answer.status, answer.body) != (status, reply):
            wrong.append((method, path, body, answer))
    assert not wrong


CHUNKED = b"POST /pub?topic=t HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"

SIZES = [  # of a message up to 10 bytes, and of a body up to 40
    ("/pub?topic=t", b"x" * 10, 200, b"OK"),
    ("/pub?topic=t", b"x" * 11, 413, b'{"message":"MSG_TOO_BIG"}'),
    ("/mpub?topic=t", b"x" * 10 + b"\n" + b"y" * 10, 200, b"OK"),
    ("/mpub?topic=t", b"x" * 11 + b"\n", 413, b'{"message":"MSG_TOO_BIG"}'),
    ("/mpub?topic=t", b"x\n" * 20, 200, b"OK"),
    ("/mpub?topic=t", b"x\n" * 20 + b"x", 413, b'{"message":"BODY_TOO_BIG"}'),
    ("/mpub?topic=t&binary=1", b"\0\0\0\1\0\0\0\x0a0123456789", 200, b"OK"),
    ("/mpub?topic=t&binary=1", b"\0\0\0\1\0\0\0\x0b0123456789a", 413, b'{"message":"BAD_MESSAGE"}'),
    ("/mpub?topic=t&binary=1", b"\0\0\0\x08", 413, b'{"message":"BAD_BODY"}'),
]


def test_size_limits(start_nsqd: Any) -> None:
    served = start_nsqd(max_msg_size=10, max_body_size=40)
    for path, body, status, reply in SIZES:
        answer = ask(served.http_address, "POST", path, body)
        assert (answer.status, answer.body) == (status, reply), (path, body)
    with socket.create_connection(served.http_address) as sock, Timeout(10):  # it is refused before it is sent
        sock.sendall(b"POST /pub?topic=t HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 413 ")
    chunked = CHUNKED.replace(b"Host: x", b"Host: x\r\nConnection: close")
    answer = parse(exchange(served.http_address, chunked + b"b\r\n0123456789a\r\n0\r\n\r\n"))
    assert (answer.status, answer.json) == (413, {"message": "MSG_TOO_BIG"})


def test_replies_on_a_kept_connection_do_not_wait(served: Any) -> None:
    request = b"POST /pub?topic=t HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx"
    with socket.create_connection(served.http_address) as sock, promptly():  # 1000 delayed ACKs would take 40 s
        reader = sock.makefile("rb")
        for _ in range(1000):
            sock.sendall(request)
            while reader.readline() != b"\r\n":
                pass
            assert reader.read(2) == b"OK"
        reader.close()


def test_a_deferred_publish_comes_when_it_is_due() -> None:
    # Ours only: the original looks at a new channel for the first time after 5 seconds.
    with NsqdServer() as served:
        consumer, start = Consumer(served, "SUB t c"), time.monotonic()
        post(served, "/pub?topic=t&defer=300", b"soon")
        assert consumer.receive().body == b"soon"
        assert time.monotonic() - start > 0.25


def test_info(served: Any) -> None:
    info = ask(served.http_address, "GET", "/info").json
    assert (info["tcp_port"], info["http_port"]) == (served.tcp_address.port, served.http_address.port)
    assert (info["max_heartbeat_interval"], info["max_deflate_level"]) == (60_000_000_000, 6)


GAUGES = ["heap_objects", "heap_idle_bytes", "heap_in_use_bytes", "heap_released_bytes",
          "gc_pause_usec_100", "gc_pause_usec_99", "gc_pause_usec_95", "next_gc_bytes"]  # fmt: skip
"""Figures of memory, beside how often there was a collection."""


@pytest.fixture
def busy_nsqd(served: Any) -> Iterator[Any]:
    """An nsqd with a consumer that holds one message of two, and a producer."""
    consumer = WireClient(
        served.tcp_address, client_id="id", hostname="host", user_agent="ua/1", feature_negotiation=True
    )
    consumer.subscribe("t", "c")
    producer = WireClient(
        served.tcp_address, client_id="pid", hostname="phost", user_agent="pua/1", feature_negotiation=True
    )
    producer.publish("t", b"12345")
    producer.publish("t", b"6")
    consumer.frame()
    until(lambda: channel_figures(served)["message_count"] == 2)
    yield served
    consumer.close()


def test_stats_count(busy_nsqd: Any) -> None:
    post(busy_nsqd, "/topic/create?topic=other")
    figures = stats(busy_nsqd)
    _, topic = figures["topics"]
    (channel,) = topic["channels"]
    (client,) = channel["clients"]
    (producer,) = figures["producers"]
    assert figures["health"] == "OK"
    assert (topic["topic_name"], topic["depth"], topic["message_count"], topic["message_bytes"]) == ("t", 0, 2, 6)
    assert (channel["depth"], channel["in_flight_count"], channel["client_count"]) == (1, 1, 1)
    assert (client["client_id"], client["hostname"], client["user_agent"]) == ("id", "host", "ua/1")
    assert (client["version"], client["state"], client["ready_count"]) == ("V2", 3, 1)
    assert (client["in_flight_count"], client["message_count"], client["finish_count"]) == (1, 1, 0)
    assert producer.keys() == {*client, "pub_counts"}
    assert (producer["client_id"], producer["pub_counts"]) == ("pid", [{"topic": "t", "count": 2}])
    assert shape(figures["memory"]) == dict.fromkeys([*GAUGES, "gc_total_runs"], "int")
    # What is not asked for is left out.
    assert "memory" not in stats(busy_nsqd, "&include_mem=false")
    assert "memory" in stats(busy_nsqd, "&include_mem=nonsense")
    figures = stats(busy_nsqd, "&include_clients=0")
    (channel,) = figures["topics"][1]["channels"]
    assert (figures["producers"], channel["clients"], channel["client_count"]) == (None, None, 1)
    (producer,) = stats(busy_nsqd, "&topic=other")["producers"]
    assert "pub_counts" not in producer


def test_stats_are_filtered(busy_nsqd: Any) -> None:
    post(busy_nsqd, "/topic/create?topic=a")
    post(busy_nsqd, "/channel/create?topic=t&channel=b")
    names = {
        topic["topic_name"]: [channel["channel_name"] for channel in topic["channels"]]
        for topic in stats(busy_nsqd)["topics"]
    }
    assert list(names.items()) == [("a", []), ("t", ["b", "c"])]
    assert [topic["topic_name"] for topic in stats(busy_nsqd, "&topic=a")["topics"]] == ["a"]
    only_channel = stats(busy_nsqd, "&channel=b")["topics"]
    assert [(topic["topic_name"], len(topic["channels"])) for topic in only_channel] == [("t", 1)]
    assert stats(busy_nsqd, "&topic=t&channel=none")["topics"] == []
    none = stats(busy_nsqd, "&topic=none")
    assert (none["topics"], none["producers"]) == (None, None)


def test_stats_as_text(busy_nsqd: Any) -> None:
    post(busy_nsqd, "/topic/pause?topic=t")
    answer = ask(busy_nsqd.http_address, "GET", "/stats?include_mem=0")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    text = re.sub(r"(host:)\d{5} ", r"\1PORT5 ", answer.body.decode())
    text = re.sub(r"built w/\S+\)|(start_time|uptime|connected:) \S+", r"\1", text)
    assert text == (
        "nsqd v1.3.0 (\nstart_time\nuptime\n\nHealth: OK\n\nTopics:\n"
        "*P [t              ] depth: 0     be-depth: 0     msgs: 2        e2e%: \n"
        "      [c                        ] depth: 1     be-depth: 0     inflt: 1    def: 0    re-q: 0     timeout: 0"
        "     msgs: 2        e2e%: \n"
        "        [V2 host:PORT5 ua/1      ] state: 3 inflt: 1    rdy: 1    fin: 0        re-q: 0        msgs: 1"
        "        connected:\n"
        "\nProducers:\n   [V2 phost:PORT5 pua/1    ] msgs: 2        topics: t=2 connected:\n"
    )


@pytest.mark.parametrize("required", [False, True])
def test_https(start_nsqd: Any, tls: Any, context: SSLContext, required: bool) -> None:
    served = start_nsqd(https=True, **tls, tls_required=str(required).lower())
    answer = ask(served.https_address, "POST", "/pub?topic=t", b"x", ssl_context=context)
    assert (answer.status, answer.body) == (200, b"OK")
    answer = ask(served.http_address, "GET", "/ping")
    if required:
        refusal = {"message": "TLS_REQUIRED", "https_port": served.https_address.port}
        assert (answer.status, answer.json) == (403, refusal)
    else:
        assert answer.status == 200


REFUSED = {
    "a length that is no number": (b"POST /pub?topic=t HTTP/1.1\r\nHost: x\r\nContent-Length: +1\r\n\r\nx", 400),
    "two lengths": (b"POST /pub?topic=t HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx", 400),
    "a length below 0": (b"POST /pub?topic=t HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\nx", 400),
    "a space before the colon": (b"POST /pub?topic=t HTTP/1.1\r\nHost: x\r\nContent-Length : 1\r\n\r\nx", 400),
    "a zero byte": (b"GET /ping HTTP/1.1\r\nHost: x\0\r\n\r\n", 400),
    "no host": (b"GET /ping HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET /ping HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
    "an encoding that is unknown": (b"GET /ping HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
    "an expectation that is unknown": (b"GET /ping HTTP/1.1\r\nHost: x\r\nExpect: more\r\n\r\n", 417),
    "a version that is none": (b"GET /ping HTTP/1.x\r\nHost: x\r\n\r\n", 400),
    "a chunk without a size": (CHUNKED + b"zz\r\nabc", 500),
    "a chunk that is longer than it says": (CHUNKED + b"1\r\nabcd\r\n0\r\n\r\n", 500),
    "a path that begins nowhere": (b"GET ping HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a path that is misspelt": (b"GET /pi%ng HTTP/1.1\r\nHost: x\r\n\r\n", 400),
}

REFUSED_HERE = {
    "a length along with chunks": b"POST /pub?topic=t HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 1\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
    "lines without CR": b"GET /ping HTTP/1.0\nHost: x\n\n",
    "a line that goes on": b"GET /ping HTTP/1.0\r\nHost: x\r\nA: b\r\n Content-Length: 4\r\n\r\n",
}


def test_what_two_servers_could_read_in_two_ways_is_refused_and_ends_the_connection(served: Any) -> None:
    for what, (request, status) in REFUSED.items():
        answer = parse(exchange(served.http_address, request + b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"))
        assert (answer.status, answer.headers["connection"]) == (status, "close"), what
    assert stats(served)["topics"] == []


def test_what_the_original_lets_pass_is_refused_here(served: Any) -> None:
    expected = (400, b"400 Bad Request") if isinstance(served, NsqdServer) else (200, b"OK")
    for what, request in REFUSED_HERE.items():
        answer = parse(exchange(served.http_address, request))
        assert (answer.status, answer.body) == expected, what


def test_headers_without_end_are_refused_here() -> None:
    with NsqdServer() as served:
        request = b"GET /ping HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 200_000
        assert parse(exchange(served.http_address, request)).status == 431


def test_requests_that_come_in_any_pieces_are_answered_in_turn(served: Any) -> None:
    requests = (
        b"POST /pub?topic=t HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\none"
        + CHUNKED
        + b"2;a=b\r\ntw\r\n1\r\no\r\n0\r\nA: b\r\n\r\n"
        b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nxyz"
        b"GET http://elsewhere/ping HTTP/1.1\r\nhost: x\r\n\r\n"
        b"GET /ping HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
        b"GET /ping HTTP/1.0\r\n\r\n"
    )
    for size in (1, 7, len(requests)):
        with socket.create_connection(served.http_address) as sock, Timeout(WAIT):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for at in range(0, len(requests), size):
                sock.sendall(requests[at : at + size])
            received = b""
            while data := sock.recv(65536):
                received += data
        statuses = [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d+)", received)]
        assert statuses == [200, 200, 404, 200, 200, 200]
    assert stats(served)["topics"][0]["message_bytes"] == 3 * 6


def test_replies_arrive_at_a_client_that_reads_late(served: Any) -> None:
    count = 3000
    request = b"POST /pub?topic=t HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\none"
    with socket.create_connection(served.http_address) as sock, Timeout(WAIT):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def write() -> None:
            for _ in range(count):
                sock.sendall(request)

        writer = spawn(write)
        writer.join(timeout=0.3)  # sleep: long enough to fill what there is between the two
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)  # it reads late, and no longer slowly
        received, statuses = b"", 0
        while statuses < count:
            received += sock.recv(65536)
            statuses += received.count(b"HTTP/1.1 200 OK")
            received = received[received.rfind(b"HTTP/1.1 200 OK") + 1 :]
    assert stats(served)["topics"][0]["message_count"] == count


def test_a_client_that_asks_for_leave_to_send_its_body_gets_it(served: Any) -> None:
    head = b"POST /pub?topic=t HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection(served.http_address) as sock, Timeout(WAIT):
        sock.sendall(head)
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b"abc")
        assert sock.recv(1000).startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_body_that_is_not_wanted_is_not_awaited_and_the_reply_is_read_here() -> None:
    expecting = b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\nExpect: 100-continue\r\n\r\n"
    with NsqdServer() as served:  # the reply of the original is lost in a reset now and then
        too_long = ask(served.http_address, "POST", "/pub?topic=t", b"x" * 2_000_000)
        nowhere = parse(exchange(served.http_address, expecting))
    assert (too_long.status, too_long.headers["connection"]) == (413, "close")
    assert (nowhere.status, nowhere.headers["connection"]) == (404, "close")


# Figures: latency quantiles, and what is pushed to statsd.


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def quantiles(*windows: LatencyWindow | None) -> list[float]:
    return [each["value"] for each in latency_stats(windows)["percentiles"]]


def test_what_is_older_than_the_window_does_not_count() -> None:
    clock = Clock()
    window = LatencyWindow((1.0,), 60.0, clock)
    window.add(1000)
    clock.now += 31
    window.add(2000)
    assert latency_stats([window])["count"] == 2
    clock.now += 30
    assert latency_stats([window])["count"] == 1
    assert quantiles(window) == pytest.approx([2000], rel=ACCURACY)
    clock.now += 1000
    assert latency_stats([window]) == {"count": 0, "percentiles": [{"quantile": 1.0, "value": 0.0}]}


def test_figures_of_a_server(start_nsqd: Callable[..., Any]) -> None:
    server = start_nsqd(e2e_processing_latency_percentiles=(0.5, 1.0, 0.95))
    client = WireClient(server.tcp_address)
    client.subscribe("t", "c", 4)
    for _ in range(4):
        WireClient(server.tcp_address).publish("t", b"x")
    ids = [client.frame().id for _ in range(4)]
    client.send(b"FIN %b\nFIN %b\nFIN %b \nFIN %b \n" % tuple(ids))  # two in a run of FINs, and two alone
    until(lambda: shown(server)["channels"][0]["e2e_processing_latency"]["count"] == 4)
    topic = shown(server)
    for latency in (topic["e2e_processing_latency"], topic["channels"][0]["e2e_processing_latency"]):
        assert latency["count"] == 4
        assert [each["quantile"] for each in latency["percentiles"]] == [1.0, 0.95, 0.5]
        values = [each["value"] for each in latency["percentiles"]]
        assert values == sorted(values, reverse=True)
        assert 0 < values[-1] < 3600e9
    text = ask(server.http_address, "GET", "/stats?topic=t").body.decode()
    assert text.count(" e2e%: ") == 2
    assert all(len(line.split(" e2e%: ")[1].split(", ")) == 3 for line in text.splitlines() if " e2e%: " in line)


def shown(server: Any) -> Any:
    [topic] = ask(server.http_address, "GET", "/stats?format=json&topic=t").json["topics"]
    return topic


@pytest.mark.parametrize("values", [(0.0,), (1.1,), (0.5, -1.0), ("x",), 0.5])
def test_percentiles_out_of_range_are_refused(values: Any) -> None:
    with pytest.raises(ConfigError, match="e2e_processing_latency_percentiles"):
        NsqdOptions(e2e_processing_latency_percentiles=values)


def test_flags_of_percentiles_are_added_up() -> None:
    flags = parse_flags("nsqd", [
        "-e2e-processing-latency-percentile=0.5,0.99", "--e2e-processing-latency-percentile", "1.0",
        "-e2e-processing-latency-window-time=30s",
    ])  # fmt: skip
    assert sorted(flags["e2e_processing_latency_percentiles"]) == [0.5, 0.99, 1.0]
    assert flags["e2e_processing_latency_window_time"] == 30.0
    with pytest.raises(ConfigError):
        parse_flags("nsqd", ["-e2e-processing-latency-percentile=high"])


@pytest.fixture
def statsd() -> Iterator[Any]:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    yield sock
    sock.close()


def pushed(statsd: Any, last: str) -> list[str]:
    """The lines that arrive, up to the one whose key ends in ``last``."""
    lines: list[str] = []
    with Timeout(20, TimeoutError(f"no {last} in {lines}")):
        while not any(line.split(":")[0].endswith(last) for line in lines):
            lines += statsd.recv(65536).decode().splitlines()
    return lines


METRICS = [
    "topic.t.message_count:3|c",
    "topic.t.message_bytes:5|c",
    "topic.t.depth:0|g",
    "topic.t.backend_depth:0|g",
    "topic.t.channel.c.message_count:3|c",
    "topic.t.channel.c.depth:3|g",
    "topic.t.channel.c.backend_depth:0|g",
    "topic.t.channel.c.in_flight_count:0|g",
    "topic.t.channel.c.deferred_count:0|g",
    "topic.t.channel.c.requeue_count:0|c",
    "topic.t.channel.c.timeout_count:0|c",
    "topic.t.channel.c.clients:0|g",
]


@pytest.fixture(params=["embedded", pytest.param("real", marks=pytest.mark.slow)])
def pushing_nsqd(request: pytest.FixtureRequest, statsd: Any) -> Iterator[Any]:
    host, port = statsd.getsockname()
    if request.param == "real":  # it divides by its interval less one second
        yield request.getfixturevalue("real_nsqd")(f"-statsd-address={host}:{port}", "-statsd-interval=1100ms")
        return
    with NsqdServer(NsqdOptions(statsd_address=f"{host}:{port}", statsd_interval=0.2)) as server:
        yield server


def test_figures_are_pushed(pushing_nsqd: Any, statsd: Any) -> None:
    address = pushing_nsqd.http_address
    ask(address, "POST", "/topic/create?topic=t")
    ask(address, "POST", "/channel/create?topic=t&channel=c")
    ask(address, "POST", "/mpub?topic=t", b"a\nbb\ncc")
    lines = pushed(statsd, "mem.gc_runs")
    prefix = f"nsq.127_0_0_1_{address.port}."
    assert all(line.startswith(prefix) for line in lines)
    bare = [line.removeprefix(prefix) for line in lines]
    assert sorted(line for line in bare if line.startswith("topic")) == sorted(METRICS)
    assert [re.sub(r":\d+", "", line) for line in bare if line.startswith("mem")] == [
        *(f"mem.{name}|g" for name in GAUGES), "mem.gc_runs|c"
    ]  # fmt: skip


def test_counters_count_from_the_push_before_and_what_is_ephemeral_can_be_left_out() -> None:
    percentiles = {"e2e_processing_latency_percentiles": (0.99, 0.5)}
    nsqd = Nsqd(NsqdOptions(statsd_mem_stats=False, statsd_exclude_ephemeral=True, **percentiles))
    nsqd.start()
    pusher, topic = StatsdPusher(nsqd, "p."), nsqd.get_topic("t")
    nsqd.get_topic("e#ephemeral")
    topic.get_channel("c#ephemeral")
    channel = topic.get_channel("c")
    assert channel.latency is not None
    channel.latency.add(1000)

    def pushed() -> dict[str, tuple[int, str]]:
        lines = [re.fullmatch(r"p\.topic\.t\.(.*):(\d+)\|(.)", line) for line in pusher.metrics()]
        return {found[1]: (int(found[2]), found[3]) for found in lines}

    topic.put(b"12345")
    assert pushed()["message_count"] == (1, "c")
    topic.put(b"12345")
    topic.put(b"12345")
    last = pushed()
    nsqd.close()
    assert not any("ephemeral" in key for key in last)
    assert (last["message_count"], last["message_bytes"], last["channel.c.depth"]) == ((2, "c"), (10, "c"), (3, "g"))
    for part in ("", "channel.c."):
        for percent in (99, 50):
            value, kind = last[f"{part}e2e_processing_latency_{percent}"]
            assert (value, kind) == (pytest.approx(1000, rel=2 * ACCURACY), "g")


def test_prefix() -> None:
    assert key_prefix("nsq.%s", "a.example", 4151) == "nsq.a_example_4151."
    assert key_prefix("mine.", "a", 1) == "mine."
    assert key_prefix("%s", "::1", 1) == "[__1]_1."
    assert key_prefix("", "a", 1) == ""


def test_no_line_is_cut_and_no_packet_too_long() -> None:
    lines = [f"key{number}:1|c" for number in range(100)]
    made = list(packets(lines, 64))
    assert all(len(packet) <= 64 and packet.endswith(b"\n") for packet in made)
    assert b"".join(made).decode().splitlines() == lines
    assert list(packets(["x" * 100], 64)) == [b"x" * 100 + b"\n"]
    assert list(packets([], 64)) == []
