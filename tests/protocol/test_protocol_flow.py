"""What is in flight: RDY, backoff, delays of requeues and reconnects, deadlines, and servers that ignore RDY."""

from __future__ import annotations

import random as chance
from collections import deque
from math import inf
from random import Random
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from nsq_fast._codec import Message, encode_frame, encode_message
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import RemoteProtocolError
from nsq_fast.protocol import rdy
from nsq_fast.protocol.rdy import MOST_LEVELS, Backoff, ExponentialBackoff, ReconnectDelay, RequeueDelay, Share
from nsq_fast.protocol.session import SLACK, STRAGGLERS, DeliveryLimit, InFlight, ServerInfo, Session


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


def test_a_lower_is_charged_until_the_server_knows_it():
    old, new = Share(), Share()
    apply([old], 10)
    apply([old, new], 10, now=1.0)
    assert counts([old, new]) == [5, 0], "messages sent before the lower may be on the way"
    apply([old, new], 11, now=1.0 + rdy.SETTLE)
    assert sorted(counts([old, new])) == [5, 6], "no remainder is wasted"
    assert apply([old, new], 11, now=2.0) == ([], False)


def test_nothing_is_raised_while_more_is_held_than_may_be():
    """Messages that were on their way came later than a lower is thought to take."""
    late = [Share(in_flight=2, settles_at=-1.0), Share(rdy=1, in_flight=1), Share(rdy=1)]
    assert rdy.plan(late, [1, 0, 1], 3, 0.0) == ([(1, 0)], True)
    late[1].sent(0, 0.0)
    late[1].in_flight = 0
    assert rdy.plan(late, [1, 0, 1], 3, 1.0)[0] == [(0, 1)]


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


@settings(max_examples=20)
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


@pytest.mark.parametrize(
    ("capacities", "limit", "wanted"),
    [([10, 0, 10], 10, [5, 0, 5]), ([10, 0, 10], 2, [1, 0, 1]), ([3, 999], 100, [3, 97])],
)
def test_no_more_is_asked_for_than_handlers_can_take_on_and_the_others_get_the_rest(capacities, limit, wanted):
    shares = [Share(capacity=each) for each in capacities]
    apply(shares, limit)
    assert counts(shares) == wanted


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
            excess = self.ledger.expire_excess(self.share.highest(came_at), came_at)
            assert not any(message.id in self.in_flight for message in excess), "it waits for their answers still"
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
TestDistribution.settings = settings(max_examples=20, stateful_step_count=30)
TestDistributionWithTimeouts = DistributionWithTimeouts.TestCase
TestDistributionWithTimeouts.settings = settings(max_examples=40, stateful_step_count=30)


# Backoff, and delays of reconnects and requeues


chances = st.floats(0.0, 1.0, exclude_max=True)


def no_chance() -> float:
    return 0.0


def requeue_delay(**options):
    options = {"base": 1.0, "factor": 2.0, "cap": 900.0, "jitter": 0.0, "random": no_chance} | options
    return RequeueDelay(options.pop("fixed_ms", None), **options)


def test_one_result_counts_in_a_window():
    backoff = Backoff(128.0, random=no_chance)
    backoff.record(False, 0.0)
    for _ in range(1000):
        assert not backoff.record(False, 0.5)
        assert not backoff.record(True, 0.5)
    assert backoff.level == 1


@pytest.mark.parametrize(
    ("longest", "failures", "steps", "seconds"),
    [
        (128.0, 6, 3, 5.0),  # of the last pause, 32 s, a part
        (8.0, 5000, 3, 3.0),  # of four levels: a success halves the level
    ],
)
def test_recovery_takes_no_more_steps_than_there_are_levels(longest, failures, steps, seconds):
    backoff = Backoff(longest, random=no_chance)
    now = 0.0
    for _ in range(failures):
        backoff.record(False, now)
        now = backoff.until
    well_at, successes = now, 0  # the end of a pause: a probe, and all that follow, succeed
    while backoff.is_on:
        backoff.record(True, now)
        now = max(now, backoff.until)
        successes += 1
    assert (successes, now - well_at) == (steps, seconds)


class Steps:
    """A strategy of a program: pauses of its own, no jitter."""

    jitter = 0.0

    def __init__(self, *pauses):
        self._pauses = pauses

    def duration(self, level):
        return self._pauses[min(level, len(self._pauses)) - 1]


