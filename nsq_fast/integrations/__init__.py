"""Brokers of other libraries on NSQ; each is an extra, and a module that nothing else imports."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from nsq_fast._lazy import get_logger
from nsq_fast.errors import AlreadyResponded, ConfigError, NsqError
from nsq_fast.log_events import RESPONSE_FAILED

logger: logging.Logger = get_logger(__name__)


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


def delay_ms(name: str, delay: Any) -> int | None:
    """What a program gave as ``name``, a number of seconds or None, in milliseconds; ConfigError for anything else."""
    if delay is None:
        return None
    try:
        milliseconds = round(1000 * float(delay))
    except (TypeError, ValueError, OverflowError):
        milliseconds = -1
    if milliseconds < 0:
        raise ConfigError(f"{name}={delay!r}: must be a number of seconds, 0 or more, or None")
    return milliseconds
