"""How long messages take from publish to FIN: quantiles of the last minutes (nsqio/nsq: internal/quantile/quantile.go).

The sketch is DDSketch's: its quantiles are within one percent of the true ones, whatever the distribution.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nsq_fast.broker.options import NsqdOptions
from nsq_fast.errors import ConfigError

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
        """Count the latency of one message."""
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
