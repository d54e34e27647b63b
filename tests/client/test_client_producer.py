"""The producer against an nsqd that answers as each test says: commands, batches, results, bodies, closing."""

from __future__ import annotations

import logging
import os
import pickle
from collections import deque
from math import inf

import gevent
import pytest
from gevent.event import Event
from hypothesis import given
from hypothesis import strategies as st
from support.partitions import topology
from support.publishing import REDESIGNED, agree, numbers, receipt, refuse, stay_mute
from support.scripted_nsqd import heard
from support.waiting import WAIT, holds, until
from support.wire import WireClient, frame

from nsq_fast import Producer, Receipt, errors
from nsq_fast._publish_path import COUNT_BYTES, LENGTH_BYTES, take_command
from nsq_fast.broker import BrokerProcess
from nsq_fast.client.publishes import Publish
from nsq_fast.names import Address
from nsq_fast.protocol.publishing import PLAIN, may_have_ended_server
from nsq_fast.protocol.topology import Nsqd, Topology

OK = frame(0, b"OK")


def names(commands):
    return [command.name for command in commands]


def results_of(results):
    """Which of them succeeded."""
    gevent.joinall(results, timeout=WAIT)
    return [result.successful() for result in results]


# What goes over the wire


def test_a_batch_above_max_body_size_is_cut_in_order(publishing):
    server, sender = publishing(max_body_size=100, max_msg_size=90)
    bodies = [bytes([number]) * size for number, size in enumerate([30, 30, 30, 90, 1, 2, 3, 60])]
    assert sender.multipublish("t", iter(bodies)) == b"OK"
    assert server.bodies == bodies
    assert [len(command.bodies) for command in server.commands] == [2, 1, 1, 4]
    assert all(len(command.body) <= 100 for command in server.commands)


def test_a_response_nobody_asked_for_costs_the_connection_and_no_more(publishing):
    """And the failed FIN of somebody else fails no publish."""
    failed = frame(1, b"E_FIN_FAILED of somebody else")
    server, sender = publishing(lambda peer, command: peer.send(failed + OK * 3))
    assert [sender.publish("t", body) for body in numbers(5)] == [b"OK"] * 5
    assert set(server.bodies) == set(numbers(5))


def test_results_are_awaited_together(publishing):
    def answer(peer, command):
        peer.frame(1, b"E_INVALID_JSON_HEADER no") if command.body == b"1" else peer.ok()

    server, sender = publishing(answer)
    results = [sender.publish("t", body, raise_error=False) for body in numbers(3)]
    results += [sender.publish_nowait("t", b"3"), sender.multipublish("t", [b"4", b"5"], raise_error=False)]
    assert len(list(gevent.iwait(results, timeout=WAIT))) == 5
    assert results_of(results) == [True, False, True, True, True]
    assert isinstance(results[1].exception, errors.PublishFailed)
    assert len(server.peers) == 1, "such an error leaves the connection open"


def test_signals(publish_nsqd):
    def answer(peer, command):
        peer.ok() if command.body == b"good" else peer.frame(1, b"E_EXT_NOT_SUPPORT no")

    heard = []
    sender = Producer([publish_nsqd(answer).address])
    sender.on_response.connect(lambda who, response: heard.append((who, response)), weak=False)
    sender.on_error.connect(lambda who, error: heard.append((who, type(error))), weak=False)
    sender.on_close.connect(lambda who: heard.append((who, "close")), weak=False)
    with sender:
        sender.publish("t", b"good")
        with pytest.raises(errors.PublishFailed):
            sender.publish("t", b"bad")
    assert heard == [(sender, b"OK"), (sender, errors.ExtNotSupported), (sender, "close")]


# Lingering and coalescing: single publishes that leave together, and end one by one


