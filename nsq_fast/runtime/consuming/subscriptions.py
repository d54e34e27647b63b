"""All subscriptions of a consumer: those of each of its topics, which are chosen by name or by a pattern."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

from nsq_fast.log_events import TOPIC_LEFT, TOPIC_MATCHED
from nsq_fast.protocol.topic_choice import TopicChoice
from nsq_fast.protocol.topology import Topology

from .moved_topics import MovedTopics
from .stats import Counters
from .subscriber import Subscriber
from .topic_subscriptions import TopicSubscriptions

if TYPE_CHECKING:
    from nsq_fast.protocol.position import StartPositions
    from nsq_fast.runtime.lookup import LookupPoller

    from .context import Context
    from .topic_watch import TopicWatch


class Subscriptions:
    """The topics of one consumer, and their subscribers.

    Args:
        choice: which topics.
        positions: where the channel begins, in each topic.

    Attributes:
        lookup: asked about all topics; None where nsqds are configured only.
        moved: those of them that move to other clusters, and their subscribers there.
    """

    def __init__(self, consumer: Context, choice: TopicChoice, positions: StartPositions | None) -> None:
        self.lookup: LookupPoller | None = None
        self._consumer = consumer
        config, supervisor = consumer.lookup_config, consumer.supervisor
        self._positions = positions
        self._watch: TopicWatch | None = None
        self._is_stopped = False
        self._past_moves = 0
        self._hopeful = ""
        if consumer.lookupd_addresses:
            from nsq_fast.runtime.lookup import LookupPoller  # not needed where nsqds are configured

            self.lookup = LookupPoller(consumer.lookupd_addresses, config, "r", self.on_topology, supervisor)
            if choice.pattern is not None:
                from .topic_watch import TopicWatch  # most consumers name their topics

                self._watch = TopicWatch(self.lookup.lister, choice, config, self.follow, supervisor, consumer.logger)
        self.moved = MovedTopics(consumer, self)
        self._topics = {name: self._new(name, is_listed=False) for name in choice.names}

    def _new(self, topic: str, is_listed: bool) -> TopicSubscriptions:
        return TopicSubscriptions(self._consumer, self, self.lookup, topic, self._positions, is_listed)

    def __iter__(self) -> Iterator[Subscriber]:
        own = (subscriber for topic in list(self._topics.values()) for subscriber in topic)
        return chain(own, self.moved)

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that are consumed now."""
        return tuple(self._topics)

    @property
    def leader_moves(self) -> int:
        """Times that lookup named another leader of a partition."""
        own = sum(topic.leader_moves for topic in list(self._topics.values()))
        return self._past_moves + own + self.moved.leader_moves

    def past(self) -> dict[str, Counters]:
        """Counts of the subscribers that have ended, for each topic that is consumed now."""
        found = {name: topic.past.copy() for name, topic in list(self._topics.items())}
        for name, counters in self.moved.past().items():
            found.setdefault(name, Counters()).add(counters)
        return found

    def of_topic(self, topic: str) -> TopicSubscriptions:
        """The subscriptions of a topic that is consumed now. Raises KeyError."""
        return self._topics[topic]

    # Begin and end

    def start(self) -> None:
        """Subscribe to the configured nsqds, and begin to ask lookup for others."""
        for topic in self._topics.values():
            topic.start()
        if self.lookup is not None:
            self.lookup.start()
        if self._watch is not None:
            self._watch.start(f"{self._consumer.name} topics")
        self.moved.start()

    def freeze(self) -> None:
        """Make no new subscriptions and forget none; does not block."""
        self._is_stopped = True
        if self._watch is not None:
            self._watch.stop()
        for topic in self._topics.values():
            topic.freeze()
        self.moved.freeze()

    def stop(self) -> None:
        """Ask lookup no more, after ``freeze``."""
        self.moved.stop()
        if self.lookup is not None:
            self.lookup.stop()

    # What lookup says

    def on_topology(self, topic: str, topology: Topology) -> None:
        """Follow where a topic lives now."""
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
                self._topics[name] = known = self._new(name, is_listed=True)
                known.start()
            known.come_back()
        for name in gone:
            if name in self._topics:
                text = "topic %s is listed no longer: no new connection is made for it"
                self._consumer.logger.info(text, name, extra=TOPIC_LEFT)
                self._topics[name].leave()

    def configured_changed(self) -> None:
        """The consumer's ``nsqd_addresses`` are others now."""
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
        if subscriptions.topic in self.moved:
            return  # it may come back
        if not self._is_stopped and self._topics.pop(subscriptions.topic, None) is not None:
            self._consumer.past.add(subscriptions.past)
            self._past_moves += subscriptions.leader_moves
