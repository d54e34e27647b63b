"""What a consumer does with messages and their time, judged by the commands that reach a scripted nsqd."""

from __future__ import annotations

import functools

import gevent
import pytest
from gevent.event import Event
from support.processes import run_quietly
from support.scripted_nsqd import heard, ignore
from support.waiting import holds, promptly, until
from support.wire import frame

from nsq_fast import Consumer, Producer, threads
from nsq_fast.client.give_up import Discard
from nsq_fast.errors import ConfigError, HandlerDeferred, NsqError


@pytest.mark.parametrize("result", [True, 0, "x", [1], lambda: None, Event()], ids=lambda each: type(each).__name__)
def test_what_a_handler_returns_does_not_matter(nsqd, consume, result):
    consume(lambda consumer, message: result)
    conn = nsqd.connection()
    conn.push(1)
    conn.wait_for(lambda: conn.answered(b"FIN") == [1])


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"concurrency": 1}, 1),
        ({"concurrency": 3}, 3),
        ({"concurrency": 10, "max_in_flight": 1}, 1),
        ({"concurrency": 10, "max_in_flight": 3}, 3),
        ({"concurrency": 10, "max_in_flight": 3, "batch_size": 1}, 3),
    ],
    ids=str,
)
def test_concurrency_runs_so_many_handlers(nsqd, consume, options, most):
    """And never more than max_in_flight allows, until that grows."""
    running, release = [], Event()

    def handle(_, message):
        running.append(message)
        release.wait()
        running.remove(message)

    handler = {"batch_handler" if "batch_size" in options else "handler": handle}
    consumer = consume(**handler, **options)
    conn = nsqd.connection()
    conn.push(*range(8))  # more than RDY allows, as nsqd sends in place of those whose time is over
    until(lambda: len(running) == most)
    holds(lambda: len(running) == most)
    if options.get("max_in_flight") == 1:
        consumer.max_in_flight = 5
        until(lambda: len(running) == 5)
    release.set()
    conn.wait_for(lambda: len(conn.answered(b"FIN")) == 8)


def test_nsqds_take_turns_where_handlers_wait(servers, consume):
    both, seen, release = [servers(), servers()], [], Event()

    def handler(consumer, message):
        release.wait()
        gevent.sleep(0.006)  # sleep: longer than a time slice
        seen.append(message.responder.address)

    consumer = consume(handler, *both, concurrency=1)
    for server in both:
        server.connection().push(*range(4))
    until(lambda: consumer.stats().unstarted == 7)
    release.set()
    until(lambda: len(seen) == 8)
    assert set(seen[1:3]) == set(seen[3:5]) == {server.address for server in both}


def test_signals_reach_their_receivers_and_a_failing_one_loses_nothing(nsqd, consume):
    heard = []

    def listen(name):
        def receiver(consumer, **values):
            heard.append((name, *sorted(values)))
            raise ValueError("a bad receiver")

        getattr(consumer, name).connect(receiver, weak=False)

    def handler(consumer, message):
        if message.body == b"bad":
            raise KeyError("bad")

    consumer = consume(handler, requeue_delay=5)
    for name in ("on_finish", "on_requeue", "on_exception", "on_response", "on_error", "on_close", "on_giving_up"):
        listen(name)
    conn = nsqd.connection()
    conn.push(1)
    conn.push(2, body=b"bad")
    conn.push(3, attempts=9)
    conn.send(frame(0, b"_heartbeat_"))
    conn.send(frame(1, b"E_FIN_FAILED no luck") + frame(1, b"E_TOUCH_FAILED ") + frame(1, b"E_FIN_FAILED"))
    # what a receiver of on_giving_up could not take care of is not given up
    conn.wait_for(lambda: conn.answered(b"FIN") == [1] and conn.answered(b"REQ") == [2, 3])
    conn.wait_for(lambda: heard.count(("on_error", "error")) == 3 and b"NOP" in conn.words())
    assert consumer.stats().totals.answers_failed == 3
    assert len(nsqd.connections) == 1, "they are not fatal"
    consumer.close(drain=False)
    assert set(heard) == {
        ("on_finish", "message_id"),
        ("on_requeue", "message_id", "timeout"),
        ("on_exception", "error", "message"),
        ("on_giving_up", "message"),
        ("on_response", "response"),
        ("on_error", "error"),
        ("on_close",),
    }


def test_a_secret_that_is_renewed_is_used_from_the_next_connection_on(servers, tmp_path, caplog):
    """As those that expire, or are changed every month: nothing is restarted, and half a file is waited out."""
    secrets, told = [], []

    def take(connection, command):
        secrets.append(connection.secret)
        connection.send(frame(0, b'{"identity": "me", "identity_url": "", "permission_count": 1}'))

    server = servers({"auth_required": True}, {b"AUTH": take})
    file = tmp_path / "secret"
    file.write_text("old\n")
    options = {"auth_secret_file": str(file), "max_reconnect_delay": 0.02}
    consumer = Consumer("t", "c", str(server.address), message_handler=ignore, **options)
    consumer.on_auth.connect(lambda c, conn, response: told.append((conn.address, response["identity"])), weak=False)
    with consumer:
        server.connection()
        file.write_text("")
        server.connections[0].close()
        until(lambda: f"auth_secret_file {file}: it is empty" in caplog.text)
        file.write_text("new\r\n")
        until(lambda: len(secrets) == 2)
    assert secrets == [b"old", b"new"]
    assert told[0] == (server.address, "me")
    assert "old" not in caplog.text