def test_publishes_of_a_topic_leave_together(publishing):
    server, sender = publishing(linger=0.01)
    results = [sender.publish_nowait(f"t{number % 2}", b"%d" % number) for number in range(10)]
    assert all(results_of([*results, sender.publish_nowait("alone", b"x")]))
    assert sorted(names(server.commands)) == ["MPUB", "MPUB", "PUB"]
    assert server.commands[0].bodies == [b"0", b"2", b"4", b"6", b"8"]
    assert sender.stats()["held"] == 0


@pytest.mark.parametrize(
    ("options", "bodies", "sizes"),
    [
        ({"linger_max_messages": 4}, [b"x"] * 8, [4, 4]),
        ({"linger_max_bytes": 100}, [b"x" * 30] * 3, [3]),
        ({"linger": 0.01, "max_body_size": 100, "max_msg_size": 90}, [b"x" * 60, b"y" * 60, b"z" * 10], [1, 2]),
    ],
    ids=["messages", "bytes", "max_body_size"],
)
def test_a_full_batch_leaves_at_once(publishing, options, bodies, sizes):
    server, sender = publishing(**{"linger": 60, **options})
    assert all(results_of([sender.publish_nowait("t", body) for body in bodies]))
    assert server.bodies == bodies
    assert [len(command.bodies) for command in server.commands] == sizes


def test_deferred_publishes_and_batches_do_not_linger(publishing):
    server, sender = publishing(linger=60)
    assert sender.publish("t", b"x", defer=10) == b"OK"
    assert sender.multipublish("t", [b"y", b"z"]) == b"OK"
    assert names(server.commands) == ["DPUB", "MPUB"]


def test_a_batch_is_tried_again_without_those_whose_time_is_over(publishing):
    def answer(peer, command):
        if len(server.commands) == 2:
            assert is_over.wait(WAIT)
            refuse(peer, b"E_MPUB_FAILED busy")
        peer.ok()

    is_over = Event()
    server, sender = publishing(answer, linger=0.01)
    assert sender.publish("t", b"first") == b"OK"  # so that it is connected
    short = sender.publish_nowait("t", b"short", timeout=1.0)
    long = [sender.publish_nowait("t", body) for body in (b"a", b"b")]
    with pytest.raises(errors.PublishTimeout) as caught:
        short.get(timeout=WAIT)
    assert caught.value.possibly_stored
    is_over.set()
    assert [result.get(timeout=WAIT) for result in long] == [b"OK", b"OK"]
    assert [command.bodies for command in server.commands[1:]] == [[b"short", b"a", b"b"], [b"a", b"b"]]
    assert sender.stats()["held"] == 0


def test_a_deadline_that_comes_while_it_lingers(publishing):
    server, sender = publishing(linger=1.0)
    assert sender.publish("t", b"first", defer=1) == b"OK"  # so that it is connected
    with pytest.raises(errors.PublishTimeout) as caught:
        sender.publish("t", b"x", timeout=0.02)
    assert not caught.value.possibly_stored
    assert sender.publish("t", b"y") == b"OK"
    assert server.bodies == [b"first", b"y"]
    assert sender.stats()["held"] == 0


def test_what_is_published_in_one_turn_leaves_together(publishing):
    server, sender = publishing(coalesce=True)
    sender.publish("t", b"x")
    assert all(results_of([sender.publish_nowait("t", body) for body in numbers(10)]))
    assert [len(command.bodies) for command in server.commands] == [1, 1, 9]
    for _ in range(3):
        sender.publish("t", b"alone")
    assert names(server.commands) == ["PUB", "PUB", "MPUB", "PUB", "PUB", "PUB"]


