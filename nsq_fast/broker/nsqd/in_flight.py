"""The messages that clients have in flight, by their deadlines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from .due_heap import DueHeap, Timed


class Client(Protocol):
    """A client that has messages in flight."""

    def wake(self) -> None:
        """Some of them have timed out: there may be room for others."""


def wake(clients: Iterable[Client]) -> None:
    """Wake them all; they may come and go meanwhile."""
    for client in list(clients):
        client.wake()


class InFlightMessage(Timed, Protocol):
    """A message that can be in flight; times are monotonic."""

    delivered_at: float


MessageT = TypeVar("MessageT", bound=InFlightMessage)


class InFlight(DueHeap[MessageT]):
    """The messages of one client of a channel, by deadline. It outlives the client until they have timed out.

    Attributes:
        timeout: seconds until a delivered message times out.
        client: the client that has them; None after it has disconnected.
    """

    __slots__ = ("client", "timeout")

    def __init__(self, client: Client, timeout: float) -> None:
        super().__init__()
        self.client: Client | None = client
        self.timeout = timeout

    def touch(self, id: bytes, now: float, longest: float) -> bool:
        """Give a message its timeout again, but no more than ``longest`` after its delivery. False: it is not here.

        nsqio/nsq: nsqd/channel.go, TouchMessage.
        """
        message = self.messages.get(id)
        if message is None:
            return False
        self.move(message, min(now + self.timeout, message.delivered_at + longest))
        return True


class ChannelInFlight(Generic[MessageT]):
    """The messages in flight of all clients of a channel, and of those that have gone and left some behind."""

    __slots__ = ("_clients",)

    def __init__(self) -> None:
        self._clients: list[InFlight[MessageT]] = []

    def __len__(self) -> int:
        return sum(map(len, self._clients))

    def __contains__(self, id: bytes) -> bool:
        return any(id in in_flight for in_flight in self._clients)

    def __iter__(self) -> Iterator[MessageT]:
        for in_flight in self._clients:
            yield from in_flight

    def add(self, in_flight: InFlight[MessageT]) -> None:
        """Take in the messages of a client."""
        self._clients.append(in_flight)

    def pop_expired(self, now: float) -> list[MessageT]:
        """Take out the messages whose deadline has passed, and wake the clients that had them."""
        expired: list[MessageT] = []
        for in_flight in self._clients:
            if not in_flight:
                continue
            messages = in_flight.pop_due(now)
            if messages and in_flight.client is not None:
                in_flight.client.wake()
            expired += messages
        if any(in_flight.client is None and not in_flight for in_flight in self._clients):
            self._clients = [item for item in self._clients if item.client is not None or item]
        return expired

    def clear(self) -> None:
        """Forget every message."""
        for in_flight in self._clients:
            in_flight.clear()
