"""What clients promise, on each loop and beside each family of servers: one source, so one suite.

What does not depend on the servers stands in tests/contract.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.contract import FACES, Face
from support.servers import find_server
from support.waiting import WAIT

from nsq_fast import Message, RequeueMessage, threads
from nsq_fast.broker import BrokerProcess, ClusterProcess
from nsq_fast.client.give_up import PublishTo
from nsq_fast.errors import BodyInvalid, ConfigError, NameInvalid, NotRunning

COUNT = 50
BODIES = {b"%d" % number for number in range(COUNT)}
QUICK: dict[str, Any] = {"max_in_flight": 20, "max_backoff_duration": 0, "requeue_base_delay": 0.01}


class Place(NamedTuple):
    """Servers, as arguments of clients; and what creates a topic there, with so many partitions and the channel c."""

    servers: dict[str, Any]
    create: Callable[..., object]
    takes_keys: bool = True
    """Its lookup says how many partitions there are, or there are none."""

    def publish(self, topic: str, bodies: Any) -> None:
        with threads.Producer(**self.servers) as producer:
            producer.multipublish(topic, sorted(bodies))


@pytest.fixture(params=["original", "original real", "redesigned", "redesigned real"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Servers of each family, embedded and real, in processes of their own."""
    if request.param == "original":
        with BrokerProcess(lookupd=False, data_path=tmp_path) as broker:
            yield Place({"nsqd_tcp_addresses": str(broker.nsqd.tcp)}, lambda *_: None)
    elif request.param == "original real":
        yield Place({"nsqd_tcp_addresses": str(request.getfixturevalue("real_nsqd")().tcp_address)}, lambda *_: None)
    elif request.param == "redesigned":
        with ClusterProcess(nodes=2, lookupds=1) as cluster:
            servers = {"lookupd_http_addresses": str(cluster.lookupds[0].http), "lookupd_poll_interval": 1.0}
            yield Place(servers, lambda topic, number=1: cluster.create_topic(topic, number, 1, channels=("c",)))
    else:
        if find_server("nsqd", "redesigned") is None:
            pytest.skip("no real redesigned nsqd")
        standalone = request.getfixturevalue("standalone_nsqd")
        servers = {"lookupd_http_addresses": str(standalone.lookupd_address), "lookupd_poll_interval": 1.0}
        yield Place(servers, lambda topic, _=1: standalone.create_topic(topic, "c"), takes_keys=False)


@pytest.fixture
def empty(place: Place) -> Place:
    """There is a topic t."""
    place.create("t")
    return place


@pytest.fixture
def filled(empty: Place) -> Place:
    """The topic t has messages."""
    empty.publish("t", BODIES)
    return empty


@pytest.fixture(params=FACES, ids=lambda face: str(face.name))
def face(request: pytest.FixtureRequest) -> Face:
    found: Face = request.param
    return found


async def consumed(face: Face, place: Place, count: int, topic: str = "t") -> list[Message]:
    """So many messages; there are no others."""
    found: list[Message] = []

    async def handle(consumer: Any, message: Message) -> None:
        found.append(message)

    async with face.client("Consumer", topic, "c", message_handler=handle, **QUICK, **place.servers) as consumer:
        await face.until(lambda: consumer.stats().totals.finished >= count)
    assert len(found) == count
    return found


# Publishing


def test_what_many_publish_is_stored_once_each_and_in_the_order_of_its_key(face: Face, place: Place) -> None:
    place.create("t", 2)
    wanted = [b"%c %d" % (key, number) for key in b"abcd" for number in range(25)]

    async def main() -> None:
        async with face.client("Producer", max_body_size=200, **place.servers) as producer:

            async def publish(key: str) -> list[Any]:
                bodies = [body for body in wanted if body.startswith(key.encode())]
                keyed = {"key": key} if place.takes_keys else {}
                return [await face(producer.publish("t", body, **keyed)) for body in bodies]

            jobs = [await face.begin(lambda key=key: publish(key)) for key in "abcd"]  # type: ignore[misc]
            assert [await join() for join in jobs] == 4 * [25 * [b"OK"]]
            assert await face.result(producer.publish_nowait("t", memoryview(b"nowait"))) == b"OK"
            cut = [b"cut %03d" % number for number in range(100)]
            assert await face(producer.multipublish("t", cut)) == b"OK"
        messages = await consumed(face, place, 201)
        assert Counter(message.body for message in messages) == Counter([*wanted, b"nowait", *cut])
        if place.takes_keys and messages[0].partition is not None:
            stored = [message.body for message in sorted(messages, key=lambda each: each.internal_id)]
            assert sorted((body for body in stored if body in wanted), key=lambda body: body[0]) == wanted

    face.run(main())