@pytest.mark.parametrize("options", [{"linger": 0.01}, {"coalesce": True}])
def test_nothing_overtakes_what_gathers(publishing, options):
    server, sender = publishing(**options)
    sender.publish("other", b"so that it is connected")
    server.commands.clear()
    results = [sender.publish_nowait("t", body) for body in numbers(3)]
    results.append(sender.multipublish("t", [b"3", b"4"], raise_error=False))
    results += [sender.publish_nowait("t", b"5"), sender.publish_nowait("t", b"6", defer=10)]
    assert all(results_of(results))
    assert server.bodies == numbers(7)


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 10), st.integers(1, 200), st.integers(60, 200)
)
def test_a_queue_is_taken_in_order_and_within_the_limits(sizes, most, enough, limit):
    bodies = [b"%d" % number + bytes(size) for number, size in enumerate(sizes)]
    queue = deque(Publish(None, body, inf, PLAIN) for body in bodies)
    taken = []
    while queue:
        command = [publish.body for publish in take_command(queue, most, enough, limit)]
        assert 1 <= len(command) <= most
        total = COUNT_BYTES + sum(LENGTH_BYTES + len(body) for body in command)
        assert total <= limit or len(command) == 1
        assert total - LENGTH_BYTES - len(command[-1]) < enough or len(command) == 1
        taken += command
    assert taken == bodies


def test_what_cannot_have_ended_a_server_is_not_suspected():
    for name, value in (("is_abrupt", False), ("was_first", False), ("outcome_unknown", False), ("waited", 2.0)):
        error = errors.ConnectionLost("closed by the server")
        error.is_abrupt = error.was_first = error.outcome_unknown = True
        assert may_have_ended_server(error)
        setattr(error, name, value)
        assert not may_have_ended_server(error), name


# Callers whose publishes were stored together, or that are interrupted


@pytest.mark.parametrize("linger", [0.0, 0.001])
def test_one_that_was_interrupted_keeps_nobody_waiting(publishing, linger):
    server, producer = publishing(linger=linger)
    producer.publish("t", b"first")
    go = Event()
    server.answer = lambda peer, command: (go.wait(), peer.ok())
    callers = [gevent.spawn(producer.publish, "t", b"x") for _ in range(5)]
    server.wait_commands(2)
    callers[0].kill()
    callers[3].kill(block=False)
    go.set()
    gevent.joinall(callers, timeout=WAIT)
    assert [caller.value for caller in (callers[1], callers[2], callers[4])] == [b"OK"] * 3
    assert producer.publish("t", b"last") == b"OK"
    assert producer.stats()["held"] == 0


def test_a_close_waits_for_no_publish_whose_caller_was_interrupted(publishing):
    server, producer = publishing(lambda peer, command: None, publish_timeout=600.0)
    callers = [gevent.spawn(producer.publish, "t", b"%d" % number) for number in range(3)]
    until(lambda: len(server.bodies) == 3)
    callers[0].kill()
    closing = gevent.spawn(producer.close)
    until(lambda: not producer.is_running)
    callers[1].kill()
    assert not closing.ready()  # one is waited for
    callers[2].kill()
    closing.get(timeout=WAIT)


@pytest.mark.parametrize("callers", [1, 3])
def test_a_switch_without_a_reason_ends_no_publish(publishing, callers):
    withheld = []
    server, producer = publishing(lambda peer, command: withheld.append(peer))
    waiting = [gevent.spawn(producer.publish, "t", body) for body in numbers(callers)]
    waiting.append(gevent.spawn(producer.multipublish, "t", numbers(3)))
    server.wait_commands(len(waiting))
    for each in waiting * 2:
        gevent.get_hub().loop.run_callback(each.switch)
        gevent.sleep(0)
    assert not any(each.ready() for each in waiting)
    for peer in withheld:
        peer.ok()
    assert [each.get(timeout=WAIT) for each in waiting] == [b"OK"] * len(waiting)


def test_who_publishes_in_a_loop_lets_others_run():
    """To a server in another process, which may answer before the caller falls asleep."""
    turns = 0

    def take_turns():
        nonlocal turns
        while True:
            turns += 1
            gevent.sleep(0)

    with BrokerProcess() as broker, Producer([str(broker.nsqd.tcp)]) as producer:
        producer.publish("t", b"first")
        other = gevent.spawn(take_turns)
        for _ in range(640):
            producer.publish("t", b"x")
        other.kill()
    assert turns >= 9


