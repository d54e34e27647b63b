"""What to do after a failed publish: one table, and the pauses between attempts.

The rows of the error codes (``SERVER_ERRORS``) are made of the policy flags on
the error classes (``retriable``, ``stale_topology``, ``outcome_unknown``). A few
codes stand for two different things, and only the text tells them apart: those
rows are in ``ERROR_TEXTS``. Which errors also end the connection differs between
the server families: that column is in ``dialect``. A server works
a connection's commands off in order and reads no further after a fatal error:
what was queued behind one was certainly not stored, while a publish that was
waiting for its reply when the connection broke has an unknown outcome. The
session tells the two apart, and ConnectionLost says which it is.

Pure: the random source of the jitter is an argument.

Called by the producer; usable by any other embedder of the session.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from nsq_fast.errors import (
    ERROR_CODES,
    BadBody,
    BadMessage,
    ConnectionLost,
    PublishFailed,
    ServerError,
    publish_failed_class,
)


class RetryPolicy(msgspec.Struct, frozen=True):
    """How often and how patiently to retry. Delays in seconds.

    Attributes:
        awaits_leader: a leader that moves is waited for as long as there is time: attempts that meet a stale or
            unready one use up none of ``max_attempts``. Without lookup nobody says where it went: there they do.
    """

    max_attempts: int
    retry_unknown_outcome: bool
    base_delay: float
    max_delay: float
    jitter: float = 0.2
    awaits_leader: bool = False


class Verdict(msgspec.Struct, frozen=True):
    """What to do after one failed attempt.

    Attributes:
        retry: try again.
        pause: wait ``retry_delay`` before that; otherwise the next connection may take it at once.
        refresh: the map of who takes the topic is out of date: look it up.
        possibly_stored: the failed attempt may have been stored all the same.
        counts: it used up one of the attempts.
        splits: it may have failed because of another publish in its command: that is told by trying each alone.
        leader: the nsqd is not (yet, or any more) the one that takes the partition's publishes: another may be.
    """

    retry: bool
    pause: bool = False
    refresh: bool = False
    possibly_stored: bool = False
    counts: bool = True
    leader: bool = False
    splits: bool = False


# The table. A connection that ended is one of the first two rows; an error frame has the row of its code, below.
NOT_EXECUTED = Verdict(retry=True, refresh=True, counts=False)
OUTCOME_UNKNOWN = Verdict(retry=True, refresh=True, possibly_stored=True)
OURS = Verdict(retry=False)


def _row(error: type[ServerError]) -> Verdict:
    return Verdict(
        retry=error.retriable,
        pause=error.retriable,
        refresh=error.stale_topology,
        possibly_stored=error.outcome_unknown,
        leader=error.stale_topology,
        splits=error in (BadMessage, BadBody),
    )


SERVER_ERRORS: Mapping[str, Verdict] = MappingProxyType({code: _row(cls) for code, cls in ERROR_CODES.items()})
"""Error code -> its row. A code that is not here is not retried."""


NOT_READ = Verdict(retry=True)
REFUSED_FOR_NOW = Verdict(retry=True, pause=True)
TOO_LARGE = Verdict(retry=False, splits=True)
LEADER_LEAVES = Verdict(retry=True, pause=True, refresh=True, leader=True)

LONGEST_LEADER_PAUSE = 1.0
"""Seconds. A partition is back soon after its leader has moved: lookup and the new leader are asked this often."""

MOST_SERVERS_LOST = 2
"""A publish that so many servers were working on when they ended the connection is sent to no other."""


class ErrorText(msgspec.Struct, frozen=True):
    """A row for one meaning of an error code; ``text``, a regular expression, matches the whole of the error's detail.

    It is compiled when an error is compared with it, and then kept by ``re``: most programs never meet one.
    """

    code: str
    text: str
    verdict: Verdict


_LEAVING = r"(?:ErrType:\d+ ErrCode:\d+ : )?exiting|pub to wait channel timeout|pub timeout while pop wait queue"
_TOO_LARGE = r"(?:ErrType:\d+ ErrCode:\d+ : )?invalid message write size .*"

ERROR_TEXTS = (
    # The rest of the command did not arrive within the server's read deadline (two heartbeat intervals). Nothing was
    # stored, and the message was not at fault.
    # nsqio/nsq: nsqd/protocol_v2.go, PUB, DPUB, MPUB, readMPUB;
    # youzan/nsq: nsqdserver/protocol_v2.go, preparePub, internalPubExtAndTrace, readMPUBEXT.
    ErrorText(
        "E_BAD_MESSAGE",
        r"(?:[DM]?PUB )?failed to read message(?: body(?: size)?|\(\d+\) body size)",
        NOT_READ,
    ),
    ErrorText("E_BAD_BODY", r"(?:[DM]?PUB )?failed to read (?:body size|message count)", NOT_READ),
    # The server is shutting down and stored nothing. MPUB is not among them: it may break off in the middle.
    # nsqio/nsq: nsqd/topic.go, PutMessage.
    ErrorText("E_PUB_FAILED", "PUB failed exiting", REFUSED_FOR_NOW),
    ErrorText("E_DPUB_FAILED", "DPUB failed exiting", REFUSED_FOR_NOW),
    # A leader of the redesigned NSQ is shutting down, or its partition has taken nothing for 3 s, as while a replica is
    # being lost. The publish was refused before any of it was stored; another nsqd will lead.
    # youzan/nsq: nsqdserver/protocol_v2.go, internalPubAsync, internalMPubAsync; nsqdserver/context.go,
    # internalPubLoop; nsqd/topic.go, PutMessageNoLock, PutMessagesNoLock.
    ErrorText("E_PUB_FAILED", _LEAVING, LEADER_LEAVES),
    ErrorText("E_MPUB_FAILED", _LEAVING, LEADER_LEAVES),
    # Too large for the record of an extended topic (dialect.EXT_RECORD_BYTES). Nothing is stored.
    # youzan/nsq: nsqd/diskqueue_writer.go, writeOne; nsqd/topic.go, PutMessagesNoLock
    ErrorText("E_PUB_FAILED", _TOO_LARGE, TOO_LARGE),
    ErrorText("E_MPUB_FAILED", _TOO_LARGE, TOO_LARGE),
    # The server could not ask its auth server whether a permission that has expired still holds.
    # nsqio/nsq: nsqd/protocol_v2.go, CheckAuth.
    ErrorText("E_AUTH_FAILED", "AUTH failed", REFUSED_FOR_NOW),
)
"""What the text of an error says beyond its code. The first row that fits goes before that of the code."""


def classify(error: BaseException) -> Verdict:
    """The row of the table for an error of a publish, before attempts and options are looked at."""
    if isinstance(error, ServerError):
        # The whole text has to match: a message that only begins so may be another, of a newer server.
        for row in ERROR_TEXTS:
            if row.code == error.code and re.fullmatch(row.text, error.detail):
                return row.verdict
        return SERVER_ERRORS.get(error.code, OURS)
    if isinstance(error, ConnectionLost):
        return OUTCOME_UNKNOWN if error.outcome_unknown else NOT_EXECUTED
    return OURS


def decide(error: BaseException, attempts: int, policy: RetryPolicy, misses: int = 0) -> Verdict:
    """What to do now that attempt number ``attempts`` (from 1) failed with ``error``.

    Args:
        misses: how many of the attempts before this one had a verdict with ``leader``.
    """
    verdict = classify(error)
    if not verdict.retry or not verdict.counts:
        return verdict
    allowed = policy.retry_unknown_outcome or not verdict.possibly_stored
    is_left = (verdict.leader and policy.awaits_leader) or attempts - misses < policy.max_attempts
    return verdict if allowed and is_left else msgspec.structs.replace(verdict, retry=False)


def may_have_ended_server(error: BaseException) -> bool:
    """Whether the publish that failed with ``error`` may be what ended the server: it was working on it at its end.

    A command of an original or redesigned server is worked off before the next one of its connection is read.
    """
    return isinstance(error, ConnectionLost) and error.outcome_unknown and error.is_abrupt and error.was_first


def retry_delay(attempts: int, policy: RetryPolicy, random: Callable[[], float], *, for_leader: bool = False) -> float:
    """Seconds to wait after attempt number ``attempts``: exponential, capped, shortened by up to the jitter share.

    Args:
        random: gives numbers in [0, 1).
        for_leader: what is waited for is the leader of a partition.
    """
    longest = min(policy.max_delay, LONGEST_LEADER_PAUSE) if for_leader else policy.max_delay
    # 2.0**1024 overflows; every cap is reached long before
    delay = min(longest, policy.base_delay * 2.0 ** min(attempts - 1, 64))
    return delay * (1.0 - policy.jitter * random())


def publish_failed(
    topic: str, error: BaseException, attempts: int, possibly_stored: bool, note: str = ""
) -> PublishFailed:
    """The error that the caller of a publish gets; ``error`` becomes its cause. ``note``: what else is to be said."""
    times = "1 attempt" if attempts == 1 else f"{attempts} attempts"
    stored = "; it may have been stored all the same" if possibly_stored else ""
    failed = publish_failed_class(error)(
        f"publish to {topic!r} failed after {times}: {error}{note}{stored}",
        attempts=attempts,
        possibly_stored=possibly_stored,
    )
    failed.__cause__ = error
    return failed
