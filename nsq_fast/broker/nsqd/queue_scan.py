"""Which channels are looked at for messages that have timed out or are due, and how often.

Redis's probabilistic expiration (nsqio/nsq: nsqd/nsqd.go, queueScanLoop): in each interval a few channels are chosen
at random. One that had something to give back is dirty; if too many were, others are chosen at once.

Pure policy: the caller has the clock, scans the channels and waits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

ChannelT = TypeVar("ChannelT")

CHANNELS_PER_WORKER = 4


class QueueScan(Generic[ChannelT]):
    """Chooses channels.

    Args:
        selection_count: how many are chosen at a time.
        worker_pool_max: the most that are scanned before others have their turn (nsqd: in parallel).
        dirty_percent: the share of dirty channels, 0.0 to 1.0, above which others are chosen at once.
        sample: chooses so many of a sequence, each once.
    """

    def __init__(
        self,
        selection_count: int,
        worker_pool_max: int,
        dirty_percent: float,
        sample: Callable[[Sequence[ChannelT], int], list[ChannelT]] = random.sample,
    ) -> None:
        self._selection_count = selection_count
        self._worker_pool_max = worker_pool_max
        self._dirty_percent = dirty_percent
        self._sample = sample
        self._channels: Sequence[ChannelT] = ()

    def refresh(self, channels: Sequence[ChannelT]) -> None:
        """Choose from these from now on."""
        self._channels = channels

    @property
    def workers(self) -> int:
        """How many channels are scanned before others have their turn (nsqio/nsq: nsqd/nsqd.go, resizePool)."""
        return min(max(1, len(self._channels) // CHANNELS_PER_WORKER), self._worker_pool_max)

    def select(self) -> Iterator[list[ChannelT]]:
        """The channels to scan now, as many at a time as there are workers."""
        chosen = self._sample(self._channels, min(self._selection_count, len(self._channels)))
        workers = self.workers
        for start in range(0, len(chosen), workers):
            yield chosen[start : start + workers]

    def is_to_be_repeated(self, dirty: int) -> bool:
        """Whether others are to be scanned at once, after so many of those chosen were dirty."""
        count = min(self._selection_count, len(self._channels))
        return count > 0 and dirty / count > self._dirty_percent
