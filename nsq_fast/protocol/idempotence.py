"""Copies of a message, as a second attempt at the same write makes them: both carry the same key in their headers."""

from __future__ import annotations

from collections import deque

IDEMPOTENCE_HEADER = "nsq_fast.idempotence_key"
"""The extended header that holds the key, a string. Of messages of a topic with the same key one is enough."""


class SeenKeys:
    """The keys that came last, each with the id of the message that had it first.

    Args:
        limit: most keys that are kept; the one that came first is forgotten first.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._first_ids: dict[tuple[str, str], bytes] = {}
        self._by_age: deque[tuple[str, str]] = deque()

    def __len__(self) -> int:
        return len(self._first_ids)

    def is_copy(self, topic: str, key: str, message_id: bytes) -> bool:
        """Whether another message of the topic had the key before.

        The first that had it is none, however often it is delivered: it stays on the server until it is finished.
        """
        first = self._first_ids.setdefault((topic, key), message_id)
        if len(self._first_ids) > len(self._by_age):
            self._by_age.append((topic, key))
            if len(self._by_age) > self._limit:
                del self._first_ids[self._by_age.popleft()]
        return first != message_id
