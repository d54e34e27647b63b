"""One caller that publishes to partitions and waits each time: where it goes, and what becomes of its order."""

from __future__ import annotations

from typing import Any

import gevent
import pytest
from support.partitions import topology
from support.peers import Peer
from support.publishing import REDESIGNED, Command, Leaders, LookupProducers, Nsqds
from support.waiting import WAIT, until

from nsq_fast import errors

OPTIONS: list[dict[str, Any]] = [{}, {"coalesce": True}, {"linger": 0.001}]


@pytest.mark.parametrize("options", OPTIONS)
def test_partitions_take_turns(lookup_producer: LookupProducers, leaders: Leaders, options: dict[str, Any]) -> None:
    sender, _ = lookup_producer(topology(dict(leaders)), **options)
    sender.publish("t", b"first")
    until(lambda: len(sender.stats()["connected"]) == 3)
    for number in range(30):
        assert sender.publish("t", b"%d" % number) == b"OK"
    assert sorted(len(leaders[number].bodies_of(number)) for number in range(3)) == [10, 10, 11]


def test_two_callers_that_do_not_share_commands_reach_every_partition(
    lookup_producer: LookupProducers, publish_nsqd: Nsqds
) -> None:
    nsqd = publish_nsqd(version=REDESIGNED)
    sender, _ = lookup_producer(topology({0: nsqd, 1: nsqd}))
    sender.publish("t", b"first")

    def call() -> None:
        for _ in range(20):
            sender.publish("t", b"x")

    gevent.joinall([gevent.spawn(call) for _ in range(2)], timeout=WAIT, raise_error=True)
    assert min(len(nsqd.bodies_of(number)) for number in range(2)) >= 15


@pytest.mark.parametrize("options", OPTIONS)
def test_publishes_with_a_key_are_stored_in_order_whatever_fails(
    lookup_producer: LookupProducers, publish_nsqd: Nsqds, options: dict[str, Any]
) -> None:
    stored: list[bytes] = []

    def answer(peer: Peer, command: Command) -> None:
        if len(nsqd.commands) % 3 == 2:
            peer.frame(1, b"E_FAILED_ON_NOT_LEADER ")
        else:
            stored.extend(command.bodies)
            peer.ok()

    nsqd = publish_nsqd(answer, version=REDESIGNED)
    sender, _ = lookup_producer(topology({0: nsqd}, partition_num=1), **options)
    assert sender.publish("t", b"0", key="k") == b"OK"
    for number in range(1, 20):
        if number % 4 == 0:
            later = sender.publish_nowait("t", b"%da" % number, key="k")
            assert sender.publish("t", b"%db" % number, key="k") == later.get(timeout=WAIT) == b"OK"
        else:
            assert sender.publish("t", b"%d" % number, key=b"k") == b"OK"
    expected = [
        [b"%da" % number, b"%db" % number] if number % 4 == 0 and number else [b"%d" % number] for number in range(20)
    ]
    assert stored == [body for bodies in expected for body in bodies]
    assert sender.stats()["held"] == 0


def test_one_that_fails_for_good_lets_the_next_through(lookup_producer: LookupProducers, publish_nsqd: Nsqds) -> None:
    def answer(peer: Peer, command: Command) -> None:
        peer.frame(1, b"E_PUB_FAILED no") if command.body == b"bad" else peer.ok()

    nsqd = publish_nsqd(answer, version=REDESIGNED)
    sender, _ = lookup_producer(topology({0: nsqd}, partition_num=1), max_publish_attempts=2)
    assert sender.publish("t", b"1", key="k") == b"OK"
    with pytest.raises(errors.PublishFailed) as caught:
        sender.publish("t", b"bad", key="k")
    assert caught.value.attempts == 2
    assert sender.publish("t", b"2", key="k") == b"OK"
    assert nsqd.bodies == [b"1", b"bad", b"bad", b"2"]
