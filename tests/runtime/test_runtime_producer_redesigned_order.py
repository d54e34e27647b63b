"""Publishes bound to a partition stay in order, whatever its leaders do; others go where they can."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import gevent
import pytest
from msgspec.structs import replace
from support.partitions import topology
from support.peers import Peer
from support.ports import free_address
from support.publishing import (
    REDESIGNED,
    Command,
    EndOfPeer,
    Leaders,
    LookupProducers,
    Nsqds,
    PublishNsqd,
    agree,
    refuse,
    stay_mute,
)
from support.waiting import WAIT, until

from nsq_fast import errors
from nsq_fast.protocol.topology import Nsqd, Topology

NOT_LEADER = b"E_FAILED_ON_NOT_LEADER "
NOT_WRITABLE = b"E_FAILED_ON_NOT_WRITABLE "
GATHERING: list[dict[str, Any]] = [{}, {"coalesce": True}, {"linger": 0.003}]


class Log:
    """A partition as servers keep it: what was stored, in order. ``answer`` fails by a script of errors first.

    An error is bytes; None stores the messages but ends the connection before the reply; ``stored`` after an error
    means that the messages were stored all the same.
    """

    def __init__(self, *script: bytes | None, stored: bool = False) -> None:
        self.stored: list[bytes] = []
        self.attempts: list[list[bytes]] = []
        self._script = list(script)
        self._stores_what_fails = stored

    def answer(self, peer: Peer, command: Command) -> None:
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


def first_copies(bodies: Iterable[bytes]) -> list[bytes]:
    return list(dict.fromkeys(bodies))


def numbers(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def one(nsqd: PublishNsqd, **meta: Any) -> Topology:
    """A topic of one partition."""
    return topology({0: nsqd}, partition_num=1, **meta)


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
def test_what_is_tried_again_is_not_overtaken(
    lookup_producer: LookupProducers, publish_nsqd: Nsqds, options: dict[str, Any], script: list[bytes | None]
) -> None:
    log = Log(*script, stored=True)
    sender, _ = lookup_producer(one(publish_nsqd(log.answer, version=REDESIGNED)), max_publish_attempts=9, **options)
    results = [sender.publish_nowait("t", body, key="k") for body in numbers(30)]
    gevent.joinall(results, timeout=WAIT)
    assert all(result.successful() for result in results)
    assert first_copies(log.stored) == numbers(30)


@pytest.mark.parametrize("options", GATHERING)
def test_callers_of_all_kinds_share_the_order(
    lookup_producer: LookupProducers, publish_nsqd: Nsqds, options: dict[str, Any]
) -> None:
    log = Log(b"", NOT_WRITABLE, b"", NOT_LEADER)
    sender, _ = lookup_producer(one(publish_nsqd(log.answer, version=REDESIGNED)), **options)
    results: list[Any] = [
        sender.publish_nowait("t", b"0", key="k"),
        gevent.spawn(sender.publish, "t", b"1", key="k"),
    ]
    gevent.sleep(0)
    results += [
        sender.multipublish("t", [b"2", b"3"], key="k", raise_error=False),
        sender.publish_nowait("t", b"4", partition=0),
        sender.publish_nowait("t", memoryview(b"5"), key="other"),
    ]
    gevent.joinall(results, timeout=WAIT)
    assert log.stored == numbers(6)


def test_one_command_is_on_its_way_at_a_time(lookup_producer: LookupProducers, publish_nsqd: Nsqds) -> None:
    nsqd = publish_nsqd(stay_mute, version=REDESIGNED)
    sender, _ = lookup_producer(one(nsqd), coalesce=True)
    results = [sender.publish_nowait("t", body, key="k") for body in numbers(5)]
    nsqd.wait_commands(1)
    more = [sender.publish_nowait("t", body, key="k") for body in numbers(9)[5:]]
    free = [sender.publish_nowait("t", b"free") for _ in range(2)]  # they do not wait for those with a key
    nsqd.wait_commands(2)
    assert [command.bodies for command in nsqd.commands] == [numbers(5), [b"free"] * 2]
    nsqd.answer = agree
    for _ in range(2):
        nsqd.peers[0].ok()
    gevent.joinall([*results, *more, *free], timeout=WAIT)
    assert nsqd.commands[2].bodies == numbers(9)[5:]


def test_what_waited_leaves_with_what_those_publish_whom_the_reply_wakes(
    lookup_producer: LookupProducers, publish_nsqd: Nsqds
) -> None:
    nsqd = publish_nsqd(stay_mute, version=REDESIGNED)
    sender, _ = lookup_producer(one(nsqd), coalesce=True)

    def publish_twice() -> None:
        for body in (b"first", b"second"):
            sender.publish("t", body, key="k")

    caller = gevent.spawn(publish_twice)
    nsqd.wait_commands(1)
    waiting = [sender.publish_nowait("t", body, key="k") for body in numbers(2)]
    nsqd.answer = agree
    nsqd.peers[0].ok()
    gevent.joinall([caller, *waiting], timeout=WAIT, raise_error=True)
    assert [command.bodies for command in nsqd.commands] == [[b"first"], [*numbers(2), b"second"]]


def test_what_waited_for_a_reply_does_not_linger_besides(lookup_producer: LookupProducers, publish_nsqd: Nsqds) -> None:
    nsqd = publish_nsqd(stay_mute, version=REDESIGNED)
    sender, _ = lookup_producer(one(nsqd), linger=10 * WAIT, linger_max_messages=3)
    results = [sender.publish_nowait("t", body, key="k") for body in numbers(5)]
    nsqd.wait_commands(1)
    nsqd.answer = agree
    nsqd.peers[0].ok()
    gevent.joinall(results, timeout=WAIT)
    assert [command.bodies for command in nsqd.commands] == [numbers(3), numbers(5)[3:]]


def test_one_that_fails_for_good_leaves_a_gap_and_the_rest_in_order(
    lookup_producer: LookupProducers, publish_nsqd: Nsqds
) -> None:
    stored: list[bytes] = []

    def answer(peer: Peer, command: Command) -> None:
        if b"3" in command.bodies:
            refuse(peer, b"E_BAD_MESSAGE no")
        stored.extend(command.bodies)
        peer.ok()

    for options in GATHERING:
        stored.clear()
        sender, _ = lookup_producer(one(publish_nsqd(answer, version=REDESIGNED)), **options)
        results = [sender.publish_nowait("t", body, key="k") for body in numbers(8)]
        gevent.joinall(results, timeout=WAIT)
        assert [result.successful() for result in results] == [number != 3 for number in range(8)]
        assert stored == [body for body in numbers(8) if body != b"3"]
        assert not results[3].exception.possibly_stored
        assert sender.stats()["held"] == 0


@pytest.mark.parametrize("options", GATHERING)
def test_a_leader_that_moves(lookup_producer: LookupProducers, publish_nsqd: Nsqds, options: dict[str, Any]) -> None:
    log = Log()
    old, new = (publish_nsqd(log.answer, version=REDESIGNED) for _ in range(2))
    sender, lookup = lookup_producer(one(old), retry_base_delay=1.0, **options)
    assert sender.publish("t", b"0", key="k") == b"OK"
    old.answer = lambda peer, command: peer.frame(1, NOT_LEADER)
    results = [sender.publish_nowait("t", body, key="k") for body in numbers(20)[1:]]
    old.wait_commands(2)
    until(lambda: lookup.refreshed)
    lookup.tell(one(new))
    gevent.joinall(results, timeout=0.8)  # it waits for no pause when lookup knows the new leader
    assert all(result.successful() for result in results)
    assert log.stored == numbers(20)
    assert len(new.bodies) == 19


def test_a_leader_that_dies(lookup_producer: LookupProducers, publish_nsqd: Nsqds) -> None:
    log = Log()
    old, new = (publish_nsqd(log.answer, version=REDESIGNED) for _ in range(2))
    sender, lookup = lookup_producer(one(old))
    assert sender.publish("t", b"0", key="k") == b"OK"
    old.answer = stay_mute
    results = [sender.publish_nowait("t", body, key="k") for body in numbers(9)[1:]]
    old.wait_commands(2)
    old.stop()
    until(lambda: lookup.refreshed)
    lookup.tell(one(new))
    gevent.joinall(results, timeout=WAIT)
    assert all(result.successful() for result in results)
    assert log.stored == numbers(9)


def test_a_former_leader_that_says_nothing_is_given_up(
    lookup_producer: LookupProducers, publish_nsqd: Nsqds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsq_fast.client.routing.SILENCE", 0.05)
    old, new = publish_nsqd(stay_mute, version=REDESIGNED), publish_nsqd(version=REDESIGNED)
    sender, lookup = lookup_producer(one(old))
    results = [sender.publish_nowait("t", body, key="k") for body in numbers(3)]
    old.wait_commands(1)
    lookup.tell(one(new))
    gevent.joinall(results, timeout=WAIT)
    assert new.bodies == numbers(3)


def test_a_missing_partition_is_never_replaced_by_another(lookup_producer: LookupProducers, leaders: Leaders) -> None:
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


def test_a_leader_that_is_not_reachable_is_named(lookup_producer: LookupProducers) -> None:
    address = free_address()
    gone = replace(
        topology({}), partitions={0: Nsqd(address, address, REDESIGNED)}, meta=topology({}, partition_num=1).meta
    )
    sender, lookup = lookup_producer(gone)
    with pytest.raises(errors.NoLeader, match=f"its leader {address} is not connected") as caught:
        sender.publish("t", b"x", key="k", timeout=1.0)
    assert isinstance(caught.value.__cause__, errors.ConnectFailed)
    assert lookup.refreshed
    with pytest.raises(errors.NoNsqd):
        sender.publish("t", b"x", timeout=0.1)


def test_keys_wait_in_order_for_the_first_word_of_lookup(lookup_producer: LookupProducers, publish_nsqd: Nsqds) -> None:
    nsqd = publish_nsqd(version=REDESIGNED)
    sender, lookup = lookup_producer()
    results = [sender.publish_nowait("t", body, key="k") for body in numbers(5)]
    with pytest.raises(errors.NoLeader, match="did not say which partitions"):
        sender.publish("t", b"x", key="k", timeout=0.05)
    lookup.tell(one(nsqd))
    gevent.joinall(results, timeout=WAIT)
    assert nsqd.bodies == numbers(5)


def test_a_topic_that_loses_its_nsqds_and_gets_partitions_keeps_what_waits(
    lookup_producer: LookupProducers, publish_nsqd: Nsqds
) -> None:
    old, new = publish_nsqd(stay_mute), publish_nsqd(version=REDESIGNED)
    sender, lookup = lookup_producer(topology({}, old), max_publish_attempts=9)
    with pytest.raises(errors.ConfigError, match="has no partitions"):
        sender.publish("t", b"x", partition=0)
    under_way = sender.publish_nowait("t", b"under way")
    old.wait_commands(1)
    lookup.tell(Topology())  # and no other nsqd is known
    until(lambda: lookup.nodes_asked)
    waiting = [sender.publish_nowait("t", body, key="k") for body in numbers(3)]
    lookup.tell(one(new))
    old.stop()
    gevent.joinall([*waiting, under_way], timeout=WAIT, raise_error=True)
    assert [body for body in new.bodies if body != b"under way"] == numbers(3)
    assert b"under way" in new.bodies_of(0)
    assert sender.stats()["held"] == 0


def test_publishes_that_wait_in_vain_do_not_pile_up(lookup_producer: LookupProducers, leaders: Leaders) -> None:
    sender, _ = lookup_producer(topology({0: leaders[0]}, partition_num=2))
    for _ in range(3):
        results = [sender.publish_nowait("t", b"x", partition=1, timeout=0.02) for _ in range(10)]
        gevent.joinall(results, timeout=WAIT)
    assert sender.stats()["pending"] == sender.stats()["held"] == sender.stats()["waiting"] == 0


def test_a_thousand_failing_publishes_are_few_questions(lookup_producer: LookupProducers, publish_nsqd: Nsqds) -> None:
    nsqd = publish_nsqd(version=REDESIGNED)
    sender, lookup = lookup_producer(one(nsqd), retry_base_delay=0.1)
    sender.publish("t", b"first")
    nsqd.answer = lambda peer, command: peer.frame(1, NOT_LEADER)
    results = [sender.publish_nowait("t", b"x", key="k") for _ in range(500)]
    results += [sender.publish_nowait("t", b"x") for _ in range(500)]
    nsqd.wait_commands(10)
    nsqd.answer = agree
    gevent.joinall(results, timeout=WAIT)
    assert all(result.successful() for result in results)
    assert lookup.refreshed < 520  # the poller makes one question of those that come together


EXITING = b"E_PUB_FAILED exiting"


@pytest.mark.parametrize("refusal", [NOT_LEADER, EXITING, b"E_PUB_FAILED pub to wait channel timeout"])
@pytest.mark.parametrize("arguments", [{"key": "k"}, {}], ids=["key", "no key"])
def test_time_ends_a_publish_that_meets_a_moving_leader_and_no_count(
    lookup_producer: LookupProducers, publish_nsqd: Nsqds, arguments: dict[str, Any], refusal: bytes
) -> None:
    nsqd = publish_nsqd(lambda peer, command: peer.frame(1, refusal), version=REDESIGNED)
    sender, lookup = lookup_producer(
        one(nsqd), publish_timeout=60.0, retry_max_delay=0.01, max_publish_attempts=1, retry_unknown_outcome=False
    )
    result = sender.publish_nowait("t", b"x", **arguments)
    nsqd.wait_commands(50)
    assert not result.ready()
    assert lookup.refreshed
    nsqd.answer = agree
    assert result.get(timeout=30) == b"OK"


@pytest.mark.parametrize("options", GATHERING)
def test_what_ends_servers_is_sent_to_two_of_them_and_harms_no_other(
    lookup_producer: LookupProducers, publish_nsqd: Nsqds, options: dict[str, Any]
) -> None:
    def die_of_poison(peer: Peer, command: Command) -> None:
        if b"poison" in command.bodies:
            peer.reset()
            raise EndOfPeer
        peer.ok()

    nsqds = [publish_nsqd(die_of_poison, version=REDESIGNED) for _ in range(4)]
    found = topology(dict(enumerate(nsqds)))
    sender, _ = lookup_producer(found, max_publish_attempts=100, publish_timeout=60.0, **options)
    sender.publish("t", b"first")
    until(lambda: len(sender.stats()["connected"]) == 4)
    results = [sender.publish_nowait("t", body) for body in (b"poison", *numbers(40))]
    gevent.joinall(results, timeout=30)
    killed = [nsqd for nsqd in nsqds if b"poison" in nsqd.bodies]
    assert len(killed) == 2
    assert all(result.get(block=False) == b"OK" for result in results[1:])
    error = results[0].exception
    assert isinstance(error, errors.PublishFailed)
    assert error.possibly_stored
    for text in (
        "ended the connection while working on it",
        "no other server",
        *(str(nsqd.address) for nsqd in killed),
    ):
        assert text in str(error)


def test_what_was_behind_what_ended_servers_is_tried_on(lookup_producer: LookupProducers, publish_nsqd: Nsqds) -> None:
    nsqds = [publish_nsqd(stay_mute, version=REDESIGNED) for _ in range(4)]
    sender, lookup = lookup_producer(one(nsqds[0]), max_publish_attempts=100, publish_timeout=60.0)
    poison = sender.publish_nowait("t", b"poison")
    behind = sender.publish_nowait("t", b"behind")
    for number, nsqd in enumerate(nsqds[:3], start=1):
        nsqd.wait_commands(1 if number == 3 else 2)
        nsqd.peers[0].reset()
        lookup.tell(one(nsqds[number]))
    nsqds[3].answer = agree
    assert behind.get(timeout=30) == b"OK"
    assert [b"poison" in nsqd.bodies for nsqd in nsqds] == [True, True, False, False]
    assert isinstance(poison.exception, errors.PublishFailed)


def test_a_silent_leader_is_asked_about_until_another_leads_and_then_left_at_once(
    lookup_producer: LookupProducers, publish_nsqd: Nsqds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsq_fast.client.routing.SILENCE", 1000.0)
    old, new = publish_nsqd(stay_mute, version=REDESIGNED), publish_nsqd(version=REDESIGNED)
    sender, lookup = lookup_producer(one(old), attempt_timeout=0.1, publish_timeout=60.0, retry_max_delay=0.05)
    results = [sender.publish_nowait("t", body, key="k") for body in numbers(3)]
    old.wait_commands(1)
    before = lookup.refreshed
    until(lambda: lookup.refreshed >= before + 10)  # lookup may take a while to see that the leader is gone
    assert sender.stats()["stalled"] == [str(old.address)]
    lookup.tell(one(new))
    gevent.joinall(results, timeout=30, raise_error=True)
    assert new.bodies == numbers(3)
    asked = lookup.refreshed
    assert sender.publish("t", b"3", key="k") == b"OK"
    assert lookup.refreshed <= asked + 1  # no more than what was on its way


def test_publishes_without_key_go_round_a_silent_leader(lookup_producer: LookupProducers, leaders: Leaders) -> None:
    sender, lookup = lookup_producer(topology(leaders), attempt_timeout=0.1, publish_timeout=60.0)
    assert sender.publish("t", b"first") == b"OK"
    until(lambda: len(sender.stats()["connected"]) == 3)
    leaders[1].answer = stay_mute
    before = lookup.refreshed
    callers = [gevent.spawn(sender.publish, "t", b"%d" % number) for number in range(12)]
    gevent.joinall(callers, timeout=30, raise_error=True)
    assert [caller.value for caller in callers] == [b"OK"] * 12
    owed = len(leaders[1].commands)
    for number in range(30):
        assert sender.publish("t", b"later-%d" % number) == b"OK"
    assert len(leaders[1].commands) == owed
    assert lookup.refreshed > before


def test_giving_a_former_leader_up_harms_no_other_partition_that_it_leads(
    lookup_producer: LookupProducers, publish_nsqd: Nsqds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsq_fast.client.routing.SILENCE", 0.05)
    old, new = publish_nsqd(stay_mute, version=REDESIGNED), publish_nsqd(version=REDESIGNED)
    sender, lookup = lookup_producer(topology({0: old, 1: old}), publish_timeout=60.0, connections_per_nsqd=1)
    moved = sender.publish_nowait("t", b"moved", partition=0)
    stays = sender.publish_nowait("t", b"stays", partition=1)
    old.wait_commands(2)
    lookup.tell(topology({0: new, 1: old}))
    assert moved.get(timeout=30) == b"OK"
    assert not stays.ready()
    for _ in range(2):
        old.peers[0].ok()
    assert stays.get(timeout=30) == b"OK"
    assert len(old.peers) == 1
    until(lambda: sender.stats()["held"] == 0)


def test_an_attempt_that_is_overdue_asks_lookup(lookup_producer: LookupProducers, publish_nsqd: Nsqds) -> None:
    nsqd = publish_nsqd(version=REDESIGNED)
    sender, lookup = lookup_producer(one(nsqd), publish_timeout=60.0)
    assert sender.publish("t", b"x", key="k") == b"OK"
    nsqd.answer = stay_mute
    before = lookup.refreshed
    with pytest.raises(errors.PublishTimeout):
        sender.publish("t", b"y", key="k", timeout=0.5)
    assert lookup.refreshed > before


def test_an_unknown_outcome_is_not_tried_again_when_duplicates_are_unwanted(
    lookup_producer: LookupProducers, publish_nsqd: Nsqds
) -> None:
    for failure in (NOT_WRITABLE, b"E_PUB_FAILED x", None):
        log = Log(failure)
        sender, _ = lookup_producer(one(publish_nsqd(log.answer, version=REDESIGNED)), retry_unknown_outcome=False)
        with pytest.raises(errors.PublishFailed, match="may have been stored") as caught:
            sender.publish("t", b"x", key="k")
        assert caught.value.possibly_stored
        assert sender.publish("t", b"y", key="k") == b"OK"
        assert log.attempts == [[b"x"], [b"y"]]


def test_a_deadline_in_the_middle_keeps_the_order_of_the_others(
    lookup_producer: LookupProducers, publish_nsqd: Nsqds
) -> None:
    nsqd = publish_nsqd(version=REDESIGNED)
    sender, _ = lookup_producer(one(nsqd), coalesce=True)
    sender.publish("t", b"first", key="k")  # so that it is connected
    nsqd.answer = stay_mute
    late = sender.publish_nowait("t", b"late", key="k", timeout=0.5)
    nsqd.wait_commands(2)
    never = sender.publish_nowait("t", b"never", key="k", timeout=0.5)
    results = [sender.publish_nowait("t", body, key="k") for body in numbers(4)]
    gevent.joinall([late, never], timeout=WAIT)
    assert late.exception.possibly_stored
    assert not never.exception.possibly_stored
    nsqd.answer = agree
    nsqd.peers[0].ok()
    gevent.joinall(results, timeout=WAIT)
    assert nsqd.bodies == [b"first", b"late", *numbers(4)]
    assert sender.stats()["held"] == 0


def test_publishes_without_key_leave_a_moving_leader_for_another(
    lookup_producer: LookupProducers, leaders: Leaders
) -> None:
    sender, _ = lookup_producer(topology(leaders), retry_base_delay=5.0, retry_max_delay=5.0)
    sender.publish("t", b"first")
    until(lambda: len(sender.stats()["connected"]) == 3)
    leaders[1].answer = lambda peer, command: peer.frame(1, NOT_LEADER)
    for number in range(12):
        assert sender.publish("t", b"%d" % number, timeout=1) == b"OK"
    assert len([body for body in leaders[1].bodies if body != b"first"]) == 1  # then it was left alone


def test_an_answer_without_partitions_leaves_the_leaders_as_they_were(
    lookup_producer: LookupProducers, leaders: Leaders, publish_nsqd: Nsqds
) -> None:
    sender, lookup = lookup_producer(topology(leaders))
    sender.publish("t", b"x", key="k")
    for answer in (Topology(), topology({}, publish_nsqd())):
        lookup.tell(answer)
        assert sender.publish("t", b"x", key="k") == b"OK"
        assert sender.publish("t", b"x") == b"OK"


def test_closing_sends_what_waits_in_lanes(lookup_producer: LookupProducers, publish_nsqd: Nsqds) -> None:
    nsqd = publish_nsqd(version=REDESIGNED)
    sender, _ = lookup_producer(one(nsqd), linger=60)
    assert sender.multipublish("t", [b"first"]) == b"OK"
    results = [sender.publish_nowait("t", body, key="k") for body in numbers(3)]
    sender.close()
    assert [result.get(block=False) for result in results] == [b"OK"] * 3
    assert nsqd.bodies[1:] == numbers(3)


def test_an_interrupted_caller_takes_back_what_was_not_sent(
    lookup_producer: LookupProducers, publish_nsqd: Nsqds
) -> None:
    nsqd = publish_nsqd(stay_mute, version=REDESIGNED)
    sender, _ = lookup_producer(one(nsqd))
    sent = sender.publish_nowait("t", b"0", key="k")
    victim = gevent.spawn(sender.publish, "t", b"never", key="k")
    nsqd.wait_commands(1)
    last = sender.publish_nowait("t", b"1", key="k")
    victim.kill()
    nsqd.answer = agree
    nsqd.peers[0].ok()
    gevent.joinall([sent, last], timeout=WAIT)
    assert nsqd.bodies == [b"0", b"1"]
    assert sender.stats()["held"] == 0


def test_callers_that_waited_for_room_are_not_passed(lookup_producer: LookupProducers, publish_nsqd: Nsqds) -> None:
    log = Log()
    sender, _ = lookup_producer(one(publish_nsqd(log.answer, version=REDESIGNED)), max_pending=3)
    called: list[bytes] = []

    def work(name: int) -> None:
        for number in range(20):
            called.append(b"%d-%d" % (name, number))
            sender.publish("t", called[-1], key="k")

    gevent.joinall([gevent.spawn(work, name) for name in range(10)], timeout=10, raise_error=True)
    assert log.stored == called
    assert sender.stats()["held"] == 0