def pauses_of(backoff, count):
    now, pauses = 0.0, []
    for _ in range(count):
        backoff.record(False, now)
        pauses.append(backoff.until - now)
        now = backoff.until
    return pauses


@pytest.mark.parametrize(
    ("steps", "pauses", "level"),
    [
        ((0.5, 3.0, 100.0), [0.5, 3.0, 8.0, 8.0], 3),
        ((1.0,), [1.0] * 1000, MOST_LEVELS),  # pauses that never grow do not make recovery endless
    ],
    ids=["growing", "even"],
)
def test_a_strategy_of_ones_own_says_how_long_pauses_are(steps, pauses, level):
    backoff = Backoff(8.0, random=no_chance, strategy=Steps(*steps))
    assert pauses_of(backoff, len(pauses)) == pauses
    assert backoff.level == level


@given(chances, st.integers(1, 20))
def test_full_jitter_gives_any_pause_up_to_the_exponential_one(luck, level):
    backoff = Backoff(128.0, random=lambda: luck, strategy=ExponentialBackoff(jitter=1.0))
    backoff.level = level
    backoff.pause(0.0)
    longest = min(128.0, 2.0 ** (level - 1))
    assert 0.0 < backoff.until <= longest
    assert backoff.until == pytest.approx(longest * (1.0 - luck))


@given(st.floats(0.01, 1000.0), st.lists(st.tuples(st.booleans(), st.floats(0.0, 300.0)), max_size=60), chances)
def test_no_pause_is_longer_than_the_longest(longest, results, luck):
    backoff = Backoff(longest, random=lambda: luck)
    now = 0.0
    for success, gap in results:
        now += gap
        backoff.record(success, now)
        assert backoff.until <= now + longest
        assert backoff.level >= 0
        assert backoff.is_on or not backoff.is_paused(now)


@given(chances)
def test_reconnecting_never_ends_and_stays_below_the_cap(luck):
    reconnect = ReconnectDelay(60.0, random=lambda: luck)
    delays = [reconnect.next(0.0) for _ in range(3000)]
    assert all(0.0 < delay <= 60.0 for delay in delays)
    assert delays[-1] >= 30.0
    assert delays[0] <= 0.1


def test_a_connection_that_lasted_resets_the_pauses():
    reconnect = ReconnectDelay(60.0, random=no_chance)
    first = reconnect.next(0.0)
    for _ in range(8):
        grown = reconnect.next(0.0)
    reconnect.connected(100.0)
    assert reconnect.next(100.1) > grown  # accepted and closed at once: not good
    reconnect.connected(200.0)
    assert reconnect.next(300.0) == first


@given(st.integers(0, 65535), st.floats(0, 1e6), st.floats(1, 1e6), st.floats(0, 3600), st.floats(0, 1), chances)
def test_any_requeue_delay_is_a_whole_number_in_range(attempts, base, factor, cap, jitter, luck):
    delay = requeue_delay(base=base, factor=factor, cap=cap, jitter=jitter, random=lambda: luck)(attempts)
    assert isinstance(delay, int)
    assert 0 <= delay <= cap * 1000


# The ledger of messages in flight


TIMEOUT, MAX_TIMEOUT = 60.0, 100.0


def make(number: int, now: float) -> Message:
    return Message(1, 1, b"%016x" % number, b"", received_at=now)


def batch(ledger: InFlight, count: int, now: float) -> list[Message]:
    messages = [make(number, now) for number in range(count)]
    ledger.received(list(messages))
    return messages


def answer(ledger: InFlight, *messages: Message) -> None:
    for message in messages:
        message.mark_responded()
    ledger.answered(messages)


def test_finish_makes_one_buffer_and_takes_the_messages_off_what_is_in_flight() -> None:
    ledger = InFlight()
    first, second, third = batch(ledger, 3, 0.0)
    assert ledger.received([make(9, 0.0)]) == 4
    assert ledger.finish((third, first)) == b"FIN %b\nFIN %b\n" % (third.id, first.id)
    assert ledger.count == 2
    assert [message.has_responded() for message in (first, second, third)] == [True, False, True]
    assert [message.id for message in ledger.pending()] == [second.id, b"%016x" % 9]


