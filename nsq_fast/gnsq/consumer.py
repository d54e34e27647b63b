"""Consumer: that of nsq_fast, with the arguments, attributes and methods of gnsq's, those that begin with an underscore
included: programs' tests use them. And the deprecated Reader.

gnsq has a backoff for each connection; ours is one for the consumer, as NSQ's documentation asks for. So all
connections show the same state, unless the option backoff_scope="connection" gives each its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle
from math import inf
from multiprocessing import cpu_count
from time import monotonic
from typing import Any, ClassVar

from gevent import sleep
from msgspec import UNSET

from nsq_fast import _codec
from nsq_fast._codec import Message
from nsq_fast.client.acknowledger import NO_LIMIT, Acknowledger
from nsq_fast.client.connection import Connection
from nsq_fast.client.consumer import OptionAttribute
from nsq_fast.client.gevent_loop import run
from nsq_fast.client.greenlets import may_wait
from nsq_fast.client.loop import EndTimeout
from nsq_fast.client.signals import receivers
from nsq_fast.client.subscriptions import Subscriber
from nsq_fast.client.workers import Handler
from nsq_fast.consumer import Consumer as _Consumer
from nsq_fast.errors import LookupFailed, NotRunning, NSQException, NSQNoConnections
from nsq_fast.log_events import STARTED_ALREADY
from nsq_fast.names import Address
from nsq_fast.protocol.rdy import Backoff, RequeueDelay

from .basics import BACKOFF, INIT, RUNNING, THROTTLED, BackoffTimer, deprecated
from .httpclient import LookupdClient
from .util import connection_options, parse_lookupds, parse_nsqds

CLOSE_TIMEOUT = 10.0

_SIGNAL_OF = {
    "handle_auth": "on_auth",
    "handle_response": "on_response",
    "handle_error": "on_error",
    "handle_finish": "on_finish",
    "handle_requeue": "on_requeue",
}
_NO_DELAY = RequeueDelay(0, base=0.0, factor=1.0, cap=0.0, jitter=0.0, random=lambda: 0.0)


class _Kept(Exception):
    """Raised when a subclass keeps a message to respond to it later."""


class GnsqAcknowledger(Acknowledger):
    """What follows a handler, by gnsq's rules.

    ``message.requeue()`` has no delay; the consumer's ``requeue_delay`` is for failures.
    """

    requeue_delay: RequeueDelay

    def __init__(self, consumer: Consumer, *args: Any) -> None:
        super().__init__(consumer, *args)
        self._options = consumer
        self._failure_delay, self.requeue_delay = self.requeue_delay, _NO_DELAY

    def failed(self, message: Message, error: BaseException, is_ordered: bool = False, who: str = "handler") -> None:
        if not isinstance(error, _Kept):
            super().failed(message, error, is_ordered, who)

    def requeue(self, message: Message, delay_ms: int | None, backoff: bool) -> None:
        fixed = self._options.requeue_delay
        if delay_ms is None:
            delay_ms = fixed if fixed is not None else self._failure_delay(message.attempts)
        super().requeue(message, delay_ms, backoff)

    def present_handler(self) -> Handler:
        return _routed if self._options.overrides_handling else super().present_handler()


def _routed(consumer: Any, message: Message) -> None:
    """Hand a message to a subclass, which may respond to it after it has returned."""
    consumer.handle_message(message.responder, message)
    if not message.has_responded() and not message.is_async():
        raise _Kept


class _Level(BackoffTimer):
    """The failures of a consumer's backoff, as a BackoffTimer."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self.ratio, self.max_interval, self.min_interval = 1, None, None

    @property
    def c(self) -> int:
        return self._backoff.level

    @c.setter
    def c(self, value: int) -> None:
        self._backoff.level = value


def _until(is_done: Callable[[], bool], deadline: float) -> bool:
    """Look every 5 ms whether it is; False if it is not by ``deadline`` (monotonic)."""
    while not is_done():
        if monotonic() > deadline:
            return False
        sleep(0.005)
    return True


