"""What a client asks over HTTP, on every loop: lookups, any server, and documents of configuration."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import re
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent
import gevent.event
import pytest
import trustme
from support.http_server import Question, ScriptedHttp, reply, scripted_http
from support.servers import free_address
from support.waiting import TURNS, WAIT, promptly, until_on

from nsq_fast import FileConfigSource, Producer
from nsq_fast.client.dynamic import NOTHING, ConfigDocument, ConfigKeeper, DynamicConfig, changes, parse
from nsq_fast.client.http import Endpoint, HttpClient
from nsq_fast.client.lookup import SIDE_BY_SIDE, LookupPoller, TopicWatch
from nsq_fast.client.loop import Event
from nsq_fast.config import LookupConfig
from nsq_fast.errors import ConfigError, HttpError, LookupFailed, NotRunning
from nsq_fast.names import Address
from nsq_fast.protocol.topology import TopicChoice, Topology

log = logging.getLogger("nsq_fast.test")

PATIENT = LookupConfig(lookupd_poll_interval=600.0, lookupd_timeout=10 * WAIT, lookupd_refresh_interval=0.01)
FAST = LookupConfig(lookupd_poll_interval=0.05, lookupd_poll_jitter=0.0, lookupd_timeout=1.0)
BOUNDED = FAST.replace(lookupd_max_producers=100)


def peer(port: int) -> dict[str, Any]:
    return {"broadcast_address": "10.0.0.1", "tcp_port": port, "http_port": port + 1, "version": "1.3.0"}


NOT_FOUND = reply(b'{"message":"TOPIC_NOT_FOUND"}', "404 Not Found")


def knows(*ports: int, lookupds: Any = None, topics: Any = ("known",)) -> Any:
    """The script of a lookupd that knows these nsqds of each topic, these topics, and answers so for its lookupds: then
    it is one of the redesigned NSQ."""
    partitions = {} if lookupds is None else {"partitions": {}}

    def script(question: Question) -> None:
        if question.target.startswith("/listlookup"):
            answer(question, NOT_FOUND if lookupds is None else lookupds)
        elif ports:
            producers = [peer(port) for port in ports]
            question.answer({"channels": [], "producers": producers, "topics": list(topics), **partitions})
        else:
            question.send(NOT_FOUND)

    return script


def answer(question: Question, what: Any) -> None:
    """An object as JSON, bytes as they are, or what a function of the question does."""
    if callable(what):
        what(question)
    elif isinstance(what, bytes):
        question.send(what)
    else:
        question.answer(what)


def fails(question: Question) -> None:
    question.answer(b"", "500 Internal Server Error")


def hang(question: Question) -> None:
    question.hang()


class Told:
    """A listener: what it was told, in order."""

    def __init__(self) -> None:
        self.all: list[tuple[str, Topology]] = []

    def __call__(self, topic: str, topology: Topology) -> None:
        self.all.append((topic, topology))

    def ports(self, topic: str = "t") -> list[set[int]]:
        return [{nsqd.tcp.port for nsqd in topology.producers} for name, topology in self.all if name == topic]


@contextlib.contextmanager
def polling(
    loop: Any, *scripts: Any, config: LookupConfig = PATIENT, access: Any = "r"
) -> Iterator[tuple[LookupPoller, list[ScriptedHttp], Told]]:
    """A poller of lookupds that answer so, these, and what it tells its listener."""
    told = Told()
    with scripted_http(*scripts) as servers:
        poller = LookupPoller([server.address for server in servers], config, access, told)
        poller.start(loop, loop.supervisor(log))
        try:
            yield poller, servers, told
        finally:
            poller.stop()


def ports(topology: Topology | None) -> set[int] | None:
    return None if topology is None else {nsqd.tcp.port for nsqd in topology.producers}


@pytest.mark.parametrize("access", ["r", "w"])
async def test_the_role_metadata_and_headers_are_always_sent(loop: Any, access: str) -> None:
    questions: list[Question] = []

    def script(question: Question) -> None:
        questions.append(question)
        knows(1)(question)

    config = PATIENT.replace(lookupd_authorization="Bearer s3cret")
    assert "s3cret" not in repr(config)
    with polling(loop, script, config=config, access=access) as (poller, _, _):
        await poller.wait_topology("t#ephemeral", WAIT)
    asked = next(each for each in questions if each.target.startswith("/lookup"))
    assert asked.target == f"/lookup?topic=t%23ephemeral&access={access}&metainfo=true"
    assert "Accept: application/vnd.nsq; version=1.0\r\n" in asked.head
    assert "Authorization: Bearer s3cret\r\n" in asked.head


async def test_a_hung_lookupd_delays_nothing_that_another_knows(loop: Any) -> None:
    """Two hundred topics, each used as soon as it is known; the hung one gets its share of questions and no more."""
    names = [f"t{number}" for number in range(200)]
    with polling(loop, hang, knows(1)) as (poller, (hung, good), told):
        for name in names:
            poller.add_topic(name)
        await until_on(loop, lambda: {topic for topic, _ in told.all} == set(names))
        assert all(ports == {1} for name in names for ports in told.ports(name))
        assert hung.most <= SIDE_BY_SIDE
        # And what is known of one may be asked anew.
        good.script = knows(2)
        await until_on(loop, lambda: poller.refresh("t7") or told.ports("t7")[-1] == {2})


async def test_a_slow_lookupd_is_asked_about_several_topics_at_a_time(loop: Any) -> None:
    """It answers when twenty questions wait: one that is asked after the other would never get an answer."""
    together = threading.Barrier(20)

    def slow(question: Question) -> None:
        if question.target.startswith("/lookup"):
            together.wait(WAIT)
        knows(1)(question)

    with polling(loop, slow) as (poller, [server], told):
        for number in range(40):
            poller.add_topic(f"t{number}")
        await until_on(loop, lambda: len({topic for topic, _ in told.all}) == 40)
        assert server.most <= SIDE_BY_SIDE


async def test_a_lookupd_that_answers_in_time_is_asked_over_one_connection(
    loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsq_fast.client.lookup.PATIENCE", WAIT)  # else it is not in time where the machine is busy
    with polling(loop, knows(1)) as (poller, [server], _):
        for number in range(100):
            poller.add_topic(f"t{number}")
        for number in range(100):
            await poller.wait_topology(f"t{number}", WAIT)
        assert server.connections == 1


async def test_what_a_lookupd_said_holds_until_it_answers_again(loop: Any) -> None:
    """One that takes long in the next round does not take its nsqds away for so long; its new answer does."""
    go_on = threading.Event()

    def later(question: Question) -> None:
        assert go_on.wait(WAIT)
        knows(3)(question)

    with polling(loop, knows(1), knows(2)) as (poller, servers, told):
        await poller.wait_topology("t", WAIT)
        servers[0].script, servers[1].script = knows(4), later
        await until_on(loop, lambda: poller.refresh("t") or {2, 4} in told.ports())
        go_on.set()
        await until_on(loop, lambda: told.ports()[-1] == {3, 4})
        assert all(each in ({1}, {2}, {1, 2}, {2, 4}, {3, 4}) for each in told.ports())


async def test_a_lookupd_that_fails_plays_no_part_any_longer(loop: Any) -> None:
    with polling(loop, knows(1), knows(2)) as (poller, servers, told):
        await poller.wait_topology("t", WAIT)
        servers[1].script = fails
        await until_on(loop, lambda: poller.refresh("t") or told.ports()[-1] == {1})
        await until_on(loop, lambda: "500" in poller.failure())
        assert poller.answering() == [f"http://{servers[0].address}"]


async def test_a_removed_topic_is_asked_for_no_more(loop: Any) -> None:
    with polling(loop, knows(1), config=FAST) as (poller, [server], _):
        poller.add_topic("a")
        poller.add_topic("b")
        await until_on(loop, lambda: poller.topology("a") and poller.topology("b"))
        poller.remove_topic("a")
        assert poller.topology("a") is None
        asked = of_topic(server, "b")
        await until_on(loop, lambda: of_topic(server, "b") >= asked + 1)  # what was on its way has come
        of_a = of_topic(server, "a")
        await until_on(loop, lambda: of_topic(server, "b") >= asked + 4)
        assert of_topic(server, "a") == of_a


def of_topic(server: ScriptedHttp, topic: str) -> int:
    return sum(f"topic={topic}&" in target for target in server.targets)


def cut(data: bytes) -> Any:
    """Send this, and end the connection."""
    return lambda question: (question.send(data), question.end())


LIES: dict[str, Any] = {
    "html": reply(b"<html>It works!</html>"),
    "status 500": reply(b"{}", "500 Internal Server Error"),
    "status 302": reply(b"", "302 Found", "Location: http://127.0.0.1:1/lookup\r\n"),
    "no such route": reply(b'{"message":"NOT_FOUND"}', "404 Not Found"),
    "closes at once": cut(b""),
    "closes within the body": cut(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"),
    "hangs": hang,
    "huge": reply(b'{"channels":[' + b'"c",' * 500_000 + b'"c"],"producers":[]}'),
    "too many": {"channels": [], "producers": [peer(port) for port in range(1, 500)]},
}
SAID = {
    "no such route": "404 NOT_FOUND: this is no nsqlookupd, but perhaps the HTTP port of an nsqd",
    "too many": "names 499 nsqds, more than lookupd_max_producers=100 allows",
    "huge": "a reply of more than",
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("loop", ["gevent"], indirect=True)
async def test_a_lying_lookupd_is_ignored_and_logged_once_and_if_all_do_what_was_known_stays(
    loop: Any, lie: str, caplog: pytest.LogCaptureFixture
) -> None:
    def lies(question: Question) -> None:
        answer(question, LIES[lie])

    def asked(server: ScriptedHttp, more: int) -> Any:
        count = server.count("/lookup") + more
        return lambda: server.count("/lookup") >= count

    with polling(loop, knows(1), lies, config=BOUNDED) as (poller, (good, bad), told):
        assert ports(await poller.wait_topology("t", WAIT)) == {1}
        await until_on(loop, asked(bad, 1))
        await until_on(loop, asked(good, 4))
        assert ports(poller.topology("t")) == {1}
        good.script = lies
        await until_on(loop, asked(good, 2))
        before = len(told.all)
        await until_on(loop, asked(good, 1))
        assert len(told.all) == before
        assert ports(poller.topology("t")) == {1}
        good.script = knows(2)
        await until_on(loop, lambda: ports(poller.topology("t")) == {2})
    failures = [record for record in caplog.records if str(bad.address) in record.getMessage()]
    assert [record.levelno for record in failures] == [logging.WARNING]
    assert SAID.get(lie, "") in failures[0].getMessage()


async def test_a_failing_lookupd_is_asked_less_often_and_promoted_when_it_answers(
    loop: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nsq_fast.lookup")
    with polling(loop, knows(1), fails, config=FAST) as (poller, (good, bad), _):
        poller.add_topic("t")
        await until_on(loop, lambda: good.count("/lookup") >= 24)
        assert 2 <= bad.count("/lookup") <= 8
        bad.script = knows(2)
        await until_on(loop, lambda: ports(poller.topology("t")) == {1, 2})
        asked, others = bad.count("/lookup"), good.count("/lookup")
        await until_on(loop, lambda: good.count("/lookup") >= others + 8)
        assert bad.count("/lookup") - asked >= 6
    fails_then, again = [text for text in caplog.messages if str(bad.address) in text]
    assert "fails" in fails_then
    assert "answers again" in again


async def test_refreshes_without_end_are_a_poll_each_interval(loop: Any) -> None:
    config = PATIENT.replace(lookupd_refresh_interval=0.2)
    with polling(loop, knows(1), config=config) as (poller, [server], _):
        await poller.wait_topology("t", WAIT)
        before, began = server.count("/lookup"), time.monotonic()
        await until_on(loop, lambda: poller.refresh("t") or server.count("/lookup") >= before + 4)
        assert time.monotonic() - began > 2 * config.lookupd_refresh_interval


def listing(*addresses: Address) -> dict[str, Any]:
    return {"lookupdnodes": [{"NodeIP": each.host, "HttpPort": str(each.port)} for each in addresses]}


async def test_the_lookupds_of_a_cluster_are_learnt_from_a_seed_and_forgotten_when_they_are_listed_no_more(
    loop: Any,
) -> None:
    with scripted_http(knows(2)) as [other], polling(loop, knows(1), config=FAST) as (poller, [seed], _):
        seed.script = knows(1, lookupds=listing(seed.address, other.address))
        poller.add_topic("t")
        await until_on(loop, lambda: ports(poller.topology("t")) == {1, 2})
        assert poller.lookupds == (f"http://{seed.address}", f"http://{other.address}")
        seed.script = knows(1, lookupds=listing())
        await until_on(loop, lambda: poller.lookupds == (f"http://{seed.address}",))  # never the configured ones
        seed.script = knows(1, lookupds=listing(*(Address("127.0.0.1", port) for port in range(1, 1000))))
        await until_on(loop, lambda: len(poller.lookupds) > 1)
        assert len(poller.lookupds) <= 64
        for nothing in (reply(b""), reply(b"<html>"), hang):
            seed.script = knows(1, lookupds=nothing)
            asked = seed.count("/listlookup")
            await until_on(loop, lambda asked=asked: seed.count("/listlookup") >= asked + 2)
            assert f"http://{seed.address}" in poller.lookupds
            assert 1 in ports(poller.topology("t"))


async def test_only_a_lookupd_of_the_redesigned_nsq_is_asked_for_others_and_one_that_comes_is_noticed_at_a_poll(
    loop: Any,
) -> None:
    with scripted_http(knows(2)) as [other], polling(loop, knows(1), config=FAST) as (poller, [seed], _):
        poller.add_topic("t")
        await until_on(loop, lambda: seed.count("/lookup") >= 12)
        assert seed.count("/listlookup") == 0
        seed.script = knows(1, lookupds=listing(other.address))
        await until_on(loop, lambda: ports(poller.topology("t")) == {1, 2})
        seed.script = knows(1)
        asked, answered = seed.count("/listlookup"), seed.count("/lookup")
        await until_on(loop, lambda: seed.count("/lookup") >= answered + 6)
        assert seed.count("/listlookup") <= asked + 1  # one was on its way


async def test_nodes_of_lookupds_that_fail_are_an_error(loop: Any) -> None:
    with polling(loop, lambda question: question.answer(b"<html>")) as (poller, [server], _):
        with pytest.raises(LookupFailed, match="malformed"):
            await poller.nodes(WAIT)
        server.script = lambda question: question.answer({"producers": []})
        assert await poller.nodes(WAIT) == ()
        server.script = hang

        async def is_too_old() -> bool:
            with contextlib.suppress(LookupFailed):
                return await poller.nodes(0.05) is None
            return True

        while not await is_too_old():
            await loop.sleep(0.002)  # sleep: looks again and again


def test_addresses_that_cannot_be_used_are_refused() -> None:
    for given in ("h:1", "http://h:1", "http://h:1/", " h:1 ,", ("h", 1)):
        assert LookupPoller(given).lookupds == ("http://h:1",)
    for bad in ("", [], "ftp://h:1", "http://h:1/path", "http://user:secret@h:1", "http://:1"):
        with pytest.raises(ConfigError) as error:
            LookupPoller(bad)
        assert "secret" not in str(error.value)


async def test_that_nobody_knows_a_topic_is_not_concluded_while_another_lookupd_may(loop: Any) -> None:
    """A producer would publish to any nsqd then."""
    said = threading.Event()

    def unknown(question: Question) -> None:
        knows()(question)
        said.set()

    def after(question: Question) -> None:
        assert said.wait(WAIT)
        knows(2)(question)

    with polling(loop, unknown, after, access="w") as (poller, _, told):
        poller.add_topic("t")
        await until_on(loop, lambda: told.all)
        assert told.ports() == [{2}]


async def test_that_nobody_knows_a_topic_is_concluded_although_a_lookupd_hangs(loop: Any) -> None:
    with polling(loop, hang, knows(), access="w") as (poller, _, told):
        assert (await poller.wait_topology("t", WAIT)).is_empty
        assert told.ports() == [set()]


@pytest.mark.parametrize(
    "answer",
    [
        {"producers": [peer(0)]},
        {"producers": [{"broadcast_address": "not a host", "tcp_port": 1}]},
        {"producers": [], "partitions": {"0": {"broadcast_address": "", "tcp_port": 1}}},
    ],
)
async def test_an_answer_that_names_no_nsqd_that_can_be_used_is_a_bad_one(
    loop: Any, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It is reported, and is not taken for a topic that nobody knows; what another says is used."""
    bad = lambda question: question.answer(answer)  # noqa: E731
    with polling(loop, bad, knows(1)) as (poller, _, _):
        assert ports(await poller.wait_topology("t", WAIT)) == {1}
        await until_on(loop, poller.failure)
        assert "none with an address that can be used" in poller.failure()
    with polling(loop, bad) as (poller, _, _):
        poller.add_topic("t")
        await until_on(loop, poller.failure)
        with pytest.raises(LookupFailed, match="none with an address"):
            await poller.wait_topology("t", 0.01)
    assert "none with an address that can be used" in caplog.text


