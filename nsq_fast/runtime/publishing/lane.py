"""The publishes that are bound to one partition, in order.

Order survives refusals only if nothing is on its way behind what may be
refused: a server takes the second of two pipelined publishes although it has
just refused the first. So a lane has one command on the wire at a time. What
comes meanwhile gathers, and leaves together as the next command; under load
that is as fast as pipelining. A command that failed and is to be tried again
goes back to the head of the queue, and nothing passes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from nsq_fast.errors import ConnectionLost
from nsq_fast.names import Address
from nsq_fast.runtime.supervised import Supervisor

from .addressed import PLAIN, Addressed, AddressedBatch
from .pool import Link

if TYPE_CHECKING:
    from .routes import Route

_LENGTH = 4
# A former leader refuses what it got before. One that says nothing for so long (s) will not say anything.
_SILENCE = 2.0


class LaneSender(Protocol):
    """Who sends for the lanes."""

    max_batch: int
    max_batch_bytes: int
    supervisor: Supervisor

    def send(self, command: Addressed | AddressedBatch, link: Link, partition: int | None) -> None:
        """Write a command; its end is reported by ``Lane.ended``, possibly before this returns."""

    def seek(self, holder: Lane | Route) -> None:
        """Publishes wait for a leader: look for one."""

    def later(self, delay: float, callback: Callable[[], object]) -> None:
        """Call ``callback()`` in ``delay`` seconds."""

    def resumed(self, lane: Lane) -> None:
        """The lane takes publishes again."""


class Lane:
    """One partition of a topic.

    Attributes:
        leader: the nsqd that lookup named; None for none, and where there is no lookup.
        links: open connections to it.
        waiting: publishes bound to the partition, in order; the next command is made of the first of them.
        on_wire: the command that waits for its reply.
        is_paused: an attempt has failed; the next one comes when the pause is over, or the leader changes.
        is_sought: somebody looks for its leader; ``seeks`` counts the questions.
    """

    __slots__ = (
        "_is_pumping",
        "_link",
        "_pauses",
        "_sender",
        "is_paused",
        "is_sought",
        "leader",
        "links",
        "on_wire",
        "partition",
        "route",
        "seeks",
        "topic",
        "waiting",
    )

    def __init__(self, sender: LaneSender, route: Route, topic: str, partition: int) -> None:
        self.route = route
        self.topic = topic
        self.partition = partition
        self.leader: Address | None = None
        self.links: list[Link] = []
        self.waiting: deque[Addressed] = deque()
        self.on_wire: Addressed | AddressedBatch | None = None
        self.is_paused = False
        self.is_sought = False
        self.seeks = 0
        self._sender = sender
        self._link: Link | None = None
        self._pauses = 0
        self._is_pumping = False

    def __repr__(self) -> str:
        return f"<Lane {self.topic}-{self.partition} of {self.leader}, {len(self.waiting)} waiting>"

    @property
    def load(self) -> int:
        """Commands that wait in front of a new one, as far as we know."""
        pending = sum(link.conn.session.pending_count for link in self.links if link.conn is not None)
        return pending + len(self.waiting)

    def choose(self) -> Link | None:
        """The link that takes its publishes: always the same one, while it is open."""
        links = self.links
        if self._link not in links:
            self._link = links[self.partition % len(links)] if links else None
        return self._link

    def turn_away(self) -> None:
        """Try another link next time: this one does not lead the partition."""
        if len(self.links) > 1 and self._link in self.links:
            self._link = self.links[(self.links.index(self._link) + 1) % len(self.links)]

    def add(self, publish: Addressed) -> None:
        """Put a publish at the end of the queue. ``pump`` sends it."""
        publish.lane = self
        self.waiting.append(publish)

    @property
    def is_idle(self) -> bool:
        """Whether what is added now could leave at once."""
        return self.on_wire is None and not self.is_paused

    def pump(self) -> None:
        """Send what can be sent."""
        if self._is_pumping:
            return  # what is sent here may fail at once, and come back
        self._is_pumping = True
        try:
            while self.is_idle and self._send_next():
                pass
        finally:
            self._is_pumping = False

    def _send_next(self) -> bool:
        self.drop_ended()
        if not self.waiting:
            return False
        link = self.choose()
        if link is None:
            self._sender.seek(self)
            return False
        batch = self._take()
        command = batch[0] if len(batch) == 1 else AddressedBatch(batch, [each.body for each in batch], self)
        self.on_wire = command
        self._sender.send(command, link, self.partition)
        return True

    def drop_ended(self) -> None:
        """Forget those at the head that ended while they waited."""
        while self.waiting and self.waiting[0].done:
            self.waiting.popleft()

    def _take(self) -> list[Addressed]:
        """The publishes that leave together: of one kind, and within the limits of a batch."""
        waiting, first = self.waiting, self.waiting.popleft()
        taken = [first]
        if first.is_alone:
            return taken
        kind, most, limit = first.saying.kind, self._sender.max_batch, self._sender.max_batch_bytes
        size = _LENGTH + _LENGTH + first.size
        while waiting and len(taken) < most:
            following = waiting[0]
            if not following.done:
                saying = following.saying
                size += _LENGTH + (len(following.body) if saying is PLAIN else following.size)
                if size > limit or following.is_alone or saying.kind != kind:
                    break
                taken.append(following)
            waiting.popleft()
        return taken

    def ended(self, again: list[Addressed], delay: float = 0.0) -> None:
        """The command on the wire is over; ``again``, of it, is to be sent before all others, after ``delay`` s."""
        self.on_wire = None
        self.waiting.extendleft(reversed(again))
        if delay:
            self.pause(delay)
        elif self.waiting:
            self.pump()

    def pause(self, delay: float) -> None:
        """Send nothing for ``delay`` seconds, unless the leader changes."""
        self.is_paused = True
        self._pauses += 1
        number = self._pauses
        self._sender.later(delay, lambda: self.resume(number))

    def resume(self, number: int | None = None) -> None:
        """Go on, if ``number`` is the latest pause, or at any rate."""
        if number is None or number == self._pauses:
            self._pauses += 1
            self.is_paused = False
            self.pump()
            self._sender.resumed(self)

    def moved(self) -> None:
        """Another nsqd leads the partition now."""
        command = self.on_wire
        if command is not None:
            self._sender.later(_SILENCE, lambda: self._give_up(command))
        self.resume()

    def _give_up(self, command: Addressed | AddressedBatch) -> None:
        conn = command.conn
        if self.on_wire is command and conn is not None and conn.address != self.leader:
            silent = ConnectionLost(
                f"{conn.address}: does not answer, and no longer leads {self.topic}-{self.partition}"
            )
            self._sender.supervisor.job(f"nsq_fast-close-{conn.address}", conn.close, silent).start()
