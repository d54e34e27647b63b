"""What other threads ask of a Producer in the hub thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from nsq_fast._latch import Latch
from nsq_fast._plain_publish import PlainPublish
from nsq_fast.runtime.publishing.compose import NO_EXTRAS, Extras
from nsq_fast.runtime.publishing.outcomes import Outcomes
from nsq_fast.runtime.publishing.publish import Publish
from nsq_fast.runtime.supervised import Job

if TYPE_CHECKING:
    from nsq_fast.runtime.publishing.publish import Promise


class PublishRequest:
    """One call of publish or multipublish, on its way to the hub thread.

    Args:
        topic, defer, timeout, extras: as the arguments of ``Producer.publish``.
        content: a body as bytes, or a list of bodies.
        waits: for room below ``max_pending``, and for a connection. Otherwise it fails where there is none.
        needs_nsqd: it fails also where no nsqd is connected.
        promise: gets the result, in the hub thread.
        latch: what a thread waits for, where one does.
    """

    __slots__ = ("content", "defer", "extras", "is_cancelled", "job", "latch", "needs_nsqd", "parts", "promise",
                 "timeout", "topic", "waits")  # fmt: skip

    def __init__(
        self,
        topic: str,
        content: Any,
        defer: int | None,
        timeout: float | None,
        extras: Extras,
        promise: Promise,
        *,
        waits: bool,
        needs_nsqd: bool = False,
        latch: Latch | None = None,
    ) -> None:
        self.topic = topic
        self.content = content
        self.defer = defer
        self.timeout = timeout
        self.extras = extras
        self.promise = promise
        self.waits = waits
        self.needs_nsqd = needs_nsqd
        self.latch = latch
        self.parts: list[Publish] = []  # what it has become in the hub thread
        self.job: Job | None = None  # what waits for room there
        self.is_cancelled = False

    @property
    def weight(self) -> int:
        """How many messages it is."""
        return 1 if isinstance(self.content, bytes) else len(self.content)


class PlainRequest(PlainPublish):
    """As a PublishRequest: a publish of one body, without other arguments, that somebody waits for."""

    __slots__ = ()

    content: bytes
    callers: Callers
    parts: Sequence[Publish]
    job: Job | None
    defer = timeout = None
    extras = NO_EXTRAS
    waits = True
    needs_nsqd = False
    weight: int = 1

    @property
    def promise(self) -> PlainRequest:
        """What gets the result."""
        return self

    @property
    def latch(self) -> Latch | None:
        """What a thread waits for, where one does."""
        return self.awaited if isinstance(self.awaited, Latch) else None


Request: TypeAlias = PublishRequest | PlainRequest


class Callers(Protocol):
    """Whoever waits for PlainRequests. Its methods belong to the hub thread."""

    def taken(self, requests: Sequence[PlainRequest]) -> object:
        """These requests were taken."""

    def answer(self, request: PlainRequest) -> object:
        """It has ended: wake its caller, now or soon."""

    def answer_all(self, requests: list[PlainRequest]) -> object:
        """As ``answer``, for several. The list is not changed any more."""


class JoinedRequests:
    """Gives several PlainRequests what they, joined, have ended with.

    Args:
        requests: they have the same ``callers``.
        outcomes: where one publish is counted for them all.
    """

    __slots__ = ("_outcomes", "promises")

    def __init__(self, requests: list[PlainRequest], outcomes: Outcomes) -> None:
        self.promises = requests
        self._outcomes = outcomes

    def set(self, value: Any = None) -> None:
        """All are stored. They say ``value`` already: it is what a plain publish returns."""
        self._outcomes.stored += len(self.promises) - 1
        self.promises[0].callers.answer_all(self.promises)

    def set_exception(self, error: BaseException) -> None:
        """They did not go well."""
        for request in self.promises:
            request.set_exception(error)

    def split(self, parts: Sequence[Publish]) -> None:
        """They are no longer joined."""
        for request, part in zip(self.promises, parts, strict=True):
            request.parts = (part,)