# Closing


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_whoever_closes_while_another_does_waits_for_the_same_end(publishing, timeout):
    server, sender = publishing(stay_mute)
    result = sender.publish_nowait("t", b"x")
    server.wait_commands(1)
    closing = [gevent.spawn(sender.close, timeout) for _ in range(3)]
    gevent.joinall(closing, timeout=0.05)
    assert not sender.join(timeout=0)
    assert not any(each.ready() for each in closing)
    server.peers[0].ok()
    gevent.joinall(closing, timeout=WAIT, raise_error=True)
    assert sender.join(timeout=0)
    assert result.get(timeout=0) == b"OK"


# Compressed bodies, a result for each message of a batch, and what publishes to the redesigned NSQ fail with


BODY = b"a body that repeats itself, " * 100
CODECS = {"gzip": "1", "snappy": "2", "lz4": "3"}
NOISE = os.urandom(3000)
LONG = 600.0
"""Seconds: the timeout of publishes that are expected to fail long before it."""
LARGEST = 10_000


@pytest.fixture
def producer_of(lookups, new_producer):
    """A factory of started producers of the cluster."""
    return lambda **options: new_producer(coalesce=True, lookupd_refresh_interval=0.05, **lookups, **options)


def stored(cluster, topic="t", partitions=1):
    return [record for number in range(partitions) for record in cluster.partition(topic, number).log.read(0, 10**6)]


# Compression


@pytest.mark.parametrize(("codec", "ordered"), [("gzip", True), ("snappy", False), ("lz4", True)])
def test_what_is_compressed_arrives_as_it_was(cluster, lookups, producer_of, consume, codec, ordered):
    cluster.create_topic("t", 1, 1, ext=True, ordered=ordered, channels=["c"])
    producer = producer_of(body_compression=codec)
    producer.publish("t", b"first")
    receipt_of_one = producer.publish("t", BODY, headers={"k": "v"}, trace_id=9)
    producer.publish("t", b"small")
    producer.publish("t", NOISE)
    producer.multipublish("t", [BODY, b"small", BODY * 2], tag="red")
    pipelined = [producer.publish_nowait("t", BODY) for _ in range(3)]
    assert [result.get(timeout=WAIT) for result in pipelined] == [b"OK"] * 3
    records = stored(cluster)
    sizes = [len(record.body) for record in records]
    assert sizes[:4:3] == [5, len(NOISE)]  # what is small, or does not become smaller, is sent as it is
    assert all(size < len(BODY) / 3 for size in (sizes[1], sizes[4], sizes[6], sizes[7]))
    assert isinstance(receipt_of_one, Receipt)
    assert (receipt_of_one.internal_id, receipt_of_one.size) == (records[1].internal_id, records[1].size)
    for record in records:
        if record.header and b"compress" in record.header:
            assert b'"nsq.client.compress":"%s"' % CODECS[codec].encode() in record.header
    seen = []
    handle = lambda _, message: seen.append((message.body, dict(message.headers)))  # noqa: E731
    consume(handler=handle, topic="t", channel="c", **lookups)
    until(lambda: len(seen) == len(records))
    bodies = [b"first", BODY, b"small", NOISE, BODY, b"small", BODY * 2, BODY, BODY, BODY]
    assert sorted(body for body, _ in seen) == sorted(bodies)
    assert ("v", "9") in [(headers.get("k"), headers.get("##trace_id")) for _, headers in seen]


