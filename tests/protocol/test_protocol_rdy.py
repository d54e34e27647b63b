"""RDY distribution: the invariant under any course of events, fairness, and that nothing sticks at 0."""

from __future__ import annotations

import random as chance
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from nsq_fast._codec import Message
from nsq_fast.protocol import rdy
from nsq_fast.protocol.events import ServerInfo
from nsq_fast.protocol.in_flight import InFlight
from nsq_fast.protocol.rdy import Share


def apply(shares, limit, now=0.0, *, idle_timeout=10.0, max_in_flight=None):
    """One round as a consumer does it; returns the commands, and whether some connection waits for others."""
    max_in_flight = limit if max_in_flight is None else max_in_flight
    wanted = rdy.Sharing(idle_timeout, chance.random).wanted(shares, limit, now)
    changes, is_waiting = rdy.plan(shares, wanted, max_in_flight, now)
    for index, count in changes:
        shares[index].sent(count, now)
    return changes, is_waiting


def counts(shares):
    return [share.rdy for share in shares]


def test_max_in_flight_above_max_rdy_count_is_cut_to_it():
    shares = [Share(max_rdy_count=2500), Share(max_rdy_count=100)]
    apply(shares, 5000)
    assert counts(shares) == [2500, 100]


def test_no_remainder_is_wasted():
    assert sorted(rdy.split(10, [2500] * 3)) == [3, 3, 4]


def test_nothing_to_send_when_all_is_as_it_should_be():
    shares = [Share(), Share()]
    apply(shares, 10)
    assert apply(shares, 10) == ([], False)


def test_a_new_connection_waits_until_the_old_one_has_room():
    old, new = Share(), Share()
    apply([old], 10)
    old.in_flight = 10
    assert apply([old, new], 10, now=1.0) == ([(0, 5)], True)
    assert apply([old, new], 10, now=2.0) == ([], True), "ten are still held"
    old.in_flight = 8
    apply([old, new], 10, now=3.0)
    assert new.rdy == 2
    old.in_flight = 0
    assert not apply([old, new], 10, now=4.0)[1]
    assert counts([old, new]) == [5, 5]


def test_a_lower_is_charged_until_the_server_knows_it():
    old, new = Share(), Share()
    apply([old], 10)
    apply([old, new], 10, now=1.0)
    assert counts([old, new]) == [5, 0], "messages sent before the lower may be on the way"
    apply([old, new], 10, now=1.0 + rdy.SETTLE)
    assert counts([old, new]) == [5, 5]


def test_nothing_is_raised_while_more_is_held_than_may_be():
    """Messages that were on their way came later than a lower is thought to take."""
    late = [Share(in_flight=2, settles_at=-1.0), Share(rdy=1, in_flight=1), Share(rdy=1)]
    assert rdy.plan(late, [1, 0, 1], 3, 0.0) == ([(1, 0)], True)
    late[1].sent(0, 0.0)
    late[1].in_flight = 0
    assert rdy.plan(late, [1, 0, 1], 3, 1.0)[0] == [(0, 1)]


def test_lowers_come_before_raises():
    shares = [Share(rdy=10), Share(rdy=0), Share(rdy=2)]
    changes, _ = rdy.plan(shares, [4, 4, 4], 20, 0.0)
    assert changes[0] == (0, 4)
    assert {index for index, _ in changes[1:]} == {1, 2}


def test_a_connection_with_messages_keeps_its_turn_and_an_idle_one_passes_it_on():
    shares = [Share() for _ in range(3)]
    apply(shares, 2)
    busy, idle = (index for index, share in enumerate(shares) if share.rdy)
    waiting = next(index for index, share in enumerate(shares) if not share.rdy)
    shares[busy].active_at = 11.0
    apply(shares, 2, now=11.5)
    assert shares[idle].rdy == 0
    apply(shares, 2, now=12.0)
    assert (shares[busy].rdy, shares[waiting].rdy) == (1, 1)


def test_a_busy_connection_gives_others_a_turn_in_the_end():
    shares = [Share(), Share()]
    apply(shares, 1)
    first = counts(shares).index(1)
    shares[first].active_at = 31.0
    apply(shares, 1, now=31.0)
    apply(shares, 1, now=32.0)
    assert counts(shares).index(1) != first