def test_a_wrong_argument_is_refused_and_harms_nobody_beside_it(face: Face, empty: Place) -> None:
    wrong: list[tuple[str, tuple[Any, ...], dict[str, Any], type[Exception]]] = [
        ("publish", ("bad topic", b"x"), {}, NameInvalid),
        ("publish", ("t", "text"), {}, TypeError),
        ("publish", ("t", b"x", -1), {}, ConfigError),
        ("publish_nowait", ("bad topic", b"x"), {}, NameInvalid),
        ("publish_nowait", ("t", b""), {}, BodyInvalid),
        ("publish", ("t", bytes(101)), {}, BodyInvalid),
        ("publish", ("t", b"x"), {"timeout": 0}, ConfigError),
        ("publish", ("t", b"x"), {"key": "k", "partition": 1}, ConfigError),
        ("publish", ("t", b"x"), {"trace_id": 2**64}, ConfigError),
        ("multipublish", ("t", []), {}, BodyInvalid),
        ("multipublish", ("t", [b"x", b""]), {}, BodyInvalid),
    ]

    async def main() -> None:
        async with face.client("Producer", max_msg_size=100, **empty.servers) as producer:

            async def publish() -> list[Any]:
                return [await face(producer.publish("t", b"%d" % number)) for number in range(20)]

            beside = await face.begin(publish)
            for name, arguments, options, error in wrong:
                with pytest.raises(error):
                    await face(getattr(producer, name)(*arguments, **options))
            assert await beside() == [b"OK"] * 20
            stats = producer.stats()
            assert (stats["held"], stats["pending"], stats["stored"]) == (0, 0, 20)
        await consumed(face, empty, 20)

    face.run(main())


def test_closing_waits_for_what_is_pending(face: Face, empty: Place) -> None:
    async def main() -> None:
        async with face.client("Producer", linger=0.2, **empty.servers) as producer:
            assert await face(producer.publish("t", b"first")) == b"OK"
            promises = [producer.publish_nowait("t", body) for body in (b"second", b"third")]
        assert [await face.result(promise) for promise in promises] == [b"OK"] * 2
        with pytest.raises(NotRunning, match="closed"):
            await face(producer.publish("t", b"late"))
        await consumed(face, empty, 3)

    face.run(main())


# Consuming


def test_what_fails_comes_again_and_nothing_else(face: Face, filled: Place) -> None:
    attempts: Counter[bytes] = Counter()

    async def handle(consumer: Any, message: Message) -> None:
        attempts[message.body] += 1
        if message.attempts == 1 and int(message.body) % 3 == 0:
            raise RequeueMessage(0, backoff=False) if int(message.body) % 2 else ValueError("bad luck")

    async def main() -> None:
        options = {**QUICK, **filled.servers, "concurrency": 4}
        async with face.client("Consumer", "t", "c", message_handler=handle, **options) as consumer:
            await face.until(lambda: consumer.stats().totals.finished == COUNT)

    face.run(main())
    assert attempts == {body: 2 if int(body) % 3 == 0 else 1 for body in BODIES}


def test_a_message_that_fails_once_too_often_is_a_dead_letter(face: Face, filled: Place) -> None:
    filled.create("dead")

    async def handle(consumer: Any, message: Message) -> None:
        if message.body == b"7":
            raise ValueError("never works")

    async def main() -> None:
        options = {**QUICK, **filled.servers, "max_tries": 2, "requeue_delay": 0, "give_up": PublishTo("dead")}
        async with face.client("Consumer", "t", "c", message_handler=handle, **options) as consumer:
            await face.until(lambda: consumer.stats().totals.finished == COUNT)
            assert consumer.stats().given_up == 1
        assert [message.body for message in await consumed(face, filled, 1, "dead")] == [b"7"]

    face.run(main())


def test_batches_are_answered_whole_but_for_what_they_answer_themselves(face: Face, filled: Place) -> None:
    handled: Counter[bytes] = Counter()

    async def handle(consumer: Any, messages: list[Message]) -> None:
        handled.update(message.body for message in messages)
        for message in messages:
            if message.body == b"5" and message.attempts == 1:
                message.requeue(0, False)

    async def main() -> None:
        options = {**QUICK, **filled.servers, "batch_size": 8}
        async with face.client("Consumer", "t", "c", batch_handler=handle, **options) as consumer:
            await face.until(lambda: consumer.stats().totals.finished == COUNT)

    face.run(main())
    assert handled == {body: 2 if body == b"5" else 1 for body in BODIES}


CHANGES: dict[str, Callable[[list[Any]], object]] = {
    "append_None": lambda messages: messages.append(None),
    "an_item_is_None": lambda messages: messages.__setitem__(0, None),
    "pop": lambda messages: messages.pop(),
    "clear": lambda messages: messages.clear(),
    "bodies": lambda messages: messages.__setitem__(slice(None), [message.body for message in messages]),
    "other_objects": lambda messages: messages.__setitem__(slice(None), [object(), 1, "text"]),
    "twice": lambda messages: messages.extend(messages[:]),
}


