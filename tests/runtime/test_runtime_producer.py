"""The producer against an nsqd that answers as each test says: arguments, commands, results, closing."""

from __future__ import annotations

from typing import Any

import gevent
import pytest
from support.peers import Peer
from support.ports import free_address
from support.publishing import Command, Nsqds, Producers, refuse, stay_mute
from support.waiting import WAIT, promptly

from nsq_fast import Producer, errors

# Arguments


@pytest.mark.parametrize(
    ("topic", "body", "error"),
    [
        ("bad topic!", b"x", errors.NameInvalid),
        ("", b"x", errors.NameInvalid),
        ("t" * 65, b"x", errors.NameInvalid),
        (b"t", b"x", errors.NameInvalid),
        (["t"], b"x", errors.NameInvalid),
        ("t", "text", TypeError),
        ("t", None, TypeError),
        ("t", 5, TypeError),
        ("t", b"", errors.BodyInvalid),
        ("t", memoryview(b""), errors.BodyInvalid),
        ("t", b"x" * 101, errors.BodyInvalid),
        ("t", bytearray(101), errors.BodyInvalid),
    ],
)
@pytest.mark.parametrize("linger", [0.0, 0.01])
def test_a_rejected_publish_harms_nobody(
    publish_nsqd: Nsqds, new_producer: Producers, topic: Any, body: Any, error: type[Exception], linger: float
) -> None:
    server = publish_nsqd()
    sender = new_producer(server, max_msg_size=100, linger=linger)
    with pytest.raises(error):
        sender.publish(topic, body)
    with pytest.raises(error):
        sender.multipublish(topic, [b"x", body])
    with pytest.raises(error):
        sender.publish_nowait(topic, body)
    with pytest.raises(error):
        sender.publish(topic, body, raise_error=False)
    assert sender.publish("t", b"good") == b"OK"
    assert server.bodies == [b"good"]
    assert sender.stats()["held"] == 0


def test_errors_of_arguments_name_them(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    sender = new_producer(publish_nsqd())
    with pytest.raises(TypeError, match="body must be bytes, bytearray or memoryview, not str; encode it first"):
        sender.publish("t", "text")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"bodies\[1\]: body must be bytes"):
        sender.multipublish("t", [b"x", "text"])  # type: ignore[list-item]
    with pytest.raises(errors.BodyInvalid, match="bodies is empty"):
        sender.multipublish("t", [])
    for bodies in ("text", b"bytes", 5, None):
        with pytest.raises(TypeError, match="bodies must be an iterable"):
            sender.multipublish("t", bodies)  # type: ignore[call-overload]
    for timeout in (0, -1, "5", True, float("nan")):
        with pytest.raises(errors.ConfigError, match="timeout="):
            sender.publish("t", b"x", timeout=timeout)  # type: ignore[call-overload]
        with pytest.raises(errors.ConfigError, match="timeout="):
            sender.multipublish("t", [b"x"], timeout=timeout)  # type: ignore[call-overload]
    for defer in (-1, 1.5, "5", True):
        with pytest.raises(errors.ConfigError, match="defer="):
            sender.publish("t", b"x", defer=defer)  # type: ignore[call-overload]


def test_construction_checks_addresses_and_options() -> None:
    with pytest.raises(ValueError, match="nowhere to publish to"):
        Producer([])
    with pytest.raises(errors.ConfigError, match="did you mean 'linger'"):
        Producer("127.0.0.1", lingr=1)
    with pytest.raises(errors.ConfigError, match="invalid port"):
        Producer("127.0.0.1:x")
    with pytest.raises(errors.ConfigError, match="max_pending"):
        Producer("127.0.0.1", max_pending=0)


def test_it_publishes_only_while_it_runs(publish_nsqd: Nsqds) -> None:
    server = publish_nsqd()
    sender = Producer([server.address])
    with pytest.raises(errors.NotRunning, match=r"call start\(\)"):
        sender.publish("t", b"x")
    with sender:
        assert sender.is_running
        assert sender.publish("t", b"x") == b"OK"
        assert sender.is_connected
    assert not sender.is_running
    assert sender.join(0)
    for attempt in (lambda: sender.publish("t", b"x"), lambda: sender.multipublish("t", [b"x"]), sender.start):
        with pytest.raises(errors.NotRunning, match="closed"):
            attempt()
    sender.close()


