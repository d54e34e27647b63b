"""One publish through all its attempts, as a state machine. No socket, no clock: the embedder says what happened.

| state   | what happened                                   | next state                                          |
|---------|-------------------------------------------------|-----------------------------------------------------|
| WAITING | ``sent``: a command with it was written         | ON_WIRE                                             |
| ON_WIRE | ``stored``: the server replied OK               | STORED                                              |
| ON_WIRE | ``attempt_failed``: refused, or connection lost | WAITING; the verdict says whether to try again      |
| WAITING | ``end``: it will not be tried again             | FAILED; UNKNOWN if an attempt may have been stored  |
| ON_WIRE | ``end``: its caller waits no longer             | UNKNOWN: the reply is still due                     |
| an end  | anything                                        | the same                                            |

An attempt is whatever the embedder hands to ``sent``; one publish has one at a
time. Several publishes may share an attempt: they leave as one command, and
get one reply, but each of them ends, or is tried again, by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import Enum, auto
from typing import Any, TypeVar

import msgspec

from .retry import MOST_SERVERS_LOST, RetryPolicy, Verdict, decide, may_have_ended_server
from .wire_form import COUNT_BYTES, LENGTH_BYTES, PLAIN, Form


class State(Enum):
    """Where a publish is. The last three are ends."""

    WAITING = auto()
    ON_WIRE = auto()
    STORED = auto()
    UNKNOWN = auto()  # it ended without a reply, and a server may have stored it
    FAILED = auto()


class PublishState:
    """The state of one publish.

    Attributes:
        body: what is published, in the shape that ``form`` takes.
        form: what goes with it.
        attempt: what carries it now; None while nothing does.
        done: it has ended, with ``error``, or well when that is None.
        failed_attempts: attempts that ended, and count.
        misses: those of them that met a stale or unready leader, where that is waited for.
        ended_servers: the servers that were working on it when they ended the connection.
        possibly_stored: an attempt that ended may have been stored.
        last_error: what the last attempt failed with.
        is_alone: it shares its command with nobody.
        weight: how many messages it is.
    """

    # One is made for each publish: what all have is in slots, and what is rare in a dict, over the defaults here.
    __slots__ = ("__dict__", "attempt", "body", "done", "error", "form", "is_alone", "weight")

    failed_attempts = 0
    misses = 0
    ended_servers: tuple[object, ...] = ()
    possibly_stored = False
    last_error: BaseException | None = None

    def __init__(self, body: Any, form: Form = PLAIN, weight: int = 1) -> None:
        self.body = body
        self.form = form
        self.weight = weight
        self.is_alone = form is not PLAIN and form.is_alone
        self.attempt: Any = None
        self.done = False
        self.error: BaseException | None = None

    @property
    def state(self) -> State:
        """Where it is."""
        if not self.done:
            return State.WAITING if self.attempt is None else State.ON_WIRE
        if self.error is None:
            return State.STORED
        return State.UNKNOWN if self.may_be_stored else State.FAILED

    @property
    def attempts(self) -> int:
        """How often it was sent, so far as that counts: see ``Verdict.counts``."""
        return self.failed_attempts + (self.attempt is not None)

    @property
    def may_be_stored(self) -> bool:
        """Whether a server may have stored it, as far as is known now."""
        return self.possibly_stored or self.attempt is not None

    def may_retry(self, error: BaseException, policy: RetryPolicy) -> bool:
        """Whether it would be tried again if its attempt failed with ``error`` now."""
        return decide(error, self.attempts, policy, self.misses).retry

    def attempt_failed(
        self, error: BaseException, policy: RetryPolicy, *, is_shared: bool = False, server: object = None
    ) -> Verdict:
        """Its attempt at ``server`` is over; return what to do. ``is_shared``: others were in the same command."""
        verdict = decide(error, self.attempts, policy, self.misses)
        if may_have_ended_server(error):
            # If it did, it ends alone next time, and only one server more.
            self.is_alone = True
            self.ended_servers = (*(each for each in self.ended_servers if each != server), server)
            if len(self.ended_servers) >= MOST_SERVERS_LOST:
                verdict = msgspec.structs.replace(verdict, retry=False)
        if is_shared and verdict.splits and not verdict.retry:
            # The server took none, because of one of them or because of them all: let the bad one fail alone.
            self.is_alone = True
            verdict = msgspec.structs.replace(verdict, retry=True)
        self.attempt = None
        self.last_error = error
        self.possibly_stored |= verdict.possibly_stored
        self.failed_attempts += verdict.counts
        self.misses += verdict.counts and verdict.leader and policy.awaits_leader
        return verdict

    def end(self, error: BaseException | None) -> None:
        """It is over, well when ``error`` is None. The first end counts."""
        if not self.done:
            self.done = True
            self.error = error


P = TypeVar("P", bound=PublishState)


def sent(publishes: Iterable[PublishState], attempt: Any) -> None:
    """``attempt`` carries these publishes now."""
    for publish in publishes:
        publish.attempt = attempt


def stored(publishes: Iterable[P]) -> list[P]:
    """The server replied OK to these publishes; return those that end with it: some may have ended before."""
    ended = []
    for publish in publishes:
        if not publish.done:
            publish.done = True
            ended.append(publish)
    return ended


def take_command(waiting: deque[P], most: int, enough: int, limit: int) -> list[P]:
    """Take the publishes that leave as the next command from a queue: none, if all in it have ended.

    They are of one kind. Args:
        most: messages.
        enough: bytes of an MPUB body after which none is added.
        limit: bytes of an MPUB body that are not exceeded, but by a first message that is larger.
    """
    # What ended while it waited, by its deadline say, stays in the queue until here: to look for it would cost more.
    while waiting and waiting[0].done:
        waiting.popleft()
    if not waiting:
        return []
    first = waiting.popleft()
    taken = [first]
    if first.is_alone or not waiting or most == 1:
        return taken
    form = first.form
    size = COUNT_BYTES + LENGTH_BYTES + len(first.body) + form.overhead
    while waiting and len(taken) < most and size < enough:
        following = waiting[0]
        if not following.done:
            other = following.form
            size += LENGTH_BYTES + len(following.body) + (0 if other is PLAIN else other.overhead)
            # MPUB is of one kind of record: a header or trace id cannot stand beside messages without one.
            if size > limit or following.is_alone or (other is not form and other.kind != form.kind):
                break
            taken.append(following)
        waiting.popleft()
    return taken
