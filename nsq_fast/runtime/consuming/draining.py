"""What is waited for when a connection ends in good order, after ``Subscription.ask_for_the_end``."""

from __future__ import annotations

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
