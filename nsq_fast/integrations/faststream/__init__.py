"""A broker of FastStream on ``nsq_fast.aio``: subscribers and publishers as decorators.

    from faststream import FastStream
    from nsq_fast.integrations.faststream import NSQBroker

    broker = NSQBroker("127.0.0.1:4150")
    app = FastStream(broker)

    @broker.subscriber("orders", "billing")
    async def bill(order: dict) -> None: ...

It is built on parts of FastStream that FastStream calls internal, so the extra asks for the versions that it was
tested with. docs/integrations.md says what is left out.
"""

from __future__ import annotations

try:
    import faststream as _faststream  # noqa: F401  # says which extra is missing before anything below needs it
except ImportError as error:
    raise ImportError(
        "nsq_fast.integrations.faststream needs FastStream: pip install 'nsq-fast[faststream]'"
    ) from error

from .broker import NSQBroker, NSQRouter
from .message import NSQMessage

__all__ = ["NSQBroker", "NSQMessage", "NSQRouter"]
