"""The lookup poller against lookupds that work, lie, hang, die and come back."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import pairwise
from typing import Any

import gevent
import pytest
from gevent import sleep
from gevent.event import Event
from gevent.server import StreamServer
from gevent.socket import socket as Socket
from support.ports import free_address
from support.servers import RealLookupd, RealNsqd
from support.waiting import PROCESS, WAIT, holds, promptly, until

from nsq_fast import Producer
from nsq_fast.client.admin import LookupPoller
from nsq_fast.client.gevent_loop import run
from nsq_fast.client.lookup import Lookupd, PolledTopic, parse_lookupds
from nsq_fast.config import LookupConfig
from nsq_fast.errors import ConfigError, LookupFailed, NameInvalid, NotRunning
from nsq_fast.names import Address
from nsq_fast.protocol.topology import Nsqd, Topology

FAST = LookupConfig(lookupd_poll_interval=0.05, lookupd_poll_jitter=0.0, lookupd_timeout=1.0)
CALM = LookupConfig(lookupd_poll_interval=60.0, lookupd_timeout=20.0, lookupd_refresh_interval=0.2)

Responder = Callable[[Socket, str], None]


def http_reply(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


def peer(port: int, host: str = "10.0.0.1", version: str = "1.3.0") -> dict[str, Any]:
    return {"broadcast_address": host, "tcp_port": port, "http_port": port + 1, "version": version, "hostname": "h"}


def producers(*ports: int) -> bytes:
    return http_reply(json.dumps({"channels": [], "producers": [peer(port) for port in ports]}).encode())


NOT_FOUND = http_reply(b'{"message":"NOT_FOUND"}', "404 Not Found")
TOPIC_NOT_FOUND = http_reply(b'{"message":"TOPIC_NOT_FOUND"}', "404 Not Found")


class FakeLookupd:
    """A lookupd whose answers are set by the test: bytes to send, or a function that gets the socket."""

    def __init__(self, answer: bytes | Responder) -> None:
        self.routes: dict[str, bytes | Responder] = {"/lookup": answer, "/nodes": answer, "/listlookup": NOT_FOUND}
        self.requests: list[str] = []
        self.heads: list[str] = []
        self.connections = 0
        self._server = StreamServer(("127.0.0.1", 0), self._handle)
        self._server.start()
        self.address = Address("127.0.0.1", self._server.server_port)

    def answer(self, answer: bytes | Responder) -> None:
        self.routes["/lookup"] = self.routes["/nodes"] = answer

    def count(self, path: str = "/lookup") -> int:
        return sum(request.split("?")[0] == path for request in self.requests)

    def stop(self) -> None:
        self._server.stop(timeout=0)

    def _handle(self, sock: Socket, _address: object) -> None:
        self.connections += 1
        with closing(sock), sock.makefile("rb") as lines, suppress(OSError):
            while True:
                head = ""
                while not head.endswith("\r\n\r\n"):
                    line = lines.readline().decode("latin-1")
                    if not line:
                        return
                    head += line
                target = head.split(" ")[1]
                self.requests.append(target)
                self.heads.append(head)
                answer = self.routes.get(target.split("?")[0], NOT_FOUND)
                if callable(answer):
                    answer(sock, target)
                    return
                sock.sendall(answer)


@contextmanager
def fake_lookupds(*answers: bytes | Responder) -> Iterator[list[FakeLookupd]]:
    servers = [FakeLookupd(answer) for answer in answers]
    try:
        yield servers
    finally:
        for server in servers:
            server.stop()


@contextmanager
def polling(lookupds: list[FakeLookupd], config: LookupConfig = CALM, **options: Any) -> Iterator[LookupPoller]:
    poller = LookupPoller([server.address for server in lookupds], config, **options)
    poller.start()
    try:
        yield poller
    finally:
        poller.stop()


def ports(topology: Topology | None) -> set[int]:
    assert topology is not None
    return {nsqd.tcp.port for nsqd in topology.producers}


def failure_of(function: Callable[..., object], *args: object) -> Exception | None:
    try:
        function(*args)
    except Exception as error:
        return error
    return None


def hang(sock: Socket, _target: str) -> None:
    sock.recv(1)


# What a poll finds


def test_the_answers_of_all_lookupds_are_united() -> None:
    with fake_lookupds(producers(1, 2), producers(2, 3), TOPIC_NOT_FOUND) as lookupds, polling(lookupds) as poller:
        assert ports(poller.wait_topology("t", WAIT)) == {1, 2, 3}
        assert poller.topology("t") is poller.wait_topology("t")
        assert poller.topology("other") is None


@pytest.mark.parametrize("access", ["r", "w"])
def test_the_role_metadata_and_accept_header_are_always_sent(access: Any) -> None:
    config = CALM.replace(lookupd_authorization="Bearer s3cret")
    with fake_lookupds(producers(1)) as [lookupd], polling([lookupd], config, access=access) as poller:
        poller.wait_topology("t", WAIT)
        assert lookupd.requests[0] == f"/lookup?topic=t&access={access}&metainfo=true"
        assert "Accept: application/vnd.nsq; version=1.0\r\n" in lookupd.heads[0]
        assert "Authorization: Bearer s3cret\r\n" in lookupd.heads[0]
        assert "s3cret" not in repr(config)


def test_an_ephemeral_topic_is_asked_for_by_its_whole_name() -> None:
    with fake_lookupds(producers(1)) as [lookupd], polling([lookupd]) as poller:
        poller.wait_topology("t#ephemeral", 5)
        assert "topic=t%23ephemeral&" in lookupd.requests[0]


def test_a_topic_that_nobody_knows_yet_is_asked_for_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    """Within seconds, not at the next poll in a minute; and said once, not at each question."""
    found: list[set[int]] = []
    with (
        fake_lookupds(TOPIC_NOT_FOUND, TOPIC_NOT_FOUND) as lookupds,
        polling(lookupds, listener=lambda _, topology: found.append(ports(topology))) as poller,
    ):
        poller.add_topic("t")
        until(lambda: lookupds[0].count() >= 4)
        lookupds[1].answer(producers(7))
        until(lambda: found[-1] == {7})
        assert lookupds[0].count() <= 8  # the pauses grow
    texts = [record.getMessage() for record in caplog.records]
    assert [text for text in texts if "yet" in text] == ["no nsqlookupd knows topic t yet; asking again until one does"]
    assert [text for text in texts if "is known now" in text] == ["topic t is known now: 1 nsqds, first 10.0.0.1:7"]


def test_an_unknown_topic_is_a_valid_and_empty_answer(caplog: pytest.LogCaptureFixture) -> None:
    with fake_lookupds(TOPIC_NOT_FOUND) as [lookupd], polling([lookupd]) as poller:
        assert poller.wait_topology("t", WAIT).is_empty
    assert not caplog.records


def test_partitions_and_wrapped_replies_are_understood() -> None:
    data = {
        "producers": [peer(1, version="0.3.7-HA.1")],
        "partitions": {"0": peer(1, version="0.3.7-HA.1")},
        "meta": {"partition_num": 1, "replica": 1},
    }
    body = json.dumps({"status_code": 200, "status_txt": "OK", "data": data}).encode()
    with fake_lookupds(http_reply(body)) as [lookupd], polling([lookupd]) as poller:
        topology = poller.wait_topology("t", WAIT)
        assert topology.partitions[0].tcp == Address("10.0.0.1", 1)
        assert topology.is_complete


def test_the_listener_hears_of_every_good_poll() -> None:
    heard: list[tuple[str, set[int]]] = []
    with (
        fake_lookupds(producers(1)) as [lookupd],
        polling([lookupd], FAST, listener=lambda topic, new: heard.append((topic, ports(new)))) as poller,
    ):
        poller.add_topic("t")
        until(lambda: len(heard) >= 2)
        lookupd.answer(producers(1, 2))
        until(lambda: ("t", {1, 2}) in heard)
        lookupd.answer(b"garbage\r\n\r\n")
        until(lambda: lookupd.count() > len(heard) + 1)
        assert ports(poller.topology("t")) == {1, 2}


def test_lookupds_may_be_added_and_removed_at_run_time() -> None:
    first, second = free_address(), free_address()
    poller = LookupPoller([first], CALM)
    poller.change_lookupds(parse_lookupds([second]), frozenset(parse_lookupds([first])))
    assert poller.lookupds == (f"http://{second}",)
    poller.change_lookupds((), frozenset())
    assert poller.lookupds == (f"http://{first}",)


def test_a_removed_topic_is_asked_for_no_more() -> None:
    heard: list[str] = []
    with (
        fake_lookupds(producers(1)) as [lookupd],
        polling([lookupd], FAST, listener=lambda topic, _: heard.append(topic)) as poller,
    ):
        poller.add_topic("a")
        poller.add_topic("b")
        until(lambda: {"a", "b"} <= set(heard))
        poller.remove_topic("a")
        heard.clear()
        until(lambda: heard.count("b") >= 3)
        assert "a" not in heard
        assert poller.topology("a") is None


# Bad answers


def send(data: bytes) -> Responder:
    def respond(sock: Socket, _target: str) -> None:
        sock.sendall(data)

    return respond


def flood(start: bytes, repeat: bytes) -> Responder:
    def respond(sock: Socket, _target: str) -> None:
        sock.sendall(start)
        while True:
            sock.sendall(repeat * 4096)

    return respond


def drip(sock: Socket, _target: str) -> None:
    """Each byte comes well within any timeout for one read; the reply never ends."""
    sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while True:
        sock.sendall(b" ")
        sleep(0.02)  # sleep: each byte in time, the reply never


LIES: dict[str, bytes | Responder] = {
    "html": http_reply(b"<html>It works!</html>"),
    "wrong json": http_reply(b'{"hello": "world"}'),
    "wrong types": http_reply(b'{"producers": [{"broadcast_address": 1, "tcp_port": "x"}]}'),
    "json cut": http_reply(b'{"producers": ['),
    "deep json": http_reply(b"[" * 100_000),
    "status 500": http_reply(b"{}", "500 Internal Server Error"),
    "status 302": http_reply(b"", "302 Found", "Location: http://127.0.0.1:1/lookup\r\n"),
    "no such route": NOT_FOUND,
    "not http": send(b"E_INVALID\r\n\r\n"),
    "closes at once": lambda sock, target: None,
    "closes within the headers": send(b"HTTP/1.1 200 OK\r\nContent-"),
    "closes within the body": send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"),
    "hangs": hang,
    "hangs within the body": lambda sock, target: (sock.sendall(http_reply(b"{}" * 10)[:-3]), hang(sock, target)),  # type: ignore[func-returns-value,dict-item]
    "drips": drip,
    "negative length": send(b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n{}"),
    "huge body": flood(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", b"x" * 16),
    "endless body": flood(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 16),
    "endless chunks": flood(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"4\r\nxxxx\r\n"),
    "endless header": flood(b"HTTP/1.1 200 OK\r\nX: ", b"x" * 16),
    "endless headers": flood(b"HTTP/1.1 200 OK\r\n", b"X: yyyyyyyyyyy\r\n"),
    "endless interim replies": flood(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_lookupd_is_ignored_and_logged_once(lie: str, caplog: pytest.LogCaptureFixture) -> None:
    with fake_lookupds(producers(1), LIES[lie]) as [good, bad], polling([good, bad], FAST) as poller:
        assert ports(poller.wait_topology("t", WAIT)) == {1}
        until(lambda: bad.count() >= 2 and good.count() >= 4)
        assert ports(poller.topology("t")) == {1}
    failures = [record for record in caplog.records if str(bad.address) in record.getMessage()]
    assert [record.levelno for record in failures] == [logging.WARNING]


@pytest.mark.parametrize("lie", ["html", "hangs", "closes at once", "status 500", "huge body"])
def test_when_every_lookupd_fails_what_was_known_stays(lie: str) -> None:
    heard: list[Topology] = []
    with (
        fake_lookupds(producers(1)) as [lookupd],
        polling([lookupd], FAST, listener=lambda _, new: heard.append(new)) as poller,
    ):
        known = poller.wait_topology("t", WAIT)
        lookupd.answer(LIES[lie])
        sleep(0)
        count = lookupd.count()
        until(lambda: lookupd.count() >= count + 2)
        before = len(heard)
        until(lambda: lookupd.count() >= count + 3)
        assert len(heard) == before
        assert poller.topology("t") == known
        lookupd.answer(producers(2))
        until(lambda: ports(poller.topology("t")) == {2})


def test_one_bad_topic_does_not_hide_the_others() -> None:
    def respond(sock: Socket, target: str) -> None:
        good = "topic=good&" in target
        sock.sendall(producers(1) if good else http_reply(b'{"message":"INVALID"}', "400 Bad Request"))

    with fake_lookupds(respond) as [lookupd], polling([lookupd], FAST) as poller:
        poller.add_topic("bad")
        assert ports(poller.wait_topology("good", 5)) == {1}
        assert poller.topology("bad") is None


# Hanging


def test_a_hung_lookupd_delays_neither_the_others_nor_a_refresh() -> None:
    config = CALM.replace(lookupd_timeout=60.0)
    with fake_lookupds(hang, producers(1)) as [bad, good], polling([bad, good], config) as poller:
        assert ports(poller.wait_topology("t", WAIT)) == {1}
        good.answer(producers(2))
        poller.refresh("t")
        until(lambda: ports(poller.topology("t")) == {2})
        assert bad.count() == 1


def test_a_slow_answer_is_merged_when_it_comes() -> None:
    answered = Event()

    def slow(sock: Socket, _target: str) -> None:
        answered.wait()
        sock.sendall(producers(2))

    config = CALM.replace(lookupd_timeout=5.0)
    with fake_lookupds(producers(1), slow) as lookupds, polling(lookupds, config) as poller:
        assert ports(poller.wait_topology("t", WAIT)) == {1}
        answered.set()
        until(lambda: ports(poller.topology("t")) == {1, 2})


@pytest.mark.parametrize("is_patched", [False, True])
def test_a_hung_lookupd_does_not_block_the_process_patched_or_not(is_patched: bool) -> None:
    program = """
