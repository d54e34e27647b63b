"""The queues in which publishes wait for their turn, and for their replies.

```
Queue           any nsqd that takes the topic, in turn; commands are pipelined
AnyPartition    any partition that can be written now, in turn; so are they
PartitionQueue  one partition, in order
ParkedQueue     bound to a partition, until it is known which there are, or until lookup has said once more whether the
                topic carries headers
```

A publish is sent at once where nothing keeps it: an empty queue, and nothing to gather it with. Otherwise it waits in
the queue, and leaves with its neighbours as one command. What failed and is to be tried again goes back into the queue.

Order, in a PartitionQueue, survives refusals only if nothing is on its way behind what may be refused: a server takes
the second of two pipelined publishes although it has just refused the first. So it has one command on the wire at a
time. What comes meanwhile gathers, and leaves together as the next command; under load that is as fast as pipelining.
What failed goes back to its head.

Which queue is whose, and what moves publishes from one to another, stands in ``routing``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from nsq_fast._publish_path import Command, QueuePath
from nsq_fast.errors import ConfigError, ConnectionLost, NoLeader, NoNsqd, NsqError
from nsq_fast.names import Address

from .publishes import Publish

if TYPE_CHECKING:
    from .sender import ProducerConnection, Sender

SILENCE = 1.0
"""A former leader refuses what it got before. One that says nothing for so long (s) will not say anything."""

MOST_NAMED = 10
"""So many leaders are named in an error."""


class Queue(QueuePath):
    """Any nsqd that takes the topic, in turn; base of the other queues.

    Attributes:
        is_sought: somebody looks for a connection to send to; ``seeks`` counts the questions.
    """

    __slots__ = ("_turn", "is_sought", "seeks")

    in_flight: int

    links: list[ProducerConnection]
    _sender: Sender

    def __init__(self, sender: Sender, topic: str, links: list[ProducerConnection]) -> None:
        super().__init__(sender, topic, links)
        self.is_sought: bool = False
        self.seeks: int = 0
        self._turn = random.randrange(1024)  # many that start together begin apart
        self.is_for_any_link = True

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.topic}, {len(self.waiting)} waiting>"

    def choose(self) -> ProducerConnection | None:
        """The open connection that takes the next command. One that owes overdue replies only for want of others."""
        links = self.links
        count = len(links)
        if not count:
            return None
        self._turn = turn = (self._turn + 1) % count
        link = links[turn]
        if link.overdue:
            return next((other for other in links[turn:] + links[:turn] if not other.overdue), link)
        return link

    def can_move(self) -> bool:
        """Whether another connection could take what one owes."""
        return bool(self.links)

    def why_nowhere(self, publish: Publish) -> NsqError | None:
        """Why a publish cannot be sent now, if it is for want of a connection to an nsqd that takes it."""
        if self.links:
            return None
        return self._sender.nowhere(NoNsqd, f"no nsqd takes publishes now for topic {self.topic!r}", self.topic)

    def leaders_named(self) -> str:
        """Whom lookup names as the leaders that take its publishes, for people to read."""
        return "lookup names no partitions"

    @property
    def sender(self) -> Sender:
        """Who sends for it."""
        return self._sender

    @property
    def is_stranded(self) -> bool:
        """Whether publishes wait for want of a connection."""
        return bool(self.waiting) and not self.links

    def failed(self, command: Command, again: list[Publish], delay: float, *, is_stale: bool) -> None:
        """A command to it failed; ``again``, of it, is to be sent again, after ``delay`` seconds.

        ``is_stale``: the nsqd does not lead the partition (any more).
        """
        self.in_flight -= 1
        if again:
            # Never at once: of nsqds that end together, each would be sent what the one before has let fall, as long as
            # nobody has read that it is gone; and two that end with the same publish are said to end because of it.
            self._sender.later(delay, lambda: self.resend(again))

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
        self.is_idle: bool = False
        self.pump()  # which lets go of what is held to gather more: what comes later must not wait behind others

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


class PartitionQueue(Queue):
    """One partition of a topic.

    Attributes:
        leader: the nsqd that lookup named; None for none, and where there is no lookup.
        former_leader: the last one that it named: while a leader dies, lookup may name none for some rounds.
        links: the open connections to it.
        on_wire: the command that waits for its reply; None: none does.
        is_paused: an attempt has failed; the next one comes when the pause is over, or the leader changes.
        has_lookup: whether lookup says who leads it.
        on_resumed: called when a pause is over.
    """

    __slots__ = ("_own", "_pauses", "former_leader", "has_lookup", "is_paused", "leader", "number", "on_resumed")

    in_flight: int

    def __init__(
        self,
        sender: Sender,
        topic: str,
        links: list[ProducerConnection],
        number: int,
        on_resumed: Callable[[], object],
        *,
        has_lookup: bool,
    ) -> None:
        super().__init__(sender, topic, links)
        self.is_for_any_link = False
        self.has_lookup: bool = has_lookup
        self.number: int = number
        self.partition: int = number
        self.leader: Address | None = None
        self.former_leader: Address | None = None
        self.is_paused: bool = False
        self._is_pipelined = False
        self.on_resumed: Callable[[], object] = on_resumed
        self._own: ProducerConnection | None = None
        self._pauses = 0

    @property
    def load(self) -> int:
        """Commands that wait in front of a new one, as far as we know."""
        links = self.links if self._own is None else [self._own]
        pending = sum(link.conn.session.pending_count for link in links if link.conn is not None)
        return pending + len(self.waiting)

    @property
    def is_slow(self) -> bool:
        """Whether what its connection, or all of them before it has one, owes is overdue."""
        if self._own is None or self._own.address != self.leader:
            return bool(self.links and self.links[0].overdue)
        return bool(self._own.overdue or self._own.owed)

    def choose(self) -> ProducerConnection | None:
        """The connection of its own, while that is open; any to the leader while it opens."""
        links = self.links
        if not self.has_lookup:
            if self._own not in links:
                self._own = links[self.number % len(links)] if links else None
            return self._own
        if self.leader is None:
            return None
        own = self._own
        if own is None or own.address != self.leader or own.is_stopping:
            own = self._take_own(self.leader)
        elif own.owed:
            if own.owes_to(self.topic, self.number):
                return None  # it would keep another connection waiting, and all that goes there
            own = self._take_own(self.leader)
        return own if own in links else (links[0] if links else None)

    def _take_own(self, leader: Address) -> ProducerConnection:
        if self._own is not None:
            self._own.users -= 1
        self._own = self._sender.pool.take(leader)
        return self._own

    def let_go(self) -> None:
        """It is not published to for the time being."""
        if self._own is not None and self.has_lookup:
            self._own.users -= 1
            self._own = None

    def can_move(self) -> bool:
        return False  # a partition has one leader

    @property
    def is_stranded(self) -> bool:
        """Whether publishes wait for want of a leader that replies: also the one that owes the reply to some."""
        return not self.links and (bool(self.waiting) or self.on_wire is not None)

    def leaders_named(self) -> str:
        return f"lookup names {self.leader or 'nobody'} as the leader of partition {self.number}"

    def why_nowhere(self, publish: Publish) -> NsqError | None:
        if self.links and not (self.has_lookup and self._is_kept_waiting):
            return None
        if not self.has_lookup:
            return super().why_nowhere(publish)
        state = "lookup names no leader"
        if self.leader is not None:
            is_connected = any(link.address == self.leader for link in self._sender.pool.connected)
            state = f"its leader {self.leader} {'does not reply' if is_connected else 'is not connected'}"
        text = f"partition {self.number} of topic {self.topic!r}: {state}"
        return self._sender.nowhere(NoLeader, text, self.topic)

    @property
    def _is_kept_waiting(self) -> bool:
        own = self._own
        return own is not None and bool(own.owed) and own.owes_to(self.topic, self.number)

    def stored(self) -> None:
        self.in_flight -= 1
        self.on_wire: Command | None = None
        self.is_idle: bool = not self.is_paused
        if self.waiting:
            self._send_waiting()

    def _send_waiting(self) -> None:
        """Send what has gathered, with what those publish whom the reply wakes (nsq-fast bench publish).

        It leaves no later for that: a command of several publishes is sent at the end of the loop's turn in any case.
        """
        sender, waiting = self._sender, self.waiting
        has_company = 1 < len(waiting) < sender.most and not waiting[0].is_alone
        if self.is_idle and has_company and not sender.lingers and sender.hold(self):
            self.held_bytes: int = 0
        else:
            self.pump()

    def failed(self, command: Command, again: list[Publish], delay: float, *, is_stale: bool) -> None:
        """``again`` is sent before all that waits: nothing passes it."""
        self.in_flight -= 1
        self.on_wire = None
        self.is_idle = not self.is_paused
        self.waiting.extendleft(reversed(again))
        if is_stale and not self.has_lookup and len(self.links) > 1 and self._own in self.links:
            self._own = self.links[(self.links.index(self._own) + 1) % len(self.links)]  # this one does not lead it
        if delay:
            self.pause(delay)
        elif self.waiting:
            self.pump()

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
        if command is not None:
            if command.conn is not None and command.conn.owner.owes_on(command.conn):  # silent for too long already
                self._give_up(command)
            else:
                self._sender.later(SILENCE, lambda: self._give_up(command))
        self.resume()

    def _give_up(self, command: Command) -> None:
        conn = command.conn
        if self.on_wire is command and conn is not None and conn.address != self.leader:
            silent = f"{conn.address}: does not reply, and no longer leads {self.topic}-{self.number}"
            self._sender.refused(conn, command, ConnectionLost(silent))


class AnyPartition(Queue):
    """Any partition of a topic that can be written now: in turn, or the one whose leader has the least to do.

    Attributes:
        open: the partitions with a connection to their leader.
    """

    __slots__ = ("_by_load", "_partitions", "open")

    in_flight: int

    def __init__(self, sender: Sender, topic: str, partitions: dict[int, PartitionQueue], *, by_load: bool) -> None:
        super().__init__(sender, topic, [])
        self.open: list[PartitionQueue] = []
        self._partitions = partitions
        self._by_load = by_load
        self.is_for_any_link = False

    def choose(self) -> ProducerConnection | None:
        """That of the next partition; sets ``partition``. Leaders that owe overdue replies only for want of others."""
        queues = self.open
        if not queues:
            return None
        self._turn = turn = (self._turn + 1) % len(queues)
        queue = queues[turn]
        if not self._by_load and not queue.is_paused and not queue.is_slow:
            self.partition: int = queue.number
            return queue.choose()
        ready = [other for other in queues[turn:] + queues[:turn] if not other.is_paused]
        ready = [other for other in ready if not other.is_slow] or ready
        if self._by_load:
            ready.sort(key=lambda each: each.load)
        for queue in ready:
            link = queue.choose()
            if link is not None:
                self.partition = queue.number
                return link
        return None

    def leaders_named(self) -> str:
        leaders = sorted({str(queue.leader) for queue in self._partitions.values() if queue.leader is not None})
        return f"lookup names {', '.join(leaders[:MOST_NAMED]) or 'nobody'} as the leaders of its partitions"

    def why_nowhere(self, publish: Publish) -> NsqError | None:
        return None if self.open else super().why_nowhere(publish)

    def can_move(self) -> bool:
        return any(not queue.is_paused and not queue.is_slow for queue in self.open)

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


class ParkedQueue(Queue):
    """Publishes that wait until it is known where they may go.

    Attributes:
        missing: what is not known, for people to read; None: which nsqd there is.
        doubted_since: since when it is whether the topic carries headers; an answer of lookup to what was asked later
            ends that. None: it is something else.
    """

    __slots__ = ("doubted_since", "missing")

    def __init__(self, sender: Sender, topic: str, missing: str | None) -> None:
        super().__init__(sender, topic, [])
        self.missing: str | None = missing
        self.doubted_since: float | None = None

    def why_nowhere(self, publish: Publish) -> NsqError | None:
        if self.doubted_since is not None and publish.form.kind == "PUB_EXT":
            return no_headers(self.topic)
        return (
            super().why_nowhere(publish)
            if self.missing is None
            else self._sender.nowhere(NoLeader, self.missing, self.topic)
        )


def no_headers(topic: str) -> ConfigError:
    """The error for headers or a tag on a topic that is not extended."""
    return ConfigError(
        f"headers, tag: topic {topic!r} carries no extended headers; leave them out, or create it with extend"
    )
