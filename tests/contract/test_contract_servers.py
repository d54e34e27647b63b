"""What clients promise, on each loop and beside each family of servers: one source, so one suite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import aclosing
from typing import Any

import pytest
from support.contract import BODIES, WRONG_TIMES, Face, Place, Topic
from support.waiting import WAIT

from nsq_fast import Message, aio, threads
from nsq_fast.client.give_up import PublishTo
from nsq_fast.errors import BodyInvalid, ConfigError, NameInvalid, NotRunning, TypeInvalid

COUNT = len(BODIES)
QUICK: dict[str, Any] = {"max_in_flight": 20, "max_backoff_duration": 0, "requeue_base_delay": 0.01}


# Publishing


async def test_what_many_publish_is_stored_once_each_and_in_the_order_of_its_key(face: Face, place: Place) -> None:
    topic = await face.do(lambda: Topic(place, partitions=2))
    wanted = [b"%c %d" % (key, number) for key in b"abcd" for number in range(25)]
    async with face.client("Producer", max_body_size=200, **topic.servers) as producer:

        async def publish(key: str) -> list[Any]:
            bodies = [body for body in wanted if body.startswith(key.encode())]
            keyed = {"key": key} if place.takes_keys else {}
            return [await face(producer.publish(topic.name, body, **keyed)) for body in bodies]

        jobs = [await face.begin(lambda key=key: publish(key)) for key in "abcd"]  # type: ignore[misc]
        assert [await join() for join in jobs] == 4 * [25 * [b"OK"]]
        assert await face.result(producer.publish_nowait(topic.name, memoryview(b"nowait"))) == b"OK"
        cut = [b"cut %03d" % number for number in range(100)]
        assert await face(producer.multipublish(topic.name, cut)) == b"OK"
        kinds = [b"bytes", bytearray(b"array"), memoryview(b"view")]
        assert await face(producer.multipublish(topic.name, (each for each in kinds))) == b"OK"
        late = {} if face.package is aio else {"raise_error": False}  # a coroutine is a promise already
        for promise in (
            producer.publish(topic.name, bytearray(b"one"), **late),
            producer.multipublish(topic.name, [b"two"], **late),
        ):
            assert await (face.result if late else face)(promise) == b"OK"
        assert producer.is_running
        assert producer.is_connected
    assert not producer.is_running
    assert await face(producer.join(WAIT))
    messages = await topic.consumed(face, 206)
    several = [*wanted, b"nowait", *cut, *map(bytes, kinds), b"one", b"two"]
    assert Counter(message.body for message in messages) == Counter(several)
    if place.takes_keys and messages[0].partition is not None:
        stored = [message.body for message in sorted(messages, key=lambda each: each.internal_id)]
        assert sorted((body for body in stored if body in wanted), key=lambda body: body[0]) == wanted


NAN = float("nan")
WRONG: list[tuple[str, type[Exception], list[Any]]] = [
    ("topic", NameInvalid, [None, 5, b"t", ["t"], "", "a b", "t" * 65]),
    ("body", TypeInvalid, [None, 5, 1.5, "text", ["x"], {}, object(), True]),
    ("body", BodyInvalid, [b"", memoryview(b""), bytes(101), bytearray(101)]),
    ("bodies", TypeInvalid, [None, 5, "text", b"bytes", object(), [b"x", None], [5], ["text"], [{}], [object()]]),
    ("bodies", BodyInvalid, [[], (each for each in [b""]), [b"x", bytes(101)]]),
    ("defer", ConfigError, [2**63, 2**64, 10**400, -1, 1.5, NAN, "1", True, []]),
    ("timeout", ConfigError, [0, *WRONG_TIMES]),
    ("partition", ConfigError, [-1, 2**63, 10**400, 1.5, NAN, "1", True]),
    ("key", ConfigError, [1.5, NAN, [], object(), "\udc80"]),
    ("key", TypeError, [5]),
    ("trace_id", ConfigError, [-1, 2**64, 10**400, 1.5, NAN, "1", True]),
    ("headers", ConfigError, [1, "a", [1], {1: "a"}, {"bad": object()}]),
    ("tag", ConfigError, [1, 1.5, b"a", [], ""]),
]


class Unstartable:
    def __iter__(self) -> Iterator[bytes]:
        raise AssertionError("asked for messages although another argument is wrong")


def wrong_publishes(topic: str) -> Iterator[tuple[str, str, type[Exception], dict[str, Any]]]:
    """The method, the argument that is wrong, its error, and all arguments."""
    for name, error, values in WRONG:
        for method in ("publish", "publish_nowait", "multipublish"):
            content = "bodies" if method == "multipublish" else "body"
            if (name in ("body", "bodies") and name != content) or (name == "defer" and content == "bodies"):
                continue
            several = Unstartable() if name == "topic" else [b"one"]
            right = {"topic": topic, content: b"one" if content == "body" else several}
            yield from ((method, name, error, {**right, name: value}) for value in values)


async def test_a_wrong_argument_is_refused_and_harms_nobody_beside_it(face: Face, place: Place) -> None:
    """By its name, where it is given, before it takes any room."""
    topic = await face.do(lambda: Topic(place))
    async with face.client("Producer", max_msg_size=100, **topic.servers) as producer:

        async def publish() -> list[Any]:
            return [await face(producer.publish(topic.name, b"%d" % number)) for number in range(20)]

        async def call(method: Any, **arguments: Any) -> None:
            result = method(**arguments)  # one that does not wait raises here, not in its promise
            if method != producer.publish_nowait:
                await face(result)

        beside = await face.begin(publish)
        for method, name, error, arguments in wrong_publishes(topic.name):
            with pytest.raises(error, match=name):
                await call(getattr(producer, method), **arguments)
        with pytest.raises(ConfigError):
            await face(producer.publish(topic.name, b"x", key="k", partition=1))
        assert await beside() == [b"OK"] * 20
        stats = producer.stats()
        assert (stats["held"], stats["pending"], stats["stored"]) == (0, 0, 20)
    await topic.consumed(face, 20)


async def test_closing_waits_for_what_is_pending(face: Face, place: Place) -> None:
    topic = await face.do(lambda: Topic(place))
    async with face.client("Producer", linger=0.2, **topic.servers) as producer:
        assert await face(producer.publish(topic.name, b"first")) == b"OK"
        promises = [producer.publish_nowait(topic.name, body) for body in (b"second", b"third")]
    assert [await face.result(promise) for promise in promises] == [b"OK"] * 2
    with pytest.raises(NotRunning, match="closed"):
        await face(producer.publish(topic.name, b"late"))
    await topic.consumed(face, 3)


# Consuming


@pytest.mark.parametrize("way", ["one by one", "iterated", "batches"])
async def test_a_message_that_fails_once_too_often_is_a_dead_letter(face: Face, topic: Topic, way: str) -> None:
    dead = await face.do(lambda: Topic(topic.place))
    attempts: list[int] = []

    async def handle(consumer: Any, message: Message) -> None:
        if message.body == b"7":
            attempts.append(message.attempts)
            if way != "iterated":
                raise ValueError("never works")
            message.requeue(0, False)

    options = {**QUICK, "max_tries": 2, "requeue_delay": 0, "give_up": PublishTo(dead.name)}
    options |= {"batch_size": 1} if way == "batches" else {}
    async with topic.consuming(face, way, handle, **options) as consumer:
        await face.until(lambda: consumer.stats().totals.finished == COUNT)
        assert consumer.stats().given_up == 1
    assert attempts == [1, 2]
    assert [message.body for message in await dead.consumed(face, 1)] == [b"7"]


async def test_batches_are_answered_whole_but_for_what_they_answer_themselves(face: Face, topic: Topic) -> None:
    handled: Counter[bytes] = Counter()
    later: list[Message] = []

    async def handle(consumer: Any, messages: list[Message]) -> None:
        assert len(messages) <= 8
        handled.update(message.body for message in messages)
        for message in messages:
            if message.body == b"5" and message.attempts == 1:
                message.requeue(0, False)
            elif message.body == b"6":
                message.finish()
            elif message.body == b"7":
                message.enable_async()
                later.append(message)

    options = {**QUICK, "batch_size": 8}
    async with topic.consumer(face, batch_handler=handle, **options) as consumer:
        await face.until(lambda: consumer.stats().totals.finished == COUNT - 1)
        await face(later.pop().finish())
        await face.until(lambda: consumer.stats().totals.finished == COUNT)
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
async def test_what_was_handed_over_is_answered_whatever_a_batch_handler_does_to_its_list(
    face: Face, options: dict[str, Any], nsqd_process: Any
) -> None:
    """Finished, or requeued where it also raises. It ended the interpreter, or left messages unanswered."""
    if options and face.name != "gevent":
        pytest.skip("of gevent alone")
    servers = {"nsqd_tcp_addresses": nsqd_process.address}
    bodies = {b"%d" % number for number in range(5)}
    seen: Counter[tuple[str | None, bytes, int]] = Counter()
    with threads.Producer(**servers) as producer:
        for topic in CHANGES:
            producer.multipublish(topic, sorted(bodies))

    async def handle(consumer: Any, messages: list[Message]) -> None:
        name, first = messages[0].topic, [message for message in messages if message.attempts == 1]
        seen.update((message.topic, message.body, message.attempts) for message in messages)
        CHANGES[name or ""](messages)
        if name == "clear" and first:
            raise ValueError("no")

    given = {**QUICK, **servers, **options, "requeue_delay": 0}
    async with face.client("Consumer", list(CHANGES), "c", batch_handler=handle, **given) as consumer:
        await face.until(lambda: consumer.stats().totals.finished == len(CHANGES) * len(bodies))
    assert {(topic, body) for topic, body, _ in seen} == {(topic, body) for topic in CHANGES for body in bodies}
    assert {topic for topic, _, attempts in seen if attempts > 1} == {"clear"}
    assert set(seen.values()) == {1}


async def test_what_is_answered_later_is_in_flight_until_then(face: Face, topic: Topic) -> None:
    held: list[Message] = []

    async def handle(consumer: Any, message: Message) -> None:
        message.enable_async()
        message.touch()
        held.append(message)

    options = {**QUICK, "max_in_flight": 10}
    async with topic.consumer(face, message_handler=handle, **options) as consumer:
        for number in range(COUNT // 10):
            await face.until(lambda: len(held) == 10)
            assert consumer.total_in_flight == 10
            assert consumer.stats().totals.touched == 10 * (number + 1)
            answered, held[:] = held[:], []
            for message in answered:
                message.finish()
        await face.until(lambda: consumer.stats().totals.finished == COUNT)


async def test_close_lets_handlers_end_and_gives_the_rest_back(face: Face, topic: Topic) -> None:
    handled: set[bytes] = set()

    async def handle(consumer: Any, message: Message) -> None:
        handled.add(message.body)
        if len(handled) == 5:
            await face(consumer.close())  # in a handler it begins to close, and returns

    async with topic.consumer(face, message_handler=handle, **QUICK) as consumer:
        assert await face(consumer.join(WAIT))
    totals = consumer.stats().totals
    assert totals.finished == len(handled)
    # a handler in a thread only begins to close: until the hub's thread hears of it, others begin
    assert len(handled) == 5 or face.name == "threads"
    assert totals.finished + totals.requeued == totals.received
    rest = {message.body for message in await topic.consumed(face, COUNT - len(handled))}
    assert handled | rest == BODIES


async def test_iterating_finishes_each_but_the_one_it_is_left_at(face: Face, topic: Topic) -> None:
    taken: list[Message] = []
    async with topic.consumer(face, **QUICK) as consumer:
        async with aclosing(face.messages(consumer)) as messages:
            async for message in messages:
                taken.append(message)
                if len(taken) > 10:
                    break
        await face.until(lambda: consumer.stats().totals.finished == 10 and consumer.stats().totals.requeued)
    rest = {message.body: message.attempts for message in await topic.consumed(face, COUNT - 10)}
    assert rest[taken[-1].body] >= 2


async def test_a_pause_holds_messages_back_until_it_ends(face: Face, place: Place) -> None:
    topic = await face.do(lambda: Topic(place))
    handled: set[bytes] = set()

    async def handle(consumer: Any, message: Message) -> None:
        handled.add(message.body)

    async with topic.consumer(face, message_handler=handle, **QUICK) as consumer:
        await face.until(lambda: consumer.total_ready_count > 0)
        consumer.pause()
        await face.until(lambda: consumer.total_ready_count == 0)
        await face.do(lambda: topic.publish(BODIES))
        consumer.max_in_flight = 7
        assert not handled
        consumer.resume()
        await face.until(lambda: handled == BODIES)
        assert consumer.max_in_flight == 7