def test_what_cannot_be_compressed_is_sent_as_it_is(leading, publishing, caplog):
    original, sender = publishing(body_compression="snappy")
    assert sender.publish("t", BODY) == b"OK"
    assert original.bodies == [BODY]
    with caplog.at_level(logging.WARNING):  # a topic without headers
        nsqd, sender, lookup = leading(body_compression="gzip")
        sender.publish("t", b"first")
        sender.publish("t", BODY)
        sender.multipublish("t", [BODY, BODY])
    assert nsqd.bodies == [b"first", BODY, BODY, BODY]
    assert caplog.text.count("bodies are not compressed") == 1
    lookup.tell(topology({0: nsqd}, extend_support=True))
    sender.publish("t", BODY, headers={"nsq.client.compress": "2", "nsq.msg.size": "5000"})
    assert nsqd.bodies[-1] == BODY, "it is compressed already"
    nsqd.answer = lambda peer, command: peer.frame(0, receipt(1, 0, 0, 2 * (30 + len(BODY))))
    receipts = sender.multipublish("t", [BODY, BODY], trace_id=[1, 2])
    assert [each.trace_id for each in receipts] == [1, 2]
    assert nsqd.bodies[-2:] == [BODY, BODY], "a traced batch"


# A result for each message of a batch


def test_the_error_of_a_batch_says_what_became_of_each_message(leading):
    def answer(peer, command):
        if b"worse" in command.body:
            refuse(peer, b"E_BAD_MESSAGE no")
        peer.frame(1, b"E_PUB_FAILED no space") if b"bad" in command.bodies[0] else agree(peer, command)

    _, sender, _ = leading(answer, max_body_size=64, max_publish_attempts=1)
    with pytest.raises(errors.PublishFailed) as caught:
        sender.multipublish("t", [b"1" * 20, b"2" * 20, b"bad" * 7, b"4" * 20, b"5" * 20])
    results = caught.value.results
    assert [result if result == b"OK" else type(result).__mro__[1] for result in results] == [
        b"OK", b"OK", errors.PublishRefused, errors.PublishRefused, b"OK",
    ]  # fmt: skip
    assert caught.value.possibly_stored
    again = pickle.loads(pickle.dumps(caught.value))
    assert len(again.results) == 5
    assert again.results[2] is again
    with pytest.raises(errors.PublishFailed) as caught:
        sender.multipublish("t", [b"1" * 40, b"worse" * 8, b"3" * 40])
    assert isinstance(caught.value.__cause__, errors.BadMessage)
    assert caught.value.possibly_stored, "the rest of the batch"
    with pytest.raises(errors.PublishFailed) as caught:  # several commands, and none is stored
        sender.multipublish("t", [b"worse" * 5] * 4)
    assert [isinstance(result, errors.PublishRefused) for result in caught.value.results] == [True] * 4
    assert not caught.value.possibly_stored
    with pytest.raises(errors.PublishFailed) as caught:  # one command fails as a whole
        sender.multipublish("t", [b"bad", b"b", b"c"], raise_error=False).get(timeout=WAIT)
    assert caught.value.results == [caught.value] * 3
    with pytest.raises(errors.PublishFailed) as caught:
        sender.publish("t", b"bad")
    assert caught.value.results is None


def test_a_batch_of_which_a_part_was_never_sent_says_that_the_rest_is_stored(leading):
    def store_one_and_leave(peer, command):
        peer.ok()
        nsqd.stop()

    nsqd, sender, lookup = leading(max_body_size=64, publish_timeout=60.0)
    sender.publish("t", b"first")
    nsqd.answer = store_one_and_leave
    result = sender.multipublish("t", [b"1" * 40, b"2" * 40], key="k", timeout=1.0, raise_error=False)
    with pytest.raises(errors.PublishFailed) as caught:
        result.get(timeout=WAIT)
    assert caught.value.possibly_stored
    assert caught.value.results[0] == b"OK"
    assert isinstance(caught.value.results[1], errors.NsqError)
    assert lookup.refreshed


# What lookup and servers say


