"""What a consumer is subscribed to: its topics, where each of them lives, and a connection for each of these places.

    Consumer
      Subscriptions            one: the topics, which are named or chosen by a pattern
        TopicSubscriptions     one a topic: follows what lookup says of it
          Subscriber           one a target (an nsqd, or a partition that it leads): keeps it subscribed, through
            Subscription       one after another, each with its Connection (``subscription.py``)

A partition that moves gets a new subscriber at once; the old one ends when the new one is there, or when its connection
does. As long as a partition has no connection, lookup is asked again and again.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from enum import Enum, auto
from time import monotonic
from typing import TYPE_CHECKING

import msgspec

from nsq_fast.client.signals import emit, is_heard
from nsq_fast.config import OF_CONNECTION, ConsumerConfig
from nsq_fast.errors import (
    ChannelNotRegistered,
    ConfigError,
    ConnectionClosed,
    ConnectionLost,
    ExtendSubForbidden,
    ExtendSubRequired,
    HttpError,
    LocalProtocolError,
    NsqError,
    OrderedSubRequired,
    ServerError,
    TopicNotExist,
    said_at,
)
from nsq_fast.log_events import (
    BACKOFF_BEGAN,
    BACKOFF_ENDED,
    MAX_IN_FLIGHT_HIGH,
    MAX_IN_FLIGHT_LOW,
    NSQD_LEFT,
    PARTITIONS_MISSING,
    SUBSCRIBED,
    SUBSCRIPTION_FAILED,
    SUBSCRIPTION_MODE,
    SUBSCRIPTION_RENEWED,
    TOPIC_LEFT,
    TOPIC_MATCHED,
)
from nsq_fast.names import Address
from nsq_fast.protocol import rdy
from nsq_fast.protocol.rdy import Backoff, ReconnectDelay, Sharing
from nsq_fast.protocol.topology import (
    Mode,
    Nsqd,
    Target,
    TopicChoice,
    Topology,
    configured,
    impossible,
    is_complete,
    is_replaced,
    missing,
    targets,
)

from .connection import Connection
from .give_up import Recurring
from .loop import Changes, Repeated
from .start_position import Starter, StartPositions
from .subscription import ConnectionStats, Counters, Subscription

if TYPE_CHECKING:
    from .consumer import AnyConsumer
    from .lookup import LookupPoller, TopicWatch
    from .loop import Task
    from .workers import WorkerPool


ROUNDS_OF_GRACE = 2
"""Rounds of lookup after a refusal: the first may have been on its way before, the second knows what changed."""

SEEK_INTERVAL = 1.0
"""Seconds between questions to lookup while a partition has no connection."""

LOST_SPREAD = 5.0
"""Seconds over which the consumers that lose an nsqd without partitions spread their questions to lookup."""

RETURN_PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds, half as long to one and a half times, between questions to lookup about an nsqd that it named no more when
its connection had ended. One that restarts is unregistered as long as it is away (nsqio/nsq: nsqlookupd/
lookup_protocol_v1.go, IOLoop), and nobody would take its messages until the next poll."""

FIRST_DELAY = 0.1
FIRST_DELAY_OF_LISTED = 1.0
"""Shortest pauses in seconds before a connection is made again. A topic that was chosen by a pattern may have been
deleted, which ends its connections, and a new SUB would create it again (nsqio/nsq: nsqd/protocol_v2.go, SUB): lookup
has time to say so first."""

# What trying again in the same way does not cure.
REFUSALS = (
    OrderedSubRequired,
    ExtendSubRequired,
    ExtendSubForbidden,
    ChannelNotRegistered,
    LocalProtocolError,
    ConfigError,
)
LONGEST_LEADER_DELAY = 1.0
"""Seconds between attempts while the leader of a partition is not ready. It may be at any moment, and nobody else
delivers the messages."""

DRAIN_TIMEOUT = 10.0
"""Longest wait for answers when one connection ends for the sake of another, in seconds."""