async def test_the_listener_may_fail_and_may_stop_the_poller(loop: Any, no_unseen_errors: list[Any]) -> None:
    with scripted_http(knows(1)) as servers:
        calls: list[str] = []
        faults: list[Any] = []

        def listener(topic: str, _: Topology) -> None:
            calls.append(topic)
            if topic == "bad":
                raise RuntimeError("listener")
            if len(calls) > 10:
                poller.stop()

        config = PATIENT.replace(lookupd_poll_interval=0.01)
        poller = LookupPoller([servers[0].address], config, listener=listener)
        for topic in ("bad", "good"):
            poller.add_topic(topic)
        poller.start(loop, loop.supervisor(log, faults.append))
        await until_on(loop, lambda: len(calls) > 10)
        assert calls.count("good") >= 4
        assert {str(fault.__cause__) for fault in faults} == {"listener"}
    no_unseen_errors.clear()


async def test_stop_ends_all_that_runs_and_who_waits_and_it_may_begin_again(loop: Any) -> None:
    with scripted_http(hang, hang) as servers:
        failures: list[BaseException] = []

        async def wait(sequence: Any) -> None:
            try:
                await sequence
            except LookupFailed as error:
                failures.append(error)

        before = of_lookup()
        poller = LookupPoller([server.address for server in servers], PATIENT)
        with pytest.raises(NotRunning):
            await poller.wait_topology("t")
        supervisor = loop.supervisor(log)
        poller.start(loop, supervisor)
        tasks = [
            supervisor.job("wait", wait, sequence)
            for sequence in (poller.wait_topology("t"), poller.nodes(), poller.topics())
        ]
        await until_on(loop, lambda: all(server.open == 3 for server in servers))
        poller.stop()
        poller.stop()
        for task in tasks:
            assert await task.join(WAIT)
        assert len(failures) == 3
        await until_on(loop, lambda: not any(server.open for server in servers))
        servers[0].script = knows(1)
        poller.start(loop, supervisor)
        assert (await poller.wait_topology("t", WAIT)).producers
        poller.stop()
        if not hasattr(loop, "is_of"):  # asyncio
            await until_on(loop, lambda: len(asyncio.all_tasks()) <= 2)
        else:
            await until_on(loop, lambda: gc.collect() is not None and not of_lookup() - before)


