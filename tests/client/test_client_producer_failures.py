"""Bad days of a producer: refusals, broken connections, mute and stalled servers, no server, no room."""

from __future__ import annotations

import logging
import random
import socket
import struct
from collections import Counter
from contextlib import contextmanager, suppress
from time import monotonic

import gevent
import pytest
from gevent.event import Event
from support.http import ask
from support.publishing import REDESIGNED, EndOfPeer, agree, connected, numbers, receipt, refuse, stay_mute
from support.servers import free_address
from support.waiting import WAIT, holds, promptly, until

from nsq_fast import Consumer, Producer, Receipt, errors
from nsq_fast.broker import Broker, NsqdOptions, NsqdServer
from nsq_fast.protocol.publishing import murmur3_partition
from nsq_fast.testing import FaultyLink

LIMIT = 0.5


# One failing publish fails alone


def test_a_fatal_error_fails_one_publish_and_the_others_are_stored_exactly_once(publishing):
    def answer(peer, command):
        refuse(peer, b"E_BAD_MESSAGE no") if command.body == b"bad" else peer.ok()

    server, sender = publishing(answer, retry_unknown_outcome=False, max_publish_attempts=1)
    bodies = numbers(50)
    bodies[20] = b"bad"
    results = [sender.publish_nowait("t", body) for body in bodies]
    gevent.joinall(results, timeout=WAIT)
    assert [result.successful() for result in results] == [body != b"bad" for body in bodies]
    error = results[20].exception
    assert isinstance(error, errors.PublishFailed)
    assert isinstance(error.__cause__, errors.BadMessage)
    assert not error.possibly_stored
    assert server.bodies == bodies  # in order, and none twice
    assert len(server.peers) == 2


@pytest.mark.parametrize("error", [b"E_FAILED_ON_NOT_LEADER ", b"E_PUB_FAILED busy", b"E_TOPIC_NOT_EXIST "])
def test_what_may_succeed_later_is_tried_again(publish_nsqd, new_producer, error):
    def answer(peer, command):
        if command.body == b"x" and len(server.commands) == 3:
            peer.ok()
        elif error == b"E_TOPIC_NOT_EXIST ":
            peer.frame(1, error)
            peer.sock.shutdown(1)
        else:
            peer.frame(1, error)

    server = publish_nsqd(answer, version="0.3.7-HA.1.13.0")
    sender = new_producer(server)
    assert sender.publish("t", b"x") == b"OK"
    assert server.bodies == [b"x"] * 3
    assert len(server.peers) == (3 if error == b"E_TOPIC_NOT_EXIST " else 1), "it does not wait for a new connection"
    with pytest.raises(errors.PublishFailed, match="after 3 attempts"):  # by default
        sender.publish("t", b"y")


def test_a_server_that_ends_connection_after_connection_is_given_a_pause(publishing):
    """Which uses up one attempt, however often; and the first end is no reason to wait."""

    def end(peer, command):
        peer.reset()
        raise EndOfPeer

    server, sender = publishing(end, retry_base_delay=WAIT, retry_max_delay=WAIT, publish_timeout=4 * WAIT)
    result = sender.publish_nowait("t", b"x")
    until(lambda: len(server.peers) > 2 and sender.is_connected)
    holds(lambda: len(server.commands) == 2 and not result.ready())


# No nsqd, no room


def test_without_an_nsqd_it_waits_until_the_deadline_and_says_why(caplog):
    def told():
        return [record.levelname for record in caplog.records if "cannot connect" in record.message]

    address = free_address()
    with caplog.at_level(logging.DEBUG, "nsq_fast.client.sender"), Producer([address], max_pending=10) as sender:
        until(told)
        with pytest.raises(errors.NoNsqd, match=rf"'t' \({address}: .*refused") as caught:
            sender.publish("t", b"x", timeout=0.1)
        assert isinstance(caught.value.__cause__, errors.ConnectFailed)
        for _ in range(5):
            results = [sender.publish_nowait("t", b"x", timeout=0.02) for _ in range(10)]
            gevent.joinall(results, timeout=WAIT)
        stats = sender.stats()
        assert not any(stats[each] for each in ("pending", "held", "waiting", "lookup_errors")), "they do not pile up"
        until(lambda: len(told()) > 2)
        assert told()[:3] == ["WARNING", "DEBUG", "DEBUG"]


