"""How publishes are shared out between two clusters while a topic moves from one to the other. Pure.

What has a key goes by its key, so that a key is in one cluster at a time, and
moves once while the percentage grows. What has none goes in turn.
"""

from __future__ import annotations

import mmh3

from .partitioner import Key

_SEED = 0x6E7371  # not that of partitions: the keys that have moved are spread over all partitions
_BUCKETS = 10_000


def bucket_of(key: Key) -> float:
    """0 to 100, the same for a key in every process: it has moved where the percentage is above."""
    data = key if isinstance(key, bytes) else str(key).encode("utf-8", "surrogatepass")
    found: int = mmh3.hash(data, _SEED, False) % _BUCKETS
    return found * 100.0 / _BUCKETS


class Gradation:
    """Which publishes of a topic go to the new cluster.

    Args:
        percent: how many, 0 to 100.
    """

    def __init__(self, percent: float) -> None:
        self.percent = percent
        self._owed = 0.0

    def takes_key(self, key: Key) -> bool:
        """Whether publishes with this key go there."""
        return bucket_of(key) < self.percent

    def takes_next(self) -> bool:
        """Whether the next publish without a key goes there: of any hundred in a row as many as ``percent`` says."""
        self._owed += self.percent
        if self._owed < 100.0:
            return False
        self._owed -= 100.0
        return True
