"""A connection of the client on gevent's hub, whose calls block: for tests of one connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nsq_fast.client import connection as any_loop
from nsq_fast.client.connection import CLOSE_TIMEOUT, ConnectionOwner
from nsq_fast.client.gevent_loop import GeventLoop, run
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import NsqError
from nsq_fast.names import Address

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from nsq_fast.protocol.session import SubscribeOptions


class Connection(any_loop.Connection):
    """On the hub of the thread in which it is made."""

    def __init__(self, address: Address, config: ConnectionConfig, owner: ConnectionOwner[Any]) -> None:
        super().__init__(address, config, owner, GeventLoop.here())

    def connect(self) -> None:
        """``open``, and block until it is."""
        run(self.open())
        self.read_replies_soon()

    def subscribe(  # type: ignore[override]  # blocks
        self, topic: str, channel: str, **options: Unpack[SubscribeOptions]
    ) -> None:
        """As in the base, and block for the server's OK."""
        run(super().subscribe(topic, channel, **options))

    def close(self, error: NsqError | None = None, *, timeout: float = CLOSE_TIMEOUT) -> None:
        """As in the base, and block until ``on_disconnect`` was called (not when called from a callback)."""
        super().close(error, timeout=timeout)
        run(self.closed())