def test_an_nsqd_that_says_nothing_is_named_while_it_is_connected_to():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with Producer([address]) as producer:
            for options in ({"timeout": 0.1}, {"block": False}):
                with pytest.raises(errors.NoNsqd, match=rf"'t' \({address}: not connected yet\)"):
                    producer.publish("t", b"x", **options)


def test_what_would_fit_does_not_pass_a_batch_that_waits_for_room(publishing):
    server, sender = publishing(stay_mute, max_pending=3)
    sender.multipublish("t", [b"0", b"1"], raise_error=False)
    server.wait_commands(1)
    callers = [gevent.spawn(sender.multipublish, "t", [b"2", b"3"]), gevent.spawn(sender.publish, "t", b"4")]
    gevent.idle()
    with pytest.raises(errors.PublishFailed, match="max_pending=3"):
        sender.publish_nowait("t", b"5")
    assert sender.stats()["held"] == 2
    server.answer = agree
    server.peers[0].ok()
    gevent.joinall(callers, timeout=WAIT, raise_error=True)
    assert server.bodies == numbers(5)


# Several nsqds


def test_publishes_pending_at_an_nsqd_that_dies_go_to_another(publish_nsqd, new_producer):
    dying, server = publish_nsqd(stay_mute), publish_nsqd()
    sender = new_producer(dying, server)
    connected(sender, 2)
    results = [sender.publish_nowait("t", body) for body in numbers(10)]
    dying.wait_commands(5)
    dying.stop()
    gevent.joinall(results, timeout=WAIT, raise_error=True)
    assert sorted(server.bodies) == numbers(10)


def test_an_nsqd_that_is_back_is_found_soon_however_long_its_pauses_have_grown(monkeypatch):
    monkeypatch.setattr("nsq_fast.protocol.rdy.ReconnectDelay.next", lambda *_: 3600.0)
    address = free_address()
    with NsqdServer(NsqdOptions(tcp_address=str(address))) as server:
        sender = Producer(address, retry_max_delay=3600.0, publish_timeout=600.0)
        sender.start()
        server.stop()
        until(
            lambda: "cannot connect" in sender.stats()["disconnected"].get(str(address), "")
        )  # an hour's pause begins
        result = sender.publish_nowait("t", b"x")
        server.start()
        assert result.get(timeout=WAIT) == b"OK"
        sender.close()


# An nsqd that does not answer: what it owes goes elsewhere, and it gets nothing new until it has answered


@pytest.fixture
def stalling(publish_nsqd, new_producer):
    """``stalling(**options)``: an nsqd that is mute, one that is well, and a producer that is connected to both."""

    def make(version="1.3.0", **options):
        stuck, good = publish_nsqd(stay_mute, version=version), publish_nsqd(version=version)
        sender = new_producer(stuck, good, **{"attempt_timeout": LIMIT, "publish_timeout": 60.0, **options})
        connected(sender, 2)
        return stuck, good, sender

    return make


def wake(server):
    """Answer what is owed, and from now on at once."""
    owed = len(server.commands)
    server.answer = agree
    for _ in range(owed):
        server.peers[0].ok()


@pytest.mark.parametrize("options", [{}, {"linger": 0.001}, {"coalesce": True}])
def test_what_a_stalled_nsqd_owes_is_stored_by_another(stalling, options):
    stuck, good, sender = stalling(**options)
    callers = [gevent.spawn(sender.publish, "t", body) for body in numbers(10)]
    callers += [sender.multipublish("t", bodies, raise_error=False) for bodies in ([b"a", b"b"], [b"c", b"d"])]
    gevent.joinall(callers, timeout=WAIT, raise_error=True)
    assert [caller.get() for caller in callers] == [b"OK"] * 12
    assert stuck.bodies
    assert set(good.bodies) == {*numbers(10), b"a", b"b", b"c", b"d"}
    assert sender.stats()["stalled"] == [str(stuck.address)]
    owed = len(stuck.commands)
    for _ in range(20):
        assert sender.publish("t", b"new") == b"OK"
    assert len(stuck.commands) == owed, "it gets nothing new"
    wake(stuck)
    until(lambda: sender.publish("t", b"later") and b"later" in stuck.bodies)
    assert sender.stats()["stalled"] == []


