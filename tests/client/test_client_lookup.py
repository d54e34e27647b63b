"""Lookup on either loop: what one lookupd says is used at once, whatever the others do."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import gevent
import pytest
from support.contract import FACES, Face
from support.http_server import Question, ScriptedHttp, scripted_http
from support.waiting import WAIT, promptly

from nsq_fast import Producer
from nsq_fast.broker import BrokerProcess
from nsq_fast.client.lookup import SIDE_BY_SIDE, LookupPoller, TopicWatch
from nsq_fast.config import LookupConfig
from nsq_fast.errors import LookupFailed, NotRunning
from nsq_fast.protocol.targets import TopicChoice
from nsq_fast.protocol.topology import Topology

log = logging.getLogger("nsq_fast.test")

PATIENT = LookupConfig(lookupd_poll_interval=600.0, lookupd_timeout=10 * WAIT, lookupd_refresh_interval=0.01)


def peer(port: int) -> dict[str, Any]:
    return {"broadcast_address": "10.0.0.1", "tcp_port": port, "http_port": port + 1, "version": "1.3.0"}


def knows(*ports: int) -> Any:
    """The script of a lookupd that knows these nsqds of each topic, and no lookupds."""

    def script(question: Question) -> None:
        if question.target.startswith("/listlookup"):
            question.answer({"message": "NOT_FOUND"}, "404 Not Found")
        elif ports:
            question.answer({"channels": [], "producers": [peer(port) for port in ports], "topics": ["known"]})
        else:
            question.answer({"message": "TOPIC_NOT_FOUND"}, "404 Not Found")

    return script


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


async def until(loop: Any, probe: Any) -> None:
    deadline = time.monotonic() + WAIT
    while not probe():
        assert time.monotonic() < deadline
        await loop.sleep(0.002)  # sleep: looks again and again


@contextlib.contextmanager
def polling(
    loop: Any, servers: list[ScriptedHttp], config: LookupConfig = PATIENT, access: Any = "r", told: Any = None
) -> Iterator[LookupPoller]:
    poller = LookupPoller([server.address for server in servers], config, access, told)
    poller.start(loop, loop.supervisor(log))
    try:
        yield poller
    finally:
        poller.stop()


def test_answers_are_united(on_loop: Any) -> None:
    with scripted_http(knows(1, 2), knows(2, 3), knows()) as servers:

        async def test(loop: Any) -> None:
            with polling(loop, servers) as poller:
                topology = await poller.wait_topology("t", WAIT)
                assert [nsqd.tcp.port for nsqd in topology.producers] == [1, 2, 3]
                assert poller.topology("t") is topology

        on_loop(test)


def test_a_hung_lookupd_delays_nothing_that_another_knows(on_loop: Any) -> None:
    """Two hundred topics, each used as soon as it is known; the hung one gets its share of questions and no more."""
    with scripted_http(hang, knows(1)) as servers:

        async def test(loop: Any) -> None:
            told = Told()
            names = [f"t{number}" for number in range(200)]
            with polling(loop, servers, told=told) as poller:
                for name in names:
                    poller.add_topic(name)
                await until(loop, lambda: {topic for topic, _ in told.all} == set(names))
                assert all(ports == {1} for name in names for ports in told.ports(name))
                assert servers[0].most <= SIDE_BY_SIDE
                # And what is known of one may be asked anew.
                servers[1].script = knows(2)
                await until(loop, lambda: poller.refresh("t7") or told.ports("t7")[-1] == {2})

        on_loop(test)


def test_a_slow_lookupd_is_asked_about_several_topics_at_a_time(on_loop: Any) -> None:
    """It answers when twenty questions wait: one that is asked after the other would never get an answer."""
    together = threading.Barrier(20)

    def slow(question: Question) -> None:
        if question.target.startswith("/lookup"):
            together.wait(WAIT)
        knows(1)(question)

    with scripted_http(slow) as servers:

        async def test(loop: Any) -> None:
            told = Told()
            with polling(loop, servers, told=told) as poller:
                for number in range(40):
                    poller.add_topic(f"t{number}")
                await until(loop, lambda: len({topic for topic, _ in told.all}) == 40)
                assert servers[0].most <= SIDE_BY_SIDE

        on_loop(test)


def test_a_lookupd_that_answers_soon_is_asked_over_one_connection(on_loop: Any) -> None:
    with scripted_http(knows(1)) as [server]:

        async def test(loop: Any) -> None:
            with polling(loop, [server]) as poller:
                for number in range(100):
                    poller.add_topic(f"t{number}")
                for number in range(100):
                    await poller.wait_topology(f"t{number}", WAIT)
            assert server.connections <= 25  # one, but for pauses of a busy machine

        on_loop(test)


def test_what_a_lookupd_said_holds_until_it_answers_again(on_loop: Any) -> None:
    """One that takes long in the next round does not take its nsqds away for so long; its new answer does."""
    go_on = threading.Event()

    def later(question: Question) -> None:
        assert go_on.wait(WAIT)
        knows(3)(question)

    with scripted_http(knows(1), knows(2)) as servers:

        async def test(loop: Any) -> None:
            go_on.clear()
            servers[0].script, servers[1].script = knows(1), knows(2)
            told = Told()
            with polling(loop, servers, told=told) as poller:
                await poller.wait_topology("t", WAIT)
                servers[0].script, servers[1].script = knows(4), later
                await until(loop, lambda: poller.refresh("t") or {2, 4} in told.ports())
                go_on.set()
                await until(loop, lambda: told.ports()[-1] == {3, 4})
                assert all(each in ({1}, {2}, {1, 2}, {2, 4}, {3, 4}) for each in told.ports())

        on_loop(test)


def test_a_lookupd_that_fails_plays_no_part_any_longer(on_loop: Any) -> None:
    def fail(question: Question) -> None:
        question.answer(b"", "500 Internal Server Error")

    with scripted_http(knows(1), knows(2)) as servers:

        async def test(loop: Any) -> None:
            servers[1].script = knows(2)
            told = Told()
            with polling(loop, servers, told=told) as poller:
                await poller.wait_topology("t", WAIT)
                servers[1].script = fail
                await until(loop, lambda: poller.refresh("t") or told.ports()[-1] == {1})
                await until(loop, lambda: "500" in poller.failure())
                assert poller.answering() == [f"http://{servers[0].address}"]

        on_loop(test)


def test_that_nobody_knows_a_topic_is_not_concluded_while_another_lookupd_may(on_loop: Any) -> None:
    """A producer would publish to any nsqd then."""
    said = threading.Event()

    def unknown(question: Question) -> None:
        knows()(question)
        said.set()

    def after(question: Question) -> None:
        assert said.wait(WAIT)
        knows(2)(question)

    with scripted_http(unknown, after) as servers:

        async def test(loop: Any) -> None:
            said.clear()
            told = Told()
            with polling(loop, servers, access="w", told=told) as poller:
                poller.add_topic("t")
                await until(loop, lambda: told.all)
                assert told.ports() == [{2}]

        on_loop(test)


def test_that_nobody_knows_a_topic_is_concluded_although_a_lookupd_hangs(on_loop: Any) -> None:
    with scripted_http(hang, knows()) as servers:

        async def test(loop: Any) -> None:
            told = Told()
            with polling(loop, servers, access="w", told=told) as poller:
                assert (await poller.wait_topology("t", WAIT)).is_empty
                assert told.ports() == [set()]

        on_loop(test)


@pytest.mark.parametrize(
    "answer",
    [
        {"producers": [peer(0)]},
        {"producers": [{"broadcast_address": "not a host", "tcp_port": 1}]},
        {"producers": [], "partitions": {"0": {"broadcast_address": "", "tcp_port": 1}}},
    ],
)
def test_an_answer_that_names_no_nsqd_that_can_be_used_is_a_bad_one(
    on_loop: Any, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It is reported, and is not taken for a topic that nobody knows; what another says is used."""
    with scripted_http(lambda question: question.answer(answer), knows(1)) as servers:

        async def test(loop: Any) -> None:
            with polling(loop, servers) as poller:
                assert [nsqd.tcp.port for nsqd in (await poller.wait_topology("t", WAIT)).producers] == [1]
                await until(loop, poller.failure)
                assert "none with an address that can be used" in poller.failure()
            with polling(loop, servers[:1]) as poller, pytest.raises(LookupFailed, match="none with an address"):
                await poller.wait_topology("t", 0.2)

        on_loop(test)
    assert "none with an address that can be used" in caplog.text


