"""Producer: that of nsq_fast, with the arguments of gnsq's.

Errors need no translation: a publish that a server refused raises a
PublishRefused, which is an instance of the server error's class too.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic
from typing import Any

from gevent.event import AsyncResult

from nsq_fast.client.gevent_loop import run
from nsq_fast.client.greenlets import may_wait
from nsq_fast.errors import BodyInvalid, NSQBadMessage, NSQInvalid
from nsq_fast.names import Address
from nsq_fast.producer import Producer as _Producer

from .util import connection_options, parse_nsqds

PUBLISH_TIMEOUT = 60.0
"""Seconds that a publish may take with all its attempts; gnsq has no limit."""


class MessageRefused(BodyInvalid, NSQBadMessage):
    """A body that a server would refuse with E_BAD_MESSAGE, and was not asked about."""


class Producer(_Producer):
    """Publish to any of several nsqds.

    Args:
        options: of NsqdTCPClient, or of ``nsq_fast.Producer``.
    """

    def __init__(self, nsqd_tcp_addresses: Any = (), max_backoff_duration: float = 128, **options: Any) -> None:
        ours = {"publish_timeout": PUBLISH_TIMEOUT, **connection_options(options)}
        if max_backoff_duration > 0:
            ours["max_backoff_duration"] = max_backoff_duration
        super().__init__(sorted(parse_nsqds(nsqd_tcp_addresses)), **ours)
        self.max_backoff_duration = max_backoff_duration
        self.conn_kwargs = options

    def start(self) -> None:
        """Start, and wait until each nsqd is connected, or could not be, as gnsq does: then ``block=False`` works."""
        super().start()
        deadline = monotonic() + self.connection_config.connect_timeout
        for link in list(self._sender.pool) if may_wait() else ():
            run(link.tried.wait(max(0.0, deadline - monotonic())))

    def publish(  # type: ignore[override]
        self,
        topic: str,
        data: bytes,
        defer: int | None = None,
        block: bool = True,
        timeout: float | None = None,
        raise_error: bool = True,
    ) -> Any:
        """Publish one message; returns ``b"OK"``, or with ``raise_error=False`` an AsyncResult at once.

        Args:
            defer: milliseconds until it is delivered.
            block: False raises NSQNoConnections when there is no connection now.
            timeout: seconds for all of it; NSQNoConnections when there was no connection within it.
        """
        if defer is not None and defer < 0:
            raise NSQInvalid(f"DPUB invalid timeout {defer}")
        publish: Any = super().publish
        try:
            return publish(topic, data, defer, *_waiting(block, timeout), raise_error)
        except BodyInvalid as error:
            return _refused(error, raise_error)

    def multipublish(  # type: ignore[override]
        self,
        topic: str,
        messages: Iterable[bytes],
        block: bool = True,
        timeout: float | None = None,
        raise_error: bool = True,
    ) -> Any:
        """Publish several messages, all or none; the arguments are those of ``publish``."""
        multipublish: Any = super().multipublish
        try:
            return multipublish(topic, messages, *_waiting(block, timeout), raise_error)
        except BodyInvalid as error:
            return _refused(error, raise_error)

    def connect_to_nsqd(self, address: str, port: int) -> None:
        """Publish to one more nsqd as well. Returns at once."""
        if self.is_running:
            self._sender.pool.add([Address(address, int(port))])


def _refused(error: BodyInvalid, raise_error: bool) -> AsyncResult[Any]:
    refused = MessageRefused(str(error))
    if raise_error:
        raise refused from error
    promise: AsyncResult[Any] = AsyncResult()
    promise.set_exception(refused)
    return promise


def _waiting(block: bool, timeout: float | None) -> tuple[bool, float | None]:
    # as for gnsq, a timeout of 0 is not to wait
    return block and timeout != 0, timeout or None