def test_a_topic_that_does_not_exist_is_an_error_long_before_the_timeout(cluster, producer_of):
    def is_stored():
        try:
            return producer.publish("absent", b"x", timeout=LONG) == b"OK"
        except errors.NoNsqd:
            return False

    producer = producer_of()
    for arguments in ({}, {"key": "k"}, {"partition": 0}):
        with pytest.raises(errors.NoNsqd, match=r"topic 'absent' does not exist \(lookup says: Key not found\)"):
            producer.publish("absent", b"x", timeout=LONG, **arguments)
    with pytest.raises(errors.NoNsqd, match="create it, or mend the name"):
        producer.multipublish("absent", [b"x", b"y"], timeout=LONG)
    assert producer.stats()["held"] == producer.stats()["waiting"] == 0
    cluster.create_topic("absent", 2, 1, channels=["c"])
    until(is_stored)


UNKNOWN = Topology(problem="TOPIC_NOT_FOUND")
SOME_NODE = Nsqd(Address("127.0.0.1", 1), version=REDESIGNED)


@pytest.mark.parametrize(
    ("nodes", "said"),
    [((), UNKNOWN), ((SOME_NODE,), Topology()), ((SOME_NODE,), Topology(problem="Topic has no channel"))],
    ids=["no nsqd is there yet", "lookup says nothing", "it exists"],
)
def test_what_may_be_possible_soon_is_waited_for(lookup_producer, monkeypatch, caplog, nodes, said):
    monkeypatch.setattr("nsq_fast.client.routing.ABSENT_AFTER", 0.0)
    sender, lookup = lookup_producer()
    result = sender.publish_nowait("t", b"x", timeout=LONG)
    lookup.listed_nodes = nodes
    lookup.tell(said, "t")
    until(lambda: "publishes to topic t wait for an nsqd" in caplog.text)
    assert not result.ready()
    lookup.listed_nodes = (SOME_NODE,)
    lookup.tell(UNKNOWN, "t")
    with pytest.raises(errors.NoNsqd, match="'t' does not exist"):
        result.get(timeout=WAIT)


def test_a_topic_that_nobody_has_yet_goes_to_original_nsqds_and_no_lack_is_told(lookup_producer, publish_nsqd, caplog):
    nsqd = publish_nsqd()
    sender, lookup = lookup_producer()
    lookup.listed_nodes = (Nsqd(nsqd.address, version="1.3.0"), SOME_NODE)
    result = sender.publish_nowait("t", b"x", timeout=LONG)
    lookup.tell(UNKNOWN, "t")
    assert result.get(timeout=WAIT) == b"OK"
    assert "wait for an nsqd" not in caplog.text
    assert sender.stats()["connected"] == [str(nsqd.address)]


def test_an_outage_of_lookup_is_told_once_however_often_publishes_ask(lookup_producer, monkeypatch, caplog):
    sender, lookup = lookup_producer()
    asked = []

    async def nodes(timeout=None):
        asked.append(timeout)
        raise errors.LookupFailed("nobody answered")

    monkeypatch.setattr(lookup, "nodes", nodes)
    result = sender.publish_nowait("t", b"x", timeout=LONG)
    for count in range(1, 4):
        lookup.tell(UNKNOWN, "t")
        until(lambda count=count: len(asked) >= count)
    assert [record.message for record in caplog.records] == ["publishes to topic t wait for an nsqd: nobody answered"]
    assert not result.ready()


def test_topics_that_are_published_to_no_more_are_forgotten_and_found_again(leading, monkeypatch):
    """But not one whose publish waits to be sent again."""

    def refuse_the_first(peer, command):
        is_first = [each.topic for each in nsqd.commands].count(command.topic) == 1
        error = b"E_PUB_FAILED no space" if command.topic == "waits" else b"E_FAILED_ON_NOT_LEADER "
        peer.frame(1, error) if is_first else peer.ok()

    monkeypatch.setattr("nsq_fast.client.routing.MAX_TOPICS", 10)  # a tenth of that is kept in any case
    nsqd, sender, lookup = leading(refuse_the_first, retry_base_delay=0.5)
    refusals = heard(sender)
    for topic in ("a", "b"):
        assert sender.publish(topic, b"x", key="k") == b"OK"
    refusals.clear()
    waits = sender.publish_nowait("waits", b"x")
    until(lambda: refusals)
    for _ in range(3):  # the first answer says nothing: they were used since the one before
        for topic in set(lookup.added):
            lookup.tell(lookup.answer, topic)
    assert lookup.added == ["waits"]
    assert waits.get(timeout=WAIT) == b"OK"
    for topic in ("a", "b"):
        assert sender.publish(topic, b"y", key="k") == b"OK"
    assert {"a", "b"} <= set(lookup.added)