def test_a_secret_that_cannot_be_read_is_refused_where_it_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"auth_secret_file .*nowhere: No such file"):
        Producer("127.0.0.1:1", auth_secret_file=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="which of the two"):
        Producer("127.0.0.1:1", auth_secret_file=__file__, auth_secret="x")


# Handlers that have not run when they return: refused when they are given, or when a message shows it


async def asynchronous(consumer, message):
    pass


def generator(consumer, message):
    yield


async def asynchronous_generator(consumer, message):
    yield


class Called:
    async def __call__(self, consumer, message):
        pass

    async def method(self, consumer, message):
        pass


DEFERRED = [
    asynchronous, generator, asynchronous_generator, Called(), Called().method, functools.partial(asynchronous),
    functools.partial(functools.partial(generator), message=1), functools.partial(Called()),
]  # fmt: skip


@pytest.mark.parametrize("handler", DEFERRED, ids=range(len(DEFERRED)))
def test_functions_whose_call_runs_nothing_are_refused(handler):
    for name in ("message_handler", "batch_handler", "give_up", "blocked_policy"):
        for kind in (Consumer, threads.Consumer):
            with pytest.raises(ConfigError, match=rf"{name}=.* its body"):
                kind("t", "c", "127.0.0.1:4150", **{name: handler})
    consumer = Consumer("t", "c", "127.0.0.1:4150")
    consumer.on_message.connect(handler, weak=False)
    with pytest.raises(ConfigError, match=r"a receiver of on_message.* its body"):
        consumer.start()
    assert not consumer.is_running


@pytest.mark.parametrize(
    ("kind", "deferred"),
    [
        ("message", asynchronous),
        ("message", generator),
        ("batch", asynchronous_generator),
        ("receiver", generator),
        ("concurrency", asynchronous),
    ],
)
def test_a_message_whose_handler_returns_such_work_is_requeued(nsqd, deferred, kind, caplog):
    options = {"max_in_flight": 10, "max_backoff_duration": 0}
    if kind != "receiver":
        options["batch_handler" if kind == "batch" else "message_handler"] = lambda c, m: deferred(c, m)
    if kind == "concurrency":
        options["concurrency"] = 3
    consumer = Consumer("t", "c", str(nsqd.address), **options)
    if kind == "receiver":
        consumer.on_message.connect(lambda c, message: deferred(c, message), weak=False)
        consumer.on_message.connect(lambda c, message: None, weak=False, sender=consumer)
    failures = heard(consumer, "on_exception")
    with consumer:
        conn = nsqd.connection()
        for number in (1, 2):
            conn.push(number)
            conn.wait_for(lambda number=number: conn.answered(b"REQ") == [1, 2][:number])
        assert conn.answered(b"FIN") == []
    assert [type(error) for error in failures] == [HandlerDeferred] * 2
    assert isinstance(failures[0], NsqError)
    assert isinstance(failures[0], TypeError)
    assert len([record for record in caplog.records if "nobody runs" in record.getMessage()]) == 1


@pytest.mark.parametrize("policy", [lambda c, m: asynchronous(c, m), Discard(lambda c, m: asynchronous(c, m))])
def test_a_give_up_policy_that_returns_such_work_keeps_the_message(nsqd, consume, policy):
    consumer = consume(ignore, max_tries=1, give_up=policy)
    conn = nsqd.connection()
    conn.push(1, attempts=2)
    conn.wait_for(lambda: conn.answered(b"REQ") == [1])
    assert consumer.stats().given_up == 0


# Manners


def test_the_library_touches_no_logging_but_its_own_and_prints_nothing():
    program = """
import logging
from nsq_fast import Consumer, Producer
from nsq_fast.broker import Broker

with Broker() as broker:
    address = str(broker.nsqd.tcp_address)
    with Producer(address) as producer:
        producer.publish("t", b"x")
    def handler(consumer, message):
        consumer.close()
    Consumer("t", "c", address, message_handler=handler).start()
assert not logging.root.handlers, logging.root.handlers
assert logging.root.level == logging.WARNING
names = [name for name in logging.root.manager.loggerDict if name.startswith("nsq_fast")]
assert names
for name in names:
    for handler in logging.getLogger(name).handlers:
        assert isinstance(handler, logging.NullHandler), (name, handler)
"""
    assert run_quietly(program) == ""


# Messages whose time is over: no consumer waits for them, none counts for ever


