"""The producer of a task."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from nsq_fast.config import Config
from nsq_fast.runtime import ColumnProducer, TraceLog
from nsq_fast.spark.options import SinkOptions


def new_producer(options: SinkOptions, trace: TraceLog) -> ColumnProducer:
    """A producer, not started, for the servers and with the client options of a sink."""
    return ColumnProducer(
        [str(address) for address in options.servers.nsqd_tcp],
        [str(endpoint) for endpoint in options.servers.lookupd_http],
        trace=trace,
        **_values(options.producer),
        **_values(options.connection),
        **_values(options.lookup),
    )


def _values(config: Config) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in fields(config)}
