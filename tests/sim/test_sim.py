"""Rules that hold through simulated faults, by seed; planted faults, each of which is found; orders and outages."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.waiting import PROCESS

from nsq_fast.aio import Consumer, Producer
from nsq_fast.client.asyncio_loop import AsyncioLoop
from nsq_fast.client.lookup import LookupPoller
from nsq_fast.errors import PublishFailed

from .clock import SimLoop
from .lookupd import ModelLookupd
from .nsqd import ModelNsqd
from .runner import SCENARIOS

# The real client through hours of faults, in virtual time; see ``runner``.
#
# Each run is a process of its own: which order a set has must be the same when a seed is replayed. ``make quick``
# runs ``QUICK`` seeds of each scenario, ``make test`` those of ``MORE`` besides; ``make sim SEEDS=0:100000`` is for
# nights.


TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.timeout(21 * PROCESS)  # a busy machine may give a tenth of what a run takes


def simulation(*arguments: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(TESTS.parent), **variables}
    done = subprocess.run(
        [sys.executable, "-m", "sim", *arguments],
        cwd=TESTS, env=environment, capture_output=True, text=True, timeout=20 * PROCESS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


QUICK = 75

MORE = {"connection": 1400, "producer": 2400, "consumer": 850, "lookup": 350}
"""Each to its end: 5,000 seeds, in 110 s of CPU, about."""


@pytest.fixture(scope="module")
def quick() -> str:
    """What a run of ``QUICK`` seeds of each scenario prints, with the digest of each seed."""
    return simulation("all", f"0:{QUICK}", "--digest")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_rules_hold_through_faults(scenario: str, quick: str) -> None:
    assert f"{scenario}: {QUICK} seeds" in quick


def test_a_seed_does_the_same_again(quick: str) -> None:
    """Also where objects have other addresses, and so sets of them another order."""
    again = simulation("all", "0:8", "--digest", PYTHONMALLOC="malloc").splitlines()
    digests = [line for line in again if " of CPU" not in line]
    assert len(digests) == 8 * len(SCENARIOS)
    assert set(digests) <= set(quick.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_rules_hold_through_more_faults(scenario: str) -> None:
    end = MORE[scenario]
    assert f"{scenario}: {end - QUICK} seeds" in simulation(scenario, f"{QUICK}:{end}")


@pytest.mark.slow
def test_planted_faults_are_found() -> None:
    assert "MISSED" not in simulation("planted", "0:150")


# Orders of events that the simulation has found to matter, each by itself.


async def test_bound_publishes_that_wait_for_room_before_anything_is_connected_get_away(loop: SimLoop) -> None:
    nsqd = ModelNsqd(loop.network, loop.books, "10.1.0.1", "original")
    async with Producer("10.1.0.1:4150", max_pending=1, publish_timeout=5.0) as producer:
        await asyncio.gather(producer.publish("t", b"first"), producer.publish("t", b"second", key="k"))
    assert {message.body for message in nsqd.log("t").messages} == {b"first", b"second"}


async def test_a_key_keeps_its_order_when_lookup_answers_while_publishes_wait_for_room(loop: SimLoop) -> None:
    nsqd = ModelNsqd(loop.network, loop.books, "10.1.0.1", "redesigned")
    log = nsqd.log("t")
    ModelLookupd(loop.network, loop.books, "10.2.0.1", [nsqd])
    nsqd.host.delays = (0.01, 0.01)  # lookup answers long before it is connected
    async with Producer([], ["10.2.0.1:4161"], max_pending=5) as producer:

        async def publish(number: int) -> None:
            await producer.publish("t", b"%d" % number, key="k")

        company = asyncio.create_task(producer.publish("t", b"company"))
        early = [asyncio.create_task(publish(number)) for number in range(6)]
        await asyncio.sleep(0.015)
        await asyncio.gather(company, *early, *(publish(number) for number in range(6, 9)))
    of_key = [message.body for message in log.messages if message.body != b"company"]
    assert of_key == [b"%d" % number for number in range(9)]


@pytest.mark.parametrize("made_after", [1.5, 3.0, 5.0])
async def test_a_slow_lookupd_is_asked_about_all_that_another_does_not_know(loop: SimLoop, made_after: float) -> None:
    """Each question keeps it busy for longer than it takes the other to say that it knows none of these topics."""
    nsqd = ModelNsqd(loop.network, loop.books, "10.1.0.1", "original")
    slow, ignorant = (ModelLookupd(loop.network, loop.books, f"10.2.0.{number}", [nsqd]) for number in (1, 2))
    slow.host.delays = (0.1, 0.1)
    ignorant.is_ignorant = True
    handled = asyncio.Event()

    async def handle(_: Any, message: Any) -> None:
        handled.set()

    async with Consumer(
        [f"orders{number}" for number in range(10)], "c", lookupd_http_addresses=["10.2.0.1:4161", "10.2.0.2:4161"],
        message_handler=handle, lookupd_poll_interval=60.0, lookupd_poll_jitter=0.0,
    ):  # fmt: skip
        await asyncio.sleep(made_after)
        nsqd.log("orders0").store(b"body")
        slow.notice()
        await asyncio.wait_for(handled.wait(), 6.0)


async def test_a_topic_of_a_pattern_is_asked_of_the_lookupd_that_named_it_while_that_was_busy(loop: SimLoop) -> None:
    nsqd = ModelNsqd(loop.network, loop.books, "10.1.0.1", "original")
    good, ignorant = (ModelLookupd(loop.network, loop.books, f"10.2.0.{number}", [nsqd]) for number in (1, 2))
    ignorant.is_ignorant = True  # and soon has nothing to do
    good.host.delays = (0.1, 0.1)
    handled: set[str] = set()

    async def handle(_: Any, message: Any) -> None:
        handled.add(message.topic)

    for number in range(60):  # the round takes longer than the list
        nsqd.log(f"orders{number}").store(b"body")
    good.notice()
    async with Consumer(
        re.compile("orders.*"), "c", lookupd_http_addresses=["10.2.0.1:4161", "10.2.0.2:4161"],
        message_handler=handle, lookupd_poll_interval=20.0, lookupd_poll_jitter=0.0,
    ):  # fmt: skip
        await asyncio.sleep(10.0)
        nsqd.log("orders60").store(b"body")
        good.notice()
        await asyncio.sleep(15.0)
        assert "orders60" in handled


async def test_what_came_while_the_loop_was_held_up_is_part_of_a_list(loop: SimLoop) -> None:
    nsqds = [ModelNsqd(loop.network, loop.books, f"10.1.0.{number}", "original") for number in range(3)]
    lookupds = [ModelLookupd(loop.network, loop.books, f"10.2.0.{nsqd.address[0][-1]}", [nsqd]) for nsqd in nsqds]
    lookupds[2].freeze()
    poller = LookupPoller([f"{each.address[0]}:4161" for each in lookupds])
    poller.start(AsyncioLoop())
    asked = asyncio.ensure_future(poller.nodes())
    while sum(each.asked for each in lookupds) < 2:
        await asyncio.sleep(0.0001)
    loop.hold_up(1.0)
    assert {nsqd.tcp for nsqd in await asked} == {nsqd.address for nsqd in nsqds[:2]}
    poller.stop()


# Packets get lost for 8 to 30 s: publishes go on within two seconds of the end of that, whenever it comes.


SOON = 2.0


@pytest.mark.parametrize("dialect", ["original", "redesigned"])
@pytest.mark.parametrize("seed", range(20))
async def test_after_an_outage_publishes_go_on_within_two_seconds(loop: SimLoop, dialect: str, seed: int) -> None:
    chance = loop.chance
    cluster: list[object] = []
    nsqds = [ModelNsqd(loop.network, loop.books, f"10.1.0.{number}", dialect, cluster) for number in (1, 2)]
    for number in range(4 if dialect == "redesigned" else 1):
        nsqds[number % 2].log("t", number)
    ModelLookupd(loop.network, loop.books, "10.2.0.1", nsqds)
    loop.network.links = 2 if dialect == "redesigned" else 1  # partitions have connections of their own
    hosts = [*(nsqd.host for nsqd in nsqds), loop.network.host("10.2.0.1")]
    async with Producer(
        [],
        ["10.2.0.1:4161"],
        heartbeat_interval=chance.choice((5.0, 30.0)),
        coalesce=chance.happens(0.5),
        publish_timeout=60.0,
        attempt_timeout=chance.choice((5.0, 30.0)),
    ) as producer:

        async def one(number: int) -> None:
            await producer.publish("t", b"%d" % number, key=f"k{number % 4}")

        await asyncio.gather(*(one(number) for number in range(8)))
        for host in hosts:
            host.is_slow_to_mend = True
            host.cut()
        until = loop.time() + 8.0 + 22.0 * chance.random()
        late = [loop.create_task(one(number)) for number in range(8)]
        while loop.time() < until:
            await asyncio.sleep(0.1)
            late.append(loop.create_task(one(len(late))))
        for host in hosts:
            host.mend()
        mended = loop.time()
        now = [loop.create_task(one(number)) for number in range(8)]
        await asyncio.gather(*now)
        took = loop.time() - mended
        await asyncio.gather(*late)
        assert took <= SOON


@pytest.mark.parametrize("seed", range(10))
async def test_after_a_long_outage_a_consumer_is_back_as_soon_as_lookup_answers(loop: SimLoop, seed: int) -> None:
    """Its own pauses have grown to a minute meanwhile."""
    nsqd = ModelNsqd(loop.network, loop.books, "10.1.0.1", "original")
    nsqd.log("t").channel("c")
    lookupd = ModelLookupd(loop.network, loop.books, "10.2.0.1", [nsqd])
    handled = asyncio.Event()

    async def handle(_: Any, message: Any) -> None:
        handled.set()

    async with Consumer(
        "t", "c", lookupd_http_addresses=["10.2.0.1:4161"], message_handler=handle, lookupd_poll_interval=2.0,
        lookupd_timeout=1.0, connect_timeout=1.0,
    ) as consumer:  # fmt: skip
        while not consumer.stats().connections:
            await asyncio.sleep(0.1)
        for host in (nsqd.host, lookupd.host):
            host.cut()
        await asyncio.sleep(900.0 + 60.0 * loop.chance.random())
        for host in (nsqd.host, lookupd.host):
            host.mend()
        mended = loop.time()
        nsqd.log("t").store(b"x")
        await asyncio.wait_for(handled.wait(), 100.0)
        assert loop.time() - mended <= 5.0


@pytest.mark.parametrize("away", [3.0, 20.0, 100.0, 1000.0])
async def test_clients_that_start_before_their_lookupd_are_at_work_seconds_after_it(loop: SimLoop, away: float) -> None:
    """Polls are a minute apart: a client that knows no nsqd asks more often, which costs nobody much."""
    nsqd = ModelNsqd(loop.network, loop.books, "10.1.0.1", "original")
    nsqd.log("t").channel("c")
    lookupd = ModelLookupd(loop.network, loop.books, "10.2.0.1", [nsqd])
    lookupd.kill()
    handled = asyncio.Event()

    async def handle(_: Any, message: Any) -> None:
        handled.set()

    addresses = ["10.2.0.1:4161"]
    async with (
        Consumer("t", "c", lookupd_http_addresses=addresses, message_handler=handle),
        Producer([], addresses, publish_timeout=2 * away) as producer,
    ):
        publish = asyncio.create_task(producer.publish("t", b"x"))
        await asyncio.sleep(away)
        assert not publish.done()
        lookupd.start()
        began = loop.time()
        await publish
        await handled.wait()
        assert loop.time() - began <= 8.0


async def test_a_server_that_was_slow_and_then_falls_silent_is_left_for_a_new_connection(loop: SimLoop) -> None:
    """It replied to one command after the other, but too late: so it was kept, and got no more."""
    nsqd = ModelNsqd(loop.network, loop.books, "10.1.0.1", "original")
    async with Producer(
        "10.1.0.1:4150", attempt_timeout=1.0, publish_timeout=60.0, heartbeat_interval=60.0, coalesce=False
    ) as producer:
        await producer.publish("t", b"first")
        (conn,) = nsqd.conns
        nsqd.moods.late, nsqd.moods.lateness = 1.0, 0.9
        waiting = [loop.create_task(producer.publish("t", b"%d" % number)) for number in range(20)]
        while not producer.stats()["stalled"]:
            await asyncio.sleep(0.05)
        assert sum(task.done() for task in waiting) > 0
        conn.end.is_swallowing = conn.end.peer.is_swallowing = True  # type: ignore[union-attr]
        nsqd.moods.late = 0.0
        silent = loop.time()
        await asyncio.gather(*waiting)
        assert loop.time() - silent <= 1.0 + SOON


class Tries(list[float]):
    """When somebody tried to connect to an nsqd, from now on."""

    def __init__(self, loop: SimLoop) -> None:
        knock = loop.network.knock

        def counted(sock: Any, address: tuple[str, int]) -> None:
            if address[1] == 4150:
                self.append(loop.time())
            knock(sock, address)

        loop.network.knock = counted  # type: ignore[method-assign]


async def test_an_nsqd_that_is_gone_is_tried_ever_more_seldom_until_something_is_published(loop: SimLoop) -> None:
    nsqd = ModelNsqd(loop.network, loop.books, "10.1.0.1", "original")
    async with Producer("10.1.0.1:4150") as producer:
        await producer.publish("t", b"first")
        nsqd.kill()
        tries = Tries(loop)
        await asyncio.sleep(600.0)
        seldom = len(tries)
        with pytest.raises(PublishFailed):
            await producer.publish("t", b"second", timeout=60.0)
    assert seldom < 40, "pauses of 30 to 60 s after the first"
    assert len(tries) - seldom > 25, "of two seconds at most"


async def test_an_nsqd_that_is_gone_is_tried_ever_more_seldom_though_lookup_names_it(loop: SimLoop) -> None:
    nsqd = ModelNsqd(loop.network, loop.books, "10.1.0.1", "original")
    nsqd.log("t")
    ModelLookupd(loop.network, loop.books, "10.2.0.1", [nsqd]).mood = "ghost"
    tries = Tries(loop)
    async with Consumer("t", "c", lookupd_http_addresses=["10.2.0.1:4161"], lookupd_poll_interval=5.0):
        await asyncio.sleep(600.0)
    assert 10 < len(tries) < 40


async def test_close_without_a_timeout_says_how_long_publishes_may_take(
    loop: SimLoop, caplog: pytest.LogCaptureFixture
) -> None:
    producer = Producer("10.1.0.1:4150", publish_timeout=10.0)
    await producer.start()
    waiting = producer.publish_nowait("t", b"nobody takes it")
    await producer.close(timeout=None)
    (said,) = (record.getMessage() for record in caplog.records if "closing waits" in record.getMessage())
    assert said.endswith("; at most 9.0 s more")
    with pytest.raises(PublishFailed):
        await waiting


async def test_publishes_behind_one_that_is_refused_do_not_shorten_its_pauses(loop: SimLoop) -> None:
    nsqd = ModelNsqd(loop.network, loop.books, "10.1.0.1", "redesigned")
    log = nsqd.log("t")
    ModelLookupd(loop.network, loop.books, "10.2.0.1", [nsqd])
    async with Producer([], ["10.2.0.1:4161"]) as producer:
        await producer.publish("t", b"first", key="k")
        log.is_writable = False
        waiting = []
        for number in range(100):
            waiting.append(loop.create_task(producer.publish("t", b"%d" % number, key="k")))
            await asyncio.sleep(0.01)
        log.is_writable = True
        await asyncio.gather(*waiting)
    assert sum("NOT_WRITABLE" in line for line in loop.books.trace) < 20
    assert [message.body for message in log.messages] == [b"first", *(b"%d" % number for number in range(100))]


@pytest.mark.parametrize("refusal", ["E_TOPIC_NOT_EXIST", "E_FAILED_ON_NOT_LEADER"])
async def test_without_lookup_a_partition_is_tried_at_one_nsqd_after_the_other(loop: SimLoop, refusal: str) -> None:
    nsqds = [ModelNsqd(loop.network, loop.books, f"10.1.0.{number}", "redesigned") for number in range(1, 6)]
    if refusal == "E_FAILED_ON_NOT_LEADER":  # it does not end the connection; the other does
        for nsqd in nsqds:
            nsqd.cluster = nsqds[0].cluster
    logs = [nsqd.log(topic) for topic, nsqd in zip("abcde", nsqds, strict=True)]
    async with Producer([f"10.1.0.{number}:4150" for number in range(1, 6)]) as producer:
        while len(producer.stats()["connected"]) < len(nsqds):
            await asyncio.sleep(0.1)
        for topic in "abcde":  # of which each nsqd leads one
            await producer.publish(topic, b"first", partition=0)
            refused = sum(refusal in line for line in loop.books.trace)
            await producer.publish(topic, b"second", partition=0)
            assert sum(refusal in line for line in loop.books.trace) == refused, "it knows now who leads it"
    assert [[message.body for message in log.messages] for log in logs] == [[b"first", b"second"]] * 5
    assert any(refusal in line for line in loop.books.trace)


def holder(nsqds: list[ModelNsqd]) -> ModelNsqd:
    """The one that has a publish and has not read it."""
    (found,) = (nsqd for nsqd in nsqds if any(b"PUB " in conn.end.arrived for conn in nsqd.conns))
    return found


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("pause", [0.2, 2.5])
async def test_a_server_that_ends_long_after_it_got_a_publish_did_not_end_of_it(
    loop: SimLoop, pause: float, seed: int
) -> None:
    """As where nsqds are restarted in turn, each while publishes wait there for a replica that is away."""
    nsqds = [ModelNsqd(loop.network, loop.books, f"10.1.0.{number}", "original") for number in range(1, 5)]
    addresses = [f"10.1.0.{number}:4150" for number in range(1, 5)]
    async with Producer(addresses, coalesce=False, publish_timeout=60.0) as producer:
        await producer.publish("t", b"first")
        while len(producer.stats()["connected"]) < len(nsqds):
            await asyncio.sleep(0.1)
        for nsqd in nsqds:
            nsqd.freeze()
        waiting = asyncio.ensure_future(producer.publish("t", b"waits"))
        for _ in range(3):
            await asyncio.sleep(pause)
            if not waiting.done():
                holder(nsqds).kill()
        for nsqd in nsqds:
            nsqd.thaw()
        (outcome,) = await asyncio.gather(waiting, return_exceptions=True)
    if pause > 1.0:
        assert outcome == b"OK"
    else:
        assert "it may be what ended them: it is sent to no other server" in str(outcome)
