"""What other threads ask of a Producer in the hub thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from nsq_fast._latch import Latch
from nsq_fast._plain_publish import PlainPublish
from nsq_fast.runtime.publishing.compose import NO_EXTRAS, Extras
from nsq_fast.runtime.publishing.outcomes import Outcomes
from nsq_fast.runtime.publishing.publish import Promise, Publish
from nsq_fast.runtime.supervised import Job

from .gathering import Gathering


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

    @classmethod
    def of(cls, publish: Publish) -> PublishRequest:
        """That of a publish which was sent without one."""
        assert publish.promised is not None
        request = cls(publish.topic, publish.body, None, None, NO_EXTRAS, publish.promised, waits=True)
        request.parts = [publish]
        return request

    @property
    def weight(self) -> int:
        """How many messages it is."""
        return 1 if isinstance(self.content, bytes) else len(self.content)


class PlainRequest(PlainPublish):
    """As a PublishRequest: a publish of one body, without other arguments, that a thread waits for."""

    __slots__ = ()

    content: bytes
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
    def latch(self) -> PlainRequest:
        """What its thread waits for."""
        return self


Request: TypeAlias = PublishRequest | PlainRequest


class JoinedRequests:
    """Gives several PlainRequests what they, joined, have ended with.

    Args:
        gathering: wakes their threads.
        outcomes: where one publish is counted for them all.
    """

    __slots__ = ("_gathering", "_outcomes", "promises")

    def __init__(self, requests: list[PlainRequest], gathering: Gathering, outcomes: Outcomes) -> None:
        self.promises = requests
        self._gathering = gathering
        self._outcomes = outcomes

    def set(self, value: Any = None) -> None:
        """All are stored. They say ``value`` already: it is what a plain publish returns."""
        self._outcomes.stored += len(self.promises) - 1
        self._gathering.answer_all(self.promises)

    def set_exception(self, error: BaseException) -> None:
        """They did not go well."""
        for request in self.promises:
            request.set_exception(error)