class _Ready:
    """What tests of programs wait for: that RDY was shared out for the first time."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    def wait(self, timeout: float | None = None) -> bool:
        deadline = monotonic() + (inf if timeout is None else timeout)
        return _until(lambda: any(each.is_connected for each in self._consumer.subscribers), deadline)


class _ChangingOption(OptionAttribute):
    """An option that programs may change while the consumer runs."""

    def __set__(self, instance: Any, value: object) -> None:
        instance.config = instance.config.replace(**{self._name: value})
        instance.acknowledger.max_tries = instance.config.max_tries or NO_LIMIT


class Consumer(_Consumer):
    """Consume a topic through a channel.

    Args:
        message_handler: connected to ``on_message``; called as ``message_handler(consumer, message=message)``.
        requeue_delay: ms until a message that failed is delivered again; None: computed from its attempts.
        options: of NsqdTCPClient, or of ``nsq_fast.Consumer``.

    The others are those of ``nsq_fast.Consumer``. A subclass may override ``handle_message`` or ``_handle_message``.
    """

    acknowledger_class: ClassVar[type[Acknowledger]] = GnsqAcknowledger

    max_tries: OptionAttribute = _ChangingOption("config")
    requeue_delay: OptionAttribute = _ChangingOption("config")
    backoff_on_requeue: OptionAttribute = _ChangingOption("config")

    def __init__(
        self,
        topic: str,
        channel: str,
        nsqd_tcp_addresses: Any = (),
        lookupd_http_addresses: Any = (),
        name: str | None = None,
        message_handler: Any = None,
        max_tries: int = 5,
        max_in_flight: int = 1,
        requeue_delay: int | None = 0,
        lookupd_poll_interval: float = 60,
        lookupd_poll_jitter: float = 0.3,
        low_ready_idle_timeout: float = 10,
        max_backoff_duration: float = 128,
        backoff_on_requeue: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(
            topic,
            channel,
            sorted(parse_nsqds(nsqd_tcp_addresses)),
            lookupd_http_addresses,
            name or f"gnsq.consumer.{topic}.{channel}",
            None,
            max_tries,
            max_in_flight,
            requeue_delay,
            lookupd_poll_interval,
            lookupd_poll_jitter,
            low_ready_idle_timeout,
            max_backoff_duration,
            backoff_on_requeue,
            **{"close_timeout": CLOSE_TIMEOUT, **connection_options(options)},
        )
        self.conn_kwargs = options
        self.lookupds: list[LookupdClient] = parse_lookupds(lookupd_http_addresses)
        self.iterlookupds: Iterator[LookupdClient] = cycle(self.lookupds)
        if message_handler is not None:
            self.on_message.connect(message_handler, weak=False)
        for method, signal in _SIGNAL_OF.items():
            if getattr(type(self), method) is not getattr(Consumer, method):
                getattr(self, signal).connect(_receiver(getattr(self, method)), weak=False)

    # Begin and end

    def start(self, block: bool = True) -> None:
        """Begin to consume. With ``block=False`` return when each nsqd was subscribed to, or could not be, as gnsq
        does: messages that are published next reach a channel that did not exist before.

        One that is closed stays so, and a warning says that.
        """
        if self._is_closing:
            self.logger.warning("%s: already closed", self.name, extra=STARTED_ALREADY)
            if block:
                self.join()
            return
        super().start(block)
        if not block and may_wait():
            self._wait_for_attempts(monotonic() + self.connection_config.connect_timeout)

    def _wait_for_attempts(self, deadline: float) -> None:
        lookup = self._subscriptions.lookup
        if lookup is not None:
            for topic in self.topics:
                with suppress(LookupFailed, NotRunning):  # the consumer goes on asking, and says why in its log
                    run(lookup.wait_topology(topic, max(0.0, deadline - monotonic())))
        _until(
            lambda: not self.is_running or all(each.is_connected or each.last_failure for each in self.subscribers),
            deadline,
        )

    def close(self, drain: bool = True, timeout: EndTimeout = UNSET) -> None:
        """Stop taking messages, wait for the handlers, requeue what was not started, and close."""
        if self.is_running:
            super().close(drain, timeout)

    def join(self, timeout: float | None = None, raise_error: bool = False) -> bool:
        """Wait until the consumer is closed. One that was never started has nothing to wait for."""
        return super().join(timeout, raise_error) if self._is_started else True

    # Handling messages, for subclasses

    @property
    def overrides_handling(self) -> bool:
        """Whether a subclass has methods of its own to handle messages."""
        kind = type(self)
        return (
            kind.handle_message is not Consumer.handle_message or kind._handle_message is not Consumer._handle_message
        )

    def handle_message(self, conn: Connection, message: Message) -> None:
        """Handle a message and respond to it; requeue it when the handler fails."""
        try:
            self._handle_message(message)
        except (Exception, NSQException) as error:
            self.acknowledger.failed(message, error)

    def _handle_message(self, message: Message) -> None:
        for receiver in receivers(self.on_message, self):
            receiver(self, message=message)
        if not message.is_async() and not message.has_responded():
            message.finish()

    # Events, for subclasses to override: nsq_fast has already done what these do in gnsq

    def handle_auth(self, conn: Connection, response: dict[str, Any]) -> None:
        """An nsqd accepted the AUTH secret."""

    def handle_response(self, conn: None, response: bytes) -> None:
        """An nsqd replied, or sent a heartbeat."""

    def handle_error(self, conn: None, error: Exception) -> None:
        """An nsqd sent an error, or a connection was lost."""

    def handle_finish(self, conn: None, message_id: bytes) -> None:
        """A FIN was queued."""

    def handle_requeue(self, conn: None, message_id: bytes, timeout: int, backoff: bool) -> None:
        """A REQ was queued."""

    # Connections

    def query_nsqd(self) -> None:
        """Connect to the configured nsqds, unless that has been done. Returns at once."""
        if self.is_running:
            self._subscriptions.configured_changed()

    def query_lookupd(self) -> None:
        """Ask the nsqlookupds now."""
        if self._subscriptions.lookup is not None:
            self._subscriptions.lookup.refresh()

    def connect_to_nsqd(self, address: str, port: int) -> None:
        """Consume from one more nsqd, and keep connected to it. Returns at once."""
        if self.is_running:
            added = Address(address, int(port))
            if added not in self.nsqd_addresses:
                self.nsqd_addresses.append(added)
            self._subscriptions.configured_changed()

    # The states of a backoff

    @property
    def _connections(self) -> dict[Any, int]:
        return {each.connection: self._state(each) for each in self.subscribers}

    def _state(self, subscriber: Subscriber) -> int:
        if not subscriber.is_connected:
            return INIT
        backoff = subscriber.backoff
        return RUNNING if not backoff.is_on else BACKOFF if backoff.is_paused(monotonic()) else THROTTLED

    @property
    def _message_backoffs(self) -> dict[Any, BackoffTimer]:
        return {each.connection: _Level(each.backoff) for each in self.subscribers}

    @property
    def _redistributed_ready_event(self) -> _Ready:
        return _Ready(self)

    def redistribute_ready_state(self) -> None:
        """Have RDY redistributed soon."""
        self.flow.changed()

    def _redistribute_ready_state(self) -> None:
        self.flow.update(monotonic())

    def _start_backoff(self, conn: Connection) -> None:
        self.flow.backoff.pause(monotonic())
        self.flow.changed()

    def _start_throttled(self, conn: Connection) -> None:
        self.flow.backoff.probe()
        self.flow.changed()

    def _complete_backoff(self, conn: Connection) -> None:
        if self.flow.backoff.is_on:
            self._start_backoff(conn)
        else:
            self._start_throttled(conn)


def _receiver(method: Callable[..., object]) -> Callable[..., object]:
    """A receiver that calls a method of gnsq's, which has the connection as its first argument."""
    takes_backoff = method.__name__ == "handle_requeue"

    def receive(consumer: object, conn: object = None, **values: Any) -> None:
        method(conn, **values, **({"backoff": True} if takes_backoff else {}))

    return receive


