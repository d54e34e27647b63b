"""What every Producer does, whichever face it has; each publish has one outcome, and it is true."""

from __future__ import annotations

import itertools
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import Any

import pytest
from support.contract import Face, Joined, joined
from support.held_publishes import PublishNsqd
from support.http_server import Question, scripted_http
from support.waiting import WAIT
from support.wire import OK, error_frame

from nsq_fast.broker.redesigned.cluster import RedesignedCluster
from nsq_fast.errors import ConfigError, ConnectionLost, NotRunning, PublishFailed, PublishTimeout

NOBODY = "127.0.0.1:1"


async def bodies_until(face: Face, address: str, are_enough: Callable[[list[bytes]], bool]) -> list[bytes]:
    """The bodies that come, each finished, until these are enough."""
    found: list[bytes] = []
    async with (
        face.client("Consumer", "t", "c", address, max_in_flight=200) as consumer,
        aclosing(face.messages(consumer)) as messages,
    ):
        async for message in messages:
            found.append(message.body)
            if are_enough(found):
                await face(message.finish())
                break
    return found


async def test_a_body_is_what_it_was_at_the_call(face: Face, nsqd_process: Any) -> None:
    async with face.client("Producer", nsqd_process.address) as producer:
        body = bytearray(b"before")
        promise = producer.publish_nowait("t", body)
        body[:] = b"behind"
        await face.result(promise)
    assert await bodies_until(face, nsqd_process.address, bool) == [b"before"]


def test_wrong_options_are_refused_where_the_producer_is_made(face: Face) -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_pending'"):
        face.package.Producer(NOBODY, max_pendin=3)
    with pytest.raises(ConfigError, match="nowhere to publish to"):
        face.package.Producer()


async def test_it_publishes_between_start_and_close_only(face: Face) -> None:
    producer = face.package.Producer(NOBODY)
    with pytest.raises(NotRunning, match="start"):
        await face(producer.publish("t", b"x"))
    await face(producer.start())
    await face(producer.close())
    with pytest.raises(NotRunning, match="closed"):
        await face(producer.publish("t", b"x"))
    with pytest.raises(NotRunning, match="closed"):
        producer.publish_nowait("t", b"x")
    assert await face(producer.join(WAIT))


async def test_max_pending_blocks_those_who_wait_and_refuses_the_others(face: Face, nsqd_process: Any) -> None:
    async with face.client("Producer", nsqd_process.address, max_pending=10) as producer:
        await face(producer.publish("t", b"first"))
        nsqd_process.freeze()
        promises: list[Any] = []
        with pytest.raises(PublishFailed, match="max_pending=10"):
            promises.extend(producer.publish_nowait("t", b"%d" % number) for number in range(1000))
        assert len(promises) <= 10 + 1
        with pytest.raises(PublishTimeout, match="max_pending=10"):
            await face(producer.publish("t", b"waits", timeout=0.05))
        with pytest.raises(PublishFailed, match="max_pending=10"):
            await face(producer.publish("t", b"does not wait", block=False))

        async def publish() -> Any:
            return await face(producer.publish("t", b"last"))

        waiting = await face.begin(publish)
        await face.until(lambda: producer.stats()["held"] == 10)
        nsqd_process.thaw()
        assert await waiting() == b"OK"
        for promise in promises:
            assert await face.result(promise) == b"OK"
        assert producer.stats()["held"] == 0
        assert await face(producer.multipublish("t", [b"alone"] * 20)) == b"OK", "one that is larger goes alone"
    count = len(promises) + 22
    await bodies_until(face, nsqd_process.address, lambda found: len(found) == count)


async def test_a_batch_whose_rest_finds_no_room_says_that_it_may_be_stored(face: Face) -> None:
    with PublishNsqd(lambda sock, _: sock.sendall(OK)) as nsqd:
        async with face.client("Producer", nsqd.address, max_pending=2, max_body_size=64, max_msg_size=50) as producer:
            await face(producer.publish("t", b"first"))
            nsqd.react = None  # it takes what comes, and does not reply
            with pytest.raises(PublishFailed) as caught:
                await face(producer.multipublish("t", [b"1" * 40, b"2" * 40, b"3" * 40], timeout=0.2))
            assert caught.value.possibly_stored
            assert nsqd.bodies[1:][:1] == [[b"1" * 40]]


