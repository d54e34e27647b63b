"""Reader: the deprecated Consumer with worker greenlets."""

from __future__ import annotations

import random
from multiprocessing import cpu_count
from typing import Any

from nsq_fast import _codec
from nsq_fast._codec import Message
from nsq_fast.errors import NSQNoConnections

from .consumer import Consumer
from .decorators import deprecated


class Reader(Consumer):
    """Use :class:`Consumer` instead.

    Args:
        async: whether the program responds to all messages by itself (a keyword of Python now: pass it in a dict).
        max_concurrency: handlers that run at once, over all connections; 0: one for each connection, in order;
            below 0: as many as there are CPUs.
        options: those of Consumer, in its order.
    """

    @deprecated
    def __init__(self, *args: Any, **options: Any) -> None:
        """Use Consumer instead."""
        vars(self)["async"] = options.pop("async", False)
        wanted = options.pop("max_concurrency", 0)
        self.max_concurrency: int | Any = cpu_count() if wanted < 0 else wanted
        if self.max_concurrency:
            options["concurrency"] = self.max_concurrency
        super().__init__(*args, **options)

    def _handle_message(self, message: Message) -> None:
        if vars(self)["async"]:
            message.enable_async()
        super()._handle_message(message)

    @property
    def overrides_handling(self) -> bool:
        """Whether messages need more than to be handed to the receivers."""
        kind = type(self)
        return bool(
            vars(self)["async"]
            or kind.handle_message is not Consumer.handle_message
            or kind._handle_message is not Reader._handle_message
        )

    @deprecated
    def publish(self, topic: str, message: bytes) -> None:
        """Use Producer instead: this one does not wait for the reply."""
        connected = [each.connection for each in self.subscribers if each.is_connected]
        if not connected:
            raise NSQNoConnections("no connection")
        random.choice(connected).request(_codec.pub(topic, message), "PUB", None)