def test_messages_that_are_never_answered_leave_in_flight_at_their_deadline(servers, consume, monkeypatch, caplog):
    monkeypatch.setattr("nsq_fast.client.acknowledger.LOG_PAUSE", 600.0)

    def keep(consumer, message):
        message.enable_async()
        held.append(message)

    held, expired = [], []
    server = servers({"msg_timeout": 300})
    consumer = consume(keep, server)
    consumer.on_expired.connect(lambda _, message: expired.append(int(message.id, 16)), weak=False)
    conn = server.connection()
    conn.push(*range(10))
    conn.wait_for(lambda: len(held) == 10)
    assert consumer.total_in_flight == 10
    conn.wait_for(lambda: consumer.total_in_flight == 0)
    assert expired == list(range(10))
    stats = consumer.stats()
    assert (stats.totals.expired, stats.in_flight, stats.totals.finished) == (10, 0, 0)
    assert all(message.has_expired() for message in held)
    conn.push(10)
    conn.wait_for(lambda: len(held) == 11)
    held[0].finish()  # a late answer is sent, and counted once
    conn.wait_for(lambda: conn.answered(b"FIN") == [0])
    assert consumer.total_in_flight == 1
    conn.close()  # that of a lost connection counts until it expires
    again = server.connection(1)
    server.wait_for(lambda: expired == list(range(11)))
    server.wait_for(lambda: consumer.stats().orphaned == 0)
    again.wait_rdy(10)
    again.push(11)
    again.wait_for(lambda: len(held) == 12)
    with promptly():
        consumer.close(timeout=30)  # it waits for nothing that has expired
    assert expired == list(range(12))
    assert caplog.text.count("not answered before the msg_timeout was over") == 1, "however many follow soon"


def test_a_handler_that_does_not_end_is_sent_nothing_more_until_it_does(servers, consume):
    server, gate = servers({"msg_timeout": 300}), Event()
    consumer = consume(lambda c, m: gate.wait(), server)
    conn = server.connection()
    conn.push(1)
    conn.wait_rdy(0)
    conn.wait_for(lambda: consumer.stats().totals.expired == 1)
    assert conn.rdy == 0
    gate.set()
    conn.wait_for(lambda: conn.rdy)


def test_no_more_is_asked_for_than_handlers_begin_with_in_time_and_one_warning_says_so(servers, consume, caplog):
    def handler(consumer, message):
        gevent.sleep(0.2)  # sleep: a fifth of the timeout of a message

    server = servers({"msg_timeout": 1000})
    consume(handler, server, max_in_flight=100)
    conn = server.connection()
    conn.wait_rdy(100)
    conn.push(1, 2, 3)
    conn.wait_for(lambda: conn.rdy < 10)
    assert conn.rdy >= 1
    conn.wait_for(lambda: len(conn.answered(b"FIN")) == 3)
    for number in range(4, 8):
        conn.push(number)
        conn.wait_for(lambda number=number: number in conn.answered(b"FIN"))
    (warning,) = [record.getMessage() for record in caplog.records if "too slow" in record.getMessage()]
    assert "max_in_flight=100" in warning
    assert "msg_timeout=1 s" in warning


# The default of max_in_flight


def test_by_default_each_connection_has_one(servers):
    nsqds = [servers() for _ in range(3)]
    with Consumer("t", "c", [str(each.address) for each in nsqds], message_handler=ignore) as consumer:
        for each in nsqds:
            each.connection().wait_rdy(1)
        assert consumer.max_in_flight == consumer.stats().max_in_flight == 3
    for options in ({"concurrency": 4}, {"handler_threads": 4}):  # and there is one for each handler
        nsqd = servers()
        with Consumer("t", "c", str(nsqd.address), message_handler=ignore, **options) as consumer:
            nsqd.connection().wait_rdy(4)
            assert consumer.max_in_flight == 4


def test_a_number_below_that_of_the_connections_is_obeyed_and_one_warning_says_so(servers, caplog):
    nsqds = [servers() for _ in range(3)]
    addresses = [str(each.address) for each in nsqds]
    with Consumer("t", "c", addresses, message_handler=ignore, max_in_flight=2) as consumer:
        nsqds[0].wait_for(lambda: sum(each.is_connected for each in consumer.stats().connections) == 3)
        nsqds[0].wait_for(lambda: consumer.total_ready_count == 2)
        assert consumer.max_in_flight == 2
        consumer.max_in_flight = None
        for each in nsqds:
            each.connection().wait_rdy(1)
        assert consumer.max_in_flight == 3
    text = "max_in_flight=2 is less than the number of connections, 3"
    assert [text in record.getMessage() for record in caplog.records].count(True) == 1


@pytest.mark.parametrize(("max_in_flight", "seconds"), [(1, 120), (2, 60), (3, 30), (4, 30)])
def test_the_warning_says_how_long_the_last_of_many_turns_is_waited_for(servers, caplog, max_in_flight, seconds):
    addresses = [str(servers().address) for _ in range(5)]
    with Consumer("t", "c", addresses, message_handler=ignore, max_in_flight=max_in_flight):
        until(lambda: any(each.event == "max_in_flight_low" for each in caplog.records if hasattr(each, "event")))
    assert f"connections, 5: they take turns, and messages of the others wait for up to {seconds} s" in caplog.text