class Subscriptions:
    """The topics of one consumer, and their subscribers.

    Args:
        choice: which topics.
        positions: where the channel begins, in each topic.

    Attributes:
        lookup: asked about all topics; None where nsqds are configured only.
    """

    def __init__(self, consumer: AnyConsumer, choice: TopicChoice, positions: StartPositions | None) -> None:
        self._consumer = consumer
        self._positions = positions
        self._is_stopped = False
        self._past_moves = 0
        self._hopeful = ""
        self.lookup: LookupPoller | None = None
        self._watch: TopicWatch | None = None
        if consumer.lookupd_addresses:
            from .lookup import LookupPoller, TopicWatch  # not needed where nsqds are configured

            config = consumer.lookup_config
            self.lookup = LookupPoller(consumer.lookupd_addresses, config, "r", self.on_topology)
            if choice.pattern is not None:
                self._watch = TopicWatch(self.lookup, choice, config, self.follow, consumer.logger)
        self._topics = {name: TopicSubscriptions(consumer, self, name, positions) for name in choice.names}

    def __iter__(self) -> Iterator[Subscriber]:
        return (subscriber for topic in list(self._topics.values()) for subscriber in topic)

    @property
    def topics(self) -> tuple[str, ...]:
        return tuple(self._topics)

    @property
    def leader_moves(self) -> int:
        """Times that lookup named another leader of a partition."""
        return self._past_moves + sum(topic.leader_moves for topic in list(self._topics.values()))

    def past(self) -> dict[str, Counters]:
        return {name: topic.past.copy() for name, topic in list(self._topics.items())}

    def each_topic(self) -> list[TopicSubscriptions]:
        """The subscriptions of each topic that is consumed now."""
        return list(self._topics.values())

    def of_topic(self, topic: str) -> TopicSubscriptions:
        """The subscriptions of a topic that is consumed now. Raises KeyError."""
        return self._topics[topic]

    # Begin and end

    def start(self) -> None:
        """Subscribe to the configured nsqds, and begin to ask lookup for others."""
        for topic in self._topics.values():
            topic.start()
        if self.lookup is not None:
            self.lookup.start(self._consumer.loop, self._consumer.supervisor)
        if self._watch is not None:
            self._watch.start(self._consumer.loop, self._consumer.supervisor, f"{self._consumer.name} topics")

    def freeze(self) -> None:
        """Make no new subscriptions and forget none; does not block."""
        self._is_stopped = True
        if self._watch is not None:
            self._watch.stop()
        for topic in self._topics.values():
            topic.freeze()

    def stop(self) -> None:
        """Ask lookup no more, after ``freeze``."""
        if self.lookup is not None:
            self.lookup.stop()

    # What lookup says

    def on_topology(self, topic: str, topology: Topology) -> None:
        known = self._topics.get(topic)
        if known is not None:
            known.on_topology(topology)

    def follow(self, found: Iterable[str], gone: Iterable[str]) -> None:
        """Take up topics that are listed now, and leave those that are listed no longer."""
        if self._is_stopped:
            return
        for name in found:
            known = self._topics.get(name)
            if known is None:
                self._consumer.logger.info("topic %s matches: consuming it", name, extra=TOPIC_MATCHED)
                known = TopicSubscriptions(self._consumer, self, name, self._positions, is_listed=True)
                self._topics[name] = known
                known.start()
            known.come_back()
        for name in gone:
            if name in self._topics:
                text = "topic %s is listed no longer: no new connection is made for it"
                self._consumer.logger.info(text, name, extra=TOPIC_LEFT)
                self._topics[name].leave()

    def configured_changed(self) -> None:
        for topic in self._topics.values():
            topic.configured_changed()

    # What topics tell

    def fail_if_hopeless(self) -> None:
        """Close the consumer when nothing can come of any of its topics, now or later."""
        # A pattern may choose another topic at any time.
        if self._watch is not None or not self._topics:
            return
        # Every topic calls this at every poll: the one that gave hope the last time most likely still does.
        if self._hopeful in self._topics and self._topics[self._hopeful].hopeless is None:
            return
        self._hopeful = next((name for name, topic in self._topics.items() if topic.hopeless is None), "")
        if not self._hopeful and (error := next(iter(self._topics.values())).hopeless) is not None:
            self._consumer.fail(error)

    def left(self, subscriptions: TopicSubscriptions) -> None:
        """A topic that lookup no longer lists has no connection any more: forget it."""
        if not self._is_stopped and self._topics.pop(subscriptions.topic, None) is not None:
            self._consumer.past.add(subscriptions.past)
            self._past_moves += subscriptions.leader_moves


