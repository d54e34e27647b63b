"""What a server sends on one connection, and how its owner gets it.

The owner is called in the reader greenlet, or in one that reads in its place.
Whoever waits for a reply, or for messages, may do one read of the reader's:
what comes needs no switch to get there then. Whenever that greenlet does
anything but read, the reader is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gevent.event import AsyncResult

from nsq_fast._codec import Message
from nsq_fast._message_path import ReadPath
from nsq_fast.errors import NsqError
from nsq_fast.names import Address
from nsq_fast.protocol.events import AnswerFailed, CommandFailed, Heartbeat, MessageSkipped, Reply, ServerFailed
from nsq_fast.protocol.session import Session

from .commands import CommandWriter
from .outbox import Outbox
from .transport import Transport

if TYPE_CHECKING:
    from .owner import ConnectionOwner


class Waiter(AsyncResult):  # type: ignore[type-arg]  # not subscriptable when it runs
    """The token of a command whose caller waits; no owner ever sees it."""


class Incoming(CommandWriter, ReadPath):
    """The side of a connection that reads: what is done less often than for each read."""

    _transport: Transport

    def __init__(self, address: Address, session: Session, outbox: Outbox, owner: ConnectionOwner[Any]) -> None:
        super().__init__(address, session, outbox, owner)
        self._owner = owner

    # A socket that another thread uses, too, while the hub sleeps

    def lend(self) -> int | None:
        """Have the caller watch the socket; its number. None: nobody else can, for TLS or compression."""
        return self._transport.lend_watch()

    def take_back(self) -> None:
        """Watch the socket again."""
        self._transport.take_watch_back()

    def read_lent(self) -> None:
        """There is something to read on a socket that was lent."""
        self._transport.wake_receiver()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is on its way: no reply is due, nothing waits to be sent or was read in part."""
        return (
            (self.closed_error is None and self.session.is_quiet)
            and self._outbox.is_quiet
            and self._transport.receiver is not None
        )

    def was_sent(self, command: str, token: Any, unsent: bytes | None) -> None:
        """Another thread has sent a command that has a reply, but for ``unsent``, while the connection was quiet."""
        self.session.expect(command, token)
        if unsent is not None:
            self._outbox.leave_to_writer(memoryview(unsent))

    # Replies

    def await_reply(self) -> bytes | None:
        """Wait for the next reply in the calling greenlet, if only one is due: then the reader need not wake up.

        What it returns is for ``take_reply``, at once. None: it is all left to the reader.
        """
        if len(self.session.pending) != 1 or self._outbox.is_scheduled:
            return None
        transport = self._transport
        if transport.receiver is None:
            return None
        try:
            data = transport.recv_at_once()
            if data is None and transport.spin_reader.is_turn_due:
                data = transport.recv_in_turn()
                if data is None and transport.spin_reader.is_turn_due:
                    return None
                data = transport.recv_at_once() if data is None else data
            return transport.recv_for_reader() if data is None else data
        except Exception as error:
            transport.cancel_recv(error)  # it is the reader that ends the connection
            return None

    def take_reply(self, data: bytes) -> None:
        """Deal with what was read, by ``await_reply`` say: ``on_reply`` is called, or the owner hears of what it is."""
        try:
            self.received(data)
        except Exception as error:
            self._transport.cancel_recv(error)

    def stop_reading_for_reader(self) -> None:
        """Make a ``read_for_reader`` that is waiting in another greenlet return."""
        self._transport.interrupt()

    def _dispatch(self, events: list[Any]) -> None:
        """Hand a mixed list to the owner, in order: runs of messages as lists."""
        run: list[Message] = []
        on_reply = self._owner.on_reply
        for event in events:
            kind = event.__class__
            if kind is Message:
                run.append(event)
                continue
            if run:
                self._hand_over(run)
                run = []
            if kind is not Reply:
                self._handle(event)
            elif event.token.__class__ is Waiter:
                event.token.set(event.data)
            elif event.command == "CLS":
                self._owner.on_close_wait(self)
            else:
                on_reply(self, event.token, event.data)
        if run:
            self._hand_over(run)

    def _hand_over(self, messages: list[Message]) -> None:
        if self.closed_error is not None:
            return  # a callback has closed us: nobody could answer them any more
        self.last_message_at = self.last_received_at
        self._owner.on_messages(self, messages)

    def _handle(self, event: Any) -> None:
        kind = event.__class__
        if kind is Heartbeat:
            if self.closed_error is None:
                self._outbox.write(event.send)
            self._owner.on_heartbeat(self)
        elif kind is MessageSkipped:
            if self.closed_error is None:
                self._owner.on_message_skipped(self, event.message, event.error)
        elif kind is AnswerFailed:
            self._owner.on_answer_failed(self, event.error, event.message_id)
        elif kind is CommandFailed:
            self._failed(event.token, event.error)
            if event.fatal:
                raise event.error
        elif kind is ServerFailed:
            self._owner.on_error(self, event.error)
            if event.fatal:
                raise event.error

    def _failed(self, token: Any, error: NsqError) -> None:
        if token.__class__ is Waiter:
            token.set_exception(error)
        elif token is not None:
            self._owner.on_failed(self, token, error)
