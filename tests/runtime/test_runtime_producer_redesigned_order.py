"""Publishes bound to a partition stay in order, whatever its leaders do; others go where they can."""

from __future__ import annotations

import gevent
import pytest
from msgspec.structs import replace
from support.partitions import topology
from support.ports import free_address
from support.publishing import REDESIGNED, EndOfPeer, agree, refuse, stay_mute
from support.waiting import WAIT, until

from nsq_fast import errors
from nsq_fast.protocol import publishing
from nsq_fast.protocol.topology import Nsqd, Topology

NOT_LEADER = b"E_FAILED_ON_NOT_LEADER "
NOT_WRITABLE = b"E_FAILED_ON_NOT_WRITABLE "
GATHERING = [{}, {"coalesce": True}, {"linger": 0.003}]
PATIENT = {"max_publish_attempts": 100, "publish_timeout": 60.0}


class Log:
    """A partition as servers keep it: what was stored, in order. ``answer`` fails by a script of errors first.

    An error is bytes; None stores the messages but ends the connection before the reply; ``stored`` after an error
    means that the messages were stored all the same.
    """

    def __init__(self, *script, stored=False):
        self.stored = []
        self.attempts = []
        self._script = list(script)
        self._stores_what_fails = stored

    def answer(self, peer, command):
        self.attempts.append(command.bodies)
        error = self._script.pop(0) if self._script else b""
        if error == b"" or error is None or self._stores_what_fails:
            self.stored += command.bodies
        if error is None:
            peer.reset()
            raise EndOfPeer
        if error.startswith(b"E_TOPIC"):
            refuse(peer, error)
        peer.frame(1, error) if error else peer.ok()


def numbers(count):
    return [b"%d" % number for number in range(count)]


def one(nsqd):
    """A topic of one partition."""
    return topology({0: nsqd})


@pytest.mark.parametrize("options", GATHERING)
@pytest.mark.parametrize("encode", ["pub", "mpub"])
def test_want_of_memory_fails_those_that_were_to_be_sent_and_no_later_ones(leading, monkeypatch, options, encode):
    nsqd, sender, _ = leading(**options)
    assert sender.publish("t", b"before", partition=0) == b"OK"
    right, failures = getattr(publishing._codec, encode), [MemoryError()]
    monkeypatch.setattr(publishing._codec, encode, lambda *args: right(*args) if not failures else fail(failures))
    results = [sender.publish_nowait("t", body, partition=0) for body in numbers(5)]
    gevent.joinall(results, timeout=WAIT)
    for body, result in zip(numbers(5), results, strict=True):
        assert (body in nsqd.bodies) == result.successful()
        assert result.successful() or (not result.exception.possibly_stored and "MemoryError" in str(result.exception))
    failures.clear()  # it was not asked where all left in one command, or each in one
    assert sender.publish("t", b"after", partition=0, timeout=WAIT) == b"OK"
    assert sender.stats()["pending"] == sender.stats()["held"] == 0


def fail(failures):
    raise failures.pop()


@pytest.mark.parametrize("options", GATHERING)
@pytest.mark.parametrize(
    "script",
    [
        [NOT_LEADER],
        [NOT_WRITABLE, NOT_LEADER, NOT_WRITABLE],
        [b"", NOT_WRITABLE, b"", b"E_PUB_FAILED busy", b"", b"E_MPUB_FAILED busy"],
        [None],
        [b"", None, NOT_LEADER, None],
        [b"E_TOPIC_NOT_EXIST ", NOT_LEADER],
        [b"E_PUB_TOO_MUCH_WAITING no"],
    ],
)
def test_what_is_tried_again_is_not_overtaken(leading, options, script):
    log = Log(*script, stored=True)
    _, sender, _ = leading(log.answer, max_publish_attempts=9, **options)
    results = [sender.publish_nowait("t", body, key="k") for body in numbers(30)]
    gevent.joinall(results, timeout=WAIT)
    assert all(result.successful() for result in results)
    assert list(dict.fromkeys(log.stored)) == numbers(30)


