"""What ``Session.receive`` returns besides messages.

Every event has ``send``: bytes that the embedder must write to the server now,
usually empty. Events are immutable and carry no behaviour.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from nsq_fast._codec import TracedReply, TruncatedMessage
from nsq_fast.errors import MessageTooLarge, ServerError

from .identify import AuthInfo, ServerInfo

UpgradeKind = Literal["tls", "snappy", "deflate"]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all events."""

    send: bytes = b""


class Identified(Event, frozen=True):
    """The server answered IDENTIFY. Upgrades and AUTH may follow; commands must wait for Ready."""

    info: ServerInfo


class UpgradeNeeded(Event, frozen=True):
    """The stream changes now: wrap the transport in ``kind``, then call ``session.upgraded()``.

    ``leftover`` was received after the frame that asked for it and already belongs to the new layer.
    """

    kind: UpgradeKind
    leftover: bytes


class Authenticating(Event, frozen=True):
    """AUTH is in ``send``, and with it the secret: its repr does not show it."""

    def __repr__(self) -> str:
        return "Authenticating(send=<AUTH>)"


class Ready(Event, frozen=True):
    """The handshake is over. ``auth`` is the reply to AUTH, None when there was none."""

    info: ServerInfo
    auth: AuthInfo | None = None
    auth_data: bytes | None = None


class Heartbeat(Event, frozen=True):
    """The server wants a sign of life: ``send`` is a NOP."""


class MessageSkipped(Event, frozen=True):
    """A message above ``max_frame_size`` has passed. It is in flight: finish or requeue it as any other.

    ``message`` has everything but its body.
    """

    message: TruncatedMessage
    error: MessageTooLarge


class Reply(Event, frozen=True):
    """The reply to a command (``OK``, ``CLOSE_WAIT`` to CLS), with the token that was given with it.

    ``receipt``: ids and place of the stored record, in the reply to a traced publish. For MPUB_TRACE: the first
    message's id and offset, trace id 0, the size of all records. None otherwise.
    """

    command: str
    data: bytes
    token: Any = None
    receipt: TracedReply | None = None


class CommandFailed(Event, frozen=True):
    """The server refused a command. ``fatal``: the connection is over; close it if the server does not."""

    command: str
    error: ServerError
    token: Any = None
    fatal: bool = True


class AnswerFailed(Event, frozen=True):
    """A FIN, REQ or TOUCH came too late; the connection goes on. ``message_id`` when the server named it."""

    error: ServerError
    message_id: bytes | None = None


class ServerFailed(Event, frozen=True):
    """An error that answers no command, such as RDY out of range. ``fatal``: the server closes the connection."""

    error: ServerError
    fatal: bool = True


class Disconnected(Event, frozen=True):
    """The stream ended.

    Attributes:
        pending: (command, token) of every command without a reply, oldest first.
        executed: False when the server had reported a fatal error before: then none of ``pending`` was
            carried out. None: unknown.
        truncated: the stream ended inside a frame.
    """

    pending: Sequence[tuple[str, Any]] = ()
    executed: bool | None = None
    truncated: bool = False
