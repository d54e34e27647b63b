"""Consumer: take the messages of some topics from all the nsqds that have them, and answer every one of them.

This module is the public face and puts the parts together: ``subscriber`` (one
nsqd), ``flow`` (RDY and backoff), ``dispatch`` (worker greenlets), ``disposition``
(what follows a handler), ``deadlines`` (handlers that run long, messages that expire), ``closing``.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from gevent import get_hub

from nsq_fast._codec import Message
from nsq_fast.config import ConnectionConfig, ConsumerConfig, LookupConfig, split_options
from nsq_fast.errors import ConfigError, NotRunning, NsqError
from nsq_fast.log_events import STARTED_ALREADY
from nsq_fast.names import DEFAULT_NSQD_TCP_PORT, Address, check_channel, listed, parse_addresses
from nsq_fast.protocol.backoff import RequeueDelay
from nsq_fast.protocol.idempotence import SeenKeys
from nsq_fast.protocol.topic_choice import TopicArgument, TopicChoice

from .consuming.closing import CLOSE_TIMEOUT, Closing, check_timeout
from .consuming.deadlines import Deadlines
from .consuming.disposition import BatchHandler, Disposition, Handler
from .consuming.expiry import Expiry
from .consuming.failures import GiveUpPolicy
from .consuming.flow import Flow, backoff_of
from .consuming.handlers import check_handler
from .consuming.load import Workload
from .consuming.observed import ObservedConsumer
from .consuming.ordered import PAUSE, BlockedPolicy, Ordered, check_blocked_policy
from .consuming.orphans import Orphans
from .consuming.stats import Counters
from .consuming.subscriptions import Subscriptions
from .consuming.tracing import Tracer
from .consuming.worker_pools import WorkerPools
from .dynamic import keeper_of
from .fork import keep, tell_forks
from .net.tls import check_tls_options
from .option_attributes import ConsumerOptions
from .owner_thread import OwnerThread
from .signals import LazySignal, emit, is_heard, receivers
from .supervised import Supervisor
from .trace import TraceLog, trace_log
from .waiting import is_interrupting, may_wait

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from nsq_fast.keywords import ConsumerKeywords
    from nsq_fast.protocol.adaptive_limit import AdaptiveLimit
    from nsq_fast.protocol.dynamic_config import DynamicConfig
    from nsq_fast.protocol.position import StartPositions

AddressArgument = str | Iterable[str | tuple[str, int]]


class Consumer(ObservedConsumer, ConsumerOptions):
    """Consume one topic, or several, through a channel.

    A handler is called as ``message_handler(consumer, message)``. When it returns, the message is finished, unless
    the handler answered it (``message.finish()``, ``message.requeue()``) or called ``message.enable_async()`` to
    answer later. RequeueMessage requeues it; any other exception is logged and requeues it as a failure. By default
    one handler runs at a time for each nsqd, in the order of arrival; ``concurrency=N`` runs N over all.

    Instead of a handler, iterate: ``for message in consumer``. Asking for the next message finishes the one before.

    Args:
        topic: what to consume: the name of a topic, several names, or a compiled regular expression
            (``re.compile("orders_.*")``) that the whole name has to match. Topics that match later are taken up when
            lookup lists them. ``message.topic`` says where a message came from.
        channel: of each of these topics. ``#ephemeral`` channels vanish with their last consumer.
        nsqd_tcp_addresses: nsqds to connect to, always; 'host:port', or several. Default port 4150.
        lookupd_http_addresses: nsqlookupds that know which nsqds have the topic. Default port 4161.
        name: of the logger; default ``nsq_fast.consumer.<topic>.<channel>``; of several topics ``<first>+<others>``.
        message_handler: called with every message.
        max_tries: attempts before a message goes to ``give_up``; 0: no limit.
        max_in_flight: most messages held at once, over all topics and connections; None: one for each connection. With
            a number below that of the connections they take turns.
        requeue_delay: ms until a failed message is delivered again; None: computed from its attempts.
        lookupd_poll_interval, lookupd_poll_jitter: s, and the share that chance adds.
        low_ready_idle_timeout: s after which an idle connection passes its RDY on, when there are more
            connections than ``max_in_flight``.
        max_backoff_duration: longest pause of backoff in s; 0: no backoff.
        backoff_on_requeue: whether RequeueMessage counts as a failure for backoff.
        handler_threads: N runs handlers on N native threads, N over all connections at once: for handlers that block.
            There ``consumer.close()`` and the messages' own methods may be called, and no other method of ours.
        batch_handler: in place of ``message_handler``; called as ``batch_handler(consumer, messages)`` with at most
            ``batch_size`` messages of one topic, as many as are there. It may answer each by itself; the others are
            finished when it returns and requeued when it raises.
        give_up: called as ``give_up(consumer, message)`` for a message that exceeds ``max_tries``; see ``failures``.
        blocked_policy: what becomes of an ordered message with more attempts than ``attempts_threshold``: ``pause``
            (its handler goes on trying, after pauses that grow), ``retry`` (without pauses), ``stop`` (the consumer),
            or a give-up policy, in place of the handler.
        start_position: redesigned: where the channel begins, for everybody on it: 'end', a datetime,
            'timestamp:<unix seconds>', 'offset:<bytes>', 'count:<messages>', or a mapping of partition numbers to
            these. It is set where the channel does not exist yet or has never confirmed a message; a restart, or a
            second instance, goes on where the channel is. ``start_position_policy='each_start'`` sets it at each
            start of each instance: then what the others have not handled is skipped, or comes again. Needs lookup.
        trace: the trace log; default: the one that all share. Nothing is recorded unless it is switched on.
        options: any other option of ConsumerConfig, ConnectionConfig or LookupConfig.

    Raises ConfigError (a ValueError) or NameInvalid for an argument that is wrong.

    The signals ``on_...`` are blinker signals; the sender is the consumer.
    """

    on_message = LazySignal("on_message(message): like a message_handler, for any number of receivers")
    on_response = LazySignal("on_response(response): a reply or heartbeat of an nsqd, as bytes")
    on_error = LazySignal("on_error(error): an error frame, or a connection that was lost or not made")
    on_finish = LazySignal("on_finish(message_id): a FIN was queued")
    on_requeue = LazySignal("on_requeue(message_id, timeout): a REQ was queued; timeout in ms")
    on_giving_up = LazySignal("on_giving_up(message): max_tries is exceeded; before the policy is called")
    on_auth = LazySignal("on_auth(conn, response): an nsqd accepted the AUTH secret; its reply as a dict")
    on_expired = LazySignal("on_expired(message): it was not answered before its time was over; nsqd delivers it again")
    on_exception = LazySignal("on_exception(message, error): a handler raised")
    on_order_violation = LazySignal("on_order_violation(message, error): an ordered partition went backwards")
    on_blocked = LazySignal("on_blocked(message): an ordered message has more attempts than attempts_threshold")
    on_close = LazySignal("on_close(): the consumer is closed")

    flow: Flow
    disposition_class: ClassVar[type[Disposition]] = Disposition

    def __init__(
        self,
        topic: TopicArgument,
        channel: str,
        nsqd_tcp_addresses: AddressArgument = (),
        lookupd_http_addresses: AddressArgument = (),
        name: str | None = None,
        message_handler: Handler | None = None,
        max_tries: int = 5,
        max_in_flight: int | None = None,
        requeue_delay: int | None = None,
        lookupd_poll_interval: float = 60,
        lookupd_poll_jitter: float = 0.3,
        low_ready_idle_timeout: float = 10,
        max_backoff_duration: float = 128,
        backoff_on_requeue: bool = True,
        *,
        batch_handler: BatchHandler | None = None,
        give_up: GiveUpPolicy | None = None,
        blocked_policy: BlockedPolicy = PAUSE,
        start_position: Any = None,
        trace: TraceLog | None = None,
        **options: Unpack[ConsumerKeywords],
    ) -> None:
        self._choice = TopicChoice(topic)
        self.topic = str(self._choice)
        self.channel = check_channel(channel)
        self.nsqd_addresses = parse_addresses(nsqd_tcp_addresses, DEFAULT_NSQD_TCP_PORT, "nsqd_tcp_addresses")
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
        self.lookupd_addresses = listed(lookupd_http_addresses, "lookupd_http_addresses")
        _check_addresses(self.nsqd_addresses, self.lookupd_addresses, needs_lookup=start_position is not None)
        if self._choice.pattern is not None:
            _check_addresses_of_pattern(self.nsqd_addresses, self.lookupd_addresses)
        check_handler("message_handler", message_handler)
        check_handler("batch_handler", batch_handler)
        check_handler("give_up", give_up)
        if message_handler is not None and batch_handler is not None:
            raise ConfigError("message_handler and batch_handler are both given: choose one")
        if name is not None and not isinstance(name, str):
            raise ConfigError(f"name={name!r}: must be a string, or None")
        check_tls_options(self.connection_config)
        self.name = name or f"nsq_fast.consumer.{self._choice.label}.{channel}"
        self.logger = logging.getLogger(self.name)
        self.supervisor = Supervisor(self.logger, lambda error: emit(self, "on_error", error=error))
        self.given_up = 0
        self._thread = OwnerThread()
        self._give_up = give_up
        self._blocked_policy = check_blocked_policy(blocked_policy)
        if not isinstance(trace, TraceLog | None):
            raise ConfigError(f"trace={trace!r}: must be a TraceLog, or None")
        self._made_of = message_handler, batch_handler, trace or trace_log
        self._build(*self._made_of, _positions(start_position))
        tell_forks(self)

    def _build(
        self,
        message_handler: Handler | None,
        batch_handler: BatchHandler | None,
        trace: TraceLog,
        start: StartPositions | None,
    ) -> None:
        config = self.config
        delay = RequeueDelay(
            config.requeue_delay,
            base=config.requeue_base_delay,
            factor=config.requeue_factor,
            cap=config.requeue_max_delay,
            jitter=config.requeue_jitter,
            random=random.random,
        )
        self.disposition = self.disposition_class(self, message_handler, batch_handler, self._give_up, delay)
        self.ordered = self.disposition.ordered = Ordered(self, self._blocked_policy, self.logger)
        idle_timeout = config.low_ready_idle_timeout
        self.workload = Workload(Orphans(), is_bounded=config.drop_expired)
        self.flow = Flow(
            config.max_in_flight,
            idle_timeout,
            backoff_of(config),
            self.workload,
            self.supervisor,
            self.logger,
            _adaptive_limit(config),
        )
        self.past = Counters()
        self.seen_keys = SeenKeys(config.suppress_retried) if config.suppress_retried else None
        self.headerless: set[str] = set()
        self.expiry = Expiry(self)
        self.deadlines = Deadlines(
            lambda: [each.subscription for each in self._subscriptions],
            self.workload,
            self.expiry.report_orphans,
            self.flow.changed,
            config.auto_touch,
            self.supervisor,
            self.logger,
        )
        self.tracer = Tracer(trace, self.channel)
        self.workers = WorkerPools(self.disposition, self.workload, lambda: self.flow.limit, self.name, self._thread)
        self._is_started = False
        self._subscriptions: Subscriptions = Subscriptions(self, self._choice, start)
        self._keeper = keeper_of(self.lookup_config.config_source, self._apply_config, self.supervisor, self.name)
        policies = self._give_up, self._blocked_policy
        self._closing = Closing(self, self._subscriptions, policies, self._keeper)

    def _apply_config(self, config: DynamicConfig) -> None:
        """Do what a new document says. Raises ConfigError where it cannot be done, before any of it is."""
        from .lookupd_list import lookupd_changes  # most clients have no config source

        lookup = self._subscriptions.lookup
        changes = lookupd_changes(config, lookup)
        if config.routes and lookup is None:
            raise ConfigError("routes: without lookupd_http_addresses a consumer cannot leave its nsqds")
        self._made_of[2].follow(config.share if config.trace else None)
        if lookup is not None:
            lookup.change_lookupds(*changes)
        self._subscriptions.moved.follow(config.routes)

    # Running

    def start(self, block: bool = True) -> None:
        """Begin to consume. With ``block``, return only when the consumer is closed.

        Raises RuntimeError when there is neither a handler nor a receiver of ``on_message``, NotRunning after close;
        with ``block`` also what ``join`` raises.
        """
        self._thread.check("Consumer.start()")
        if not self.disposition.has_handler:
            raise RuntimeError("no receivers connected to on_message, and no message_handler or batch_handler")
        self._start(is_iterated=False)
        if block:
            self.join()

    def _start(self, is_iterated: bool) -> None:
        if is_iterated and (count := self.config.handler_threads):
            raise ConfigError(f"handler_threads={count} needs a handler: who iterates handles the messages itself")
        if self._closing.has_begun:
            raise NotRunning(f"{self.name}: already closed")
        if self._is_started:
            self.logger.warning("%s: already started", self.name, extra=STARTED_ALREADY)
            return
        if is_heard(self, "on_message"):
            for receiver in receivers(self.on_message, self):
                check_handler("a receiver of on_message", receiver)
        self._is_started = True
        self._thread.claim()
        self.workers.start(self.config, is_iterated, self.logger)
        self.flow.start(f"{self.name} flow")
        self.deadlines.start(f"{self.name} deadlines")
        if self._keeper is not None:
            self._keeper.start()
            self._keeper.wait_first()
        if not self._closing.has_begun:
            self._subscriptions.start()

    def join(self, timeout: float | None = None, raise_error: bool = False) -> bool:
        """Wait until the consumer is closed; False if ``timeout`` seconds passed first.

        Raises NotRunning when it would wait for ever: without a timeout, before ``start`` and ``close``.

        ``raise_error`` is taken for gnsq's sake: lost connections are made again, so there is no error to raise.
        What no new attempt can cure is raised always, and closes the consumer: a subscription that the servers refuse
        (OrderedSubRequired, ExtendSubRequired, ConfigError...) when there is no other, OrderViolated and
        PartitionBlocked when a policy says ``stop``.
        """
        self._thread.check("Consumer.join()")
        if timeout is None and not self._is_started and not self._closing.has_begun:
            raise NotRunning(
                f"{self.name}: join() before start(): call start(block=False) first, or start(), which joins"
            )
        is_closed = bool(self._closing.done.wait(timeout))
        if is_closed and self._closing.failure is not None:
            raise self._closing.failure
        return is_closed

    def __enter__(self) -> Consumer:
        self._thread.check("Consumer.start()")
        self._start(is_iterated=not self.disposition.has_handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Message]:
        """Take messages one by one, until the consumer is closed; starts it if need be.

        Asking for the next message finishes the one before, unless it was answered or made asynchronous. A message
        at which the loop is left early is requeued, unless it was answered.
        """
        self._thread.check("Consumer.iter()")
        if self.disposition.has_handler:
            raise RuntimeError("a consumer with a handler cannot be iterated")
        if not self._is_started:
            self._start(is_iterated=True)
        pool = self.workers.shared
        if pool is None:
            raise RuntimeError("a consumer that was started with a handler cannot be iterated")
        from .consuming.iteration import messages  # most consumers have a handler

        return messages(pool, self.disposition, self._closing)

    # Closing

    def close(self, drain: bool = True, timeout: float | None = CLOSE_TIMEOUT) -> None:
        """Stop consuming, gracefully: see ``closing`` for the order of things.

        Called in a handler, in a receiver of a signal, in a handler of ``signal.signal`` or in the hub it only begins
        to close; ``join`` waits for the end. Later calls wait for the first.

        Args:
            drain: let running handlers and asynchronous messages be answered first.
            timeout: s that all of it may take; None: draining may take for ever.
        """
        is_in_handler = self._thread.is_served_here
        if not is_in_handler:
            self._thread.check("Consumer.close()")
        check_timeout(timeout)
        if is_in_handler:
            self._thread.hand_over(self._closing.begin, drain, timeout)
            return
        if is_interrupting():
            get_hub().loop.run_callback(self._closing.begin, drain, timeout)
            return
        self._closing.begin(drain, timeout)
        if may_wait(self.workers.greenlets()):
            self._closing.done.wait()

    def fail(self, error: NsqError) -> None:
        """Close because of ``error``, which ``start`` and ``join`` then raise. Does not block."""
        self._closing.fail(error)

    def forked(self) -> None:
        """In the child of a fork: not started, whatever the parent's is; ``start`` makes connections of its own."""
        if not self._is_started:
            return
        keep(vars(self).copy())
        self._thread.release()
        is_closed = self._closing.has_begun
        self._build(*self._made_of, None)
        if is_closed:
            self._closing.skip()

    # Flow

    @property
    def max_in_flight(self) -> int:
        """Most messages held at once, over all connections. May be set at any time; 0 holds everything back, None
        means one for each connection there is.
        """
        return self.flow.limit

    @max_in_flight.setter
    def max_in_flight(self, value: int | None) -> None:
        self._thread.check("Consumer.max_in_flight")
        self.config = self.config.replace(max_in_flight=value)
        self.flow.max_in_flight = self.config.max_in_flight
        self.flow.changed()
        self.workers.limit_changed()

    def pause(self) -> None:
        """Ask for no more messages (RDY 0). What has been received is still handled."""
        self._thread.check("Consumer.pause()")
        self.flow.is_paused = True
        self.flow.changed()

    def resume(self) -> None:
        """End ``pause``."""
        self._thread.check("Consumer.resume()")
        self.flow.is_paused = False
        self.flow.changed()