def test_what_must_not_be_stored_twice_waits_for_the_answer(stalling):
    stuck, good, sender = stalling(retry_unknown_outcome=False)
    results = [sender.publish_nowait("t", body) for body in numbers(4)]
    until(lambda: sender.stats()["stalled"])
    assert len(stuck.bodies) == len(good.bodies) == 2
    wake(stuck)
    gevent.joinall(results, timeout=WAIT, raise_error=True)
    assert sorted(stuck.bodies + good.bodies) == numbers(4)


@pytest.mark.parametrize("trace_id", [None, 7])
def test_a_late_reply_ends_a_publish_that_waits_elsewhere(stalling, trace_id):
    first, second, sender = stalling(version=REDESIGNED)
    second.answer = stay_mute
    result = sender.publish_nowait("t", b"body", trace_id=trace_id)
    until(lambda: first.commands and second.commands)  # it was tried at the other one
    stalled = sender.stats()["stalled"]
    late, other = sorted((first, second), key=lambda each: str(each.address) not in stalled)
    late.peers[0].frame(0, b"OK" if trace_id is None else receipt(1000, 7, 5000, 34))
    stored = b"OK" if trace_id is None else Receipt(1000, 7, 5000, 34, None, late.address)
    assert result.get(timeout=WAIT) == stored
    other.peers[0].frame(0, b"OK" if trace_id is None else receipt(2000, 7, 6000, 34))
    until(lambda: sender.stats()["held"] == 0 and not sender.stats()["stalled"])


def test_a_server_whose_late_reply_has_come_has_its_turn_again(stalling):
    slow, _, sender = stalling(attempt_timeout=2 * WAIT, heartbeat_interval=60.0)  # nothing else makes it new
    results = [sender.publish_nowait("t", body, timeout=0.2) for body in numbers(2)]
    gevent.joinall(results, timeout=WAIT)
    wake(slow)
    until(lambda: sender.publish("t", b"later") and b"later" in slow.bodies)


def test_with_nowhere_else_to_go_it_waits_and_sends_nothing_twice(nsq_link, publish_nsqd, new_producer):
    nsqd = publish_nsqd()
    link = nsq_link(nsqd.address)
    # Otherwise it may be sent again, where a new connection replies before the one that was stalled does.
    sender = new_producer(link, attempt_timeout=LIMIT, publish_timeout=60.0, retry_unknown_outcome=False)
    assert sender.publish("t", b"first") == b"OK"
    link.stall()
    link.refuse()  # else a new connection may reply first, and what is owed is sent once more
    owed = [sender.publish_nowait("t", body) for body in numbers(3)]
    until(lambda: sender.stats()["stalled"])
    waiting = gevent.spawn(sender.publish, "t", b"waiting")
    with pytest.raises(errors.NoNsqd, match=f"'t' .*{link.address}: connected, but has not replied for {LIMIT:g} s"):
        sender.publish("t", b"x", timeout=0.05)
    with pytest.raises(errors.NoNsqd):
        sender.publish("t", b"x", block=False)
    link.flow()
    gevent.joinall([*owed, waiting], timeout=WAIT, raise_error=True)
    assert sorted(nsqd.bodies) == sorted([b"first", *numbers(3), b"waiting"])
    assert sender.stats()["held"] == sender.stats()["pending"] == 0


@pytest.mark.parametrize("count", [1, 20])
def test_a_silent_connection_is_given_up_once_a_new_one_to_the_same_nsqd_works(publishing, count):
    """Packets were lost, and the kernel of either end waits ever longer before it sends again."""
    lost = []

    def lose_the_first(peer, command):
        if not lost:
            lost.append(peer)
        if peer is not lost[0]:
            peer.ok()

    nsqd, sender = publishing(lose_the_first, attempt_timeout=LIMIT, publish_timeout=60.0)
    results = [sender.publish_nowait("t", body) for body in numbers(count)]
    gevent.joinall(results, timeout=WAIT, raise_error=True)
    assert len(nsqd.peers) == 2
    assert sender.publish("t", b"later") == b"OK"
    stats = sender.stats()
    assert (stats["stalled"], stats["disconnected"], stats["held"]) == ([], {}, 0)


