"""The subscriptions of one topic: which there are, how they are made, and when none can ever work.

Lookup says where the topic lives; each target (an nsqd, or a partition that it
leads) gets a ``Subscriber``. A partition that moves gets a new one at once; the
old one ends when the new one is there, or when its connection does. As long as
a partition has no connection, lookup is asked again and again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import msgspec

from nsq_fast.errors import NsqError
from nsq_fast.log_events import SUBSCRIPTION_MODE
from nsq_fast.names import Address
from nsq_fast.protocol.lookup_schedule import lost_pause
from nsq_fast.protocol.targets import Mode, Target, configured, is_complete, is_replaced, targets
from nsq_fast.protocol.topology import Nsqd, Topology
from nsq_fast.runtime.signals import emit, is_heard

from .absent import AbsentPartitions
from .seeker import Seeker
from .stats import Counters
from .subscriber import Subscriber, Wish

if TYPE_CHECKING:
    from nsq_fast.protocol.position import StartPositions
    from nsq_fast.runtime.lookup import LookupPoller

    from .context import Context
    from .positions import Starter

ROUNDS_OF_GRACE = 2
"""Rounds of lookup after a refusal: the first may have been on its way before, the second knows what changed."""


FIRST_DELAY = 0.1
FIRST_DELAY_OF_LISTED = 1.0
"""Shortest pauses in seconds before a connection is made again. A topic that was chosen by a pattern may have been
deleted, which ends its connections, and a new SUB would create it again (nsqio/nsq: nsqd/protocol_v2.go, SUB): lookup
has time to say so first."""


if TYPE_CHECKING:

    class Owner(Protocol):
        """All topics of a consumer; a ``Subscriptions``."""

        def fail_if_hopeless(self) -> None:
            """Something has become hopeless for a topic: see whether that holds for all."""

        def left(self, subscriptions: TopicSubscriptions) -> None:
            """A topic that lookup no longer lists has no connection any more."""


class TopicSubscriptions:
    """The subscribers of one topic.

    Args:
        owner: told what may concern other topics, too.
        lookup: asked about the topic; None where nsqds are configured only.
        is_listed: whether a pattern has chosen the topic from what lookup lists.
        cluster: names another cluster than the consumer's own, whose configured nsqds are none of this one.

    Attributes:
        topic: its name.
        mode: how to subscribe, by options and what lookup has said.
        first_delay: shortest pause in seconds after a connection was lost.
        leader_moves: times that lookup named another leader of a partition.
        past: counts of the subscribers that have ended.
    """

    def __init__(
        self,
        consumer: Context,
        owner: Owner,
        lookup: LookupPoller | None,
        topic: str,
        positions: StartPositions | None,
        is_listed: bool,
        cluster: str = "",
    ) -> None:
        config = consumer.config
        self.topic = topic
        self.mode = Mode(bool(config.ordered), consumer.connection_config.extend_support)
        self.first_delay = FIRST_DELAY_OF_LISTED if is_listed else FIRST_DELAY
        self.past = Counters()
        self._cluster = cluster
        self._lookup = lookup
        self._consumer = consumer
        self._owner = owner
        self._is_listed = is_listed
        self._is_leaving = False
        self._subscribers: dict[Target, Subscriber] = {}
        self._topology = Topology()
        self._wanted: dict[Target, Nsqd | None] = {}
        self._rounds = 0
        self.leader_moves = 0
        self._leaders: dict[int, Address] = {}
        self._absent = AbsentPartitions(consumer, topic)
        self._is_stopped = False
        self._starter: Starter | None = None
        if positions is not None:
            from .positions import Starter  # most consumers have no start_position

            timeout = consumer.lookup_config.lookupd_timeout
            policy = config.start_position_policy
            self._starter = Starter(topic, consumer.channel, positions, policy, timeout, consumer.logger)
        self._seeker = Seeker(lookup, topic, self._is_missing, consumer.supervisor, f"{consumer.name} seeker")

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
        self._seeker.stop()

    def leave(self) -> None:
        """Lookup no longer lists the topic: keep the connections that there are, and make no other."""
        if self._is_leaving or self._is_stopped or self._lookup is None:
            return
        self._is_leaving = True
        self._seeker.stop()
        self._lookup.remove_topic(self.topic)
        self._follow({})
        self._tell_left()

    def come_back(self) -> None:
        """Lookup lists the topic again."""
        if self._is_leaving and not self._is_stopped:
            self._is_leaving = False
            self._seeker.resume()
            self.start()

    def _tell_left(self) -> None:
        if self._is_leaving and not self._subscribers:
            self._owner.left(self)

    # Where the topic lives

    def on_topology(self, topology: Topology) -> None:
        """Follow what lookup says now."""
        if self._is_stopped or self._is_leaving:
            return
        self._rounds += 1
        self._topology = topology
        self._learn(topology)
        chosen = self._consumer.config.partitions
        self._follow(targets(topology, chosen, self.topic, self._cluster))
        self._retire_replaced()
        self._seeker.seek()
        self._absent.report(topology)
        self._owner.fail_if_hopeless()

    def _learn(self, topology: Topology) -> None:
        mode = self.mode.learn(topology.meta, self._consumer.config.ordered)
        if mode == self.mode:
            return
        self._consumer.logger.info("%s: subscribing with %s", self.topic, mode, extra=SUBSCRIPTION_MODE)
        self.mode = mode
        for subscriber in self:
            subscriber.mode_changed()

    def _follow(self, found: dict[Target, Nsqd]) -> None:
        chosen = self._consumer.config.partitions
        addresses = () if self._cluster else self._consumer.nsqd_addresses
        wanted = self._wanted = {**found, **dict.fromkeys(configured(addresses, chosen, found, self.topic))}
        leaders = {target.partition: target.address for target in found if target.partition is not None}
        self.leader_moves += sum(self._leaders.get(number, leader) != leader for number, leader in leaders.items())
        self._leaders.update(leaders)
        for target in wanted:
            subscriber = self._subscribers.get(target)
            if subscriber is None:
                is_led = target.partition is not None and target in found
                subscriber = self._subscribers[target] = Subscriber(
                    self._consumer, self, target, self._consumer.workers.shared, is_led
                )
                subscriber.start()
            subscriber.set_wish(Wish.KEEP)
        for subscriber in self:
            if subscriber.target not in wanted:
                subscriber.set_wish(Wish.LEAVE)

    def configured_changed(self) -> None:
        """The consumer's ``nsqd_addresses`` are others now."""
        if not self._is_leaving:
            self._follow(targets(self._topology, self._consumer.config.partitions, self.topic, self._cluster))

    def place(self, target: Target) -> None:
        """Set the start position of a target, the first time. Raises as ``Starter.place``."""
        if self._starter is not None:
            self._starter.place(target, self._wanted.get(target))

    def _retire_replaced(self) -> None:
        live = [each.target for each in self if each.is_connected and each.target in self._wanted]
        for subscriber in self:
            if subscriber.target not in self._wanted and is_replaced(subscriber.target, live):
                subscriber.set_wish(Wish.RETIRE)

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

    def joined(self, subscriber: Subscriber) -> None:
        """A connection is subscribed."""
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
        self._seeker.ask(0.0 if is_urgent else lost_pause(random.random()))
        self._seeker.seek()

    def refused(self, subscriber: Subscriber) -> None:
        """A subscription cannot work as it is meant; it is not tried again unless lookup says how."""
        # A round that is under way may have asked before the cause was mended: the ones after it count.
        subscriber.refused_in = self._rounds
        self._seeker.ask()
        self._seeker.seek()
        self._owner.fail_if_hopeless()

    @property
    def hopeless(self) -> NsqError | None:
        """Why nothing can ever come of the topic; None as long as something may."""
        errors = [each.refusal for each in self]
        if not errors:
            return self._absent.impossible
        if None in errors or (self._lookup is not None and any(map(self._wants_news, self))):
            return None
        return errors[0]

    def forget(self, subscriber: Subscriber) -> None:
        """A subscriber will make no connection any more."""
        if not self._is_stopped and self._subscribers.get(subscriber.target) is subscriber:
            del self._subscribers[subscriber.target]
            self.past.add(subscriber.counters)
            self._consumer.workers.drop(subscriber.pool)
            self._tell_left()
