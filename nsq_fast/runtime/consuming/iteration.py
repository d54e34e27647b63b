"""``for message in consumer``: the greenlet that iterates does a worker's work."""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic

from gevent import getcurrent

from nsq_fast._codec import Message
from nsq_fast._dispatch import InboundQueue

from .closing import Closing
from .dispatch import Pool, Worker
from .disposition import Disposition


def messages(pool: Pool, disposition: Disposition, closing: Closing) -> Iterator[Message]:
    """Yield messages until the pool is stopped.

    Asking for the next message finishes the one before, unless it is answered or asynchronous. Leaving the loop
    early gives the message of that round back, unless it is answered: whether it was done nobody can know here.
    Raises what the consumer failed with, when that is why the pool was stopped.
    """
    worker = Worker(pool)
    worker.greenlet = getcurrent()  # the taker is a worker for whoever looks at what is being handled
    pool.workers.append(worker)
    try:
        while (inbound := pool.take()) is not None:
            try:
                yield from _messages_of(inbound, pool, worker, disposition)
            finally:
                pool.leave(inbound)
            worker.current = None
    finally:
        pool.workers.remove(worker)
        left = worker.current
        if isinstance(left, Message) and not left.is_async():
            disposition.requeue(left, 0, False)
    if closing.failure is not None:
        raise closing.failure


def _messages_of(inbound: InboundQueue, pool: Pool, worker: Worker, disposition: Disposition) -> Iterator[Message]:
    """Yield until the queue is empty or the time slice is over."""
    waiting, returned = inbound.waiting, disposition.slice_of(inbound).returned
    began = monotonic()
    inbound.slice.end = 0.0 if pool.prompt.left else pool.turns.due_at  # the FIN leaves when the round is over
    timing = disposition.timing
    sample = timing.sample(began) if timing is not None and began >= timing.due else None
    is_over = False
    while waiting and not is_over:
        now = monotonic()
        if now >= inbound.ledger.next_deadline:
            inbound.expire(now)
            continue
        message = waiting.popleft()
        worker.current = message
        if disposition.is_given_up(inbound, message):
            continue
        # Whatever happens at the yield, ``current`` says which message is in the program's hands.
        if sample is None:
            yield message
        else:
            sample.begin(message)
            yield message
            sample.end()
            sample.count()
            sample = None
        is_over = returned(message)
    if inbound.turn is None:
        pool.handled(began, inbound.slice.take_count())