def test_one_attempt_is_left_where_new_connections_work_and_no_reply_comes(publishing):
    """What the second connection owes is waited for there: a third works as well, and is closed again."""
    nsqd, sender = publishing(stay_mute, attempt_timeout=LIMIT, publish_timeout=60.0)
    result = sender.publish_nowait("t", b"x")
    until(lambda: len(nsqd.peers) >= 4)  # the fourth comes for want of the third
    assert nsqd.bodies == [b"x", b"x"]
    for peer in nsqd.peers:
        with suppress(OSError):  # all but one are closed
            peer.ok()
    assert result.get(timeout=WAIT) == b"OK"
    assert nsqd.bodies == [b"x", b"x"]
    assert sender.stats()["held"] == 0


def test_a_time_in_which_this_process_did_not_run_does_not_count(publishing):
    server, sender = publishing(attempt_timeout=LIMIT)
    assert sender.publish("t", b"x") == b"OK"
    result = sender.publish_nowait("t", b"y")
    end = monotonic() + 3 * LIMIT
    while monotonic() < end:
        pass
    assert result.get(timeout=WAIT) == b"OK"
    assert sender.stats()["stalled"] == []
    assert server.bodies == [b"x", b"y"]


# Whole servers


def depth(http_address, topic="t"):
    """Messages stored in a topic without channels."""
    stats = ask(http_address, "GET", f"/stats?format=json&topic={topic}").json
    return sum(int(each["depth"]) for each in stats["topics"] or ())


@pytest.fixture(params=["real", "embedded"])
def freezing(request, nsq_link):
    """Two nsqds: their addresses, what freezes and thaws the first one, and what each has stored."""
    if request.param == "real":
        make = request.getfixturevalue("real_nsqd")
        pair = [make(), make()]
        depths = lambda: [depth(each.http_address) for each in pair]  # noqa: E731
        yield [each.tcp_address for each in pair], pair[0].freeze, pair[0].thaw, depths
        pair[0].thaw()
        return
    with Broker() as first, Broker() as second:
        link = nsq_link(first.nsqd.tcp_address)
        depths = lambda: [depth(each.nsqd.http_address) for each in (first, second)]  # noqa: E731
        yield [link.address, second.nsqd.tcp_address], link.stall, link.flow, depths


@contextmanager
def calling(publish):
    """Ten greenlets that call ``publish(number, count)`` again and again: their counts, and ``progress(by)``."""
    counts, is_over = [0] * 10, Event()

    def work(number):
        while not is_over.is_set():
            assert publish(number, counts[number]) == b"OK"
            counts[number] += 1

    def progress(by):
        """Wait until each has published ``by`` messages more."""
        before = list(counts)
        until(lambda: all(now >= then + by for now, then in zip(counts, before, strict=True)))

    workers = [gevent.spawn(work, number) for number in range(10)]
    try:
        yield counts, progress
    finally:
        is_over.set()
        gevent.joinall(workers, raise_error=True)


def test_callers_go_on_while_one_of_two_nsqds_is_frozen(freezing):
    addresses, freeze, thaw, depths = freezing
    longest = 0.0

    def publish(number, count):
        nonlocal longest
        begun = monotonic()
        reply = producer.publish("t", b"%d" % number)
        longest = max(longest, monotonic() - begun)
        return reply

    with Producer(addresses, attempt_timeout=LIMIT, publish_timeout=60.0) as producer:
        connected(producer, 2)
        with calling(publish) as (counts, progress):
            progress(20)
            freeze()
            until(lambda: producer.stats()["stalled"] == [str(addresses[0])])
            progress(100)
            thaw()
            until(lambda: producer.stats()["stalled"] == [])
            before = depths()[0]
            until(lambda: depths()[0] > before)
    assert longest < 30  # half of what the whole publish may take; it was all of it
    assert sum(depths()) >= sum(counts)


class SwallowingLink(FaultyLink):
    """A link that passes ``left`` bytes more on to the server and swallows the rest; None: it passes everything."""

    left = None

    def _pass_on(self, data, sink):
        if self.left is not None and any(sink is server for _, server in self._pairs):
            data = data[: self.left]
            self.left -= len(data)
        if data:
            super()._pass_on(data, sink)


