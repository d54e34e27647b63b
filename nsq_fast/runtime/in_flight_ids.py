"""Which messages were received and not yet answered, for whoever sees them as columns of ids.

Responses mostly come in the order of the messages, thousands at a time: then
they are found at the front of what was received, and nothing is done per
message. Responses in another order are set aside, and compared with the ids
received when there are many.
"""

from __future__ import annotations

from collections import deque

from nsq_fast._codec import MESSAGE_ID_SIZE
from nsq_fast.errors import ConfigError

# Responses set aside before they are compared: each costs the making of an object then.
COMPARE_AT = 50_000


class InFlightIds:
    """The ids received and not answered. Ids come and go side by side, 16 bytes each.

    Attributes:
        count: how many there are. An id that is answered twice counts twice.
    """

    def __init__(self) -> None:
        self.count = 0
        self._received: deque[bytes] = deque()
        self._at = 0  # where the first of them goes on
        self._aside: list[bytes] = []
        self._aside_size = 0

    def add(self, ids: bytes) -> None:
        """These were received."""
        self._received.append(ids)
        self.count += len(ids) // MESSAGE_ID_SIZE

    def remove(self, ids: bytes | memoryview) -> None:
        """These are answered. Raises ConfigError when they are not whole ids."""
        if len(ids) % MESSAGE_ID_SIZE:
            raise ConfigError(f"ids must have a length that is a multiple of {MESSAGE_ID_SIZE}, not {len(ids)}")
        self.count = max(0, self.count - len(ids) // MESSAGE_ID_SIZE)
        if not self.count:
            self._forget()
            return
        rest = self._remove_front(memoryview(ids))
        if rest:
            self._aside.append(bytes(rest))
            self._aside_size += len(rest)
            if self._aside_size > COMPARE_AT * MESSAGE_ID_SIZE:
                self._compare()

    def take(self) -> bytes:
        """All of them, in the order in which they came; none is held any more."""
        self._compare()
        held = b"".join(self._received)
        self._forget()
        return held

    def _remove_front(self, ids: memoryview) -> memoryview:
        """Remove what are the first ids received; return the others."""
        received = self._received
        while ids and received:
            first = received[0]
            size = min(len(first) - self._at, len(ids))
            if memoryview(first)[self._at : self._at + size] != ids[:size]:
                break
            ids = ids[size:]
            self._at += size
            if self._at == len(first):
                received.popleft()
                self._at = 0
        return ids

    def _compare(self) -> None:
        """Take those set aside out of those received."""
        aside = {each for ids in self._aside for each in _split(ids)}
        received = b"".join(self._received)[self._at :]
        held = [each for each in _split(received) if each not in aside] if aside else [received]
        self._forget()
        if held:
            self._received.append(b"".join(held))
            self.count = len(self._received[0]) // MESSAGE_ID_SIZE

    def _forget(self) -> None:
        self._received.clear()
        self._aside.clear()
        self.count = self._at = self._aside_size = 0


def _split(ids: bytes) -> list[bytes]:
    return [ids[at : at + MESSAGE_ID_SIZE] for at in range(0, len(ids), MESSAGE_ID_SIZE)]
