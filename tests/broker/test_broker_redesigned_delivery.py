"""Which records of a partition a channel is done with."""

from __future__ import annotations

from nsq_fast.broker.redesigned.channel import Confirmed, Delivery
from nsq_fast.broker.redesigned.log import Draft, PartitionLog


def deliveries(count: int) -> list[Delivery]:
    log = PartitionLog(partition=0, is_ext=False)
    log.append([Draft(b"%d" % number) for number in range(count)])
    return [Delivery(record) for record in log.read(0, count)]


def test_what_is_done_in_any_order_is_counted_once() -> None:
    confirmed = Confirmed(0)
    first, second, third, last = deliveries(4)
    confirmed.confirm([third, second])
    assert (confirmed.position, confirmed.ahead) == (0, {1, 2})
    confirmed.confirm([first])
    assert (confirmed.position, confirmed.ahead) == (3, set())
    confirmed.confirm([last])
    assert (confirmed.position, confirmed.ahead) == (4, set())


def test_a_record_that_was_delivered_twice_and_finished_twice_is_done_once() -> None:
    """As around a change of leader: the depth of the channel became -1."""
    confirmed = Confirmed(0)
    first, second, third = deliveries(3)
    confirmed.confirm([first, third])
    confirmed.confirm([first, third])
    assert (confirmed.position, confirmed.ahead) == (1, {2})
    confirmed.confirm([second])
    assert (confirmed.position, confirmed.ahead) == (3, set())