class TopicSubscriptions:
    """The subscribers of one topic: which there are, how they are made, and when none can ever work.

    Args:
        owner: told what may concern other topics, too.
        is_listed: whether a pattern has chosen the topic from what lookup lists.

    Attributes:
        topic: its name.
        mode: how to subscribe, by options and what lookup has said.
        first_delay: shortest pause in seconds after a connection was lost.
        leader_moves: times that lookup named another leader of a partition.
        past: counts of the subscribers that have ended.
    """

    def __init__(
        self,
        consumer: AnyConsumer,
        owner: Subscriptions,
        topic: str,
        positions: StartPositions | None,
        is_listed: bool = False,
    ) -> None:
        config = consumer.config
        self.topic = topic
        self.mode: Mode = Mode(bool(config.ordered), consumer.connection_config.extend_support)
        self.first_delay: float = FIRST_DELAY_OF_LISTED if is_listed else FIRST_DELAY
        self.past: Counters = Counters()
        self.leader_moves: int = 0
        self._lookup = owner.lookup
        self._consumer = consumer
        self._owner = owner
        self._is_listed = is_listed
        self._is_leaving = False
        self._is_stopped = False
        self._subscribers: dict[Target, Subscriber] = {}
        self._topology = Topology()
        self._wanted: dict[Target, Nsqd | None] = {}
        self._rounds = 0
        self._leaders: dict[int, Address] = {}
        self._impossible: ConfigError | None = None
        self._told_missing: dict[str, list[int]] = {}
        self._seeks = Repeated(f"{consumer.name} seeker", self._seek)
        self._is_seeking = False
        self._returns = Repeated(f"{consumer.name} returns", self._look_for_return)
        self._return_pauses: Iterator[float] = iter(())
        self._starter = None if positions is None else Starter(consumer, topic, positions)
        self._placed = () if positions is None else tuple(positions.by_partition)

    def __iter__(self) -> Iterator[Subscriber]:
        return iter(list(self._subscribers.values()))

    def start(self) -> None:
        """Subscribe to the configured nsqds, and have lookup asked for others."""
        self._follow({})
        if self._lookup is not None:
            self._lookup.add_topic(self.topic, is_sought=not self._is_listed)

    def freeze(self) -> None:
        """Make no new subscriptions and forget none; does not block."""
        self._is_stopped = True
        self._seeks.stop()
        self._returns.stop()

    def leave(self) -> None:
        """Lookup no longer lists the topic: keep the connections that there are, and make no other."""
        if self._is_leaving or self._is_stopped or self._lookup is None:
            return
        self._is_leaving = True
        self._stop_seeking()
        self._returns.stop()
        self._lookup.remove_topic(self.topic)
        self._follow({})
        self._tell_left()

    def come_back(self) -> None:
        if self._is_leaving and not self._is_stopped:
            self._is_leaving = False
            self.start()

    def _tell_left(self) -> None:
        if self._is_leaving and not self._subscribers:
            self._owner.left(self)

    # Where the topic lives

    def nsqd_of(self, target: Target) -> Nsqd | None:
        """What lookup says of the nsqd of a target; None for one that is configured."""
        return self._wanted.get(target)

    def on_topology(self, topology: Topology) -> None:
        if self._is_stopped or self._is_leaving:
            return
        self._rounds += 1
        self._topology = topology
        if topology.is_empty and topology.meta is None:
            self.topic_is_gone()
        self._set_mode(self.mode.learn(topology.meta, self._consumer.config.ordered))
        self._follow(targets(topology, self._consumer.config.partitions, self.topic))
        for subscriber in self:
            subscriber.lookup_has_answered()
        self._retire_replaced()
        self._begin_to_seek()
        self._tell_absent(topology)
        self._owner.fail_if_hopeless()

    def topic_is_gone(self) -> None:
        """Who should know it says that there is no such topic: if it is made anew, so are its channels and logs."""
        if self._starter is not None:
            self._starter.topic_is_gone()
        self._consumer.ordered.ledger.may_begin_anew(self.topic)

    def unlearns(self, refused: Mode, error: NsqError) -> bool:
        """Whether a refusal is of headers that lookup spoke of once, and no option: the topic was made anew without."""
        is_ours = refused.extend_support and not self._consumer.connection_config.extend_support
        if not (is_ours and isinstance(error, ExtendSubForbidden)):
            return False
        self._set_mode(Mode(self.mode.ordered))
        return True

    def _set_mode(self, mode: Mode) -> None:
        if mode == self.mode:
            return
        self._consumer.logger.info("%s: subscribing with %s", self.topic, mode, extra=SUBSCRIPTION_MODE)
        self.mode = mode
        for subscriber in self:
            subscriber.mode_changed()

    def _follow(self, found: dict[Target, Nsqd]) -> None:
        chosen = self._consumer.config.partitions
        addresses = self._consumer.nsqd_addresses
        wanted = self._wanted = {**found, **dict.fromkeys(configured(addresses, chosen, found, self.topic))}
        leaders = {target.partition: target.address for target in found if target.partition is not None}
        self.leader_moves += sum(self._leaders.get(number, leader) != leader for number, leader in leaders.items())
        self._leaders.update(leaders)
        for target in wanted:
            subscriber = self._subscribers.get(target)
            if subscriber is None:
                is_led = target.partition is not None and target in found
                subscriber = self._subscribers[target] = Subscriber(self._consumer, self, target, is_led)
                subscriber.start()
            subscriber.want(Desired.KEEP)
        for subscriber in self:
            if subscriber.target not in wanted:
                subscriber.want(Desired.LEAVE)

    def configured_changed(self) -> None:
        """The consumer's ``nsqd_addresses`` are others now."""
        if not self._is_leaving:
            self._follow(targets(self._topology, self._consumer.config.partitions, self.topic))

    def _retire_replaced(self) -> None:
        live = [each.target for each in self if each.is_connected and each.target in self._wanted]
        for subscriber in self:
            if subscriber.target not in self._wanted and is_replaced(subscriber.target, live):
                subscriber.want(Desired.RETIRE)

    # Partitions that an option names although the topic does not have them: they are waited for, as it may get more

    def _tell_absent(self, topology: Topology) -> None:
        chosen = self._consumer.config.partitions
        complaint = impossible(topology, chosen)
        if complaint is not None:
            if self._impossible is None:
                self._impossible = ConfigError(f"topic {self.topic}: {complaint}")
                self._complain(logging.ERROR, self._impossible)
            return
        self._impossible = None
        for option, named, verb in (("partitions", chosen, "comes of"), ("start_position", self._placed, "is set for")):
            absent = missing(topology, named)
            if topology.meta is None or absent == self._told_missing.get(option, []):
                continue
            self._told_missing[option] = absent
            if absent:
                error = ConfigError(
                    f"{option}: topic {self.topic} has partitions 0 to {topology.meta.partition_num - 1};"
                    f" nothing {verb} {', '.join(map(str, absent))} until it has more"
                )
                self._complain(logging.WARNING, error)

    def _complain(self, level: int, error: ConfigError) -> None:
        self._consumer.logger.log(level, "%s", error, extra=PARTITIONS_MISSING)
        emit(self._consumer, "on_error", error=error)

    # Asking lookup again and again, as long as something is missing that it may know

    def _ask(self, later: float = 0.0) -> None:
        """Ask once, soon or in ``later`` seconds: what lookup said may be out of date."""
        if self._lookup is not None and not self._is_stopped and not self._is_leaving:
            self._lookup.refresh(self.topic, later)

    def _begin_to_seek(self) -> None:
        """Ask every ``SEEK_INTERVAL`` from now on, until nothing is missing. Whoever calls this has asked just now."""
        if not self._is_seeking and self._lookup is not None and not self._is_stopped and self._is_missing():
            self._is_seeking = True
            self._seeks.start(self._consumer.loop, self._consumer.supervisor, SEEK_INTERVAL)

    def _stop_seeking(self) -> None:
        self._is_seeking = False
        self._seeks.stop()

    def _seek(self, now: float) -> float | None:
        if self._is_leaving or not self._is_missing():
            self._stop_seeking()
            return None
        self._ask()
        return SEEK_INTERVAL

    def _look_for_return(self, now: float) -> float | None:
        """Ask whether an nsqd that has left is back: soon at first, then more rarely, at last by polls only."""
        self._ask()
        return next(self._return_pauses, None)

    def _is_missing(self) -> bool:
        """Whether lookup may know what some partition or subscriber needs."""
        chosen = self._consumer.config.partitions
        return not is_complete(self._topology, chosen) or any(self._wants_news(each) for each in self)

    def _wants_news(self, subscriber: Subscriber) -> bool:
        """Whether lookup may know what a subscriber needs: another leader, or another mode."""
        if subscriber.refusal is not None:
            return self._rounds < subscriber.refused_in + ROUNDS_OF_GRACE
        if subscriber.subscription.overdue_since == subscriber.connection.last_received_at:  # and silent since
            return True
        return subscriber.target.partition is not None and not subscriber.is_connected

    # What subscribers tell

    async def place(self, target: Target) -> None:
        """Set the start position of a target, the first time. Raises as ``Starter.place``."""
        if self._starter is not None:
            await self._starter.place(target, self._wanted.get(target))

    def joined(self, subscriber: Subscriber) -> None:
        consumer, connection = self._consumer, subscriber.connection
        consumer.flow.add(subscriber.subscription)
        consumer.deadlines.expect(connection.info.msg_timeout)
        if connection.auth_data is not None and is_heard(consumer, "on_auth"):
            emit(consumer, "on_auth", conn=connection, response=msgspec.json.decode(connection.auth_data))
        self._retire_replaced()

    def lost(self, subscriber: Subscriber) -> None:
        """A connection was lost, or could not be made: what lookup said may be out of date."""
        # Thousands of consumers lose an nsqd in the same moment, and lookup knows its successor later. A partition has
        # another leader soon, and nobody takes its messages until that is found.
        is_urgent = subscriber.target.partition is not None
        self._ask(0.0 if is_urgent else LOST_SPREAD * random.random())
        self._begin_to_seek()

    def refused(self, subscriber: Subscriber) -> None:
        """A subscription cannot work as it is meant; it is not tried again unless lookup says how."""
        # A round that is under way may have asked before the cause was mended: the ones after it count.
        subscriber.refused_in = self._rounds
        self._ask()
        self._begin_to_seek()
        self._owner.fail_if_hopeless()

    @property
    def hopeless(self) -> NsqError | None:
        """Why nothing can ever come of the topic; None as long as something may."""
        errors = [each.refusal for each in self]
        if not errors:
            return self._impossible
        if None in errors or (self._lookup is not None and any(map(self._wants_news, self))):
            return None
        return errors[0]

    def forget(self, subscriber: Subscriber) -> None:
        """A subscriber will make no connection any more."""
        if not self._is_stopped and self._subscribers.get(subscriber.target) is subscriber:
            del self._subscribers[subscriber.target]
            self.past.add(subscriber.counters)
            self._consumer.pools.drop(subscriber.pool)
            self._tell_left()
            # A partition is complete only with a leader, which is sought anyway.
            if self._lookup is not None and not self._is_leaving and subscriber.target.partition is None:
                text = "%s: lookup names it no longer; it is subscribed to again when lookup does"
                self._consumer.logger.info(text, subscriber.target, extra=NSQD_LEFT)
                self._return_pauses = (pause * (0.5 + random.random()) for pause in RETURN_PAUSES)
                self._returns.start(self._consumer.loop, self._consumer.supervisor, next(self._return_pauses))


