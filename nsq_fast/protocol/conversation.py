"""What both sides of a conversation with an nsqd know: how far it has come, who the server is, which replies are due.

nsqd replies to commands in the order in which it reads them, and a reply does not say which command it is for
(nsqio/nsq: nsqd/protocol_v2.go, IOLoop). So the commands that have a reply wait in a queue, and a reply belongs to the
first of them. FIN, REQ, TOUCH, RDY and NOP have none; an error may still come of one of them, anywhere between replies.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from typing import Any

from nsq_fast import _codec
from nsq_fast._frame import ErrorFrame, FrameReader
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import LocalProtocolError, RemoteProtocolError

from .dialect import ANSWER_ERRORS, ORIGINAL, PUBLISHES, concerns_unanswered, message_id_in, receipt_in
from .events import AnswerFailed, CommandFailed, Event, Heartbeat, Reply, ServerFailed
from .identify import AuthInfo, ServerInfo

# An IDENTIFY reply is about 300 bytes; more than this is no nsqd, and not worth the memory.
MAX_HANDSHAKE_FRAME = 64 * 1024


class Stage(Enum):
    """How far the conversation has come."""

    NEW = auto()
    IDENTIFYING = auto()
    UPGRADING = auto()  # between UpgradeNeeded and upgraded()
    CONFIRMING = auto()  # waiting for the OK inside the new layer
    AUTHENTICATING = auto()
    READY = auto()
    OVER = auto()  # after a fatal error: what still comes is not worth reading
    LOST = auto()


READY = Stage.READY  # on every command's path; an Enum looks its members up slowly


class Conversation:
    """The state that all commands need. A Session is one; it says what moves ``stage``.

    Attributes:
        info: what the server said in IDENTIFY; its defaults before that.
        auth: the reply to AUTH, or None.
        dialect: the server's family, known once Identified.
        stage: how far the conversation has come.
        pending: the commands that wait for their reply: name and token, in the order in which they were given.
    All are for reading only.
    """

    def __init__(self, config: ConnectionConfig) -> None:
        self.config = config
        self.info = ServerInfo()
        self.auth: AuthInfo | None = None
        self.dialect = ORIGINAL
        self.stage = Stage.NEW
        self.pending: deque[tuple[str, Any]] = deque()
        self._had_fatal_error = False
        self._reader = FrameReader(max_frame_size=MAX_HANDSHAKE_FRAME)

    @property
    def is_ready(self) -> bool:
        """Whether commands are allowed: the handshake is over and the stream has not ended."""
        return self.stage is READY

    @property
    def pending_count(self) -> int:
        """Commands that wait for their reply."""
        return len(self.pending)

    def tokens(self) -> list[Any]:
        """The tokens of the commands that wait for their reply, in order."""
        return [token for _, token in self.pending]

    # Commands

    def expect(self, command: str, token: Any = None) -> None:
        """Register a command whose bytes the caller has built; its reply will carry ``token``.

        The bytes must be written in the order of the ``expect`` calls. Raises LocalProtocolError
        when no command is allowed now, or when the server's dialect does not have it.
        """
        if self.stage is not READY or command not in self.dialect.commands:
            self._refuse(command)
        self.pending.append((command, token))

    def nop(self) -> bytes:
        """A sign of life."""
        return _codec.NOP

    def _check(self, command: str, partition: int | None) -> None:
        """Raise LocalProtocolError when the command is not allowed now, or not for a server of this dialect."""
        if self.stage is not READY or command not in self.dialect.commands:
            self._refuse(command)
        if partition is not None and not self.dialect.has_partitions:
            raise LocalProtocolError(
                f"{command}: {self.dialect.name} servers ({self.info.version}) have no partitions;"
                f" leave partition={partition} out"
            )

    def _refuse(self, command: str) -> None:
        if self.stage is not READY:
            raise LocalProtocolError(f"{command}: not allowed while {self.stage.name}")
        instead = self.dialect.refusals.get(command)
        raise LocalProtocolError(
            f"{command}: unknown to {self.dialect.name} servers ({self.info.version})"
            + (f"; {instead}" if instead else "")
        )

    # Replies

    def _response(self, data: bytes) -> Event:
        """What a response frame is: a heartbeat, or the reply to the first command that waits for one."""
        # A heartbeat is a response frame too, between the replies. nsqio/nsq: nsqd/protocol_v2.go, messagePump
        if data == b"_heartbeat_":
            return Heartbeat(send=_codec.NOP)
        if not self.pending:
            raise RemoteProtocolError(f"a reply that no command waits for: {data[:100]!r}")
        command, token = self.pending[0]
        if (command == "CLS") != (data == b"CLOSE_WAIT"):
            raise RemoteProtocolError(f"{data[:100]!r} in reply to {command}")
        receipt = receipt_in(data) if command in PUBLISHES else None
        self.pending.popleft()  # not before: a command whose reply cannot be read is still without one
        return Reply(command=command, data=data, token=token, receipt=receipt)

    def _error(self, frame: ErrorFrame) -> Event:
        """What an error frame is: of a message, of no command, or the reply to the first that waits for one."""
        error = frame.error
        if error.code in ANSWER_ERRORS:
            return AnswerFailed(error=error, message_id=message_id_in(error))
        if not self.pending or concerns_unanswered(error, self.pending[0][0]):
            fatal = self.dialect.is_fatal(error, None)
            self._had_fatal_error |= fatal
            return ServerFailed(error=error, fatal=fatal)
        command, token = self.pending.popleft()
        fatal = self.dialect.is_fatal(error, command)
        # An error may be fatal for us and not end the server's side: then later commands may have been carried out.
        self._had_fatal_error |= self.dialect.is_last_word(error, command)
        return CommandFailed(command=command, error=error, token=token, fatal=fatal)
