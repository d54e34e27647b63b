"""Messages above max_frame_size: the rest goes on, a give-up policy gets them in the end, and nothing is lost."""

from __future__ import annotations

from contextlib import suppress

import gevent
import pytest
from gevent.event import Event
from support.http import ask
from support.scripted_nsqd import ScriptedNsqd, message_frame
from support.waiting import until

from nsq_fast import ColumnSubscription, Consumer
from nsq_fast.broker import NsqdServer
from nsq_fast.broker.options import NsqdOptions
from nsq_fast.client.give_up import PublishTo, WriteToFolder
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import MessageTooLarge, RemoteProtocolError
from nsq_fast.names import parse_address

LIMIT = 4096
LARGE = b"x" * 3_000_000


@pytest.fixture(params=["embedded", "original"])
def served(request, tmp_path):
    """An nsqd whose messages may be larger than the client's limit: (TCP address, HTTP client)."""
    if request.param == "original":
        server = request.getfixturevalue("real_nsqd")("-max-msg-size=10000000", "-max-body-size=20000000")
        yield server
        return
    server = NsqdServer(NsqdOptions(data_path=str(tmp_path), max_msg_size=10_000_000, max_body_size=20_000_000))
    server.start()
    yield server
    server.kill()


def publish(server, *bodies):
    for body in bodies:
        assert ask(server.http_address, "POST", "/pub?topic=t", body).body == b"OK"


def test_the_rest_goes_on_and_the_policy_gets_it_in_the_end(served, caplog):
    publish(served, b"one", LARGE, b"two")
    handled, given_up, errors = [], [], []

    def give_up(consumer, message):
        given_up.append(message)

    consumer = Consumer(
        "t", "c", str(served.tcp_address), message_handler=lambda c, m: handled.append(m.body), give_up=give_up,
        max_frame_size=LIMIT, max_tries=2, requeue_delay=0, max_in_flight=5,
    )  # fmt: skip

    def receiver(sender, message, error):
        errors.append((message.attempts, error))

    consumer.on_exception.connect(receiver)
    with consumer:
        until(lambda: given_up)
        publish(served, b"three")
        until(lambda: len(handled) == 3)
        stats = consumer.stats()
    assert set(handled) == {b"one", b"two", b"three"}
    (message,) = given_up
    assert (message.attempts, message.body, message.is_truncated, message.body_size) == (3, b"", True, len(LARGE))
    assert [attempts for attempts, _ in errors] == [1, 2]
    assert all(isinstance(error, MessageTooLarge) and f"max_frame_size={LIMIT}" in str(error) for _, error in errors)
    assert f"max_frame_size={LIMIT}" in caplog.text
    assert [connection.counters.received for connection in stats.connections] == [6]
    assert "disconnected" not in "".join(record.getMessage() for record in caplog.records if record.levelno > 20)


@pytest.mark.parametrize("kind", [WriteToFolder, PublishTo])
def test_policies_that_keep_the_body_leave_it_with_nsqd(served, kind, tmp_path):
    publish(served, LARGE)
    policy = WriteToFolder(tmp_path / "given-up") if kind is WriteToFolder else PublishTo("dead-letters")
    errors = []
    # A message that nsqd sends while the consumer closes comes back after its timeout only.
    options = {"max_tries": 1, "requeue_delay": 0, "max_in_flight": 5, "max_backoff_duration": 0, "msg_timeout": 1.0}
    consumer = Consumer(
        "t",
        "c",
        str(served.tcp_address),
        message_handler=lambda c, m: None,
        give_up=policy,
        max_frame_size=LIMIT,
        **options,
    )

    def receiver(sender, message, error):
        errors.append(message.attempts)

    consumer.on_exception.connect(receiver)
    with consumer:
        until(lambda: 3 in errors)
    received = []
    with Consumer("t", "c", str(served.tcp_address), message_handler=lambda c, m: received.append(m.body), max_tries=0):
        until(lambda: received)
    assert received == [LARGE]


def test_batches_and_iteration_never_see_it(served):
    publish(served, LARGE, *(b"%d" % number for number in range(20)))
    seen, given_up = [], []
    options = {"max_frame_size": LIMIT, "max_tries": 1, "requeue_delay": 0, "max_in_flight": 50}
    with Consumer(
        "t", "c", str(served.tcp_address), batch_handler=lambda c, messages: seen.extend(messages),
        give_up=lambda c, message: given_up.append(message), **options,
    ):  # fmt: skip
        until(lambda: given_up and len(seen) == 20)
    assert not any(message.is_truncated for message in seen)
    publish(served, LARGE, b"last")
    consumer = Consumer(
        "t", "c", str(served.tcp_address), give_up=lambda c, message: given_up.append(message), **options
    )
    bodies = []
    for message in consumer:
        bodies.append(message.body)
        if len(given_up) == 2:
            break
        publish(served, b"more")
    consumer.close()
    assert set(bodies) <= {b"last", b"more"}


def test_a_column_subscription_gives_it_back_and_goes_on(served, caplog, monkeypatch):
    monkeypatch.setattr("nsq_fast.columns.SKIPPED_DELAY_MS", 0)
    publish(served, b"one", LARGE, b"two")
    address = parse_address(str(served.tcp_address), 4150)
    # What nsqd sends once more while the subscription closes comes back after its timeout only.
    config = ConnectionConfig(max_frame_size=LIMIT, msg_timeout=1.0)
    with ColumnSubscription(address, "t", "c", config) as subscription:
        subscription.set_rdy(10)
        columns = subscription.fetch(10.0, at_least=2)
        assert columns.body in (b"onetwo", b"twoone")
        subscription.finish(columns.ids)
        until(lambda: subscription.fetch(0.01) is not None and caplog.text.count(f"max_frame_size={LIMIT}") >= 2)
    assert subscription.unfinished == []
    received = []
    with Consumer("t", "c", str(served.tcp_address), message_handler=lambda c, m: received.append(m.body), max_tries=0):
        until(lambda: received)
    assert received == [LARGE]


def test_a_server_that_ignores_rdy_is_left_before_it_takes_the_memory():
    server = ScriptedNsqd()
    errors, release = [], Event()
    consumer = Consumer("t", "c", str(server.address), message_handler=lambda c, m: release.wait(), max_in_flight=10)

    def receiver(sender, error):
        errors.append(error)

    consumer.on_error.connect(receiver)
    consumer.start(block=False)
    conn = server.connection()
    conn.wait_rdy(10)
    flood = b"".join(message_frame(number, b"x" * 100_000) for number in range(100))

    def send():
        with suppress(OSError):
            for _ in range(100):  # a gigabyte
                conn.send(flood)

    sender = gevent.spawn(send)
    until(lambda: errors)
    assert isinstance(errors[0], RemoteProtocolError)
    assert "the server ignores RDY" in str(errors[0])
    held = max(connection.in_flight + connection.unstarted for connection in consumer.stats().connections)
    assert held <= 250
    sender.kill()
    release.set()
    consumer.close(drain=False)
    server.stop()