def test_a_topic_that_is_forgotten_while_nsqds_are_asked_for_needs_none_of_them(
    lookup_producer, publish_nsqd, monkeypatch
):
    monkeypatch.setattr("nsq_fast.client.routing.MAX_TOPICS", 0)
    nsqd, (sender, lookup) = publish_nsqd(), lookup_producer()
    asked, answered = Event(), Event()

    async def nodes(timeout=None):
        asked.set()
        answered.wait()
        return (Nsqd(nsqd.address, version="1.3.0"),)

    monkeypatch.setattr(lookup, "nodes", nodes)
    with pytest.raises(errors.NoNsqd):
        sender.publish("t", b"x", timeout=0.01)
    for _ in range(2):  # at the first one it was used since the one before
        assert lookup.added == ["t"]
        lookup.tell(UNKNOWN, "t")
        assert asked.wait(WAIT)
    assert lookup.added == []
    answered.set()
    holds(lambda: not nsqd.connections)


def test_a_topic_without_a_channel_is_named_and_waited_for(cluster, producer_of, caplog):
    cluster.create_topic("bare", 2, 1)
    producer = producer_of()
    with caplog.at_level(logging.WARNING):
        result = producer.publish_nowait("bare", b"x", timeout=LONG)
        until(lambda: "publishes to topic bare wait for an nsqd: lookup names no partition" in caplog.text)
    for options in ({"timeout": 0.3}, {"block": False}):
        with pytest.raises(errors.NoNsqd, match="Topic has no channel, should init at least one"):
            producer.publish("bare", b"x", **options)
    assert not result.ready()
    for number in range(2):
        cluster.partition("bare", number).channel("c")
    assert result.get(timeout=WAIT) == b"OK"


@pytest.mark.parametrize(
    ("refusal", "kind", "arguments"),
    [
        (b"E_FAILED_ON_NOT_LEADER ", errors.NotLeader, {}),
        (b"E_FAILED_ON_NOT_LEADER ", errors.NotLeader, {"key": "k"}),
        (b"E_FAILED_ON_NOT_WRITABLE ", errors.NotWritable, {"key": "k"}),
        (b"E_PUB_FAILED exiting", errors.PubFailed, {}),
    ],
)
def test_a_timeout_names_the_last_refusal_and_whom_lookup_names(leading, refusal, kind, arguments):
    nsqd, sender, _ = leading(publish_timeout=LONG, retry_max_delay=0.01)
    assert sender.publish("t", b"first", **arguments) == b"OK"
    nsqd.answer = lambda peer, command: peer.frame(1, refusal)
    error, timeout = errors.PublishTimeout(""), 0.1
    while error.attempts < 3:
        timeout *= 2
        with pytest.raises(errors.PublishTimeout) as caught:
            sender.publish("t", b"x", timeout=timeout, **arguments)
        error = caught.value
    assert isinstance(error.__cause__, kind)
    assert f"after {error.attempts} attempts, the last failure: {refusal.decode().strip()}" in str(error)
    assert f"lookup names {nsqd.address} as the leader" in str(error)
    assert error.possibly_stored or kind is not errors.NotWritable


