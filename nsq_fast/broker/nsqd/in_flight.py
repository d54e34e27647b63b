"""The messages that one client has in flight, in the order of their deadlines.

All messages of a client have the same timeout, so the order in which they were
delivered is the order of their deadlines, and a dict keeps it: FIN is one ``pop``,
and messages that have timed out are the first ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Client(Protocol):
    """A client that has messages in flight."""

    def wake(self) -> None:
        """Some of them have timed out: there may be room for others."""


class InFlightMessage(Protocol):
    """A message that can be in flight; times are monotonic."""

    id: bytes
    deadline: float
    delivered_at: float


MessageT = TypeVar("MessageT", bound=InFlightMessage)


class InFlight(Generic[MessageT]):
    """The messages of one client of a channel. It outlives the client until they have timed out.

    Attributes:
        messages: by id, the earliest deadline first. FIN and REQ pop a message.
        timeout: seconds until a delivered message times out.
        client: the client that has them; None after it has disconnected.
    """

    __slots__ = ("_clamped", "client", "messages", "timeout")

    def __init__(self, client: Client, timeout: float) -> None:
        self.client: Client | None = client
        self.timeout = timeout
        self.messages: dict[bytes, MessageT] = {}
        # Touched up to the longest time allowed: their deadlines are out of order.
        self._clamped: dict[bytes, MessageT] = {}

    def __len__(self) -> int:
        return len(self.messages) + len(self._clamped)

    def __contains__(self, id: bytes) -> bool:
        return id in self.messages or id in self._clamped

    def all(self) -> list[MessageT]:
        """Every message."""
        return [*self.messages.values(), *self._clamped.values()]

    def pop(self, id: bytes) -> MessageT | None:
        """Take a message out; None if it is not here."""
        return self.messages.pop(id, None) or self._clamped.pop(id, None)

    def touch(self, id: bytes, now: float, longest: float) -> bool:
        """Give a message its timeout again, but no more than ``longest`` after its delivery. False: it is not here."""
        message = self.pop(id)
        if message is None:
            return False
        message.deadline = now + self.timeout
        last = message.delivered_at + longest
        if message.deadline < last:
            self.messages[id] = message
        else:
            message.deadline = last
            self._clamped[id] = message
        return True

    def pop_expired(self, now: float) -> list[MessageT]:
        """Take out the messages whose deadline has passed."""
        expired: list[MessageT] = []
        for message in self.messages.values():
            if message.deadline > now:
                break
            expired.append(message)
        for message in expired:
            del self.messages[message.id]
        late = [message for message in self._clamped.values() if message.deadline <= now]
        for message in late:
            del self._clamped[message.id]
        return expired + late

    def clear(self) -> None:
        """Forget everything."""
        self.messages.clear()
        self._clamped.clear()


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
            yield from in_flight.all()

    def add(self, in_flight: InFlight[MessageT]) -> None:
        """Take in the messages of a client."""
        self._clients.append(in_flight)

    def pop_expired(self, now: float) -> list[MessageT]:
        """Take out the messages whose deadline has passed, and wake the clients that had them."""
        expired: list[MessageT] = []
        for in_flight in self._clients:
            if not in_flight:
                continue
            messages = in_flight.pop_expired(now)
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
