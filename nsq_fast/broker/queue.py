"""What the channels of both dialects are made of: clients in line, messages in flight and deferred, latencies.

How it is decided which message comes next, and what becomes of one that is done, is for each of them: ``channel.py``
has a queue in memory and one on disk, as nsqd; ``redesigned/channel.py`` a place in the log of a partition.

Clients pull: one that is ready for messages and finds none waits in line, and is woken when there are some. ``deliver``
gives a client as many frames as it can take in one go.
"""

from __future__ import annotations

import heapq
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from nsq_fast.broker.message import Exiting, NotOwner
from nsq_fast.broker.options import NsqdOptions
from nsq_fast.errors import ConfigError
from nsq_fast.names import is_ephemeral

if TYPE_CHECKING:
    from nsq_fast.broker.connection import Connection

SAMPLE_OF = 100
"""A sample rate is a share of so many."""

SPARE = 1024
"""Places that may be left behind before a heap is made again."""


class Timed(Protocol):
    """A message as a heap holds it. It is in one heap at a time; times are monotonic, but for ``priority`` as deferred.

    Attributes:
        id: unlike that of any other in the heap.
        priority: the time at which it is due.
        is_placed: whether it has a place in the heap; the heap sets it.
    """

    id: bytes
    priority: float
    is_placed: bool
    delivered_at: float


MessageT = TypeVar("MessageT", bound=Timed)


class DueHeap(Generic[MessageT]):
    """Messages by the time they are due, from which each can be taken out by its id. All times are of one clock.

    nsqio/nsq: nsqd/in_flight_pqueue.go, internal/pqueue/pqueue.go. Most messages are finished between two scans. So a
    message gets its place in the heap when the heap is next asked what is due; until then it stands in a dict only, and
    putting in and taking out cost what they cost in a dict. A message that is taken out leaves its place behind; when
    most places are left behind, the heap is made again.

    Attributes:
        messages: by id, in the order in which they came. One with its ``priority`` may be added directly, as ``put``
            does; one that is done with for good may be popped directly.
    """

    __slots__ = ("_heap", "_ties", "messages")

    def __init__(self) -> None:
        # Those that have no place yet are the last ones.
        self.messages: dict[bytes, MessageT] = {}
        self._heap: list[tuple[float, int, bytes]] = []
        self._ties = itertools.count()

    def __len__(self) -> int:
        return len(self.messages)

    def __contains__(self, id: bytes) -> bool:
        return id in self.messages

    def __iter__(self) -> Iterator[MessageT]:
        return iter(self.messages.values())

    @property
    def places(self) -> int:
        """How many places the heap has, those that were left behind too."""
        return len(self._heap)

    def put(self, messages: Sequence[MessageT], time: float) -> None:
        for message in messages:
            message.priority = time
            self.messages[message.id] = message

    def move(self, message: MessageT, time: float) -> None:
        if message.priority == time:
            return
        message.priority = time
        if message.is_placed:
            self._place(message)

    def pop(self, id: bytes) -> MessageT | None:
        message = self.messages.pop(id, None)
        if message is not None:
            message.is_placed = False
        return message

    def pop_due(self, now: float) -> list[MessageT]:
        """Take out the messages whose time has come, the earliest first; those of one time as they came."""
        if not self.messages:
            self._heap.clear()
            return []
        self._place_new()
        due: list[MessageT] = []
        while self._heap and self._heap[0][0] <= now:
            place = heapq.heappop(self._heap)
            if self._is_taken(place):
                due.append(self.messages.pop(place[2]))
        for message in due:
            message.is_placed = False
        return due

    def clear(self) -> None:
        for message in self.messages.values():
            message.is_placed = False
        self.messages.clear()
        self._heap.clear()

    def _place_new(self) -> None:
        new = list(itertools.takewhile(lambda message: not message.is_placed, reversed(self.messages.values())))
        for message in reversed(new):
            message.is_placed = True
            self._place(message)

    def _place(self, message: MessageT) -> None:
        heapq.heappush(self._heap, (message.priority, next(self._ties), message.id))
        if len(self._heap) > 2 * len(self.messages) + SPARE:
            self._heap = [place for place in self._heap if self._is_taken(place)]
            heapq.heapify(self._heap)

    def _is_taken(self, place: tuple[float, int, bytes]) -> bool:
        """Whether the message of a place is still here, and was not moved."""
        message = self.messages.get(place[2])
        return message is not None and message.priority == place[0]


