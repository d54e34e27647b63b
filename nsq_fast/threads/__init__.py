"""NSQ for programs of threads: a Producer and a Consumer that every native thread may call.

    from nsq_fast.threads import Producer

    with Producer("127.0.0.1:4150") as producer:
        producer.publish("greetings", b"hello")

They have the names and arguments of those of ``nsq_fast``, which live on gevent.
What they do is done by such ones, in a hub thread of the process.
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
