"""NSQ for asyncio: a Producer and a Consumer whose methods are awaited.

    from nsq_fast.aio import Producer

    async with Producer("127.0.0.1:4150") as producer:
        await producer.publish("greetings", b"hello")

They have the names and arguments of those of ``nsq_fast``, which live on gevent.
What they do is done by the loop in which they were started; gevent is not imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsq_fast._lazy import lazy_names

if TYPE_CHECKING:
    from .consumer import Consumer as Consumer
    from .producer import Producer as Producer

_HOME = {"Consumer": "consumer", "Producer": "producer"}

__all__ = [*_HOME]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted(__all__)