def of_lookup() -> set[Any]:
    """Greenlets of this process that look up."""
    return {
        each
        for each in gc.get_objects()
        if isinstance(each, gevent.Greenlet) and "lookup" in str(each.name) and not each.dead
    }


async def test_nodes_are_those_of_all_who_answer_soon(loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with polling(loop, hang, knows(1)) as (poller, _, _), promptly():
        assert {nsqd.tcp.port for nsqd in await poller.nodes(WAIT)} == {1}
    monkeypatch.setattr("nsq_fast.client.lookup.STRAGGLER_GRACE", WAIT)  # soon, where the machine is busy
    config = PATIENT.replace(lookupd_refresh_interval=WAIT)
    with polling(loop, knows(1, 2), knows(3), config=config) as (poller, servers, _), promptly():
        assert {nsqd.tcp.port for nsqd in await poller.nodes(WAIT)} == {1, 2, 3}
        await poller.nodes(WAIT)
        assert [server.count("/nodes") for server in servers] == [1, 1], "callers share one question"


def lists(*topics: str) -> Any:
    return knows(1, topics=topics)


@contextlib.contextmanager
def watching(loop: Any, *scripts: Any, config: LookupConfig = PATIENT) -> Iterator[tuple[set[str], list[ScriptedHttp]]]:
    """The topics that a watch of a pattern has a consumer at, and the lookupds that are asked."""

    def follow(found: Any, gone: Any) -> None:
        followed.update(found)
        followed.difference_update(gone)

    followed: set[str] = set()
    with polling(loop, *scripts, config=config) as (poller, servers, _):
        watch = TopicWatch(poller, TopicChoice(re.compile("orders.*")), config, follow, log)
        watch.start(loop, loop.supervisor(log), "topics")
        try:
            yield followed, servers
        finally:
            watch.stop()


async def test_topics_of_a_pattern_are_followed_although_a_lookupd_hangs(loop: Any) -> None:
    """At once, and those that come later as well, as long as there are none."""
    with watching(loop, hang, lists("orders1", "other")) as (followed, _):
        await until_on(loop, lambda: followed == {"orders1"})
    with watching(loop, hang, lists("other")) as (followed, (_, good)):
        await until_on(loop, lambda: good.count("/topics") >= 3)
        good.script = lists("orders2")
        await until_on(loop, lambda: followed == {"orders2"})


async def test_a_topic_is_left_when_no_lookupd_lists_it_and_all_have_answered(loop: Any) -> None:
    config = PATIENT.replace(lookupd_poll_interval=0.01)
    scripts = lists("orders1", "orders2"), lists("orders3")
    with watching(loop, *scripts, config=config) as (followed, (first, second)):
        await until_on(loop, lambda: followed == {"orders1", "orders2", "orders3"})
        first.script = lists("orders2")
        await until_on(loop, lambda: followed == {"orders2", "orders3"})
        second.script = fails
        count = second.count("/topics")
        await until_on(loop, lambda: second.count("/topics") >= count + 3)
        assert followed == {"orders2", "orders3"}


# HTTP, with servers that work, lie, hang and flood


def client_of(server: Any, scheme: str = "http", **options: Any) -> HttpClient:
    return HttpClient(Endpoint(scheme, server.address), **options)


async def failure_of(sequence: Any) -> HttpError:
    with pytest.raises(HttpError) as raised:
        await sequence
    return raised.value


async def test_a_refusal_says_why_and_redirects_are_not_followed(loop: Any) -> None:
    def script(question: Question) -> None:
        if question.target == "/moved":
            question.send(reply(b"", "302 Found", "Location: /other\r\n"))
        else:
            question.answer({"message": "TOPIC_NOT_FOUND"}, "404 Not Found")

    with scripted_http(script) as [server]:
        client = client_of(server)
        error = await failure_of(client.ask(loop, "GET", "/lookup"))
        assert (error.status, error.text) == (404, "TOPIC_NOT_FOUND")
        assert error.url == f"http://{server.address}/lookup"
        assert (await failure_of(client.ask(loop, "GET", "/moved"))).status == 302
        client.close()
        assert server.targets == ["/lookup", "/moved"]


async def test_connections_are_kept_until_the_server_or_close_ends_them(loop: Any) -> None:
    def script(question: Question) -> None:
        question.answer()
        if question.target == "/last":
            question.end()

    with scripted_http(script) as [server]:
        client = client_of(server)
        for path in ("/", "/", "/last"):
            await client.ask(loop, "GET", path)
        assert server.connections == 1
        with server.changed:
            assert server.changed.wait_for(lambda: not server.open, WAIT)
        await client.ask(loop, "GET", "/")
        assert server.connections == 2
        client.close()
        await client.ask(loop, "GET", "/")
        assert server.connections == 3
        client.close()


BROKEN = {
    "nothing": b"",
    "no HTTP": b"E_INVALID\r\n\r\n",
    "zeros": b"\x00" * 100,
    "half a head": b"HTTP/1.1 200 OK\r\nContent-",
    "half a body": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nOK",
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\nOK",
    "negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nOK",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nOK",
    "chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "version": b"HTTP/9.9 999 \xff\r\n\r\n",
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
async def test_a_broken_reply_is_an_error_without_a_status(loop: Any, data: bytes) -> None:
    def script(question: Question) -> bool:
        question.send(data)
        return False

    with scripted_http(script) as [server], promptly():
        assert (await failure_of(client_of(server).ask(loop, "GET", "/"))).status is None


FLOODS = {
    "body": (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", b"x" * 4096, "a reply of more than"),
    "body without end": (b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 4096, "a reply of more than"),
    "chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 700, "a reply of more than"),
    "header": (b"HTTP/1.1 200 OK\r\nX: ", b"x" * 4096, "headers of more than"),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"X: yyyyyyyyyyy\r\n" * 256, "headers of more than"),
    "interim replies": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 160, "headers of more than"),
    "trailers": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
        b"name: " + b"x" * 4096 + b"\r\n",
        "of trailers or of chunk sizes",
    ),
    "chunk extension": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;",
        b"x" * 4096,
        "of trailers or of chunk sizes",
    ),
}


