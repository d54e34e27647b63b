"""Lingering and coalescing: single publishes that leave together, and end one by one."""

from __future__ import annotations

from typing import Any

import gevent
import pytest
from gevent.event import Event
from support.peers import Peer
from support.publishing import Command, Nsqds, Producers, agree, refuse, stay_mute
from support.waiting import WAIT

from nsq_fast import errors


def names(commands: list[Command]) -> list[str]:
    return [command.name for command in commands]


def test_publishes_of_a_topic_leave_together(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    server = publish_nsqd()
    sender = new_producer(server, linger=0.01)
    results = [sender.publish_nowait(f"t{number % 2}", b"%d" % number) for number in range(10)]
    results.append(sender.publish_nowait("alone", b"x"))
    gevent.joinall(results, timeout=WAIT)
    assert all(result.get(block=False) == b"OK" for result in results)
    assert sorted(names(server.commands)) == ["MPUB", "MPUB", "PUB"]
    assert server.commands[0].bodies == [b"0", b"2", b"4", b"6", b"8"]
    assert sender.stats()["held"] == 0


def test_greenlets_that_wait_for_their_publish_share_batches(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    server = publish_nsqd()
    sender = new_producer(server, linger=0.005)

    def work(number: int) -> None:
        for index in range(5):
            assert sender.publish("t", b"%d-%d" % (number, index)) == b"OK"

    gevent.joinall([gevent.spawn(work, number) for number in range(50)], raise_error=True)
    assert len(server.bodies) == len(set(server.bodies)) == 250
    assert len(server.commands) < 50


def test_a_full_batch_leaves_at_once(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    server = publish_nsqd()
    sender = new_producer(server, linger=60, linger_max_messages=4)
    results = [sender.publish_nowait("t", b"%d" % number) for number in range(8)]
    gevent.joinall(results, timeout=WAIT)
    assert [len(command.bodies) for command in server.commands] == [4, 4]
    sender = new_producer(server, linger=60, linger_max_bytes=100)
    results = [sender.publish_nowait("t", b"x" * 30) for number in range(3)]
    gevent.joinall(results, timeout=WAIT)
    assert len(server.commands[2].bodies) == 3


def test_no_batch_is_above_max_body_size(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    server = publish_nsqd()
    sender = new_producer(server, linger=0.01, max_body_size=100, max_msg_size=90, linger_max_bytes=10_000)
    bodies = [b"x" * 60, b"y" * 60, b"z" * 10]
    results = [sender.publish_nowait("t", body) for body in bodies]
    gevent.joinall(results, timeout=WAIT)
    assert server.bodies == bodies
    assert names(server.commands) == ["PUB", "MPUB"]


def test_deferred_publishes_and_batches_do_not_linger(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    server = publish_nsqd()
    sender = new_producer(server, linger=60)
    assert sender.publish("t", b"x", defer=10) == b"OK"
    assert sender.multipublish("t", [b"y", b"z"]) == b"OK"
    assert names(server.commands) == ["DPUB", "MPUB"]


@pytest.mark.parametrize("options", [{"linger": 0.01}, {"coalesce": True}])
def test_one_bad_message_fails_alone(publish_nsqd: Nsqds, new_producer: Producers, options: dict[str, Any]) -> None:
    def answer(peer: Peer, command: Command) -> None:
        if b"bad" in command.bodies:
            refuse(peer, b"E_BAD_MESSAGE no")
        stored.extend(command.bodies)
        peer.ok()

    stored: list[bytes] = []
    sender = new_producer(publish_nsqd(answer), retry_unknown_outcome=False, **options)
    bodies = [b"%d" % number for number in range(20)]
    bodies[7] = b"bad"
    results = [sender.publish_nowait("t", body) for body in bodies]
    gevent.joinall(results, timeout=WAIT)
    assert [body for body, result in zip(bodies, results, strict=True) if not result.successful()] == [b"bad"]
    error = results[7].exception
    assert isinstance(error, errors.PublishFailed)
    assert isinstance(error.__cause__, errors.BadMessage)
    assert not error.possibly_stored
    assert sorted(stored) == sorted(body for body in bodies if body != b"bad")
    assert sender.stats()["held"] == sender.stats()["pending"] == 0


def test_a_batch_that_is_not_allowed_fails_as_a_whole(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    server = publish_nsqd(lambda peer, command: refuse(peer, b"E_UNAUTHORIZED no"))
    sender = new_producer(server, linger=0.01)
    results = [sender.publish_nowait("t", b"x") for _ in range(5)]
    gevent.joinall(results, timeout=WAIT)
    assert all(isinstance(result.exception, errors.PublishFailed) for result in results)
    assert len({id(result.exception) for result in results}) == 5
    assert len(server.commands) == 1


def test_a_batch_is_tried_again_without_those_whose_time_is_over(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    def answer(peer: Peer, command: Command) -> None:
        if len(server.commands) == 2:
            assert is_over.wait(WAIT)
            refuse(peer, b"E_MPUB_FAILED busy")
        peer.ok()

    is_over = Event()
    server = publish_nsqd(answer)
    sender = new_producer(server, linger=0.01)
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


def test_a_deadline_that_comes_while_it_lingers(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    server = publish_nsqd()
    sender = new_producer(server, linger=1.0)
    assert sender.publish("t", b"first", defer=1) == b"OK"  # so that it is connected
    with pytest.raises(errors.PublishTimeout) as caught:
        sender.publish("t", b"x", timeout=0.02)
    assert not caught.value.possibly_stored
    assert sender.publish("t", b"y") == b"OK"
    assert server.bodies == [b"first", b"y"]
    assert sender.stats()["held"] == 0


def test_a_mute_server_holds_the_room_of_a_batch_until_it_answers(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    server = publish_nsqd()
    sender = new_producer(server, linger=0.005, max_pending=2)
    assert sender.publish("t", b"first") == b"OK"  # so that it is connected
    server.answer = stay_mute
    results = [sender.publish_nowait("t", b"x", timeout=0.5) for _ in range(2)]
    gevent.joinall(results, timeout=WAIT)
    assert all(isinstance(result.exception, errors.PublishTimeout) for result in results)
    assert sender.stats()["held"] == 2
    server.answer = agree
    server.peers[0].ok()
    assert sender.publish("t", b"y") == b"OK"
    assert sender.stats()["held"] == 0


def test_close_sends_what_lingers(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    server = publish_nsqd()
    sender = new_producer(server, linger=60)
    results = [sender.publish_nowait("t", b"x") for _ in range(3)]
    sender.close()
    assert [result.get(block=False) for result in results] == [b"OK"] * 3


def test_what_is_published_in_one_turn_leaves_together(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    server = publish_nsqd()
    sender = new_producer(server, coalesce=True)
    sender.publish("t", b"x")
    results = [sender.publish_nowait("t", b"%d" % number) for number in range(10)]
    gevent.joinall(results, timeout=WAIT)
    assert [len(command.bodies) for command in server.commands] == [1, 1, 9]
    for _ in range(3):
        sender.publish("t", b"alone")
    assert names(server.commands) == ["PUB", "PUB", "MPUB", "PUB", "PUB", "PUB"]


def test_nothing_overtakes_what_gathers(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    server = publish_nsqd()
    for options in ({"coalesce": True}, {"linger": 0.01}):
        sender = new_producer(server, **options)
        sender.publish("other", b"so that it is connected")
        server.commands.clear()
        results = [
            sender.publish_nowait("t", b"1"),
            sender.publish_nowait("t", b"2"),
            sender.publish_nowait("t", b"3"),
            sender.multipublish("t", [b"4", b"5"], raise_error=False),
            sender.publish_nowait("t", b"6"),
            sender.publish_nowait("t", b"7", defer=10),
        ]
        gevent.joinall(results, timeout=WAIT)
        assert server.bodies == [b"%d" % number for number in range(1, 8)]


def test_a_hundred_greenlets_need_few_commands(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    server = publish_nsqd()
    sender = new_producer(server, coalesce=True)

    def work(number: int) -> None:
        for index in range(20):
            assert sender.publish("t", b"%d-%d" % (number, index)) == b"OK"

    gevent.joinall([gevent.spawn(work, number) for number in range(100)], raise_error=True)
    assert len(set(server.bodies)) == len(server.bodies) == 2000
    assert len(server.commands) < 500
