"""Bad days of a producer: refusals, broken connections, mute servers, no server, no room."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

import gevent
import pytest
from gevent import Timeout
from support.peers import Peer
from support.ports import free_address
from support.publishing import Command, EndOfPeer, Nsqds, Producers, PublishNsqd, agree, refuse, stay_mute
from support.waiting import WAIT, promptly, until

from nsq_fast import Producer, errors
from nsq_fast.broker import NsqdOptions, NsqdServer

# One failing publish fails alone


def test_a_fatal_error_fails_one_publish_and_the_others_are_stored_exactly_once(
    publish_nsqd: Nsqds, new_producer: Producers
) -> None:
    def answer(peer: Peer, command: Command) -> None:
        refuse(peer, b"E_BAD_MESSAGE no") if command.body == b"bad" else peer.ok()

    server = publish_nsqd(answer)
    sender = new_producer(server, retry_unknown_outcome=False, max_publish_attempts=1)
    bodies = [b"%d" % number for number in range(50)]
    bodies[20] = b"bad"
    results = [sender.publish_nowait("t", body) for body in bodies]
    gevent.joinall(results, timeout=WAIT)
    failed = [body for body, result in zip(bodies, results, strict=True) if not result.successful()]
    assert failed == [b"bad"]
    error = results[20].exception
    assert isinstance(error, errors.PublishFailed)
    assert isinstance(error.__cause__, errors.BadMessage)
    assert not error.possibly_stored
    assert server.bodies == bodies  # in order, and none twice
    assert len(server.peers) == 2


def test_many_bad_publishes_do_not_starve_a_good_one(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    def answer(peer: Peer, command: Command) -> None:
        refuse(peer, b"E_BAD_TOPIC no") if command.topic == "bad" else peer.ok()

    sender = new_producer(publish_nsqd(answer), max_publish_attempts=1)
    bad = [sender.publish_nowait("bad", b"x") for _ in range(20)]
    assert sender.publish("good", b"x") == b"OK"
    assert all(isinstance(result.exception, errors.PublishFailed) for result in bad)


def test_an_error_that_leaves_the_connection_open_fails_alone(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    def answer(peer: Peer, command: Command) -> None:
        peer.frame(1, b"E_EXT_NOT_SUPPORT no") if command.body == b"bad" else peer.ok()

    server = publish_nsqd(answer, version="0.3.7-HA.1.13.0")
    sender = new_producer(server)
    results = [sender.publish_nowait("t", body) for body in (b"1", b"bad", b"3")]
    gevent.joinall(results, timeout=WAIT)
    assert [result.successful() for result in results] == [True, False, True]
    assert len(server.peers) == 1


@pytest.mark.parametrize("error", [b"E_FAILED_ON_NOT_LEADER ", b"E_PUB_FAILED busy", b"E_TOPIC_NOT_EXIST "])
def test_what_may_succeed_later_is_tried_again(publish_nsqd: Nsqds, new_producer: Producers, error: bytes) -> None:
    def answer(peer: Peer, command: Command) -> None:
        if len(server.commands) < 3:
            peer.frame(1, error)
            if error == b"E_TOPIC_NOT_EXIST ":
                peer.sock.shutdown(1)
        else:
            peer.ok()

    server = publish_nsqd(answer, version="0.3.7-HA.1.13.0")
    assert new_producer(server).publish("t", b"x") == b"OK"
    assert server.bodies == [b"x"] * 3


def test_attempts_are_limited_and_counted(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    server = publish_nsqd(lambda peer, command: refuse(peer, b"E_PUB_FAILED no space"))
    with pytest.raises(errors.PublishFailed, match="failed after 3 attempts: E_PUB_FAILED no space") as caught:
        new_producer(server).publish("t", b"x")
    assert (caught.value.attempts, caught.value.possibly_stored) == (3, True)
    assert len(server.commands) == 3


def test_a_command_that_the_server_does_not_have_fails_at_once(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    server = publish_nsqd(version="0.3.7-HA.1.13.0")
    sender = new_producer(server)
    with pytest.raises(errors.ConfigError, match="leave defer out"):
        sender.publish("t", b"x", defer=100)
    assert sender.publish("t", b"y") == b"OK"
    assert server.bodies == [b"y"]


# Unknown outcomes


def break_first(server: list[PublishNsqd]) -> Callable[[Peer, Command], None]:
    def answer(peer: Peer, command: Command) -> None:
        if len(server[0].commands) == 1:
            peer.reset()
            raise EndOfPeer
        peer.ok()

    return answer


def test_a_publish_that_was_pending_when_the_connection_broke_is_sent_again(
    publish_nsqd: Nsqds, new_producer: Producers
) -> None:
    servers: list[PublishNsqd] = []
    servers.append(publish_nsqd(break_first(servers)))
    assert new_producer(servers[0]).publish("t", b"x") == b"OK"
    assert servers[0].bodies == [b"x", b"x"]


def test_it_is_not_when_duplicates_are_unwanted(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    servers: list[PublishNsqd] = []
    servers.append(publish_nsqd(break_first(servers)))
    sender = new_producer(servers[0], retry_unknown_outcome=False)
    with pytest.raises(errors.PublishFailed, match="may have been stored") as caught:
        sender.publish("t", b"x")
    assert caught.value.possibly_stored
    assert isinstance(caught.value.__cause__, errors.ConnectionLost)
    assert sender.publish("t", b"y") == b"OK"
    assert servers[0].bodies == [b"x", b"y"]


# Deadlines


def test_a_server_that_never_replies_costs_one_deadline(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    server = publish_nsqd(stay_mute)
    sender = new_producer(server)
    begun = monotonic()
    with promptly(), pytest.raises(errors.PublishTimeout) as caught:
        sender.publish("t", b"x", timeout=0.1)
    assert monotonic() - begun >= 0.1
    assert caught.value.possibly_stored
    assert isinstance(caught.value, TimeoutError)


def test_late_replies_are_taken_in_order_and_disturb_nobody(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    server = publish_nsqd()
    sender = new_producer(server)
    assert sender.publish("t", b"first") == b"OK"  # so that it is connected
    server.answer = stay_mute
    late = sender.publish_nowait("t", b"late", timeout=0.5)
    refused = sender.publish_nowait("t", b"refused")
    good = sender.publish_nowait("t", b"good")
    with pytest.raises(errors.PublishTimeout):
        late.get(timeout=WAIT)
    server.wait_commands(4)
    server.answer = agree
    peer = server.peers[0]
    peer.ok()
    peer.frame(1, b"E_INVALID_JSON_HEADER x")
    peer.ok()
    with pytest.raises(errors.PublishFailed, match="E_INVALID_JSON_HEADER"):
        refused.get(timeout=WAIT)
    assert good.get(timeout=WAIT) == b"OK"
    assert sender.publish("t", b"next") == b"OK"
    assert sender.stats()["held"] == 0


def test_an_interrupted_caller_leaves_the_producer_sound(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    server = publish_nsqd(stay_mute)
    sender = new_producer(server)
    for number, body in enumerate([b"one", b"two"], 1):
        victim = gevent.spawn(sender.publish, "t", body)
        server.wait_commands(number)
        victim.kill()
    server.answer = agree
    server.peers[0].ok()
    server.peers[0].ok()
    assert sender.publish("t", b"three") == b"OK"
    assert sender.stats()["pending"] == 0


def test_an_interrupted_caller_takes_back_what_was_not_sent(new_producer: Producers, publish_nsqd: Nsqds) -> None:
    address = free_address()
    with Producer([address], max_backoff_duration=0.05) as sender:
        with Timeout(0.05, False):
            sender.publish("t", b"never")
        assert sender.stats()["held"] == 0


# No nsqd


def test_without_an_nsqd_it_waits_until_the_deadline_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    address = free_address()
    with Producer([address]) as sender:
        until(lambda: "cannot connect" in caplog.text)
        with pytest.raises(errors.NoNsqd, match=rf"'t' \({address}: .*refused") as caught:
            sender.publish("t", b"x", timeout=0.1)
        assert isinstance(caught.value.__cause__, errors.ConnectFailed)
        with pytest.raises(errors.NoNsqd, match="'t'"):
            sender.publish("t", b"x", block=False)
        with pytest.raises(errors.NoNsqd):
            sender.multipublish("t", [b"x"], timeout=0.05)
        result = sender.publish_nowait("t", b"x", timeout=0.05)
        with pytest.raises(errors.NoNsqd):
            result.get(timeout=WAIT)


def test_publishes_wait_for_the_connection(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    server = publish_nsqd()
    sender = new_producer(server)  # connects only when this greenlet lets it
    results = [sender.publish_nowait("t", b"%d" % number) for number in range(5)]
    assert not sender.is_connected
    assert [result.get(timeout=WAIT) for result in results] == [b"OK"] * 5
    assert server.bodies == [b"0", b"1", b"2", b"3", b"4"]
    assert sender.publish("t", b"5", block=False) == b"OK"


def test_reconnecting_never_ends_and_is_hurried_by_waiting_publishes(
    publish_nsqd: Nsqds, new_producer: Producers
) -> None:
    refusals = [0]

    def answer(peer: Peer, command: Command) -> None:
        refusals[0] += 1
        if refusals[0] < 8:
            peer.reset()
            raise EndOfPeer
        peer.ok()

    sender = new_producer(publish_nsqd(answer), max_publish_attempts=50, retry_max_delay=0.01, max_backoff_duration=128)
    assert sender.publish("t", b"x") == b"OK"


# Memory


def test_max_pending_bounds_what_is_held(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    server = publish_nsqd(stay_mute)
    sender = new_producer(server, max_pending=3)
    results = [sender.publish("t", b"%d" % number, raise_error=False) for number in range(3)]
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
    assert server.bodies == [b"0", b"1", b"2", b"w0", b"w1"]
    assert sender.stats()["held"] == 0


def test_what_timed_out_holds_its_room_until_the_reply_comes(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    server = publish_nsqd()
    sender = new_producer(server, max_pending=2)
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
    server.peers[0].ok()
    assert sender.publish("t", b"y") == b"OK"


def test_a_batch_larger_than_max_pending_goes_alone(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    server = publish_nsqd()
    sender = new_producer(server, max_pending=2)
    assert sender.multipublish("t", [b"x"] * 5) == b"OK"
    assert sender.publish("t", b"y") == b"OK"
    assert sender.stats()["held"] == 0


def test_a_batch_is_tried_again_as_it_was_handed_over(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    bodies = [b"first", b"second"]

    def answer(peer: Peer, command: Command) -> None:
        if bodies and command.name == "MPUB":
            bodies.clear()
            raise EndOfPeer
        peer.ok()

    server = publish_nsqd(answer)
    sender = new_producer(server)
    assert sender.publish("t", b"its topic is known now") == b"OK"
    assert sender.multipublish("t", bodies) == b"OK"
    assert server.bodies[1:] == [b"first", b"second"] * 2
    assert sender.stats()["held"] == 0


def test_publishes_that_wait_in_vain_do_not_pile_up() -> None:
    with Producer([free_address()], max_pending=10) as sender:
        for _ in range(5):
            results = [sender.publish_nowait("t", b"x", timeout=0.02) for _ in range(10)]
            gevent.joinall(results, timeout=WAIT)
        assert sender.stats()["pending"] == sender.stats()["held"] == 0
        assert sender.stats()["waiting"] == 0


# Several nsqds


def test_publishes_go_round_over_the_connected_ones(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    servers = [publish_nsqd() for _ in range(3)]
    sender = new_producer(*servers)
    until(lambda: len(sender.stats()["connected"]) == 3)
    for number in range(9):
        sender.publish("t", b"%d" % number)
    assert [len(server.bodies) for server in servers] == [3, 3, 3]


def test_a_dead_nsqd_is_not_chosen(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    server, dead = publish_nsqd(), publish_nsqd()
    dead.stop()
    sender = new_producer(dead, server)
    for number in range(10):
        assert sender.publish("t", b"%d" % number) == b"OK"
    assert len(server.bodies) == 10
    until(lambda: list(sender.stats()["disconnected"]) == [str(dead.address)])


def test_publishes_pending_at_an_nsqd_that_dies_go_to_another(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    dying, server = publish_nsqd(stay_mute), publish_nsqd()
    sender = new_producer(dying, server)
    until(lambda: len(sender.stats()["connected"]) == 2)
    results = [sender.publish_nowait("t", b"%d" % number) for number in range(10)]
    dying.wait_commands(5)
    dying.stop()
    gevent.joinall(results, timeout=WAIT)
    assert all(result.successful() for result in results)
    assert sorted(server.bodies) == sorted(b"%d" % number for number in range(10))


def test_an_nsqd_that_owes_replies_is_avoided(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    stuck, server = publish_nsqd(stay_mute), publish_nsqd()
    sender = new_producer(stuck, server)
    until(lambda: len(sender.stats()["connected"]) == 2)
    results = [sender.publish_nowait("t", b"x", timeout=0.3) for _ in range(2)]
    gevent.joinall(results, timeout=WAIT)
    for _ in range(6):
        assert sender.publish("t", b"y") == b"OK"
    assert b"y" not in stuck.bodies
    stuck.answer = agree
    stuck.peers[0].ok()
    until(lambda: sender.publish("t", b"z") and b"z" in stuck.bodies)


def test_several_connections_to_one_nsqd(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    server = publish_nsqd()
    sender = new_producer(server, connections_per_nsqd=3)
    until(lambda: len(sender.stats()["connected"]) == 3)
    assert sender.publish("t", b"x") == b"OK"
    assert len(server.peers) == 3


def test_an_nsqd_that_is_back_is_found_soon_however_long_its_pauses_have_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsq_fast.protocol.backoff.ReconnectDelay.next", lambda *_: 3600.0)
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
