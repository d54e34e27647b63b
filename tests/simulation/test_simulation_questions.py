"""The questions of docs/scale.md, asked of small fleets: each has an answer, which holds in its direction."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from fleet import QUESTIONS, _moving, lines_over_seconds
from fleet_models import AcceptingNsqd, Client, Connection, Lookupd, Producer, Simulation

from nsq_fast.config import LookupConfig
from nsq_fast.page import Line
from nsq_fast.protocol.backoff import ReconnectDelay

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_same_seed_gives_the_same_answer_with_curves_and_figures(name: str) -> None:
    first, second = (QUESTIONS[name](0.01, 7) for _ in range(2))
    assert first == second
    assert all(len(line.points) > 10 for line in first.lines)
    assert all(what and value for what, value in first.figures)


def fleet(
    count: int, jitter: float = 0.3, capacity: float = 10_000.0
) -> tuple[Simulation, list[Lookupd], list[Client]]:
    simulation = Simulation(1)
    lookupds = [Lookupd(simulation, capacity, 1.0) for _ in range(2)]
    clients = [Client(simulation, lookupds, LookupConfig(lookupd_poll_jitter=jitter)) for _ in range(count)]
    for client in clients:
        client.start()
    return simulation, lookupds, clients


def test_each_client_asks_each_lookupd_once_a_poll() -> None:
    simulation, lookupds, _ = fleet(20, jitter=0.0)
    simulation.run(130.0)
    assert [lookupd.requests.total for lookupd in lookupds] == [3 * 20] * 2
    assert lookupds[0].requests.peak == 20


def test_jitter_spreads_polls_that_began_together() -> None:
    peaks = []
    for jitter in (0.0, 0.3):
        simulation, lookupds, _ = fleet(200, jitter)
        simulation.run(300.0)
        peaks.append(max(rate for at, rate in lookupds[0].requests.points(300.0) if at > 1.0))
    assert peaks[1] < peaks[0] / 4


def test_a_lookupd_that_is_down_is_asked_less_often_and_all_of_them_sooner() -> None:
    simulation, lookupds, clients = fleet(10)
    simulation.run(10.0)
    lookupds[0].stop()
    simulation.run(1000.0)
    alive = lookupds[1].connects.total
    assert lookupds[0].connects.total < alive / 2
    lookupds[1].stop()
    simulation.run(1070.0)
    asked = lookupds[1].connects.total - alive
    assert asked >= 3 * len(clients)  # again after half a second, a second, two: not once in a minute
    for lookupd in lookupds:
        lookupd.start()
    simulation.run(1200.0)
    assert all(client.learnt_at is not None and client.learnt_at > 1070.0 for client in clients)


def test_questions_about_an_nsqd_that_died_are_spread() -> None:
    peaks = []
    for is_spread in (False, True):
        simulation = Simulation(1)
        lookupd = Lookupd(simulation, 1000.0, 0.5)
        nsqd = AcceptingNsqd(simulation, 1000.0, 0.5)
        for number in range(100):
            client = Client(simulation, [lookupd], LookupConfig())
            client.start_at(500.0)
            delay = ReconnectDelay(60.0, random=simulation.random.random)
            Connection(simulation, nsqd, number, delay, client, is_spread).begin()
        simulation.after(1.0, nsqd.stop)
        simulation.after(5.0, nsqd.start)
        simulation.run(100.0)
        assert len(nsqd.live) == 100
        peaks.append(lookupd.requests.peak)
    assert peaks[1] < peaks[0] / 2


def test_publishes_keep_their_order_and_none_is_lost_while_leaders_move() -> None:
    producer: Producer = _moving(5, 3.0, 1)
    for partition in producer.partitions:
        assert partition.stored == list(range(len(partition.stored)))
        assert len(partition.waits) == len(partition.stored) > 50
        assert 3.0 <= max(partition.waits) < 5.0
    assert producer.pending == 0 < producer.most_pending


def test_lines_are_drawn_to_scale_and_named() -> None:
    svg = lines_over_seconds(
        "a & b", "things", [Line("one", [(0.0, 0.0), (5.0, 50.0), (10.0, 100.0)]), Line("two", [])]
    )
    root = ElementTree.fromstring(svg)
    assert root.findtext(f"{SVG}title") == "a & b"
    assert {"one", "two", "upwards: things; across: seconds"} <= {each.text for each in root.iter(f"{SVG}text")}
    [line] = [each for each in root.iter(f"{SVG}path") if each.findtext(f"{SVG}title") == "one"]
    (x0, y0), (x1, y1), (x2, y2) = (map(float, point.split()) for point in line.attrib["d"][1:].split("L"))
    assert x1 - x0 == pytest.approx(x2 - x1)
    assert y0 - y1 == pytest.approx(y1 - y2)
    assert int(root.attrib["width"]) <= 440