class InFlight(DueHeap[MessageT]):
    """The messages of one client of a channel, by deadline.

    Attributes:
        timeout: seconds until a delivered message times out.
        client: the client that has them; None after it has disconnected.
    """

    __slots__ = ("client", "timeout")

    def __init__(self, client: Any, timeout: float) -> None:
        super().__init__()
        self.client: Any = client
        self.timeout: float = timeout


class BaseChannel(ABC, Generic[MessageT]):
    """What a channel is in both dialects.

    Args:
        on_unused: called when the last client of an ephemeral one has gone.

    Attributes:
        clients: who has subscribed, by their ids.
        requeue_count, timeout_count: how many messages came back.
        deferred: the messages that wait for their time.
    """

    def __init__(self, name: str, on_unused: Callable[[], None]) -> None:
        self.name = name
        self.is_ephemeral: bool = is_ephemeral(name)
        self.is_paused: bool = False
        self.clients: dict[int, Any] = {}
        self.requeue_count = 0
        self.timeout_count: int = 0
        self.deferred: DueHeap[MessageT] = DueHeap()
        self._on_unused = on_unused
        self._waiting: dict[Any, None] = {}
        # Those of the clients, and of clients that have gone and left some behind.
        self._in_flight: list[InFlight[MessageT]] = []

    @property
    def in_flight_count(self) -> int:
        return sum(map(len, self._in_flight))

    def messages_in_flight(self) -> Iterator[MessageT]:
        return itertools.chain.from_iterable(self._in_flight)

    @abstractmethod
    def deliver(self, client: Any, count: int, sample_rate: int = 0) -> list[bytes]:
        """Up to ``count`` frames for a client; its messages are in flight from now on."""

    @abstractmethod
    def finish(self, client: Any, ids: list[bytes]) -> list[bytes]:
        """Done with messages; the ids of those that the client has not got in flight."""

    @abstractmethod
    def has_ready(self, client: Any) -> bool:
        """Whether there may be messages for a client right now."""

    @abstractmethod
    def put_back(self, messages: Sequence[MessageT]) -> None:
        """Have messages that were delivered, or deferred, delivered again."""

    @abstractmethod
    def _count_for_waiting(self) -> int:
        """How many of the clients in line may find something."""

    def wait(self, client: Any) -> None:
        self._waiting[client] = None

    def notify(self) -> None:
        """Wake those in line as far as there are messages for them."""
        waiting = self._waiting
        if waiting and not self.is_paused:
            for client in list(itertools.islice(waiting, self._count_for_waiting())):
                del waiting[client]
                client.wake()

    def wake(self) -> None:
        for client in list(self.clients.values()):
            client.wake()

    def set_paused(self, is_paused: bool) -> None:
        self.is_paused = is_paused
        self.wake()

    def disconnect(self, which: Callable[[Any], bool] = lambda client: True) -> None:
        """End the connections of clients, without a word."""
        for client in list(self.clients.values()):
            if which(client):
                client.close()

    def touch(self, client: Connection, id: bytes, longest: float) -> None:
        """Start a message's timeout again, no more than ``longest`` after its delivery; NotOwner if it is not there.

        nsqio/nsq: nsqd/channel.go, TouchMessage.
        """
        in_flight = client.in_flight
        message = in_flight.messages.get(id)
        if message is None:
            raise self.not_owner(id)
        in_flight.move(message, min(time.monotonic() + in_flight.timeout, message.delivered_at + longest))

    def not_owner(self, id: bytes) -> NotOwner:
        """Why a client cannot finish, requeue or touch a message that it has not got in flight."""
        if any(id in in_flight for in_flight in self._in_flight):
            return NotOwner("client does not own message")  # nsqio/nsq: nsqd/channel.go, popInFlightMessage
        return NotOwner(self._NOT_IN_FLIGHT)

    _NOT_IN_FLIGHT = "ID not in flight"

    def add_client(self, client: Any, limit: int = 0) -> None:
        """Subscribe a client; Exiting when the channel has ``limit`` clients."""
        if limit and len(self.clients) >= limit:
            raise Exiting(f"consumers for {self._shown_name} exceeds limit of {limit}")
        self.clients[client.id] = client
        self._in_flight.append(client.in_flight)

    @property
    def _shown_name(self) -> str:
        return self.name

    def remove_client(self, client: Any) -> None:
        if self.clients.pop(client.id, None) is None:
            return
        client.in_flight.client = None
        self._waiting.pop(client, None)
        self._left(client)
        self.notify()
        if not self.clients and self.is_ephemeral:
            self._on_unused()

    def _left(self, client: Any) -> None:
        """A client has gone: what becomes of its messages in flight; by default they time out."""

    def forget_in_flight(self) -> None:
        for in_flight in self._in_flight:
            in_flight.clear()

    def scan(self, now: float, wall_now: float) -> bool:
        """Give back what has timed out and what is due; whether there was anything."""
        back: list[MessageT] = []
        for in_flight in self._in_flight:
            if in_flight and (expired := in_flight.pop_due(now)):
                self._timed_out(expired, in_flight.client)
                if in_flight.client is not None:
                    in_flight.client.wake()
                back += expired
        if len(self._in_flight) > len(self.clients):
            self._in_flight = [item for item in self._in_flight if item.client is not None or item]
        self.timeout_count += len(back)
        back += self._pop_deferred(now, wall_now)
        if back:
            self.put_back(back)
            self.notify()
        return bool(back)

    def _timed_out(self, messages: Sequence[MessageT], client: Any) -> None:
        """Messages were not finished in time by a client."""

    @abstractmethod
    def _pop_deferred(self, now: float, wall_now: float) -> list[MessageT]:
        """Take out the deferred messages whose time has come."""