@pytest.mark.parametrize("options", GATHERING)
def test_callers_of_all_kinds_share_the_order(leading, options):
    log = Log(b"", NOT_WRITABLE, b"", NOT_LEADER)
    _, sender, _ = leading(log.answer, **options)
    results = [sender.publish_nowait("t", b"0", key="k"), gevent.spawn(sender.publish, "t", b"1", key=b"k")]
    gevent.sleep(0)
    results += [
        sender.multipublish("t", [b"2", b"3"], key="k", raise_error=False),
        sender.publish_nowait("t", b"4", partition=0),
        sender.publish_nowait("t", memoryview(b"5"), key="other"),
    ]
    gevent.joinall(results, timeout=WAIT)
    assert log.stored == numbers(6)


@pytest.mark.parametrize("options", GATHERING)
def test_one_caller_that_waits_each_time_keeps_the_order_whatever_fails(leading, options):
    def answer(peer, command):
        if len(nsqd.commands) % 3 == 2:
            peer.frame(1, NOT_LEADER)
        else:
            stored.extend(command.bodies)
            peer.ok()

    stored = []
    nsqd, sender, _ = leading(answer, **options)
    for number in range(0, 20, 2):
        later = sender.publish_nowait("t", b"%d" % number, key="k") if number % 4 else None
        if later is None:
            assert sender.publish("t", b"%d" % number, key="k") == b"OK"
        assert sender.publish("t", b"%d" % (number + 1), key="k") == b"OK"
        assert later is None or later.get(timeout=WAIT) == b"OK"
    assert stored == numbers(20)
    assert sender.stats()["held"] == 0


def test_one_command_is_on_its_way_at_a_time(leading):
    nsqd, sender, _ = leading(stay_mute, coalesce=True)
    results = [sender.publish_nowait("t", body, key="k") for body in numbers(5)]
    nsqd.wait_commands(1)
    results += [sender.publish_nowait("t", body, key="k") for body in numbers(9)[5:]]
    results += [sender.publish_nowait("t", b"free") for _ in range(2)]  # they do not wait for those with a key
    nsqd.wait_commands(2)
    assert [command.bodies for command in nsqd.commands] == [numbers(5), [b"free"] * 2]
    nsqd.answer = agree
    for _ in range(2):
        nsqd.peers[0].ok()
    gevent.joinall(results, timeout=WAIT)
    assert nsqd.commands[2].bodies == numbers(9)[5:]


def test_what_waited_leaves_with_what_those_publish_whom_the_reply_wakes(leading):
    def publish_twice():
        for body in (b"first", b"second"):
            sender.publish("t", body, key="k")

    nsqd, sender, _ = leading(stay_mute, coalesce=True)
    caller = gevent.spawn(publish_twice)
    nsqd.wait_commands(1)
    waiting = [sender.publish_nowait("t", body, key="k") for body in numbers(2)]
    nsqd.answer = agree
    nsqd.peers[0].ok()
    gevent.joinall([caller, *waiting], timeout=WAIT, raise_error=True)
    assert [command.bodies for command in nsqd.commands] == [[b"first"], [*numbers(2), b"second"]]


def test_what_waited_for_a_reply_does_not_linger_besides_and_close_sends_the_rest(leading):
    nsqd, sender, _ = leading(stay_mute, linger=10 * WAIT, linger_max_messages=3)
    results = [sender.publish_nowait("t", body, key="k") for body in numbers(5)]
    nsqd.wait_commands(1)
    nsqd.answer = agree
    nsqd.peers[0].ok()
    gevent.joinall(results, timeout=WAIT)
    last = sender.publish_nowait("t", b"last", key="k")
    sender.close()
    assert last.get(block=False) == b"OK"
    assert [command.bodies for command in nsqd.commands] == [numbers(3), numbers(5)[3:], [b"last"]]


