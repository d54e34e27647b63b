"""The transport of kombu: one connection of Celery to NSQ."""

from __future__ import annotations

import os
from time import monotonic
from typing import Any

from kombu.exceptions import ChannelError
from kombu.transport import virtual

from nsq_fast import __version__
from nsq_fast.errors import ConnectionLost, HttpError, NoNsqd, PublishFailed
from nsq_fast.threads import Producer

from .channel import Channel
from .servers import NSQD_PORT, servers_of, shown
from .wakeup import Wakeup

CONNECT_TIMEOUT = 5.0
"""Seconds, where kombu is told of no limit."""


class Transport(virtual.Transport):  # type: ignore[misc]  # kombu has no types
    """Made by ``kombu.Connection``, in each process; used in one thread, as that is.

    Attributes:
        servers: which are meant.
        declared: the queues that were declared: whether they end with their consumer, and when that was, in
            nanoseconds since 1970.
    """

    Channel = Channel
    can_parse_url = True
    default_port = NSQD_PORT
    driver_type = "nsq"
    driver_name = "nsq_fast"
    connection_errors = (ConnectionLost, NoNsqd, PublishFailed, HttpError, OSError)
    channel_errors = (ChannelError,)
    recoverable_connection_errors = connection_errors
    recoverable_channel_errors = ()
    implements = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset(("direct", "topic", "fanout")), heartbeats=False
    )

    def __init__(self, client: Any, **options: Any) -> None:
        super().__init__(client, **options)
        self.servers = servers_of(client)
        self.declared: dict[str, tuple[bool, int]] = {}
        self._pid = os.getpid()
        self._producer: Producer | None = None
        self._wakeup: Wakeup | None = None

    def driver_version(self) -> str:
        """Of nsq_fast."""
        return __version__

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        """The URL; without ``include_password`` it shows no secret."""
        if include_password:
            return uri if uri.startswith("nsq") else f"nsq+{uri}"
        return shown(uri, mask)

    # Life

    def establish_connection(self) -> Transport:
        """Raises ConnectFailed unless one of the servers is there. From then on nsq_fast connects again by itself."""
        self.servers.check(self.connect_timeout)
        super().establish_connection()
        return self

    def close_connection(self, connection: Any) -> None:
        """Close what is open. In the child of a fork that is the parent's."""
        if os.getpid() != self._pid:
            return
        super().close_connection(connection)
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()
        wakeup, self._wakeup = self._wakeup, None
        if wakeup is not None:
            wakeup.close()

    @property
    def producer(self) -> Producer:
        """Made when it is first used."""
        if self._producer is None:
            self._producer = self.servers.new_producer()
            self._producer.start()
        return self._producer

    @property
    def connect_timeout(self) -> float:
        """Seconds. Celery gives none for the remote control of its pool gevent."""
        given = self.client.connect_timeout
        return CONNECT_TIMEOUT if given is None else float(given)

    def wake(self) -> None:
        """Have whoever takes messages look for some. In any thread."""
        if self._wakeup is not None:
            self._wakeup.wake()

    def _waker(self) -> Wakeup:
        if self._wakeup is None:
            self._wakeup = Wakeup()
        return self._wakeup

    # Events

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Give one message to its callback. Raises ``socket.timeout`` when none comes within ``timeout`` seconds."""
        end = None if timeout is None else monotonic() + timeout
        wakeup = self._waker()
        while True:
            wakeup.clear()  # before the messages are looked at: none can come in between and not be seen
            if any(channel.deliver_one() for channel in list(self.channels)):
                return
            left = None if end is None else end - monotonic()
            if left is not None and left <= 0:
                raise TimeoutError("no message came")
            wakeup.wait(left)

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Have a loop of kombu take the messages."""
        loop.add_reader(self._waker().fileno(), self.on_readable, connection, loop)
        self.wake()  # some may have arrived

    def unregister_from_event_loop(self, connection: Any, loop: Any) -> None:
        """End ``register_with_event_loop``."""
        if self._wakeup is not None:
            loop.remove_reader(self._wakeup.fileno())

    def on_readable(self, connection: Any, loop: Any) -> None:
        """Take one message, and others in the next turns of the loop."""
        try:
            self.drain_events(connection, timeout=0)
        except TimeoutError:
            return
        loop.call_soon(self.on_readable, connection, loop)
