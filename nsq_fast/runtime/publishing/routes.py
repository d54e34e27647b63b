"""Which links take the publishes of which topic.

Without lookup, every nsqd takes every topic. With lookup a topic goes to the
configured nsqds and to those that nsqlookupd names for it. A topic that lookup
does not know, or whose nsqds are all out of reach, may go to any nsqd, because
original servers create topics when they are published to. A topic with
partitions goes to their leaders, and nowhere else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from nsq_fast.config import LookupConfig, ProducerConfig
from nsq_fast.errors import LookupFailed
from nsq_fast.log_events import LEADER_MOVED, LOOKUP_UNANSWERED
from nsq_fast.names import Address, check_topic
from nsq_fast.protocol.discovery import left_out
from nsq_fast.protocol.partitioner import key_partitioner
from nsq_fast.protocol.topology import Topology
from nsq_fast.runtime.supervised import JobGroup, Supervisor

from .link import Link
from .pool import Pool
from .publish import Publish
from .topic_route import TopicRoute

if TYPE_CHECKING:
    from nsq_fast.runtime.lookup import LookupPoller

    from .destination import Sender

logger = logging.getLogger(__name__)

# Topics remembered at most: programs that make up topic names for each answer must not fill the memory.
MAX_TOPICS = 10_000


if TYPE_CHECKING:

    class RouteOwner(Sender, Protocol):
        """Who sends, and ends what cannot be sent."""

        supervisor: Supervisor

        def finish(self, publish: Publish, error: BaseException | None) -> None:
            """End a publish."""


class Routes:
    """The routes of all topics.

    Args:
        lookupds: lookup services to ask; none means that ``nsqds`` is all there is.
        owner: sends for the queues.
        on_decided: called when it is known of a topic what partitions it has.

    Attributes:
        lookup: what polls the lookup services; None without any.
        leader_moves: times that lookup named another leader of a partition.
    """

    def __init__(
        self,
        pool: Pool,
        nsqds: Iterable[Address],
        lookupds: list[str],
        config: LookupConfig,
        producer: ProducerConfig,
        owner: RouteOwner,
        on_decided: Callable[[], object],
    ) -> None:
        self.by_topic: dict[str, TopicRoute] = {}
        self.leader_moves = 0
        self._pool = pool
        self._nsqds = frozenset(nsqds)
        self.lookup: LookupPoller | None = None
        if lookupds:
            from nsq_fast.runtime.lookup import LookupPoller  # not needed where nsqds are configured

            self.lookup = LookupPoller(lookupds, config, "w", self._learnt, owner.supervisor)
        self._config = config
        self._owner = owner
        self._on_decided = on_decided
        self._partition_of_key = key_partitioner(producer.key_strategy)
        self._by_load = producer.partition_strategy == "least_loaded"
        self._max_msg_size = producer.max_msg_size
        never = producer.max_msg_size + 1
        self._compressed_from = producer.body_compression_min_size if producer.body_compression else never
        self._asking = JobGroup(owner.supervisor, "nsq_fast routes")
        self._asked_for: set[TopicRoute] = set()

    def start(self) -> None:
        """Connect to the configured nsqds; begin to look up."""
        self._pool.exchange(frozenset(), self._nsqds)
        if self.lookup is not None:
            self.lookup.start()

    def stop(self) -> None:
        """Look up no more."""
        if self.lookup is not None:
            self.lookup.stop()
        self._asking.kill()

    def of(self, topic: str) -> TopicRoute:
        """The route of a topic. Raises NameInvalid."""
        check_topic(topic)
        has_lookup = self.lookup is not None
        if not has_lookup and len(self.by_topic) >= MAX_TOPICS:
            for name in [name for name, route in self.by_topic.items() if not route.is_busy]:
                del self.by_topic[name]
        links = [] if has_lookup else self._pool.open
        route = TopicRoute(
            self._owner,
            topic,
            links,
            self._partition_of_key,
            has_lookup=has_lookup,
            by_load=self._by_load,
            max_msg_size=self._max_msg_size,
            compressed_from=self._compressed_from,
        )
        self.by_topic[topic] = route
        if self.lookup is not None:
            self._update_links(route)
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
        if self.lookup is None or route is None:
            return ""
        topology = self.lookup.topology(topic)
        if route.addresses:
            excluded = () if topology is None else topology.excluded_partitions
            return left_out(excluded) if excluded else ""
        failure = self.lookup.failure()
        problems = [f"lookup failed: {failure}"] if failure else []
        answering = self.lookup.answering()
        if answering and topology is not None:
            said = f" (lookup says: {topology.problem})" if topology.problem else ""
            if topology.excluded:
                text, said = topology.problem, ""
            elif route.is_partitioned or (said and not topology.is_unknown):
                text = f"lookup names no partition that can be written now{said}"
            else:
                text = f"lookup does not know the topic, and names no other nsqd{said}"
            problems.append(f"{text}: {', '.join(answering)}")
        return "; ".join(problems) or "lookup has not answered yet"

    def has_waiting(self) -> bool:
        """Whether publishes wait for a link, or for their turn."""
        return self.waiting_count() > 0

    def waiting_count(self) -> int:
        """How many publishes do."""
        return sum(len(queue.waiting) for route in list(self.by_topic.values()) for queue in route.queues())

    def leaders(self) -> dict[str, dict[int, str | None]]:
        """Topic -> partition -> the leader that is known of it."""
        return {
            topic: {number: queue.leader and str(queue.leader) for number, queue in sorted(route.partitions.items())}
            for topic, route in list(self.by_topic.items())
            if route.is_partitioned
        }

    # News of the links

    def links_changed(self) -> None:
        """A link opened or closed."""
        for route in list(self.by_topic.values()):
            if self.lookup is None:
                route.pump()
            else:
                self._update_links(route)

    def link_failed(self, link: Link) -> None:
        """A link could not connect. Where that leaves publishes without any nsqd, others are asked for."""
        if self.lookup is None:
            return
        for route in self.by_topic.values():
            if route.is_plain and route.any.is_stranded and self._pool.are_down(route.addresses or ()):
                self._ask_others(route, route.addresses or frozenset())

    def _update_links(self, route: TopicRoute) -> None:
        addresses = route.addresses
        if not route.is_partitioned:
            addresses = self._nsqds if addresses is None else self._nsqds | addresses
        assert addresses is not None
        if route.set_links([link for link in self._pool.open if link.address in addresses]):
            self.refresh(route.topic)
        for queue in route.partitions.values():
            if queue.is_stranded:
                self._owner.seek(queue)
        route.pump()

    # What lookup says

    def _learnt(self, topic: str, topology: Topology) -> None:
        route = self.by_topic.get(topic)
        if route is None or self._forget_idle(topic, route):
            return
        if not topology.is_unknown:
            route.absent_since = None
        if not topology.is_empty:
            route.is_lack_told = False
        if route.is_partitioned or topology.partitions or topology.meta is not None:
            self._set_partitions(route, topology)
            return
        if topology is route.topology and route.is_plain:
            self._pool.retain_needed()  # a link that was busy when its nsqd was named no more may be idle now
            return
        found = frozenset(nsqd.tcp for nsqd in topology.nsqds)
        if found:
            self._set_addresses(route, found)
            route.topology = topology
        else:
            self._ask_others(route, frozenset())

    def _forget_idle(self, topic: str, route: TopicRoute) -> bool:
        is_idle = not route.is_used and not route.is_busy and len(self.by_topic) > MAX_TOPICS // 10
        route.is_used = False
        if is_idle and self.lookup is not None:
            del self.by_topic[topic]
            self._pool.exchange(route.addresses or frozenset(), frozenset())
            self.lookup.remove_topic(topic)
        return is_idle

    def _set_partitions(self, route: TopicRoute, topology: Topology) -> None:
        known = {number: queue.leader for number, queue in route.partitions.items()}
        if topology.meta is not None:
            is_news = route.is_ext is None
            route.learn(topology.meta)
            if is_news:
                route.refuse_misfits(self._owner.finish)
        moved = route.set_partitions(topology)
        leaders = (queue.leader for queue in route.partitions.values())
        self._connect(route, frozenset(leader for leader in leaders if leader is not None))
        for queue in moved:
            former = known.get(queue.number)
            if former is not None:
                self.leader_moves += 1
                logger.info(
                    "%s-%d moved from %s to %s", route.topic, queue.number, former, queue.leader, extra=LEADER_MOVED
                )
            queue.moved()
        self._decided(route)

    def _decided(self, route: TopicRoute) -> None:
        """It is known now which partitions a topic has: those that are bound to one can go there."""
        self._on_decided()

        route.undecided.hand_over(lambda publish: route.destination_or_end(publish, self._owner.finish))

    def _ask_others(self, route: TopicRoute, named: frozenset[Address]) -> None:
        if route not in self._asked_for:
            self._asked_for.add(route)
            self._asking.start(self._ask_nodes, route, named)

    def _ask_nodes(self, route: TopicRoute, named: frozenset[Address]) -> None:
        """Nobody has the topic yet, or nobody who can be reached: any nsqd may take it."""
        assert self.lookup is not None
        try:
            nodes = self.lookup.nodes(self._config.lookupd_timeout)
        except LookupFailed as error:
            logger.warning("no nsqds from lookup: %s", error, extra=LOOKUP_UNANSWERED)
            return
        finally:
            self._asked_for.discard(route)
        if not route.is_partitioned:
            others = frozenset(nsqd.tcp for nsqd in nodes if not nsqd.is_redesigned)
            self._set_addresses(route, named | others)
            topology = self.lookup.topology(route.topic)
            if not (named or others):
                route.tell_lack(self.lookup_problem(route.topic))
                if nodes and topology is not None and topology.is_unknown:
                    route.end_if_absent(topology.problem, self._owner.finish)

    def _set_addresses(self, route: TopicRoute, addresses: frozenset[Address]) -> None:
        route.topology = None
        route.is_plain = bool(addresses)
        self._connect(route, addresses)
        if route.is_plain:
            self._decided(route)
        else:
            route.undecided.reopen()

    def _connect(self, route: TopicRoute, addresses: frozenset[Address]) -> None:
        """Have links to the nsqds of a route, and to no nsqd that nobody needs."""
        self._pool.exchange(route.addresses or frozenset(), addresses)
        route.addresses = addresses
        self._pool.retain_needed()
        self._update_links(route)