@pytest.mark.parametrize("options", GATHERING)
@pytest.mark.parametrize("is_over", [True, False], ids=["the connection ends", "it stays open"])
def test_one_that_fails_for_good_leaves_a_gap_and_the_rest_in_order(leading, options, is_over):
    def answer(peer, command):
        if b"3" not in command.bodies:
            stored.extend(command.bodies)
            peer.ok()
        elif is_over:
            refuse(peer, b"E_BAD_MESSAGE no")
        else:
            peer.frame(1, b"E_%s_FAILED invalid message write size 9" % command.name.encode())

    stored = []
    _, sender, _ = leading(answer, **options)
    results = [sender.publish_nowait("t", body, key="k") for body in numbers(8)]
    gevent.joinall(results, timeout=WAIT)
    assert [result.successful() for result in results] == [number != 3 for number in range(8)]
    assert stored == [body for body in numbers(8) if body != b"3"]
    assert not results[3].exception.possibly_stored
    assert sender.stats()["held"] == 0


@pytest.mark.parametrize("options", GATHERING)
@pytest.mark.parametrize("ends", ["moves", "dies"])
def test_a_leader_that_moves_or_dies(leading, publish_nsqd, options, ends):
    log = Log()
    new = publish_nsqd(log.answer, version=REDESIGNED)
    old, sender, lookup = leading(log.answer, retry_base_delay=1.0, **options)
    assert sender.publish("t", b"0", key="k") == b"OK"
    old.answer = stay_mute if ends == "dies" else lambda peer, command: peer.frame(1, NOT_LEADER)
    results = [sender.publish_nowait("t", body, key="k") for body in numbers(20)[1:]]
    old.wait_commands(2)
    if ends == "dies":
        old.stop()
    until(lambda: lookup.refreshed)
    lookup.tell(one(new))
    gevent.joinall(results, timeout=WAIT)
    assert all(result.successful() for result in results)
    assert log.stored == numbers(20)
    assert len(new.bodies) == 19


def test_a_missing_partition_is_never_replaced_by_another(lookup_producer, leaders):
    present = {number: leaders[number] for number in (0, 1)}
    sender, lookup = lookup_producer(topology(present, partition_num=3))
    waiting = [sender.publish_nowait("t", body, partition=2) for body in numbers(4)]
    for number in range(6):
        assert sender.publish("t", b"free-%d" % number) == b"OK"
    with pytest.raises(errors.NoLeader, match="partition 2 of topic 't': lookup names no leader"):
        sender.publish("t", b"x", partition=2, timeout=0.05)
    with pytest.raises(errors.NoLeader):
        sender.publish("t", b"x", partition=2, block=False)
    until(lambda: lookup.refreshed >= 2)
    assert sender.stats()["leaders"]["t"][2] is None
    lookup.tell(topology(leaders))
    gevent.joinall(waiting, timeout=WAIT)
    assert leaders[2].bodies == numbers(4)
    assert leaders[0].bodies_of(2) == leaders[1].bodies_of(2) == []
    assert sender.stats()["held"] == 0


def test_a_leader_that_is_not_reachable_is_named(lookup_producer):
    address = free_address()
    known = topology({}, partition_num=1)
    sender, lookup = lookup_producer(replace(known, partitions={0: Nsqd(address, address, REDESIGNED)}))
    with pytest.raises(errors.NoLeader, match=f"its leader {address} is not connected") as caught:
        sender.publish("t", b"x", key="k", timeout=1.0)
    assert isinstance(caught.value.__cause__, errors.ConnectFailed)
    assert lookup.refreshed
    with pytest.raises(errors.NoNsqd):
        sender.publish("t", b"x", timeout=0.1)


