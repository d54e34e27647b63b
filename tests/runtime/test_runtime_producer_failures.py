"""Bad days of a producer: refusals, broken connections, mute and stalled servers, no server, no room."""

from __future__ import annotations

from contextlib import suppress
from socket import SHUT_RDWR
from time import monotonic

import gevent
import pytest
from gevent.event import Event
from support.http import ask
from support.ports import free_address
from support.publishing import agree, refuse, stay_mute
from support.waiting import WAIT, promptly, until

from nsq_fast import Producer, errors
from nsq_fast.broker import Broker, NsqdOptions, NsqdServer
from nsq_fast.testing import FaultyLink

LIMIT = 0.5
WAIT_LONGER = 5.0  # on a machine that has much else to do


def numbers(count):
    return [b"%d" % number for number in range(count)]


def connected_to_all(sender, *servers):
    until(lambda: len(sender.stats()["connected"]) == len(servers))


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


def test_an_error_that_leaves_the_connection_open_fails_alone(publish_nsqd, new_producer):
    def answer(peer, command):
        peer.frame(1, b"E_EXT_NOT_SUPPORT no") if command.body == b"bad" else peer.ok()

    server = publish_nsqd(answer, version="0.3.7-HA.1.13.0")
    sender = new_producer(server)
    results = [sender.publish_nowait("t", body) for body in (b"1", b"bad", b"3")]
    gevent.joinall(results, timeout=WAIT)
    assert [result.successful() for result in results] == [True, False, True]
    assert len(server.peers) == 1


def test_what_waits_behind_another_publish_may_lose_any_number_of_connections(publishing):
    lost = []

    def answer(peer, command):
        if len(lost) >= 5:
            peer.ok()
        elif command.body == b"4":  # all have come
            lost.append(peer)
            peer.sock.shutdown(SHUT_RDWR)

    _, sender = publishing(answer, coalesce=False, retry_max_delay=0.05, max_publish_attempts=3)
    results = [sender.publish_nowait("t", body) for body in numbers(5)]
    gevent.joinall(results, timeout=WAIT)
    assert [result.successful() for result in results] == [False, True, True, True, True]
    error = results[0].exception  # the server was working on it each time
    assert (error.attempts, error.possibly_stored) == (3, True)


@pytest.mark.parametrize("error", [b"E_FAILED_ON_NOT_LEADER ", b"E_PUB_FAILED busy", b"E_TOPIC_NOT_EXIST "])
def test_what_may_succeed_later_is_tried_again(publish_nsqd, new_producer, error):
    def answer(peer, command):
        if len(server.commands) < 3:
            peer.frame(1, error)
            if error == b"E_TOPIC_NOT_EXIST ":
                peer.sock.shutdown(1)
        else:
            peer.ok()

    server = publish_nsqd(answer, version="0.3.7-HA.1.13.0")
    assert new_producer(server).publish("t", b"x") == b"OK"
    assert server.bodies == [b"x"] * 3
    assert len(server.peers) == (3 if error == b"E_TOPIC_NOT_EXIST " else 1), "it does not wait for a new connection"


def test_attempts_are_limited_and_counted(publishing):
    server, sender = publishing(lambda peer, command: refuse(peer, b"E_PUB_FAILED no space"))
    with pytest.raises(errors.PublishFailed, match="failed after 3 attempts: E_PUB_FAILED no space") as caught:
        sender.publish("t", b"x")
    assert (caught.value.attempts, caught.value.possibly_stored) == (3, True)
    assert len(server.commands) == 3


# No nsqd, no room


def test_without_an_nsqd_it_waits_until_the_deadline_and_says_why(caplog):
    address = free_address()
    with Producer([address], max_pending=10) as sender:
        until(lambda: "cannot connect" in caplog.text)
        with pytest.raises(errors.NoNsqd, match=rf"'t' \({address}: .*refused") as caught:
            sender.publish("t", b"x", timeout=0.1)
        assert isinstance(caught.value.__cause__, errors.ConnectFailed)
        for call in (
            lambda: sender.publish("t", b"x", block=False),
            lambda: sender.multipublish("t", [b"x"], timeout=0.05),
            lambda: sender.publish_nowait("t", b"x", timeout=0.05).get(timeout=WAIT),
        ):
            with pytest.raises(errors.NoNsqd, match="'t'"):
                call()
        for _ in range(5):
            results = [sender.publish_nowait("t", b"x", timeout=0.02) for _ in range(10)]
            gevent.joinall(results, timeout=WAIT)
        stats = sender.stats()
        assert stats["pending"] == stats["held"] == stats["waiting"] == 0, "they do not pile up"


def test_max_pending_bounds_what_is_held(publishing):
    server, sender = publishing(stay_mute, max_pending=3)
    results = [sender.publish("t", body, raise_error=False) for body in numbers(3)]
    with pytest.raises(errors.PublishFailed, match="max_pending=3"):
        sender.publish_nowait("t", b"x")
    with pytest.raises(errors.PublishTimeout, match="max_pending=3") as caught:
        sender.publish("t", b"x", timeout=0.05)
    assert not caught.value.possibly_stored
    server.wait_commands(3)
    with pytest.raises(errors.PublishFailed, match="max_pending=3"):
        sender.publish("t", b"x", block=False)
    waiting = [gevent.spawn(sender.publish, "t", b"w%d" % number) for number in range(2)]
    gevent.sleep(0)
    server.answer = agree
    for _ in range(3):
        server.peers[0].ok()
    gevent.joinall([*results, *waiting], timeout=WAIT, raise_error=True)
    assert server.bodies == [*numbers(3), b"w0", b"w1"]
    assert sender.stats()["held"] == 0
    assert sender.multipublish("t", [b"x"] * 5) == b"OK", "one that is larger goes alone"