@pytest.mark.parametrize(("begin", "then", "problem"), FLOODS.values(), ids=FLOODS)
async def test_a_flood_is_given_up_and_others_have_their_turns(
    loop: Any, begin: bytes, then: bytes, problem: str
) -> None:
    begun = threading.Event()

    def script(question: Question) -> None:
        question.send(begin + then * 20)
        begun.set()
        while True:
            question.send(then * 20)

    least = 100 if then.startswith(b"1\r\n") else 1  # a chunk costs as much as a read

    with scripted_http(script) as [server]:
        turns = 0
        asked = Event(loop)

        async def take_turns() -> None:
            nonlocal turns
            while not asked.is_set:
                turns += 1
                # The server's thread, too, needs its turns: who goes round without a pause leaves it one in 5 ms.
                await loop.sleep(0 if begun.is_set() else 0.0001)

        other = loop.supervisor(log).job("turns", take_turns)
        error = await failure_of(client_of(server, max_reply_size=20_000, timeout=WAIT).ask(loop, "GET", "/"))
        asked.set()
        assert problem in str(error)
        assert turns >= least
        assert await other.join(WAIT)


@pytest.mark.parametrize("size", [1, 2, 1000])
async def test_a_body_in_small_chunks_is_taken(loop: Any, size: int) -> None:
    body = b"x" * 30_000
    chunks = b"".join(b"%x\r\n%b\r\n" % (size, body[:size]) for _ in range(len(body) // size))
    data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    with scripted_http(lambda question: question.send(data)) as [server]:
        assert (await client_of(server).ask(loop, "GET", "/")).body == body


async def test_the_time_limit_is_for_the_whole_request(loop: Any) -> None:
    def drip(question: Question) -> None:
        question.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        while True:
            question.send(b"x")
            time.sleep(0.01)  # sleep: each byte in time, the reply never

    with scripted_http(drip, Question.hang) as servers:
        for server in servers:
            with promptly():
                error = await failure_of(client_of(server, timeout=0.2).ask(loop, "GET", "/"))
            assert error.status is None
            assert error.text == "no reply within 0.2 s"


async def test_a_request_that_is_given_up_closes_its_connection(loop: Any) -> None:
    with scripted_http(Question.hang) as [server]:
        client = client_of(server, timeout=10 * WAIT)
        task = loop.supervisor(log).job("ask", client.ask, loop, "GET", "/")
        while not server.open:
            await loop.sleep(0.001)  # sleep: looks again and again
        task.cancel()
        assert await task.join(WAIT)
        with server.changed:
            assert server.changed.wait_for(lambda: not server.open, WAIT)


async def test_nobody_there_and_no_such_host(loop: Any) -> None:
    error = await failure_of(HttpClient(Endpoint("http", free_address())).ask(loop, "GET", "/"))
    assert "refused" in error.text
    nowhere = Endpoint("http", free_address()._replace(host="host.invalid"))
    assert (await failure_of(HttpClient(nowhere, timeout=5).ask(loop, "GET", "/"))).status is None


async def test_what_http_cannot_carry_is_refused(loop: Any) -> None:
    client = HttpClient(Endpoint("http", free_address()))
    for method, path, headers in (
        ("GET", "/a b", {}),
        ("GET", "/a\r\nX: y", {}),
        ("G T", "/", {}),
        ("GET", "/é", {}),
        ("GET", "/", {"X": "a\r\nY: b"}),
        ("GET", "/", {"X Y": "a"}),
    ):
        with pytest.raises(ConfigError):
            await client.ask(loop, method, path, headers=headers)


async def test_https(loop: Any, authority: trustme.CA, tmp_path: Any) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    big = b"y" * 1_000_000

    def script(question: Question) -> None:
        question.answer(question.body)

    with scripted_http(script, ssl_context=context) as [server]:
        trusted = {"cafile": str(tmp_path / "ca.pem"), "server_hostname": "localhost"}
        client = client_of(server, "https", tls_options=trusted)
        for body in (b"x", big, b"z"):
            assert (await client.ask(loop, "POST", "/", body=body)).body == body
        assert server.connections == 1
        client.close()
        for options in ({"cafile": trusted["cafile"]}, None):
            stranger = client_of(server, "https", tls_options=options)
            assert "certificate" in (await failure_of(stranger.ask(loop, "GET", "/"))).text


async def test_files_of_tls_that_are_renewed_are_read_by_the_next_connection(
    loop: Any, authority: trustme.CA, tmp_path: Any
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    cafile = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(cafile)
    with scripted_http(lambda question: question.answer(), ssl_context=context) as [server]:
        client = client_of(server, "https", tls_options={"cafile": str(cafile), "server_hostname": "localhost"})
        assert "certificate" in (await failure_of(client.ask(loop, "GET", "/"))).text
        cafile.write_text("half of a certificate")
        assert str(cafile) in (await failure_of(client.ask(loop, "GET", "/"))).text
        authority.cert_pem.write_to_path(cafile)
        assert (await client.ask(loop, "GET", "/")).body == b"OK"
        client.close()


@pytest.mark.parametrize(
    ("addresses", "is_idle"),
    [
        (["127.0.0.1:1", "http://127.0.0.1:2"], True),
        (["127.0.0.1:1", "https://127.0.0.1:2"], False),
        (["https://127.0.0.1:2"], False),
    ],
)
def test_tls_options_for_lookupds_that_are_asked_without_tls_are_told_of_once(
    addresses: list[str], is_idle: bool, caplog: pytest.LogCaptureFixture
) -> None:
    Producer([], addresses, lookupd_tls_options={"verify": False})
    told = [each.getMessage() for each in caplog.records if getattr(each, "event", "") == "option_idle"]
    assert told == is_idle * [
        "lookupd_tls_options has no effect: nsqlookupds are asked without TLS where their addresses do not begin with"
        " https://, as http://127.0.0.1:1, http://127.0.0.1:2"
    ]


async def test_one_client_serves_several_loops(loop: Any) -> None:
    """Each with connections of its own; who closes the client closes those of all."""
    with scripted_http(lambda question: question.answer()) as [server]:
        client = client_of(server)
        assert client.request("GET", "/").body == b"OK"
        await client.ask(loop, "GET", "/")
        await client.ask(loop, "GET", "/")
        assert client.request("GET", "/").body == b"OK"
        assert server.connections <= 2
        thread = threading.Thread(target=client.close)
        thread.start()
        thread.join(WAIT)


# Dynamic configuration: what a document may say, and sources of documents on either loop, which may block.


WHOLE = {
    "trace": {"orders": True, "payments": 0.05, "*": False},
    "lookupds": {"add": ["new:4161", "https://two"], "remove": ["http://old:4161/"]},
}
TOML = """
[trace]
orders = true
payments = 0.05
"*" = false

[lookupds]
add = ["new:4161", "https://two"]
remove = ["http://old:4161/"]
"""


def test_json_toml_and_mappings_say_the_same() -> None:
    found = parse(json.dumps(WHOLE))
    assert found == parse(TOML, "toml") == parse(TOML.encode(), "toml") == parse(WHOLE)
    assert [found.share(topic) for topic in ("orders", "payments", "else")] == [1.0, 0.05, 0.0]
    assert parse("{}") == NOTHING
    assert NOTHING.share("orders") is None
    assert "DynamicConfig" in DynamicConfig.schema()["$defs"]


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"tarce": {}}, "unknown field `tarce`"),
        ({"trace": {"orders": 1.5}}, "trace.orders=1.5: must be true, false, or a share of 0 to 1"),
        ({"trace": {"orders": "on"}}, r"\$.trace"),
        ({"trace": {"or ders": True}}, "trace: invalid topic name 'or ders'"),
        ({"lookupds": {"add": ["a b"]}}, r"lookupds.add: invalid address 'a b'"),
        ({"lookupds": {"remove": ["a:0"]}}, "lookupds.remove: invalid address 'a:0'"),
        ({"lookupds": {"add": ["ftp://a"]}}, "lookupds.add: invalid address 'ftp://a'"),
        ({"lookupds": {"add": ["a"], "remove": ["a"]}}, "a is in add and in remove"),
    ],
)
def test_a_wrong_document_is_refused_with_what_is_wrong(document: dict[str, Any], said: str) -> None:
    for content in (document, json.dumps(document)):
        with pytest.raises(ConfigError, match=said):
            parse(content)


