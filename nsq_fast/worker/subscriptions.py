"""Which handler takes which topic: what ``subscribe`` declares. Nothing is connected, and gevent is not imported."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from nsq_fast.config import HANDLER_PLACES, ConnectionConfig, ConsumerConfig, LookupConfig, refuse_unknown
from nsq_fast.errors import ConfigError
from nsq_fast.names import check_channel, check_topic

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from nsq_fast.keywords import SubscriptionKeywords

H = TypeVar("H", bound=Callable[..., Any])

ARGUMENTS = frozenset(("nsqd_tcp_addresses", "lookupd_http_addresses", "start_position", "give_up", "blocked_policy"))
"""What a Consumer takes beside its options."""

CONSUMER_OPTIONS = ARGUMENTS.union(*(config.names() for config in (ConsumerConfig, ConnectionConfig, LookupConfig)))
PLACES = (*HANDLER_PLACES, "asyncio")

_declared: list[Subscription] = []


@dataclasses.dataclass(frozen=True)
class Subscription:
    """A handler and what it is to consume.

    Attributes:
        handler: as ``message_handler`` of a Consumer, or as ``batch_handler`` with ``batch``.
        place: where it runs: gevent, threads or asyncio; None: asyncio for a coroutine function, threads where
            ``handler_threads`` is given, otherwise as the worker's option ``handlers`` says.
        options: of the Consumer, as declared.
    """

    topic: str
    channel: str
    handler: Callable[..., Any]
    batch: bool = False
    place: str | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """What it is called in logs, metrics and configuration: ``topic/channel``."""
        return f"{self.topic}/{self.channel}"

    def place_of(self, handlers: str) -> str:
        """Where the handler runs, with the worker's option ``handlers``."""
        if self.place is not None:
            return self.place
        if _is_coroutine_function(self.handler):
            return "asyncio"
        return "threads" if self.options.get("handler_threads") else handlers


def subscribe(
    topic: str, channel: str, *, batch: bool = False, place: str | None = None, **options: Unpack[SubscriptionKeywords]
) -> Callable[[H], H]:
    """Declare that a function handles the messages of a topic and channel; it is returned as it is.

    Args:
        batch: it takes a list of messages, as a ``batch_handler``.
        place: where it runs, see ``Subscription``.
        options: of ``nsq_fast.Consumer``. Where the servers are may be left to the configuration of the worker.

    Raises ConfigError or NameInvalid for what is wrong, where it is declared.
    """
    check_topic(topic)
    check_channel(channel)
    refuse_unknown(options, CONSUMER_OPTIONS)
    if place is not None and place not in PLACES:
        raise ConfigError(f"place={place!r}: must be one of {', '.join(PLACES)}, or None")

    def declare(handler: H) -> H:
        if not callable(handler):
            raise ConfigError(f"subscribe({topic!r}, {channel!r}): {handler!r} cannot be called")
        if place not in (None, "asyncio") and _is_coroutine_function(handler):
            raise ConfigError(f"place={place!r}: {handler!r} is a coroutine function, which runs with asyncio only")
        _declared.append(Subscription(topic, channel, handler, batch, place, {**options}))
        return handler

    return declare


def declared(handler: object = None) -> list[Subscription]:
    """All that were declared in this interpreter, or those of one handler."""
    return [each for each in _declared if handler is None or each.handler is handler]


def _is_coroutine_function(handler: Any) -> bool:
    """Also of an object whose class has an ``async def __call__``."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)