async def test_a_close_that_waits_says_once_for_what(face: Face, closed_port: int, told: Any) -> None:
    producer = face.package.Producer(f"127.0.0.1:{closed_port}", publish_timeout=WAIT)
    await face(producer.start())
    promise = producer.publish_nowait("t", b"x")
    await face(producer.close(timeout=1.3))
    with pytest.raises(PublishFailed, match="closed"):
        await face.result(promise)
    (said,) = told("close_waits")
    assert "closing waits for nsqds to confirm 1 message " in said
    assert f"127.0.0.1:{closed_port}: cannot connect" in said
    assert "at most 0.3 s more" in said


async def test_an_nsqd_that_is_connected_stays_in_use_while_lookup_names_none_at_all(
    face: Face, nsqd_process: Any
) -> None:
    """As an nsqlookupd does that has just begun, until nsqds register with it: after up to 15 s."""
    host, port = nsqd_process.address.split(":")
    named = [{"broadcast_address": host, "hostname": "one", "tcp_port": int(port), "http_port": 1, "version": "1.3.0"}]

    def answer(question: Question) -> None:
        if named or not question.target.startswith("/lookup"):
            question.answer({"producers": named})
        else:
            question.answer({"message": "TOPIC_NOT_FOUND"}, "404 Not Found")

    with scripted_http(answer) as (lookupd,):
        options = {"lookupd_http_addresses": str(lookupd.address), "lookupd_refresh_interval": 0.01}
        async with face.client("Producer", lookupd_poll_interval=0.02, **options) as producer:
            await face(producer.publish("t", b"x"))
            named.clear()
            asked = lookupd.count("/nodes")
            await face.until(lambda: lookupd.count("/nodes") >= asked + 2)
            for _ in range(10):
                assert await face(producer.publish("t", b"x", timeout=WAIT)) == b"OK"
            await face.do(nsqd_process.stop)
            await face.until(lambda: not producer.stats()["connected"])
            await face.until(lambda: not producer.stats()["disconnected"])  # nothing leads there any more
            with pytest.raises(PublishFailed, match="lookup does not know the topic"):
                await face(producer.publish("t", b"x", timeout=0.05))


@pytest.mark.kill
async def test_a_server_that_is_killed_has_every_confirmed_publish(face: Face, nsqd_process: Any) -> None:
    confirmed: set[bytes] = set()
    over: list[int] = []
    async with face.client("Producer", nsqd_process.address, retry_max_delay=0.1, max_backoff_duration=0.1) as producer:

        async def publish(number: int) -> None:
            for each in itertools.count():
                if over:
                    return
                body = b"%d-%d" % (number, each)
                with suppress(PublishFailed):  # whether that one is stored is unknown
                    await face(producer.publish("t", body))
                    confirmed.add(body)

        async def until_more() -> None:
            count = len(confirmed)
            await face.until(lambda: len(confirmed) >= count + 50)

        jobs = [await face.begin(lambda number=number: publish(number)) for number in range(4)]  # type: ignore[misc]
        for _ in range(2):
            await until_more()
            await face.do(nsqd_process.kill)
            await face.do(nsqd_process.start)
        await until_more()
        over.append(1)
        for join in jobs:
            await join()
    await bodies_until(face, nsqd_process.address, lambda found: confirmed <= set(found))


# Each publish has one outcome, and it is true: also of those that left as one command, whatever befalls them


CALLERS = 8
BODIES = [b"%d" % number for number in range(CALLERS)]


@pytest.mark.parametrize("code", [b"E_BAD_MESSAGE MPUB message", b"E_BAD_BODY too big"])
async def test_one_that_is_refused_fails_alone(face: Face, code: bytes) -> None:
    async with joined(face, [*BODIES, b"bad"]) as publishes:

        def refuse_the_bad(sock: socket.socket, bodies: list[bytes]) -> None:
            if b"bad" in bodies:
                publishes.nsqd.refuse(sock, code)
            else:
                sock.sendall(OK)

        publishes.nsqd.react = refuse_the_bad
        publishes.nsqd.refuse(publishes.nsqd.commands[0][0], code)
        ends = await publishes.ends()
        error = ends.pop(b"bad")
        assert isinstance(error, PublishFailed)
        assert code.split()[0].decode() in str(error)
        assert not error.possibly_stored
        assert ends == dict.fromkeys(BODIES, b"OK")
        assert all(len(bodies) == 1 for bodies in publishes.nsqd.bodies[1:])
        assert publishes.stats("stored", "refused", "held") == (CALLERS, 1, 0)


