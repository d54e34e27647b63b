"""An nsqd that does not answer: what it owes goes elsewhere, and it gets nothing new until it has answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple

import gevent
import pytest
from gevent.event import Event
from support.http import ask
from support.peers import Peer
from support.publishing import Command, Nsqds, Producers, PublishNsqd, agree, refuse, stay_mute
from support.servers import RealNsqd
from support.waiting import until

from nsq_fast import Producer, errors
from nsq_fast.broker import Broker
from nsq_fast.config import ProducerConfig
from nsq_fast.names import Address
from nsq_fast.testing import FaultyLink

LIMIT = 0.5


def connected_to_all(sender: Producer, *servers: PublishNsqd) -> None:
    until(lambda: len(sender.stats()["connected"]) == len(servers))


def wake(server: PublishNsqd) -> None:
    """Answer what is owed, and from now on at once."""
    owed = len(server.commands)
    server.answer = agree
    for _ in range(owed):
        server.peers[0].ok()


def test_the_limit_of_an_attempt_is_a_sixth_of_the_publish_timeout_unless_it_is_given() -> None:
    assert ProducerConfig(publish_timeout=12.0).attempt_limit == 2.0
    assert ProducerConfig(attempt_timeout="0.5").attempt_limit == 0.5
    with pytest.raises(errors.ConfigError, match="attempt_timeout=0"):
        ProducerConfig(attempt_timeout=0)


@pytest.mark.parametrize("options", [{}, {"linger": 0.001}, {"coalesce": True}])
def test_what_a_stalled_nsqd_owes_is_stored_by_another(
    publish_nsqd: Nsqds, new_producer: Producers, options: dict[str, object]
) -> None:
    stuck, good = publish_nsqd(stay_mute), publish_nsqd()
    sender = new_producer(stuck, good, attempt_timeout=LIMIT, publish_timeout=60.0, **options)
    connected_to_all(sender, stuck, good)
    callers = [gevent.spawn(sender.publish, "t", b"%d" % number) for number in range(10)]
    many = sender.multipublish("t", [b"a", b"b"], raise_error=False)
    again = sender.multipublish("t", [b"c", b"d"], raise_error=False)
    gevent.joinall([*callers, many, again], timeout=30, raise_error=True)
    assert [caller.value for caller in callers] == [b"OK"] * 10
    assert stuck.bodies
    assert set(good.bodies) == {b"%d" % number for number in range(10)} | {b"a", b"b", b"c", b"d"}
    assert sender.stats()["stalled"] == [str(stuck.address)]
    assert str(stuck.address) in sender.stats()["connected"]


def test_it_gets_nothing_new_until_it_has_answered(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    stuck, good = publish_nsqd(stay_mute), publish_nsqd()
    sender = new_producer(stuck, good, attempt_timeout=LIMIT)
    connected_to_all(sender, stuck, good)
    for number in range(2):
        assert sender.publish("t", b"%d" % number) == b"OK"
    assert len(stuck.commands) == 1
    for _ in range(20):
        assert sender.publish("t", b"new") == b"OK"
    assert len(stuck.commands) == 1
    wake(stuck)
    until(lambda: sender.publish("t", b"later") and b"later" in stuck.bodies)
    assert sender.stats()["stalled"] == []
    assert sender.stats()["held"] == 0


def test_with_nowhere_else_to_go_it_waits_and_sends_nothing_twice(
    nsq_link: Callable[[Address], FaultyLink], publish_nsqd: Nsqds, new_producer: Producers
) -> None:
    nsqd = publish_nsqd()
    link = nsq_link(nsqd.address)
    sender = new_producer(link, attempt_timeout=LIMIT, publish_timeout=60.0)
    assert sender.publish("t", b"first") == b"OK"
    link.stall()
    owed = [sender.publish_nowait("t", b"%d" % number) for number in range(3)]
    until(lambda: sender.stats()["stalled"])
    waiting = gevent.spawn(sender.publish, "t", b"waiting")
    with pytest.raises(errors.NoNsqd, match=f"'t' .*{link.address}: connected, but has not replied for {LIMIT:g} s"):
        sender.publish("t", b"x", timeout=0.05)
    with pytest.raises(errors.NoNsqd):
        sender.publish("t", b"x", block=False)
    link.flow()
    gevent.joinall([*owed, waiting], timeout=30, raise_error=True)
    assert nsqd.bodies == [b"first", b"0", b"1", b"2", b"waiting"]
    assert sender.stats()["held"] == sender.stats()["pending"] == 0


@pytest.mark.parametrize("count", [1, 20])
def test_a_silent_connection_is_given_up_once_a_new_one_to_the_same_nsqd_works(
    publish_nsqd: Nsqds, new_producer: Producers, count: int
) -> None:
    """Packets were lost, and the kernel of either end waits ever longer before it sends again."""
    lost: list[Peer] = []

    def lose_the_first(peer: Peer, command: Command) -> None:
        if not lost:
            lost.append(peer)
        if peer is not lost[0]:
            peer.ok()

    nsqd = publish_nsqd(lose_the_first)
    sender = new_producer(nsqd, attempt_timeout=LIMIT, publish_timeout=60.0)
    results = [sender.publish_nowait("t", b"%d" % number) for number in range(count)]
    gevent.joinall(results, timeout=30, raise_error=True)
    assert len(nsqd.peers) == 2
    assert sender.publish("t", b"later") == b"OK"
    stats = sender.stats()
    assert (stats["stalled"], stats["disconnected"], stats["held"]) == ([], {}, 0)


def test_what_must_not_be_stored_twice_waits_for_the_answer(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    stuck, good = publish_nsqd(stay_mute), publish_nsqd()
    sender = new_producer(stuck, good, attempt_timeout=LIMIT, publish_timeout=60.0, retry_unknown_outcome=False)
    connected_to_all(sender, stuck, good)
    results = [sender.publish_nowait("t", b"%d" % number) for number in range(4)]
    until(lambda: sender.stats()["stalled"])
    assert len(stuck.bodies) == len(good.bodies) == 2
    wake(stuck)
    gevent.joinall(results, timeout=30, raise_error=True)
    assert sorted(stuck.bodies + good.bodies) == [b"0", b"1", b"2", b"3"]


def test_an_nsqd_that_opens_later_takes_what_a_stalled_one_owes(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    stuck, other = publish_nsqd(stay_mute), publish_nsqd(stay_mute)
    sender = new_producer(stuck, other, attempt_timeout=LIMIT, publish_timeout=60.0)
    connected_to_all(sender, stuck, other)
    results = [sender.publish_nowait("t", b"%d" % number) for number in range(2)]
    until(lambda: len(sender.stats()["stalled"]) == 2)
    other.answer = agree
    for peer in other.peers:
        with suppress(OSError):  # it may have been given up meanwhile
            peer.ok()
    gevent.joinall(results, timeout=30, raise_error=True)
    assert set(other.bodies) == {b"0", b"1"}


def test_a_late_ok_ends_a_publish_that_waits_elsewhere(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    first, second = publish_nsqd(stay_mute), publish_nsqd(stay_mute)
    sender = new_producer(first, second, attempt_timeout=LIMIT, publish_timeout=60.0)
    connected_to_all(sender, first, second)
    result = sender.publish_nowait("t", b"x")
    first.answer = second.answer = stay_mute
    until(lambda: len(first.commands) + len(second.commands) == 2)  # it was tried at the other one
    tried_first = first if sender.stats()["stalled"] == [str(first.address)] else second
    tried_first.peers[0].ok()
    assert result.get(timeout=30) == b"OK"
    for server in (first, second):
        server.answer = agree
    (second if tried_first is first else first).peers[0].ok()
    until(lambda: sender.stats()["held"] == 0 and not sender.stats()["stalled"])
    assert sender.publish("t", b"y") == b"OK"


def test_a_time_in_which_this_process_did_not_run_does_not_count(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    server = publish_nsqd()
    sender = new_producer(server, attempt_timeout=LIMIT)
    assert sender.publish("t", b"x") == b"OK"
    result = sender.publish_nowait("t", b"y")
    end = monotonic() + 3 * LIMIT
    while monotonic() < end:
        pass
    assert result.get(timeout=30) == b"OK"
    assert sender.stats()["stalled"] == []
    assert server.bodies == [b"x", b"y"]


def test_a_message_that_the_server_could_not_read_is_tried_elsewhere(
    publish_nsqd: Nsqds, new_producer: Producers
) -> None:
    refusals = [b"E_BAD_MESSAGE PUB failed to read message body", b"E_BAD_BODY MPUB failed to read body size"]
    bad = publish_nsqd(lambda peer, command: refuse(peer, refusals[command.name == "MPUB"]))
    good = publish_nsqd()
    sender = new_producer(bad, good, retry_unknown_outcome=False)
    connected_to_all(sender, bad, good)
    for _ in range(2):
        assert sender.publish("t", b"x") == b"OK"
    until(lambda: len(sender.stats()["connected"]) == 2)
    for _ in range(2):
        assert sender.multipublish("t", [b"y", b"z"]) == b"OK"
    assert len(bad.commands) >= 2
    assert good.bodies == [b"x"] * 2 + [b"y", b"z"] * 2


# Real servers and embedded ones


class Frozen(NamedTuple):
    """Two nsqds, and what freezes and thaws the first one."""

    addresses: list[Address]
    freeze: Callable[[], None]
    thaw: Callable[[], None]
    depths: Callable[[], list[int]]


def depth(http_address: Address, topic: str) -> int:
    """Messages stored in a topic without channels."""
    stats = ask(http_address, "GET", f"/stats?format=json&topic={topic}").json
    return sum(int(each["depth"]) for each in stats["topics"] or ())


@pytest.fixture
def real(real_nsqd: Callable[..., RealNsqd]) -> Iterator[Frozen]:
    pair = [real_nsqd(), real_nsqd()]
    depths = lambda: [depth(each.http_address, "t") for each in pair]  # noqa: E731
    yield Frozen([each.tcp_address for each in pair], pair[0].freeze, pair[0].thaw, depths)
    pair[0].thaw()


@pytest.fixture
def embedded(nsq_link: Callable[[Address], FaultyLink]) -> Iterator[Frozen]:
    with Broker() as first, Broker() as second:
        link = nsq_link(first.nsqd.tcp_address)
        depths = lambda: [depth(each.nsqd.http_address, "t") for each in (first, second)]  # noqa: E731
        yield Frozen([link.address, second.nsqd.tcp_address], link.stall, link.flow, depths)


@pytest.mark.parametrize("kind", ["real", "embedded"])
def test_callers_go_on_while_one_of_two_nsqds_is_frozen(kind: str, request: pytest.FixtureRequest) -> None:
    servers: Frozen = request.getfixturevalue(kind)
    frozen = str(servers.addresses[0])
    longest, counts = [0.0], [0] * 10
    is_over = Event()

    def work(number: int) -> None:
        while not is_over.is_set():
            begun = monotonic()
            assert producer.publish("t", b"%d" % number) == b"OK"
            longest[0] = max(longest[0], monotonic() - begun)
            counts[number] += 1

    def progress(by: int) -> None:
        """Wait until each caller has published ``by`` messages more."""
        before = list(counts)
        until(lambda: all(now >= then + by for now, then in zip(counts, before, strict=True)), 30.0)

    with Producer(servers.addresses, attempt_timeout=0.5, publish_timeout=60.0) as producer:
        until(lambda: len(producer.stats()["connected"]) == 2)
        workers = [gevent.spawn(work, number) for number in range(10)]
        try:
            progress(20)
            servers.freeze()
            until(lambda: producer.stats()["stalled"] == [frozen])
            progress(100)
            servers.thaw()
            until(lambda: producer.stats()["stalled"] == [])
            before = servers.depths()[0]
            until(lambda: servers.depths()[0] > before)
        finally:
            is_over.set()
            gevent.joinall(workers, raise_error=True)
    assert longest[0] < 30  # half of what the whole publish may take; it was all of it
    assert sum(servers.depths()) >= sum(counts)


class SwallowingLink(FaultyLink):
    """A link that passes ``left`` bytes more on to the server and swallows the rest; None: it passes everything."""

    left: int | None = None

    def _pass_on(self, data: bytes, sink: Any) -> None:
        if self.left is not None and any(sink is server for _, server in self._pairs):
            data = data[: self.left]
            self.left -= len(data)
        if data:
            super()._pass_on(data, sink)


def test_a_body_that_stalls_beyond_the_read_deadline_is_stored_by_another_real_nsqd(
    real_nsqd: Callable[..., RealNsqd],
) -> None:
    waiting, healthy = real_nsqd(), real_nsqd()
    link = SwallowingLink(waiting.tcp_address)
    addresses = [link.address, healthy.tcp_address]
    try:
        with Producer(addresses, heartbeat_interval=1.0, retry_unknown_outcome=False) as sender:  # a deadline of 2 s
            until(lambda: len(sender.stats()["connected"]) == 2)
            link.left = 10_000
            results = [sender.publish_nowait("t", b"x" * 100_000) for _ in range(2)]
            gevent.joinall(results, timeout=30, raise_error=True)
            until(lambda: any("failed to read message body" in line for line in waiting.log))
            link.left = None
    finally:
        link.close()
    assert depth(healthy.http_address, "t") == 2
