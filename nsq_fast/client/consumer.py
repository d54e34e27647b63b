"""What consumers are on every loop: their options, what they are made of, how they begin, what they tell, how they end.

A face puts a loop under it: ``nsq_fast.consumer`` gevent's hub, ``nsq_fast.aio`` asyncio's loop. The parts:
``subscriptions`` (topics, places, connections; RDY, backoff), ``subscription`` (one connection), ``workers`` (who calls
handlers, and what they can take on), ``acknowledger`` (what follows a handler, ordered partitions, handlers that run
long, messages that expire).
"""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET

from nsq_fast._codec import Message
from nsq_fast._lazy import get_logger
from nsq_fast._record import HistogramStats, Record
from nsq_fast.client.signals import LazySignal, emit
from nsq_fast.client.trace import TraceLog, trace_log
from nsq_fast.config import ConnectionConfig, ConsumerConfig, LookupConfig, split_options
from nsq_fast.errors import ConfigError, ConnectionClosed, NotRunning, NsqError, counted
from nsq_fast.log_events import (
    CLOSE_FAILED,
    CLOSE_TIMED_OUT,
    CLOSE_WAITS,
    CONSUMER_FAILED,
    GIVE_UP_CIRCULAR,
    MESSAGES_REQUEUED,
    STARTED_ALREADY,
)
from nsq_fast.names import DEFAULT_NSQD_TCP_PORT, Address, Addresses, check_channel, listed, parse_addresses
from nsq_fast.protocol.publishing import SeenKeys
from nsq_fast.protocol.rdy import RequeueDelay
from nsq_fast.protocol.topology import TopicArgument, TopicChoice

from .acknowledger import BLOCKED_POLICIES, PAUSE, Acknowledger, BlockedPolicy, Deadlines, Ordered
from .connection import CLOSE_TIMEOUT as CONNECTION_CLOSE_TIMEOUT
from .connection import TELL_AFTER, Connection
from .give_up import AGE_POLICIES, FINISH, AgePolicy, GiveUpPolicy, PublishTo, check_policy
from .loop import EndTimeout, Event, check_end_timeout, refuse_copies
from .start_position import StartPositions, parse_start
from .subscription import ConnectionStats, Counters
from .subscriptions import Flow, Subscriber, Subscriptions
from .transport import check_files
from .workers import Pools, Worker, WorkerPool, check_handler

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from nsq_fast._dispatch import HandlerLimit, PromptFins
    from nsq_fast.keywords import ConsumerKeywords

    from .dynamic import ConfigKeeper
    from .loop import Loop, Supervisor
    from .progress import ConsumerObserver, ConsumerProgress
    from .subscription import Subscription

HandlerT = TypeVar("HandlerT", bound=Callable[..., object])
BatchHandlerT = TypeVar("BatchHandlerT", bound=Callable[..., object])

CLOSING_SHARE = 0.1
SHORTEST_CLOSING = 0.1
"""What closing the connections gets of that, and gets at least, in seconds."""

HANDLERS_PAUSE = 0.01
"""Seconds between two looks at handlers whose messages are in flight no more: no answer says that they have ended."""


class ConsumerStats(Record, frozen=True):
    """A consumer.

    Attributes:
        connections: one for each nsqd known now, or for each partition.
        totals: over all nsqds there have been.
        topics: the same for each topic that is consumed now.
        given_up: messages handed to the give-up policy and finished.
        outdated: messages older than ``max_age``, handed to its policy and finished.
        max_in_flight: most messages held at once; with the option left out as many as there are connections.
        in_flight: messages received, not answered and not expired; ``unstarted`` of them wait for a handler.
        orphaned: messages of lost connections that the program still holds; they count towards max_in_flight.
        backoff_level: 0 when there is no backoff.
        backoff_left: seconds of the present pause.
        order_violations: messages of ordered partitions that lay before one delivered earlier.
        repeated: messages of ordered partitions that were delivered again.
        leader_moves: times that lookup named another leader of a partition.
        lookup_errors: questions to an nsqlookupd that got no good answer.
        config: what the config source said last, and why it cannot be read or was refused; None without one.
        blocked: deliveries of ordered messages with more than ``attempts_threshold`` attempts.
        handler_time: what handlers took, of samples; None without ``histograms``.
        message_age: from the timestamp of a message to the start of its handler, of samples; None without.
    """

    connections: tuple[ConnectionStats, ...]
    totals: Counters
    given_up: int
    max_in_flight: int
    in_flight: int
    unstarted: int
    backoff_level: int
    backoff_left: float
    is_running: bool
    is_paused: bool
    is_starved: bool
    order_violations: int = 0
    repeated: int = 0
    blocked: int = 0
    outdated: int = 0
    orphaned: int = 0
    leader_moves: int = 0
    lookup_errors: int = 0
    topics: Mapping[str, Counters] = msgspec.field(default_factory=dict)
    config: dict[str, Any] | None = None
    handler_time: HistogramStats | None = None
    message_age: HistogramStats | None = None


