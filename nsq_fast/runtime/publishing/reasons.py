"""The errors that callers of a producer get: what is known of why a publish failed."""

from __future__ import annotations

from nsq_fast.errors import ConfigError, NoLeader, NoNsqd, NsqError, PublishTimeout
from nsq_fast.protocol.retry import publish_failed

from .addressed import Addressed
from .pool import Pool
from .publish import Publish


def final_error(publish: Publish, error: NsqError) -> NsqError:
    """The error for a publish whose last attempt failed with ``error``.

    A wrong argument stays what it is, also when only the server at hand shows that it is wrong.
    """
    if isinstance(error, ConfigError):
        return ConfigError(*error.args)
    return publish_failed(publish.topic, error, publish.attempts, publish.possibly_stored)


def timeout_error(publish: Publish, pool: Pool) -> NsqError:
    """The error for a publish whose deadline came."""
    stored = publish.may_be_stored
    if not stored and not publish.attempts and (nowhere := why_nowhere(publish, pool)) is not None:
        errors = pool.errors()
        nowhere.__cause__ = errors[-1][1] if errors else None
        return nowhere
    tail = "; it may have been stored all the same" if stored else ""
    error = PublishTimeout(
        f"publish to {publish.topic!r}: no reply before its deadline{tail}",
        attempts=publish.attempts,
        possibly_stored=stored,
    )
    error.__cause__ = publish.last_error
    return error


def why_nowhere(publish: Publish, pool: Pool) -> NoNsqd | None:
    """Why a publish cannot be sent now, if it is for want of a connection to an nsqd that takes it."""
    if isinstance(publish, Addressed) and publish.is_pinned and publish.route.topic is not None:
        return _why_no_leader(publish, pool)
    if publish.route.links:
        return None
    return NoNsqd(f"no nsqd is connected for topic {publish.topic!r}{unreached(pool)}")


def _why_no_leader(publish: Addressed, pool: Pool) -> NoLeader | None:
    lane = publish.lane
    if lane is None:
        return NoLeader(f"lookup did not say which partitions topic {publish.topic!r} has{unreached(pool)}")
    if lane.links:
        return None
    known = "lookup names no leader" if lane.leader is None else f"its leader {lane.leader} is not connected"
    return NoLeader(f"partition {lane.partition} of topic {publish.topic!r}: {known}{unreached(pool)}")


def unreached(pool: Pool) -> str:
    """What is known of each nsqd that is not connected."""
    texts = [(str(address), str(error)) for address, error in pool.errors()]
    reasons = [text if text.startswith(address) else f"{address}: {text}" for address, text in texts]
    return f" ({'; '.join(reasons)})" if reasons else ""
