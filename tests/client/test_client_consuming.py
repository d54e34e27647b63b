"""What a consumer promises, on each loop and beside each family of servers: one source, so one suite."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.loops import LOOPS
from support.servers import find_server
from support.waiting import WAIT, until

import nsq_fast
from nsq_fast import Message, RequeueMessage, aio, threads
from nsq_fast.broker import ClusterProcess
from nsq_fast.client.give_up import PublishTo
from nsq_fast.errors import ConfigError, NotRunning

COUNT = 50
BODIES = {b"%d" % number for number in range(COUNT)}
CHANNEL = "c"
QUICK: dict[str, Any] = {"max_in_flight": 20, "max_backoff_duration": 0, "requeue_base_delay": 0.01}


class Place(NamedTuple):
    """Servers, as arguments of clients; and what creates a topic there."""

    servers: dict[str, Any]
    create: Callable[[str], object]

    def publish(self, topic: str, bodies: Any) -> None:
        with threads.Producer(**self.servers) as producer:
            producer.multipublish(topic, sorted(bodies))


@pytest.fixture(params=["original", "original real", "redesigned", "redesigned real"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Servers of each family, embedded and real."""
    if request.param == "original":
        with nsq_fast.broker.BrokerProcess(lookupd=False, data_path=tmp_path) as broker:
            yield Place({"nsqd_tcp_addresses": str(broker.nsqd.tcp)}, lambda topic: None)
    elif request.param == "original real":
        yield Place({"nsqd_tcp_addresses": str(request.getfixturevalue("real_nsqd")().tcp_address)}, lambda topic: None)
    elif request.param == "redesigned":
        with ClusterProcess(nodes=1, lookupds=1) as cluster:
            servers = {"lookupd_http_addresses": str(cluster.lookupds[0].http), "lookupd_poll_interval": 1.0}
            yield Place(servers, lambda topic: cluster.create_topic(topic, 1, 1, channels=(CHANNEL,)))
    else:
        if find_server("nsqd", "redesigned") is None:
            pytest.skip("no real redesigned nsqd")
        standalone = request.getfixturevalue("standalone_nsqd")
        servers = {"lookupd_http_addresses": str(standalone.lookupd_address), "lookupd_poll_interval": 1.0}
        yield Place(servers, lambda topic: standalone.create_topic(topic, CHANNEL))


@pytest.fixture
def filled(place: Place) -> Place:
    """The topic t has messages."""
    place.create("t")
    place.publish("t", BODIES)
    return place


class Gevent:
    """``nsq_fast.Consumer``."""

    consumer: Any = nsq_fast.Consumer

    @contextmanager
    def consuming(self, topic: Any, channel: str, **options: Any) -> Iterator[Any]:
        """A consumer that runs. Handlers are plain functions."""
        with self.consumer(topic, channel, **options) as consumer:
            yield consumer

    def close(self, consumer: Any) -> None:
        """Close it, from outside of handlers."""
        consumer.close()

    def take(self, topic: str, channel: str, count: int, **options: Any) -> list[tuple[bytes, int]]:
        """Iterate, and leave at the message that follows ``count`` others."""
        taken: list[tuple[bytes, int]] = []
        with self.consumer(topic, channel, **options) as consumer:
            for message in consumer:
                taken.append((message.body, message.attempts))
                if len(taken) > count:
                    break
            until(lambda: consumer.stats().totals.finished == count and consumer.stats().totals.requeued)
        return taken


class Threads(Gevent):
    """``nsq_fast.threads.Consumer``."""

    consumer: Any = threads.Consumer


