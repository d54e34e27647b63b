"""The producer against an nsqd that answers as each test says: arguments, commands, batches, results, closing."""

from __future__ import annotations

import subprocess
import sys

import gevent
import pytest
from gevent import Timeout
from gevent.event import Event
from support.peers import frame
from support.ports import free_address
from support.publishing import refuse, stay_mute
from support.waiting import PROCESS, WAIT, promptly

from nsq_fast import Producer, errors
from nsq_fast.broker import BrokerProcess

HEARTBEAT, OK = frame(0, b"_heartbeat_"), frame(0, b"OK")


def names(commands):
    return [command.name for command in commands]


def numbers(count):
    return [b"%d" % number for number in range(count)]


def results_of(results):
    """Which of them succeeded."""
    gevent.joinall(results, timeout=WAIT)
    return [result.successful() for result in results]


# What goes over the wire


def test_each_publish_becomes_its_command(publishing):
    server, sender = publishing()
    assert sender.publish("t", b"one") == b"OK"
    assert sender.publish("t", bytearray(b"two"), defer=0) == b"OK"
    assert sender.publish("t", memoryview(b"three"), defer=250) == b"OK"
    parts = (part for part in (b"four", bytearray(b"five"), memoryview(b"six")))
    assert sender.multipublish("u#ephemeral", parts) == b"OK"
    assert [command[:3] for command in server.commands] == [
        ("PUB", "t", ()),
        ("PUB", "t", ()),
        ("DPUB", "t", ("250",)),
        ("MPUB", "u#ephemeral", ()),
    ]
    assert server.bodies == [b"one", b"two", b"three", b"four", b"five", b"six"]


def test_a_batch_above_max_body_size_is_cut_in_order(publishing):
    server, sender = publishing(max_body_size=100, max_msg_size=90)
    bodies = [bytes([number]) * size for number, size in enumerate([30, 30, 30, 90, 1, 2, 3, 60])]
    assert sender.multipublish("t", iter(bodies)) == b"OK"
    assert server.bodies == bodies
    assert [len(command.bodies) for command in server.commands] == [2, 1, 1, 4]
    assert all(len(command.body) <= 100 for command in server.commands)


def test_a_cut_batch_of_which_a_part_fails_says_that_the_rest_may_be_stored(publishing):
    def answer(peer, command):
        refuse(peer, b"E_BAD_MESSAGE no") if b"bad" in command.body else peer.ok()

    _, sender = publishing(answer, max_body_size=16, max_msg_size=10)
    with pytest.raises(errors.PublishFailed) as caught:
        sender.multipublish("t", [b"good", b"bad", b"fine"])
    assert caught.value.possibly_stored
    assert isinstance(caught.value.__cause__, errors.BadMessage)


@pytest.mark.parametrize(
    "pieces", [[OK], [OK[:3], OK[3:]], [HEARTBEAT, OK], [HEARTBEAT + OK], [HEARTBEAT + OK[:9], OK[9:]]]
)
def test_a_reply_is_understood_however_it_comes(publishing, pieces):
    def answer(peer, command):
        for piece in pieces:
            peer.sock.sendall(piece)
            gevent.sleep(0.005)  # sleep: so that pieces are read one by one

    _, sender = publishing(answer)
    assert [sender.publish("t", b"x") for _ in range(3)] == [b"OK"] * 3
    assert sender.stats()["held"] == 0


def test_a_response_nobody_asked_for_costs_the_connection_and_no_more(publishing):
    """And the failed FIN of somebody else fails no publish."""
    failed = frame(1, b"E_FIN_FAILED of somebody else")
    server, sender = publishing(lambda peer, command: peer.send(failed + OK * 3))
    assert [sender.publish("t", body) for body in numbers(5)] == [b"OK"] * 5
    assert set(server.bodies) == set(numbers(5))


def test_results_are_awaited_together(publishing):
    def answer(peer, command):
        peer.frame(1, b"E_INVALID_JSON_HEADER no") if command.body == b"1" else peer.ok()

    _, sender = publishing(answer)
    results = [sender.publish("t", body, raise_error=False) for body in numbers(3)]
    results += [sender.publish_nowait("t", b"3"), sender.multipublish("t", [b"4", b"5"], raise_error=False)]
    assert len(list(gevent.iwait(results, timeout=WAIT))) == 5
    assert results_of(results) == [True, False, True, True, True]
    assert isinstance(results[1].exception, errors.PublishFailed)


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


