"""Where publishes go: queues, each of which knows the link that takes its next command.

- ``NsqdQueue``: any nsqd that takes the topic, in turn; commands are pipelined;
- ``AnyPartition``: any partition that can be written now, in turn; so are they;
- ``PartitionQueue``: one partition, in order;
- ``UndecidedQueue``: one partition, as long as lookup has not said which there are.

A publish is sent at once where nothing keeps it: an empty queue, and nothing to
gather it with. Otherwise it waits in the queue, and leaves with its neighbours
as one command. What failed and is to be tried again goes back into the queue.

Order, in a PartitionQueue, survives refusals only if nothing is on its way
behind what may be refused: a server takes the second of two pipelined publishes
although it has just refused the first. So it has one command on the wire at a
time. What comes meanwhile gathers, and leaves together as the next command;
under load that is as fast as pipelining. What failed goes back to its head.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from nsq_fast.errors import ConnectionLost, NoNsqd, NsqError
from nsq_fast.names import Address
from nsq_fast.protocol.publish import take_command
from nsq_fast.protocol.wire_form import LENGTH_BYTES, PLAIN

from .link import Link
from .pending import Pending
from .publish import Command, Publish, Wakeups

# A former leader refuses what it got before. One that says nothing for so long (s) will not say anything.
SILENCE = 1.0
# So many leaders are named in an error.
MOST_NAMED = 10


if TYPE_CHECKING:

    class Sender(Protocol):
        """Who sends for the destinations.

        Attributes:
            most, enough, limit: of one command, as ``take_command`` has them.
            pending: publishes that somebody waits for.
            wakeups: wakes them.
            lingers: a publish waits for others, whether or not there are any.
        """

        most: int
        enough: int
        limit: int
        pending: Pending
        wakeups: Wakeups
        lingers: bool

        def hold(self, queue: Queue) -> bool:
            """Hold a queue for what comes next, unless gathering is off; ``Queue.pump`` is called in time then."""

        def release_hold(self, queue: Queue) -> None:
            """It leaves now."""

        def send(self, command: Command, link: Link) -> None:
            """Write a command; its end is reported by ``Queue.stored`` or ``failed``, possibly before this returns."""

        def abandon(self, publish: Publish) -> None:
            """Nobody waits for a publish any more. What was not sent yet will not be."""

        def why_nowhere(self, publish: Publish) -> NoNsqd | None:
            """Why a publish cannot be sent now, if it is for want of a connection to an nsqd that takes it."""

        def give_up(self, command: Command, error: NsqError) -> None:
            """Wait no longer for the reply to a command: ``Queue.failed`` is called. A late reply is taken silently."""

        def seek(self, queue: Queue) -> None:
            """Publishes wait, and no link takes them: look for one, until ``Queue.is_stranded`` is over."""

        def later(self, delay: float, callback: Callable[[], object]) -> None:
            """Call ``callback()`` in ``delay`` seconds."""


class Queue:
    """Base of the destinations.

    Attributes:
        topic: the topic.
        links: the open links to those who take its publishes.
        waiting: publishes, in order; the next command is made of the first of them.
        held_bytes: size of what waits, while the queue is held to gather more; None while it is not held.
        is_sought: somebody looks for a link to send to; ``seeks`` counts the questions.
        partition: where the next command goes; None leaves that to the server.
        in_flight: commands on the wire.
        on_wire: the command that was sent last.
        is_idle: what is added now could leave at once, as far as that is for the queue to say.
        successor: names the queue that takes a publish now, or None when it is over; None while this one does.
    """

    __slots__ = (
        "_is_pipelined",
        "_is_pumping",
        "_sender",
        "held_bytes",
        "in_flight",
        "is_idle",
        "is_sought",
        "links",
        "on_wire",
        "partition",
        "seeks",
        "successor",
        "topic",
        "waiting",
    )

    def __init__(self, sender: Sender, topic: str, links: list[Link]) -> None:
        self.topic = topic
        self.links = links
        self.waiting: deque[Publish] = deque()
        self.held_bytes: int | None = None
        self.is_sought = False
        self.seeks = 0
        self.partition: int | None = None
        self.in_flight = 0
        self.on_wire: Command | None = None
        self.is_idle = True
        self.successor: Callable[[Publish], Queue | None] | None = None
        self._sender = sender
        self._is_pipelined = True
        self._is_pumping = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.topic}, {len(self.waiting)} waiting>"

    def choose(self) -> Link | None:
        """The link that takes the next command; sets ``partition``."""
        raise NotImplementedError

    def can_move(self) -> bool:
        """Whether another link could take what one owes."""
        return bool(self.links)

    def missing_leader(self, is_connected: Callable[[Address], bool]) -> str | None:
        """Why it cannot send what must go to one partition; None when it can, or where nobody says who leads it."""
        return None

    def leaders_named(self) -> str:
        """Whom lookup names as the leaders that take its publishes, for people to read."""
        return "lookup names no partitions"

    @property
    def sender(self) -> Sender:
        """Who sends for it."""
        return self._sender

    @property
    def is_stranded(self) -> bool:
        """Whether publishes wait for want of a link."""
        return bool(self.waiting) and not self.links

    # Adding, and sending

    def add(self, publish: Publish) -> None:
        """Take a publish on its way: send it now, or when those before it have left."""
        sender = self._sender
        pending = sender.pending
        waiting = self.waiting
        if self.is_idle and not waiting:
            # The publish of a caller that waits alone has nothing to be gathered with (nsq-fast bench publish).
            has_company = sender.lingers or pending.publishes or sender.wakeups.is_waking
            if publish.is_alone or not has_company or not sender.hold(self):
                link = self.choose()
                if link is None:
                    waiting.append(publish)
                    sender.seek(self)
                else:
                    self._send(link, [publish])
            else:
                self.held_bytes = 0
                self._join(publish)
        else:
            self._join(publish)
        # Not before it is sent: the server works meanwhile.
        if not publish.done:
            pending.publishes.add(publish)  # as Pending.add, without a call
            if publish.deadline < pending.alarm.at:
                pending.hasten(publish)

    def _join(self, publish: Publish) -> None:
        """Add it to those that wait; they may leave now."""
        sender = self._sender
        waiting = self.waiting
        waiting.append(publish)
        held = self.held_bytes
        if held is not None:
            form = publish.form
            self.held_bytes = held = held + LENGTH_BYTES + len(publish.body) + (0 if form is PLAIN else form.overhead)
            if held >= sender.enough or len(waiting) >= sender.most or publish.is_alone:
                self.pump()
        elif self.successor is not None or (self.is_idle and self.links):
            self.pump()

    def pump(self) -> None:
        """Send what can be sent."""
        if self.held_bytes is not None:
            self.held_bytes = None
            self._sender.release_hold(self)
        if self.successor is not None:
            self._hand_over(self.successor)
            return
        if self._is_pumping:
            return  # what is sent here may fail at once, and come back
        self._is_pumping = True
        try:
            while self.waiting and self.is_idle and self._send_next():
                pass
        finally:
            self._is_pumping = False

    def _send_next(self) -> bool:
        link = self.choose()
        sender = self._sender
        if link is None:
            sender.seek(self)
            return False
        publishes = take_command(self.waiting, sender.most, sender.enough, sender.limit)
        if publishes:
            self._send(link, publishes)
        return bool(publishes)

    def _send(self, link: Link, publishes: list[Publish]) -> None:
        self._sender.send(new_command(self, publishes), link)

    def stored(self) -> None:
        """The server replied OK to a command."""
        self.in_flight -= 1

    def failed(self, command: Command, again: list[Publish], delay: float, *, is_stale: bool) -> None:
        """A command failed; ``again``, of it, is to be sent again, after ``delay`` seconds."""
        self.in_flight -= 1
        if again and delay:
            self._sender.later(delay, lambda: self.resend(again))
        elif again:
            self.resend(again)

    def resend(self, again: list[Publish]) -> None:
        """Send these as soon as possible: in the order in which they failed."""
        self.waiting.extend(publish for publish in again if not publish.done)
        self.pump()

    def remove_ended(self) -> None:
        """Forget what ended while it waited."""
        live = [publish for publish in self.waiting if not publish.done]
        self.waiting.clear()
        self.waiting.extend(live)

    def hand_over(self, successor: Callable[[Publish], Queue | None]) -> None:
        """Take no publishes any more: what waits, and what still comes, goes to other queues, in order."""
        self.successor = successor
        self.is_idle = False
        self._hand_over(successor)

    def reopen(self) -> None:
        """Take publishes again."""
        self.successor = None
        self.is_idle = True

    def _hand_over(self, successor: Callable[[Publish], Queue | None]) -> None:
        publishes = list(self.waiting)
        self.waiting.clear()
        queues: dict[Queue, None] = {}
        for publish in publishes:
            queue = None if publish.done else successor(publish)
            if queue is not None:
                publish.destination = queue
                queue.waiting.append(publish)
                queues[queue] = None
        for queue in queues:
            queue.pump()


def new_command(queue: Queue, publishes: list[Publish]) -> Command:
    """The command that carries these publishes of a queue. It is on its way from now on."""
    queue.on_wire = command = Command(queue, publishes, queue.partition)
    queue.in_flight += 1
    queue.is_idle = queue._is_pipelined
    return command


class NsqdQueue(Queue):
    """Any nsqd that takes the topic, in turn."""

    __slots__ = ("_turn",)

    def __init__(self, sender: Sender, topic: str, links: list[Link]) -> None:
        super().__init__(sender, topic, links)
        self._turn = random.randrange(1024)  # many that start together begin apart

    def choose(self) -> Link | None:
        """The next open link. One that owes overdue replies is taken only for want of others."""
        links = self.links
        count = len(links)
        if count == 1:
            return links[0]
        if not count:
            return None
        self._turn = turn = (self._turn + 1) % count
        link = links[turn]
        if link.overdue:
            return next((other for other in links[turn:] + links[:turn] if not other.overdue), link)
        return link


class PartitionQueue(Queue):
    """One partition of a topic.

    Attributes:
        leader: the nsqd that lookup named; None for none, and where there is no lookup.
        links: open connections to it.
        on_wire: the command that waits for its reply; None: none does.
        is_paused: an attempt has failed; the next one comes when the pause is over, or the leader changes.
        has_lookup: whether lookup says who leads it.
        on_resumed: called when a pause is over.
    """

    __slots__ = ("_link", "_pauses", "has_lookup", "is_paused", "leader", "number", "on_resumed")

    def __init__(
        self,
        sender: Sender,
        topic: str,
        links: list[Link],
        number: int,
        on_resumed: Callable[[], object],
        *,
        has_lookup: bool,
    ) -> None:
        super().__init__(sender, topic, links)
        self.has_lookup = has_lookup
        self.number = number
        self.partition = number
        self.leader: Address | None = None
        self.is_paused = False
        self._is_pipelined = False
        self.on_resumed = on_resumed
        self._link: Link | None = None
        self._pauses = 0

    @property
    def load(self) -> int:
        """Commands that wait in front of a new one, as far as we know."""
        pending = sum(link.conn.session.pending_count for link in self.links if link.conn is not None)
        return pending + len(self.waiting)

    def choose(self) -> Link | None:
        """The link that takes its publishes: always the same one, while it is open."""
        links = self.links
        if self._link not in links:
            self._link = links[self.number % len(links)] if links else None
        return self._link

    def can_move(self) -> bool:
        return False  # a partition has one leader

    @property
    def is_stranded(self) -> bool:
        """Whether publishes wait for want of a leader that replies: also the one that owes the reply to some."""
        return not self.links and (bool(self.waiting) or self.on_wire is not None)

    def leaders_named(self) -> str:
        return f"lookup names {self.leader or 'nobody'} as the leader of partition {self.number}"

    def missing_leader(self, is_connected: Callable[[Address], bool]) -> str | None:
        if self.links or not self.has_lookup:
            return None
        state = "lookup names no leader"
        if self.leader is not None:
            state = f"its leader {self.leader} {'does not reply' if is_connected(self.leader) else 'is not connected'}"
        return f"partition {self.number} of topic {self.topic!r}: {state}"

    def stored(self) -> None:
        self.in_flight -= 1
        self.on_wire = None
        self.is_idle = not self.is_paused
        if self.waiting:
            self._send_waiting()

    def _send_waiting(self) -> None:
        """Send what has gathered, with what those publish whom the reply wakes (nsq-fast bench publish).

        It leaves no later for that: a command of several publishes is sent at the end of the hub's turn in any case.
        """
        sender, waiting = self._sender, self.waiting
        has_company = 1 < len(waiting) < sender.most and not waiting[0].is_alone
        if self.is_idle and has_company and not sender.lingers and sender.hold(self):
            self.held_bytes = 0
        else:
            self.pump()

    def failed(self, command: Command, again: list[Publish], delay: float, *, is_stale: bool) -> None:
        """``again`` is sent before all that waits: nothing passes it."""
        self.in_flight -= 1
        self.on_wire = None
        self.is_idle = not self.is_paused
        self.waiting.extendleft(reversed(again))
        if is_stale:
            self._turn_away()
        if delay:
            self.pause(delay)
        elif self.waiting:
            self.pump()

    def _turn_away(self) -> None:
        """Try another link next time: this one does not lead the partition."""
        if len(self.links) > 1 and self._link in self.links:
            self._link = self.links[(self.links.index(self._link) + 1) % len(self.links)]

    def pause(self, delay: float) -> None:
        """Send nothing for ``delay`` seconds, unless the leader changes."""
        self.is_paused = True
        self.is_idle = False
        self._pauses += 1
        number = self._pauses
        self._sender.later(delay, lambda: self.resume(number))

    def resume(self, number: int | None = None) -> None:
        """Go on, if ``number`` is the latest pause, or at any rate."""
        if number is None or number == self._pauses:
            self._pauses += 1
            self.is_paused = False
            self.is_idle = self.on_wire is None
            self.pump()
            self.on_resumed()

    def moved(self) -> None:
        """Another nsqd leads the partition now."""
        command = self.on_wire
        if command is not None and self._link is not None and self._link.owed:  # silent for too long already
            self._give_up(command)
        elif command is not None:
            self._sender.later(SILENCE, lambda: self._give_up(command))
        self.resume()

    def _give_up(self, command: Command) -> None:
        conn = command.conn
        if self.on_wire is command and conn is not None and conn.address != self.leader:
            silent = f"{conn.address}: does not reply, and no longer leads {self.topic}-{self.number}"
            self._sender.give_up(command, ConnectionLost(silent))


class AnyPartition(Queue):
    """Any partition of a topic that can be written now: in turn, or the one whose leader has the least to do.

    Attributes:
        open: the partitions with a link.
    """

    __slots__ = ("_by_load", "_partitions", "_turn", "open")

    def __init__(self, sender: Sender, topic: str, partitions: dict[int, PartitionQueue], *, by_load: bool) -> None:
        super().__init__(sender, topic, [])
        self.open: list[PartitionQueue] = []
        self._partitions = partitions
        self._by_load = by_load
        self._turn = random.randrange(1024)

    def choose(self) -> Link | None:
        """The link to the next partition. A leader that owes overdue replies is taken only for want of others."""
        queue = self._choose_partition()
        if queue is None:
            return None
        self.partition = queue.number
        return queue.choose()

    def _choose_partition(self) -> PartitionQueue | None:
        queues = self.open
        if not queues:
            return None
        self._turn = turn = (self._turn + 1) % len(queues)
        queue = queues[turn]
        if not self._by_load and not queue.is_paused and not queue.links[0].overdue:
            return queue
        ready = [other for other in queues[turn:] + queues[:turn] if not other.is_paused]
        ready = [other for other in ready if not other.links[0].overdue] or ready
        if not ready:
            return None
        return min(ready, key=lambda each: each.load) if self._by_load else ready[0]

    def leaders_named(self) -> str:
        leaders = sorted({str(queue.leader) for queue in self._partitions.values() if queue.leader is not None})
        return f"lookup names {', '.join(leaders[:MOST_NAMED]) or 'nobody'} as the leaders of its partitions"

    def can_move(self) -> bool:
        return any(not queue.is_paused for queue in self.open)

    def failed(self, command: Command, again: list[Publish], delay: float, *, is_stale: bool) -> None:
        queue = self._partitions.get(command.partition) if command.partition is not None else None
        if not is_stale or queue is None:
            super().failed(command, again, delay, is_stale=is_stale)
            return
        # Nothing is sent to a partition whose leader moves, for a while; the others may take it at once.
        self.in_flight -= 1
        if not queue.is_paused and delay:
            queue.pause(delay)
        self.resend(again)


class UndecidedQueue(Queue):
    """Publishes that are bound to a partition before it is known what partitions there are."""

    __slots__ = ()

    def choose(self) -> Link | None:
        return None

    def missing_leader(self, is_connected: Callable[[Address], bool]) -> str | None:
        return f"lookup did not say which partitions topic {self.topic!r} has"


class HeldQueue(UndecidedQueue):
    """Publishes that are bound to a partition, while what comes before them is on its way to another cluster."""

    __slots__ = ()

    def missing_leader(self, is_connected: Callable[[Address], bool]) -> str | None:
        return f"what was published to {self.topic!r} in another cluster before has not ended"