class Asyncio:
    """``nsq_fast.aio.Consumer``, in a loop of its own, in a thread of its own."""

    def __init__(self, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
        self._new_loop = new_loop

    @contextmanager
    def _running(self) -> Iterator[None]:
        self._loop = self._new_loop()
        thread = threading.Thread(target=self._loop.run_forever)
        thread.start()
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join(WAIT)
            self._loop.close()

    def _call(self, coroutine: Any) -> Any:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        until(future.done)
        return future.result()

    @contextmanager
    def consuming(self, topic: Any, channel: str, **options: Any) -> Iterator[Any]:
        for name in ("message_handler", "batch_handler"):
            if name in options:
                options[name] = _later(options[name])
        consumer = aio.Consumer(topic, channel, **options)
        with self._running():
            self._call(consumer.start())
            try:
                yield consumer
            finally:
                self._call(consumer.close())

    def close(self, consumer: Any) -> None:
        self._call(consumer.close())

    def take(self, topic: str, channel: str, count: int, **options: Any) -> list[tuple[bytes, int]]:
        taken: list[tuple[bytes, int]] = []

        async def take() -> None:
            async with aio.Consumer(topic, channel, **options) as consumer:
                async for message in consumer:
                    taken.append((message.body, message.attempts))
                    if len(taken) > count:
                        break
                while consumer.stats().totals.finished < count or not consumer.stats().totals.requeued:
                    await asyncio.sleep(0.005)  # sleep: looks again and again

        with self._running():
            self._call(take())
        return taken


def _later(handle: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A handler for asyncio, which waits once before every second call."""
    calls = 0

    async def handle_later(consumer: Any, item: Any) -> None:
        nonlocal calls
        calls += 1
        if calls % 2:
            await asyncio.sleep(0)
        result = handle(consumer, item)
        if asyncio.iscoroutine(result):
            await result

    return handle_later


@pytest.fixture(params=["gevent", "threads", *LOOPS])
def face(request: pytest.FixtureRequest) -> Any:
    """The client on each loop."""
    if request.param == "gevent":
        return Gevent()
    return Threads() if request.param == "threads" else Asyncio(request.param)


def test_every_message_is_handled_once_and_finished(face: Any, filled: Place) -> None:
    handled: Counter[bytes] = Counter()
    options = {**QUICK, **filled.servers, "concurrency": 4}
    handle = lambda consumer, message: handled.update([message.body])  # noqa: E731
    with face.consuming("t", CHANNEL, message_handler=handle, **options) as consumer:
        until(lambda: consumer.stats().totals.finished == COUNT)
    assert handled == Counter(BODIES)


def test_what_fails_comes_again_and_nothing_else(face: Any, filled: Place) -> None:
    attempts: Counter[bytes] = Counter()

    def handle(consumer: Any, message: Message) -> None:
        attempts[message.body] += 1
        if message.attempts == 1 and int(message.body) % 3 == 0:
            raise RequeueMessage(0, backoff=False) if int(message.body) % 2 else ValueError("bad luck")

    with face.consuming("t", CHANNEL, message_handler=handle, **QUICK, **filled.servers) as consumer:
        until(lambda: consumer.stats().totals.finished == COUNT)
    assert attempts == {body: 2 if int(body) % 3 == 0 else 1 for body in BODIES}


def test_a_message_that_fails_once_too_often_is_a_dead_letter(face: Any, filled: Place) -> None:
    filled.create("dead")
    dead: set[bytes] = set()

    def handle(consumer: Any, message: Message) -> None:
        if message.body == b"7":
            raise ValueError("never works")

    options = {**QUICK, **filled.servers, "max_tries": 2, "requeue_delay": 0}
    with face.consuming("t", CHANNEL, message_handler=handle, give_up=PublishTo("dead"), **options) as consumer:
        until(lambda: consumer.stats().totals.finished == COUNT)
        assert consumer.stats().given_up == 1
    take = lambda consumer, message: dead.add(message.body)  # noqa: E731
    with face.consuming("dead", CHANNEL, message_handler=take, **QUICK, **filled.servers):
        until(lambda: dead == {b"7"})


def test_batches_are_answered_whole_but_for_what_they_answer_themselves(face: Any, filled: Place) -> None:
    handled: Counter[bytes] = Counter()

    def handle(consumer: Any, messages: list[Message]) -> None:
        handled.update(message.body for message in messages)
        for message in messages:
            if message.body == b"5" and message.attempts == 1:
                message.requeue(0, False)

    options = {**QUICK, **filled.servers, "batch_size": 8}
    with face.consuming("t", CHANNEL, batch_handler=handle, **options) as consumer:
        until(lambda: consumer.stats().totals.finished == COUNT)
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
    face: Any, options: dict[str, Any], nsqd_process: Any
) -> None:
    """Finished, or requeued where it also raises. It ended the interpreter, or left messages unanswered."""
    if options and type(face) is not Gevent:
        pytest.skip("of gevent alone")
    place = Place({"nsqd_tcp_addresses": nsqd_process.address}, lambda topic: None)
    bodies = {b"%d" % number for number in range(5)}
    seen: Counter[tuple[str | None, bytes, int]] = Counter()

    def handle(consumer: Any, messages: list[Message]) -> None:
        name, first = messages[0].topic, [message for message in messages if message.attempts == 1]
        seen.update((message.topic, message.body, message.attempts) for message in messages)
        CHANGES[name or ""](messages)
        if name == "clear" and first:
            raise ValueError("no")

    for topic in CHANGES:
        place.publish(topic, bodies)
    options = {**QUICK, **place.servers, **options, "requeue_delay": 0}
    with face.consuming(list(CHANGES), CHANNEL, batch_handler=handle, **options) as consumer:
        until(lambda: consumer.stats().totals.finished == len(CHANGES) * len(bodies))
    assert {(topic, body) for topic, body, _ in seen} == {(topic, body) for topic in CHANGES for body in bodies}
    assert {topic for topic, _, attempts in seen if attempts > 1} == {"clear"}
    assert set(seen.values()) == {1}


def test_what_is_answered_later_is_in_flight_until_then(face: Any, filled: Place) -> None:
    held: list[Message] = []

    def handle(consumer: Any, message: Message) -> None:
        message.enable_async()
        message.touch()
        held.append(message)

    options = {**QUICK, **filled.servers, "max_in_flight": 10}
    with face.consuming("t", CHANNEL, message_handler=handle, **options) as consumer:
        until(lambda: len(held) == 10)
        assert consumer.total_in_flight == 10
        assert consumer.stats().totals.touched == 10
        for _ in range(COUNT // 10):
            until(lambda: len(held) == 10)
            answered, held[:] = held[:], []
            for message in answered:
                message.finish()
        until(lambda: consumer.stats().totals.finished == COUNT)


def test_close_lets_handlers_end_and_gives_the_rest_back(face: Any, filled: Place) -> None:
    handled: set[bytes] = set()

    def handle(consumer: Any, message: Message) -> Any:
        handled.add(message.body)
        if len(handled) == 5:
            return consumer.close()  # in a handler it begins to close, and returns
        return None

    with face.consuming("t", CHANNEL, message_handler=handle, **QUICK, **filled.servers) as consumer:
        until(lambda: not consumer.is_running)
        face.close(consumer)
        totals = consumer.stats().totals
        assert totals.finished == len(handled)
        assert totals.finished + totals.requeued == totals.received
    rest: set[bytes] = set()
    take = lambda consumer, message: rest.add(message.body)  # noqa: E731
    with face.consuming("t", CHANNEL, message_handler=take, **QUICK, **filled.servers):
        until(lambda: handled | rest == BODIES)


def test_iterating_finishes_each_but_the_one_it_is_left_at(face: Any, filled: Place) -> None:
    taken = face.take("t", CHANNEL, 10, **QUICK, **filled.servers)
    assert len({body for body, _ in taken}) == 11
    rest: dict[bytes, int] = {}
    keep = lambda consumer, message: rest.update({message.body: message.attempts})  # noqa: E731
    with face.consuming("t", CHANNEL, message_handler=keep, **QUICK, **filled.servers):
        until(lambda: len(rest) == COUNT - 10)
    assert rest[taken[-1][0]] >= 2


def test_a_pause_holds_messages_back_until_it_ends(face: Any, place: Place) -> None:
    place.create("t")
    handled: set[bytes] = set()
    handle = lambda consumer, message: handled.add(message.body)  # noqa: E731
    with face.consuming("t", CHANNEL, message_handler=handle, **QUICK, **place.servers) as consumer:
        until(lambda: consumer.total_ready_count > 0)
        consumer.pause()
        until(lambda: consumer.total_ready_count == 0)
        place.publish("t", BODIES)
        consumer.max_in_flight = 7
        assert not handled
        consumer.resume()
        until(lambda: handled == BODIES)
        assert consumer.max_in_flight == 7


def test_several_topics_share_one_limit(face: Any, filled: Place) -> None:
    filled.create("u")
    filled.publish("u", BODIES)
    handled: dict[str | None, set[bytes]] = {"t": set(), "u": set()}
    most = 0

    def handle(consumer: Any, message: Message) -> None:
        nonlocal most
        most = max(most, sum(each.in_flight for each in consumer.stats().connections))
        handled[message.topic].add(message.body)

    options = {**QUICK, **filled.servers, "max_in_flight": 6}
    with face.consuming(["t", "u"], CHANNEL, message_handler=handle, **options):
        until(lambda: handled == {"t": BODIES, "u": BODIES})
    assert 0 < most <= 6


@pytest.mark.parametrize("kind", [nsq_fast.Consumer, threads.Consumer, aio.Consumer])
def test_arguments_are_refused_alike(kind: Any) -> None:
    for wrong in ({"message_handler": 1}, {"max_in_flight": -1}, {"give_up": 1}, {"blocked_policy": "sleep"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            kind("t", "c", "127.0.0.1:1", **wrong)
    with pytest.raises(ConfigError, match="at least one nsqd or lookupd"):
        kind("t", "c")


def test_what_was_closed_does_not_start_again() -> None:
    async def main() -> None:
        consumer = aio.Consumer("t", "c", "127.0.0.1:1")
        await consumer.close()
        with pytest.raises(NotRunning, match="closed"):
            await consumer.start()

    asyncio.run(main())
    for kind in (nsq_fast.Consumer, threads.Consumer):
        consumer: Any = kind("t", "c", "127.0.0.1:1", message_handler=lambda consumer, message: None)
        consumer.close()
        with pytest.raises(NotRunning, match="closed"):
            consumer.start()