def _positions(start_position: Any) -> StartPositions | None:
    """Where the channel is to begin. Raises ConfigError."""
    if start_position is None:
        return None
    from nsq_fast.protocol.position import parse_start  # most consumers go on where their channel is

    return parse_start(start_position)


def _adaptive_limit(config: ConsumerConfig) -> AdaptiveLimit | None:
    if not config.adaptive_in_flight:
        return None
    from nsq_fast.protocol.adaptive_limit import AdaptiveLimit  # most consumers have a fixed one

    return AdaptiveLimit()


def _check_addresses(nsqds: Sequence[Address], lookupds: Sequence[object], needs_lookup: bool) -> None:
    if not nsqds and not lookupds:
        raise ConfigError(
            "must specify at least one nsqd or lookupd: nsqd_tcp_addresses and lookupd_http_addresses are empty"
        )
    if needs_lookup and not lookupds:
        raise ConfigError("start_position needs lookupd_http_addresses: it is set over HTTP")


def _check_addresses_of_pattern(nsqds: Sequence[Address], lookupds: Sequence[object]) -> None:
    if nsqds or not lookupds:
        raise ConfigError(
            "a pattern of topics takes what lookup lists: give lookupd_http_addresses, and no nsqd_tcp_addresses"
            " (an nsqd of the original creates each topic that it is asked for)"
        )
