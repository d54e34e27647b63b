"""What the parts of a consumer need of it, and of parts above them, as protocols: so no import goes in a circle.

A part takes the narrowest of these that will do. ``Consumer`` is a Context. The others are parts of it, named with each
protocol; they do not name the protocol in turn.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from nsq_fast._codec import Message
from nsq_fast._time_slice import TimeSlice
from nsq_fast.config import ConnectionConfig, ConsumerConfig, LookupConfig
from nsq_fast.errors import NsqError
from nsq_fast.protocol.idempotence import SeenKeys
from nsq_fast.protocol.targets import Target
from nsq_fast.runtime.net.connection import Connection
from nsq_fast.runtime.supervised import Supervisor

from .deadlines import Deadlines
from .expiry import Expiry
from .failures import GiveUpPolicy
from .flow import Flow
from .load import Load, Workload
from .stats import Counters
from .tracing import Tracer


class Inbound(Protocol):
    """Messages of one connection that wait for a worker; an ``InboundQueue``."""

    @property
    def connection(self) -> Connection:
        """Who delivered them."""

    @property
    def waiting(self) -> deque[Message]:
        """Those that no worker has begun with, oldest first."""

    @property
    def slice(self) -> TimeSlice:
        """Takes the messages whose handlers have returned."""

    @property
    def turn(self) -> object:
        """Of an ordered partition; None when any number of workers may handle them."""


class Wakeable(Protocol):
    """Workers that wait for a turn; a ``Pool``."""

    def wake(self) -> None:
        """Have a worker look again."""


class Workers(Wakeable, Protocol):
    """A ``Pool``, as a subscription uses it.

    Attributes:
        source: the one connection that they serve and may read from; None when there are several, or none.
        spare: how many of them can only wait for one of the others to be done.
    """

    source: Connection | None
    spare: int

    @property
    def load(self) -> Load:
        """How busy they are."""

    @property
    def workers(self) -> Any:
        """The workers."""

    def deliver(self, inbound: Any, messages: list[Message]) -> None:
        """These messages wait in an ``InboundQueue`` from now on."""

    def stop(self) -> None:
        """Let each worker end after what it is handling now."""


class Pools(Protocol):
    """The workers of a consumer; a ``WorkerPools``."""

    @property
    def shared(self) -> Any:
        """The pool that all connections share; None when each has its own."""

    def new(self, size: int, name: str) -> Any:
        """Make ``size`` worker greenlets."""

    def drop(self, pool: Any) -> None:
        """Forget the workers of one connection."""


class Requeuer(Protocol):
    """What becomes of messages that were not handled, or not with success; a ``Disposition``.

    Attributes:
        has_policy: whether the program has chosen what becomes of messages with too many attempts.
    """

    has_policy: bool

    @property
    def requeue_delay(self) -> Callable[[int], int]:
        """Gives the ms until a message is delivered again by its attempts."""

    def is_beyond(self, inbound: Any, message: Message) -> bool:
        """Whether a policy, and not the handler, gets this message."""

    def unreadable(self, message: Message, error: NsqError) -> None:
        """No handler can be given a message: requeue it."""

    def requeue(self, message: Message, delay_ms: int | None, backoff: bool) -> None:
        """REQ a message unless it is answered."""

    def give_up(self, inbound: Any, message: Message, policy: GiveUpPolicy | None = None) -> None:
        """Hand a message to the give-up policy, then finish it."""

    def give_back(self, messages: Iterable[Message]) -> None:
        """REQ 0 for messages that nobody began to handle."""


class OrderedRules(Protocol):
    """What workers ask of ``Ordered``."""

    @property
    def threshold(self) -> int:
        """Attempts from which on a message counts as blocked."""

    def begins(self, inbound: Any, message: Message) -> bool:
        """Look at the attempts of a message; say whether its handler shall be called."""

    def gives_up(self, message: Message) -> bool:
        """Whether a policy, and not the handler, gets this message."""


class OrderedPartitions(OrderedRules, Protocol):
    """What subscriptions ask of ``Ordered``."""

    def turn(self, target: Target) -> Any:
        """The one turn of a partition, whoever leads it."""

    def check_of(self, target: Target) -> Callable[[list[Message]], list[Message]]:
        """What verifies the order of messages of ``target``, and returns those that shall be handled."""

    def requeue_delay_ms(self, message: Message) -> int:
        """How long a failed message is held when nobody says otherwise."""

    def hold(self, connection: Connection, message: Message, delay_ms: int) -> None:
        """REQ 0 after a delay, or before the message times out if that is sooner."""

    def release(self, connection: Connection | None = None) -> None:
        """REQ 0 now for what is held, of one connection or of all."""


class HandlingContext(Protocol):
    """A consumer, as those see it who deal with its messages. It is the sender of its signals."""

    config: ConsumerConfig
    logger: logging.Logger
    flow: Flow
    given_up: int

    @property
    def supervisor(self) -> Supervisor:
        """Makes its greenlets."""

    @property
    def on_message(self) -> Any:
        """A signal that calls its receivers with each message, as handlers."""

    @property
    def on_giving_up(self) -> Any:
        """A signal of messages with too many attempts."""

    @property
    def disposition(self) -> Requeuer:
        """What becomes of its messages."""

    def fail(self, error: NsqError) -> None:
        """Close because of ``error``. Does not block."""


class Context(HandlingContext, Protocol):
    """A consumer, as its subscriptions see it.

    Attributes:
        past: counts of topics that are no longer consumed, and of what belongs to no connection.
        seen_keys: of all its messages; None unless copies are suppressed.
        headerless: topics of which was told that options for extended headers have no effect on them.
    """

    channel: str
    name: str
    connection_config: ConnectionConfig
    lookup_config: LookupConfig
    nsqd_addresses: Any
    lookupd_addresses: Any
    deadlines: Deadlines
    expiry: Expiry
    past: Counters
    seen_keys: SeenKeys | None
    headerless: set[str]
    tracer: Tracer
    workload: Workload

    @property
    def ordered(self) -> OrderedPartitions:
        """Its ordered partitions."""

    @property
    def workers(self) -> Pools:
        """Makes and ends workers."""
