"""Topics that move to another cluster: where a consumer takes their messages from, until the old cluster is empty.

Each has subscriptions in the new cluster, beside or in place of those in the
consumer's own. The own cluster is empty when its nsqds have no message of the
channel, neither waiting nor in flight, twice in a row; they are asked by HTTP,
and asked on: a message that comes late is consumed, too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Protocol

from gevent import sleep

from nsq_fast.errors import NsqError
from nsq_fast.log_events import TOPIC_MOVED, TOPIC_MOVING
from nsq_fast.protocol.topology import Topology
from nsq_fast.runtime.supervised import Loop

from .stats import Counters
from .subscriber import Subscriber, Wish
from .topic_subscriptions import TopicSubscriptions

if TYPE_CHECKING:
    from nsq_fast.protocol.dynamic_config import Route
    from nsq_fast.runtime.lookup import LookupPoller

    from .context import Context

LOOK_INTERVAL = 1.0
"""Seconds between two looks at whether the old cluster is empty."""
_EMPTY_LOOKS = 2
_LOOKS_BETWEEN = 10
"""Of so many looks one is at an old cluster that was empty: a message may come late."""


if TYPE_CHECKING:

    class OwnTopics(Protocol):
        """The topics of a consumer in its own cluster; a ``Subscriptions``."""

        lookup: LookupPoller | None

        @property
        def topics(self) -> tuple[str, ...]:
            """Their names."""

        def of_topic(self, topic: str) -> TopicSubscriptions:
            """The subscriptions of one."""


class _Moved:
    """One topic that moves."""

    def __init__(self, topic: str, route: Route, log: logging.Logger) -> None:
        self.topic = topic
        self.route = route
        self._log = log
        self.lookup: LookupPoller | None = None
        self.subscriptions: TopicSubscriptions | None = None
        self.empty_looks = 0
        self.is_old_left = False
        self._told: set[str] = set()

    @property
    def is_old_empty(self) -> bool:
        """Whether nothing is left in the old cluster, and nobody should publish there any more."""
        return self.route.percent >= 100.0 and self.empty_looks >= _EMPTY_LOOKS

    @property
    def takes_old(self) -> bool:
        """Whether messages of the old cluster are wanted."""
        return self.route.consume != "new" and not self.is_old_empty

    @property
    def takes_new(self) -> bool:
        """Whether messages of the new cluster are wanted."""
        return self.route.consume != "old_first" or self.is_old_empty

    def tell(self, text: str, *values: object) -> None:
        """Log where it is consumed from."""
        self._log.warning(f"topic %s {text}", self.topic, *values, extra=TOPIC_MOVING)

    def tell_once(self, text: str, cause: str = "") -> None:
        """Log something that may stay so; ``cause``, which may differ, is that of the first time."""
        if text not in self._told:
            self._told.add(text)
            self.tell("%s%s", text, cause)


class MovedTopics:
    """The topics of a consumer that move."""

    def __init__(self, consumer: Context, own: OwnTopics) -> None:
        self._consumer = consumer
        self._own = own
        self._moved: dict[str, _Moved] = {}
        self._left: list[TopicSubscriptions] = []
        self._wanted: Mapping[str, Route] = {}
        self._loop: Loop | None = None
        self._is_started = False
        if consumer.lookup_config.config_source is not None:  # without one no topic moves
            from .old_cluster import messages_left

            self._messages_left = messages_left

    def __iter__(self) -> Iterator[Subscriber]:
        return (subscriber for each in self._all() for subscriber in each)

    def __contains__(self, topic: str) -> bool:
        return topic in self._moved

    def _all(self) -> list[TopicSubscriptions]:
        found = [each.subscriptions for each in list(self._moved.values()) if each.subscriptions is not None]
        return [*found, *self._left]

    def past(self) -> Mapping[str, Counters]:
        """Counts of the subscribers in new clusters that have ended, by topic."""
        return {each.topic: each.past.copy() for each in self._all()}

    @property
    def leader_moves(self) -> int:
        """Times that lookup of new clusters named another leader of a partition."""
        return sum(each.leader_moves for each in self._all())

    def follow(self, routes: Mapping[str, Route]) -> None:
        """Do what a document says of the consumer's topics. Does not block."""
        self._wanted = routes
        if self._is_started:
            self._apply()

    def start(self) -> None:
        """Begin to consume from new clusters."""
        self._is_started = True
        self._apply()

    def freeze(self) -> None:
        """Make no new subscriptions and forget none; does not block."""
        self._is_started = False
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.kill(block=False)
        for each in self._all():
            each.freeze()

    def stop(self) -> None:
        """Ask lookup no more, after ``freeze``."""
        for each in self._moved.values():
            if each.lookup is not None:
                each.lookup.stop()

    # What a document says

    def _apply(self) -> None:
        wanted = {topic: self._wanted[topic] for topic in self._own.topics if topic in self._wanted}
        for topic in [topic for topic in self._moved if topic not in wanted]:
            self._leave_new(self._moved.pop(topic))
            self._take_old(topic)
        for topic, route in wanted.items():
            self._apply_route(topic, route)
        if self._wanted and self._loop is None:
            self._loop = self._consumer.supervisor.loop(f"{self._consumer.name} moved topics", self._look_on)
            self._loop.start()

    def _apply_route(self, topic: str, route: Route) -> None:
        moved = self._moved.get(topic)
        if moved is None or set(moved.route.lookupds) != set(route.lookupds):
            is_old_left = _is_old_left(self._moved, topic)
            if moved is not None:
                self._leave_new(moved)
            moved = self._moved[topic] = _Moved(topic, route, self._consumer.logger)
            moved.is_old_left = is_old_left
        elif moved.route != route:
            moved.route, moved.empty_looks = route, 0
        self._settle(topic, moved)

    def _settle(self, topic: str, moved: _Moved) -> None:
        """Consume from where messages are wanted from now, and from nowhere else."""
        if moved.takes_new and moved.subscriptions is None:
            self._take_new(topic, moved)
        elif not moved.takes_new:
            self._leave_new(moved)
        if moved.takes_old and moved.is_old_left:
            moved.is_old_left = False
            self._take_old(topic)
        elif not moved.takes_old and not moved.is_old_left:
            moved.is_old_left = True
            self._consumer.logger.warning("topic %s is consumed from its new cluster only", topic, extra=TOPIC_MOVED)
            old = self._own.of_topic(topic)
            old.leave()
            _retire(old)

    def _take_old(self, topic: str) -> None:
        if topic in self._own.topics:
            self._own.of_topic(topic).come_back()

    def _take_new(self, topic: str, moved: _Moved) -> None:
        from nsq_fast.runtime.lookup import LookupPoller  # what tells whether the old cluster is empty has loaded it

        consumer, lookupds = self._consumer, list(moved.route.lookupds)

        def learn(topic: str, topology: Topology) -> None:
            found.on_topology(topology)

        moved.lookup = LookupPoller(lookupds, consumer.lookup_config, "r", learn, consumer.supervisor)
        found = TopicSubscriptions(consumer, self, moved.lookup, topic, None, False, cluster=",".join(lookupds))
        moved.subscriptions = found
        moved.tell("is consumed from its new cluster, too: %s", ", ".join(lookupds))
        found.start()
        moved.lookup.start()

    def _leave_new(self, moved: _Moved) -> None:
        found, moved.subscriptions = moved.subscriptions, None
        lookup, moved.lookup = moved.lookup, None
        if found is None:
            return
        self._left.append(found)
        found.leave()
        _retire(found)
        if lookup is not None:
            lookup.stop()

    # What is left in the old cluster

    def _look_on(self) -> None:
        for number in count():
            self._apply()  # a pattern may have chosen a topic meanwhile
            for topic, moved in list(self._moved.items()):
                if moved.route.consume == "both" and self._own.of_topic(topic).mode.ordered:
                    moved.tell_once("may be handled out of order where its keys move; old_first keeps the order")
                is_due = not moved.is_old_left or number % _LOOKS_BETWEEN == 0
                if is_due and moved.route.consume != "new" and moved.route.percent >= 100.0:
                    self._look(topic, moved)
            sleep(LOOK_INTERVAL)

    def _look(self, topic: str, moved: _Moved) -> None:
        route = moved.route
        left: int | None = None
        try:
            channel, config = self._consumer.channel, self._consumer.lookup_config
            is_left = partial(_is_old_left, self._moved, topic)
            left = self._messages_left(self._own.lookup, topic, channel, config, is_left)
        except NsqError as error:
            moved.tell_once("may be in its old cluster, too: it cannot be told whether that is empty", f": {error}")
        if self._moved.get(topic) is not moved or moved.route is not route:
            return  # another document has come meanwhile
        if left == 0:
            moved.empty_looks += 1
        elif left is not None:
            if moved.is_old_empty:
                moved.tell("is consumed from its old cluster again: %d messages have come there", left)
            moved.empty_looks = 0
        self._settle(topic, moved)

    # What the subscriptions in new clusters tell

    def fail_if_hopeless(self) -> None:
        """The own cluster decides whether the consumer goes on."""

    def left(self, subscriptions: TopicSubscriptions) -> None:
        """A topic that does not move any more has no connection to the new cluster."""
        if subscriptions in self._left and self._is_started:
            self._left.remove(subscriptions)
            self._consumer.past.add(subscriptions.past)


def _is_old_left(moved: Mapping[str, _Moved], topic: str) -> bool:
    return topic in moved and moved[topic].is_old_left


def _retire(subscriptions: TopicSubscriptions) -> None:
    """End its connections in good order."""
    for subscriber in subscriptions:
        subscriber.set_wish(Wish.RETIRE)
