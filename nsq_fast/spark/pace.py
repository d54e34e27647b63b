"""When a micro-batch is due: at ``minOffsetsPerTrigger`` rows, or when ``maxTriggerDelay`` is over, as with Kafka."""

from __future__ import annotations

import time
from typing import NamedTuple

from .options import SourceOptions


class Limits(NamedTuple):
    """What a micro-batch may have: most rows and bytes, None for no limit; and whether it waits for the fewest rows."""

    rows: int | None = None
    bytes: int | None = None
    waits: bool = True


NO_LIMITS = Limits(waits=False)
"""Of the trigger "once", which Spark has read all there is."""


class Pace:
    """Holds small batches back."""

    def __init__(self, options: SourceOptions) -> None:
        self._least = options.min_offsets_per_trigger
        self._delay = options.max_trigger_delay
        self._began_at = time.monotonic()

    @property
    def is_needed(self) -> bool:
        """Whether the rows that wait have to be counted."""
        return self._least is not None

    def is_due(self, rows: int) -> bool:
        """Whether a batch of all that waits, ``rows``, may begin now. When it may, the delay begins anew."""
        if self._least is not None and rows < self._least and time.monotonic() - self._began_at < self._delay:
            return False
        self._began_at = time.monotonic()
        return True
