"""All subscriptions of a consumer: which there are, how they are made, and when none can ever work.

Lookup says where the topic lives; each target (an nsqd, or a partition that it
leads) gets a ``Subscriber``. A partition that moves gets a new one at once; the
old one ends when the new one is there, or when its connection does. As long as
a partition has no connection, lookup is asked again and again.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from nsq_fast.errors import ConfigError
from nsq_fast.log_events import SUBSCRIPTION_MODE
from nsq_fast.names import Address
from nsq_fast.protocol.position import StartPositions
from nsq_fast.protocol.targets import Mode, Target, impossible, is_complete, targets
from nsq_fast.protocol.topology import Nsqd, Topology
from nsq_fast.runtime.lookup import LookupPoller
from nsq_fast.runtime.signals import emit, is_heard

from .absent import AbsentPartitions
from .context import Context
from .positions import Starter
from .seeker import Seeker
from .subscriber import Subscriber, Wish

ROUNDS_OF_GRACE = 2
"""Rounds of lookup after a refusal: the first may have been on its way before, the second knows what changed."""


class Subscriptions:
    """The subscribers of one consumer.

    Attributes:
        mode: how to subscribe, by options and what lookup has said.
        leader_moves: times that lookup named another leader of a partition.
    """

    def __init__(self, consumer: Context, positions: StartPositions | None) -> None:
        config = consumer.config
        self.mode = Mode(bool(config.ordered), consumer.connection_config.extend_support)
        self.lookup: LookupPoller | None = None
        self._consumer = consumer
        self._subscribers: dict[Target, Subscriber] = {}
        self._topology = Topology()
        self._wanted: dict[Target, Nsqd | None] = {}
        self._rounds = 0
        self.leader_moves = 0
        self._leaders: dict[int, Address] = {}
        self._absent = AbsentPartitions(consumer)
        self._is_stopped = False
        self._starter: Starter | None = None
        if positions is not None:
            timeout = consumer.lookup_config.lookupd_timeout
            policy = config.start_position_policy
            self._starter = Starter(consumer.topic, consumer.channel, positions, policy, timeout, consumer.logger)
        if consumer.lookupd_addresses:
            self.lookup = LookupPoller(
                consumer.lookupd_addresses, consumer.lookup_config, "r", self.on_topology, consumer.supervisor
            )
        self._seeker = Seeker(
            self.lookup, consumer.topic, self._is_missing, consumer.supervisor, f"{consumer.name} seeker"
        )

    def __iter__(self) -> Iterator[Subscriber]:
        return iter(list(self._subscribers.values()))

    def start(self) -> None:
        """Subscribe to the configured nsqds, and begin to ask lookup for others."""
        self._follow({})
        if self.lookup is not None:
            self.lookup.add_topic(self._consumer.topic)
            self.lookup.start()

    def freeze(self) -> None:
        """Make no new subscriptions and forget none; does not block."""
        self._is_stopped = True
        self._seeker.stop()

    def stop(self) -> None:
        """Ask lookup no more, after ``freeze``."""
        if self.lookup is not None:
            self.lookup.stop()

    # Where the topic lives

    def on_topology(self, topic: str, topology: Topology) -> None:
        """Follow what lookup says now."""
        if self._is_stopped:
            return
        self._rounds += 1
        self._topology = topology
        self._learn(topology)
        chosen = self._consumer.config.partitions
        self._follow(targets(topology, chosen))
        self._retire_replaced()
        self._seeker.seek()
        complaint = impossible(topology, chosen)
        if complaint is not None and not self._subscribers:
            self._consumer.fail(ConfigError(complaint))
        else:
            self._absent.report(topology)
        self._fail_if_hopeless()

    def _learn(self, topology: Topology) -> None:
        mode = self.mode.learn(topology.meta, self._consumer.config.ordered)
        if mode == self.mode:
            return
        self._consumer.logger.info("%s: subscribing with %s", self._consumer.topic, mode, extra=SUBSCRIPTION_MODE)
        self.mode = mode
        for subscriber in self:
            subscriber.mode_changed()

    def _follow(self, found: dict[Target, Nsqd]) -> None:
        wanted = self._wanted = {**found, **dict.fromkeys(self._configured(found))}
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

    def _configured(self, found: dict[Target, Nsqd]) -> Iterator[Target]:
        """The targets that stand in the options, save those of which lookup knows better."""
        # A configured nsqd that leads partitions would be subscribed to twice: plainly, and for each partition.
        leaders = {target.address for target in found if target.partition is not None}
        led = {target.partition for target in found}
        for address in self._consumer.nsqd_addresses:
            for partition in self._consumer.config.partitions or (None,):
                if address not in leaders if partition is None else partition not in led:
                    yield Target(address, partition)

    def configured_changed(self) -> None:
        """The consumer's ``nsqd_addresses`` are others now."""
        self._follow(targets(self._topology, self._consumer.config.partitions))

    def place(self, target: Target) -> None:
        """Set the start position of a target, the first time. Raises as ``Starter.place``."""
        if self._starter is not None:
            self._starter.place(target, self._wanted.get(target))

    def _retire_replaced(self) -> None:
        for subscriber in self:
            if subscriber.target not in self._wanted and self._is_replaced(subscriber.target):
                subscriber.set_wish(Wish.RETIRE)

    def _is_replaced(self, target: Target) -> bool:
        """Whether a live connection does what that of ``target`` does."""
        for other in self:
            if other.is_connected and other.target in self._wanted and other.target.partition is not None:
                if target.partition is None and other.target.address == target.address:
                    return True
                if other.target.partition == target.partition:
                    return True
        return False

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
        self._seeker.ask()
        self._seeker.seek()

    def refused(self, subscriber: Subscriber) -> None:
        """A subscription cannot work as it is meant; it is not tried again unless lookup says how."""
        # A round that is under way may have asked before the cause was mended: the ones after it count.
        subscriber.refused_in = self._rounds
        self._seeker.ask()
        self._seeker.seek()
        self._fail_if_hopeless()

    def _fail_if_hopeless(self) -> None:
        errors = [each.refusal for each in self]
        if not errors or None in errors:
            return
        if self.lookup is not None and any(map(self._wants_news, self)):
            return
        error = errors[0]
        if error is not None:
            self._consumer.fail(error)

    def forget(self, subscriber: Subscriber) -> None:
        """A subscriber will make no connection any more."""
        if not self._is_stopped and self._subscribers.get(subscriber.target) is subscriber:
            del self._subscribers[subscriber.target]
            self._consumer.past.add(subscriber.counters)
            self._consumer.workers.drop(subscriber.pool)