class OptionAttribute:
    """An option that stands in a config of its owner: ``consumer.max_tries`` for ``consumer.config.max_tries``."""

    def __init__(self, config: str) -> None:
        self._config = config
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object | None, owner: type) -> Any:
        return self if instance is None else getattr(getattr(instance, self._config), self._name)

    def __set__(self, instance: object, value: object) -> None:
        raise AttributeError(f"{self._name} cannot be changed: give it when making the {type(instance).__name__}")


class ConsumerOptions:
    """The options of a consumer that gnsq shows as attributes too. Only ``max_in_flight`` can be set."""

    config: ConsumerConfig
    lookup_config: LookupConfig
    __reduce_ex__: Callable[..., NoReturn] = refuse_copies

    max_tries: OptionAttribute = OptionAttribute("config")
    requeue_delay: OptionAttribute = OptionAttribute("config")
    low_ready_idle_timeout: OptionAttribute = OptionAttribute("config")
    max_backoff_duration: OptionAttribute = OptionAttribute("config")
    backoff_on_requeue: OptionAttribute = OptionAttribute("config")
    lookupd_poll_interval: OptionAttribute = OptionAttribute("lookup_config")
    lookupd_poll_jitter: OptionAttribute = OptionAttribute("lookup_config")


class ConsumerCore(ConsumerOptions, Generic[HandlerT, BatchHandlerT]):
    """A consumer without a loop: see ``nsq_fast.Consumer`` for its arguments, and for what it does.

    The type parameters are those of handlers.

    Attributes:
        loop, supervisor: from ``start`` on.
        ident: the number of the native thread of the loop; 0 before.
        given_up: messages handed to the give-up policy and finished.
        outdated: messages older than ``max_age``, handed to its policy and finished.
        past: counts of topics that are no longer consumed, and of what belongs to no connection.
        seen_keys: of all its messages; None unless copies are suppressed.
        headerless: topics of which was told that options for extended headers have no effect on them.
        failure: why it closed by itself; None when somebody asked for it.
    """

    ordered: Ordered

    on_message: LazySignal = LazySignal("on_message(message): like a message_handler, for any number of receivers")
    on_response: LazySignal = LazySignal("on_response(response): a reply or heartbeat of an nsqd, as bytes")
    on_error: LazySignal = LazySignal("on_error(error): an error frame, or a connection that was lost or not made")
    on_finish: LazySignal = LazySignal("on_finish(message_id): a FIN was queued")
    on_requeue: LazySignal = LazySignal("on_requeue(message_id, timeout): a REQ was queued; timeout in ms")
    on_giving_up: LazySignal = LazySignal(
        "on_giving_up(message): max_tries, or max_age, is exceeded; before a policy is called"
    )
    on_auth: LazySignal = LazySignal("on_auth(conn, response): an nsqd accepted the AUTH secret; its reply as a dict")
    on_expired: LazySignal = LazySignal(
        "on_expired(message): it was not answered before its time was over; nsqd delivers it again"
    )
    on_exception: LazySignal = LazySignal("on_exception(message, error): a handler raised")
    on_order_violation: LazySignal = LazySignal(
        "on_order_violation(message, error): an ordered partition went backwards"
    )
    on_blocked: LazySignal = LazySignal(
        "on_blocked(message): an ordered message has more attempts than attempts_threshold"
    )
    on_close: LazySignal = LazySignal("on_close(): the consumer is closed")

    def __init__(
        self,
        topic: TopicArgument,
        channel: str,
        nsqd_tcp_addresses: Addresses = (),
        lookupd_http_addresses: Addresses = (),
        name: str | None = None,
        message_handler: HandlerT | None = None,
        max_tries: int = 5,
        max_in_flight: int | None = None,
        requeue_delay: int | None = None,
        lookupd_poll_interval: float = 60,
        lookupd_poll_jitter: float = 0.3,
        low_ready_idle_timeout: float = 10,
        max_backoff_duration: float = 128,
        backoff_on_requeue: bool = True,
        *,
        batch_handler: BatchHandlerT | None = None,
        give_up: GiveUpPolicy | None = None,
        blocked_policy: BlockedPolicy = PAUSE,
        max_age_policy: AgePolicy = FINISH,
        start_position: Any = None,
        trace: TraceLog | None = None,
        **options: Unpack[ConsumerKeywords],
    ) -> None:
        self._choice = TopicChoice(topic)
        self.topic: str = str(self._choice)
        self.channel: str = check_channel(channel)
        self.nsqd_addresses: list[Address] = parse_addresses(
            nsqd_tcp_addresses, DEFAULT_NSQD_TCP_PORT, "nsqd_tcp_addresses"
        )
        given = {
            **options,
            "max_tries": max_tries,
            "max_in_flight": max_in_flight,
            "requeue_delay": requeue_delay,
            "lookupd_poll_interval": lookupd_poll_interval,
            "lookupd_poll_jitter": lookupd_poll_jitter,
            "low_ready_idle_timeout": low_ready_idle_timeout,
            "max_backoff_duration": max_backoff_duration,
            "backoff_on_requeue": backoff_on_requeue,
        }
        configs = split_options(given, ConsumerConfig, ConnectionConfig, LookupConfig)
        self.config: ConsumerConfig
        self.connection_config: ConnectionConfig
        self.lookup_config: LookupConfig
        self.config, self.connection_config, self.lookup_config = configs
        self.lookupd_addresses: list[str | tuple[str, int]] = listed(lookupd_http_addresses, "lookupd_http_addresses")
        _check_addresses(
            self.nsqd_addresses,
            self.lookupd_addresses,
            is_pattern=self._choice.pattern is not None,
            is_placed=start_position is not None,
        )
        self.check_handler("message_handler", message_handler)
        self.check_handler("batch_handler", batch_handler)
        self._check_policy("give_up", give_up)
        if message_handler is not None and batch_handler is not None:
            raise ConfigError("message_handler and batch_handler are both given: choose one")
        if name is not None and not isinstance(name, str):
            raise ConfigError(f"name={name!r}: must be a string, or None")
        check_files(self.connection_config)
        if self.config.ordered and (rate := self.connection_config.sample_rate):
            raise ConfigError(f"ordered=True with sample_rate={rate}: ordered messages cannot be sampled; choose one")
        self.name: str = name or f"nsq_fast.consumer.{self._choice.label}.{channel}"
        self.logger: logging.Logger = get_logger(self.name)
        self.given_up = self.outdated = 0
        self._give_up = give_up
        check = self._check_policy
        self._blocked_policy: BlockedPolicy = check_policy("blocked_policy", blocked_policy, BLOCKED_POLICIES, check)
        self._max_age_policy: AgePolicy = check_policy("max_age_policy", max_age_policy, AGE_POLICIES, check)
        if not isinstance(trace, TraceLog | None):
            raise ConfigError(f"trace={trace!r}: must be a TraceLog, or None")
        self.trace: TraceLog = trace or trace_log
        self._handlers: tuple[Any, Any] = message_handler, batch_handler
        self._build(parse_start(start_position))

    def _build(self, start: StartPositions | None) -> None:
        config = self.config
        delay = RequeueDelay(
            config.requeue_delay,
            base=config.requeue_base_delay,
            factor=config.requeue_factor,
            cap=config.requeue_max_delay,
            jitter=config.requeue_jitter,
            random=random.random,
        )
        self.loop: Loop
        self.supervisor: Supervisor
        self.failure: NsqError | None = None
        self._is_started = self._is_closing = self._is_closed = False
        self._has_closed: Event | None = None
        self.acknowledger: Acknowledger = self.acknowledger_class(
            self, *self._handlers, self._give_up, self._max_age_policy, delay
        )
        self.ordered = self.acknowledger.ordered = Ordered(self, self._blocked_policy)
        self.pools: Pools = Pools(self)
        self.flow = Flow(self)
        self.past: Counters = Counters()
        self.seen_keys: SeenKeys | None = SeenKeys(config.suppress_retried) if config.suppress_retried else None
        self.headerless: set[str] = set()
        self.ident: int = 0
        self._observer: ConsumerObserver | None = None
        self._keeper: ConfigKeeper | None = None
        if self.lookup_config.config_source is not None:
            from .dynamic import ConfigKeeper, apply  # most consumers have none

            self._keeper = ConfigKeeper(
                self.lookup_config.config_source,
                lambda config: apply(config, self.trace, self._subscriptions.lookup),
                self.name,
            )
        self._subscriptions: Subscriptions = Subscriptions(self, self._choice, start)
        self.deadlines: Deadlines = Deadlines(self, lambda: [each.subscription for each in self._subscriptions])

    # What a face has

    flow: Flow
    acknowledger_class: ClassVar[type[Acknowledger]] = Acknowledger

    def check_handler(self, name: str, handler: Any) -> None:
        """Raise ConfigError unless ``handler`` is None, or can be one."""
        check_handler(name, handler)

    def _check_policy(self, name: str, policy: Any) -> None:
        check_handler(name, policy)

    def new_loop(self) -> Loop:
        """That in which the caller runs."""
        raise NotImplementedError

    def new_connection(self, address: Address, config: ConnectionConfig, owner: Subscription) -> Connection:
        return Connection(address, config, owner, self.loop)

    def new_pool(self, limit: HandlerLimit, prompt: PromptFins) -> WorkerPool:
        """Make a pool without workers."""
        raise NotImplementedError

    def new_worker(self, pool: WorkerPool) -> Worker:
        return Worker(pool)

    def start_worker(self, worker: Worker, name: str) -> None:
        raise NotImplementedError

    def is_failure(self, error: BaseException) -> bool:
        """Whether what a handler has raised says that it failed, and not that it, or the program, is to end."""
        return isinstance(error, Exception)

    def escaped(self, error: BaseException, message: Message) -> None:
        """A handler has raised what is no failure. Must not raise."""
        raise NotImplementedError

    def apart(self, function: Callable[..., object], *arguments: Any) -> Any:
        """Call what blocks where it keeps nobody from running, for a give-up policy, which returns the result."""
        raise NotImplementedError

    def dead_letters(self, options: dict[str, Any]) -> Any:
        """A Producer on the loop, for a give-up policy, made with these options; it is started when it is used first.
        Waits for nothing."""
        raise NotImplementedError

    # Running

    def _start(self, is_iterated: bool) -> None:
        if is_iterated and (count := self.config.handler_threads):
            raise ConfigError(f"handler_threads={count} needs a handler: who iterates handles the messages itself")
        if self._is_closing:
            raise NotRunning(f"{self.name}: already closed")
        if self._is_started:
            self.logger.warning("%s: already started", self.name, extra=STARTED_ALREADY)
            return
        self._is_started = True
        self._live_here()
        self._tell_circles()
        self.pools.start(is_iterated)
        self.flow.start(self.loop, self.supervisor)
        self.deadlines.start(self.loop, self.supervisor)
        if self._keeper is not None:
            self._keeper.start(self.loop, self.supervisor)

    def _tell_circles(self) -> None:
        for policy in (self._give_up, self._blocked_policy, self._max_age_policy):
            topic = policy.topic if isinstance(policy, PublishTo) else None
            # Where it consumes one topic, the end of that topic is meant.
            if topic is not None and self._choice.has_among_others(topic):
                self.logger.warning(
                    "%s: consumes topic %s, and publishes to it what it gives up: what fails there comes again for"
                    " ever; leave that topic out of those that are consumed",
                    self.name, topic, extra=GIVE_UP_CIRCULAR,
                )  # fmt: skip

    async def _subscribe(self) -> None:
        """The second half of the start: connections are made once the config source has said what it knows."""
        if self._keeper is not None:
            await self._keeper.wait_first(self.loop)
        if not self._is_closing:
            self._subscriptions.start()

    def _live_here(self) -> None:
        """Live in the caller's loop from now on: of whoever is the first to start it, wait for its end or close it."""
        if self._has_closed is None:
            self.loop = loop = self.new_loop()
            self.ident = loop.get_ident()
            self.supervisor = loop.supervisor(self.logger, lambda error: emit(self, "on_error", error=error))
            self._has_closed = Event(loop)
            if self._is_closed:
                self._has_closed.set()

    async def _wait_closed(self, timeout: float | None = None) -> bool:
        """Wait until it is closed, ``timeout`` seconds at most; whether it is. Raises what it closed of."""
        check_end_timeout(timeout)
        if timeout is None and not self._is_started and not self._is_closing:
            raise NotRunning(
                f"{self.name}: join() before start(): call start(block=False) first, or start(), which joins"
            )
        self._live_here()
        assert self._has_closed is not None
        is_closed = await self._has_closed.wait(timeout)
        if is_closed and self.failure is not None:
            raise self.failure
        return is_closed

    # The end, in order, so that nothing acknowledged is lost and nothing waits longer than it must.
    #
    # CLS sets RDY to 0 and is answered with CLOSE_WAIT; FIN and REQ are taken as before: nsqio/nsq: nsqd/client_v2.go,
    # StartClose; nsqd/protocol_v2.go, CLS.
    #
    # 1. make no connection any more: pauses between attempts end, lookup is stopped;
    # 2. CLS to every nsqd, so that it sends nothing more (this takes the place of RDY 0), and REQ 0 for what no handler
    #    has begun with, also for what still arrives: other consumers get it at once;
    # 3. wait for CLOSE_WAIT, behind which nothing arrives but what nsqd was sending just then;
    # 4. let running handlers finish, also those whose messages have expired, and wait for the answers of messages
    #    handled asynchronously: FIN and REQ are still accepted;
    # 5. flush the last FINs and close the connections;
    # 6. end the workers.
    #
    # Steps 1 and 2 happen at once, so that no handler begins after close() was called. 3 and 4 together end after the
    # timeout; without drain they are left out. What is not answered then is delivered again by nsqd when it times out,
    # or, with ``requeue_unfinished``, is given back with REQ 0.
    # Step 5 has a share of the timeout of its own, and happens on all connections at once: a server that does not
    # answer makes it last as long as it may.

    def begin_closing(self, drain: bool = True, timeout: EndTimeout = UNSET) -> None:
        """Steps 1 and 2; the others follow by themselves. Does not block; later calls do nothing."""
        if self._is_closing:
            return
        if timeout is UNSET:
            timeout = self.config.close_timeout
        self._is_closing = True
        self._live_here()
        if self._keeper is not None:
            self._keeper.stop()
        self._subscriptions.freeze()
        for subscriber in self._subscriptions:
            subscriber.begin_closing()
        self.supervisor.job(f"{self.name} closer", self._finish_closing, drain, timeout)

    def fail(self, error: NsqError) -> None:
        """Begin to close because of ``error``, which ``start`` and ``join`` then raise. Does not block."""
        if not self._is_closing:
            self.failure = error
            self.logger.error("%s: closing: %s", self.name, error, extra=CONSUMER_FAILED)
            self.begin_closing()

    def give_back(self) -> None:
        """REQ 0 for all that is held, of whom it may be. Does not block."""
        for subscriber in self._subscriptions:
            subscriber.subscription.give_back_unstarted()
            subscriber.subscription.give_back_unfinished()

    async def _finish_closing(self, drain: bool, timeout: float | None) -> None:
        try:
            self._subscriptions.stop()
            await self._close_subscribers(list(self._subscriptions), drain, timeout)
        finally:
            self._stop_parts()
            for policy in (self._give_up, self._blocked_policy, self._max_age_policy):
                await self._close_policy(policy)
            self._closed()

    def _stop_parts(self) -> None:
        self.flow.stop()
        self.deadlines.stop()
        self.pools.stop()
        if self._observer is not None:
            self._observer.stop()

    def _closed(self) -> None:
        """All is done: tell who waits."""
        self._is_closing = self._is_closed = True
        try:
            emit(self, "on_close")
        finally:  # a receiver may be ended by what is no Exception
            if self._has_closed is not None:
                self._has_closed.set()

    async def _close_policy(self, policy: object) -> None:
        close = getattr(policy, "close", None)
        if close is None:
            return
        try:
            result = close()
            if hasattr(result, "__await__"):
                await result
        except Exception:  # a user's policy must not keep join() waiting
            self.logger.exception("closing the give-up policy failed", extra=CLOSE_FAILED)

    async def _close_subscribers(self, subscribers: Sequence[Subscriber], drain: bool, timeout: float | None) -> None:
        """Steps 3 to 5, each for all connections before the next."""
        closing_time = CONNECTION_CLOSE_TIMEOUT
        deadline = None
        if timeout is not None:
            share = min(timeout * CLOSING_SHARE, CONNECTION_CLOSE_TIMEOUT)
            deadline = monotonic() + timeout - share
            closing_time = max(share, SHORTEST_CLOSING)
        for each in subscribers:
            if not each.is_connected:  # it is being made, and nobody will use it
                each.connection.close(ConnectionClosed(f"{each.address}: the consumer is closed"))
        if drain:
            await self._drain(subscribers, deadline)
        if self.config.requeue_unfinished:
            self._requeue_unfinished(subscribers)
        tasks = [self.supervisor.job("closing", each.close, closing_time) for each in subscribers]
        for task in tasks:
            await task.join()

    async def _drain(self, subscribers: Sequence[Subscriber], deadline: float | None) -> None:
        soon = monotonic() + TELL_AFTER
        if (deadline is None or soon < deadline) and not all(
            [await each.subscription.wait_for_end(soon) for each in subscribers]
        ):
            live = [each for each in subscribers if each.is_connected]
            waits = [f"CLOSE_WAIT of {each.address}" for each in live if each.subscription.is_awaiting_close]
            if count := sum(each.connection.in_flight for each in live):
                waits.insert(0, f"{counted(count, 'message')} without a response")
            self._tell_waits(waits, deadline)
        for each in subscribers:
            if not await each.subscription.wait_for_end(deadline):
                if each.subscription.is_awaiting_close:
                    self.logger.warning("%s: no CLOSE_WAIT in time", each.address, extra=CLOSE_TIMED_OUT)
                if count := each.connection.in_flight:
                    text = "%s: closed with %s unanswered"
                    self.logger.warning(text, each.address, counted(count, "message"), extra=CLOSE_TIMED_OUT)
        await self._wait_for_handlers(deadline)

    def _tell_waits(self, waits: Sequence[str], deadline: float | None) -> None:
        """Say what the close waits for; nothing, if all of it has just come."""
        if waits:
            left = "there is no timeout" if deadline is None else f"at most {deadline - monotonic():.1f} s more"
            self.logger.warning("closing waits for %s; %s", ", ".join(waits), left, extra=CLOSE_WAITS)

    async def _wait_for_handlers(self, deadline: float | None) -> None:
        """Wait for those whose messages are answered, expired, or lost: they use what the program has."""
        if self.pools.is_iterated:
            return  # who iterates is not waited for
        tell_at = monotonic() + TELL_AFTER
        while running := sum(bool(worker.current) for worker in self.pools.workers()):
            now = monotonic()
            if deadline is not None and now >= deadline:
                self.logger.warning("closed while handlers run", extra=CLOSE_TIMED_OUT)
                return
            if now >= tell_at:
                tell_at = inf
                self._tell_waits([f"the end of {counted(running, 'handler')}"], deadline)
            await self.loop.sleep(HANDLERS_PAUSE)

    def _requeue_unfinished(self, subscribers: Sequence[Subscriber]) -> None:
        for subscriber in subscribers:
            subscriber.subscription.give_back_unstarted()
            if count := subscriber.subscription.give_back_unfinished():
                text = "%s: requeued %s that handlers have not finished"
                self.logger.warning(text, subscriber.address, counted(count, "message"), extra=MESSAGES_REQUEUED)

    # Flow

    @property
    def max_in_flight(self) -> int:
        """Most messages held at once, over all connections. May be set at any time; 0 holds everything back, None
        means one for each connection there is, and no fewer than handlers may run.
        """
        return self.flow.max_in_flight

    @max_in_flight.setter
    def max_in_flight(self, value: int | None) -> None:
        config = self.config.replace(max_in_flight=value)  # raises what is wrong with it
        self._change("Consumer.max_in_flight", self._set_limit, config)

    def _set_limit(self, config: ConsumerConfig) -> None:
        self.config = config
        self.flow.changed()
        self.pools.limit_changed()

    def pause(self) -> None:
        """Ask for no more messages (RDY 0). What has been received is still handled."""
        self._change("Consumer.pause()", self._set_paused, True)

    def resume(self) -> None:
        """End ``pause``."""
        self._change("Consumer.resume()", self._set_paused, False)

    def _set_paused(self, is_paused: bool) -> None:
        self.flow.is_paused = is_paused
        self.flow.changed()

    @property
    def is_left(self) -> bool:
        """Whether it is iterated and nobody does: it was left in the middle of a loop, say."""
        pool = self.pools.shared
        return pool is not None and not pool.workers

    def _change(self, call: str, function: Callable[[Any], None], value: Any) -> None:
        """Have a change made in the loop. Raises WrongThread where the caller may not make this call."""
        function(value)

    # What a program may ask at any time, in any thread: nothing here changes anything

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
        return self._is_started and not self._is_closing

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
        lookup, timing = self._subscriptions.lookup, self.acknowledger.timing
        return ConsumerStats(
            connections=connections,
            totals=totals,
            given_up=self.given_up,
            max_in_flight=self.flow.max_in_flight,
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
            outdated=self.outdated,
            orphaned=self._count_orphaned(),
            leader_moves=self._subscriptions.leader_moves,
            lookup_errors=0 if lookup is None else lookup.errors,
            topics=topics,
            config=None if self._keeper is None else self._keeper.stats(),
            handler_time=None if timing is None else timing.handler_time.stats(),
            message_age=None if timing is None else timing.message_age.stats(),
        )

    def progress(self) -> ConsumerProgress:
        """What moves, and one reason of ``nsq_fast.client.progress.REASONS`` where nothing is done.

        It waits for nothing, and any thread may ask.
        """
        if self._observer is None:
            from .progress import ConsumerObserver  # most programs do not ask

            self._observer = ConsumerObserver(self, self._subscriptions)
        return self._observer.look()

    def _count_orphaned(self) -> int:
        """Counting drops what is answered from the ledgers: only their own thread may do it."""
        return self.pools.orphaned

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__name__} {self.topic} {self.channel}>"


def warn_unclosed(consumer: AnyConsumer) -> None:
    """What it runs in ends: warn, as of a file, that nobody has closed it."""
    text = f"unclosed consumer {consumer!r}: close it, or use it in a with block"
    warnings.warn(text, ResourceWarning, stacklevel=2, source=consumer)


def _check_addresses(nsqds: Sequence[Address], lookupds: Sequence[Any], *, is_pattern: bool, is_placed: bool) -> None:
    if not nsqds and not lookupds:
        raise ConfigError(
            "must specify at least one nsqd or lookupd: nsqd_tcp_addresses and lookupd_http_addresses are empty"
        )
    if is_placed and not lookupds:
        raise ConfigError("start_position needs lookupd_http_addresses: it is set over HTTP")
    if is_pattern and (nsqds or not lookupds):
        raise ConfigError(
            "a pattern of topics takes what lookup lists: give lookupd_http_addresses, and no nsqd_tcp_addresses"
            " (an nsqd of the original creates each topic that it is asked for)"
        )


ConsumerCore.__init__.__qualname__ = "Consumer.__init__"  # Python's own errors about arguments name what people know

AnyConsumer: TypeAlias = ConsumerCore[Any, Any]
