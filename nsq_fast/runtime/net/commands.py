"""The commands of one connection that are no answers to messages, and what is known of the server.

Nothing here waits: what is queued leaves at the end of the hub's turn, and
replies go to the owner in the order of the commands.
"""

from __future__ import annotations

from typing import Any

from nsq_fast.protocol.conversation import READY
from nsq_fast.protocol.identify import ServerInfo

from .responder import Responder


class CommandWriter(Responder):
    """The side of a connection that consumers and producers give commands to."""

    @property
    def is_open(self) -> bool:
        """Whether commands may be given."""
        return self.closed_error is None

    @property
    def info(self) -> ServerInfo:
        """What the server said about itself."""
        return self.session.info

    @property
    def rdy(self) -> int:
        """The RDY last sent."""
        return self.session.rdy

    @property
    def in_flight(self) -> int:
        """Messages received, not yet finished or requeued, and not expired."""
        return max(0, self.session.in_flight - len(self.finished))

    def write(self, data: bytes) -> None:
        """Queue bytes; they leave at the end of this turn of the hub. Raises ConnectionLost when closed."""
        self._thread.check("Connection.write()")
        self._check_open()
        self._outbox.write(data)

    def request(self, data: bytes, command: str, token: Any) -> None:
        """Queue a command that has a reply: ``on_reply`` or ``on_failed`` gets ``token``, in the order of requests.

        Raises ConnectionLost when closed, LocalProtocolError when the server does not know ``command``; nothing
        is sent then, and the owner hears nothing of ``token``.
        A partition in ``data`` is not seen here: ask ``session.dialect.has_partitions`` before it is put in.
        """
        if self.closed_error is not None:
            self._check_open()
        self.session.expect(command, token)
        self._outbox.write(data)

    def send_if_idle(self, data: bytes) -> bool:
        """Send a command at once, if no reply is due and nothing waits to be sent; whether that was so.

        ``session.expect`` has to follow before another greenlet runs.
        """
        session = self.session
        is_idle = self.closed_error is None and session.stage is READY and not session.pending
        return is_idle and self._outbox.send_alone(data)

    def set_rdy(self, count: int) -> None:
        """RDY, unless it was the last one sent or the connection is closing."""
        self._thread.check("Connection.set_rdy()")
        self._check_open()
        if count != self.session.rdy and not self.session.is_closing:
            self._outbox.write(self.session.set_rdy(count))

    def start_close(self) -> None:
        """CLS: no more messages, please. ``on_close_wait`` follows; messages may still come before it."""
        self._thread.check("Connection.start_close()")
        self._check_open()
        if not self.session.is_closing:
            self._outbox.write(self.session.cls())
