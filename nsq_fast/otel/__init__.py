"""OpenTelemetry for nsq_fast: spans and metrics of publishing and processing, and their context with each message.

    from nsq_fast.otel import Telemetry

    telemetry = Telemetry(context="headers")
    producer = telemetry.instrument(Producer("127.0.0.1:4150"))
    consumer = Consumer("orders", "billing", "127.0.0.1:4150", message_handler=telemetry.handler(handle))

Nothing of it is there unless it is asked for: producers and handlers that are not handed to a ``Telemetry`` are as they
were. It follows OpenTelemetry's conventions for messaging, and needs the extra ``nsq-fast[otel]``.
"""

from __future__ import annotations

from .telemetry import Telemetry as Telemetry

__all__ = ["Telemetry"]
