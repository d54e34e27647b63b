"""The clusters that a producer publishes to: its own, and those that topics move to.

Each is a ``Delivery`` with links and lookup of its own. While a topic moves, its
publishes are shared out between two of them. When the shares change, publishes
with a key or a partition are held back until all that were on their way then
have ended: a key that has moved is not published to the new cluster before what
was published to the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any

from nsq_fast.names import check_topic
from nsq_fast.protocol.gradation import Gradation

from .compose import Extras
from .delivery import Delivery
from .destination import HeldQueue
from .publish import Publish
from .topic_route import TopicRoute

if TYPE_CHECKING:
    from nsq_fast.protocol.dynamic_config import Route

_LOOK_AGAIN = 0.01
"""Seconds between two looks at what is on its way."""


class _Share:
    """A topic that moves: where to, and which of its publishes."""

    def __init__(self, target: Delivery, route: Route) -> None:
        self.target = target
        self.route = route
        self._gradation = Gradation(route.percent)

    def takes(self, key: Any, partition: int | None) -> bool:
        """Whether a publish goes to the new cluster. Publishes to one partition stay together, as those of a key."""
        if key is not None:
            return self._gradation.takes_key(key)
        if partition is not None:
            return self._gradation.takes_key(f"partition {partition}")
        return self._gradation.takes_next()


class Clusters:
    """The clusters of one producer.

    Args:
        own: the cluster that its options name.
        new: makes the delivery to the cluster of other nsqlookupds.
    """

    def __init__(self, own: Delivery, new: Callable[[list[str]], Delivery]) -> None:
        self.own = own
        self._new = new
        self._others: dict[tuple[str, ...], Delivery] = {}
        self._left: list[Delivery] = []
        self._shares: dict[str, _Share] = {}
        self._held: dict[str, list[tuple[Delivery, TopicRoute]]] = {}
        self._wanted: Mapping[str, Route] = {}
        self._is_running = False

    def __iter__(self) -> Iterator[Delivery]:
        """All clusters that publishes go to, or are still on their way to."""
        return iter([self.own, *list(self._others.values()), *self._left])

    @property
    def are_shared(self) -> bool:
        """Whether any topic moves."""
        return bool(self._shares)

    def start(self) -> None:
        """Connect to all."""
        self._is_running = True
        for delivery in self:
            delivery.routes.start()

    def route(self, topic: str, extras: Extras) -> TopicRoute:
        """The route that a publish takes. Raises NameInvalid."""
        share = self._shares.get(topic) if topic.__class__ is str else None
        is_moved = share is not None and share.takes(extras.key, extras.partition)
        return _route_of(share.target if share is not None and is_moved else self.own, topic)

    def refresh(self, topic: str) -> None:
        """What is known of a topic is out of date."""
        for delivery in self:
            if topic in delivery.routes.by_topic:
                delivery.routes.refresh(topic)

    def follow(self, routes: Mapping[str, Route]) -> None:
        """Share topics out as a document says, from the next publish on.

        A topic of which something is held back follows when that has been let go.
        """
        self._wanted = routes
        for topic in {*self._shares, *routes} - set(self._held):
            share, route = self._shares.get(topic), routes.get(topic)
            if route != (share and share.route):
                self._change(topic, route)
        self._leave_unused()

    def _change(self, topic: str, route: Route | None) -> None:
        on_their_way = [each for delivery in self for each in delivery.pending.publishes if each.topic == topic]
        if route is None:
            del self._shares[topic]
        else:
            self._shares[topic] = _Share(self._delivery(route), route)
        if on_their_way:
            self._hold_back(topic, on_their_way)

    def drain(self, timeout: float | None) -> None:
        """Wait until nothing is pending; after ``timeout`` seconds fail what is."""
        end = None if timeout is None else monotonic() + timeout
        for delivery in list(self):
            delivery.linger.flush()
        for delivery in list(self):
            delivery.drain(None if end is None else max(0.0, end - monotonic()))

    def close(self, timeout: float) -> None:
        """Close the connections to all. Nothing may be pending."""
        end = monotonic() + timeout
        for delivery in list(self):
            delivery.close(max(0.0, end - monotonic()))

    def forget(self) -> None:
        """In the child of a fork: send nothing of what was being gathered."""
        for delivery in self:
            delivery.linger.forget()

    # Deliveries

    def _delivery(self, route: Route) -> Delivery:
        """The delivery to the cluster that a route names."""
        name = tuple(sorted(set(route.lookupds)))
        delivery = self._others.get(name)
        if delivery is None:
            delivery = self._others[name] = self._new(list(name))
            if self._is_running:
                delivery.routes.start()
        return delivery

    def _leave_unused(self) -> None:
        """Close the connections to clusters that no topic moves to, when nothing is on its way there."""
        used = {share.target for share in self._shares.values()}
        for name, delivery in list(self._others.items()):
            if delivery not in used:
                del self._others[name]
                self._left.append(delivery)
                delivery.supervisor.job("leaving a cluster", self._leave, delivery).start()

    def _leave(self, delivery: Delivery) -> None:
        delivery.linger.flush()
        delivery.pending.wait_for_none(None)
        self._left.remove(delivery)
        delivery.close(None)

    # Order

    def _hold_back(self, topic: str, publishes: list[Publish]) -> None:
        """Hold what is bound to a partition until ``publishes`` have ended."""
        held = self._held[topic] = [(delivery, _route_of(delivery, topic)) for delivery in self]
        for delivery, route in held:
            route.held = HeldQueue(delivery, topic, [])
        self._look(topic, publishes)

    def _look(self, topic: str, publishes: list[Publish]) -> None:
        if not all(publish.done for publish in publishes):
            self.own.later(_LOOK_AGAIN, lambda: self._look(topic, publishes))
            return
        for delivery, route in self._held.pop(topic):
            route.let_go(delivery.finish)
        self.follow(self._wanted)


def _route_of(delivery: Delivery, topic: str) -> TopicRoute:
    route = delivery.routes.by_topic.get(topic) if topic.__class__ is str else None
    return delivery.routes.of(check_topic(topic)) if route is None else route