def test_keys_wait_in_order_for_the_first_word_of_lookup(lookup_producer, publish_nsqd):
    nsqd = publish_nsqd(version=REDESIGNED)
    sender, lookup = lookup_producer()
    results = [sender.publish_nowait("t", body, key="k") for body in numbers(5)]
    with pytest.raises(errors.NoLeader, match="did not say which partitions"):
        sender.publish("t", b"x", key="k", timeout=0.05)
    lookup.tell(one(nsqd))
    gevent.joinall(results, timeout=WAIT)
    assert nsqd.bodies == numbers(5)
    for answer in (Topology(), topology({}, publish_nsqd())):  # one without partitions leaves the leaders as they were
        lookup.tell(answer)
        assert sender.publish("t", b"x", key="k") == b"OK"
        assert sender.publish("t", b"x") == b"OK"


@pytest.mark.parametrize("refusal", [NOT_LEADER, b"E_PUB_FAILED exiting", b"E_PUB_FAILED pub to wait channel timeout"])
@pytest.mark.parametrize("arguments", [{"key": "k"}, {}], ids=["key", "no key"])
def test_time_ends_a_publish_that_meets_a_moving_leader_and_no_count(leading, arguments, refusal):
    nsqd, sender, lookup = leading(
        lambda peer, command: peer.frame(1, refusal),
        publish_timeout=60.0,
        retry_max_delay=0.01,
        max_publish_attempts=1,
        retry_unknown_outcome=False,
    )
    result = sender.publish_nowait("t", b"x", **arguments)
    nsqd.wait_commands(50)
    assert not result.ready()
    assert lookup.refreshed
    nsqd.answer = agree
    assert result.get(timeout=WAIT) == b"OK"


@pytest.mark.parametrize("options", GATHERING)
def test_what_ends_servers_is_sent_to_two_of_them_and_harms_no_other(lookup_producer, publish_nsqd, options):
    def die_of_poison(peer, command):
        if b"poison" in command.bodies:
            peer.reset()
            raise EndOfPeer
        peer.ok()

    nsqds = [publish_nsqd(die_of_poison, version=REDESIGNED) for _ in range(4)]
    sender, _ = lookup_producer(topology(dict(enumerate(nsqds))), **PATIENT, **options)
    sender.publish("t", b"first")
    until(lambda: len(sender.stats()["connected"]) == 4)
    results = [sender.publish_nowait("t", body) for body in (b"poison", *numbers(40))]
    gevent.joinall(results, timeout=WAIT)
    killed = [nsqd for nsqd in nsqds if b"poison" in nsqd.bodies]
    assert len(killed) == 2
    assert all(result.get(block=False) == b"OK" for result in results[1:])
    error = results[0].exception
    assert isinstance(error, errors.PublishFailed)
    assert error.possibly_stored
    for text in (
        "ended the connection while working on it",
        "no other server",
        *(str(each.address) for each in killed),
    ):
        assert text in str(error)


def test_what_was_behind_what_ended_servers_is_tried_on(leading, publish_nsqd):
    first, sender, lookup = leading(stay_mute, **PATIENT)
    nsqds = [first, *(publish_nsqd(stay_mute, version=REDESIGNED) for _ in range(3))]
    poison = sender.publish_nowait("t", b"poison")
    behind = sender.publish_nowait("t", b"behind")
    for number, nsqd in enumerate(nsqds[:3], start=1):
        nsqd.wait_commands(1 if number == 3 else 2)
        nsqd.peers[0].reset()
        lookup.tell(one(nsqds[number]))
    nsqds[3].answer = agree
    assert behind.get(timeout=WAIT) == b"OK"
    assert [b"poison" in nsqd.bodies for nsqd in nsqds] == [True, True, False, False]
    assert isinstance(poison.exception, errors.PublishFailed)