def test_a_finish_that_cannot_be_written_changes_nothing() -> None:
    ledger = InFlight()
    (message,) = batch(ledger, 1, 0.0)
    with pytest.raises(TypeError, match="messages must be a Message or bytes"):
        ledger.finish([message, None])  # type: ignore[list-item]
    assert (ledger.count, message.has_responded(), ledger.pending()) == (1, False, [message])


def test_a_message_that_stands_for_another_expires_in_its_place_and_one_that_nobody_holds_is_found() -> None:
    ledger = InFlight()
    came, *others = batch(ledger, 3, 0.0)
    came.mark_responded()
    readable = make(0, 0.0)
    ledger.follow(readable)
    assert ledger.count == 3
    del others[1]
    assert [message.id for message in ledger.unreachable()] == [b"%016x" % 2]
    assert readable in ledger.expire(60.0)
    assert ledger.count == 0


def test_the_ledger_keeps_no_answered_messages() -> None:
    ledger = InFlight()
    pending = batch(ledger, 5, 0.0)
    for now in range(1000):
        answer(ledger, *batch(ledger, 10, float(now)))
    assert len(ledger.pending()) == len(pending) == ledger.count
    answer(ledger, *batch(ledger, 10, 1000.0))
    assert len(ledger) <= 2 * (5 + 10) + SLACK


def subscribed(now: float, msg_timeout: int = 60_000) -> Session:
    session = Session(ConnectionConfig(heartbeat_interval=30))
    session.connect()
    session.receive(encode_frame(0, b'{"version":"1.3.0","msg_timeout":%d}' % msg_timeout), now)
    session.sub("t", "c")
    session.receive(encode_frame(0, b"OK"), now)
    return session


def test_a_session_expires_its_messages() -> None:
    session = subscribed(40.0, msg_timeout=2000)
    data = b"".join(encode_message(1, 1, b"%016x" % number, b"") for number in range(3))
    messages = session.receive(data + encode_frame(0, b"_heartbeat_"), 50.0)[:3]
    assert session.ledger.next_deadline == 52.0
    session.touch(messages[0], 51.0)
    session.fin(messages[1])
    assert messages[1].has_responded()
    assert session.expire(52.0) == [messages[2]]
    assert session.in_flight == 1
    session.fin(messages[2])
    assert session.in_flight == 1
    session.req(messages[0], 0)
    assert session.expire(60.0) == []
    assert session.in_flight == 0


