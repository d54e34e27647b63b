"""What the Consumers of threads and of asyncio have in common: one in the hub thread, held in another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from nsq_fast._codec import Message
from nsq_fast.errors import ConfigError
from nsq_fast.protocol.topic_choice import TopicArgument
from nsq_fast.runtime.consuming.handlers import check_handler
from nsq_fast.runtime.option_attributes import ConsumerOptions
from nsq_fast.runtime.trace import TraceLog

from .consuming import CrossingConsumer
from .hub_thread import HubThread
from .place import Place

if TYPE_CHECKING:
    import blinker
    from typing_extensions import Unpack

    from nsq_fast.config import ConnectionConfig, ConsumerConfig, LookupConfig
    from nsq_fast.keywords import ConsumerKeywords
    from nsq_fast.runtime.consuming.outside_handlers import OutsideHandlers
    from nsq_fast.runtime.consuming.stats import ConsumerStats

T = TypeVar("T")
HandlerT = TypeVar("HandlerT", bound=Callable[..., object])
BatchHandlerT = TypeVar("BatchHandlerT", bound=Callable[..., object])

Addresses: TypeAlias = str | Iterable[str | tuple[str, int]]


class OutsideConsumer(ConsumerOptions, Generic[HandlerT, BatchHandlerT]):
    """Base of those Consumers. Its arguments are those of ``nsq_fast.Consumer``.

    A handler is called with this object and a message, or a list. Without one it is iterated. The type parameters are
    the types of handlers.

    Signals are those of the consumer in the hub thread, which is their sender. Their receivers run there.
    """

    if TYPE_CHECKING:
        on_message: blinker.Signal
        on_response: blinker.Signal
        on_error: blinker.Signal
        on_finish: blinker.Signal
        on_requeue: blinker.Signal
        on_giving_up: blinker.Signal
        on_auth: blinker.Signal
        on_expired: blinker.Signal
        on_exception: blinker.Signal
        on_order_violation: blinker.Signal
        on_blocked: blinker.Signal
        on_close: blinker.Signal
        config: ConsumerConfig
        connection_config: ConnectionConfig
        lookup_config: LookupConfig
        topic: str
        topics: tuple[str, ...]
        channel: str
        name: str

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
        give_up: Callable[[Any, Message], object] | None = None,
        blocked_policy: Any = "pause",
        start_position: Any = None,
        trace: TraceLog | None = None,
        **options: Unpack[ConsumerKeywords],
    ) -> None:
        self._check_handler("message_handler", message_handler)
        self._check_handler("batch_handler", batch_handler)
        if message_handler is not None and batch_handler is not None:
            raise ConfigError("message_handler and batch_handler are both given: choose one")
        self._is_iterated = message_handler is None and batch_handler is None
        arguments: dict[str, Any] = {
            "topic": topic,
            "channel": channel,
            "nsqd_tcp_addresses": nsqd_tcp_addresses,
            "lookupd_http_addresses": lookupd_http_addresses,
            "name": name,
            "message_handler": self._with_self(message_handler) if batch_handler is None else None,
            "max_tries": max_tries,
            "max_in_flight": max_in_flight,
            "requeue_delay": requeue_delay,
            "lookupd_poll_interval": lookupd_poll_interval,
            "lookupd_poll_jitter": lookupd_poll_jitter,
            "low_ready_idle_timeout": low_ready_idle_timeout,
            "max_backoff_duration": max_backoff_duration,
            "backoff_on_requeue": backoff_on_requeue,
            "batch_handler": None if batch_handler is None else self._with_self(batch_handler),
            "give_up": give_up,
            "blocked_policy": blocked_policy,
            "start_position": start_position,
            "trace": trace,
            **options,
            **self._handler_options(options),
        }

        def make(thread: HubThread) -> CrossingConsumer:
            consumer = CrossingConsumer(**arguments).live_in(thread, self._new_handlers)
            consumer.on_close.connect(self._closed, weak=False)
            return consumer

        self._is_started = False
        self._place: Place[CrossingConsumer] = Place(make, self._renewed)

    def _check_handler(self, name: str, handler: HandlerT | BatchHandlerT | None) -> None:
        """Raise ConfigError if it can be none."""
        check_handler(name, handler)

    def _handler_options(self, options: ConsumerKeywords) -> dict[str, int]:
        """Options that follow from ``options``, which say how many handlers run at once."""
        return {"concurrency": options.get("concurrency") or 1} if self._is_iterated else {}

    def _with_self(self, handler: Any) -> Callable[[object, Any], object]:
        return lambda consumer, item: handler(self, item)

    def _new_handlers(self, consumer: CrossingConsumer) -> OutsideHandlers | None:
        """Where handlers run: made when the consumer starts, in the hub thread. None: native threads."""
        raise NotImplementedError

    def _closed(self, sender: object) -> None:
        """The consumer is closed. In the hub thread."""

    def _renewed(self, consumer: CrossingConsumer) -> None:
        self._is_started = False  # in a child of a fork

    def _call(self, function: Callable[[CrossingConsumer], T]) -> T:
        consumer = self._place.get()
        return self._place.thread.call(function, consumer)

    def _submit(self, function: Callable[[CrossingConsumer], object]) -> None:
        consumer = self._place.get()
        self._place.thread.submit(function, consumer)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in _READABLE or name.startswith("on_"):
            return getattr(self._place.get(), name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__name__} {self.topic} {self.channel}>"

    # Flow

    @property
    def max_in_flight(self) -> int:
        """Most messages held at once, over all connections. May be set at any time; takes effect soon after."""
        return self._place.get().max_in_flight

    @max_in_flight.setter
    def max_in_flight(self, value: int | None) -> None:
        self.config.replace(max_in_flight=value)  # raises what is wrong with it
        self._submit(lambda consumer: setattr(consumer, "max_in_flight", value))

    def pause(self) -> None:
        """Ask for no more messages (RDY 0), soon. What has been received is still handled."""
        self._submit(CrossingConsumer.pause)

    def resume(self) -> None:
        """End ``pause``."""
        self._submit(CrossingConsumer.resume)

    @property
    def is_paused(self) -> bool:
        """Whether ``pause`` was called, and ``resume`` not since."""
        return self._place.get().is_paused

    @property
    def is_running(self) -> bool:
        """Whether the consumer is started and not closed."""
        return self._place.get().is_running

    @property
    def is_starved(self) -> bool:
        """Whether some connection holds 85 % of what it may get."""
        return self._call(lambda consumer: consumer.is_starved)

    @property
    def total_ready_count(self) -> int:
        """Sum of the RDYs last sent."""
        return self._call(lambda consumer: consumer.total_ready_count)

    @property
    def total_in_flight(self) -> int:
        """Messages received and not responded to."""
        return self._call(lambda consumer: consumer.total_in_flight)

    def stats(self) -> ConsumerStats:
        """A snapshot of what was done and what is going on."""
        return self._call(CrossingConsumer.stats)


_READABLE = frozenset(
    [
        "config",
        "connection_config",
        "lookup_config",
        "topic",
        "topics",
        "channel",
        "name",
        "nsqd_tcp_addresses",
        "given_up",
    ]
)