def test_a_silent_leader_is_asked_about_until_another_leads_and_then_left_at_once(leading, publish_nsqd, monkeypatch):
    monkeypatch.setattr("nsq_fast.client.routing.SILENCE", 1000.0)
    new = publish_nsqd(version=REDESIGNED)
    old, sender, lookup = leading(stay_mute, attempt_timeout=0.1, publish_timeout=60.0, retry_max_delay=0.05)
    results = [sender.publish_nowait("t", body, key="k") for body in numbers(3)]
    old.wait_commands(1)
    before = lookup.refreshed
    until(lambda: lookup.refreshed >= before + 10)  # lookup may take a while to see that the leader is gone
    assert sender.stats()["stalled"] == [str(old.address)]
    lookup.tell(one(new))
    gevent.joinall(results, timeout=WAIT, raise_error=True)
    assert new.bodies == numbers(3)
    asked = lookup.refreshed
    assert sender.publish("t", b"3", key="k") == b"OK"
    assert lookup.refreshed <= asked + 1  # no more than what was on its way


@pytest.mark.parametrize("trouble", ["silent", "moving"])
def test_publishes_without_key_go_round_a_leader_in_trouble(lookup_producer, leaders, trouble):
    sender, lookup = lookup_producer(
        topology(leaders), attempt_timeout=0.1, publish_timeout=60.0, retry_base_delay=5.0, retry_max_delay=5.0
    )
    assert sender.publish("t", b"first") == b"OK"
    until(lambda: len(sender.stats()["connected"]) == 3)
    leaders[1].answer = stay_mute if trouble == "silent" else lambda peer, command: peer.frame(1, NOT_LEADER)
    before = lookup.refreshed
    callers = [gevent.spawn(sender.publish, "t", body) for body in numbers(12)]
    gevent.joinall(callers, timeout=WAIT, raise_error=True)
    owed = len(leaders[1].commands)
    for number in range(30):
        assert sender.publish("t", b"later-%d" % number, timeout=1 if trouble == "moving" else 60) == b"OK"
    assert len(leaders[1].commands) == owed, "then it was left alone"
    assert lookup.refreshed > before


def test_an_unknown_outcome_is_not_tried_again_when_duplicates_are_unwanted(leading):
    for failure in (NOT_WRITABLE, b"E_PUB_FAILED x", None):
        log = Log(failure)
        _, sender, _ = leading(log.answer, retry_unknown_outcome=False)
        with pytest.raises(errors.PublishFailed, match="may have been stored") as caught:
            sender.publish("t", b"x", key="k")
        assert caught.value.possibly_stored
        assert sender.publish("t", b"y", key="k") == b"OK"
        assert log.attempts == [[b"x"], [b"y"]]


def test_a_deadline_or_an_interruption_in_the_middle_keeps_the_order_of_the_others(leading):
    nsqd, sender, _ = leading(coalesce=True)
    sender.publish("t", b"first", key="k")  # so that it is connected
    nsqd.answer = stay_mute
    late = sender.publish_nowait("t", b"late", key="k", timeout=0.5)
    nsqd.wait_commands(2)
    never = sender.publish_nowait("t", b"never", key="k", timeout=0.5)
    results = [sender.publish_nowait("t", body, key="k") for body in numbers(2)]
    victim = gevent.spawn(sender.publish, "t", b"interrupted", key="k")
    gevent.sleep(0)
    results += [sender.publish_nowait("t", body, key="k") for body in numbers(4)[2:]]
    victim.kill()
    gevent.joinall([late, never], timeout=WAIT)
    assert late.exception.possibly_stored
    assert not never.exception.possibly_stored
    nsqd.answer = agree
    nsqd.peers[0].ok()
    gevent.joinall(results, timeout=WAIT)
    assert nsqd.bodies == [b"first", b"late", *numbers(4)]
    assert sender.stats()["held"] == 0


def test_callers_that_waited_for_room_are_not_passed(leading):
    def work(name):
        for number in range(20):
            called.append(b"%d-%d" % (name, number))
            sender.publish("t", called[-1], key="k")

    log, called = Log(), []
    _, sender, _ = leading(log.answer, max_pending=3)
    gevent.joinall([gevent.spawn(work, name) for name in range(10)], timeout=WAIT, raise_error=True)
    assert log.stored == called
    assert sender.stats()["held"] == 0
