"""What a program may ask a consumer at any time, in any thread: nothing here changes anything."""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from nsq_fast.names import Address
from nsq_fast.runtime.owner_thread import OwnerThread, get_ident

from .closing import Closing
from .disposition import Disposition
from .flow import Flow
from .load import Workload
from .ordered import Ordered
from .stats import ConsumerStats, Counters
from .subscriber import Subscriber

if TYPE_CHECKING:
    from nsq_fast.runtime.lookup import LookupPoller


if TYPE_CHECKING:

    class Subscribed(Protocol):
        """The subscribers of a consumer; a ``Subscriptions``."""

        lookup: LookupPoller | None

        @property
        def leader_moves(self) -> int:
            """Times that lookup named another leader of a partition."""

        @property
        def topics(self) -> tuple[str, ...]:
            """The topics that are consumed now."""

        def past(self) -> dict[str, Counters]:
            """Counts of the subscribers that have ended, for each of these topics."""

        def __iter__(self) -> Iterator[Subscriber]:
            """Those of now."""

    class Kept(Protocol):
        """What reads the config source; a ``ConfigKeeper``."""

        def start(self) -> None:
            """Begin to read."""

        def wait_first(self) -> None:
            """Return when there is a document, or there will be none soon."""

        def stats(self) -> dict[str, Any]:
            """What is applied, and what is wrong."""


class ObservedConsumer:
    """The questions that a ``Consumer`` answers about itself."""

    disposition: Disposition
    flow: Flow
    ordered: Ordered
    workload: Workload
    given_up: int
    past: Counters
    nsqd_addresses: list[Address]
    _subscriptions: Subscribed
    _closing: Closing
    _keeper: Kept | None
    _is_started: bool
    _thread: OwnerThread

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that are consumed now: those that were named, or those that match and are listed."""
        return self._subscriptions.topics

    @property
    def is_paused(self) -> bool:
        """Whether ``pause`` was called, and ``resume`` not since."""
        return self.flow.is_paused

    @property
    def is_running(self) -> bool:
        """Whether the consumer is started and not closed."""
        return self._is_started and not self._closing.has_begun

    @property
    def is_starved(self) -> bool:
        """Whether some connection holds 85 % of what it may get: time to process what was gathered."""
        return self.flow.is_starved

    @property
    def total_ready_count(self) -> int:
        """Sum of the RDYs last sent."""
        return sum(each.subscription.share.rdy for each in self._subscriptions if each.is_connected)

    @property
    def total_in_flight(self) -> int:
        """Messages received and not answered."""
        return sum(each.connection.in_flight for each in self._subscriptions if each.is_connected)

    @property
    def subscribers(self) -> list[Subscriber]:
        """One for each nsqd or partition known now."""
        return list(self._subscriptions)

    @property
    def nsqd_tcp_addresses(self) -> set[str]:
        """The configured nsqds as 'host:port'."""
        return {str(address) for address in self.nsqd_addresses}

    def stats(self) -> ConsumerStats:
        """A snapshot of what was done and what is going on.

        In another thread than the consumer's, its figures may be of slightly different moments. What a subscriber that
        is just going has counted may be missing for a moment, and is never counted twice. ``orphaned`` is of the last
        time that the consumer looked.
        """
        # In this order: a subscriber that ends meanwhile is in the list no longer, before its counts are in the past.
        totals, topics = self.past.copy(), self._subscriptions.past()
        connections = tuple(each.stats() for each in self._subscriptions)
        for each in connections:
            topics.setdefault(each.topic, Counters()).add(each.counters)
        for counters in topics.values():
            totals.add(counters)
        lookup, timing = self._subscriptions.lookup, self.disposition.timing
        return ConsumerStats(
            connections=connections,
            totals=totals,
            given_up=self.given_up,
            max_in_flight=self.flow.limit,
            in_flight=sum(each.in_flight for each in connections),
            unstarted=sum(each.unstarted for each in connections),
            backoff_level=self.flow.backoff.level,
            backoff_left=max(0.0, self.flow.backoff.until - monotonic()),
            is_running=self.is_running,
            is_paused=self.is_paused,
            is_starved=self.is_starved,
            order_violations=self.ordered.ledger.violations,
            repeated=self.ordered.ledger.repeated,
            blocked=self.ordered.blocked,
            orphaned=self._count_orphaned(),
            leader_moves=self._subscriptions.leader_moves,
            lookup_errors=0 if lookup is None else lookup.errors,
            asked_in_flight=self.flow.asked,
            topics=topics,
            config=None if self._keeper is None else self._keeper.stats(),
            handler_time=None if timing is None else timing.handler_time.stats(),
            message_age=None if timing is None else timing.message_age.stats(),
        )

    def _count_orphaned(self) -> int:
        """Counting drops what is answered from the ledgers: only their own thread may do it."""
        orphans = self.workload.orphans
        return orphans.count() if self._thread.ident in (0, get_ident()) else orphans.counted