async def test_each_has_an_error_of_its_own_when_the_connection_is_lost(face: Face) -> None:
    async with joined(face, BODIES, retry_unknown_outcome=False) as publishes:
        publishes.nsqd.commands[0][0].shutdown(socket.SHUT_RDWR)
        errors = (await publishes.ends()).values()
        assert all(isinstance(error, PublishFailed) and error.possibly_stored for error in errors)
        assert all(isinstance(error.__cause__, ConnectionLost) for error in errors)
        assert all("may have been stored" in str(error) for error in errors)
        assert len({id(error) for error in errors}) == CALLERS
        assert publishes.stats("unknown", "held") == (CALLERS, 0)


async def test_each_is_sent_again_when_the_connection_is_lost(face: Face) -> None:
    async with joined(face, BODIES) as publishes:
        publishes.nsqd.react = lambda sock, _: sock.sendall(OK)
        publishes.nsqd.commands[0][0].shutdown(socket.SHUT_RDWR)
        assert await publishes.ends() == dict.fromkeys(BODIES, b"OK")
        assert sorted(body for bodies in publishes.nsqd.bodies[1:] for body in bodies) == BODIES


async def test_an_nsqd_that_closes_connection_after_connection_costs_no_publish(face: Face) -> None:
    """As one that is told to end: it closes all it has, and others are tried before it is gone."""
    async with joined(face, [b"once"], retry_base_delay=0.01) as publishes:

        def end(sock: socket.socket, _: list[bytes]) -> None:
            if len(publishes.nsqd.commands) < 7:
                sock.shutdown(socket.SHUT_RDWR)
            else:
                sock.sendall(OK)

        publishes.nsqd.react = end
        publishes.nsqd.commands[0][0].shutdown(socket.SHUT_RDWR)
        assert await publishes.ends() == {b"once": b"OK"}
        assert publishes.nsqd.bodies == [[b"once"]] * 7


@pytest.mark.parametrize("reply", [OK, error_frame(b"E_MPUB_FAILED no space")], ids=["OK", "failed"])
async def test_each_times_out_and_the_late_reply_gives_their_room_back(face: Face, reply: bytes) -> None:
    async with joined(face, BODIES, publish_timeout=1.0) as publishes:
        errors = (await publishes.ends()).values()
        assert all(isinstance(error, PublishTimeout) and error.possibly_stored for error in errors)
        assert all(isinstance(error, TimeoutError) for error in errors)
        assert len({id(error) for error in errors}) == CALLERS
        assert publishes.stats("unknown", "held") == (CALLERS, CALLERS)
        publishes.nsqd.reply(-1, reply)  # it was sent once more: a new connection to a server that is silent may work
        await face.until(lambda: publishes.stats("held") == (0,))
        publishes.nsqd.react = lambda sock, _: sock.sendall(OK)
        assert await face(publishes.producer.multipublish("t", [b"later"], timeout=WAIT)) == b"OK", "it disturbs nobody"


async def test_each_hears_that_the_producer_was_closed(face: Face) -> None:
    async with joined(face, BODIES) as publishes:
        await face(publishes.producer.close(0.01))
        errors = list((await publishes.ends()).values())
        assert all(isinstance(error, PublishFailed) and error.possibly_stored for error in errors)
        assert "the producer was closed" in str(errors[0])


async def test_a_server_that_does_not_reply_keeps_no_publish_back(face: Face) -> None:
    with PublishNsqd() as nsqd:
        async with face.client("Producer", nsqd.address) as producer:
            joined = Joined(face, nsqd, producer)
            for number in range(1, 21):  # each when all before it are there
                await joined.begin(b"%d" % number)
                await face.until(lambda number=number: sum(map(len, nsqd.bodies)) == number)  # type: ignore[misc]
            for number in range(len(nsqd.commands)):
                nsqd.reply(number)
            assert set((await joined.ends()).values()) == {b"OK"}