def test_publishes_are_counted_by_outcome(publishing):
    def outcomes():
        stats = sender.stats()
        return stats["stored"], stats["refused"], stats["unknown"]

    nsqd, sender = publishing(publish_timeout=0.2)
    sender.publish("t", b"x")
    sender.publish_nowait("t", b"y").get()
    sender.multipublish("t", [b"a", b"b"])
    assert outcomes() == (3, 0, 0)
    nsqd.answer = lambda peer, command: refuse(peer, b"E_BAD_MESSAGE bad")
    with pytest.raises(errors.PublishFailed):
        sender.publish("t", b"x")
    assert outcomes() == (3, 1, 0)
    nsqd.answer = stay_mute
    with pytest.raises(errors.PublishTimeout) as caught:
        sender.publish("t", b"x")
    assert caught.value.possibly_stored
    assert outcomes() == (3, 1, 1)


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


def test_a_hundred_greenlets_need_few_commands_and_one_connection(publishing):
    def work(number):
        for index in range(20):
            assert sender.publish("t", b"%d-%d" % (number, index)) == b"OK"

    server, sender = publishing(coalesce=True)
    gevent.joinall([gevent.spawn(work, number) for number in range(100)], raise_error=True)
    assert len(set(server.bodies)) == len(server.bodies) == 2000
    assert len(server.commands) < 500
    assert len(server.peers) == 1


# Callers whose publishes were stored together, or that are interrupted


def test_callers_are_resumed_in_order_whatever_they_do_next(publishing):
    _, producer = publishing(linger=0.01)
    producer.publish("t", b"first")
    order, callers = [], []

    def call(number):
        for step in range(3):
            producer.publish("t", b"x")
            order.append((step, number))
            if number == 1 and step == 0:
                return
            if number == 3 and step == 0:
                callers[5].kill(block=False)
            if number == 4:
                gevent.sleep(0)

    callers += [gevent.spawn(call, number) for number in range(8)]
    with Timeout(WAIT):
        gevent.joinall(callers, raise_error=True)
    assert [number for step, number in order if step == 0] == list(range(8))
    assert sorted(number for step, number in order if step == 2) == [0, 2, 3, 4, 6, 7]
    assert producer.stats()["held"] == 0


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


WANT_OF_MEMORY = """
import resource, sys
from nsq_fast import Producer
from nsq_fast.broker import RedesignedCluster

MANY = 200 << 20
with RedesignedCluster(nodes=1) as cluster:
    cluster.create_topic("t", 2, 1, ordered=True, channels=["c"])
    lookup = str(cluster.lookupds[0].http_address)
    with Producer(lookupd_http_addresses=lookup, max_msg_size=2 * MANY, max_body_size=2 * MANY) as producer:
        producer.publish("t", b"before", key="k")
        body = bytes(MANY)
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        limits = resource.getrlimit(resource.RLIMIT_AS)
        for publish in (producer.publish, lambda *given, **more: producer.multipublish(given[0], [given[1]], **more)):
            resource.setrlimit(resource.RLIMIT_AS, (used + MANY // 2, limits[1]))
            try:
                publish("t", body, key="k")
            except Exception as error:
                print(type(error).__name__, getattr(error, "possibly_stored", None))
            resource.setrlimit(resource.RLIMIT_AS, limits)
            print(producer.publish("t", b"after", key="k"), flush=True)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a limit of the address space")
def test_want_of_memory_while_a_command_is_made_does_not_wedge_its_partition():
    command = [sys.executable, "-c", WANT_OF_MEMORY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS, check=False)
    assert done.stdout.split("\n")[:-1] == ["PublishFailed False", "b'OK'"] * 2, done.stderr[-2000:]


# Closing


def test_close_gives_up_after_its_timeout_and_tells_the_truth(publishing, no_unseen_errors):
    server, sender = publishing(stay_mute)
    sent = sender.publish_nowait("t", b"x")
    caller = gevent.spawn(sender.publish, "t", b"y")
    server.wait_commands(2)
    never = Producer([free_address()])
    never.start()
    unsent = never.publish_nowait("t", b"x")
    with promptly():
        sender.close(timeout=0.05)
        never.close(timeout=0.05)
    for result, possibly_stored in ((sent, True), (caller, True), (unsent, False)):
        with pytest.raises(errors.PublishFailed, match="the producer was closed") as caught:
            result.get(timeout=WAIT)
        assert caught.value.possibly_stored is possibly_stored
    no_unseen_errors.clear()


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


def test_close_while_callers_wait_for_room(publishing, no_unseen_errors):
    server, sender = publishing(stay_mute, max_pending=1)
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
