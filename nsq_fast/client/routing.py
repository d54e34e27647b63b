"""Where publishes go: the queues of a topic, and the connections that take the next command of each.

```
Routing: topic -> TopicRoute                      Pool: nsqd -> connections to it
           any         Queue          any nsqd that takes the topic, in turn; commands are pipelined. Where it has
                                      partitions, any that can be written now
           partitions  PartitionQueue one partition, in order
           parked      Queue          bound to a partition, until it is known which there are, or until lookup
                                      has said once more whether the topic carries headers
```

A publish is sent at once where nothing keeps it: an empty queue, and nothing to gather it with. Otherwise it waits in
the queue, and leaves with its neighbours as one command. What failed and is to be tried again goes back into the queue.

Order, in a PartitionQueue, survives refusals only if nothing is on its way behind what may be refused: a server takes
the second of two pipelined publishes although it has just refused the first. So it has one command on the wire at a
time. What comes meanwhile gathers, and leaves together as the next command; under load that is as fast as pipelining.
What failed goes back to its head.

A server works the commands of one connection off one after the other, and one whose replica is frozen keeps all behind
it waiting. So each partition that is published to has a connection of its own, as far as ``connections_per_nsqd`` goes.

Without lookup, every nsqd takes every topic. With lookup a topic goes to the configured nsqds and to those that
nsqlookupd names for it. A topic that lookup does not know, or whose nsqds are all out of reach, may go to any nsqd,
because original servers create topics when they are published to. A topic with partitions goes to their leaders, and
nowhere else.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Set as AbstractSet
from time import monotonic
from typing import TYPE_CHECKING, Any

from nsq_fast._lazy import get_logger
from nsq_fast._publish_path import Command, QueuePath
from nsq_fast.config import LookupConfig
from nsq_fast.errors import BodyInvalid, ConfigError, ConnectionLost, LookupFailed, NoLeader, NoNsqd, NsqError
from nsq_fast.log_events import COMPRESSION_OFF, LEADER_MOVED, PUBLISHES_WAIT
from nsq_fast.names import Address, check_topic
from nsq_fast.protocol.dialect import EXT_RECORD_BYTES
from nsq_fast.protocol.publishing import Key, key_partitioner
from nsq_fast.protocol.topology import Meta, Topology, left_out

from .publishes import Publish

if TYPE_CHECKING:
    from .loop import Task
    from .sender import ProducerConnection, Sender

logger: logging.Logger = get_logger(__name__)

MOST_CONNECTIONS = 8
"""To one nsqd, where the option does not say how many: each costs the server two goroutines and their buffers."""

SILENCE = 1.0
"""A former leader refuses what it got before. One that says nothing for so long (s) will not say anything."""

MOST_NAMED = 10
"""So many leaders are named in an error."""

ABSENT_AFTER = 1.0
"""Lookup says for so long (s) that there is no such topic: then there is none."""

LONGEST_DOUBT = 5.0
"""Lookup, asked anew whether a topic carries headers, does not answer for so long (s): what it said before holds. What
is bound to a partition waits meanwhile."""

AFTER_TIMEOUT = 0.1
"""Seconds that connections get to close their sockets when the time for closing is over."""

MAX_TOPICS = 10_000
"""Topics remembered at most: programs that make up topic names for each answer must not fill the memory."""


class Queue(QueuePath):
    """Any nsqd that takes the topic, or any partition of it that can be written now, in turn; base of PartitionQueue.

    Attributes:
        route: what is known of the topic.
        open: the partitions with a connection to their leader; None where the topic has none.
        is_sought: somebody looks for a connection to send to; ``seeks`` counts the questions.
        withdrawn: how many publishes ended since ``remove_ended``, and may wait here all the same.
    """

    __slots__ = ("_turn", "is_sought", "open", "route", "seeks", "withdrawn")

    in_flight: int

    links: list[ProducerConnection]
    sender: Sender

    def __init__(self, route: TopicRoute, links: list[ProducerConnection]) -> None:
        super().__init__(route.sender, route.name, links)
        self.route: TopicRoute = route
        self.open: list[PartitionQueue] | None = None
        self.is_sought: bool = False
        self.seeks: int = 0
        self.withdrawn: int = 0
        self._turn = random.randrange(1024)  # many that start together begin apart
        self.is_for_any_link = True

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.topic}, {len(self.waiting)} waiting>"

    def choose(self) -> ProducerConnection | None:
        """The open connection that takes the next command. One that owes overdue replies only for want of others."""
        if self.open is not None:
            return self._choose_partition(self.open)
        links = self.links
        count = len(links)
        if not count:
            return None
        self._turn = turn = (self._turn + 1) % count
        link = links[turn]
        if link.overdue:
            return next((other for other in links[turn:] + links[:turn] if not other.overdue), link)
        return link

    def _choose_partition(self, queues: list[PartitionQueue]) -> ProducerConnection | None:
        """That of the next partition, or of the one whose leader has the least to do; sets ``partition``."""
        if not queues:
            return None
        self._turn = turn = (self._turn + 1) % len(queues)
        queue = queues[turn]
        is_by_load = self.route.is_by_load
        if not is_by_load and not queue.is_paused and not queue.is_slow:
            self.partition: int | None = queue.number
            return queue.choose()
        ready = [other for other in queues[turn:] + queues[:turn] if not other.is_paused]
        ready = [other for other in ready if not other.is_slow] or ready
        if is_by_load:
            ready.sort(key=lambda each: each.load)
        for queue in ready:
            link = queue.choose()
            if link is not None:
                self.partition = queue.number
                return link
        return None

    def can_move(self) -> bool:
        """Whether another connection could take what one owes."""
        if self.open is None:
            return bool(self.links)
        return any(not queue.is_paused and not queue.is_slow for queue in self.open)

    def why_nowhere(self, publish: Publish) -> NsqError | None:
        """Why a publish cannot be sent now, if it is for want of a connection to an nsqd that takes it."""
        return None if self.links else self.route.why_nowhere(publish)

    def leaders_named(self) -> str:
        """Whom lookup names as the leaders that take its publishes, for people to read."""
        if self.open is None:
            return "lookup names no partitions"
        queues = self.route.partitions.values()
        leaders = sorted({str(queue.leader) for queue in queues if queue.leader is not None})
        return f"lookup names {', '.join(leaders[:MOST_NAMED]) or 'nobody'} as the leaders of its partitions"

    @property
    def is_stranded(self) -> bool:
        """Whether publishes wait for want of a connection."""
        return bool(self.waiting) and not self.links

    def failed(self, command: Command, again: list[Publish], delay: float, *, is_stale: bool) -> None:
        """A command to it failed; ``again``, of it, is to be sent again, after ``delay`` seconds.

        ``is_stale``: the nsqd does not lead the partition (any more).
        """
        number = command.partition
        queue = self.route.partitions.get(number) if is_stale and number is not None else None
        if queue is not None:
            # Nothing is sent to a partition whose leader moves, for a while; the others may take it at once.
            if not queue.is_paused and delay:
                queue.pause(delay)
            self._resend(again)
        elif again:
            # Never at once: of nsqds that end together, each would be sent what the one before has let fall, as long as
            # nobody has read that it is gone; and two that end with the same publish are said to end because of it.
            self.sender.later(delay, lambda: self._resend(again))
        else:
            self.in_flight -= 1

    def _resend(self, again: list[Publish]) -> None:
        """Send the rest of a command that failed as soon as possible: in the order in which they failed."""
        self.in_flight -= 1
        self.waiting.extend(publish for publish in again if not publish.done)
        self.pump()

    def remove_ended(self) -> None:
        """Forget what ended while it waited."""
        self.withdrawn = 0
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
    """

    __slots__ = ("_own", "_pauses", "former_leader", "is_paused", "leader", "number")

    in_flight: int

    def __init__(self, route: TopicRoute, links: list[ProducerConnection], number: int) -> None:
        super().__init__(route, links)
        self.is_for_any_link = False
        self.number: int = number
        self.partition: int | None = number
        self.leader: Address | None = None
        self.former_leader: Address | None = None
        self.is_paused: bool = False
        self._is_pipelined = False
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
        if not self.route.has_lookup:
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
        self._own = self.sender.pool.take(leader)
        return self._own

    def let_go(self) -> None:
        """It is not published to for the time being."""
        if self._own is not None and self.route.has_lookup:
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
        if self.links and not (self.route.has_lookup and self._is_kept_waiting):
            return None
        if not self.route.has_lookup:
            return super().why_nowhere(publish)
        state = "lookup names no leader: it has none now, or no channel yet"  # lookup does not say which
        if self.leader is not None:
            is_connected = any(link.address == self.leader for link in self.sender.pool.connected)
            state = f"its leader {self.leader} {'does not reply' if is_connected else 'is not connected'}"
        text = f"partition {self.number} of topic {self.topic!r}: {state}"
        return self.sender.nowhere(NoLeader, text, self.topic)

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
        sender, waiting = self.sender, self.waiting
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
        if is_stale and not self.route.has_lookup and self.links:
            # It does not lead it. Where it ended the connection to say so, it would be chosen again once it is back.
            after = self.links.index(self._own) + 1 if self._own in self.links else 0
            self._own = self.links[after % len(self.links)]
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
        self.sender.later(delay, lambda: self.resume(number))

    def resume(self, number: int | None = None) -> None:
        """Go on, if ``number`` is the latest pause, or at any rate."""
        if number is None or number == self._pauses:
            self._pauses += 1
            self.is_paused = False
            self.is_idle = self.on_wire is None
            self.pump()
            self.route.any.pump()

    def moved(self) -> None:
        """Another nsqd leads the partition now."""
        command = self.on_wire
        if command is not None:
            if command.conn is not None and command.conn.owner.owes_on(command.conn):  # silent for too long already
                self._give_up(command)
            else:
                self.sender.later(SILENCE, lambda: self._give_up(command))
        self.resume()

    def _give_up(self, command: Command) -> None:
        conn = command.conn
        if self.on_wire is command and conn is not None and conn.address != self.leader:
            silent = f"{conn.address}: does not reply, and no longer leads {self.topic}-{self.number}"
            self.sender.refused(conn, command, ConnectionLost(silent))