@pytest.mark.parametrize("options", [{}, {"handler_threads": 2}], ids=["", "handler threads"])
def test_what_was_handed_over_is_answered_whatever_a_batch_handler_does_to_its_list(
    face: Face, options: dict[str, Any], nsqd_process: Any
) -> None:
    """Finished, or requeued where it also raises. It ended the interpreter, or left messages unanswered."""
    if options and face.name != "gevent":
        pytest.skip("of gevent alone")
    place = Place({"nsqd_tcp_addresses": nsqd_process.address}, lambda *_: None)
    bodies = {b"%d" % number for number in range(5)}
    seen: Counter[tuple[str | None, bytes, int]] = Counter()
    for topic in CHANGES:
        place.publish(topic, bodies)

    async def handle(consumer: Any, messages: list[Message]) -> None:
        name, first = messages[0].topic, [message for message in messages if message.attempts == 1]
        seen.update((message.topic, message.body, message.attempts) for message in messages)
        CHANGES[name or ""](messages)
        if name == "clear" and first:
            raise ValueError("no")

    async def main() -> None:
        given = {**QUICK, **place.servers, **options, "requeue_delay": 0}
        async with face.client("Consumer", list(CHANGES), "c", batch_handler=handle, **given) as consumer:
            await face.until(lambda: consumer.stats().totals.finished == len(CHANGES) * len(bodies))

    face.run(main())
    assert {(topic, body) for topic, body, _ in seen} == {(topic, body) for topic in CHANGES for body in bodies}
    assert {topic for topic, _, attempts in seen if attempts > 1} == {"clear"}
    assert set(seen.values()) == {1}


def test_what_is_answered_later_is_in_flight_until_then(face: Face, filled: Place) -> None:
    held: list[Message] = []

    async def handle(consumer: Any, message: Message) -> None:
        message.enable_async()
        message.touch()
        held.append(message)

    async def main() -> None:
        options = {**QUICK, **filled.servers, "max_in_flight": 10}
        async with face.client("Consumer", "t", "c", message_handler=handle, **options) as consumer:
            for number in range(COUNT // 10):
                await face.until(lambda: len(held) == 10)
                assert consumer.total_in_flight == 10
                assert consumer.stats().totals.touched == 10 * (number + 1)
                answered, held[:] = held[:], []
                for message in answered:
                    message.finish()
            await face.until(lambda: consumer.stats().totals.finished == COUNT)

    face.run(main())


def test_close_lets_handlers_end_and_gives_the_rest_back(face: Face, filled: Place) -> None:
    handled: set[bytes] = set()

    async def handle(consumer: Any, message: Message) -> None:
        handled.add(message.body)
        if len(handled) == 5:
            await face(consumer.close())  # in a handler it begins to close, and returns

    async def main() -> None:
        async with face.client("Consumer", "t", "c", message_handler=handle, **QUICK, **filled.servers) as consumer:
            assert await face(consumer.join(WAIT))
        totals = consumer.stats().totals
        assert totals.finished == len(handled)
        assert totals.finished + totals.requeued == totals.received
        rest = {message.body for message in await consumed(face, filled, COUNT - len(handled))}
        assert handled | rest == BODIES

    face.run(main())


def test_iterating_finishes_each_but_the_one_it_is_left_at(face: Face, filled: Place) -> None:
    async def main() -> None:
        taken: list[Message] = []
        async with face.client("Consumer", "t", "c", **QUICK, **filled.servers) as consumer:
            async with aclosing(face.messages(consumer)) as messages:
                async for message in messages:
                    taken.append(message)
                    if len(taken) > 10:
                        break
            await face.until(lambda: consumer.stats().totals.finished == 10 and consumer.stats().totals.requeued)
        rest = {message.body: message.attempts for message in await consumed(face, filled, COUNT - 10)}
        assert rest[taken[-1].body] >= 2

    face.run(main())


def test_a_pause_holds_messages_back_until_it_ends(face: Face, empty: Place) -> None:
    handled: set[bytes] = set()

    async def handle(consumer: Any, message: Message) -> None:
        handled.add(message.body)

    async def main() -> None:
        async with face.client("Consumer", "t", "c", message_handler=handle, **QUICK, **empty.servers) as consumer:
            await face.until(lambda: consumer.total_ready_count > 0)
            consumer.pause()
            await face.until(lambda: consumer.total_ready_count == 0)
            await face.do(lambda: empty.publish("t", BODIES))
            consumer.max_in_flight = 7
            assert not handled
            consumer.resume()
            await face.until(lambda: handled == BODIES)
            assert consumer.max_in_flight == 7

    face.run(main())