# --- latencies -------------------------------------------------------------------------------------------------------

ACCURACY = 0.01
"""How far a quantile may be from the true one, as a share of it."""


class LatencyWindow:
    """The latencies of one channel, over a window of time that moves by halves.

    Args:
        percentiles: which quantiles are wanted, above 0.0 and up to 1.0.
        window: seconds that latencies count; between half of it and all of it.
        clock: seconds that never go back.

    Raises ConfigError where the package ddsketch is missing.
    """

    def __init__(
        self, percentiles: Sequence[float], window: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.percentiles = percentiles
        self._half = window / 2
        self._clock = clock
        self._new, self._old = make_sketch(), make_sketch()
        self._moved_at = clock()

    def add(self, nanoseconds: int) -> None:
        self._move()
        self._new.add(nanoseconds)

    def merge_into(self, sketch: Any) -> None:
        """Add the latencies of the window to a sketch."""
        self._move()
        sketch.merge(self._new)
        sketch.merge(self._old)

    def _move(self) -> None:
        halves = int((self._clock() - self._moved_at) // self._half)
        if halves > 0:
            self._moved_at += halves * self._half
            self._old = self._new if halves == 1 else make_sketch()
            self._new = make_sketch()


def make_window(options: NsqdOptions) -> LatencyWindow | None:
    """What measures a channel, as the options say; None: nothing is measured. Raises as ``LatencyWindow``."""
    percentiles = options.e2e_processing_latency_percentiles
    return LatencyWindow(percentiles, options.e2e_processing_latency_window_time) if percentiles else None


def make_sketch() -> Any:
    """An empty sketch. Raises ConfigError where the package ddsketch is missing."""
    try:
        from ddsketch import DDSketch
    except ImportError as error:
        raise ConfigError(
            "e2e_processing_latency_percentiles: needs the package ddsketch: pip install 'nsq-fast[e2e]'"
        ) from error
    return DDSketch(ACCURACY)


def latency_stats(windows: Iterable[LatencyWindow | None]) -> dict[str, Any]:
    """The figures of some windows together, in nanoseconds, under the original's JSON names."""
    measured = [window for window in windows if window is not None]
    if not measured:
        return {"count": 0, "percentiles": None}
    sketch = make_sketch()
    for window in measured:
        window.merge_into(sketch)
    return {
        "count": int(sketch.count),
        "percentiles": [
            {"quantile": quantile, "value": sketch.get_quantile_value(quantile) or 0.0}
            for quantile in measured[0].percentiles
        ],
    }
