"""What is waited for when a connection ends in good order, after ``Subscription.ask_for_the_end``."""

from __future__ import annotations

from contextlib import suppress

from nsq_fast.errors import NsqError

from .subscription import Subscription


def wait_for_close_wait(subscription: Subscription, deadline: float | None) -> bool:
    """Wait for CLOSE_WAIT, behind which no message arrives; False if it did not come by ``deadline`` (monotonic)."""
    return subscription.changes.wait_while(lambda: subscription.is_live and subscription.is_awaiting_close, deadline)


def wait_for_answers(subscription: Subscription, deadline: float | None) -> bool:
    """Wait until every message is responded to or expired; False if some are not by ``deadline`` (monotonic)."""
    subscription.give_back_abandoned()
    return subscription.changes.wait_while(
        lambda: subscription.is_live and subscription.connection.in_flight > 0, deadline
    )


def give_back_unfinished(subscription: Subscription) -> int:
    """REQ 0 for what handlers have begun with and not responded to; return how many there were."""
    count = 0
    for message in subscription.inbound.ledger.pending() if subscription.is_live else ():
        with suppress(NsqError):  # a handler on a native thread has responded just now
            message.requeue(0, False)
            count += 1
    return count
