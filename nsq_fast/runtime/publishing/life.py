"""The life of a producer: made, started, forked, closed. What it is for is in ``producer``."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from gevent import get_hub
from gevent.event import Event

from nsq_fast.config import ConnectionConfig, LookupConfig, ProducerConfig, split_options
from nsq_fast.errors import ConfigError, NotRunning
from nsq_fast.log_events import STARTED_ALREADY
from nsq_fast.names import DEFAULT_NSQD_TCP_PORT, listed, parse_addresses
from nsq_fast.runtime.dynamic import keeper_of
from nsq_fast.runtime.fork import keep, tell_forks
from nsq_fast.runtime.net.tls import check_tls_options
from nsq_fast.runtime.owner_thread import OwnerThread
from nsq_fast.runtime.signals import LazySignal, emit
from nsq_fast.runtime.trace import TraceLog, trace_log
from nsq_fast.runtime.waiting import is_interrupting, may_wait

from .clusters import Clusters
from .compose import Composer
from .delivery import Delivery

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from nsq_fast.keywords import ProducerKeywords
    from nsq_fast.protocol.dynamic_config import DynamicConfig

logger = logging.getLogger(__name__)

Addresses: TypeAlias = str | Iterable[str | tuple[str, int]]
P = TypeVar("P", bound="ProducerLife")


class ProducerLife:
    """Base of Producer: all but publishing."""

    # What each publish reads. Signals have the dict taken, and CPython then has no quick way to attributes in it.
    __slots__ = (
        "__dict__",
        "__weakref__",
        "_is_running",
        "_pending_limit",
        "_routes",
        "_thread",
        "_timeout",
        "_trace",
        "_wakeups",
    )

    on_response = LazySignal("Sent for each response of an nsqd: ``response`` is its bytes.")
    on_error = LazySignal("Sent for each error frame of an nsqd: ``error`` is a ServerError.")
    on_auth = LazySignal("Sent after AUTH: ``conn``, and ``response``, the reply as a dict.")
    on_close = LazySignal("Sent when the producer has closed.")

    def __init__(
        self,
        nsqd_tcp_addresses: Addresses = (),
        lookupd_http_addresses: Addresses = (),
        *,
        trace: TraceLog = trace_log,
        **options: Unpack[ProducerKeywords],
    ) -> None:
        self.config, self.connection_config, self.lookup_config = split_options(
            options, ProducerConfig, ConnectionConfig, LookupConfig
        )
        self.nsqd_addresses = parse_addresses(nsqd_tcp_addresses, DEFAULT_NSQD_TCP_PORT, "nsqd_tcp_addresses")
        self.lookupd_http_addresses: list[Any] = listed(lookupd_http_addresses, "lookupd_http_addresses")
        if not self.nsqd_addresses and not self.lookupd_http_addresses:
            raise ConfigError("nsqd_tcp_addresses or lookupd_http_addresses is needed: there is nowhere to publish to")
        check_tls_options(self.connection_config)
        self._is_running = False
        self._is_closed = False
        self._is_closing = False
        self._is_inherited = False
        self._closed = Event()
        self._trace = trace
        self._thread = OwnerThread()
        self._build()
        tell_forks(self)

    def _build(self) -> None:
        self._hub = get_hub()
        self._delivery = Delivery(
            self,
            self.nsqd_addresses,
            self.lookupd_http_addresses,
            self.config,
            self.connection_config,
            self.lookup_config,
            self._trace,
        )
        self._clusters = Clusters(self._delivery, self._deliver_to)
        self._composer = Composer(self.config, self._trace, self._clusters.refresh)
        self._routes = self._delivery.routes.by_topic
        self._pending_limit = self._delivery.pending_limit
        self._wakeups = self._delivery.wakeups
        self._timeout = self.config.publish_timeout
        source = self.lookup_config.config_source
        self._keeper = keeper_of(source, self._apply_config, self._delivery.supervisor, "producer")

    def _apply_config(self, config: DynamicConfig) -> None:
        """Do what a new document says. Raises ConfigError where it cannot be done, before any of it is."""
        from nsq_fast.runtime.lookupd_list import lookupd_changes  # most clients have no config source

        lookup = self._delivery.routes.lookup
        changes = lookupd_changes(config, lookup)
        self._trace.follow(config.share if config.trace else None)
        if lookup is not None:
            lookup.change_lookupds(*changes)
        self._clusters.follow(config.routes)
        # While a topic moves, each publish asks anew where it goes: no route is found in passing.
        self._routes = {} if self._clusters.are_shared else self._delivery.routes.by_topic

    def _deliver_to(self, lookupds: list[str]) -> Delivery:
        """What delivers to the cluster of other nsqlookupds."""
        configs = self.config, self.connection_config, self.lookup_config
        return Delivery(self, (), lookupds, *configs, self._trace, self._delivery)

    def __repr__(self) -> str:
        addresses = map(str, [*self.nsqd_addresses, *self.lookupd_http_addresses])
        return f"<Producer {', '.join(addresses)} {'running' if self._is_running else 'not running'}>"

    # Life

    def start(self) -> None:
        """Begin to connect, without waiting for it. A closed producer cannot be started again."""
        self._thread.check("Producer.start()")
        if self._is_closed:
            raise NotRunning("the producer was closed; make a new one")
        if self._is_running:
            logger.warning("%r: started already", self, extra=STARTED_ALREADY)
            return
        if self._hub is not get_hub():
            self._build()  # its parts belong to the hub of the thread that makes them
        self._thread.claim()
        if self._keeper is not None:
            self._keeper.start()
            self._keeper.wait_first()
            if self._is_running or self._is_closed:
                return  # another greenlet was faster
        self._is_running = True
        self._is_inherited = False
        self._clusters.start()

    def close(self, timeout: float | None = None) -> None:
        """Publish no more; wait for the publishes that are pending, then close the connections.

        Called while another greenlet closes, it waits for the same end, or brings it about when its timeout is over.
        Called in a receiver of a signal, in a handler of ``signal.signal`` or in the hub it only begins to close;
        ``join`` waits for the end.

        Args:
            timeout: seconds that all of it may take; publishes that are still pending then fail. None: each has its
                own deadline.
        """
        self._thread.check("Producer.close()")
        check_timeout(timeout)
        if is_interrupting():
            get_hub().loop.run_callback(self._begin_closing, timeout)
        elif may_wait():
            self._close(timeout)
        else:
            self._begin_closing(timeout)

    def _begin_closing(self, timeout: float | None) -> None:
        self._delivery.supervisor.job(f"the closing of {self!r}", self._close, timeout).start()

    def _close(self, timeout: float | None) -> None:
        if self._is_closing:
            self._clusters.drain(timeout)
            self._closed.wait()
            return
        if self._keeper is not None:
            self._keeper.stop()
        if not self._is_running:
            self._is_closed = True
            self._is_inherited = False
            self._closed.set()
            return
        deadline = None if timeout is None else monotonic() + timeout
        self._is_closing = True
        self._is_running = False
        self._is_closed = True
        try:
            self._clusters.drain(timeout)
        finally:
            left = self.connection_config.connect_timeout if deadline is None else max(0.0, deadline - monotonic())
            self._clusters.close(left)
            self._is_closing = False
            self._closed.set()
        emit(self, "on_close")

    def join(self, timeout: float | None = None, raise_error: bool = False) -> bool:
        """Wait until the producer has closed; whether it has. ``raise_error`` is there for gnsq's sake.

        Raises NotRunning when it would wait for ever: without a timeout, before ``start`` and ``close``.
        """
        self._thread.check("Producer.join()")
        if timeout is None and not self.is_running and not self._is_closed:
            raise NotRunning("join() before start(): call start() first")
        return bool(self._closed.wait(timeout))

    def __enter__(self: P) -> P:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def nsqd_tcp_addresses(self) -> set[str]:
        """The configured nsqds as 'host:port'."""
        return {str(address) for address in self.nsqd_addresses}

    @property
    def is_running(self) -> bool:
        """Whether it takes publishes."""
        return self._is_running or self._is_inherited

    @property
    def is_connected(self) -> bool:
        """Whether any nsqd is connected now."""
        return any(delivery.pool.connected for delivery in self._clusters)

    def stats(self) -> dict[str, Any]:
        """What is pending, held and waiting for an nsqd; which nsqds are connected, and why the others are not.

        ``stored``, ``refused`` and ``unknown`` count the publishes that have ended, by outcome; a multipublish that
        went to several partitions counts once for each. With the outcome unknown a server may have stored it.
        ``config`` is what the config source said last, and why it cannot be read or was refused; None without one.

        ``latency`` is a HistogramStats of what publishes took until they were confirmed, of samples; None without the
        option ``histograms``.
        """
        delivery = self._delivery
        clusters = list(self._clusters)
        links = [link for each in clusters for link in each.pool]
        lookups = [each.routes.lookup for each in clusters]
        return {
            "pending": sum(each.pending.count() for each in clusters),
            "stored": delivery.outcomes.stored,
            "refused": delivery.outcomes.refused,
            "unknown": delivery.outcomes.unknown,
            "leader_moves": sum(each.routes.leader_moves for each in clusters),
            "lookup_errors": sum(lookup.errors for lookup in lookups if lookup is not None),
            "latency": None if delivery.timing is None else delivery.timing.latency.stats(),
            "held": delivery.pending_limit.used,
            "waiting": sum(each.routes.waiting_count() for each in clusters),
            "leaders": delivery.routes.leaders(),
            "connected": [str(link.address) for link in links if link.conn is not None],
            "stalled": [str(link.address) for link in links if link.owed],
            "disconnected": {str(link.address): str(link.error) for link in links if link.is_down},
            "config": None if self._keeper is None else self._keeper.stats(),
        }

    def forked(self) -> None:
        """In the child of a fork: begin anew, with the first publish. What is pending is the parent's."""
        keep(self._closed, *self._clusters)
        self._thread.release()
        self._clusters.forget()
        self._is_inherited |= self._is_running
        self._is_running = self._is_closing = False
        self._closed = Event()
        if self._is_closed:
            self._closed.set()
        self._build()

    def _not_running(self) -> NotRunning:
        return NotRunning("the producer was closed" if self._is_closed else "the producer is not running: call start()")


def check_timeout(timeout: Any) -> None:
    """Raise ConfigError unless it is a number of seconds, or None."""
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ConfigError(f"timeout={timeout!r}: must be a number of seconds above 0, or None")
