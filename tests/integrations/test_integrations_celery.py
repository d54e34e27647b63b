"""Celery on NSQ: the transport of kombu, and Celery's own worker in a process of its own."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import WAIT, until

from nsq_fast import LookupdHTTPClient, NsqdHTTPClient
from nsq_fast.broker import BrokerProcess
from nsq_fast.errors import ConfigError
from nsq_fast.names import check_topic
from nsq_fast.threads import Producer as NsqProducer

pytest.importorskip("celery")

from celery import Celery
from kombu import Connection, Consumer, Exchange, Producer, Queue, binding, pools
from kombu.common import Broadcast
from kombu.exceptions import ChannelError, ContentDisallowed, OperationalError
from support import celery_app

import nsq_fast.integrations.celery  # which makes nsq:// known
from nsq_fast.integrations.celery_queues import nsq_name

QUEUE = Queue("orders", Exchange("orders"), "orders")


class Nsqd(NamedTuple):
    address: str
    http: str


@pytest.fixture(params=["embedded", "original"])
def memory_nsqd(request: pytest.FixtureRequest) -> Iterator[Nsqd]:
    """An nsqd with a queue in memory, which what is ephemeral needs."""
    if request.param == "original":
        server = request.getfixturevalue("real_nsqd")()
        yield Nsqd(str(server.tcp_address), str(server.http_address))
        return
    with BrokerProcess(lookupd=False) as broker:
        yield Nsqd(str(broker.nsqds[0].tcp), str(broker.nsqds[0].http))


class Client:
    """A connection, and the messages that came to it."""

    def __init__(self, url: str, **options: Any) -> None:
        self.connection = Connection(url, transport_options={"max_reconnect_delay": 0.1, **options})
        self.channel = self.connection.channel()
        self.messages: list[Any] = []

    def publish(self, body: Any, queue: Queue = QUEUE, **options: Any) -> None:
        where = {"exchange": queue.exchange, "routing_key": queue.routing_key, **options}
        Producer(self.channel).publish(body, declare=[queue], **where)

    def consume(self, queue: Queue = QUEUE, prefetch: int = 0, **options: Any) -> Consumer:
        consumer = Consumer(self.channel, [queue], on_message=self.messages.append, **options)
        consumer.qos(prefetch_count=prefetch)
        consumer.consume()
        return consumer

    def wait(self, count: int) -> list[Any]:
        while len(self.messages) < count:
            self.connection.drain_events(timeout=WAIT)
        return self.messages

    def bodies(self, count: int) -> list[Any]:
        return [message.decode() for message in self.wait(count)]

    def look(self, seconds: float = 0.3) -> int:
        """How many messages there are when nothing more has come for a while."""
        try:
            while True:
                self.connection.drain_events(timeout=seconds)
        except TimeoutError:
            return len(self.messages)


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    """``connect(url, **transport_options)``; closed after the test."""
    clients: list[Client] = []

    def make(url: str, **options: Any) -> Client:
        clients.append(Client(url, **options))
        return clients[-1]

    yield make
    for client in clients:
        client.connection.release()


def channel_of(nsqd: Any, topic: str = "orders") -> dict[str, Any]:
    with NsqdHTTPClient.from_url(str(nsqd.http)) as client:
        topics = {each["topic_name"]: each for each in client.stats()["topics"]}
    channels = topics[topic]["channels"] if topic in topics else []
    return dict(channels[0]) if channels else {}


def is_empty(nsqd: Any, topic: str = "orders") -> bool:
    """Whether nobody has a message of its any more."""
    channel = channel_of(nsqd, topic)
    return bool(channel) and not (channel["depth"] or channel["in_flight_count"] or channel["deferred_count"])


def test_ack_is_fin_and_reject_requeues_or_drops(nsqd_process: Any, connect: Any) -> None:
    client = connect(f"nsq://{nsqd_process.address}")
    for body in ({"do": "ack"}, {"do": "requeue"}, {"do": "drop"}):
        client.publish(body)
    client.consume()
    for message in list(client.wait(3)):
        assert message.delivery_info["redelivered"] is False
        {"ack": message.ack, "requeue": message.requeue, "drop": message.reject}[message.decode()["do"]]()
    again = client.wait(4)[3]
    assert again.decode() == {"do": "requeue"}
    assert again.delivery_info["redelivered"] is True
    again.ack()
    until(lambda: is_empty(nsqd_process))
    assert client.look() == 4


def test_what_was_not_acknowledged_goes_back_when_the_connection_is_closed(nsqd_process: Any, connect: Any) -> None:
    first = connect(f"nsq://{nsqd_process.address}")
    first.publish("hello")
    first.consume()
    first.wait(1)
    first.connection.release()
    second = connect(f"nsq://{nsqd_process.address}")
    second.consume()
    second.wait(1)[0].ack()
    assert channel_of(nsqd_process)["timeout_count"] == 0


def test_no_more_is_held_than_the_prefetch_count(nsqd_process: Any, connect: Any) -> None:
    client = connect(f"nsq://{nsqd_process.address}")
    for number in range(10):
        client.publish(number)
    consumer = client.consume(prefetch=3)
    client.wait(3)
    assert client.look() == 3
    assert channel_of(nsqd_process)["in_flight_count"] == 3
    client.messages[0].ack()
    client.wait(4)
    assert client.look() == 4
    consumer.qos(prefetch_count=5)
    client.wait(6)
    assert client.look() == 6


def test_a_cancelled_consumer_takes_no_more_and_still_acknowledges(nsqd_process: Any, connect: Any) -> None:
    client = connect(f"nsq://{nsqd_process.address}")
    client.publish(1)
    consumer = client.consume(prefetch=1)
    client.wait(1)
    client.publish(2)
    consumer.cancel()
    client.messages[0].ack()
    until(lambda: channel_of(nsqd_process)["in_flight_count"] == 0)
    assert client.look() == 1
    consumer.consume()
    assert client.bodies(2) == [1, 2]


class BusyDeque(deque[Any]):
    """One to which another thread appends while somebody goes through it."""

    made: ClassVar[list[BusyDeque]] = []
    meanwhile: ClassVar[list[Callable[[], object]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.made.append(self)

    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            self._await_another()
            yield each

    def popleft(self) -> Any:
        self._await_another()
        return super().popleft()

    def _await_another(self) -> None:
        if self.meanwhile:
            before = len(self)
            self.meanwhile.pop()()
            until(lambda: len(self) > before)


def test_a_message_that_comes_while_another_queue_is_cancelled_harms_nobody(
    nsqd_process: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nsq_fast.integrations.celery, "deque", BusyDeque)
    monkeypatch.setattr(BusyDeque, "made", [])
    client, other = connect(f"nsq://{nsqd_process.address}"), connect(f"nsq://{nsqd_process.address}")
    waiting = BusyDeque.made[0]
    invoices = Queue("invoices", Exchange("invoices"), "invoices")
    consumer = client.consume()
    client.consume(invoices)
    for number in range(3):
        client.publish(number)
    until(lambda: len(waiting) == 3)
    BusyDeque.meanwhile.append(lambda: other.publish("in the middle", invoices))
    consumer.cancel()
    until(lambda: channel_of(nsqd_process)["depth"] == 3)
    assert client.bodies(1) == ["in the middle"]
    assert not BusyDeque.meanwhile


def test_a_held_message_is_touched(nsqd_process: Any, connect: Any) -> None:
    client = connect(f"nsq://{nsqd_process.address}?msg_timeout=1")
    client.publish("slow")
    client.consume()
    client.wait(1)
    time.sleep(2.2)  # sleep: longer than two timeouts of the message
    client.messages[0].ack()
    until(lambda: is_empty(nsqd_process))
    assert channel_of(nsqd_process)["timeout_count"] == 0


def test_an_eta_beyond_what_nsqd_delays_is_waited_for_in_parts(nsqd_process: Any, connect: Any) -> None:
    client = connect(f"nsq://{nsqd_process.address}", max_delay=0.5)
    client.consume()
    due = datetime.now(timezone.utc) + timedelta(seconds=1.7)
    client.publish("later", headers={"eta": due.isoformat()})
    client.wait(1)[0].ack()
    assert datetime.now(timezone.utc) >= due


def test_each_queue_of_a_fanout_exchange_gets_what_comes_after_it(memory_nsqd: Any, connect: Any) -> None:
    url = f"nsq://{memory_nsqd.address}"
    clients = [connect(url), connect(url)]
    clients[0].publish("too early", Broadcast("news"))
    for client in clients:
        client.consume(Broadcast("news"), no_ack=True)
    clients[0].publish("extra", Broadcast("news"))
    for client in clients:
        assert client.bodies(1) == ["extra"]
        assert client.look() == 1


def test_a_topic_exchange_goes_by_patterns_of_which_a_queue_may_have_several(memory_nsqd: Any, connect: Any) -> None:
    signals = Exchange("signals", type="topic")
    lasting = Queue("rain", Exchange("weather", type="topic"), "europe.*")
    bindings = [binding(signals, routing_key=key) for key in ("task.#", "worker.*")]
    client = connect(f"nsq://{memory_nsqd.address}")
    client.consume(lasting)
    client.consume(Queue("listener", bindings=bindings, auto_delete=True), no_ack=True)
    client.publish("wet", lasting, routing_key="europe.oslo")
    assert client.bodies(1) == ["wet"]
    for key in ("task.sent", "other.thing", "worker.online", "task.done"):
        Producer(client.channel).publish(key, exchange=signals, routing_key=key)
    assert sorted(client.bodies(4)[1:]) == ["task.done", "task.sent", "worker.online"]
    assert client.look() == 4


def test_what_nsq_cannot_do_is_an_error_that_says_what_to_do_instead(memory_nsqd: Any, connect: Any) -> None:
    client = connect(f"nsq://{memory_nsqd.address}")
    with pytest.raises(ChannelError, match="must declare the queue"):
        client.publish("lost", routing_key="other")
    with pytest.raises(ChannelError, match="empty the topic 'orders'"):
        client.channel.queue_purge("orders")


def test_a_body_of_somebody_else_is_no_message_of_kombu(memory_nsqd: Any, connect: Any) -> None:
    with NsqProducer(memory_nsqd.address) as producer:
        producer.multipublish("orders", [b"\xff\x00", b'{"body": 1}', b"[]"])
    client = connect(f"nsq://{memory_nsqd.address}")
    client.consume(accept=["json"])
    for message in list(client.wait(3)):
        with pytest.raises(ContentDisallowed):
            message.decode()
        message.ack()
    assert {message.body for message in client.messages} == {b"\xff\x00", b'{"body": 1}', b"[]"}
    until(lambda: is_empty(memory_nsqd))


def test_nsqds_are_found_by_lookup(connect: Any) -> None:
    with BrokerProcess(nsqds=2) as broker:
        with LookupdHTTPClient.from_url(str(broker.lookupd.http)) as lookupd:
            until(lambda: len(lookupd.nodes()["producers"]) == 2)
        url = f"nsq+lookup://{broker.lookupd.http}?lookupd_poll_interval=0.1"
        client, other = connect(url), connect(url)
        for number in range(20):
            client.publish(number)
        client.consume()
        assert sorted(client.bodies(20)) == list(range(20))
        other.consume(Broadcast("news"), no_ack=True)  # of both nsqds, which do not have it yet
        for number in range(4):
            client.publish(number, Broadcast("news"))
        assert sorted(other.bodies(4)) == list(range(4))
        assert client.connection.as_uri() == f"nsq+lookup://{broker.lookupd.http}?lookupd_poll_interval=**"


def test_tls_with_options_of_the_transport(real_nsqd: Any, tls_files: dict[str, str], connect: Any) -> None:
    nsqd = real_nsqd(f"-tls-cert={tls_files['cert']}", f"-tls-key={tls_files['key']}", "-tls-required=true")
    options = {"tls_v1": True, "tls_options": {"cafile": tls_files["ca"]}}
    client = connect(f"nsq://{nsqd.tcp_address}", **options)
    client.publish("secret")
    client.consume()
    assert client.bodies(1) == ["secret"]


def test_without_a_server_a_connection_fails_at_once_and_says_where(closed_port: int) -> None:
    with Connection(f"nsq://127.0.0.1:{closed_port}") as connection, pytest.raises(OperationalError) as caught:
        connection.ensure_connection(max_retries=1, interval_start=0.01)
    assert f"no nsqd takes a connection: 127.0.0.1:{closed_port}" in str(caught.value)


@pytest.mark.parametrize(
    ("url", "options", "text"),
    [
        ("nsq+http://127.0.0.1", {}, "must be nsq:// or nsq\\+lookup://"),
        ("nsq://127.0.0.1/shop", {}, "NSQ has no virtual hosts"),
        ("nsq://a;nsq://b", {}, "name all servers in one"),
        ("nsq://127.0.0.1?msg_timeuot=3", {}, "did you mean 'msg_timeout'"),
        ("nsq://127.0.0.1", {"max_tries": 3}, "unknown option 'max_tries'"),
        ("nsq://127.0.0.1?max_delay=soon", {}, "must be a number of seconds"),
        ("nsq://127.0.0.1:port", {}, "invalid port"),
    ],
)
def test_a_wrong_url_or_option_is_an_error(url: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Connection(url, transport_options=options).connect()


def test_options_of_kombu_are_left_to_it_and_the_password_is_the_secret_for_auth_and_is_not_shown() -> None:
    servers = Connection("nsq://", transport_options={"max_retries": 3, "interval_start": 0}).transport.servers
    assert (servers.options, [str(each) for each in servers.addresses]) == ({}, ["localhost:4150"])
    connection = Connection("nsq://user:open%20sesame@a:4150,b:4152?auth_secret=other")
    servers = connection.transport.servers
    assert servers.options["auth_secret"] == "open sesame"
    assert [str(each) for each in servers.addresses] == ["a:4150", "b:4152"]
    for text in (connection.as_uri(), repr(connection), repr(servers)):
        assert "sesame" not in text
        assert "other" not in text
    assert connection.as_uri() == "nsq://user:**@a:4150,b:4152?auth_secret=**"


def test_a_priority_is_warned_of_once(memory_nsqd: Any, connect: Any, caplog: pytest.LogCaptureFixture) -> None:
    client = connect(f"nsq://{memory_nsqd.address}")
    with caplog.at_level(logging.WARNING):
        client.publish(1)
        assert "NSQ has no priorities" not in caplog.text
        client.publish(2, priority=5)
        client.publish(3, priority=5)
    assert caplog.text.count("NSQ has no priorities") <= 1
    client.consume()
    assert sorted(client.bodies(3)) == [1, 2, 3]


@given(st.text(), st.text(), st.booleans())
def test_names_are_legal_and_no_two_are_one(first: str, second: str, is_ephemeral: bool) -> None:
    names = nsq_name(first, is_ephemeral), nsq_name(second, is_ephemeral)
    assert (names[0] == names[1]) == (first == second)
    for name in names:
        assert check_topic(name).endswith("#ephemeral") == is_ephemeral


def test_a_legal_name_stays_as_it_is() -> None:
    assert nsq_name("orders.v2") == "orders.v2"
    assert nsq_name("orders", is_ephemeral=True) == "orders#ephemeral"
    assert nsq_name("x" * 64) == "x" * 64


# Celery on NSQ, with Celery's own worker in a process of its own: tasks run, wait, and survive kills.


def with_workers(test: Any) -> Any:
    """Workers take seconds to start, and more on a busy machine."""
    return pytest.mark.slow(pytest.mark.timeout(180)(test))


ROOT = Path(__file__).parent.parent.parent


class Worker:
    """``celery worker`` as a process, which leads a group with its children."""

    def __init__(self, url: str, folder: Path, pool: str, number: int) -> None:
        self.name = f"w{number}@test"
        self._log = folder / f"worker{number}.log"
        paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
        environment = {**os.environ, "PYTHONPATH": paths, "CELERY_BROKER": url, "CELERY_FOLDER": str(folder)}
        options = ["-P", pool, "-c", "2", "-E", "-n", self.name, "-l", "INFO"]
        command = [sys.executable, "-m", "celery", "-A", "support.celery_app", "worker", *options]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        until(lambda: self._process.poll() is not None or " ready." in self.log, about=lambda: self.log)

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def received(self) -> int:
        """Tasks that it has taken from the server."""
        return self.log.count("] received")

    def kill(self) -> None:
        """SIGKILL, for its children, too."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(WAIT)

    def stop(self) -> int:
        """SIGTERM; returns its exit code."""
        self._process.terminate()
        return self._process.wait(WAIT)

    def end(self) -> None:
        """Kill what is left of it."""
        if self._process.poll() is None:
            self.kill()


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """``start_worker(url, pool="prefork")``, which the application of the tests publishes to; ended after the test."""
    app = celery_app.app
    workers: list[Worker] = []

    def start(url: str, pool: str = "prefork") -> Worker:
        app.conf.broker_url = url
        workers.append(Worker(url, tmp_path, pool, len(workers)))
        return workers[-1]

    yield start
    for worker in workers:
        worker.end()
    pools.reset()  # which closes the connections that publishing has left open
    app.close()
    app._pool = None  # the next test has another broker
    app.amqp._producer_pool = None


