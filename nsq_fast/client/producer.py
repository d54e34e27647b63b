"""What the Producers of all faces have in common.

One publish, followed downwards: here its arguments are checked (by ``publishes.Composer``), and it is made; its queue
in ``routing`` keeps it until it can leave, and chooses the connection; ``sender`` writes the command that carries it,
and takes the reply; ``protocol.publishing`` says what that makes of it; its caller is woken. What is done for the usual
publish on this way is compiled: ``_publish_path``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn

from nsq_fast._lazy import get_logger
from nsq_fast._publish_path import ProducerPath, Wakeups
from nsq_fast._record import Histogram
from nsq_fast.client.trace import TraceLog, trace_log
from nsq_fast.config import ConnectionConfig, LookupConfig, ProducerConfig, split_options
from nsq_fast.errors import ConfigError, NotRunning, PublishFailed, PublishTimeout
from nsq_fast.log_events import STARTED_ALREADY
from nsq_fast.names import DEFAULT_NSQD_TCP_PORT, Addresses, listed, parse_addresses
from nsq_fast.protocol.publishing import PLAIN, PLAIN_BATCH, Encoding

from .loop import Event, refuse_copies
from .publishes import Composer, Publish, PublishOptions, check_defer, check_timeout, of_a_part
from .sender import Sender
from .transport import check_files

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from nsq_fast.keywords import ProducerKeywords
    from nsq_fast.names import Address

    from .loop import Loop
    from .progress import ProducerProgress
    from .routing import TopicRoute

logger: logging.Logger = get_logger(__name__)

HURRIED = 0.5
"""Seconds for connections to close when whoever waits for it was interrupted."""


class ProducerCore(ProducerPath):
    """Base of the Producers: made, started, closed; and what a publish goes through before it is sent.

    A face calls ``_build`` with its loop, and has the calls of a program.
    """

    _composer: Composer
    config: ProducerConfig
    connection_config: ConnectionConfig
    lookup_config: LookupConfig
    __reduce_ex__: Callable[..., NoReturn] = refuse_copies

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
        self.nsqd_addresses: list[Address] = parse_addresses(
            nsqd_tcp_addresses, DEFAULT_NSQD_TCP_PORT, "nsqd_tcp_addresses"
        )
        self.lookupd_http_addresses: list[Any] = listed(lookupd_http_addresses, "lookupd_http_addresses")
        if not self.nsqd_addresses and not self.lookupd_http_addresses:
            raise ConfigError("nsqd_tcp_addresses or lookupd_http_addresses is needed: there is nowhere to publish to")
        check_files(self.connection_config)
        self._is_running = False
        self._is_closed = False
        self._is_closing = False
        self._is_inherited = False
        self._trace = trace
        self._composer = Composer(self.config, trace)
        self._timeout = self.config.publish_timeout
        self._sender: Any = None  # a Sender, once it is known in which loop it lives
        self._keeper: Any = None
        self._new_publish = Publish
        self._plain, self._plain_batch = PLAIN, PLAIN_BATCH
        self._made()

    def _made(self) -> None:
        """It is checked, and belongs to no loop yet: a face that knows its loop builds it."""

    def _build(self, loop: Loop) -> None:
        """Make what belongs to a loop."""
        self._loop = loop
        self._thread = loop.owner()
        self._closed = Event(loop)
        self._wakeups = self._new_wakeups()
        self._sender = Sender(self, loop, self._wakeups)
        self._routes = self._sender.routing.by_topic
        self._pending_limit = self._sender.pending_limit
        self._keeper = self._new_keeper()

    def _new_wakeups(self) -> Wakeups:
        raise NotImplementedError

    def _new_lookup(self, listener: Callable[..., object]) -> Any:
        """What polls the lookup services; None where there are none to ask."""
        if not self.lookupd_http_addresses:
            return None
        from .lookup import LookupPoller  # not needed where nsqds are configured

        return LookupPoller(self.lookupd_http_addresses, self.lookup_config, "w", listener)

    def _new_keeper(self) -> Any:
        """What follows the config source; None without one."""
        source = self.lookup_config.config_source
        if source is None:
            return None
        from .dynamic import ConfigKeeper, apply  # most clients have none

        return ConfigKeeper(source, lambda config: apply(config, self._trace, self._sender.routing.lookup), "producer")

    def _tell(self, signal: str, **values: Any) -> None:
        """Something that programs may listen for has happened."""

    @property
    def label(self) -> str:
        """What it is called in logs."""
        return f"Producer {', '.join(map(str, [*self.nsqd_addresses, *self.lookupd_http_addresses]))}"

    def __repr__(self) -> str:
        return f"<{self.label} {'running' if self._is_running else 'not running'}>"

    # Life

    async def _start(self) -> None:
        if self._is_closed:
            raise NotRunning("the producer was closed; make a new one")
        if self._is_running:
            logger.warning("%r: started already", self, extra=STARTED_ALREADY)
            return
        self._thread.claim()
        if self._keeper is not None:
            self._keeper.start(self._loop, self._sender.supervisor)
            await self._keeper.wait_first(self._loop)
            if self._is_running or self._is_closed:
                return  # another caller was faster
        self._is_running = True
        self._is_inherited = False
        self._sender.routing.start()

    async def _close(self, timeout: float | None) -> None:
        if self._is_closing:
            await self._sender.drain(timeout)
            await self._closed.wait()
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
        left = self.connection_config.connect_timeout
        try:
            await self._sender.drain(timeout)
            if deadline is not None:
                left = max(0.0, deadline - monotonic())
        except BaseException:  # who waits for it was interrupted
            self._sender.end_all()
            left = min(left, HURRIED)
            raise
        finally:
            try:
                await self._sender.close(left)
            finally:
                self._is_closing = False
                self._closed.set()
        self._tell("on_close")

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
        return self._sender is not None and bool(self._sender.pool.connected)

    def stats(self) -> dict[str, Any]:
        """What is pending, held and waiting for an nsqd; which nsqds are connected, and why the others are not.

        ``stored``, ``refused`` and ``unknown`` count the publishes that have ended, by outcome; a multipublish that
        went to several partitions counts once for each. With the outcome unknown a server may have stored it.
        ``connected`` names an nsqd once for each connection. ``config`` is what the config source said last, and why
        it cannot be read or was refused; None without one.

        ``latency`` is a HistogramStats of what publishes took until they were confirmed, of samples; None without the
        option ``histograms``.
        """
        sender: Sender | None = self._sender
        if sender is None:
            return {
                **dict.fromkeys(("pending", "stored", "refused", "unknown", "leader_moves", "lookup_errors"), 0),
                "latency": Histogram().stats() if self.config.histograms else None,
                **{"held": 0, "waiting": 0, "leaders": {}, "connected": [], "stalled": [], "disconnected": {}},
                "config": None,
            }
        links, lookup = list(sender.pool), sender.routing.lookup
        return {
            "pending": len(sender.pending.publishes),
            "stored": sender.stored_count,
            "refused": sender.refused_count,
            "unknown": sender.unknown_count,
            "leader_moves": sender.routing.leader_moves,
            "lookup_errors": 0 if lookup is None else lookup.errors,
            "latency": None if sender.latency is None else sender.latency.stats(),
            "held": sender.pending_limit.used,
            "waiting": sender.routing.waiting_count(),
            "leaders": sender.routing.leaders(),
            "connected": [str(link.address) for link in links if link.conn is not None],
            "stalled": [str(link.address) for link in links if link.owed],
            "disconnected": {str(link.address): str(link.error) for link in links if link.is_down},
            "config": None if self._keeper is None else self._keeper.stats(),
        }

    def progress(self) -> ProducerProgress:
        """Since when publishes wait, by topic, and why: one reason of ``nsq_fast.client.progress.REASONS``.

        It waits for nothing, and any thread may ask.
        """
        from .progress import producer_progress  # most programs do not ask

        return producer_progress(self)

    def _count_unconfirmed(self) -> int:
        """How many messages are not confirmed."""
        return sum(publish.weight for publish in self._sender.pending.publishes.copy())

    def _not_running(self) -> NotRunning:
        return NotRunning("the producer was closed" if self._is_closed else "the producer is not running: call start()")

    # What one publish goes through before it is sent

    def _new(self, topic: str, body: Any, defer: int | None, timeout: float | None, options: PublishOptions) -> Publish:
        """Check the arguments of a publish of one message."""
        route = self._route(topic)
        if body.__class__ is not bytes or not 0 < len(body) <= route.max_msg_size:
            self._composer.check_body(route, body)
        deadline = self._deadline(timeout)
        check_defer(defer)
        data = bytes(body)
        if len(data) > route.plain_size:
            data, options = self._composer.packed(route, data, options)
        if defer:
            encoding = self._composer.deferred(route, defer, options)
        else:
            encoding = self._composer.encoding(route, data, options.trace_id, options.headers, options.tag)
        publish = self._bound(route, data, encoding, deadline, options)
        if timeout is not None:
            publish.timeout = timeout
        return publish

    def _parts(
        self, topic: str, bodies: Iterable[Any], timeout: float | None, options: PublishOptions
    ) -> list[Publish]:
        """Check the arguments of a multipublish."""
        route = self._route(topic)
        deadline = self._deadline(timeout)
        parts = self._composer.parts(route, bodies, options)
        made = [self._bound(route, part, encoding, deadline, options, len(part)) for part, encoding in parts]
        if timeout is not None:
            for publish in made:
                publish.timeout = timeout
        return made

    def _bound(
        self,
        route: TopicRoute,
        body: Any,
        encoding: Encoding,
        deadline: float,
        options: PublishOptions,
        weight: int = 1,
    ) -> Publish:
        """A publish to where its key or partition says. Raises ConfigError when there is no such partition."""
        key, partition = options.key, options.partition
        # What has headers is refused after lookup was asked once more: the topic may have been extended since.
        is_doubtful = route.is_ext is False and encoding.kind == "PUB_EXT"
        if key is None and partition is None and not is_doubtful:
            return Publish(route.any, body, deadline, encoding, weight)
        self._composer.check_binding(key, partition)
        try:
            queue = route.destination(key, partition)
            if is_doubtful:
                queue = route.doubt()
                self._sender.routing.refresh(route.name)
            publish = Publish(queue, body, deadline, encoding, weight)
        except ConfigError:
            self._sender.routing.refresh(route.name)
            raise
        publish.key, publish.pin = key, partition
        return publish

    def _deadline(self, timeout: float | None) -> float:
        if timeout is not None:
            check_timeout(timeout)
        return monotonic() + (self._timeout if timeout is None else timeout)

    def _route(self, topic: str) -> TopicRoute:
        self._thread.check("Producer.publish()")
        if not self._is_running:
            self._resume()
        route: TopicRoute | None = self._routes.get(topic) if topic.__class__ is str else None
        if route is None:
            route = self._sender.routing.add(topic)
        route.is_used = True
        return route

    def _resume(self) -> None:
        """It does not run, and somebody publishes. Raises NotRunning."""
        raise self._not_running()

    async def _enter(self, publish: Publish, block: bool) -> None:
        """Take room, waiting for it if ``block``, and send."""
        if block:
            await self._wait_for_room(publish)
        else:
            nowhere = publish.destination.why_nowhere(publish)
            if nowhere is not None:
                raise nowhere
            self._take_room_now(publish)
        publish.destination.add(publish)

    async def _wait_for_room(self, publish: Publish) -> None:
        if not await self._pending_limit.take(publish.weight, publish.deadline):
            raise PublishTimeout(f"publish to {publish.topic!r}: {self._full()}", attempts=0)
        if not self._is_running:  # closed meanwhile
            self._pending_limit.give(publish.weight)
            raise self._not_running()

    def _take_room_now(self, publish: Publish) -> None:
        if not self._pending_limit.fits(publish.weight):
            raise PublishFailed(f"publish to {publish.topic!r}: {self._full()}", attempts=0)
        self._pending_limit.used += publish.weight

    def _full(self) -> str:
        return f"no room: max_pending={self._pending_limit.limit} messages wait for their replies"

    async def _enter_all(self, parts: Sequence[Publish], block: bool) -> None:
        """``_enter`` each part of a call. Where one of them cannot, those that were not sent yet will not be."""
        entered = 0
        try:
            for part in parts:
                await self._enter(part, block)
                entered += 1
        except BaseException as error:
            if self._withdraw(parts[:entered]) and (whole := of_a_part(error)) is not error:
                raise whole from error
            raise

    def _withdraw(self, parts: Iterable[Publish]) -> bool:
        """Nobody waits for these any more: what was not sent will not be. Whether any of it may be stored."""
        is_stored = False
        pending = self._sender.pending.publishes
        for part in parts:
            is_stored |= part.may_be_stored or (part.done and part.error is None)
            if part in pending:  # else it has ended, or not come in
                self._sender.abandon(part)
        return is_stored


ProducerCore.__init__.__qualname__ = "Producer.__init__"  # Python's own errors about arguments name what people know
