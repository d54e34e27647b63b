"""The drop-in producer: gnsq's arguments and errors, and no publish that hangs or poisons a connection."""

from __future__ import annotations

import pickle

import gevent
import pytest
from gevent.event import Event
from support.scripted_nsqd import frame
from support.waiting import WAIT, promptly, until

import nsq_fast
from nsq_fast import gnsq
from nsq_fast.gnsq.errors import NSQBadTopic, NSQException, NSQInvalid, NSQNoConnections


@pytest.fixture
def producer(nsq_broker):
    producer = gnsq.Producer(str(nsq_broker.nsqd.tcp_address))
    producer.start()
    yield producer
    producer.close()


def test_it_publishes_what_it_is_given(producer, nsq_broker):
    assert producer.publish("topic", data=b"one") == b"OK"
    assert producer.multipublish("topic", messages=(b"%d" % n for n in range(3))) == b"OK"
    results = [producer.publish("topic", b"x", raise_error=False) for _ in range(10)]
    results.append(producer.multipublish("topic", [b"a", b"b"], raise_error=False))
    gevent.joinall(results, raise_error=True)
    assert [result.get() for result in results] == [b"OK"] * 11
    assert nsq_broker.nsqd.nsqd.existing_topic("topic").message_count == 16


def test_attributes_have_gnsqs_names():
    producer = gnsq.Producer("host", 7, timeout=3)
    assert producer.nsqd_tcp_addresses == {"host:4150"}
    assert producer.max_backoff_duration == 7
    assert producer.conn_kwargs == {"timeout": 3}
    assert producer.connection_config.connect_timeout == 3
    assert not producer.is_running


@pytest.mark.parametrize("addresses", [(), []])
def test_it_needs_an_address(addresses):
    with pytest.raises(ValueError, match="nowhere"):
        gnsq.Producer(addresses)


def test_a_refused_publish_raises_the_servers_error_and_ours(scripted):
    scripted.replies[b"PUB"] = lambda conn, command: conn.send(frame(1, b"E_BAD_TOPIC no such name"))
    producer = gnsq.Producer(str(scripted.address))
    producer.start()
    with pytest.raises(NSQBadTopic, match="no such name") as caught:
        producer.publish("topic", b"x\n")  # the scripted nsqd reads lines
    assert isinstance(caught.value, nsq_fast.errors.PublishFailed)
    assert type(caught.value.__cause__) is NSQBadTopic
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, NSQBadTopic)
    assert str(again) == str(caught.value)
    result = producer.publish("topic", b"x\n", raise_error=False)
    with pytest.raises(NSQBadTopic):
        result.get(timeout=WAIT)
    assert isinstance(result.exception, NSQBadTopic)
    producer.close()


def test_a_negative_delay_is_invalid_and_harms_nobody(producer):
    with pytest.raises(NSQInvalid):
        producer.publish("topic", b"x", defer=-1000)
    assert producer.publish("topic", b"x", defer=1000) == b"OK"


@pytest.mark.parametrize(
    ("topic", "data", "error"),
    [("no topic", b"x", ValueError), ("topic", "text", TypeError), ("topic", b"", ValueError)],
)
def test_a_rejected_publish_does_not_poison_the_connection(producer, topic, data, error):
    producer.publish("topic", b"x")
    with pytest.raises(error):
        producer.publish(topic, data)
    with gevent.Timeout(WAIT):
        assert producer.publish("topic", b"x") == b"OK"


def test_before_its_start_and_after_its_end_it_raises():
    producer = gnsq.Producer("127.0.0.1:1")
    with pytest.raises(NSQException, match="not running"):
        producer.publish("topic", b"x")
    producer.close()
    with pytest.raises(NSQException, match="closed"):
        producer.start()


def test_no_connection_raises_and_never_hangs(closed_port):
    producer = gnsq.Producer(f"127.0.0.1:{closed_port}")
    producer.start()
    with pytest.raises(NSQNoConnections):
        producer.publish("topic", b"x", block=False)
    with pytest.raises(NSQNoConnections):
        producer.publish("topic", b"x", timeout=0)
    with promptly(), pytest.raises(NSQNoConnections):
        producer.publish("topic", b"x", timeout=0.05)
    with promptly(), pytest.raises(NSQNoConnections):
        producer.publish("topic", b"x", timeout=0.05, raise_error=False).get()
    producer.close(timeout=0.1)


def test_one_more_nsqd_can_be_added_while_it_runs(closed_port, nsq_broker):
    producer = gnsq.Producer(f"127.0.0.1:{closed_port}")
    producer.start()
    producer.connect_to_nsqd(*nsq_broker.nsqd.tcp_address)
    assert producer.publish("topic", b"x", timeout=5) == b"OK"
    producer.close()


def test_signals_tell_of_responses_and_of_the_end(nsq_broker):
    heard, closed = [], Event()
    producer = gnsq.Producer(str(nsq_broker.nsqd.tcp_address))
    producer.on_response.connect(lambda producer, response: heard.append(response), weak=False)
    producer.on_close.connect(lambda producer: closed.set(), weak=False)
    producer.start()
    producer.publish("topic", b"x")
    producer.close()
    assert producer.join()
    until(lambda: b"OK" in heard and closed.is_set())
