"""The messages that one client has in flight, in the order of their deadlines.

All messages of a client have the same timeout, so the order in which they were
delivered is the order of their deadlines, and a dict keeps it: to answer a
message is one ``pop``, to find what has timed out is a look at the first ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Owner(Protocol):
    """Who has messages in flight."""

    def wake(self) -> None:
        """Some of them are gone."""


class Held(Protocol):
    """A message that can be in flight; times are monotonic."""

    id: bytes
    deadline: float
    delivered_at: float


HeldT = TypeVar("HeldT", bound=Held)


class InFlight(Generic[HeldT]):
    """The messages of one client of a channel. It outlives the client until they have timed out.

    Attributes:
        messages: by id, the earliest deadline first. Answering one is to pop it.
        timeout: seconds until a delivered message times out.
        client: who has them; None after it has gone.
    """

    __slots__ = ("_clamped", "client", "messages", "timeout")

    def __init__(self, client: Owner, timeout: float) -> None:
        self.client: Owner | None = client
        self.timeout = timeout
        self.messages: dict[bytes, HeldT] = {}
        # Touched up to the longest time allowed: their deadlines are out of order.
        self._clamped: dict[bytes, HeldT] = {}

    def __len__(self) -> int:
        return len(self.messages) + len(self._clamped)

    def __contains__(self, id: bytes) -> bool:
        return id in self.messages or id in self._clamped

    def all(self) -> list[HeldT]:
        """Every message."""
        return [*self.messages.values(), *self._clamped.values()]

    def pop(self, id: bytes) -> HeldT | None:
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

    def pop_expired(self, now: float) -> list[HeldT]:
        """Take out the messages whose deadline has passed."""
        expired: list[HeldT] = []
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


class ChannelInFlight(Generic[HeldT]):
    """The messages in flight of all clients of a channel, and of those that have gone and left some behind."""

    __slots__ = ("_clients",)

    def __init__(self) -> None:
        self._clients: list[InFlight[HeldT]] = []

    def __len__(self) -> int:
        return sum(map(len, self._clients))

    def __contains__(self, id: bytes) -> bool:
        return any(id in in_flight for in_flight in self._clients)

    def __iter__(self) -> Iterator[HeldT]:
        for in_flight in self._clients:
            yield from in_flight.all()

    def add(self, in_flight: InFlight[HeldT]) -> None:
        """Take in the messages of a client."""
        self._clients.append(in_flight)

    def pop_expired(self, now: float) -> list[HeldT]:
        """Take out the messages whose deadline has passed, and wake the clients that had them."""
        expired: list[HeldT] = []
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