def test_a_timeout_says_who_has_not_replied(leading):
    nsqd, sender, _ = leading(publish_timeout=LONG)
    assert sender.publish("t", b"first", key="k") == b"OK"
    nsqd.answer = stay_mute
    sent = sender.publish_nowait("t", b"x", key="k", timeout=0.5)
    behind = sender.publish_nowait("t", b"y", key="k", timeout=0.5)
    gevent.joinall([sent, behind], timeout=WAIT)
    assert f"no reply before its deadline, from {nsqd.address}; it may have been stored" in str(sent.exception)
    assert "its time was over before it was sent" in str(behind.exception)
    assert not behind.exception.possibly_stored


# What is wrong in itself


def test_the_largest_body_of_an_extended_topic_leaves_room_for_its_record(leading):
    nsqd, sender, lookup = leading(meta={"extend_support": True}, max_msg_size=LARGEST)
    assert sender.publish("t", b"first") == b"OK"
    header = len(b'{"a":1}')
    for size, more in ((LARGEST - 1, {}), (LARGEST - 1 - 2 - header, {"headers": {"a": 1}})):
        assert sender.publish("t", b"x" * size, **more) == b"OK"
        assert sender.multipublish("t", [b"x" * size], **more) == b"OK"
        before = len(nsqd.commands)
        body = b"x" * (size + 1)
        for publish, large in ((sender.publish, body), (sender.multipublish, [body]), (sender.publish_nowait, body)):
            with pytest.raises(errors.BodyInvalid, match="less the 1 byte that an extended topic's records need"):
                publish("t", large, **more)
        assert len(nsqd.commands) == before
    for _ in range(2):  # answers of lookupds that do not agree at once
        lookup.tell(topology({0: nsqd}))
        assert sender.publish("t", b"x" * LARGEST) == b"OK"
        with pytest.raises(errors.BodyInvalid, match=rf"above max_msg_size={LARGEST}$"):
            sender.publish("t", b"x" * (LARGEST + 1))
        lookup.tell(topology({0: nsqd}, extend_support=True))
        with pytest.raises(errors.BodyInvalid, match="less the 1 byte"):
            sender.publish("t", b"x" * LARGEST)


def test_what_the_topic_cannot_take_is_refused_from_the_first_publish_on(cluster, producer_of):
    cluster.create_topic("ext", 2, 1, channels=["c"], ext=True)
    cluster.create_topic("t", 2, 1, channels=["c"])
    for more in ({}, {"key": "k"}):
        producer = producer_of(max_msg_size=LARGEST)
        for _ in range(2):  # before it is known what the topic is, and then
            with pytest.raises(errors.BodyInvalid, match="less the 1 byte that an extended topic's records need"):
                producer.publish("ext", b"x" * LARGEST, timeout=LONG, **more)
            for arguments in ({"headers": {"a": 1}}, {"tag": "red"}):
                with pytest.raises(errors.ConfigError, match="headers, tag: topic 't' carries no extended headers"):
                    producer.publish("t", b"x", timeout=LONG, **arguments, **more)
        assert producer.publish("t", b"plain", timeout=LONG, **more) == b"OK"
    assert {record.body for record in stored(cluster, "t", 2)} == {b"plain"}


def test_a_body_too_large_for_its_record_fails_at_once_on_a_real_server(standalone_nsqd):
    client = WireClient(standalone_nsqd.tcp_address)
    assert client.command(b"INTERNAL_CREATE_TOPIC ext 0 true\n") == b"OK"
    client.close()
    largest = 1024 * 1024  # nsqd's default
    with Producer([standalone_nsqd.tcp_address], publish_timeout=60.0) as producer:
        assert producer.publish("ext", b"x" * (largest - 1), partition=0) == b"OK"
        with pytest.raises(errors.PubFailed, match=r"failed after 1 attempt: E_PUB_FAILED .*write size") as caught:
            producer.publish("ext", b"x" * largest, partition=0)
        assert not caught.value.possibly_stored
        assert producer.publish("ext", b"after", partition=0) == b"OK"
