"""Which links take the publishes of a topic.

Without lookup, every nsqd takes every topic, and one Route serves them all.
With lookup each topic has its own: the configured nsqds and those that
nsqlookupd names for the topic. A topic that lookup does not know may go to
any nsqd, because original servers create topics when they are published to.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable

from gevent.pool import Group

from nsq_fast.config import LookupConfig
from nsq_fast.errors import LookupFailed
from nsq_fast.names import Address, check_topic
from nsq_fast.protocol.topology import Topology

from .lookup import LookupPoller
from .pool import Link, Pool
from .publish import Publish

logger = logging.getLogger(__name__)

# Topics remembered at most: programs that make up topic names for each answer must not fill the memory.
MAX_TOPICS = 10_000


class Route:
    """Where the publishes of a topic can go, and those that wait for it.

    Attributes:
        links: the open links that take the topic.
        waiting: publishes for which there was none, in order.
        addresses: the nsqds that lookup named; None before its first answer.
        is_used: set by every publish, cleared at every poll.
    """

    __slots__ = ("_turn", "addresses", "is_used", "links", "waiting")

    def __init__(self, links: list[Link]) -> None:
        self.links = links
        self.waiting: deque[Publish] = deque()
        self.addresses: frozenset[Address] | None = None
        self.is_used = True
        self._turn = 0

    def choose(self) -> Link | None:
        """The next open link, round robin. One that owes overdue replies is taken only for want of others."""
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


class Routes:
    """The routes of all topics.

    Args:
        nsqds: configured nsqds, which take every topic.
        lookupds: lookup services to ask; none means that ``nsqds`` is all there is.
        on_routed: called with a route that has got new links.
    """

    def __init__(
        self,
        pool: Pool,
        nsqds: Iterable[Address],
        lookupds: list[str],
        config: LookupConfig,
        on_routed: Callable[[Route], None],
    ) -> None:
        self._pool = pool
        self._nsqds = frozenset(nsqds)
        self._poller = LookupPoller(lookupds, config, "w", self._learnt) if lookupds else None
        self._config = config
        self._on_routed = on_routed
        self._shared = Route(pool.open)
        self._asking = Group()
        self.by_topic: dict[str, Route] = {}

    def start(self) -> None:
        """Connect to the configured nsqds; begin to look up."""
        self._pool.add(self._nsqds)
        if self._poller is not None:
            self._poller.start()

    def stop(self) -> None:
        """Look up no more."""
        if self._poller is not None:
            self._poller.stop()
        self._asking.kill(block=False)

    def of(self, topic: str) -> Route:
        """The route of a topic. Raises NameInvalid."""
        check_topic(topic)
        if self._poller is None:
            if len(self.by_topic) >= MAX_TOPICS:
                self.by_topic.clear()
            route = self._shared
        else:
            route = Route([])
            self._update_links(route)
            self._poller.add_topic(topic)
        self.by_topic[topic] = route
        return route

    def refresh(self, topic: str) -> None:
        """What we know of a topic is out of date."""
        if self._poller is not None:
            self._poller.refresh(topic)

    def changed(self) -> None:
        """A link opened or closed."""
        if self._poller is None:
            if self._shared.waiting and self._shared.links:
                self._on_routed(self._shared)
            return
        for route in list(self.by_topic.values()):
            self._update_links(route)

    def waiting_count(self) -> int:
        """How many publishes wait for a link."""
        routes = {self._shared, *self.by_topic.values()}
        return sum(len(route.waiting) for route in routes)

    def _update_links(self, route: Route) -> None:
        addresses = self._nsqds if route.addresses is None else self._nsqds | route.addresses
        route.links = [link for link in self._pool.open if link.address in addresses]
        if route.waiting and route.links:
            self._on_routed(route)

    # What lookup says

    def _learnt(self, topic: str, topology: Topology) -> None:
        route = self.by_topic.get(topic)
        if route is None or self._forget_idle(topic, route):
            return
        found = frozenset(nsqd.tcp for nsqd in topology.nsqds)
        if found:
            self._set_addresses(route, found)
        else:
            self._asking.spawn(self._ask_nodes, route)

    def _forget_idle(self, topic: str, route: Route) -> bool:
        is_idle = not route.is_used and not route.waiting and len(self.by_topic) > MAX_TOPICS // 10
        route.is_used = False
        if is_idle and self._poller is not None:
            del self.by_topic[topic]
            self._poller.remove_topic(topic)
        return is_idle

    def _ask_nodes(self, route: Route) -> None:
        """Nobody has the topic yet: any nsqd may take it."""
        assert self._poller is not None
        try:
            nodes = self._poller.nodes(self._config.lookupd_timeout)
        except LookupFailed as error:
            logger.warning("no nsqds from lookup: %s", error)
            return
        self._set_addresses(route, frozenset(nsqd.tcp for nsqd in nodes if not nsqd.is_redesigned))

    def _set_addresses(self, route: Route, addresses: frozenset[Address]) -> None:
        route.addresses = addresses
        self._pool.add(addresses)
        wanted = self._nsqds.union(*(known.addresses for known in self.by_topic.values() if known.addresses))
        self._pool.retain(wanted)
        self._update_links(route)
