"""The settings of one run of the trace pipeline."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from nsq_fast.errors import ConfigError

Order = Literal["offsets", "ids", "off"]
SECOND = 1_000_000_000


@dataclasses.dataclass(frozen=True)
class TraceSettings:
    """Settings of the tables. Times are seconds.

    Attributes:
        window: length of the time windows that messages are counted in, by when they were published.
        grace: from when on a message that no delivery finished is lost; until then it is pending.
        slowest: how many of the slowest messages to keep.
        order: where the order is judged: ``offsets``, in subscriptions whose messages come with their offset (ordered
            and advanced ones); ``ids``, everywhere, by internal id; ``off``, nowhere.
        skew_tolerance: clocks that contradict each other by no more than this agree.
        lateness: in a stream, how much later than the latest record seen one may still come. A message is decided
            ``grace + lateness`` after the end of its window.
    """

    window: float = 10.0
    grace: float = 60.0
    slowest: int = 20
    order: Order = "offsets"
    skew_tolerance: float = 0.001
    lateness: float = 10.0

    def __post_init__(self) -> None:
        for name, least in (("window", 0.001), ("grace", 0), ("slowest", 0), ("skew_tolerance", 0), ("lateness", 0)):
            if not getattr(self, name) >= least:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be {least} or more")
        if self.order not in get_args(Order):
            raise ConfigError(f"order={self.order!r}: must be one of {', '.join(get_args(Order))}")

    @property
    def window_ns(self) -> int:
        """``window`` in nanoseconds."""
        return round(self.window * SECOND)

    @property
    def grace_ns(self) -> int:
        """``grace`` in nanoseconds."""
        return round(self.grace * SECOND)

    @property
    def lateness_ns(self) -> int:
        """``lateness`` in nanoseconds."""
        return round(self.lateness * SECOND)

    @property
    def skew_tolerance_ns(self) -> int:
        """``skew_tolerance`` in nanoseconds."""
        return round(self.skew_tolerance * SECOND)
