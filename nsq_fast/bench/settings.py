"""What one scenario measures. Durations are in seconds, sizes in bytes."""

from __future__ import annotations

import msgspec

from nsq_fast.errors import ConfigError

KINDS = ("consume", "publish", "roundtrip", "ordered", "idle", "start", "spark")
MODES = ("single", "concurrent", "batch")
SPARK_MODES = ("stream", "read", "cold", "write")
COMPRESSIONS = ("", "snappy", "deflate")

WARMUP_SHARE = 0.1
RATE_WARMUP_SECONDS = 1.0
RATE_BEYOND_SECONDS = 0.5
SMALLEST_COUNT = 1000
PEAK_CONCURRENCY = 100
SERVER_BUFFER = 65536
PATIENCE = 60.0
SPARK_PATIENCE = 600.0
_MODES = {"publish": MODES, "spark": SPARK_MODES}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario, the same for every client.

    Attributes:
        count: messages a round; 0: as many as the client handles in ``duration``, found by a round before the others.
        mode: of publishing: one at a time, from ``concurrency`` greenlets (goroutines, tasks), or MPUB of ``batch``;
            of Spark: micro-batches, a table, the first table of a session, or a write.
        rate: messages/s of an open loop; 0: a closed loop, as fast as it goes.
        rate_share: an open loop at this share of the largest rate that each of the clients manages in a closed loop of
            ``PEAK_CONCURRENCY`` messages; it is measured before the rounds.
        unbuffered: nsqd sends each message at once (``output_buffer_size`` -1). Otherwise the messages of a slow topic
            wait in its output buffer, up to a quarter of a second, and latency is that of the buffer.
        concurrency: callers of a publish, handlers of a consumer, messages on their way in a roundtrip.
    """

    kind: str
    mode: str = ""
    size: int = 200
    count: int = 0
    duration: float = 2.0
    rounds: int = 3
    max_in_flight: int = 2500
    connections: int = 1
    partitions: int = 1
    concurrency: int = 1
    batch: int = 200
    compression: str = ""
    tls: bool = False
    rate: float = 0.0
    rate_share: float = 0.0
    unbuffered: bool = False
    handler_sleep: float = 0.0
    linger: float = 0.001
    settle: float = 0.5

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("kind", self.kind, KINDS),
            ("mode", self.mode, _MODES.get(self.kind, ("",))),
            ("compression", self.compression, COMPRESSIONS),
        ):
            if value not in allowed:
                raise ConfigError(f"{name}={value!r}: must be one of {', '.join(map(repr, allowed))}")
        for name in ("size", "rounds", "max_in_flight", "connections", "partitions", "concurrency", "batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1")

    @property
    def needs_cluster(self) -> bool:
        """Whether its topic has partitions."""
        return self.kind == "ordered" or self.partitions > 1

    @property
    def needs_own_servers(self) -> bool:
        """Whether its clients ask for what servers that run already may not have, or do not say."""
        return self.kind in ("start", "spark")

    @property
    def patience(self) -> float:
        """How long a client may take for a round, in seconds: a JVM has to start, and to warm up."""
        return SPARK_PATIENCE if self.kind == "spark" else PATIENCE

    def count_at(self, rate: float) -> int:
        """How many messages a client that handles ``rate`` a second gets, so that it works for ``duration``."""
        return self.rounded(rate * self.duration / (1 - WARMUP_SHARE))

    def rounded(self, count: float) -> int:
        """The nearest count that callers and batches can share evenly."""
        step = {"concurrent": self.concurrency, "batch": self.batch}.get(self.mode, 1)
        return max(1, round(max(count, SMALLEST_COUNT) / step)) * step

    def beyond(self) -> int:
        """How many messages more than are counted: the last ones of a topic wait in the output buffer of nsqd."""
        if self.rate:
            return int(self.rate * RATE_BEYOND_SECONDS) + 1
        if self.kind in ("idle", "start", "spark"):
            return 0
        if self.kind == "roundtrip":
            return self.concurrency
        return 2 * self.max_in_flight + SERVER_BUFFER // self.size

    def warmup(self, count: int) -> int:
        """How many messages of ``count`` are left out at the start; publishing sends them besides."""
        if self.rate and self.kind != "publish":
            return min(count // 2, int(self.rate * RATE_WARMUP_SECONDS))
        step = {"concurrent": self.concurrency, "batch": self.batch}.get(self.mode, 1)
        return max(1, int(count * WARMUP_SHARE) // step) * step