class State(Enum):
    """What a subscriber is doing; see ``Subscriber``."""

    CONNECTING = auto()
    LIVE = auto()
    DRAINING = auto()
    PAUSED = auto()
    REFUSED = auto()
    ENDED = auto()


class Desired(Enum):
    """What others want of a subscriber; see there, too."""

    KEEP = auto()
    LEAVE = auto()
    RETIRE = auto()
    CLOSE = auto()


class Subscriber:
    """Keeps one target subscribed, through one connection after another.

    What it does next depends on what is desired, which others set.

        state       what it does                                            leads to
        CONNECTING  makes a connection and subscribes                       LIVE, PAUSED, REFUSED
        LIVE        messages come                                           DRAINING, PAUSED
        DRAINING    ends a connection in good order, for another's sake     CONNECTING
        PAUSED      waits before the next attempt                           CONNECTING
        REFUSED     waits until lookup gives reason to try in another way   CONNECTING
        ENDED       makes no connection any more

        desired     who desires it, and why                                 what follows
        KEEP        its topic: lookup, or an option, names the target       it stays subscribed
        LEAVE       its topic: lookup no longer names the target            LIVE goes on; what is over leads to ENDED
        RETIRE      its topic: another connection does the work             LIVE drains, then ENDED
        CLOSE       the consumer, which ends the connection by itself       ENDED

    Args:
        is_led: whether lookup named the target as the leader of a partition. Then attempts do not wait longer than
            ``LONGEST_LEADER_DELAY`` for what a change of leader brings with it.

    Attributes:
        subscription: the present one, or the last.
        state: what it is doing.
        desired: what it shall do.
        refusal: why the subscription cannot work as it is meant; None unless it was refused.
        refused_in: round of lookup in which it was.
        counters, recurring: over all connections to this target.
        pool: the workers that handle its messages; ``is_pool_shared``: and those of other connections.
        changes: wakes whoever waits for a change of its state.
        task: what passes through its states; None before it is started.
        backoff: counts the failures of its messages: its own, or that of the consumer.
        last_failure: why no connection could be made; empty while there is one.
        next_attempt_at: when the last pause between two attempts ends, or has ended.
        delivered_at: when messages came last on a connection before the present one, ``time.monotonic``; 0.0: never.
        finished_at: when a FIN was handed to the system last.
        renewed: how many times a connection was ended because nothing came of it.
    """

    delivered_at: float
    finished_at: float

    def __init__(self, consumer: AnyConsumer, owner: TopicSubscriptions, target: Target, is_led: bool = False) -> None:
        self.target = target
        self.address: Address = target.address
        self.state: State = State.CONNECTING
        self.desired: Desired = Desired.KEEP
        self.refusal: NsqError | None = None
        self.refused_in = 0
        self.counters: Counters = Counters()
        self.recurring: Recurring = Recurring()
        self.delivered_at = self.finished_at = 0.0
        self.renewed: int = 0
        self._is_mute = False
        self.is_pool_shared: bool = consumer.pools.shared is not None
        self.pool: WorkerPool = consumer.pools.shared or consumer.pools.new(1, f"worker {target}")
        self._consumer = consumer
        self._owner = owner
        longest = consumer.config.max_reconnect_delay
        self._is_led = is_led
        self._reconnect = ReconnectDelay(longest, random=random.random, base=min(longest, owner.first_delay))
        self._leader_delay = ReconnectDelay(min(longest, LONGEST_LEADER_DELAY), random=random.random)
        self._delay = self._reconnect
        self._unanswered = 0  # attempts that failed since lookup has answered
        self.last_failure: str = ""
        self.next_attempt_at: float = 0.0
        self.task: Task | None = None
        self.changes: Changes = Changes(consumer.loop)
        # Kept over connections: one that was lost is tried with one message again.
        is_own = consumer.config.backoff_scope == OF_CONNECTION
        self.backoff: Backoff = backoff_of(consumer.config) if is_own else consumer.flow.backoff
        # Never opened: what others see before the first attempt, which makes another.
        self.subscription: Subscription = Subscription(consumer, self, owner.mode)

    # Of the present connection, or the last one

    @property
    def connection(self) -> Connection:
        return self.subscription.connection

    @property
    def is_connected(self) -> bool:
        """Whether messages may arrive."""
        return self.subscription.is_live

    def doubt(self) -> None:
        """The connection is silent, or has ended although nobody wanted it to: lookup may know better than it."""
        self._owner.lost(self)

    # The states

    def start(self) -> None:
        """Connect, and again whenever the connection is lost."""
        self.task = self._consumer.supervisor.keep(f"nsq_fast subscriber {self.target}", self._run)

    async def _run(self) -> None:
        try:
            await self._pass_through_states()
        except Exception as fault:
            # Begin again without what is half done: the flow, the owner and the workers hear of its end.
            self.connection.close(ConnectionClosed(f"{self.target}: nsq_fast itself failed: {fault!r}"))
            raise
        self._owner.forget(self)
        if not self.is_pool_shared and self.desired is not Desired.CLOSE:
            self.pool.stop()

    @property
    def _is_wanted(self) -> bool:
        return self.desired is Desired.KEEP

    async def _pass_through_states(self) -> None:
        if not self._is_wanted:  # it has paused after a fault
            self.state = State.ENDED
            return
        self._consumer.flow.expect(1)
        try:
            self._enter(await self._connect())
        finally:
            self._consumer.flow.expect(-1)
        steps: dict[State, Callable[[], Awaitable[State]]] = {
            State.CONNECTING: self._connect,
            State.LIVE: self._live,
            State.DRAINING: self._drain,
            State.PAUSED: self._pause,
            State.REFUSED: self._wait_for_another_mode,
        }
        while self.state is not State.ENDED:
            self._enter(await steps[self.state]())

    def _enter(self, state: State) -> None:
        is_done = state not in (State.LIVE, State.DRAINING) and not self._is_wanted
        self.state = State.ENDED if is_done else state

    async def _connect(self) -> State:
        self.delivered_at = max(self.delivered_at, self.connection.last_message_at)
        subscription = self.subscription = Subscription(self._consumer, self, self._owner.mode)
        self._is_mute = False
        connection = subscription.connection
        try:
            await self._owner.place(self.target)
            await connection.open()
            # Lookup may have said meanwhile that the topic is gone: a SUB would make it, or the channel of a topic made
            # anew, which would not begin where ``start_position`` says.
            if not self._is_wanted:
                await self._close_connection()
                return State.PAUSED
            await subscription.subscribe()
        except NsqError as error:
            return await self._failed(error)
        if self.desired is Desired.CLOSE or not connection.is_open:
            await self._close_connection()
            return State.PAUSED
        # Only a connection that lasts makes pauses short again: one that is accepted and closed at once would be made
        # again without end.
        self._reconnect.connected(monotonic())
        self._leader_delay.connected(monotonic())
        self._delay = self._leader_delay if self._is_led else self._reconnect
        self.last_failure = ""
        subscription.begin()
        self.counters.subscriptions += 1
        consumer = self._consumer
        text, topic = "%s: subscribed to %s/%s", self.target.topic
        consumer.logger.info(text, self.target, topic, consumer.channel, extra=SUBSCRIBED)
        self._owner.joined(self)
        return State.LIVE

    async def _failed(self, error: NsqError) -> State:
        """No connection could be made, or no subscription on it."""
        if self.desired is Desired.CLOSE:
            return State.ENDED
        if isinstance(error, TopicNotExist):
            self._owner.topic_is_gone()
        is_final = isinstance(error, REFUSALS) and not self._owner.unlearns(self.subscription.mode, error)
        cause = error.__cause__ or error
        is_move = self._is_led and is_leader_move(error)
        self._delay = self._leader_delay if is_move else self._reconnect
        # A change of leader takes up to a minute of attempts, and an outage any number: the same again is no news.
        is_repeated = str(error) == self.last_failure
        self.last_failure = str(error)
        level = logging.ERROR if is_final else logging.INFO if is_repeated else logging.WARNING
        why = said_at(self.target.address, error)
        self._consumer.logger.log(level, "%s: %s", self.target, why, extra=SUBSCRIPTION_FAILED)
        emit(self._consumer, "on_error", error=error if is_final else cause)
        await self._close_connection(error)
        if not is_final:
            self._unanswered += 1
            self._owner.lost(self)
            return State.PAUSED
        self.refusal = error
        self._owner.refused(self)
        return State.REFUSED

    async def _close_connection(self, error: NsqError | None = None) -> None:
        self.connection.close(error)
        await self.connection.closed()

    async def _live(self) -> State:
        await self.changes.wait_while(
            lambda: self.is_connected and self.desired is not Desired.CLOSE and not self._is_outdated
        )
        return State.DRAINING if self.is_connected and self.desired is not Desired.CLOSE else State.PAUSED

    @property
    def _is_outdated(self) -> bool:
        """Whether the connection works, but another takes its place."""
        is_other_mode = self.subscription.mode != self._owner.mode and self.connection.session.dialect.has_partitions
        return is_other_mode or self._is_mute or self.desired is Desired.RETIRE

    async def _drain(self) -> State:
        """What the end of the consumer does for all connections, for this one."""
        deadline = monotonic() + DRAIN_TIMEOUT
        self.subscription.ask_for_the_end()
        await self.subscription.wait_for_end(deadline)
        await self._close_connection()
        return State.CONNECTING

    async def _pause(self) -> State:
        now = monotonic()
        delay = self._delay.next(now)
        self.next_attempt_at = now + delay
        await self.changes.next(delay)
        return State.CONNECTING

    async def _wait_for_another_mode(self) -> State:
        await self.changes.wait_while(lambda: self.refusal is not None and self._is_wanted)
        return State.CONNECTING

    # What others desire

    def want(self, desired: Desired) -> None:
        """Say what it shall do. CLOSE is for good, and RETIRE says more than LEAVE."""
        if self.desired in (Desired.CLOSE, desired) or (self.desired is Desired.RETIRE and desired is Desired.LEAVE):
            return
        self.desired = desired
        if desired is not Desired.KEEP:
            self.changes.set()

    def mode_changed(self) -> None:
        """Subscribe anew in the mode of now, where that makes a difference."""
        self.refusal = None
        self.changes.set()

    def lookup_has_answered(self) -> None:
        """Try at once, however long the pause has grown, where lookup was out of reach as well: the network is back."""
        # Each attempt that fails has lookup asked: where that works it answers before the next one.
        if self.state is State.PAUSED and self._unanswered > 1:
            self.changes.set()
        self._unanswered = 0

    def renew(self, reason: str) -> None:
        """Subscribe through another connection: nothing comes through this one."""
        if self.state is State.LIVE and self.is_connected:
            self._consumer.logger.warning(
                "%s: %s; making the connection anew", self.target, reason, extra=SUBSCRIPTION_RENEWED
            )
            self.renewed += 1
            self._is_mute = True
            self.changes.set()

    # Closing: the steps are those of ``ConsumerCore``, at "The end"

    def begin_closing(self) -> None:
        """Make no connection any more, ask for CLOSE_WAIT, give back what is unstarted and whatever still arrives."""
        self.want(Desired.CLOSE)
        if self.is_connected and self.state is not State.DRAINING:
            self.subscription.ask_for_the_end()

    async def close(self, timeout: float) -> None:
        """Send what is queued and close, within ``timeout`` seconds."""
        self.subscription.give_back_unstarted()
        self.connection.close(timeout=timeout)
        await self.connection.closed()
        if not self.is_pool_shared:
            self.pool.stop()

    def abandon(self, is_closed: bool) -> None:
        """The loop ends, or is closed: give back what is held, as far as that can be sent at once, and end."""
        self.desired = Desired.CLOSE
        self.state = State.ENDED
        if is_closed:
            self.subscription.let_go()
        else:
            self.subscription.abandon()

    def stats(self) -> ConnectionStats:
        is_connected = self.is_connected
        return ConnectionStats(
            address=self.address,
            is_connected=is_connected,
            rdy=self.subscription.share.rdy if is_connected else 0,
            in_flight=self.connection.in_flight if is_connected else 0,
            unstarted=len(self.subscription.inbound.waiting),
            counters=self.counters.copy(),
            partition=self.target.partition,
            topic=self.target.topic,
            backoff_level=self.backoff.level,
            backoff_left=max(0.0, self.backoff.until - monotonic()),
        )