async def test_none_is_lost_while_the_leaders_of_partitions_move(
    face: Face, cluster: RedesignedCluster, lookups: dict[str, Any]
) -> None:
    bodies = [[b"%d-%d" % (number, each) for each in range(25)] for number in range(12)]
    ends: dict[bytes, Any] = {}
    await face.do(lambda: cluster.create_topic("t", 3, 2, ordered=True, channels=["c"]))
    async with face.client("Producer", lookupd_refresh_interval=0.05, **lookups) as producer:

        async def publish(number: int) -> None:
            for body in bodies[number]:
                ends[body] = await face(producer.publish("t", body))

        jobs = [await face.begin(lambda number=number: publish(number)) for number in range(12)]  # type: ignore[misc]
        for number in range(3):
            await face.until(lambda number=number: len(ends) > 60 * number)  # type: ignore[misc]
            await face.do(lambda number=number: cluster.move_leader("t", number))  # type: ignore[misc]
        for join in jobs:
            await join()
    records = [each for number in range(3) for each in cluster.partition("t", number).log.read(0, 1_000_000)]
    assert ends == {body: b"OK" for several in bodies for body in several}
    assert {record.body for record in records} == set(ends)


@pytest.mark.parametrize("seed", range(3))
async def test_each_publish_has_one_end_and_that_is_true(face: Face, seed: int) -> None:
    chance = random.Random(seed)

    def misbehave(sock: socket.socket, bodies: list[bytes]) -> None:
        luck = chance.random()
        if luck < 0.02:
            sock.close()  # stored, and nobody is told
            raise OSError
        if luck < 0.04:
            nsqd.commands.remove((sock, bodies))  # it is lost with the connection
            sock.close()
            raise OSError
        if luck < 0.1:
            threading.Event().wait(0.005)  # meanwhile others are published
        for part in (OK[:5], OK[5:]) if luck < 0.2 else (OK,):
            sock.sendall(part)

    ends: dict[bytes, list[object]] = {}

    async def publishes(producer: Any, number: int) -> None:
        own = random.Random(seed * 100 + number)
        for each in range(60):
            bodies = [b"%d-%d-%d " % (number, each, part) + own.choice((1, 200, 5000)) * b"x" for part in range(2)]
            way = own.random()
            outcome: Any = b"OK"
            try:
                if way < 0.2:
                    promise = producer.publish_nowait("t", bodies.pop())
                    await face.sleep(0)
                    outcome = await face.result(promise)
                elif way < 0.4:
                    outcome = await face(producer.multipublish("t", bodies))
                else:
                    outcome = await face(producer.publish("t", bodies.pop(), block=own.random() < 0.9))
            except (PublishFailed, NotRunning) as error:
                outcome = error
            for body in bodies if way >= 0.2 and way < 0.4 else [b"%d-%d-1" % (number, each)]:
                ends.setdefault(body.partition(b" ")[0], []).append(outcome)

    with PublishNsqd(misbehave) as nsqd:
        options = {"retry_unknown_outcome": False, "publish_timeout": WAIT, "max_pending": 12}
        producer = face.package.Producer(nsqd.address, max_backoff_duration=0.01, retry_max_delay=0.01, **options)
        await face(producer.start())
        jobs = [await face.begin(lambda number=number: publishes(producer, number)) for number in range(12)]  # type: ignore[misc]
        await face.until(lambda: len(ends) > 500)
        await face(producer.close())  # while some still publish
        for join in jobs:
            await join()
        kept = Counter(body.partition(b" ")[0] for bodies in nsqd.bodies for body in bodies)
    assert set(kept) <= set(ends)
    assert all(len(outcomes) == 1 for outcomes in ends.values())
    for body, (outcome,) in ends.items():
        if outcome == b"OK":
            assert kept[body] == 1, body
        elif isinstance(outcome, PublishFailed) and outcome.possibly_stored:
            assert kept[body] <= 1, body
        else:
            assert kept[body] == 0, (body, outcome)
