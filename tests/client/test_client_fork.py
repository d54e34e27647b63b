"""Forks: what a child gets of the parent's consumers and producers, with real processes.

Each program runs in an interpreter of its own, forks, and does something on
both sides; what counts is what the server has seen in the end. A parent that
a child has harmed shows it by a warning on stderr.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

import pytest
from support.processes import run_quietly

from nsq_fast import Consumer, LookupdHTTPClient, NsqdHTTPClient
from nsq_fast.broker import BrokerProcess

PLAIN = "from os import fork, waitpid\n"
GEVENT = "from gevent.os import fork, waitpid\n"


PATCHED = """
from gevent import monkey; monkey.patch_all()
from os import fork, waitpid
import gevent
gevent.get_hub().loop.install_sigchld()  # gevent does so behind the first fork: too late for a child that has ended
"""


WAYS = [pytest.param(PLAIN, id="os.fork"), pytest.param(GEVENT, id="gevent.fork"), pytest.param(PATCHED, id="patched")]


COMMON = """
import logging, os, re, sys
import gevent
from nsq_fast import Consumer, NsqdHTTPClient, Producer
from nsq_fast.errors import ConnectionLost
from nsq_fast.client.greenlets import loop_turns

logging.basicConfig(level=logging.WARNING)
TCP, HTTP, LOOKUPD = sys.argv[1:]

def in_child(work, *arguments):
    '''Fork; do the work in the child only. Returns what waits for the child.'''
    pid = fork()
    if pid:
        return lambda: os.waitstatus_to_exitcode(waitpid(pid, 0)[1])
    status = 1
    try:
        with gevent.Timeout(100):
            work(*arguments)
        status = 0
    except BaseException:
        logging.exception("the child failed")
    finally:
        os._exit(status)
"""


PUBLISH = """
def work(producer):
    assert producer.is_running and not producer.is_connected
    assert producer.stats()["pending"] == 0
    producer.publish("t", b"child")
    producer.multipublish("t", [b"child many"] * 3)
    assert producer.is_connected
    producer.close()
    assert not producer.is_running

for options in ({}, {"linger": 0.05}, {"coalesce": True}):
    producer = Producer(TCP, connections_per_nsqd=1, **options)
    producer.start()
    producer.publish("t", b"before")
    results = [producer.publish_nowait("t", b"pending %d" % n) for n in range(50)]
    wait = in_child(work, producer)
    producer.publish("t", b"parent")
    assert wait() == 0
    gevent.joinall([gevent.spawn(producer.publish, "t", b"parent after") for _ in range(3)], raise_error=True)
    assert {result.get(timeout=5) for result in results} == {b"OK"}
    producer.close()
"""


START_IN_CHILD = """
def handle(consumer, message):
    seen.append(message.body)
    if len(seen) == 20:
        consumer.close()

def work(consumer):
    consumer.start()
    assert sorted(seen) == sorted(b"%d" % n for n in range(20))

for address in (
    {"nsqd_tcp_addresses": TCP},
    {"lookupd_http_addresses": LOOKUPD},
    {"topic": ["t", "u"], "nsqd_tcp_addresses": TCP},
    {"topic": re.compile("t"), "lookupd_http_addresses": LOOKUPD},
):
    seen = []
    consumer = Consumer(**{"topic": "t", "channel": "c", **address}, message_handler=handle, max_in_flight=5)
    with Producer(TCP) as producer:
        for first, topic in enumerate(consumer.topics or ("t",)):
            producer.multipublish(topic, [b"%d" % n for n in range(first, 20, max(1, len(consumer.topics)))])
    assert in_child(work, consumer)() == 0
    assert seen == [] and not consumer.is_running
"""


STARTED_BEFORE = """
from gevent.socket import wait_read
seen, held = [], []
parent_is_silent, tell = os.pipe()
begun = gevent.event.Event()

def handle(consumer, message):
    if message.body == b"slow":
        held.append(message)
        begun.set()
        gevent.sleep(0.2)  # sleep: the parent's handler runs while it forks
    seen.append(message.body)
    producer.publish("seen", b"%d %s" % (os.getpid(), message.body))

consumer = Consumer("t", "c", TCP, message_handler=handle, max_in_flight=50, max_tries=1)
producer = Producer(TCP)
producer.start()
producer.multipublish("t", [b"slow", *[b"first"] * 20])
consumer.start(block=False)
begun.wait()

