"""The end of a consumer, in order, so that nothing acknowledged is lost and nothing waits longer than it must."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from time import monotonic

from gevent import joinall

from nsq_fast.runtime.net.connection import CLOSE_TIMEOUT
from nsq_fast.runtime.supervised import Supervisor

from .subscriber import Subscriber

# 1. make no connection any more: pauses between attempts end, lookup is stopped;
# 2. CLS to every nsqd, so that it sends nothing more (this takes the place of RDY 0), and REQ 0 for what no handler
#    has begun with, also for what still arrives: other consumers get it at once;
# 3. wait for CLOSE_WAIT, behind which nothing can arrive;
# 4. let running handlers finish, and wait for the answers of messages handled asynchronously: FIN and REQ are
#    still accepted;
# 5. flush the last FINs and close the connections;
# 6. end the workers.
#
# Steps 1 and 2 happen at once, so that no handler begins after close() was called. 3 and 4 together end after the
# timeout; without drain they are left out. What is not answered then is delivered again by nsqd when it times out.
# Step 5 has a share of the timeout of its own, and happens on all connections at once: a server that does not answer
# makes it last as long as it may.
CLOSING_SHARE = 0.1
SHORTEST_CLOSING = 0.1


def begin_closing(subscribers: Iterable[Subscriber]) -> None:
    """Steps 1 and 2; does not block."""
    for subscriber in subscribers:
        subscriber.begin_closing()


def close_subscribers(
    subscribers: Sequence[Subscriber],
    drain: bool,
    timeout: float | None,
    supervisor: Supervisor,
    log: logging.Logger,
) -> None:
    """Steps 3 to 5, each for all connections before the next."""
    closing_time = CLOSE_TIMEOUT
    deadline = None
    if timeout is not None:
        share = min(timeout * CLOSING_SHARE, CLOSE_TIMEOUT)
        deadline = monotonic() + timeout - share
        closing_time = max(share, SHORTEST_CLOSING)
    for subscriber in subscribers:
        subscriber.drop_half_made()
    if drain:
        _wait(subscribers, deadline, log)
    jobs = [supervisor.job("closing", each.close, closing_time) for each in subscribers]
    for job in jobs:
        job.start()
    joinall(jobs)


def _wait(subscribers: Sequence[Subscriber], deadline: float | None, log: logging.Logger) -> None:
    for subscriber in subscribers:
        if not subscriber.wait_for_close_wait(deadline):
            log.warning("%s: no CLOSE_WAIT in time", subscriber.address)
    for subscriber in subscribers:
        if not subscriber.wait_for_answers(deadline):
            count = subscriber.connection.in_flight
            log.warning("%s: closed with %d messages unanswered", subscriber.address, count)
