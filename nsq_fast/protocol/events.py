"""What a server says: IDENTIFY and AUTH as typed structs, and what ``Session.receive`` returns besides messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from nsq_fast._codec import TracedReply, TruncatedMessage
from nsq_fast._version import __version__
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import MessageTooLarge, RemoteProtocolError, ServerError

# IDENTIFY and AUTH: the JSON we send, and the replies as typed structs.
#
# A reply may have fields we do not know and lack fields we do; a field of the
# wrong type, or a number that makes no sense, is the server's protocol error.

USER_AGENT = f"nsq_fast/{__version__}"

# Servers print Go's integers, and durations as milliseconds of what Go counts in nanoseconds.
# nsqio/nsq: nsqd/protocol_v2.go, IDENTIFY; youzan/nsq: nsqdserver/protocol_v2.go, IDENTIFY
_Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
_Milliseconds = Annotated[int, msgspec.Meta(ge=1, le=2**63 // 10**6)]


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a server said about itself and the features it granted. Fields it left out have the server's defaults."""

    version: str = ""
    max_rdy_count: _Count = 2500
    msg_timeout_ms: _Milliseconds = msgspec.field(default=60_000, name="msg_timeout")
    max_msg_timeout_ms: _Milliseconds = msgspec.field(default=900_000, name="max_msg_timeout")
    tls_v1: bool = False
    snappy: bool = False
    deflate: bool = False
    deflate_level: _Integer = 6
    max_deflate_level: _Integer = 6
    sample_rate: _Integer = 0
    auth_required: bool = False
    output_buffer_size: _Integer = 16384
    output_buffer_timeout_ms: _Integer = msgspec.field(default=250, name="output_buffer_timeout")
    topology_region: str = ""
    topology_zone: str = ""
    desired_tag: str = ""

    @property
    def msg_timeout(self) -> float:
        """Seconds until an unanswered message is requeued."""
        return self.msg_timeout_ms / 1000

    @property
    def max_msg_timeout(self) -> float:
        """Seconds after delivery beyond which TOUCH cannot push the timeout."""
        return self.max_msg_timeout_ms / 1000


class AuthInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to AUTH."""

    identity: str = ""
    identity_url: str = ""
    permission_count: _Integer = 0


# What decoding of a peer's JSON raises; RecursionError where it is nested deeply.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def identify_body(config: ConnectionConfig) -> bytes:
    """The JSON of IDENTIFY. Options that are None are left to the server.

    ``hostname`` is the embedder's to find out: nothing here asks the system.
    """
    hostname = config.hostname
    fields: dict[str, Any] = {
        "client_id": config.client_id or (hostname.partition(".")[0] if hostname else None),
        "hostname": hostname,
        "user_agent": config.user_agent or USER_AGENT,
        "feature_negotiation": True,
        "heartbeat_interval": round(config.heartbeat_interval * 1000),
        "output_buffer_size": config.output_buffer_size,
        "output_buffer_timeout": config.output_buffer_timeout,
        "sample_rate": config.sample_rate,
        "tls_v1": config.tls_v1,
        "snappy": config.snappy,
        "deflate": config.deflate,
        # The redesigned server takes a missing level for level 0.
        "deflate_level": config.deflate_level if config.deflate else None,
        "msg_timeout": None if config.msg_timeout is None else round(config.msg_timeout * 1000),
        "topology_region": config.topology_region,
        "topology_zone": config.topology_zone,
        "desired_tag": config.desired_tag,
        "extend_support": config.extend_support or None,
        "ext_filter": None if config.ext_filter is None else dict(config.ext_filter),
    }
    return msgspec.json.encode({name: value for name, value in fields.items() if value is not None})


def parse_identify(data: bytes, config: ConnectionConfig) -> ServerInfo:
    """Read the reply to IDENTIFY; a plain ``OK`` means that nothing was negotiated.

    Raises:
        RemoteProtocolError: not JSON, a field of the wrong type, a number without sense, TLS refused, or an upgrade
            that nobody asked for.
    """
    try:
        info = ServerInfo() if data == b"OK" else msgspec.json.decode(data, type=ServerInfo)
    except UNREADABLE as error:
        raise RemoteProtocolError(f"IDENTIFY reply {data[:100]!r}: {error}") from error
    for feature in ("tls_v1", "snappy", "deflate"):
        if getattr(info, feature) and not getattr(config, feature):
            raise RemoteProtocolError(f"the server turned {feature} on, which was not asked for")
    if config.tls_v1 and not info.tls_v1:
        # Going on in clear text would send the secret and the messages unprotected.
        raise RemoteProtocolError("tls_v1=True, and the server does not offer TLS")
    return info


def parse_auth(data: bytes) -> AuthInfo:
    """Read the reply to AUTH. Raises RemoteProtocolError."""
    try:
        return msgspec.json.decode(data, type=AuthInfo)
    except UNREADABLE as error:
        raise RemoteProtocolError(f"AUTH reply {data[:100]!r}: {error}") from error


# What ``Session.receive`` returns besides messages.
#
# Every event has ``send``: bytes that the embedder must write to the server now,
# usually empty. Events are immutable and carry no behaviour.

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
