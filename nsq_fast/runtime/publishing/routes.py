"""Which links take the publishes of a topic.

Without lookup, every nsqd takes every topic, and one Route serves them all.
With lookup each topic has its own: the configured nsqds and those that
nsqlookupd names for the topic. A topic that lookup does not know, or whose
nsqds are all out of reach, may go to any nsqd, because original servers
create topics when they are published to.

A topic with partitions goes to their leaders, and nowhere else. Publishes
that may go to any partition take turns; those that are bound to one queue in
its ``Lane``.
"""

from __future__ import annotations

import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gevent.pool import Group

from nsq_fast.config import LookupConfig, ProducerConfig
from nsq_fast.errors import ConfigError, LookupFailed
from nsq_fast.names import Address, check_topic
from nsq_fast.protocol.partitioner import key_partitioner
from nsq_fast.protocol.topology import Topology
from nsq_fast.runtime.lookup import LookupPoller

from .addressed import Addressed
from .lane import Lane, LaneSender
from .pool import Link, Pool
from .publish import Publish

logger = logging.getLogger(__name__)

# Topics remembered at most: programs that make up topic names for each answer must not fill the memory.
MAX_TOPICS = 10_000


class Route:
    """Where the publishes of a topic can go, and those that wait for it.

    Attributes:
        topic: its name; None for the route that all topics share.
        links: the open links that take the topic.
        waiting: publishes for which there was none, in order.
        undecided: publishes bound to a partition before it is known what partitions there are, in order.
        addresses: the nsqds that lookup named; None before its first answer.
        topology: what ``addresses`` were taken from; None when they were not taken from lookup's answer alone.
        is_used: set by every publish, cleared at every poll.
        is_plain: it has no partitions as far as anybody knows.
        is_partitioned: it has; that lasts.
        partition_num: how many partitions the topic has, available or not; 0: lookup does not say.
        is_ext: whether messages may have headers; None: lookup does not say.
        lanes: partition -> lane, for those that are led or that publishes are bound to.
        open_lanes: the lanes with a link.
        is_sought, seeks: as of a Lane.
    """

    __slots__ = (
        "_by_load",
        "_turn",
        "addresses",
        "is_ext",
        "is_partitioned",
        "is_plain",
        "is_sought",
        "is_used",
        "lanes",
        "links",
        "open_lanes",
        "partition_num",
        "seeks",
        "topic",
        "topology",
        "undecided",
        "waiting",
    )

    def __init__(self, links: list[Link], topic: str | None = None, *, by_load: bool = False) -> None:
        self.topic = topic
        self.links = links
        self.waiting: deque[Publish] = deque()
        self.undecided: deque[Addressed] = deque()
        self.addresses: frozenset[Address] | None = None
        self.topology: Topology | None = None
        self.is_used = True
        self.is_plain = topic is None
        self.is_partitioned = False
        self.partition_num = 0
        self.is_ext: bool | None = None
        self.lanes: dict[int, Lane] = {}
        self.open_lanes: list[Lane] = []
        self.is_sought = False
        self.seeks = 0
        self._by_load = by_load
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

    def choose_lane(self) -> Lane | None:
        """The next partition that can be written now: round robin, or the one whose leader has the least to do.

        A leader that owes overdue replies is taken only for want of others.
        """
        lanes = self.open_lanes
        if not lanes:
            return None
        self._turn = turn = (self._turn + 1) % len(lanes)
        lane = lanes[turn]
        if not self._by_load and not lane.is_paused and not lane.links[0].overdue:
            return lane
        ready = [other for other in lanes[turn:] + lanes[:turn] if not other.is_paused]
        ready = [other for other in ready if not other.links[0].overdue] or ready
        if not ready:
            return None
        return min(ready, key=lambda each: each.load) if self._by_load else ready[0]

    def all_waiting(self) -> Iterator[deque[Any]]:
        """The queues in which publishes wait."""
        yield self.waiting
        yield self.undecided
        for lane in self.lanes.values():
            yield lane.waiting