def test_who_waits_goes_before_who_has_had_a_turn_for_longer():
    holding = Share(rdy=1, turn_at=1.0, active_at=39.0)
    waiting = Share(turn_at=5.0)
    assert rdy.Sharing(10.0, chance.random).wanted([holding, waiting], 1, 40.0) == [0, 1]


@given(st.integers(2, 12), st.integers(1, 11), st.randoms())
def test_no_connection_sticks_at_zero(connections, limit, luck):
    shares = [Share() for _ in range(connections)]
    served = set()
    now = 0.0
    for _ in range(6 * connections):
        wanted = rdy.Sharing(1.0, luck.random).wanted(shares, limit, now)
        for index, count in rdy.plan(shares, wanted, limit, now)[0]:
            shares[index].sent(count, now)
        served |= {index for index, share in enumerate(shares) if share.rdy}
        now += 0.6
    assert served == set(range(connections))


@pytest.mark.parametrize(
    ("in_flight", "count", "starved"), [(0, 0, False), (84, 100, False), (85, 100, True), (1, 1, True)]
)
def test_is_starved_foresees_starvation(in_flight, count, starved):
    assert rdy.is_starved(in_flight, count) is starved


def test_a_turn_that_brings_nothing_is_short_and_one_that_brings_messages_is_not():
    shares = [Share(), Share()]
    apply(shares, 1, 100.0)
    [first] = [index for index, count in enumerate(counts(shares)) if count]
    apply(shares, 1, 100.9)
    assert counts(shares)[first] == 1
    apply(shares, 1, 101.1)  # a tenth of the idle timeout: what the nsqd had would be here
    assert counts(shares)[first] == 0
    apply(shares, 1, 102.0)  # the lower is known to the server now
    assert counts(shares)[1 - first] == 1
    shares[1 - first].active_at = 102.5
    apply(shares, 1, 112.0)
    assert counts(shares)[1 - first] == 1
    apply(shares, 1, 112.6)
    assert counts(shares)[1 - first] == 0


def test_workers_that_are_all_stuck_get_nothing_and_the_others_their_share():
    shares = [Share(), Share(capacity=0), Share()]
    apply(shares, 10)
    assert counts(shares) == [5, 0, 5]
    shares = [Share(), Share(capacity=0), Share()]
    apply(shares, 2)
    assert counts(shares) == [1, 0, 1]


def test_no_more_is_asked_for_than_handlers_can_take_on():
    shares = [Share(capacity=3), Share()]
    apply(shares, 100)
    assert counts(shares) == [3, 97]


class Server:
    """nsqd as the invariant sees it: commands reach it late, messages reach us late, each by at most DELAY.

    It takes each message back ``timeout`` after it has sent it, or somewhat later, and may send another then.
    """

    DELAY = rdy.SETTLE / 2

    def __init__(self, max_rdy_count, timeout):
        self.share = Share(max_rdy_count=max_rdy_count)
        self.ledger = InFlight()
        self.ledger.identified(ServerInfo(msg_timeout_ms=int(1000 * timeout)))
        self.timeout = timeout
        self.rdy = 0
        self.in_flight = {}
        self.commands = []
        self.wire = []

    def send(self, kind, what, now):
        self.commands.append((now, kind, what))

    def process(self, until):
        while self.commands and self.commands[0][0] <= until:
            _, kind, what = self.commands.pop(0)
            if kind == "rdy":
                assert 0 <= what <= self.share.max_rdy_count
                self.rdy = what
            else:
                for message in what:
                    self.in_flight.pop(message.id, None)

    def take_back(self, until):
        self.in_flight = {id: sent for id, sent in self.in_flight.items() if sent + self.timeout > until}

    def push(self, count, now):
        for _ in range(min(count, max(self.rdy - len(self.in_flight), 0))):
            id = uuid4().bytes
            self.in_flight[id] = now
            self.wire.append((now, id))

    def deliver(self, until, now):
        while self.wire and self.wire[0][0] <= until:
            sent, id = self.wire.pop(0)
            came_at = min(now, sent + self.DELAY)
            self.ledger.expire(came_at)
            self.ledger.received([Message(1, 1, id, b"", received_at=came_at)])
            self.ledger.expire_excess(self.share.highest(came_at), came_at)
        self.ledger.expire(now)
        self.share.in_flight = self.ledger.count