def is_leader_move(error: NsqError) -> bool:
    """Whether a failed attempt looks like a leader that is gone or not ready yet, and not like a refusal of its own."""
    cause = error.__cause__ or error
    if isinstance(cause, ServerError):
        return cause.stale_topology
    return isinstance(cause, (ConnectionLost, ConnectionError, HttpError, TimeoutError))


# The flow of messages into a consumer: RDY over all its connections, backoff, and what handlers can take on.
#
# ``protocol.rdy`` decides; ``Flow`` sends what it decided. It recomputes when something happened: a connection came or
# went, max_in_flight or the backoff changed, a timer is due. Never per message: while some connection waits for others
# to answer their messages, it is once per batch of answers.
#
# Results of messages come from ``Subscription``: a FIN that was sent is a success, a REQ that counts is a failure, a
# lost connection one of its own backoff. So a probe, the one message that is asked for after a pause, needs no mark.
#
# A message that waits longer than its timeout is taken back by nsqd, delivered again, and its attempt is lost. So no
# more messages are asked for than the workers handle in a part of the timeout, at the speed that was measured
# (``Load``).


OVERDUE_PAUSE = 0.5
"""Messages of lost connections, and handlers that run too long, are looked after so often, in seconds."""


def backoff_of(config: ConsumerConfig) -> Backoff:
    return Backoff(config.max_backoff_duration, random=random.random, strategy=config.backoff_strategy)