@pytest.mark.parametrize(
    ("content", "form"),
    [
        (b"", "json"),
        (b"\xff", "json"),
        (b"{", "json"),
        (b"[]", "json"),
        (b"a = ", "toml"),
        (b"{}", "xml"),
        (5, "json"),
        (b'{"trace":' * 100_000, "json"),
        (b" " * (1024 * 1024 + 1), "json"),
    ],
    ids=["empty", "no-text", "half", "list", "half-toml", "form", "number", "deep", "large"],
)
def test_what_is_no_document_is_refused(content: Any, form: str) -> None:
    with pytest.raises(ConfigError, match="not a document of dynamic configuration"):
        parse(content, form)


def test_changes_are_one_line() -> None:
    assert changes(NOTHING, NOTHING) == ""
    assert changes(NOTHING, parse(WHOLE)) == (
        "trace *: as the program says -> off; trace orders: as the program says -> on;"
        " trace payments: as the program says -> 5 %;"
        " lookupds.add: none -> new:4161, https://two; lookupds.remove: none -> http://old:4161/"
    )
    assert changes(parse(WHOLE), parse({**WHOLE, "lookupds": {}})) == (
        "lookupds.add: new:4161, https://two -> none; lookupds.remove: http://old:4161/ -> none"
    )


def document(*topics: str) -> bytes:
    return json.dumps({"trace": dict.fromkeys(topics, True)}).encode()


