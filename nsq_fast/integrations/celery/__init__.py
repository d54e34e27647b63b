"""A broker of Celery: a transport of kombu, which knows ``nsq://`` once this module is imported.

    import nsq_fast.integrations.celery
    from celery import Celery

    app = Celery("shop", broker="nsq://127.0.0.1:4150")

A queue is a topic, whose messages all workers share through one channel. A
message is finished when Celery acknowledges it, requeued when Celery rejects it
for that, and touched for as long as Celery holds it. A task with a countdown or
an ETA waits in nsqd. docs/integrations.md says what is different from other
brokers.
"""

from __future__ import annotations

try:
    from kombu.transport import TRANSPORT_ALIASES
except ImportError as error:
    raise ImportError("nsq_fast.integrations.celery needs Celery: pip install 'nsq-fast[celery]'") from error

from .transport import Transport

__all__ = ["Transport"]

TRANSPORT_ALIASES.setdefault("nsq", f"{__name__}:Transport")
