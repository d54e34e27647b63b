"""The end of a consumer, in order, so that nothing acknowledged is lost and nothing waits longer than it must."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from .subscriber import Subscriber

if TYPE_CHECKING:
    from .consumer import Consumer


def close_subscribers(consumer: Consumer, drain: bool, timeout: float | None) -> None:
    """Close the connections of a consumer, all of them at each step.

    1. make no connection any more: lookup is stopped, pauses between attempts end;
    2. CLS to every nsqd, so that it sends nothing more (this takes the place of RDY 0), and REQ 0 for what no
       handler has begun with, also for what still arrives: other consumers get it at once;
    3. wait for CLOSE_WAIT, behind which nothing can arrive;
    4. let running handlers finish, and wait for the answers of messages handled asynchronously; their FINs and
       REQs are still accepted;
    5. flush the last FINs and close the connections;
    6. end the workers.

    Steps 3 and 4 together end after ``timeout`` seconds; without ``drain`` they are left out. What is not
    answered then is delivered again by nsqd when it times out.
    """
    deadline = None if timeout is None else monotonic() + timeout
    subscribers = consumer.subscribers
    for subscriber in subscribers:
        subscriber.stop_connecting()
    for subscriber in subscribers:
        subscriber.stop_messages()
    if drain:
        _wait(consumer, subscribers, deadline)
    for subscriber in subscribers:
        subscriber.close()


def _wait(consumer: Consumer, subscribers: list[Subscriber], deadline: float | None) -> None:
    for subscriber in subscribers:
        if not subscriber.wait_for_close_wait(deadline):
            consumer.logger.warning("%s: no CLOSE_WAIT in time", subscriber.address)
    for subscriber in subscribers:
        if not subscriber.wait_for_answers(deadline):
            count = subscriber.connection.in_flight
            consumer.logger.warning("%s: closed with %d messages unanswered", subscriber.address, count)