def ran(folder: Path) -> list[int]:
    path = folder / "ran"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


@with_workers
@pytest.mark.parametrize(
    ("pool", "memory_nsqd"), [("prefork", "original"), ("gevent", "embedded")], indirect=["memory_nsqd"]
)
def test_tasks_run_and_wait_and_workers_are_controlled(
    pool: str, memory_nsqd: Any, start_worker: Any, tmp_path: Path
) -> None:
    worker = start_worker(f"nsq://{memory_nsqd.address}", pool)
    for number in range(20):
        celery_app.note.delay(number)
    began = time.time()
    celery_app.note.apply_async((20,), countdown=1.0)
    celery_app.note_at_second_try.delay(21)
    until(lambda: len(ran(tmp_path)) >= 22, about=lambda: worker.log)
    assert sorted(ran(tmp_path)) == list(range(22))
    assert time.time() - began >= 1.0
    until(lambda: is_empty(memory_nsqd, "celery"))
    assert celery_app.app.control.ping([worker.name], timeout=WAIT) == [{worker.name: {"ok": "pong"}}], worker.log
    assert events_of(celery_app.app, lambda: celery_app.note.delay(22)) >= {"task-received", "task-succeeded"}
    taken = worker.received
    celery_app.note.apply_async((23,), countdown=600)  # which waits in nsqd, and not in the worker
    until(lambda: channel_of(memory_nsqd, "celery")["deferred_count"] == 1)
    until(lambda: channel_of(memory_nsqd, "celery")["in_flight_count"] == 0)
    assert worker.received == taken
    assert worker.stop() == 0
    assert "Traceback" not in worker.log


