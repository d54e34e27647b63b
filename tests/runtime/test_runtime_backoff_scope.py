"""Backoff of one connection only, and pauses that a program's own strategy gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from support.waiting import holds, until

from nsq_fast import Consumer, ExponentialBackoff, Message, Producer, RequeueMessage
from nsq_fast.errors import ConfigError

Factory = Callable[..., Any]
OWN = {"backoff_scope": "connection", "requeue_delay": 0}


class Steps:
    """A strategy: pauses of its own, and the levels that were asked for."""

    jitter = 0.0

    def __init__(self, *pauses: float) -> None:
        self.levels: set[int] = set()
        self._pauses = pauses

    def duration(self, level: int) -> float:
        self.levels.add(level)
        return self._pauses[min(level, len(self._pauses)) - 1]


def fail(consumer: Consumer, message: Message) -> None:
    if message.body == b"bad":
        raise ValueError("no")


def test_failures_pause_their_own_connection_and_no_other(servers: Factory, consume: Factory) -> None:
    bad, good = servers(), servers()
    consumer = consume(fail, bad, good, backoff_strategy=Steps(600.0), max_backoff_duration=600, **OWN)
    bad.connection().wait_rdy(5)
    good.connection().wait_rdy(5)
    bad.connection().push(1, body=b"bad")
    bad.connection().wait_rdy(0)
    good.connection().wait_rdy(10)  # what the other may not have is not left over
    stats = {each.address: each for each in consumer.stats().connections}
    assert stats[bad.address].backoff_level == 1
    assert 500 < stats[bad.address].backoff_left <= 600
    assert stats[good.address].backoff_level == 0
    assert consumer.stats().backoff_level == 0


def test_after_the_pause_one_message_shows_whether_things_are_better(servers: Factory, consume: Factory) -> None:
    bad, good = servers(), servers()
    consumer = consume(fail, bad, good, backoff_strategy=Steps(0.1), max_backoff_duration=60, **OWN)
    bad.connection().wait_rdy(5)
    bad.connection().push(1, body=b"bad")
    bad.connection().wait_rdy(1)
    good.connection().wait_rdy(9)
    bad.connection().push(2)
    bad.connection().wait_rdy(5)
    good.connection().wait_rdy(5)
    assert all(each.backoff_level == 0 for each in consumer.stats().connections)


def test_a_success_elsewhere_ends_no_pause(servers: Factory, consume: Factory) -> None:
    bad, good = servers(), servers()
    consume(fail, bad, good, backoff_strategy=Steps(600.0), max_backoff_duration=600, **OWN)
    bad.connection().push(1, body=b"bad")
    bad.connection().wait_rdy(0)
    good.connection().push(*range(2, 8))
    good.connection().wait_for(lambda: len(good.connection().answered(b"FIN")) == 6)
    holds(lambda: bad.connection().rdy == 0, 0.1)


def test_a_connection_that_is_lost_begins_with_one_message(servers: Factory, consume: Factory) -> None:
    bad, good = servers(), servers()
    consume(fail, bad, good, backoff_strategy=Steps(0.2), max_backoff_duration=60, **OWN)
    bad.connection().wait_rdy(5)
    bad.connection().close()
    again = bad.connection(1)
    again.wait_rdy(1)
    assert (b"RDY", b"5") not in again.commands
    assert (b"RDY", b"0") not in good.connection().commands
    again.push(1)
    again.wait_rdy(5)


def test_by_default_failures_pause_all_connections(servers: Factory, consume: Factory) -> None:
    first, second = servers(), servers()
    consumer = consume(fail, first, second, backoff_strategy=Steps(600.0), max_backoff_duration=600)
    first.connection().wait_rdy(5)
    second.connection().wait_rdy(5)
    first.connection().push(1, body=b"bad")
    first.connection().wait_rdy(0)
    second.connection().wait_rdy(0)
    assert {each.backoff_level for each in consumer.stats().connections} == {1}


def test_a_strategy_of_ones_own_says_how_long_pauses_are(nsqd: Any, consume: Factory) -> None:
    strategy = Steps(0.01, 0.02, 600.0)
    consumer = consume(fail, backoff_strategy=strategy, max_backoff_duration=900, requeue_delay=0)
    connection = nsqd.connection()
    for level in (1, 2, 3):
        connection.push(level, body=b"bad")
        until(lambda level=level: consumer.stats().backoff_level == level)
        # What fails within a pause does not count.
        until(lambda level=level: level == 3 or consumer.stats().backoff_left == 0.0)
    assert consumer.stats().backoff_left > 500
    assert {1, 2, 3} <= strategy.levels


def test_a_bad_node_does_not_hold_up_the_good_one(make_nsqd: Factory, start_consumer: Factory) -> None:
    nsqds = {"bad": make_nsqd(), "good": make_nsqd()}
    for name, nsqd in nsqds.items():
        with Producer(str(nsqd.tcp_address)) as producer:
            producer.multipublish("t", [b"%s %d" % (name.encode(), number) for number in range(300)])
    handled: Counter[str] = Counter()
    is_ill = True

    def handle(_: Consumer, message: Message) -> None:
        name = message.body.decode().split()[0]
        if name == "bad" and is_ill:
            raise RequeueMessage(0)
        handled[name] += 1

    consumer = start_consumer(
        "t",
        "c",
        [str(nsqd.tcp_address) for nsqd in nsqds.values()],
        message_handler=handle,
        max_tries=0,
        max_backoff_duration=0.5,
        backoff_strategy=ExponentialBackoff(base=0.1, jitter=1.0),
        **OWN,
    )
    bad = str(nsqds["bad"].tcp_address)

    def levels() -> dict[bool, int]:
        return {str(each.address) == bad: each.backoff_level for each in consumer.stats().connections}

    until(lambda: levels().get(True))
    until(lambda: handled["good"] == 300)
    assert levels()[False] == 0
    assert handled["bad"] == 0
    is_ill = False
    until(lambda: handled["bad"] == 300)
    assert consumer.stats().totals.finished <= 600
    until(lambda: levels() == {True: 0, False: 0})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"backoff_scope": "node"}, "backoff_scope='node': must be one of consumer, connection"),
        ({"backoff_strategy": 5}, "backoff_strategy=5: must have duration"),
        ({"backoff_strategy": Steps(-1.0)}, "must have duration"),
        ({"backoff_strategy": ExponentialBackoff(jitter=2.0)}, "jitter, 0 to 1"),
    ],
    ids=["scope", "number", "negative", "jitter"],
)
def test_what_is_no_strategy_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Consumer("t", "c", "127.0.0.1", **options)
