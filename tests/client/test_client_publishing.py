"""What every Producer does, on each loop and against each server: the same calls, the same ends."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gevent
import pytest
from support.ports import free_address
from support.servers import SERVERS, RealNsqd, find_server
from support.waiting import WAIT, until

import nsq_fast
from nsq_fast import aio, threads
from nsq_fast.broker import Broker, RedesignedCluster
from nsq_fast.errors import BodyInvalid, ConfigError, NameInvalid, NoNsqd, NotRunning, PublishFailed

Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def to(name: str, *arguments: Any, **options: Any) -> Call:
    return name, arguments, options


class OnGevent:
    """Calls of ``nsq_fast.Producer``."""

    def __init__(self, **options: Any) -> None:
        self.producer = nsq_fast.Producer(**options)

    def do(self, call: Call) -> Any:
        """Make a call, and give what it ends with. Servers of the test may run meanwhile."""
        result = getattr(self.producer, call[0])(*call[1], **call[2])
        return result.get(timeout=WAIT) if hasattr(result, "get") else result

    def do_all(self, calls: list[Call]) -> list[Any]:
        """Make calls side by side; what each ends with, exceptions among it."""
        jobs = [gevent.spawn(self._end_of, call) for call in calls]
        gevent.joinall(jobs, timeout=WAIT)
        return [job.value for job in jobs]

    def _end_of(self, call: Call) -> Any:
        try:
            return self.do(call)
        except Exception as error:
            return error

    def end(self) -> None:
        """Nothing is called any more."""


class OnThreads(OnGevent):
    """Calls of ``nsq_fast.threads.Producer``, each in a thread of its own where there are several."""

    def __init__(self, **options: Any) -> None:
        self.producer = threads.Producer(**options)  # type: ignore[assignment]

    def do(self, call: Call) -> Any:
        result = getattr(self.producer, call[0])(*call[1], **call[2])
        if hasattr(result, "result"):
            until(result.done)  # servers of the test may run in the calling thread
            return result.result()
        return result

    def do_all(self, calls: list[Call]) -> list[Any]:
        ends: dict[int, Any] = {}

        def work(number: int) -> None:
            ends[number] = self._end_of(calls[number])

        for number in range(len(calls)):
            threading.Thread(target=work, args=(number,), daemon=True).start()
        until(lambda: len(ends) == len(calls))
        return [ends[number] for number in range(len(calls))]


class OnAsyncio:
    """Calls of ``nsq_fast.aio.Producer``, in a loop of its own, in a thread of its own."""

    def __init__(self, **options: Any) -> None:
        self.producer = aio.Producer(**options)
        self._loop = self.new_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def new_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.new_event_loop()

    async def _end_of(self, call: Call) -> Any:
        result = getattr(self.producer, call[0])(*call[1], **call[2])
        return await result

    async def _ends_of(self, calls: list[Call]) -> list[Any]:
        return await asyncio.gather(*map(self._end_of, calls), return_exceptions=True)

    def do(self, call: Call) -> Any:
        (end,) = self.do_all([call])
        if isinstance(end, BaseException):
            raise end
        return end

    def do_all(self, calls: list[Call]) -> list[Any]:
        future = asyncio.run_coroutine_threadsafe(self._ends_of(calls), self._loop)
        until(future.done)
        return future.result()

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT)
        self._loop.close()


class OnUvloop(OnAsyncio):
    """The same on uvloop."""

    def new_loop(self) -> asyncio.AbstractEventLoop:
        loop: asyncio.AbstractEventLoop = pytest.importorskip("uvloop").new_event_loop()
        return loop


FACES = [OnGevent, OnThreads, OnAsyncio, OnUvloop]
Face = OnGevent | OnAsyncio
Make = Callable[..., Any]


@pytest.fixture(params=FACES, ids=["gevent", "threads", "aio", "uvloop"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """A factory of started producers of one face."""
    faces: list[Any] = []

    def start(**options: Any) -> Any:
        face = request.param(**options)
        faces.append(face)
        face.do(to("start")) if isinstance(face, OnAsyncio) else face.producer.start()
        return face

    yield start
    for face in faces:
        if face.producer.is_running:
            face.do(to("close", 1.0))
        face.end()


class Servers:
    """Servers that have the topic ``t``, how to find them, and what is stored there."""

    def __init__(self, options: dict[str, Any], bodies: Callable[[int], list[bytes]], is_redesigned: bool) -> None:
        self.options = options
        self.bodies = bodies
        self.is_redesigned = is_redesigned


@pytest.fixture(params=["embedded", "redesigned", "original"])
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Servers]:
    kind = request.param
    if kind == "redesigned":
        with RedesignedCluster(nodes=2, kind=True) as cluster:
            cluster.create_topic("t", 3, 1, ordered=True, channels=["c"])
            lookupds = [str(lookupd.http_address) for lookupd in cluster.lookupds]

            def stored(count: int) -> list[bytes]:
                return [
                    record.body for number in range(3) for record in cluster.partition("t", number).log.read(0, 10**6)
                ]

            yield Servers({"lookupd_http_addresses": lookupds}, stored, True)
        return
    if kind == "original" and find_server("nsqd") is None:
        pytest.skip(f"no real nsqd below {SERVERS}")
    with _original(kind, tmp_path) as address:
        yield Servers({"nsqd_tcp_addresses": address}, lambda count: _consumed(address, count), False)


@contextmanager
def _original(kind: str, path: Path) -> Iterator[str]:
    if kind == "embedded":
        with Broker() as broker:
            yield str(broker.nsqd.tcp_address)
        return
    nsqd = RealNsqd(path)
    try:
        yield str(nsqd.tcp_address)
    finally:
        nsqd.kill()


def _consumed(address: str, count: int) -> list[bytes]:
    found: list[bytes] = []

    def handle(consumer: nsq_fast.Consumer, message: nsq_fast.Message) -> None:
        found.append(message.body)

    consumer = nsq_fast.Consumer("t", "c", address, message_handler=handle, max_in_flight=100)
    consumer.start(block=False)
    until(lambda: len(found) >= count)
    consumer.close()
    return found


def test_every_way_to_publish(make: Make, servers: Servers) -> None:
    face = make(**servers.options)
    assert face.do(to("publish", "t", b"1")) == b"OK"
    assert face.do(to("publish", "t", bytearray(b"2"), key="k")) == b"OK"
    assert face.do(to("publish_nowait", "t", memoryview(b"3"))) == b"OK"
    assert face.do(to("multipublish", "t", [b"4", b"5"])) == b"OK"
    assert face.producer.is_running
    assert face.producer.is_connected
    assert face.producer.stats()["stored"] == 4
    assert sorted(servers.bodies(5)) == [b"1", b"2", b"3", b"4", b"5"]


def test_callers_side_by_side_are_stored_once_each(make: Make, servers: Servers) -> None:
    face = make(**servers.options)
    bodies = [b"%d" % number for number in range(200)]
    ends = face.do_all([to("publish", "t", body, key=body[:1]) for body in bodies[:100]])
    ends += face.do_all([to("publish", "t", body) for body in bodies[100:]])
    assert ends == [b"OK"] * 200
    assert Counter(servers.bodies(200)) == Counter(bodies)


def test_a_wrong_argument_is_refused_and_harms_nobody(make: Make, servers: Servers) -> None:
    face = make(max_msg_size=100, **servers.options)
    wrong: list[tuple[Call, type[Exception]]] = [
        (to("publish", "a topic", b"x"), NameInvalid),
        (to("publish", "t", "text"), TypeError),
        (to("publish", "t", b""), BodyInvalid),
        (to("publish", "t", bytes(101)), BodyInvalid),
        (to("publish", "t", b"x", defer=-1), ConfigError),
        (to("publish", "t", b"x", timeout=0), ConfigError),
        (to("publish", "t", b"x", key="k", partition=1), ConfigError),
        (to("publish", "t", b"x", trace_id=2**64), ConfigError),
        (to("publish_nowait", "t", "text"), TypeError),
        (to("multipublish", "t", []), BodyInvalid),
        (to("multipublish", "t", [b"x", b""]), BodyInvalid),
    ]
    for call, error in wrong:
        with pytest.raises(error):
            face.do(call)
    assert face.do(to("publish", "t", b"good")) == b"OK"
    stats = face.producer.stats()
    assert (stats["held"], stats["pending"], stats["stored"]) == (0, 0, 1)
    assert servers.bodies(1) == [b"good"]


def test_one_of_many_that_is_wrong_fails_alone(make: Make, servers: Servers) -> None:
    face = make(**servers.options)
    assert face.do(to("publish", "t", b"first")) == b"OK"
    *good, bad = face.do_all([*(to("publish", "t", b"%d" % number) for number in range(20)), to("publish", "t", b"")])
    assert good == [b"OK"] * 20
    assert isinstance(bad, BodyInvalid)


def test_keys_keep_the_order_of_the_calls(make: Make, servers: Servers) -> None:
    face = make(**servers.options)

    def one_after_the_other(key: str) -> list[Call]:
        return [to("publish", "t", b"%s %d" % (key.encode(), number), key=key) for number in range(10)]

    for calls in zip(*map(one_after_the_other, "abcd"), strict=True):
        assert face.do_all(list(calls)) == [b"OK"] * 4
    bodies = servers.bodies(40)
    if servers.is_redesigned:
        for key in b"abcd":
            mine = [body for body in bodies if body[0] == key]
            assert mine == [b"%c %d" % (key, number) for number in range(10)]
    assert len(bodies) == 40


def test_without_an_nsqd_nothing_is_stored_and_the_caller_waits_as_long_as_it_says(make: Make) -> None:
    face = make(nsqd_tcp_addresses=free_address())
    for options in ({"timeout": 0.05}, {"block": False}):
        with pytest.raises(NoNsqd, match="no nsqd takes publishes now") as caught:
            face.do(to("publish", "t", b"x", **options))
        assert isinstance(caught.value, PublishFailed)
        assert not caught.value.possibly_stored
    assert not face.producer.is_connected
    assert list(face.producer.stats()["disconnected"]) == list(face.producer.nsqd_tcp_addresses)


def test_max_pending_blocks_those_who_wait_and_refuses_the_others(make: Make) -> None:
    face = make(nsqd_tcp_addresses=free_address(), max_pending=3)
    ends = face.do_all(
        [
            *(to("publish", "t", b"%d" % number, timeout=0.3) for number in range(6)),
            *(to("publish_nowait", "t", b"x", timeout=0.3) for _ in range(1)),
        ]
    )
    assert all(isinstance(end, PublishFailed) and not end.possibly_stored for end in ends)
    assert any("max_pending=3" in str(end) for end in ends)
    assert face.producer.stats()["held"] == 0


def test_closing_waits_for_what_is_pending(make: Make, servers: Servers) -> None:
    face = make(linger=0.2, **servers.options)
    assert face.do(to("publish", "t", b"first")) == b"OK"
    ends = face.do_all([to("publish", "t", b"second"), to("publish", "t", b"third"), to("close")])
    assert all(end == b"OK" or end is None or isinstance(end, NotRunning) for end in ends)
    assert not face.producer.is_running
    assert face.do(to("join", 1.0))
    with pytest.raises(NotRunning, match="closed"):
        face.do(to("publish", "t", b"late"))
    stored = [b"first"] + [body for body, end in zip((b"second", b"third"), ends, strict=False) if end == b"OK"]
    assert sorted(servers.bodies(len(stored))) == sorted(stored)


def test_it_publishes_on_after_its_server_was_away(make: Make) -> None:
    with Broker() as broker:
        face = make(nsqd_tcp_addresses=broker.nsqd.tcp_address, max_backoff_duration=0.1, retry_max_delay=0.1)
        assert face.do(to("publish", "t", b"before")) == b"OK"
        broker.nsqd.stop()
        until(lambda: not face.producer.is_connected)
        broker.nsqd.start()
        assert face.do(to("publish", "t", b"after")) == b"OK"


def test_batches_that_are_cut_are_stored_whole(make: Make, servers: Servers) -> None:
    face = make(max_body_size=200, **servers.options)
    bodies = [b"%03d" % number for number in range(100)]
    assert face.do(to("multipublish", "t", bodies)) == b"OK"
    assert sorted(servers.bodies(100)) == bodies