def events_of(app: Celery, act: Callable[[], object]) -> set[str]:
    """The kinds of events that are seen, up to the success of a task; ``act`` is called when there is the first."""
    seen: set[str] = set()

    def note(event: dict[str, Any]) -> None:
        if not seen:
            act()
        seen.add(event["type"])
        receiver.should_stop = event["type"] == "task-succeeded"

    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"*": note})
        receiver.capture(timeout=WAIT)
    return seen


@pytest.mark.kill
@with_workers
def test_tasks_whose_child_or_worker_was_killed_run_again(nsqd_process: Any, start_worker: Any, tmp_path: Path) -> None:
    url = f"nsq://{nsqd_process.address}?msg_timeout=3"
    worker = start_worker(url)
    celery_app.die_once.delay(6)
    until(lambda: ran(tmp_path) == [6], about=lambda: worker.log)
    until(lambda: is_empty(nsqd_process, "celery"))
    assert "WorkerLostError" in worker.log
    taken = worker.received
    for number in range(6):
        celery_app.note_when_told.delay(number)
    until(lambda: worker.received == taken + 4)  # two that run, and as many that wait
    worker.kill()
    (tmp_path / "go").touch()
    second = start_worker(url)
    until(lambda: set(ran(tmp_path)) == set(range(7)), about=lambda: second.log)
    until(lambda: is_empty(nsqd_process, "celery"))


@pytest.mark.kill
@with_workers
def test_an_nsqd_that_goes_down_and_comes_back_loses_no_task(
    nsqd_process: Any, start_worker: Any, tmp_path: Path
) -> None:
    worker = start_worker(f"nsq://{nsqd_process.address}")
    for number in range(20):
        celery_app.note_when_told.delay(number)
    until(lambda: worker.received == 4)
    until(lambda: channel_of(nsqd_process, "celery")["depth"] == 16)  # none is on its way to the channel
    nsqd_process.go_down()
    with ThreadPoolExecutor(1) as threads:
        calls = [threads.submit(celery_app.note_when_told.delay, number) for number in range(20, 30)]
        nsqd_process.start()
        for call in calls:
            call.result(WAIT)
    (tmp_path / "go").touch()
    until(lambda: set(ran(tmp_path)) == set(range(30)), about=lambda: (sorted(ran(tmp_path)), worker.log))
    until(lambda: is_empty(nsqd_process, "celery"))