class Routes:
    """The routes of all topics.

    Args:
        nsqds: configured nsqds, which take every topic that has no partitions.
        lookupds: lookup services to ask; none means that ``nsqds`` is all there is.
        sender: sends for the lanes.
        on_routed: called with a route that has got new links.
        on_decided: called with a route of which it is known now what partitions it has.
    """

    def __init__(
        self,
        pool: Pool,
        nsqds: Iterable[Address],
        lookupds: list[str],
        config: LookupConfig,
        producer: ProducerConfig,
        sender: LaneSender,
        on_routed: Callable[[Route], None],
        on_decided: Callable[[Route], None],
    ) -> None:
        self._pool = pool
        self._nsqds = frozenset(nsqds)
        self._wanted = Counter(self._nsqds)  # nsqd -> what needs it: the options, and routes
        self._poller = LookupPoller(lookupds, config, "w", self._learnt, sender.supervisor) if lookupds else None
        self._config = config
        self._sender = sender
        self._on_routed = on_routed
        self._on_decided = on_decided
        self._partition_of_key = key_partitioner(producer.key_strategy)
        self._by_load = producer.partition_strategy == "least_loaded"
        self._shared = Route(pool.open)
        self._shared_lanes: dict[tuple[str, int], Lane] = {}
        self._asking = Group()
        self._asked_for: set[Route] = set()
        self.by_topic: dict[str, Route] = {}

    @property
    def has_lookup(self) -> bool:
        """Whether there is anybody to ask where a topic lives."""
        return self._poller is not None

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
            route = Route([], topic, by_load=self._by_load)
            self._update_links(route)
            self._poller.add_topic(topic)
        self.by_topic[topic] = route
        return route

    def refresh(self, topic: str) -> None:
        """What we know of a topic is out of date."""
        if self._poller is not None:
            self._poller.refresh(topic)

    def lookup_problem(self, topic: str) -> str:
        """Why lookup names no nsqd for a topic; empty when it does, and without lookup."""
        route = self.by_topic.get(topic)
        if self._poller is None or route is None or route.addresses:
            return ""
        failure = self._poller.failure()
        if failure:
            return f"lookup failed: {failure}"
        topology = self._poller.topology(topic)
        if topology is None:
            return "lookup has not answered yet"
        return "lookup does not know the topic, and names no other nsqd"

    def changed(self) -> None:
        """A link opened or closed."""
        if self._poller is None:
            if self._shared.waiting and self._shared.links:
                self._on_routed(self._shared)
            for lane in list(self._shared_lanes.values()):
                lane.pump()
            return
        for route in list(self.by_topic.values()):
            self._update_links(route)

    def failed(self) -> None:
        """A link could not connect. Where that leaves publishes without any nsqd, others are asked for."""
        if self._poller is None:
            return
        for route in self.by_topic.values():
            if route.is_plain and route.waiting and not route.links and self._pool.are_down(route.addresses or ()):
                self._ask_others(route, route.addresses or frozenset())

    def waiting_count(self) -> int:
        """How many publishes wait for a link, or for their turn."""
        routes = {self._shared, *self.by_topic.values()}
        shared = sum(len(lane.waiting) for lane in self._shared_lanes.values())
        return shared + sum(len(queue) for route in routes for queue in route.all_waiting())

    def leaders(self) -> dict[str, dict[int, str | None]]:
        """Topic -> partition -> the leader that is known of it."""
        return {
            topic: {number: lane.leader and str(lane.leader) for number, lane in sorted(route.lanes.items())}
            for topic, route in self.by_topic.items()
            if route.is_partitioned
        }

    # Partitions

    def lane_of(self, publish: Addressed) -> Lane | None:
        """The lane of a publish that is pinned; None as long as lookup has not said what partitions there are.

        Raises ConfigError where there is no such partition.
        """
        route = publish.route
        if publish.pin is not None and publish.pin < route.partition_num and publish.pin in route.lanes:
            return route.lanes[publish.pin]  # the usual case
        if route.topic is None:
            return self._shared_lane(publish)
        if route.is_plain:
            raise ConfigError(f"{_binding(publish)}: topic {route.topic!r} has no partitions; leave it out")
        if not route.is_partitioned:
            return None
        if publish.pin is None and publish.key is not None:
            if not route.partition_num:
                raise ConfigError(f"{_binding(publish)}: lookup does not say how many partitions {route.topic!r} has")
            publish.pin = self._partition_of_key(publish.key, route.partition_num)
        assert publish.pin is not None
        if route.partition_num and publish.pin >= route.partition_num:
            self.refresh(route.topic)
            raise ConfigError(f"partition={publish.pin}: topic {route.topic!r} has {route.partition_num} partitions")
        return self._lane(route, publish.pin)

    def _shared_lane(self, publish: Addressed) -> Lane:
        if publish.pin is None:
            raise ConfigError(
                f"{_binding(publish)}: the number of partitions is unknown without lookupd_http_addresses;"
                " name the partition, or leave it out"
            )
        place = (publish.topic, publish.pin)
        lane = self._shared_lanes.get(place)
        if lane is None:
            if len(self._shared_lanes) >= MAX_TOPICS:
                busy = {at: lane for at, lane in self._shared_lanes.items() if lane.waiting or not lane.is_idle}
                self._shared_lanes = busy
            lane = self._shared_lanes[place] = Lane(self._sender, self._shared, *place)
            lane.links = self._pool.open
        return lane

    def _lane(self, route: Route, partition: int) -> Lane:
        lane = route.lanes.get(partition)
        if lane is None:
            assert route.topic is not None
            lane = route.lanes[partition] = Lane(self._sender, route, route.topic, partition)
        return lane

    def _set_partitions(self, route: Route, topology: Topology) -> None:
        if not route.is_partitioned:
            route.is_partitioned, route.is_plain = True, False
            route._turn = random.randrange(1024)  # many producers that start together begin apart
        if topology.meta is not None:
            route.partition_num = topology.meta.partition_num
            route.is_ext = topology.meta.extend_support
        moved = self._set_leaders(route, topology) if topology.partitions else []
        self._connect(route, frozenset(lane.leader for lane in route.lanes.values() if lane.leader is not None))
        for lane in moved:
            lane.moved()
        self._on_decided(route)

    def _set_leaders(self, route: Route, topology: Topology) -> list[Lane]:
        """Take the leaders over; return the lanes that have got another one.

        An answer that names no partition at all says nothing of the leaders: that of a lookupd that has just started
        looks the same.
        """
        moved = []
        for partition, nsqd in topology.partitions.items():
            lane = self._lane(route, partition)
            if lane.leader != nsqd.tcp:
                if lane.leader is not None:
                    logger.info("%s-%d moved from %s to %s", route.topic, partition, lane.leader, nsqd.tcp)
                lane.leader = nsqd.tcp
                moved.append(lane)
        for partition, lane in route.lanes.items():
            if partition not in topology.partitions:
                lane.leader = None
        return moved

    def _update_links(self, route: Route) -> None:
        if route.is_partitioned:
            self._update_lanes(route)
        else:
            addresses = self._nsqds if route.addresses is None else self._nsqds | route.addresses
            route.links = [link for link in self._pool.open if link.address in addresses]
        if route.waiting and route.links:
            self._on_routed(route)

    def _update_lanes(self, route: Route) -> None:
        assert route.addresses is not None
        route.links = [link for link in self._pool.open if link.address in route.addresses]
        is_lost = False
        for lane in route.lanes.values():
            links = [link for link in route.links if link.address == lane.leader]
            is_lost |= bool(lane.links) and not links
            lane.links = links
        route.open_lanes = [lane for lane in route.lanes.values() if lane.links]
        if is_lost and route.topic is not None:
            self.refresh(route.topic)
        for lane in route.open_lanes:
            if lane.waiting:
                lane.pump()

    # What lookup says

    def _learnt(self, topic: str, topology: Topology) -> None:
        route = self.by_topic.get(topic)
        if route is None or self._forget_idle(topic, route):
            return
        if route.is_partitioned or topology.partitions or topology.meta is not None:
            self._set_partitions(route, topology)
            return
        if topology is route.topology and route.is_plain:
            self._pool.retain(self._wanted)  # a link that was busy when its nsqd was named no more may be idle now
            return
        found = frozenset(nsqd.tcp for nsqd in topology.nsqds)
        if found:
            self._set_addresses(route, found)
            route.topology = topology
        else:
            self._ask_others(route, frozenset())

    def _forget_idle(self, topic: str, route: Route) -> bool:
        is_busy = route.is_used or any(route.all_waiting()) or any(lane.on_wire for lane in route.lanes.values())
        is_idle = not is_busy and len(self.by_topic) > MAX_TOPICS // 10
        route.is_used = False
        if is_idle and self._poller is not None:
            del self.by_topic[topic]
            self._want(route, frozenset())
            self._poller.remove_topic(topic)
        return is_idle

    def _ask_others(self, route: Route, named: frozenset[Address]) -> None:
        if route not in self._asked_for:
            self._asked_for.add(route)
            self._asking.start(self._sender.supervisor.job("nsq_fast asking for nsqds", self._ask_nodes, route, named))

    def _ask_nodes(self, route: Route, named: frozenset[Address]) -> None:
        """Nobody has the topic yet, or nobody who can be reached: any nsqd may take it."""
        assert self._poller is not None
        try:
            nodes = self._poller.nodes(self._config.lookupd_timeout)
        except LookupFailed as error:
            logger.warning("no nsqds from lookup: %s", error)
            return
        finally:
            self._asked_for.discard(route)
        if not route.is_partitioned:
            others = frozenset(nsqd.tcp for nsqd in nodes if not nsqd.is_redesigned)
            self._set_addresses(route, named | others)

    def _set_addresses(self, route: Route, addresses: frozenset[Address]) -> None:
        route.topology = None
        route.is_plain = bool(addresses)
        self._connect(route, addresses)
        if route.is_plain:
            self._on_decided(route)

    def _connect(self, route: Route, addresses: frozenset[Address]) -> None:
        """Have links to the nsqds of a route, and to no nsqd that nobody needs."""
        self._want(route, addresses)
        self._pool.add(addresses)
        self._pool.retain(self._wanted)
        self._update_links(route)

    def _want(self, route: Route, addresses: frozenset[Address]) -> None:
        """Note which nsqds a route needs; costs what changed, however many routes there are."""
        before, route.addresses = route.addresses or frozenset(), addresses
        self._wanted.update(addresses - before)
        for address in before - addresses:
            self._wanted[address] -= 1
            if not self._wanted[address]:
                del self._wanted[address]


def _binding(publish: Addressed) -> str:
    return f"key={publish.key!r}" if publish.key is not None else f"partition={publish.pin}"