def work():
    assert not consumer.is_running and consumer.join(0) is False
    assert consumer.stats().in_flight == 0
    try:
        held[0].finish()
    except ConnectionLost as error:
        assert "process" in str(error), error
    else:
        raise AssertionError("the child answered the parent's message")
    wait_read(parent_is_silent)  # its handlers have ended, and it takes none of what is published here
    assert seen == []
    consumer.start(block=False)
    producer.multipublish("t", [b"second"] * 20)
    while len(seen) < 20:
        gevent.sleep(0.01)  # sleep: looks again and again
    consumer.close()
    assert consumer.join(5) and set(seen) == {b"second"}
    producer.close()

wait = in_child(work)
while len(seen) < 21:
    gevent.sleep(0.01)  # sleep: looks again and again
consumer.pause()
client = NsqdHTTPClient.from_url(HTTP)

def is_ready(topic="t"):
    (found,) = client.stats(topic=topic)["topics"]
    return any(each["ready_count"] for channel in found["channels"] for each in channel["clients"])

while is_ready():
    gevent.sleep(0.01)  # sleep: looks again and again
os.write(tell, b"x")
assert wait() == 0
assert consumer.is_running
consumer.close()
producer.close()
"""


BYSTANDERS = """
client = NsqdHTTPClient.from_url(HTTP)
client.create_topic("t")
consumer = Consumer("t", "c", lookupd_http_addresses=LOOKUPD, message_handler=lambda consumer, message: None,
                    lookupd_poll_interval=0.1)
by_lookup, producer = Producer(lookupd_http_addresses=LOOKUPD), Producer(TCP)
consumer.start(block=False)
by_lookup.start()
producer.start()
result = producer.publish_nowait("t", b"x")
for _ in range(30):  # at any moment of a start
    assert in_child(gevent.sleep, 0.02)() == 0  # sleep: what has survived the fork would run
    loop_turns().wait()
assert result.get() == b"OK"
while not any(subscriber.is_connected for subscriber in consumer.subscribers):
    gevent.sleep(0.01)  # sleep: looks again and again

def work():
    assert client.ping() == b"OK"
    gevent.sleep(0.5)  # sleep: some polls, if anything still polled
    assert consumer.subscribers == []

wait = in_child(work)
for _ in range(20):
    assert client.ping() == b"OK"
    gevent.sleep(0.02)  # sleep: requests that are spread over the time of the child
assert wait() == 0
assert [subscriber.is_connected for subscriber in consumer.subscribers] == [True]
for each in (consumer, by_lookup, producer):
    each.close()
"""


ITERATED = """
producer = Producer(TCP)
producer.start()
producer.multipublish("t", [b"%d" % n for n in range(10)])
with Consumer("t", "c", TCP, max_in_flight=10) as consumer:
    for number, message in enumerate(consumer):
        if number == 3:
            break
    messages = iter(consumer)
    next(messages)
    assert in_child(lambda: list(messages) == [] or sys.exit("the child got messages"))() == 0
    for number, message in zip(range(5), messages):
        pass
producer.close()
"""


IN_A_HANDLER = """
import multiprocessing
handled = []

def work():
    assert not consumer.is_running
    gevent.sleep(0.1)  # sleep: the hub runs in the child
    producer.publish("seen", b"child")
    producer.close()

def handle(consumer, message):
    handled.append(message.body)
    producer.publish("seen", message.body)
    if message.body == b"fork":
        assert in_child(work)() == 0
        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        process.join()
        assert process.exitcode == 0

consumer = Consumer("t", "c", TCP, message_handler=handle, max_in_flight=10)
producer = Producer(TCP)
producer.start()
producer.multipublish("t", [b"first", b"fork", *[b"rest"] * 8])
consumer.start(block=False)
while len(handled) < 10:
    gevent.sleep(0.01)  # sleep: looks again and again
consumer.close()
assert consumer.stats().totals.requeued == 0 and consumer.stats().totals.answers_failed == 0
producer.close()
"""


OTHER_THREAD = """
import threading
published, go_on = threading.Event(), threading.Event()
producer = None

def publish():
    global producer
    producer = Producer(TCP)
    producer.start()
    producer.publish("t", b"thread")
    published.set()
    while not go_on.is_set():
        gevent.sleep(0.01)  # sleep: looks again and again
    producer.publish("t", b"thread after")
    producer.close()