def no_headers(topic: str) -> ConfigError:
    """The error for headers or a tag on a topic that is not extended."""
    return ConfigError(
        f"headers, tag: topic {topic!r} carries no extended headers; leave them out, or create it with extend"
    )


class TopicRoute:
    """What is known of one topic, where its publishes go, and the queues in which they wait.

    Attributes:
        name: the topic.
        addresses: the nsqds that lookup named; None before its first answer, and without lookup.
        topology: what ``addresses`` were taken from; None when they were not taken from lookup's answer alone.
        is_used: set by every publish, cleared at every poll.
        is_plain: it has no partitions as far as anybody knows.
        is_partitioned: it has; that lasts.
        is_unordered: keys have no order to keep there, as was found for an earlier publish; asked while ``is_plain``.
        partition_num: how many partitions the topic has, available or not; 0: lookup does not say.
        is_ext: whether messages may have headers; None: lookup does not say.
        is_lack_told: it has been logged that there is no nsqd for it.
        max_msg_size: largest body that its servers take, as far as is known.
        plain_size: largest body that leaves as it is, without a look at compression.
        absent_since: since when lookup says that there is no such topic, ``time.monotonic``; None: it does not.
        absence: that the topic does not exist, in words, once lookup has said so for a while; None: it may.
        doubted_since: since when it is not known whether the topic carries headers by now; an answer of lookup to what
            was asked later ends that. None: there is no doubt.
        any: the queue of those that may go to any nsqd, or to any partition.
        is_by_load: those go to the partition whose leader has the least to do, and not in turn.
        partitions: partition -> its queue, for those that are led or that publishes are bound to.
        parked: the queue of those that are bound to a partition, until it is known what partitions there are; without
            lookup, of those with a key, until it is known of which kind the nsqds are. And of all that are bound while
            some with headers come before them of which it is not sure yet that they can be sent.
    """

    max_msg_size: Any
    plain_size: Any

    def __init__(self, routing: Routing, name: str) -> None:
        has_lookup, sender = routing.lookup is not None, routing.sender
        config = sender.config
        self.sender: Sender = sender
        self.name = name
        self.max_msg_size = self.plain_size = self._largest = config.max_msg_size
        self._compressed_from = config.body_compression_min_size if config.body_compression else self._largest + 1
        self.addresses: frozenset[Address] | None = None
        self.topology: Topology | None = None
        self.is_used = True
        self.has_lookup = has_lookup
        self.is_plain: bool = not has_lookup
        self.is_partitioned: bool = False
        self.is_unordered: bool = False
        self.partition_num: int = 0
        self.is_ext: bool | None = None
        self.is_lack_told: bool = False
        self.absent_since: float | None = None
        self.absence: str | None = None
        self.partitions: dict[int, PartitionQueue] = {}
        self.is_by_load: bool = config.partition_strategy == "least_loaded"
        self.doubted_since: float | None = None
        self._routing = routing
        self._asking: Task | None = None
        self._links: list[ProducerConnection] = [] if has_lookup else sender.pool.open
        self._partition_of_key = key_partitioner(config.key_strategy)
        self.any: Queue = Queue(self, self._links)
        self.parked: Queue = Queue(self, [])

    # Where one publish goes

    def bound(self, key: Any, partition: Any) -> Queue | None:
        """The queue of a publish, of arguments that are not checked yet; None where that is left to do."""
        if self.doubted_since is not None:
            return None
        if partition is None:
            is_unordered = self.is_plain and self.is_unordered
            if key.__class__ not in (bytes, str) or not (self.partition_num or is_unordered):
                return None
            try:
                number = self._partition_of_key(key, self.partition_num or 1)
            except (TypeError, ValueError):
                return None  # it is refused where keys are checked
            return self.any if is_unordered else self.partitions.get(number)
        if key is None and partition.__class__ is int and (partition < self.partition_num or not self.has_lookup):
            return self.partitions.get(partition)
        return None

    def destination(self, key: Key | None, partition: int | None) -> Queue:
        """The queue of a publish: bound to one partition by either, or to none.

        Raises ConfigError where there is no such partition.
        """
        if key is None and partition is None:
            return self.any
        if self.doubted_since is not None and not self.is_plain:
            return self.parked
        if partition is None and self.partition_num:
            assert key is not None
            partition = self._partition_of_key(key, self.partition_num)
        if partition is not None and partition < self.partition_num and partition in self.partitions:
            return self.partitions[partition]  # the usual case
        if not self.has_lookup:
            return self._without_lookup(key) if partition is None else self.partition(partition)
        binding = f"key={key!r}" if key is not None else f"partition={partition}"
        if self.is_plain:
            if partition is None:
                return self._unordered()
            raise ConfigError(f"{binding}: topic {self.name!r} has no partitions; leave it out")
        if not self.is_partitioned:
            return self.parked
        if partition is None:
            raise ConfigError(f"{binding}: lookup does not say how many partitions {self.name!r} has")
        if self.partition_num and partition >= self.partition_num:
            raise ConfigError(f"partition={partition}: topic {self.name!r} has {self.partition_num} partitions")
        return self.partition(partition)

    def _without_lookup(self, key: Key | None) -> Queue:
        """The queue of a publish with a key, where only the nsqds themselves can say what they are."""
        dialects = [link.conn.session.dialect for link in self._links if link.conn is not None]
        if not dialects:
            self.parked.reopen()
            return self.parked
        if any(dialect.has_partitions for dialect in dialects):
            raise ConfigError(
                f"key={key!r}: the number of partitions is unknown without lookupd_http_addresses;"
                " name the partition, or leave it out"
            )
        return self._unordered()

    def _unordered(self) -> Queue:
        """The queue of a publish with a key to a topic of the original NSQ: one program can serve both kinds."""
        self.sender.tell_unordered(self.name)
        self.is_unordered = not callable(self.sender.config.key_strategy)  # which is not asked where it does not matter
        return self.any

    def partition(self, number: int) -> PartitionQueue:
        """The queue of a partition."""
        queue = self.partitions.get(number)
        if queue is None:
            links = [] if self.has_lookup else self._links
            queue = self.partitions[number] = PartitionQueue(self, links, number)
        return queue

    # A topic that may carry headers by now

    def doubt(self) -> Queue:
        """The queue of a publish with headers, where there were none when lookup was last asked: it is asked anew.

        What is bound to a partition waits behind it, so that the order of the calls is kept.
        """
        if self.doubted_since is None:
            began = self.doubted_since = monotonic()
            self.parked.reopen()
            self.sender.later(LONGEST_DOUBT, lambda: self.settle(began))
        return self.parked

    def settle(self, asked_at: float) -> None:
        """Lookup has answered what it was asked at ``asked_at``: that ends a doubt which is older. What was parked goes
        where it is bound to, or ends: where that is nowhere, or where it cannot be sent."""
        if self.doubted_since is not None and asked_at >= self.doubted_since:
            self.doubted_since = None
            self.parked.hand_over(self.destination_or_end)

    def destination_or_end(self, publish: Publish) -> Queue | None:
        """The queue of a publish that was parked. Where it cannot be sent it ends: None."""
        error: NsqError | None = None if self.is_ext is None else self._misfit(publish)
        if error is None:
            try:
                return self.destination(publish.key, publish.pin)
            except ConfigError as no_partition:
                error = no_partition
        self.sender.finish(publish, error)
        return None

    def why_nowhere(self, publish: Publish) -> NsqError:
        """Why a publish that is bound to no partition, or not yet, waits for want of a connection."""
        if publish.destination is not self.parked or not self.has_lookup:
            return self.sender.nowhere(NoNsqd, f"no nsqd takes publishes now for topic {self.name!r}", self.name)
        if self.doubted_since is None:
            text = f"lookup did not say which partitions topic {self.name!r} has"
        elif publish.encoding.kind == "PUB_EXT":
            return no_headers(self.name)
        else:
            text = f"lookup did not say whether topic {self.name!r} carries headers by now, which others before it have"
        return self.sender.nowhere(NoLeader, text, self.name)

    # What lookup says

    def learnt(self, topology: Topology, asked_at: float) -> None:
        """Lookup has answered what it was asked then."""
        if not topology.is_unknown:
            self.absent_since = self.absence = None
        if not topology.is_empty:
            self.is_lack_told = False
        if self.is_partitioned or topology.partitions or topology.meta is not None:
            self._set_partitions(topology)
        elif topology is self.topology and self.is_plain:
            self.sender.pool.retain_needed()  # what was busy when its nsqd was named no more may be idle now
        elif found := frozenset(nsqd.tcp for nsqd in topology.nsqds):
            self._set_addresses(found)
            self.topology = topology
        else:
            self._ask_others(frozenset())
        self.settle(asked_at)

    def _set_partitions(self, topology: Topology) -> None:
        if topology.meta is not None:
            is_news = self.is_ext is None
            self._learn(topology.meta)
            if is_news:  # what came before is refused as what comes later
                self._fail_waiting(self._misfit)
        if not self.is_partitioned:
            self.is_partitioned, self.is_plain = True, False
            self.any.is_for_any_link, self.any.open = False, []
        moved = self._take_leaders(topology)
        self._move_keys()
        leaders = (queue.leader for queue in self.partitions.values())
        self._connect(frozenset(leader for leader in leaders if leader is not None))
        for queue in moved:
            former, queue.former_leader = queue.former_leader, queue.leader
            if former not in (None, queue.leader):
                self._routing.leader_moves += 1
                logger.info(
                    "%s-%d moved from %s to %s", self.name, queue.number, former, queue.leader, extra=LEADER_MOVED
                )
            queue.moved()
        self._decided()

    def _learn(self, meta: Meta) -> None:
        """Take over how many partitions it has, and what messages it carries."""
        if self.is_ext is None and not meta.extend_support and self._compressed_from <= self.max_msg_size:
            logger.warning(
                "[%s] carries no extended headers: bodies are not compressed", self.name, extra=COMPRESSION_OFF
            )
        self.partition_num = meta.partition_num
        self.is_ext = meta.extend_support
        self.max_msg_size = self.plain_size = self._largest
        if self.is_ext:
            self.max_msg_size -= EXT_RECORD_BYTES
            self.plain_size = min(self.max_msg_size, self._compressed_from - 1)

    def _take_leaders(self, topology: Topology) -> list[PartitionQueue]:
        """The partitions that have got another leader."""
        moved: list[PartitionQueue] = []
        if not topology.partitions:
            return moved  # says nothing of the leaders: the answer of a lookupd that has just started looks the same
        for number, nsqd in topology.partitions.items():
            queue = self.partition(number)
            if queue.leader != nsqd.tcp:
                queue.leader = nsqd.tcp
                moved.append(queue)
        for number, queue in self.partitions.items():
            if number not in topology.partitions:
                queue.leader = None
        return moved

    def _move_keys(self) -> None:
        """The topic was made anew, with fewer partitions: keys of those that are no more go where they belong now.

        What names its partition by number waits for that. What may be stored already is tried again, as anywhere.
        """
        if not self.partition_num:
            return
        for queue in [queue for number, queue in self.partitions.items() if number >= self.partition_num]:
            if queue.held_bytes is not None:
                continue  # it gathers, and is looked at again with the next answer
            waiting = list(queue.waiting)
            queue.waiting.clear()
            for publish in waiting:
                if publish.key is not None:
                    publish.destination = self.destination(publish.key, None)
                publish.destination.waiting.append(publish)

    def _set_addresses(self, addresses: frozenset[Address]) -> None:
        """It has no partitions, as far as anybody knows, and these nsqds take it; none: it is not known who does."""
        self.topology = None
        self.is_plain = bool(addresses)
        self._connect(addresses)
        if self.is_plain:
            self._decided()
        else:
            self.parked.reopen()

    def _connect(self, addresses: frozenset[Address]) -> None:
        """Have connections to its nsqds, and to no nsqd that nobody needs."""
        pool = self.sender.pool
        pool.exchange(self.addresses or frozenset(), addresses)
        self.addresses = addresses
        pool.retain_needed()
        self.links_changed()

    def _decided(self) -> None:
        """It is known now which partitions it has: those that are bound to one can go there."""
        self.sender.news.set()
        if self.doubted_since is None:
            self.parked.hand_over(self.destination_or_end)

    def forget(self) -> None:
        """Nobody publishes to it: need no connections, and ask for none."""
        self.stop()
        for queue in self.partitions.values():
            queue.let_go()
        self.sender.pool.exchange(self.addresses or frozenset(), frozenset())

    # Where nobody is known who takes it

    def _ask_others(self, named: frozenset[Address]) -> None:
        if self._asking is None:
            self._asking = self.sender.supervisor.job(f"nsqds for {self.name}", self._ask_nodes, named)

    async def _ask_nodes(self, named: frozenset[Address]) -> None:
        """Nobody has the topic yet, or nobody who can be reached: any nsqd may take it."""
        lookup = self._routing.lookup
        try:
            nodes = await lookup.nodes(self._routing.lookupd_timeout)
        except LookupFailed as error:
            self._tell_lack(str(error))
            return
        finally:
            self._asking = None
        if not self.is_partitioned:
            others = frozenset(nsqd.tcp for nsqd in nodes if not nsqd.is_redesigned)
            if not named and lookup.is_blank and self.addresses:
                # Nsqlookupds that have just begun: nsqds register after up to 15 s (nsqio/nsq: nsqd/lookup.go,
                # lookupLoop). Those that are connected are there all the same.
                others = self.addresses & {link.address for link in self.sender.pool.connected}
            self._set_addresses(named | others)
            topology = lookup.topology(self.name)
            if not (named or others):
                self._tell_lack(self.lookup_problem())
                if nodes and topology is not None and topology.is_unknown:
                    self._end_if_absent(topology.problem)

    def stop(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    def lookup_problem(self) -> str:
        """Why lookup names no nsqd for it, or for a part of it; empty when it does, and without lookup."""
        if not self.has_lookup:
            return ""
        lookup = self._routing.lookup
        topology = lookup.topology(self.name)
        if self.addresses:
            excluded = () if topology is None else topology.excluded_partitions
            return left_out(excluded) if excluded else ""
        failure = lookup.failure()
        problems = [f"lookup failed: {failure}"] if failure else []
        answering = lookup.answering()
        if answering and topology is not None:
            said = f" (lookup says: {topology.problem})" if topology.problem else ""
            if topology.excluded:
                text, said = topology.problem, ""
            elif self.is_partitioned or (said and not topology.is_unknown):
                text = f"lookup names no partition that can be written now{said}"
            else:
                text = f"lookup does not know the topic, and names no other nsqd{said}"
            problems.append(f"{text}: {', '.join(answering)}")
        return "; ".join(problems) or "lookup has not answered yet"

    def _tell_lack(self, problem: str) -> None:
        """Log once that publishes wait because nobody takes them; ``problem`` says why."""
        if not self.is_lack_told:
            self.is_lack_told = True
            logger.warning("publishes to topic %s wait for an nsqd: %s", self.name, problem, extra=PUBLISHES_WAIT)

    def _end_if_absent(self, problem: str) -> None:
        """Fail what waits for a topic that does not exist, and that nobody will create by publishing to it.

        Lookup has to say so for a while, by calls of this: another client may just be creating the topic.
        """
        now = monotonic()
        if self.absent_since is None:
            self.absent_since = now
        if now - self.absent_since < ABSENT_AFTER:
            return
        text = (
            f"topic {self.name!r} does not exist (lookup says: {problem}), and servers of the redesigned NSQ"
            " create no topics by themselves: create it, or mend the name"
        )
        self.absence = text
        self.sender.news.set()
        self._fail_waiting(lambda publish: NoNsqd(text))

    def _misfit(self, publish: Publish) -> NsqError | None:
        if not self.is_ext and publish.encoding.kind == "PUB_EXT":
            return no_headers(self.name)
        size = publish.encoding.record_size(publish.body)
        if size > self.max_msg_size:
            return BodyInvalid(f"body of {size} bytes, its header included, is above {self.limit_text}")
        return None

    @property
    def limit_text(self) -> str:
        """The largest message that its servers take, as errors name it."""
        text = f"max_msg_size={self._largest}"
        if self.max_msg_size < self._largest:
            text += f", less the {self._largest - self.max_msg_size} byte that an extended topic's records need"
        return text

    def _fail_waiting(self, error_of: Callable[[Publish], NsqError | None]) -> None:
        for queue in list(self.queues()):
            for publish in list(queue.waiting):
                error = None if publish.done else error_of(publish)
                if error is not None:
                    self.sender.finish(publish, error)
            queue.remove_ended()

    # Its connections

    def links_changed(self) -> None:
        """Others take publishes now, or it has other nsqds: send what can be sent."""
        if self.has_lookup:
            self._take_links()
        else:
            self.is_unordered = False
            if any(link.conn is not None for link in self._links):  # it is known what those with a key find there
                # It stays closed until a publish is put into it again: some that belong there may wait for room.
                self.parked.hand_over(self.destination_or_end)
        for queue in list(self.queues()):
            if queue.waiting and queue.held_bytes is None:
                queue.pump()

    def _take_links(self) -> None:
        """Give each queue the connections that are open to its nsqds."""
        addresses = self.addresses or frozenset()
        if not self.is_partitioned:
            addresses |= self._routing.nsqds
        links = [link for link in self.sender.pool.open if link.address in addresses]
        by_address: dict[Address | None, list[ProducerConnection]] = {}
        for link in links:
            by_address.setdefault(link.address, []).append(link)
        is_lost = False
        for queue in self.partitions.values():
            found = by_address.get(queue.leader, [])
            is_lost |= bool(queue.links) and not found
            queue.links = found
        self.any.links = links
        if self.is_partitioned:
            self.any.open = [queue for queue in self.partitions.values() if queue.links]
        if is_lost:
            self._routing.refresh(self.name)
        for queue in self.partitions.values():
            if queue.is_stranded:
                self.sender.seek(queue)

    def link_failed(self) -> None:
        """One could not connect. Where that leaves publishes without any nsqd, others are asked for."""
        if self.is_plain and self.any.is_stranded and self.sender.pool.are_down(self.addresses or ()):
            self._ask_others(self.addresses or frozenset())

    # Its queues

    def queues(self) -> Iterator[Queue]:
        """All queues in which publishes may wait."""
        yield self.any
        yield self.parked
        yield from list(self.partitions.values())  # stats() of another thread reads it meanwhile

    @property
    def is_busy(self) -> bool:
        """Whether publishes wait or are on the wire."""
        return any(queue.waiting or queue.in_flight for queue in self.queues())


class Pool:
    """The connections to all nsqds that a producer uses: always connected, or trying to be.

    Args:
        new: makes a connection to an nsqd, and has it begin to connect.
        most: connections to one nsqd, open from the start; None: one, and more as partitions are published to.

    Attributes:
        open: those that take publishes now: connected, and not stalled. The list object stays the same.
    """

    def __init__(self, new: Callable[[Address], ProducerConnection], most: int | None) -> None:
        self.open: list[ProducerConnection] = []
        self._links: dict[Address, list[ProducerConnection]] = {}
        self._needs: Counter[Address] = Counter()  # nsqd -> how many need it: the options, and routes
        self._new = new
        self._first = most or 1
        self._most = most or MOST_CONNECTIONS

    def __iter__(self) -> Iterator[ProducerConnection]:
        for links in list(self._links.values()):
            yield from list(links)

    def add(self, addresses: Collection[Address]) -> None:
        """Have connections to these nsqds."""
        for address in addresses:
            if address not in self._links:
                self._links[address] = [self._new(address) for _ in range(self._first)]

    def take(self, address: Address) -> ProducerConnection:
        """One for a partition that this nsqd leads: one that none has, if that can be."""
        self.add((address,))
        links = self._links[address]
        found = min(links, key=lambda link: (bool(link.owed), link.users))
        if (found.users or found.owed) and len(links) < self._most:
            found = self._new(address)
            links.append(found)
        found.users += 1
        return found

    def exchange(self, before: AbstractSet[Address], after: AbstractSet[Address]) -> None:
        """Somebody who needed some nsqds needs others now; costs what changed, however many there are."""
        self._needs.update(after - before)
        for address in before - after:
            self._needs[address] -= 1
            if not self._needs[address]:
                del self._needs[address]
        self.add(after)

    def retain_needed(self) -> None:
        """Close the idle connections to nsqds that nobody needs; the busy ones stay until this is called again."""
        for address in [known for known in self._links if known not in self._needs]:
            if not any(link.conn is not None and link.conn.session.pending_count for link in self._links[address]):
                for link in self._links.pop(address):
                    link.stop()

    def hurry(self) -> None:
        """Publishes wait for a connection."""
        for link in self:
            link.hurry()

    def are_down(self, addresses: Collection[Address]) -> bool:
        """Whether none of these nsqds takes publishes, as far as has been tried."""
        links = [link for address in addresses for link in self._links.get(address, ())]
        return all(link.error is not None for link in links)

    def are_tried(self, addresses: Collection[Address]) -> bool:
        """Whether each of these nsqds is connected, or could not be."""
        links = [link for address in addresses for link in self._links.get(address, ())]
        return all(link.conn is not None or link.error is not None for link in links)

    def errors(self) -> list[tuple[Address, NsqError]]:
        """Why nsqds take no publishes: the last error of each of those."""
        return [(link.address, link.error) for link in self if link.error is not None]

    @property
    def connected(self) -> list[ProducerConnection]:
        """Those with an open connection, the stalled ones among them."""
        return [link for link in self if link.conn is not None]

    def let_go(self) -> None:
        """The loop is closed: drop every connection."""
        for link in self:
            link.let_go()
        self._links.clear()

    async def close(self, timeout: float) -> None:
        """Close every connection after flushing what was written to it, or when time is up."""
        end = monotonic() + timeout + AFTER_TIMEOUT
        links = list(self)
        for link in links:
            link.stop(timeout)
        self._links.clear()
        for link in links:
            await link.ended(max(0.0, end - monotonic()))


class Routing:
    """The routes of all topics, and who is asked about them.

    Args:
        nsqds: they take every topic.

    Attributes:
        lookup: what polls the lookup services; None: ``nsqds`` is all there is.
        nsqds: the configured ones.
        leader_moves: times that lookup named another leader of a partition.
    """

    def __init__(self, sender: Sender, nsqds: Iterable[Address], lookup: Any, config: LookupConfig) -> None:
        self.by_topic: dict[str, TopicRoute] = {}
        self.leader_moves: int = 0
        self.lookup = lookup
        self.nsqds: frozenset[Address] = frozenset(nsqds)
        self.lookupd_timeout: float = config.lookupd_timeout
        self.sender: Sender = sender

    def start(self) -> None:
        """Connect to the configured nsqds; begin to look up."""
        self.sender.pool.exchange(frozenset(), self.nsqds)
        if self.lookup is not None:
            self.lookup.start(self.sender.loop, self.sender.supervisor)

    def stop(self) -> None:
        """Look up no more."""
        if self.lookup is not None:
            self.lookup.stop()
        for route in self.by_topic.values():
            route.stop()

    def add(self, topic: str) -> TopicRoute:
        """A route for a topic that has none. Raises NameInvalid."""
        check_topic(topic)
        if self.lookup is None and len(self.by_topic) >= MAX_TOPICS and self._may_forget:
            for name in [name for name, route in self.by_topic.items() if not route.is_busy]:
                del self.by_topic[name]
        route = self.by_topic[topic] = TopicRoute(self, topic)
        if self.lookup is not None:
            route.links_changed()
            self.lookup.add_topic(topic)
        return route

    # What is asked

    def refresh(self, topic: str) -> None:
        """What we know of a topic is out of date."""
        if self.lookup is not None:
            self.lookup.refresh(topic)

    def lookup_problem(self, topic: str) -> str:
        """Why lookup names no nsqd for a topic, or for a part of it; empty when it does, and without lookup."""
        route = self.by_topic.get(topic)
        return "" if route is None else route.lookup_problem()

    def waiting_count(self) -> int:
        """How many publishes wait for a connection, or for their turn."""
        return sum(len(queue.waiting) for route in list(self.by_topic.values()) for queue in route.queues())

    def leaders(self) -> dict[str, dict[int, str | None]]:
        """Topic -> partition -> the leader that is known of it."""
        return {
            topic: {number: queue.leader and str(queue.leader) for number, queue in sorted(route.partitions.items())}
            for topic, route in list(self.by_topic.items())
            if route.is_partitioned
        }

    # News of the connections, and of lookup

    def links_changed(self) -> None:
        """A connection takes publishes now, or no longer."""
        for route in list(self.by_topic.values()):
            route.links_changed()

    def link_failed(self) -> None:
        """A connection could not be made."""
        if self.lookup is not None:
            for route in list(self.by_topic.values()):
                route.link_failed()

    def learnt(self, topic: str, topology: Topology) -> None:
        """Lookup has answered for a topic."""
        route = self.by_topic.get(topic)
        if route is not None and not self._forget_idle(topic, route):
            route.learnt(topology, self.lookup.asked_at(topic))

    @property
    def _may_forget(self) -> bool:
        """Whether no publish waits for room: it has chosen its queue already."""
        return not self.sender.pending_limit.queue and not self.sender.pending_limit.admitted

    def _forget_idle(self, topic: str, route: TopicRoute) -> bool:
        is_idle = not route.is_used and not route.is_busy and self._may_forget
        route.is_used = False
        if not is_idle or len(self.by_topic) <= MAX_TOPICS // 10:
            return False
        del self.by_topic[topic]
        route.forget()
        self.lookup.remove_topic(topic)
        return True