class Ledger(RuleBasedStateMachine):
    """Against a ledger that looks at every message each time."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = InFlight()
        self.ledger.identified(ServerInfo(msg_timeout_ms=60_000, max_msg_timeout_ms=100_000))
        self.now = 0.0
        self.deadlines: dict[Message, float] = {}
        self.gone: list[Message] = []

    @rule(count=st.integers(1, 40))
    def receive(self, count: int) -> None:
        self.deadlines |= dict.fromkeys(batch(self.ledger, count, self.now), self.now + TIMEOUT)

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        if self.deadlines:
            some = data.draw(st.lists(st.sampled_from(list(self.deadlines)), unique=True))
            answer(self.ledger, *some)
            for message in some:
                del self.deadlines[message]

    @rule(data=st.data())
    def answer_late(self, data: st.DataObject) -> None:
        if self.gone:
            answer(self.ledger, self.gone.pop(data.draw(st.integers(0, len(self.gone) - 1))))

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        if self.deadlines:
            for message in data.draw(st.lists(st.sampled_from(list(self.deadlines)), unique=True)):
                self.ledger.touched(message, self.now)
                self.deadlines[message] = min(self.now + TIMEOUT, message.received_at + MAX_TIMEOUT)

    @rule(seconds=st.floats(0.0, 70.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        due = {message for message, deadline in self.deadlines.items() if deadline <= self.now}
        expired = self.ledger.expire(self.now)
        assert set(expired) == due
        assert all(message.has_expired() for message in expired)
        assert not any(message.has_expired() for message in self.deadlines.keys() - due)
        for message in due:
            del self.deadlines[message]
        self.gone += expired

    @invariant()
    def counts_what_is_in_flight(self) -> None:
        assert self.ledger.count == len(self.deadlines)
        assert self.ledger.next_deadline <= min(self.deadlines.values(), default=inf)


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=20, stateful_step_count=40)


# A server that ignores RDY is noticed in time, and a correct one never is

MESSAGE = encode_message(1, 1, b"0123456789abcdef", b"body")


@pytest.mark.parametrize("rdy", [0, 1, 200, 2500])
def test_a_server_that_ignores_rdy_is_found_out_within_ten_times_rdy(rdy: int) -> None:
    session = subscribed(1000.0)
    session.set_rdy(rdy)
    received = 0
    while session.failure is None:
        received += len(session.receive(MESSAGE * 10, 1000.5))
        assert received <= STRAGGLERS + 10 * rdy + 10
    with pytest.raises(RemoteProtocolError, match=r"the server ignores RDY.*highest RDY"):
        session.receive(MESSAGE, 1000.5)


def test_the_messages_before_the_verdict_are_not_lost_and_columns_are_counted_too() -> None:
    session = subscribed(1000.0)
    assert len(session.receive(MESSAGE * 100, 1000.1)) == 100
    assert isinstance(session.failure, RemoteProtocolError)
    session = subscribed(1000.0)
    session.set_rdy(1)
    session.check_in_flight(50, 1000.1)
    assert session.failure is None
    session.check_in_flight(1000, 1000.1)
    assert "ignores RDY" in str(session.failure)


def test_whoever_answers_may_receive_without_end_and_without_a_clock_nobody_is_blamed() -> None:
    session = subscribed(1000.0)
    session.set_rdy(100)
    for _ in range(100):
        session.fin_many(session.receive(MESSAGE * 100, 1000.1))
    assert session.failure is None
    session = subscribed(0.0)
    session.set_rdy(1)
    session.receive(MESSAGE * 1000)
    assert session.failure is None


class CorrectServer:
    """What a correct server may do at worst: it sends at once whatever RDY allows, and its messages travel for long."""

    def __init__(self, msg_timeout: float, travel_time: float) -> None:
        self.now = 1000.0
        self.rdy = 0
        self.sent = 0
        self._msg_timeout = msg_timeout
        self._travel_time = travel_time
        self._in_flight: deque[tuple[float, int]] = deque()  # when each was sent, and its number
        self._travelling: deque[tuple[float, int]] = deque()
        self._answers: deque[tuple[float, list[int]]] = deque()

    def step(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        while self._answers and self._answers[0][0] <= self.now:
            answered = set(self._answers.popleft()[1])
            self._in_flight = deque(each for each in self._in_flight if each[1] not in answered)
        while self._in_flight and self._in_flight[0][0] + self._msg_timeout <= self.now:
            self._in_flight.popleft()
        while len(self._in_flight) < self.rdy:
            self.sent += 1
            self._in_flight.append((self.now, self.sent))
            self._travelling.append((self.now, self.sent))

    def empty(self) -> None:
        """What an administrator may do: the channel forgets what is in flight."""
        self._in_flight.clear()

    def arrived(self, everything: bool) -> list[int]:
        """What the client reads now: what it must have read by now, or everything that was sent."""
        due = self.now - self._travel_time
        found = []
        while self._travelling and (everything or self._travelling[0][0] <= due):
            found.append(self._travelling.popleft()[1])
        return found

    def answer(self, numbers: list[int], delay: float) -> None:
        """The client answers; the server hears of it later."""
        self._answers.append((self.now + delay, numbers))


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    msg_timeout=st.sampled_from([0.1, 1.0, 7.0, 60.0]),
    mute_time=st.sampled_from([2.0, 60.0]),
    answers=st.sampled_from([0.0, 0.5, 1.0]),
    resets=st.booleans(),
)
def test_no_correct_server_is_blamed(
    seed: int, msg_timeout: float, mute_time: float, answers: float, resets: bool
) -> None:
    random = Random(seed)
    server, limit = CorrectServer(msg_timeout, mute_time), DeliveryLimit(msg_timeout, mute_time, 1000.0)
    held: list[int] = []
    for _ in range(300):
        if random.random() < 0.1:
            server.rdy = random.choice([0, 1, 5, 40])
            limit.rdy_sent(server.rdy)
        if resets and random.random() < 0.005:
            server.empty()
        server.step(random.choice([0.0, 0.01, msg_timeout / 3, msg_timeout, mute_time / 2]))
        held += server.arrived(random.random() < 0.3)
        assert not limit.is_exceeded(len(held), server.now)
        count = int(len(held) * answers * random.random())
        answered, held = held[:count], held[count:]
        server.answer(answered, random.choice([0.0, 0.5]))
