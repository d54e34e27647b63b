"""What the [TRACE] lines of a redesigned nsqd look like (youzan/nsq: nsqd/tracer.go)."""

from __future__ import annotations

MARK = "[TRACE] topic "
PARTITION_SHIFT = 50  # of an internal id
STORED = (
    r"\[TRACE\] topic (\S+)-(\d+) trace id (\d+): message (\d+)(\( ?\d+\) put \S+| put success from client \S+)"
    r" at offset: (\d+),.* at time (\d+)"
)
DELIVERED = (
    r"\[TRACE\] topic (\S+) channel (\S+) trace id (\d+): message (\d+) \(ts: (\d+), offset: (\d+), pri:-?\d+\)"
    r" consume state (\S+) from client (\S*)\(\d+\) at time: (\d+) cost: -?\d+, attempt: (\d+)"
)