class Reader(Consumer):
    """Use :class:`Consumer` instead.

    Args:
        async: whether the program responds to all messages by itself (a keyword of Python now: pass it in a dict).
        max_concurrency: handlers that run at once, over all connections; 0: one for each connection, in order;
            below 0: as many as there are CPUs.
        options: those of Consumer, in its order.
    """

    @deprecated
    def __init__(self, *args: Any, **options: Any) -> None:
        """Use Consumer instead."""
        vars(self)["async"] = options.pop("async", False)
        wanted = options.pop("max_concurrency", 0)
        self.max_concurrency: int | Any = cpu_count() if wanted < 0 else wanted
        if self.max_concurrency:
            options["concurrency"] = self.max_concurrency
        super().__init__(*args, **options)

    def _handle_message(self, message: Message) -> None:
        if vars(self)["async"]:
            message.enable_async()
        super()._handle_message(message)

    @property
    def overrides_handling(self) -> bool:
        """Whether messages need more than to be handed to the receivers."""
        kind = type(self)
        return bool(
            vars(self)["async"]
            or kind.handle_message is not Consumer.handle_message
            or kind._handle_message is not Reader._handle_message
        )

    @deprecated
    def publish(self, topic: str, message: bytes) -> None:
        """Use Producer instead: this one does not wait for the reply."""
        connected = [each.connection for each in self.subscribers if each.is_connected]
        if not connected:
            raise NSQNoConnections("no connection")
        random.choice(connected).request(_codec.pub(topic, message), "PUB", None)