@contextlib.contextmanager
def keeping(loop: Any, source: Any) -> Iterator[tuple[ConfigKeeper, list[set[str]]]]:
    applied: list[set[str]] = []
    keeper = ConfigKeeper(source, lambda config: applied.append(set(config.trace)), "test")
    keeper.start(loop, loop.supervisor(log))
    try:
        yield keeper, applied
    finally:
        keeper.stop()


async def test_a_source_is_read_no_more_after_the_end(loop: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(document("before"))
    with keeping(loop, FileConfigSource(path, 0.001)) as (keeper, applied):
        await keeper.wait_first(loop, WAIT)
        keeper.stop()
        path.write_bytes(document("after"))
        for _ in range(TURNS):
            await loop.sleep(0.005)  # sleep: for what must not happen
        assert applied == [{"before"}]


async def test_a_source_of_the_program_may_block(loop: Any) -> None:
    """On asyncio it does so in a thread: the loop goes on, and closing does not wait for it."""
    threads: list[int] = []
    is_asyncio = not hasattr(loop, "is_of")
    waits: Any = threading.Event() if is_asyncio else gevent.event.Event()

    class Blocking:
        def next(self, last: ConfigDocument | None) -> ConfigDocument:
            threads.append(threading.get_ident())
            if len(threads) == 2:
                raise OSError("away")
            if len(threads) > 3:
                waits.wait(WAIT)
            return ConfigDocument({"trace": {f"t{len(threads)}": True}}, len(threads))

    with keeping(loop, Blocking()) as (keeper, applied):
        await keeper.wait_first(loop, WAIT)
        await until_on(loop, lambda: len(threads) >= 4)
        assert applied == [{"t1"}, {"t3"}]
        assert (threading.get_ident() in threads) is not is_asyncio
    if is_asyncio:
        waits.set()


async def test_a_source_on_asyncio_may_be_a_coroutine_function() -> None:
    from nsq_fast.client.asyncio_loop import AsyncioLoop

    class Native:
        async def next(self, last: ConfigDocument | None) -> ConfigDocument:
            if last is not None:
                await asyncio.Event().wait()
            return ConfigDocument(document("native"), 1)

    loop = AsyncioLoop()
    with keeping(loop, Native()) as (keeper, applied):
        await keeper.wait_first(loop, WAIT)
        assert applied == [{"native"}]