# What goes over the wire


def test_each_publish_becomes_its_command(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    server = publish_nsqd()
    sender = new_producer(server)
    assert sender.publish("t", b"one") == b"OK"
    assert sender.publish("t", bytearray(b"two"), defer=0) == b"OK"
    assert sender.publish("t", memoryview(b"three"), defer=250) == b"OK"
    assert (
        sender.multipublish("u#ephemeral", (part for part in (b"four", bytearray(b"five"), memoryview(b"six"))))
        == b"OK"
    )
    assert [command[:3] for command in server.commands] == [
        ("PUB", "t", ()),
        ("PUB", "t", ()),
        ("DPUB", "t", ("250",)),
        ("MPUB", "u#ephemeral", ()),
    ]
    assert server.bodies == [b"one", b"two", b"three", b"four", b"five", b"six"]


def test_a_buffer_may_be_changed_as_soon_as_it_was_handed_over(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    server = publish_nsqd()
    for linger in (0.0, 0.01):
        buffer = bytearray(b"before")
        result = new_producer(server, linger=linger).publish("t", buffer, raise_error=False)
        buffer[:] = b"after!"
        assert result.get(timeout=WAIT) == b"OK"
    assert server.bodies == [b"before", b"before"]


def test_a_batch_above_max_body_size_is_cut_in_order(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    server = publish_nsqd()
    sender = new_producer(server, max_body_size=100, max_msg_size=90)
    bodies = [bytes([number]) * size for number, size in enumerate([30, 30, 30, 90, 1, 2, 3, 60])]
    assert sender.multipublish("t", iter(bodies)) == b"OK"
    assert server.bodies == bodies
    assert [len(command.bodies) for command in server.commands] == [2, 1, 1, 4]
    assert all(len(command.body) <= 100 for command in server.commands)


def test_a_cut_batch_of_which_a_part_fails_says_that_the_rest_may_be_stored(
    publish_nsqd: Nsqds, new_producer: Producers
) -> None:
    def answer(peer: Peer, command: Command) -> None:
        refuse(peer, b"E_BAD_MESSAGE no") if b"bad" in command.body else peer.ok()

    server = publish_nsqd(answer)
    sender = new_producer(server, max_body_size=16, max_msg_size=10)
    with pytest.raises(errors.PublishFailed) as caught:
        sender.multipublish("t", [b"good", b"bad", b"fine"])
    assert caught.value.possibly_stored
    assert isinstance(caught.value.__cause__, errors.BadMessage)


def test_a_hundred_greenlets_share_one_connection(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    server = publish_nsqd()
    sender = new_producer(server)

    def work(number: int) -> None:
        for index in range(20):
            assert sender.publish("t", b"%d-%d" % (number, index)) == b"OK"

    workers = [gevent.spawn(work, number) for number in range(100)]
    gevent.joinall(workers, raise_error=True)
    assert len(server.peers) == 1
    assert sorted(server.bodies) == sorted(b"%d-%d" % (number, index) for number in range(100) for index in range(20))


def test_results_are_awaited_together(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    def answer(peer: Peer, command: Command) -> None:
        peer.frame(1, b"E_INVALID_JSON_HEADER no") if command.body == b"1" else peer.ok()

    sender = new_producer(publish_nsqd(answer))
    results = [sender.publish("t", b"%d" % number, raise_error=False) for number in range(3)]
    results += [sender.publish_nowait("t", b"3"), sender.multipublish("t", [b"4", b"5"], raise_error=False)]
    assert len(list(gevent.iwait(results, timeout=WAIT))) == 5
    gevent.joinall(results, timeout=WAIT)
    assert [result.successful() for result in results] == [True, False, True, True, True]
    assert isinstance(results[1].exception, errors.PublishFailed)


# Closing


def test_close_waits_for_replies(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    def answer(peer: Peer, command: Command) -> None:
        gevent.sleep(0.002)  # sleep: a server that takes its time
        peer.ok()

    server = publish_nsqd(answer)
    sender = new_producer(server, linger=0.5)
    results = [sender.publish_nowait(f"t{number % 3}", b"%d" % number) for number in range(20)]
    sender.close()
    assert [result.get(block=False) for result in results] == [b"OK"] * 20


def test_close_gives_up_after_its_timeout_and_tells_the_truth(
    publish_nsqd: Nsqds, new_producer: Producers, no_unseen_errors: list[Any]
) -> None:
    server = publish_nsqd(stay_mute)
    sender = new_producer(server)
    sent = sender.publish_nowait("t", b"x")
    caller = gevent.spawn(sender.publish, "t", b"y")
    server.wait_commands(2)
    with promptly():
        sender.close(timeout=0.05)
    for result in (sent, caller):
        with pytest.raises(errors.PublishFailed, match="the producer was closed") as caught:
            result.get(timeout=WAIT)
        assert caught.value.possibly_stored
    no_unseen_errors.clear()


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_whoever_closes_while_another_does_waits_for_the_same_end(
    publish_nsqd: Nsqds, new_producer: Producers, timeout: float | None
) -> None:
    server = publish_nsqd(stay_mute)
    sender = new_producer(server)
    result = sender.publish_nowait("t", b"x")
    server.wait_commands(1)
    closing = [gevent.spawn(sender.close, timeout) for _ in range(3)]
    gevent.joinall(closing, timeout=0.05)
    assert not sender.join(timeout=0)
    assert not any(each.ready() for each in closing)
    server.peers[0].ok()
    gevent.joinall(closing, timeout=10, raise_error=True)
    assert sender.join(timeout=0)
    assert result.get(timeout=0) == b"OK"


def test_a_second_close_with_a_timeout_ends_what_the_first_waits_for(
    publish_nsqd: Nsqds, new_producer: Producers
) -> None:
    server = publish_nsqd(stay_mute)
    sender = new_producer(server, publish_timeout=60.0)
    result = sender.publish_nowait("t", b"x")
    server.wait_commands(1)
    first = gevent.spawn(sender.close)
    gevent.sleep(0)
    sender.close(timeout=0.01)
    first.get(timeout=10)
    assert sender.join(timeout=0)
    with pytest.raises(errors.PublishFailed, match="the producer was closed"):
        result.get(timeout=10)


def test_close_fails_what_never_left() -> None:
    sender = Producer([free_address()])
    sender.start()
    result = sender.publish_nowait("t", b"x")
    sender.close(timeout=0.05)
    with pytest.raises(errors.PublishFailed) as caught:
        result.get(timeout=WAIT)
    assert not caught.value.possibly_stored


def test_close_while_callers_wait_for_room(
    publish_nsqd: Nsqds, new_producer: Producers, no_unseen_errors: list[Any]
) -> None:
    server = publish_nsqd(stay_mute)
    sender = new_producer(server, max_pending=1)
    first = sender.publish_nowait("t", b"x")
    blocked = gevent.spawn(sender.publish, "t", b"y")
    server.wait_commands(1)
    closing = gevent.spawn(sender.close)
    gevent.sleep(0)
    server.peers[0].ok()
    closing.get(timeout=WAIT)
    assert first.get(timeout=WAIT) == b"OK"
    with pytest.raises(errors.NotRunning):
        blocked.get(timeout=WAIT)
    no_unseen_errors.clear()


# Signals


def test_signals(publish_nsqd: Nsqds) -> None:
    def answer(peer: Peer, command: Command) -> None:
        peer.ok() if command.body == b"good" else peer.frame(1, b"E_EXT_NOT_SUPPORT no")

    heard: list[tuple[Any, ...]] = []
    server = publish_nsqd(answer)
    sender = Producer([server.address])
    sender.on_response.connect(lambda who, response: heard.append((who, response)), weak=False)
    sender.on_error.connect(lambda who, error: heard.append((who, type(error))), weak=False)
    sender.on_close.connect(lambda who: heard.append((who, "close")), weak=False)
    with sender:
        sender.publish("t", b"good")
        with pytest.raises(errors.PublishFailed):
            sender.publish("t", b"bad")
    assert heard == [(sender, b"OK"), (sender, errors.ExtNotSupported), (sender, "close")]
