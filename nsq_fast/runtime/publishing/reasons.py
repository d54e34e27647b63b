"""The errors that callers of a producer get: what is known of why a publish failed."""

from __future__ import annotations

from nsq_fast.errors import ConfigError, LookupFailed, NoLeader, NoNsqd, NsqError, PublishTimeout
from nsq_fast.names import Address
from nsq_fast.protocol.retry import MOST_SERVERS_LOST, publish_failed

from .pool import Pool
from .publish import Publish
from .routes import Routes


def final_error(publish: Publish, error: NsqError) -> NsqError:
    """The error for a publish whose last attempt failed with ``error``.

    A wrong argument stays what it is, also when only the server at hand shows that it is wrong.
    """
    if isinstance(error, ConfigError):
        return ConfigError(*error.args)
    note = ""
    if len(publish.ended_servers) >= MOST_SERVERS_LOST:
        ended = " and ".join(map(str, publish.ended_servers))
        note = (
            f"; {ended} ended the connection while working on it, so it may be what ended them:"
            " it is sent to no other server"
        )
    return publish_failed(publish.topic, error, publish.attempts, publish.possibly_stored, note)


def timeout_error(publish: Publish, pool: Pool, routes: Routes) -> NsqError:
    """The error for a publish whose deadline came."""
    stored = publish.may_be_stored
    nowhere = None if publish.attempt is not None else why_nowhere(publish, pool, routes)
    if nowhere is not None and not stored and not publish.attempts:
        return nowhere
    reasons = []
    if publish.last_error is not None:
        times = "1 attempt" if publish.attempts == 1 else f"{publish.attempts} attempts"
        reasons.append(f"its time was over after {times}, the last failure: {publish.last_error}")
    if publish.attempt is not None:
        conn = publish.attempt.conn
        reasons.append(f"no reply before its deadline{f', from {conn.address}' if conn else ''}")
    if not reasons:
        reasons.append("its time was over before it was sent")
    if nowhere is not None:
        reasons.append(str(nowhere))
    elif publish.misses:
        reasons.append(publish.destination.leaders_named())
    if stored:
        reasons.append("it may have been stored all the same")
    error = PublishTimeout(
        f"publish to {publish.topic!r}: {'; '.join(reasons)}",
        attempts=publish.attempts,
        possibly_stored=stored,
    )
    error.__cause__ = publish.last_error
    return error


def why_nowhere(publish: Publish, pool: Pool, routes: Routes) -> NoNsqd | None:
    """Why a publish cannot be sent now, if it is for want of a connection to an nsqd that takes it."""

    def is_connected(address: Address) -> bool:
        return any(link.address == address for link in pool.connected)

    destination = publish.destination
    text = destination.missing_leader(is_connected)
    if text is not None:
        return _with_causes(NoLeader, text, publish.topic, pool, routes)
    if destination.links:
        return None
    return no_nsqd(f"no nsqd takes publishes now for topic {publish.topic!r}", publish.topic, pool, routes)


def no_nsqd(text: str, topic: str, pool: Pool, routes: Routes) -> NoNsqd:
    """``text`` as an error that says, too, what is known of each nsqd and of lookup; the last of it is its cause."""
    return _with_causes(NoNsqd, text, topic, pool, routes)


def _with_causes(kind: type[NoNsqd], text: str, topic: str, pool: Pool, routes: Routes) -> NoNsqd:
    errors = pool.errors()
    reasons = [_reason(str(address), str(error)) for address, error in errors]
    problem = routes.lookup_problem(topic)
    if problem:
        reasons.append(problem)
    error = kind(f"{text} ({'; '.join(reasons)})" if reasons else text)
    if errors:
        error.__cause__ = errors[-1][1]
    elif problem:
        error.__cause__ = LookupFailed(problem)
    return error


def _reason(address: str, text: str) -> str:
    return text if text.startswith(address) else f"{address}: {text}"