def test_a_body_that_stalls_beyond_the_read_deadline_is_stored_by_another_real_nsqd(real_nsqd):
    waiting, healthy = real_nsqd(), real_nsqd()
    link = SwallowingLink(waiting.tcp_address)
    addresses = [link.address, healthy.tcp_address]
    try:
        with Producer(addresses, heartbeat_interval=1.0, retry_unknown_outcome=False) as sender:  # a deadline of 2 s
            connected(sender, 2)
            link.left = 10_000
            results = [sender.publish_nowait("t", b"x" * 100_000) for _ in range(2)]
            gevent.joinall(results, timeout=30, raise_error=True)
            until(lambda: any("failed to read message body" in line for line in waiting.log))
            link.left = None
    finally:
        link.close()
    assert depth(healthy.http_address) == 2


def test_a_message_that_is_to_blame_for_a_lost_connection_holds_up_no_other(publishing):
    """The server closes after it; the next connection is made at once, however often that happens."""

    def answer(peer, command):
        refuse(peer, b"E_BAD_MESSAGE no") if command.body == b"bad" else peer.ok()

    _, sender = publishing(answer, max_backoff_duration=60.0)
    with promptly():
        for _ in range(40):
            with pytest.raises(errors.PublishFailed):
                sender.publish("t", b"bad")
            assert sender.publish("t", b"good") == b"OK"


# Whole servers of both families: nothing that was answered OK is lost or out of order


KEYS = [f"key-{number}" for number in range(20)]
PARTITIONS = 3


def everything(topic, server, enough):
    """Consume a topic until ``enough`` different messages were seen."""
    seen = Counter()
    handle = lambda _, message: seen.update([message.body])  # noqa: E731
    with Consumer(topic, "c", [server.tcp_address], message_handler=handle, max_in_flight=100):
        until(lambda: len(seen) >= enough)
    return seen


def test_every_kind_of_publish(real_nsqd):
    server = real_nsqd()
    with Producer(str(server.tcp_address)) as producer:
        assert producer.publish("t", b"single") == b"OK"
        assert producer.multipublish("t", (b"%d" % number for number in range(1000))) == b"OK"
        assert producer.publish("later", b"x", defer=20) == b"OK"
        assert producer.publish("t", b"x" * 1024 * 1024) == b"OK"
        big = [struct.pack(">I", number) + bytes(1_000_000) for number in range(12)]
        assert producer.multipublish("t", big) == b"OK"
    seen = everything("t", server, enough=1014)
    assert max(seen.values()) == 1
    assert set(big) < set(seen)


def test_what_the_server_refuses_fails_alone(real_nsqd):
    server = real_nsqd("-max-msg-size=100", "-max-req-timeout=1s")
    for options in ({}, {"linger": 0.005}):
        with Producer([server.tcp_address], retry_unknown_outcome=True, **options) as producer:
            results = [producer.publish_nowait("t", b"x" * (101 if number == 50 else 10)) for number in range(100)]
            gevent.joinall(results, timeout=WAIT)
            assert [number for number, result in enumerate(results) if not result.successful()] == [50]
            assert isinstance(results[50].exception, errors.PublishFailed)
            with pytest.raises(errors.PublishFailed, match="E_INVALID"):
                producer.publish("t", b"x", defer=100_000)
            assert producer.publish("t", b"x") == b"OK"
    assert depth(server.http_address, "t") == 200


# Discovery


def test_an_unknown_topic_goes_to_any_nsqd_and_a_known_one_to_those_that_have_it(real_nsqd, real_lookupd):
    """And where lookup leads nowhere, the error says why."""
    with Producer(lookupd_http_addresses="127.0.0.1:1") as producer:
        error = failure_of(producer, "lookup failed: http://127.0.0.1:1")
        assert "refused" in str(error)
        assert isinstance(error.__cause__, errors.LookupFailed)
    lookupd = real_lookupd()
    lookupds = [str(lookupd.http_address)]
    with Producer(lookupd_http_addresses=lookupds, lookupd_poll_interval=0.05) as producer:
        assert isinstance(failure_of(producer, "lookup does not know the topic").__cause__, errors.LookupFailed)
        first = producer.publish_nowait("first", b"x")  # while there is no nsqd
        servers = [real_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}") for _ in range(2)]
        assert first.get(timeout=WAIT) == b"OK"
        until(lambda: len(ask(lookupd.http_address, "GET", "/nodes").json["producers"]) == 2)
        ask(servers[1].http_address, "POST", "/topic/create?topic=known")
        until(lambda: ask(lookupd.http_address, "GET", "/lookup?topic=known").status == 200)
        for _ in range(4):
            assert producer.publish("known", b"x") == b"OK"
        assert producer.publish("unknown", b"x") == b"OK"
    assert [depth(server.http_address, "known") for server in servers] == [0, 4]
    assert sum(depth(server.http_address, "unknown") for server in servers) == 1
    for server in servers:
        server.freeze()  # nsqlookupd goes on naming it
    with Producer(lookupd_http_addresses=lookupds, connect_timeout=0.05) as producer:
        error = failure_of(producer, f"{servers[1].tcp_address}: not connected within", "known")
        assert isinstance(error.__cause__, errors.ConnectFailed)


