"""RDY and backoff in virtual time, and what tells how far a simulated curve is from a measured one."""

from __future__ import annotations

import pytest
from fleet import CASES, PROBE, Case, delay_of, deviation, length, mean, simulated, united
from fleet_models import Consumer, Curve, Message, Nsqd, Simulation, share

from nsq_fast.protocol.backoff import Backoff


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    case = CASES[2]
    runs = [united(simulated(case, seed), 20.0) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_message_of_each_nsqd_is_handled_once(case: Case) -> None:
    curves = simulated(case)
    assert [curve.total for curve in curves] == [case.backlog(number) for number in range(case.nsqds)]
    # No more handlers run at once than messages may be in flight: so it takes as long as that, at least.
    handlers = case.consumers * (case.max_in_flight or case.nsqds)
    assert length(curves) >= case.fails_until + case.total / handlers * case.handler


def test_with_room_for_all_every_handler_is_busy_all_the_time() -> None:
    case = CASES[0]
    assert length(simulated(case)) <= 1.1 * case.total / (case.consumers * case.nsqds) * case.handler


def test_nothing_is_handled_while_handlers_fail_and_all_of_it_after() -> None:
    case = CASES[3]
    points = united(simulated(case), 20.0)
    assert max(count for at, count in points if at <= case.fails_until) == 0
    assert points[-1][1] == case.total


def test_the_distance_of_curves_is_a_share_of_all_that_happened() -> None:
    one = [(1.0, 10.0), (2.0, 50.0), (3.0, 100.0)]
    assert deviation(one, one) == 0.0
    assert deviation(one, [(1.0, 10.0), (2.0, 70.0), (3.0, 100.0)]) == pytest.approx(0.2)
    assert deviation(one, [(1.0, 0.0), (2.0, 50.0), (3.0, 200.0)]) == pytest.approx(0.5)
    assert mean([one, [(1.0, 30.0), (2.0, 50.0), (3.0, 60.0)]]) == [(1.0, 20.0), (2.0, 50.0), (3.0, 80.0)]


def test_the_way_of_a_message_is_what_handlers_do_not_explain() -> None:
    seconds = length(simulated(PROBE, delay=0.01))
    assert delay_of(seconds) == pytest.approx(0.01, rel=0.2)


def test_a_curve_counts_in_intervals() -> None:
    curve = Curve(0.5)
    for at in (0.1, 0.2, 1.4):
        curve.add(at)
    assert curve.points(2.0) == [(0.0, 4.0), (0.5, 0.0), (1.0, 2.0), (1.5, 0.0)]
    assert curve.totals(2.0) == [(0.5, 2.0), (1.0, 2.0), (1.5, 3.0), (2.0, 3.0)]
    assert (curve.peak, curve.total, curve.end) == (4.0, 3.0, 1.5)
    assert share([3.0, 1.0, 2.0], 0.5) == 2.0
    assert share([], 0.5) == 0.0


@pytest.mark.parametrize("idle_timeout", [0.01, 0.1, 0.3, 0.5, 1.0, 2.5, 10.0])
@pytest.mark.parametrize(("connections", "max_in_flight"), [(3, 2), (3, 1), (5, 4), (10, 9), (10, 5)])
def test_the_only_nsqd_with_messages_has_its_turn_however_short_turns_are(
    idle_timeout: float, connections: int, max_in_flight: int
) -> None:
    """Turns shorter than a lower RDY needs to take effect: what one gives up, another has waited for."""
    for seed in range(4):
        simulation = Simulation(seed)
        nsqds = [Nsqd(simulation, 0.001) for _ in range(connections)]
        consumer = Consumer(
            simulation,
            nsqds,
            max_in_flight=max_in_flight,
            handler=lambda message: (0.001, True),
            idle_timeout=idle_timeout,
        )
        consumer.start()
        for number in range(20):
            simulation.after(20.0 + 0.01 * number, nsqds[-1].publish)
        simulation.run(20.2 + connections * (idle_timeout + 1.0))
        assert nsqds[-1].waiting == 0


def waits(probes: int, hot: int = 1, idle: int = 19) -> list[float]:
    """How long messages of a hot nsqd wait among idle ones, with max_in_flight at a tenth of the connections."""
    simulation = Simulation(3)
    nsqds = [Nsqd(simulation, 0.001) for _ in range(hot + idle)]

    def handler(_message: Message) -> tuple[float, bool]:
        return 0.001, True

    consumer = Consumer(simulation, nsqds, max_in_flight=2, handler=handler, probes=probes)
    consumer.start()

    def publish() -> None:
        nsqds[0].publish()
        simulation.after(0.1, publish)

    publish()
    simulation.run(600.0)
    return consumer.waits


def test_idle_connections_do_not_keep_a_hot_one_waiting_for_idle_timeouts() -> None:
    new, old = waits(10), waits(1)
    assert share(new, 0.99) < share(old, 0.99) / 4
    assert sum(wait < 0.05 for wait in new) > 0.6 * 6000 > 2 * sum(wait < 0.05 for wait in old)


def test_never_more_is_in_flight_than_max_in_flight() -> None:
    simulation = Simulation(5)
    nsqds = [Nsqd(simulation, 0.01) for _ in range(8)]
    consumer = Consumer(
        simulation,
        nsqds,
        max_in_flight=3,
        handler=lambda message: (0.03, message.attempts > 1),
        backoff=Backoff(0.5, random=simulation.random.random),
    )
    consumer.start()
    for nsqd in nsqds:
        for _ in range(20):
            nsqd.publish()
    most = 0
    while simulation.now < 200.0:
        simulation.run(simulation.now + 0.01)
        most = max(most, sum(link.in_flight for nsqd in nsqds for link in nsqd.links))
    assert most <= 3
    assert consumer.handled.total == 160
