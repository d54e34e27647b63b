"""What to do after a failed publish: one table, and the pauses between attempts.

The table is driven by the policy flags on the errors (``retriable``,
``stale_topology``, ``outcome_unknown``), never by their text. A server works
a connection's commands off in order and reads no further after a fatal error:
what was queued behind one was certainly not stored, while a publish that was
waiting for its reply when the connection broke has an unknown outcome. The
session tells the two apart, and ConnectionLost says which it is.

Pure: the random source of the jitter is an argument.

Called by the producer; usable by any other embedder of the session.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from nsq_fast.errors import ConnectionLost, PublishFailed, ServerError


class RetryPolicy(NamedTuple):
    """How often and how patiently to retry. Delays in seconds."""

    max_attempts: int
    retry_unknown_outcome: bool
    base_delay: float
    max_delay: float
    jitter: float = 0.2


class Verdict(NamedTuple):
    """What to do after one failed attempt.

    Attributes:
        retry: try again.
        pause: wait ``retry_delay`` before that; otherwise the next connection may take it at once.
        refresh: the map of who takes the topic is out of date: look it up.
        possibly_stored: the failed attempt may have been stored all the same.
        counts: it used up one of the attempts.
    """

    retry: bool
    pause: bool = False
    refresh: bool = False
    possibly_stored: bool = False
    counts: bool = True


# The table. An error frame's class has all flags; a connection that ended is one of the first two rows.
NOT_EXECUTED = Verdict(retry=True, refresh=True, counts=False)
OUTCOME_UNKNOWN = Verdict(retry=True, refresh=True, possibly_stored=True)
OURS = Verdict(retry=False)


def classify(error: BaseException) -> Verdict:
    """The row of the table for an error, before attempts and options are looked at."""
    if isinstance(error, ServerError):
        return Verdict(
            retry=error.retriable,
            pause=error.retriable,
            refresh=error.stale_topology,
            possibly_stored=error.outcome_unknown,
        )
    if isinstance(error, ConnectionLost):
        return OUTCOME_UNKNOWN if error.outcome_unknown else NOT_EXECUTED
    return OURS


def decide(error: BaseException, attempts: int, policy: RetryPolicy) -> Verdict:
    """What to do now that attempt number ``attempts`` (from 1) failed with ``error``."""
    verdict = classify(error)
    if not verdict.retry or not verdict.counts:
        return verdict
    allowed = policy.retry_unknown_outcome or not verdict.possibly_stored
    return verdict if allowed and attempts < policy.max_attempts else verdict._replace(retry=False)


def retry_delay(attempts: int, policy: RetryPolicy, random: Callable[[], float]) -> float:
    """Seconds to wait after attempt number ``attempts``: exponential, capped, shortened by up to the jitter share.

    Args:
        random: gives numbers in [0, 1).
    """
    # 2.0**1024 overflows; every cap is reached long before
    delay = min(policy.max_delay, policy.base_delay * 2.0 ** min(attempts - 1, 64))
    return delay * (1.0 - policy.jitter * random())


def publish_failed(topic: str, error: BaseException, attempts: int, possibly_stored: bool) -> PublishFailed:
    """The error that the caller of a publish gets; ``error`` becomes its cause."""
    times = "1 attempt" if attempts == 1 else f"{attempts} attempts"
    stored = "; it may have been stored all the same" if possibly_stored else ""
    failed = PublishFailed(
        f"publish to {topic!r} failed after {times}: {error}{stored}",
        attempts=attempts,
        possibly_stored=possibly_stored,
    )
    failed.__cause__ = error
    return failed