class Flow(Repeated):
    """Keeps the sum of max(RDY, in flight) over its members at or below ``max_in_flight``.

    Attributes:
        is_paused: whether RDY 0 was asked for.
        sharing: how ``max_in_flight`` is shared out; says whether some connection waits for what others still hold.
        backoff: of all connections. A connection may have one of its own instead.
    """

    def __init__(self, consumer: AnyConsumer) -> None:
        super().__init__(f"{consumer.name} flow", self.update)
        config = consumer.config
        self._consumer = consumer
        self.backoff: Backoff = backoff_of(config)
        self.is_paused = False
        self._idle_timeout = config.low_ready_idle_timeout
        self.sharing: Sharing = Sharing(self._idle_timeout, random.random)
        self._pools = consumer.pools
        self._members: list[Subscription] = []
        self._expected = 0
        self._log = consumer.logger
        self._has_warned_of_turns = False
        self._has_warned_of_handlers = False
        self.changed: Callable[[], None] = self.ask  # recompute soon

    def expect(self, count: int) -> None:
        """Keep room for ``count`` more connections (or fewer) that are being made for the first time.

        So the first to be there does not take what the others must then wait for.
        """
        self._expected += count
        self.changed()

    def add(self, member: Subscription) -> None:
        """Give a connection that has just subscribed its share."""
        member.share.turn_at = member.share.active_at = monotonic()
        self._members.append(member)
        self.changed()

    def remove(self, member: Subscription) -> None:
        if member in self._members:
            self._members.remove(member)
            self.changed()

    def result(self, success: bool, backoff: Backoff) -> None:
        """Count the result of a message for a backoff: that of all connections, or of one."""
        now = monotonic()
        if not backoff.record(success, now):
            return
        if backoff.is_on:
            text = "backoff level %d: pausing%s for %.3g s"
            self._log.warning(text, backoff.level, self._name_of(backoff), backoff.until - now, extra=BACKOFF_BEGAN)
        else:
            self._log.info("backoff%s is over", self._name_of(backoff), extra=BACKOFF_ENDED)
        self.changed()

    def _name_of(self, backoff: Backoff) -> str:
        """Which connection a backoff is of; empty for that of all."""
        own = [member for member in self._members if member.backoff is backoff is not self.backoff]
        return "".join(f" of {member.connection.address}" for member in own)

    @property
    def max_in_flight(self) -> int:
        """Messages that may be held at once: what the option says, else one a connection, and no fewer than handlers.

        With one a connection alone, most of the handlers that were asked for would never run.
        """
        config = self._consumer.config
        if config.max_in_flight is None:
            return max(config.handlers or 1, len(self._members) + self._expected)
        return config.max_in_flight

    @property
    def is_starved(self) -> bool:
        """Whether handlers hold (almost) as many messages of any connection as it may get.

        Messages that are here and wait for a handler do not count: there is more to be had without answering any.
        """
        return any(rdy.is_starved(member.begun, member.share.rdy) for member in self._members)

    def update(self, now: float) -> float | None:
        """Send the RDYs that may be sent now; return the seconds until this must be called again, None for never."""
        members = list(self._members)
        shares = [member.share for member in members]
        for member in members:
            member.share.in_flight = member.connection.in_flight
            member.share.active_at = max(member.share.active_at, member.connection.last_message_at)
            member.share.capacity = member.capacity
        overdue = self._pools.overdue
        allowed = max(0, self.max_in_flight - overdue)
        usual = min(allowed, self._pools.capacity_of(self._pools.shared))
        limit = 0 if self.is_paused else self.backoff.limit(usual, allowed, now)
        self._warn(shares, allowed)
        held_back = [member for member in members if member.backoff is not self.backoff and member.backoff.is_on]
        for member in held_back:
            capacity = member.share.capacity
            member.share.capacity = member.backoff.limit(capacity, capacity, now)
        changes = self.sharing.changes(shares, limit, allowed, now, self._expected)
        # RDY is a ceiling, not a credit: nsqd sends while fewer are in flight (nsqio/nsq: nsqd/client_v2.go,
        # IsReadyForMessages). So a share that is taken away is free only when its messages are responded to.
        for index, count in changes:
            self._send(members[index], count, now)
        pause = self.sharing.next_look(shares, [self.backoff, *(each.backoff for each in held_back)], limit, now)
        return pause if not overdue else min(OVERDUE_PAUSE, pause or OVERDUE_PAUSE)

    def _warn(self, shares: list[rdy.Share], allowed: int) -> None:
        """Say once each what keeps messages from coming as the options have it."""
        connections = len(shares) + self._expected
        if 0 < self.max_in_flight < connections and not self._has_warned_of_turns:
            self._has_warned_of_turns = True
            turns = (connections - 1) // self.max_in_flight  # before that of the last, none of which may be quiet
            self._log.warning(
                "max_in_flight=%d is less than the number of connections, %d: they take turns, and messages of the"
                " others wait for up to %d s; leave max_in_flight out, or set it to %d at least",
                self.max_in_flight, connections, math.ceil(turns * rdy.HOLD_FACTOR * self._idle_timeout), connections,
                extra=MAX_IN_FLIGHT_LOW,
            )  # fmt: skip
        if self._has_warned_of_handlers:
            return
        capacity = min(self._pools.capacity_of(self._pools.shared), sum(share.capacity for share in shares))
        if 0 < capacity < allowed and self._pools.pace:
            self._has_warned_of_handlers = True
            self._log.warning(
                "handlers are too slow for max_in_flight=%d: at %.3g s a message they begin with no more than %d in"
                " time, before msg_timeout=%.3g s is over; asking for that many; set max_in_flight lower, or"
                " concurrency or msg_timeout higher",
                self.max_in_flight, self._pools.pace, capacity, self._pools.msg_timeout, extra=MAX_IN_FLIGHT_HIGH,
            )  # fmt: skip

    def _send(self, member: Subscription, count: int, now: float) -> None:
        try:
            member.connection.set_rdy(count)
        except NsqError:
            return  # it is lost; its owner will hear of it and remove it
        member.share.sent(count, now)
