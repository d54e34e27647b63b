"""Publishes of several callers that leave as one command, and are one publish for as long as all goes well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from nsq_fast.protocol.wire_form import OK, PLAIN_BATCH

from .destination import Queue
from .publish import Publish, Wakeups

if TYPE_CHECKING:
    from .publish import PendingPublishes, Promise

    class JointPromise(Promise, Protocol):
        """What gets the result of all of them.

        Attributes:
            promises: what gets the result of each, once they are split.
        """

        @property
        def promises(self) -> Sequence[Promise]: ...

        def split(self, parts: Sequence[Publish]) -> object:
            """Each of them ends with one of these from now on, in the order of ``promises``."""


class JoinedPublish(Publish):
    """Plain publishes to one destination, where ``sends_now`` says that it may be made.

    An object for each of them is made only if something goes wrong: each of them then ends, or is tried again, by
    itself, as if it had shared its command with the others from the start.

    Args:
        bodies: of each of them, checked.
    """

    __slots__ = ("_joint",)

    is_prompt = True  # what could be joined has been

    def __init__(self, destination: Queue, bodies: list[bytes], deadline: float, joint: JointPromise) -> None:
        super().__init__(destination, bodies, deadline, PLAIN_BATCH, len(bodies))
        self._joint: JointPromise | None = joint
        self.promised = joint

    def wake(self, wakeups: Wakeups) -> None:
        joint = self._joint
        assert joint is not None
        self._joint = self.promised = None  # see Publish.wake
        joint.set(OK)  # before one of an error it is split

    @property
    def callers(self) -> int:
        return self.weight

    def split(self, pending: PendingPublishes) -> Sequence[Publish]:
        joint = self._joint
        assert joint is not None
        parts = [self._part(body, promise) for body, promise in zip(self.body, joint.promises, strict=True)]
        if self.attempt is not None:
            self.attempt.publishes = parts
        self.done = True
        joint.split(parts)
        pending.replace(self, parts)
        return parts

    def _part(self, body: bytes, promise: Promise) -> Publish:
        part = Publish(self.destination, body, self.deadline)
        part.attempt = self.attempt
        part.promised = promise
        return part


def sends_now(queue: Queue) -> bool:
    """Whether what is added now leaves at once, if it shares its command with nobody."""
    return queue.is_idle and not queue.waiting and queue.can_move()