def test_the_listener_may_fail_and_may_stop_the_poller(on_loop: Any, no_unseen_errors: list[Any]) -> None:
    with scripted_http(knows(1)) as servers:

        async def test(loop: Any) -> None:
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
            await until(loop, lambda: not poller.is_running)
            assert calls.count("good") >= 4
            assert {str(fault.__cause__) for fault in faults} == {"listener"}

        on_loop(test)
    no_unseen_errors.clear()


def test_stop_ends_all_that_runs_and_who_waits_and_it_may_begin_again(on_loop: Any) -> None:
    with scripted_http(hang, hang) as servers:

        async def test(loop: Any) -> None:
            for server in servers:
                server.script = hang
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
            await until(loop, lambda: all(server.open == 3 for server in servers))
            poller.stop()
            poller.stop()
            for task in tasks:
                assert await task.join(WAIT)
            assert len(failures) == 3
            await until(loop, lambda: not any(server.open for server in servers))
            servers[0].script = knows(1)
            poller.start(loop, supervisor)
            assert (await poller.wait_topology("t", WAIT)).producers
            poller.stop()
            if not hasattr(loop, "is_of"):  # asyncio
                await until(loop, lambda: len(asyncio.all_tasks()) <= 2)
            else:
                await until(loop, lambda: gc.collect() is not None and not of_lookup() - before)

        on_loop(test)