thread = threading.Thread(target=publish)
thread.start()
published.wait()
wait = in_child(lambda: producer.publish("t", b"child"))
assert wait() == 0
go_on.set()
thread.join()
"""


@pytest.fixture(scope="module")
def running() -> Iterator[BrokerProcess]:
    with BrokerProcess() as process:
        yield process


@pytest.fixture
def broker(running: BrokerProcess) -> Iterator[BrokerProcess]:
    """It has no topics, and forgets those of the test."""
    yield running
    with NsqdHTTPClient(*running.nsqd.http) as nsqd, LookupdHTTPClient(*running.lookupd.http) as lookupd:
        for topic in nsqd.stats()["topics"]:
            nsqd.delete_topic(topic["topic_name"])
            lookupd.delete_topic(topic["topic_name"])


def run(broker: BrokerProcess, *parts: str) -> None:
    program = "".join((parts[0], COMMON, *parts[1:]))
    addresses = [str(broker.nsqd.tcp), f"http://{broker.nsqd.http}", f"http://{broker.lookupd.http}"]
    run_quietly(program, *addresses)


def stored(broker: BrokerProcess, topic: str) -> Counter[bytes]:
    """What was published to a topic that nobody has consumed."""
    with NsqdHTTPClient(*broker.nsqd.http) as client:
        (found,) = client.stats(topic=topic)["topics"]
    with Consumer(topic, "all", [broker.nsqd.tcp], max_in_flight=100) as consumer:
        return Counter(message.body for message in islice(consumer, found["depth"]))


@pytest.mark.parametrize("way", WAYS)
def test_a_producer_publishes_on_both_sides(broker: BrokerProcess, way: str) -> None:
    run(broker, way, PUBLISH)
    once = {b"before": 1, b"child": 1, b"child many": 3, b"parent": 1, b"parent after": 3}
    once |= {b"pending %d" % number: 1 for number in range(50)}
    assert stored(broker, "t") == {body: 3 * count for body, count in once.items()}


@pytest.mark.parametrize("way", WAYS)
def test_a_consumer_made_before_the_fork_starts_in_the_child(broker: BrokerProcess, way: str) -> None:
    run(broker, way, START_IN_CHILD)


@pytest.mark.parametrize("way", WAYS)
def test_a_consumer_started_before_the_fork_is_the_parents(broker: BrokerProcess, way: str) -> None:
    run(broker, way, STARTED_BEFORE)
    seen = [body.split() for body in stored(broker, "seen").elements()]
    assert Counter(body for _, body in seen) == {b"slow": 1, b"first": 20, b"second": 20}
    assert len({pid for pid, body in seen if body != b"second"}) == 1
    assert len({pid for pid, _ in seen}) == 2


@pytest.mark.parametrize("way", WAYS)
def test_a_child_is_silent_and_shares_no_connection_of_lookup_or_http(broker: BrokerProcess, way: str) -> None:
    run(broker, way, BYSTANDERS)


@pytest.mark.parametrize("way", WAYS)
def test_a_loop_over_messages_ends_in_the_child(broker: BrokerProcess, way: str) -> None:
    run(broker, way, ITERATED)


@pytest.mark.parametrize("way", WAYS)
def test_a_handler_may_fork(broker: BrokerProcess, way: str) -> None:
    run(broker, way, IN_A_HANDLER)
    assert stored(broker, "seen") == {b"first": 1, b"fork": 1, b"rest": 8, b"child": 2}


def test_a_producer_of_another_thread_publishes_in_the_child(broker: BrokerProcess) -> None:
    run(broker, PLAIN, OTHER_THREAD)
    assert stored(broker, "t") == {b"thread": 1, b"child": 1, b"thread after": 1}


IN_A_LOOKUP = """
import os, threading
from nsq_fast.client import loop

begun, ended = threading.Event(), threading.Event()

def name_server(*arguments):
    begun.set()
    ended.wait({seconds})
    ended.set()
    return []

def fork(failed):
    child = os.fork()
    if child == 0:
        loop.getaddrinfo = lambda *arguments: []
        loop.look_up("localhost", 1)  # nothing of the parent's keeps it
        os._exit(failed())
    assert os.waitpid(child, 0)[1] == 0

loop.getaddrinfo = name_server
loop.FORK_PATIENCE = {patience}
thread = threading.Thread(target=loop.look_up, args=("localhost", 1))
thread.start()
begun.wait()
fork(lambda: {failed})
ended.set()
thread.join()
fork(lambda: False)  # in the parent, too, nothing is left of it
"""


@pytest.mark.fork
@pytest.mark.parametrize(
    ("seconds", "patience", "failed"),
    [(0.3, 60, "not ended.is_set()"), (None, 0.1, "ended.is_set()")],
    ids=["waits for it", "not for ever"],
)
def test_a_fork_waits_for_a_lookup(seconds: float | None, patience: float, failed: str) -> None:
    run_quietly(IN_A_LOOKUP.format(seconds=seconds, patience=patience, failed=failed))