def test_what_timed_out_holds_its_room_until_the_reply_comes(publishing):
    """And late replies are taken in order, and disturb nobody."""
    server, sender = publishing(max_pending=2)
    assert sender.publish("t", b"first") == b"OK"  # so that it is connected
    server.answer = stay_mute
    for _ in range(2):
        with pytest.raises(errors.PublishTimeout):
            sender.publish("t", b"x", timeout=0.3)
    with pytest.raises(errors.PublishTimeout, match="max_pending"):
        sender.publish("t", b"x", timeout=0.03)
    assert sender.stats()["held"] == 2
    server.answer = agree
    server.peers[0].ok()
    server.peers[0].frame(1, b"E_INVALID_JSON_HEADER x")
    assert sender.publish("t", b"y") == b"OK"
    assert sender.stats()["held"] == 0


# Several nsqds


def test_publishes_pending_at_an_nsqd_that_dies_go_to_another(publish_nsqd, new_producer):
    dying, server = publish_nsqd(stay_mute), publish_nsqd()
    sender = new_producer(dying, server)
    connected_to_all(sender, dying, server)
    results = [sender.publish_nowait("t", body) for body in numbers(10)]
    dying.wait_commands(5)
    dying.stop()
    gevent.joinall(results, timeout=WAIT, raise_error=True)
    assert sorted(server.bodies) == numbers(10)


def test_an_nsqd_that_is_back_is_found_soon_however_long_its_pauses_have_grown(monkeypatch):
    monkeypatch.setattr("nsq_fast.protocol.delays.ReconnectDelay.next", lambda *_: 3600.0)
    address = free_address()
    with NsqdServer(NsqdOptions(tcp_address=str(address))) as server:
        sender = Producer(address, retry_max_delay=3600.0, publish_timeout=600.0)
        sender.start()
        server.stop()
        until(lambda: str(address) in sender.stats()["disconnected"])
        result = sender.publish_nowait("t", b"x")
        server.start()
        assert result.get(timeout=WAIT) == b"OK"
        sender.close()


def test_a_message_that_the_server_could_not_read_is_tried_elsewhere(publish_nsqd, new_producer):
    refusals = [b"E_BAD_MESSAGE PUB failed to read message body", b"E_BAD_BODY MPUB failed to read body size"]
    bad = publish_nsqd(lambda peer, command: refuse(peer, refusals[command.name == "MPUB"]))
    good = publish_nsqd()
    sender = new_producer(bad, good, retry_unknown_outcome=False)
    for _ in range(2):
        connected_to_all(sender, bad, good)
        assert sender.publish("t", b"x") == b"OK"
        connected_to_all(sender, bad, good)
        assert sender.multipublish("t", [b"y", b"z"]) == b"OK"
    assert len(bad.commands) >= 2
    assert good.bodies == [b"x", b"y", b"z"] * 2


# An nsqd that does not answer: what it owes goes elsewhere, and it gets nothing new until it has answered


@pytest.fixture
def stalling(publish_nsqd, new_producer):
    """``stalling(**options)``: an nsqd that is mute, one that is well, and a producer that is connected to both."""

    def make(**options):
        stuck, good = publish_nsqd(stay_mute), publish_nsqd()
        sender = new_producer(stuck, good, attempt_timeout=LIMIT, publish_timeout=60.0, **options)
        connected_to_all(sender, stuck, good)
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


def test_a_late_ok_ends_a_publish_that_waits_elsewhere(stalling):
    first, second, sender = stalling()
    second.answer = stay_mute
    result = sender.publish_nowait("t", b"x")
    until(lambda: len(first.commands) + len(second.commands) == 2)  # it was tried at the other one
    stalled = sender.stats()["stalled"]
    for server in sorted((first, second), key=lambda each: str(each.address) not in stalled):
        server.answer = agree
        server.peers[0].ok()
        assert result.get(timeout=WAIT) == b"OK"
    until(lambda: sender.stats()["held"] == 0 and not sender.stats()["stalled"])


def test_a_server_whose_late_reply_has_come_has_its_turn_again(publish_nsqd, new_producer):
    slow, good = publish_nsqd(stay_mute), publish_nsqd()
    sender = new_producer(slow, good, attempt_timeout=2 * WAIT, heartbeat_interval=60.0)  # nothing else makes it new
    connected_to_all(sender, slow, good)
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


def depth(http_address):
    """Messages stored in the topic t, which has no channels."""
    stats = ask(http_address, "GET", "/stats?format=json&topic=t").json
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


def test_callers_go_on_while_one_of_two_nsqds_is_frozen(freezing):
    addresses, freeze, thaw, depths = freezing
    longest, counts, is_over = 0.0, [0] * 10, Event()

    def work(number):
        nonlocal longest
        while not is_over.is_set():
            begun = monotonic()
            assert producer.publish("t", b"%d" % number) == b"OK"
            longest = max(longest, monotonic() - begun)
            counts[number] += 1

    def progress(by):
        """Wait until each caller has published ``by`` messages more."""
        before = list(counts)
        until(lambda: all(now >= then + by for now, then in zip(counts, before, strict=True)))

    with Producer(addresses, attempt_timeout=LIMIT, publish_timeout=60.0) as producer:
        connected_to_all(producer, *addresses)
        workers = [gevent.spawn(work, number) for number in range(10)]
        try:
            progress(20)
            freeze()
            until(lambda: producer.stats()["stalled"] == [str(addresses[0])])
            progress(100)
            thaw()
            until(lambda: producer.stats()["stalled"] == [])
            before = depths()[0]
            until(lambda: depths()[0] > before)
        finally:
            is_over.set()
            gevent.joinall(workers, raise_error=True)
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
            connected_to_all(sender, *addresses)
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
