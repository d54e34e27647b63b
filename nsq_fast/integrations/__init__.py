"""Brokers of other libraries on NSQ; each is an extra, and a module that nothing else imports."""

from __future__ import annotations

import logging
from collections.abc import Callable

from nsq_fast.errors import AlreadyResponded, NsqError
from nsq_fast.log_events import RESPONSE_FAILED

logger: logging.Logger = logging.getLogger(__name__)


def respond(response: Callable[[], object]) -> None:
    """Call ``finish`` or ``requeue`` of a message. Where its connection is lost it comes again: one warning says so."""
    try:
        response()
    except AlreadyResponded:
        pass
    except NsqError as error:
        logger.warning(
            "a message was handled, and comes again: it cannot be responded to: %s", error, extra=RESPONSE_FAILED
        )