def of_lookup() -> set[Any]:
    """Greenlets of this process that look up."""
    return {
        each
        for each in gc.get_objects()
        if isinstance(each, gevent.Greenlet) and "lookup" in str(each.name) and not each.dead
    }


def test_nodes_are_those_of_all_who_answer_soon(on_loop: Any) -> None:
    with scripted_http(knows(1, 2), hang, knows(3)) as servers:

        async def test(loop: Any) -> None:
            with polling(loop, servers) as poller, promptly():
                assert {nsqd.tcp.port for nsqd in await poller.nodes(WAIT)} == {1, 2, 3}
                await poller.nodes(WAIT)
                assert [server.count("/nodes") for server in servers] == [1, 1, 1], "callers share one question"

        on_loop(test)


def lists(*topics: str) -> Any:
    return lambda question: question.answer({"topics": list(topics), "producers": [peer(1)], "channels": []})


class Followed:
    """The topics that a watch has a consumer at."""

    def __init__(self) -> None:
        self.topics: set[str] = set()

    def __call__(self, found: Any, gone: Any) -> None:
        self.topics.update(found)
        self.topics.difference_update(gone)


@contextlib.contextmanager
def watching(loop: Any, servers: list[ScriptedHttp], config: LookupConfig) -> Iterator[Followed]:
    followed = Followed()
    choice = TopicChoice(re.compile("orders.*"))
    with polling(loop, servers, config) as poller:
        watch = TopicWatch(poller, choice, config, followed, log)
        watch.start(loop, loop.supervisor(log), "topics")
        try:
            yield followed
        finally:
            watch.stop()


def test_topics_of_a_pattern_are_followed_although_a_lookupd_hangs(on_loop: Any) -> None:
    """At once, and those that come later as well, as long as there are none."""
    with scripted_http(hang, lists("orders1", "other")) as servers:

        async def test(loop: Any) -> None:
            servers[1].script = lists("orders1", "other")
            with watching(loop, servers, PATIENT) as followed:
                await until(loop, lambda: followed.topics == {"orders1"})
            servers[1].script = lists("other")
            with watching(loop, servers, PATIENT) as followed:
                await until(loop, lambda: servers[1].count("/topics") >= 3)
                servers[1].script = lists("orders2")
                await until(loop, lambda: followed.topics == {"orders2"})

        on_loop(test)


def test_a_topic_is_left_when_no_lookupd_lists_it_and_all_have_answered(on_loop: Any) -> None:
    with scripted_http(lists(), lists()) as servers:

        async def test(loop: Any) -> None:
            first, second = servers
            first.script, second.script = lists("orders1", "orders2"), lists("orders3")
            with watching(loop, servers, PATIENT.replace(lookupd_poll_interval=0.01)) as followed:
                await until(loop, lambda: followed.topics == {"orders1", "orders2", "orders3"})
                first.script = lists("orders2")
                await until(loop, lambda: followed.topics == {"orders2", "orders3"})
                second.script = lambda question: question.answer(b"", "500 Internal Server Error")
                count = second.count("/topics")
                await until(loop, lambda: second.count("/topics") >= count + 3)
                assert followed.topics == {"orders2", "orders3"}

        on_loop(test)


# Through the clients

NAMES = [f"orders{number}" for number in range(30)]


@pytest.fixture
def beside_a_hung_one() -> Iterator[list[str]]:
    """The addresses of two nsqlookupds: one that hangs, and that of a broker which has a message of each topic."""
    with BrokerProcess() as broker, scripted_http(hang) as [hung]:
        assert broker.lookupd is not None
        with Producer([broker.nsqd.tcp]) as producer:
            for name in NAMES:
                producer.publish(name, name.encode())
        yield [str(hung.address), str(broker.lookupd.http)]


@pytest.mark.parametrize("face", FACES, ids=lambda face: str(face.name))
@pytest.mark.parametrize("topic", [NAMES, re.compile("orders.*")], ids=["listed", "pattern"])
def test_a_consumer_has_all_topics_although_a_lookupd_hangs(
    face: Face, beside_a_hung_one: list[str], topic: Any
) -> None:
    seen: set[bytes] = set()

    async def handle(consumer: Any, message: Any) -> None:
        seen.add(message.body)

    async def main() -> None:
        options = {"lookupd_http_addresses": beside_a_hung_one, "lookupd_timeout": 10 * WAIT}
        async with face.client("Consumer", topic, "c", message_handler=handle, **options):
            await face.until(lambda: len(seen) == len(NAMES))

    face.run(main())