def failure_of(producer, text, topic="t"):
    """What a publish fails with, as soon as it says ``text``."""

    def failure():
        with pytest.raises(errors.NoNsqd) as caught:
            producer.publish(topic, b"x", timeout=0.05)
        return caught.value if text in str(caught.value) else None

    return until(failure)


# The embedded cluster: leaders move and die


@pytest.fixture
def producing(lookups):
    """A factory of producers of the cluster, as context managers."""
    return lambda **options: Producer(lookupd_refresh_interval=0.05, **lookups, **options)


def stored(cluster):
    """The records of every partition of t, in order."""
    return {number: cluster.partition("t", number).log.read(0, 1_000_000) for number in range(PARTITIONS)}


def trouble(cluster):
    """Move every leader twice; kill a node and bring it back."""
    chance = random.Random(5)
    for _ in range(2):
        for number in range(PARTITIONS):
            cluster.move_leader("t", number)
            gevent.sleep(chance.uniform(0.005, 0.05))  # sleep: trouble at any moment
    node = cluster.leader_of("t", 1)
    cluster.kill_node(node)
    gevent.sleep(0.1)  # sleep: a node that is away for a time
    cluster.restart_node(node)
    gevent.sleep(0.05)  # sleep: trouble at any moment
    cluster.move_leader("t", 2)


@pytest.mark.parametrize(
    ("options", "is_traced"),
    [({"coalesce": False}, True), ({}, False), ({}, True), ({"linger": 0.002}, False)],
    ids=["one by one, traced", "coalesced", "coalesced, traced", "lingering"],
)
def test_keys_keep_their_order_while_leaders_move_and_die(cluster, producing, options, is_traced):
    cluster.create_topic("t", PARTITIONS, 2, ordered=True, channels=["ch"])
    per_key, window = 60, 5
    acknowledged, is_over = set(), Event()

    def work(key):
        for first in range(0, per_key, window):
            bodies = [f"{key} {number}".encode() for number in range(first, first + window)]
            trace_id = 7 if is_traced else None
            results = [producer.publish_nowait("t", body, key=key, trace_id=trace_id) for body in bodies]
            for body, result in zip(bodies, results, strict=True):
                assert isinstance(result.get(timeout=WAIT), Receipt) is is_traced
                acknowledged.add(body)
            is_over.wait(0.03)

    with producing(**options) as producer:
        workers = [gevent.spawn(work, key) for key in KEYS]
        until(lambda: acknowledged)
        trouble(cluster)
        is_over.set()
        gevent.joinall(workers, timeout=WAIT, raise_error=True)
        assert producer.stats()["held"] == 0

    assert len(acknowledged) == per_key * len(KEYS)
    bodies = {number: [record.body for record in records] for number, records in stored(cluster).items()}
    assert acknowledged <= {body for each in bodies.values() for body in each}
    for key in KEYS:
        mine = [body for body in bodies[murmur3_partition(key, PARTITIONS)] if body.startswith(key.encode() + b" ")]
        assert list(dict.fromkeys(mine)) == [f"{key} {number}".encode() for number in range(per_key)]


def test_a_rolling_restart_under_load_fails_no_publish(cluster, producing):
    cluster.create_topic("t", PARTITIONS, 2, ordered=True, channels=["ch"])

    def publish(number, count):
        return producer.publish("t", f"{number} {count}".encode(), key=f"k{number}" if number % 2 else None)

    with producing(publish_timeout=120.0) as producer, calling(publish) as (counts, progress):
        for node in cluster.nsqds:
            progress(5)
            node.stop()
            progress(5)  # others lead what it led
            node.start()
    bodies = {record.body for records in stored(cluster).values() for record in records}
    assert bodies == {f"{number} {index}".encode() for number, count in enumerate(counts) for index in range(count)}