class Distribution(RuleBasedStateMachine):
    """Any order of connects, disconnects, pushes, answers, pauses and limits, with delays on the way."""

    timeout = 1e9

    def __init__(self):
        super().__init__()
        self.servers = []
        self.chance = chance.Random(1)
        self.now = 100.0
        self.limit = 1
        self.floor = 0

    @initialize(limit=st.integers(1, 40))
    def begin(self, limit):
        self.limit = self.floor = limit

    def distribute(self, limit):
        shares = [server.share for server in self.servers]
        wanted = rdy.Sharing(1.0, self.chance.random).wanted(shares, limit, self.now)
        assert sum(wanted) <= limit
        for index, count in rdy.plan(shares, wanted, self.limit, self.now)[0]:
            shares[index].sent(count, self.now)
            self.servers[index].send("rdy", count, self.now)

    @rule(cap=st.integers(1, 30))
    def connect(self, cap):
        if len(self.servers) < 6:
            self.servers.append(Server(cap, self.timeout))
            self.distribute(self.limit)

    @rule(data=st.data())
    def disconnect(self, data):
        if self.servers:
            self.servers.pop(data.draw(st.integers(0, len(self.servers) - 1)))
            self.distribute(self.limit)

    @rule(seconds=st.floats(0.0, 4.0), data=st.data())
    def pass_time(self, seconds, data):
        self.now += seconds
        late = st.floats(0.0, Server.DELAY)
        for server in self.servers:
            server.deliver(self.now - Server.DELAY, self.now)
            server.process(self.now - data.draw(late))
            server.take_back(self.now - data.draw(late))
            server.push(data.draw(st.integers(0, 50)), self.now)
            server.deliver(self.now - data.draw(late), self.now)
        self.distribute(self.limit)

    @rule(data=st.data())
    def answer(self, data):
        for server in self.servers:
            held = server.ledger.pending()
            done = held[: data.draw(st.integers(0, len(held)))]
            for message in done:
                message.mark_responded()
            server.ledger.answered(done)
            server.share.in_flight = server.ledger.count
            server.send("fin", done, self.now)
        self.distribute(self.limit)

    @rule(probe=st.integers(0, 1))
    def back_off(self, probe):
        self.distribute(min(probe, self.limit))

    @rule(data=st.data())
    def back_off_one_connection(self, data):
        if self.servers:
            share = data.draw(st.sampled_from(self.servers)).share
            share.capacity = data.draw(st.sampled_from([0, 1, 1 << 30]))
            self.distribute(self.limit)

    @rule(limit=st.integers(0, 40))
    def adapt(self, limit):
        self.distribute(min(limit, self.limit))

    @rule(limit=st.integers(0, 40))
    def change_limit(self, limit):
        self.limit = limit
        self.distribute(limit)

    @invariant()
    def no_rdy_above_its_server(self):
        assert all(server.share.rdy <= server.share.max_rdy_count for server in self.servers)

    @invariant()
    def raises_never_pass_the_limit(self):
        held = sum(server.share.held(self.now) for server in self.servers)
        self.floor = max(self.limit, min(self.floor, held))  # a lowered limit is reached as messages are answered
        assert held <= self.floor
        assert sum(max(server.share.rdy, server.share.in_flight) for server in self.servers) <= self.floor

    @invariant()
    def the_servers_never_have_more_outstanding(self):
        assert sum(server.share.in_flight for server in self.servers) <= self.floor


class DistributionWithTimeouts(Distribution):
    """The same, while messages are not answered in time."""

    timeout = 1.5


TestDistribution = Distribution.TestCase
TestDistribution.settings = settings(max_examples=60, stateful_step_count=30)
TestDistributionWithTimeouts = DistributionWithTimeouts.TestCase
TestDistributionWithTimeouts.settings = settings(max_examples=100, stateful_step_count=30)