import gevent.monkey
if IS_PATCHED:
    gevent.monkey.patch_all()
import socket
import gevent
from nsq_fast.config import LookupConfig
from nsq_fast.client.admin import LookupPoller

listener = socket.create_server(("127.0.0.1", 0))  # never answers
listener.setblocking(False)
def accepted():
    try:
        return listener.accept()[0]
    except BlockingIOError:
        return None
poller = LookupPoller([listener.getsockname()], LookupConfig(lookupd_timeout=600.0))
poller.start()
waiter = gevent.spawn(poller.wait_topology, "t", 600.0)
while not (peer := accepted()):
    gevent.sleep(0.01)  # sleep: until it has connected
for _ in range(20):
    gevent.sleep(0.01)  # sleep: timers run only while the hub does
assert not waiter.ready()
assert gevent.monkey.is_module_patched("socket") is IS_PATCHED
waiter.kill()
poller.stop()
print("turned")
"""
    program = program.replace("IS_PATCHED", str(is_patched))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PROCESS, check=True)
    assert done.stdout == "turned\n"


# Priorities, retries, refresh


def test_a_failing_lookupd_is_asked_less_often_and_promoted_when_it_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "nsq_fast.lookup")
    bad_answer = http_reply(b"", "500 Internal Server Error")
    with fake_lookupds(producers(1), bad_answer) as [good, bad], polling([good, bad], FAST) as poller:
        poller.add_topic("t")
        until(lambda: good.count() >= 24)
        assert 2 <= bad.count() <= 8
        bad.answer(producers(2))
        until(lambda: ports(poller.topology("t")) == {1, 2})
        asked, others = bad.count(), good.count()
        until(lambda: good.count() >= others + 8)
        assert bad.count() - asked >= 6
    messages = [record.getMessage() for record in caplog.records if str(bad.address) in record.getMessage()]
    assert len(messages) == 2
    assert "fails" in messages[0]
    assert "answers again" in messages[1]


def test_a_lookupd_that_starts_late_is_found_without_waiting_for_the_interval() -> None:
    address = free_address()
    poller = LookupPoller([address], CALM)
    poller.start()
    try:
        with pytest.raises(LookupFailed, match="Connection refused"):
            poller.wait_topology("t", 0.2)
        server = StreamServer(tuple(address), lambda sock, _: (sock.recv(4096), sock.sendall(producers(1))))
        server.start()
        try:
            assert ports(poller.wait_topology("t", WAIT)) == {1}
        finally:
            server.stop(timeout=0)
    finally:
        poller.stop()


def test_a_question_that_may_wait_moves_to_its_time_and_never_puts_off_a_sooner_one() -> None:
    topic = PolledTopic("t", CALM)
    topic.asked_at, topic.due = 100.0, 160.0
    assert topic.refresh(110.0, later=3.0)
    assert topic.due == 113.0
    assert not topic.refresh(111.0, later=4.0)
    assert topic.due == 113.0
    assert topic.refresh(112.0)
    assert topic.due == 112.0


def test_a_thousand_refreshes_are_one_poll() -> None:
    topic = PolledTopic("t", CALM)
    topic.asked_at, topic.due = 100.0, 160.0
    assert not any(topic.refresh(100.0 + number * 1e-5) for number in range(1000))
    assert topic.due >= 160.0


def test_refreshes_without_end_are_a_poll_each_interval() -> None:
    with fake_lookupds(producers(1)) as [lookupd], polling([lookupd]) as poller:
        poller.wait_topology("t", WAIT)
        before, began = lookupd.count(), time.monotonic()
        while lookupd.count() < before + 4:
            poller.refresh("t")
            sleep(0.001)  # sleep: refreshes again and again
        assert time.monotonic() - began > 2 * CALM.lookupd_refresh_interval


def test_a_refresh_that_comes_too_early_is_served_late() -> None:
    topic = PolledTopic("t", CALM)
    topic.asked_at, topic.due = 100.0, 160.0
    assert topic.refresh(100.0 + CALM.lookupd_refresh_interval * 0.6)
    assert topic.due == 100.0 + CALM.lookupd_refresh_interval


def test_a_refresh_asks_for_its_topic_only() -> None:
    with fake_lookupds(producers(1)) as [lookupd], polling([lookupd]) as poller:
        poller.wait_topology("a", WAIT)
        poller.wait_topology("b", WAIT)
        lookupd.requests.clear()
        until(lambda: poller.refresh("b") or lookupd.count())
        holds(
            lambda: (
                {request for request in lookupd.requests if request.startswith("/lookup?")}
                == {"/lookup?topic=b&access=r&metainfo=true"}
            ),
            0.05,
        )


def test_polls_are_spread_by_jitter() -> None:
    times: list[float] = []
    config = LookupConfig(lookupd_poll_interval=0.03, lookupd_poll_jitter=1.0)
    with (
        fake_lookupds(producers(1)) as lookupds,
        polling(lookupds, config, listener=lambda *_: times.append(time.monotonic())) as poller,
    ):
        poller.add_topic("t")
        until(lambda: len(times) >= 12)
    gaps = [after - before for before, after in pairwise(times)]
    # One poll may come late on a busy machine, and the next one after a shorter gap: what counts is all of them.
    assert sum(gaps) >= 0.02 * len(gaps)
    assert max(gaps) - min(gaps) > 0.003


@pytest.mark.parametrize("answer", [producers(1), NOT_FOUND], ids=["known", "unknown"])
def test_jitter_and_refreshes_do_not_make_each_topic_a_round_of_its_own(answer: bytes) -> None:
    config = LookupConfig(lookupd_poll_interval=0.1, lookupd_poll_jitter=1.0, lookupd_refresh_interval=0.01)
    topics = [f"t{number}" for number in range(30)]
    with fake_lookupds(answer) as [lookupd], polling([lookupd], config) as poller:
        for topic in topics:
            poller.add_topic(topic)
        for topic in topics[:3]:
            until(lambda: lookupd.count() % len(topics) == 0 and lookupd.count() > 0, every=0.001)
            poller.refresh(topic)  # asked about in between, which must not give it a time of its own
        until(lambda: lookupd.count() >= 8 * len(topics))
        rounds, questions = lookupd.connections, lookupd.count()
    # A round is a connection, more where the answers take long; each topic by itself would be one for each question.
    assert rounds <= questions / 3


# Growing by /listlookup


def listing(*addresses: Address) -> bytes:
    nodes = [{"ID": "x", "NodeIP": each.host, "TcpPort": "1", "HttpPort": str(each.port)} for each in addresses]
    return http_reply(json.dumps({"lookupdnodes": nodes, "lookupdleader": nodes[0] if nodes else None}).encode())


def test_the_lookupds_of_a_cluster_are_learnt_from_a_seed() -> None:
    with fake_lookupds(producers(1), producers(2)) as [seed, other]:
        seed.routes["/listlookup"] = listing(seed.address, other.address)
        with polling([seed]) as poller:
            poller.add_topic("t")
            until(lambda: poller.topology("t") is not None and ports(poller.topology("t")) == {1, 2})
            assert poller.lookupds == (f"http://{seed.address}", f"http://{other.address}")


def test_lookupds_that_are_listed_no_more_are_forgotten_but_never_the_configured_ones() -> None:
    with fake_lookupds(producers(1), producers(2)) as [seed, other]:
        seed.routes["/listlookup"] = listing(other.address)
        with polling([seed], FAST) as poller:
            poller.add_topic("t")
            until(lambda: len(poller.lookupds) == 2)
            seed.routes["/listlookup"] = listing()
            until(lambda: poller.lookupds == (f"http://{seed.address}",))


@pytest.mark.parametrize("answer", [NOT_FOUND, http_reply(b""), http_reply(b"<html>"), hang, listing()])
def test_without_listlookup_the_configured_addresses_serve(answer: bytes | Responder) -> None:
    with fake_lookupds(producers(1)) as [seed]:
        seed.routes["/listlookup"] = answer
        with polling([seed]) as poller:
            assert ports(poller.wait_topology("t", WAIT)) == {1}
            holds(lambda: poller.lookupds == (f"http://{seed.address}",))


def test_an_original_lookupd_is_not_asked_for_others_at_every_poll() -> None:
    began = time.monotonic()
    with fake_lookupds(producers(1)) as [seed], polling([seed], FAST) as poller:
        poller.add_topic("t")
        until(lambda: seed.count() >= 8)
        lists = seed.count("/listlookup")
        assert lists <= 1 + (time.monotonic() - began) / (10 * FAST.lookupd_poll_interval)


def test_a_lie_of_a_thousand_lookupds_is_cut() -> None:
    with fake_lookupds(producers(1)) as [seed]:
        seed.routes["/listlookup"] = listing(*(Address("127.0.0.1", port) for port in range(1, 1000)))
        with polling([seed]) as poller:
            poller.add_topic("t")
            until(lambda: len(poller.lookupds) > 1)
            assert len(poller.lookupds) <= 64


# All nsqds


def test_nodes_are_united_and_callers_share_one_question() -> None:
    with fake_lookupds(producers(1, 2), producers(3), hang) as lookupds, polling(lookupds) as poller:
        callers = [gevent.spawn(poller.nodes, 5) for _ in range(20)]
        gevent.joinall(callers, raise_error=True)
        assert {nsqd.tcp.port for nsqd in callers[0].value} == {1, 2, 3}
        assert [lookupd.count("/nodes") for lookupd in lookupds] == [1, 1, 1]


def test_nodes_of_lookupds_that_fail_are_an_error() -> None:
    with fake_lookupds(http_reply(b"<html>")) as lookupds, polling(lookupds) as poller:
        with pytest.raises(LookupFailed, match="malformed"):
            poller.nodes(5)
        lookupds[0].answer(producers())
        assert poller.nodes(5) == ()
        lookupds[0].answer(hang)
        until(lambda: isinstance(failure_of(poller.nodes, 0.05), LookupFailed))  # when what is known is too old


# Arguments, start and stop


@pytest.mark.parametrize(
    "text", ["127.0.0.1:{port}", "http://127.0.0.1:{port}", "http://127.0.0.1:{port}/", " 127.0.0.1:{port} ,"]
)
def test_a_lookupd_may_be_given_as_text(text: str) -> None:
    with fake_lookupds(producers(1)) as [lookupd]:
        poller = LookupPoller(text.format(port=lookupd.address.port), CALM)
        poller.start()
        try:
            assert ports(poller.wait_topology("t", WAIT)) == {1}
        finally:
            poller.stop()


def test_an_ipv6_lookupd() -> None:
    try:
        server = StreamServer(("::1", 0), lambda sock, _: (sock.recv(4096), sock.sendall(producers(1))))
        server.start()
    except OSError:
        pytest.skip("no IPv6 here")
    poller = LookupPoller([f"[::1]:{server.server_port}"], CALM)
    poller.start()
    try:
        assert ports(poller.wait_topology("t", WAIT)) == {1}
    finally:
        poller.stop()
        server.stop(timeout=0)


@pytest.mark.parametrize(
    "bad", ["", [], "ftp://h:1", "http://h:1/path", "http://user:secret@h:1", "h:0", "h:x", "http://:1", [1], 5, None]
)
def test_addresses_that_cannot_be_used_are_refused(bad: Any) -> None:
    with pytest.raises(ConfigError) as error:
        LookupPoller(bad)
    assert "secret" not in str(error.value)


def test_other_bad_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="access"):
        LookupPoller("h:1", access="rw")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Authorization"):
        LookupPoller("h:1", LookupConfig(lookupd_authorization="a\r\nb"))
    poller = LookupPoller("h:1")
    with pytest.raises(NameInvalid):
        poller.add_topic("bad topic!")
    with pytest.raises(NotRunning):
        poller.wait_topology("t", 1)


def test_stop_ends_waiters_and_requests_under_way_and_start_begins_again() -> None:
    with fake_lookupds(hang) as [lookupd]:
        poller = LookupPoller([lookupd.address], CALM.replace(lookupd_timeout=60.0))
        poller.start()
        waiter = gevent.spawn(failure_of, poller.wait_topology, "t")
        until(lambda: lookupd.count() == 1)
        with promptly():
            poller.stop()
            poller.stop()
        waiter.join(WAIT)
        assert isinstance(waiter.value, LookupFailed)
        lookupd.answer(producers(1))
        poller.start()
        assert ports(poller.wait_topology("t", WAIT)) == {1}
        poller.stop()


def test_the_listener_may_stop_the_poller() -> None:
    stopped = Event()

    def listener(_topic: str, _new: Topology) -> None:
        poller.stop()
        stopped.set()

    with fake_lookupds(producers(1)) as [lookupd]:
        poller = LookupPoller([lookupd.address], FAST, listener=listener)
        poller.add_topic("t")
        poller.start()
        assert stopped.wait(WAIT)
        count = lookupd.count()
        holds(lambda: lookupd.count() == count, 3 * FAST.lookupd_poll_interval)


# Real servers


def test_a_real_lookupd(real_lookupd: Callable[[], RealLookupd], real_nsqd: Callable[..., RealNsqd]) -> None:
    lookupd = real_lookupd()
    nsqd_tcp = real_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}").tcp_address
    poller = LookupPoller([lookupd.http_address], CALM, access="w")
    poller.start()
    try:
        assert poller.wait_topology("unknown", 5).is_empty
        until(lambda: [nsqd.tcp for nsqd in poller.nodes(5)] == [nsqd_tcp])
        with closing(gevent.socket.create_connection(tuple(nsqd_tcp))) as sock:
            sock.sendall(b"  V2PUB known\n\x00\x00\x00\x01x")
            sock.recv(64)

        def found() -> bool:
            poller.refresh("known")
            topology = poller.topology("known")
            return topology is not None and [nsqd.tcp for nsqd in topology.producers] == [nsqd_tcp]

        until(found)
    finally:
        poller.stop()


def test_a_fault_with_one_topic_keeps_no_other_from_being_known(
    monkeypatch: pytest.MonkeyPatch, no_unseen_errors: list[Any]
) -> None:
    """A fault of ours in reading an answer, and one in uniting answers."""
    lookup, unite = Lookupd.lookup, PolledTopic.unite

    async def failing_lookup(lookupd: Lookupd, loop: Any, topic: str) -> Any:
        if topic == "unreadable":
            raise ZeroDivisionError
        return await lookup(lookupd, loop, topic)

    def failing_unite(topic: PolledTopic) -> Any:
        if topic.name == "ununitable":
            raise ZeroDivisionError
        return unite(topic)

    monkeypatch.setattr(Lookupd, "lookup", failing_lookup)
    monkeypatch.setattr(PolledTopic, "unite", failing_unite)
    with fake_lookupds(producers(1)) as lookupds, polling(lookupds, FAST) as poller:
        for name in ("unreadable", "ununitable", "good"):
            poller.add_topic(name)
        for _ in range(2):
            poller.remove_topic("good")
            assert ports(poller.wait_topology("good", 5)) == {1}
        assert poller.topology("unreadable") is None
    assert {name for name, _, _ in no_unseen_errors} >= {"lookup of ununitable"}
    assert {kind for _, kind, _ in no_unseen_errors} == {ZeroDivisionError}
    no_unseen_errors.clear()


# Bounds, and work in proportion to what changed


def test_an_answer_with_too_many_producers_is_a_bad_one(caplog: pytest.LogCaptureFixture) -> None:
    """Said once, with the option that allows more; what the other lookupd says counts."""
    with (
        fake_lookupds(producers(*range(1, 500)), producers(7)) as lookupds,
        polling(lookupds, FAST.replace(lookupd_max_producers=100)) as poller,
    ):
        assert ports(poller.wait_topology("t", WAIT)) == {7}
        until(lambda: lookupds[0].count() >= 3)
    failures = [text for text in (record.getMessage() for record in caplog.records) if "fails" in text]
    assert len(failures) == 1
    assert "names 499 nsqds, more than lookupd_max_producers=100 allows" in failures[0]


def test_an_answer_larger_than_its_producers_can_be_is_not_read(caplog: pytest.LogCaptureFixture) -> None:
    huge = http_reply(b'{"channels":[' + b'"c",' * 500_000 + b'"c"],"producers":[]}')
    config = FAST.replace(lookupd_max_producers=10)
    with fake_lookupds(huge, producers(7)) as lookupds, polling(lookupds, config) as poller:
        assert ports(poller.wait_topology("t", WAIT)) == {7}
        until(lambda: "a reply of more than" in caplog.text)


def test_a_bad_list_of_lookupds_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with fake_lookupds(producers(1)) as [lookupd], polling([lookupd], FAST) as poller:
        lookupd.routes["/listlookup"] = http_reply(b"<html>")
        poller.wait_topology("t", WAIT)
        until(lambda: lookupd.count("/listlookup") >= 3)
    assert caplog.text.count("does not list the lookupds of its cluster") == 1


def test_answers_that_say_the_same_are_one_topology() -> None:
    """Known by identity: a listener with thousands of topics needs not compare them."""
    told: list[Topology] = []
    with (
        fake_lookupds(producers(1, 2), producers(1, 2)) as lookupds,
        polling(lookupds, FAST, listener=lambda _, topology: told.append(topology)) as poller,
    ):
        poller.add_topic("t")
        until(lambda: lookupds[0].count() >= 4)
        assert all(each is told[0] for each in told)
        lookupds[1].answer(producers(1, 2, 3))
        until(lambda: ports(told[-1]) == {1, 2, 3})


def test_what_lookup_says_of_a_topic_costs_the_same_however_many_there_are() -> None:
    """Counted in calls: the time of a poll grew with the square of the number of topics."""
    assert calls_of_a_change(topics=300) <= calls_of_a_change(topics=30) + 20


def calls_of_a_change(topics: int) -> int:
    producer = Producer(lookupd_http_addresses="127.0.0.1:1")
    routes = producer._sender.routing
    nsqds = [Nsqd(Address("127.0.0.1", port)) for port in (1, 2, 3)]
    for number in range(topics):
        routes.of(f"t{number}")
        routes.learnt(f"t{number}", Topology(producers=(nsqds[0], nsqds[1])))
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        routes.learnt("t7", Topology(producers=(nsqds[0], nsqds[2])))
    finally:
        sys.setprofile(None)
    run(producer._sender.pool.close(0.0))
    return calls
