"""One connection to an nsqd as a state machine: bytes in, events out; commands in, bytes out.

No socket, no clock, no greenlet: the embedder moves the bytes. The contract:

- write what ``connect()`` returns, then hand everything received to ``receive``;
- write each event's ``send``; on UpgradeNeeded change the transport and call ``upgraded()``;
- after Ready, write what the command methods return. Replies come as events, in
  the order of the commands, each with the token that was given with its command;
- after a fatal error close; nothing more is read or said;
- hand in ``b""`` at the end of the stream: Disconnected lists the commands
  whose outcome is unknown.

A mistake of ours raises LocalProtocolError and changes nothing. A mistake of
the server raises RemoteProtocolError from ``receive``, from then on always.
Events that were complete before the bad bytes are returned first; the error
then stands in ``failure`` and the next ``receive`` raises it.

| stage          | what comes                            | next stage                                             |
|----------------|---------------------------------------|--------------------------------------------------------|
| NEW            | ``connect``                           | IDENTIFYING                                            |
| IDENTIFYING    | the reply to IDENTIFY                 | UPGRADING, AUTHENTICATING or READY                     |
| UPGRADING      | ``upgraded``                          | CONFIRMING                                             |
| CONFIRMING     | OK, inside the new layer              | UPGRADING (TLS comes first), AUTHENTICATING or READY   |
| AUTHENTICATING | the reply to AUTH                     | READY                                                  |
| READY          | frames; commands are given            | OVER after a fatal error, LOST at the end of the stream |

nsqio/nsq: nsqd/protocol_v2.go, IDENTIFY sends its reply and then an OK from inside each layer, TLS, then snappy or
deflate; youzan/nsq: nsqdserver/protocol_v2.go, identify does the same.

nsqd replies to commands in the order in which it reads them, and a reply does not say which command it is for
(nsqd/protocol_v2.go, IOLoop). So the commands that have a reply wait in a queue, and a reply belongs to the
first of them. FIN, REQ, TOUCH, RDY and NOP have none; an error may still come of one of them, anywhere between replies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypedDict

import msgspec

from nsq_fast import __version__, _codec
from nsq_fast._codec import HeldMessages, Message, TracedReply, TruncatedMessage
from nsq_fast._frame import (
    MAX_COLUMN_FRAME_SIZE,
    OK,
    ColumnReader,
    ErrorFrame,
    FrameReader,
    Response,
    SessionPath,
)
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import LocalProtocolError, MessageTooLarge, RemoteProtocolError, ServerError, counted
from nsq_fast.names import check_channel, check_topic

from .dialect import (
    ANSWER_ERRORS,
    ORIGINAL,
    PUBLISHES,
    UNREADABLE,
    Dialect,
    concerns_unanswered,
    dialect_of,
    message_id_in,
    receipt_in,
)

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
        return msgspec.convert(msgspec.json.decode(data), AuthInfo)  # all of it is handed on, by ``Ready.auth_data``
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


# The messages of one connection that are in flight, and how many a server may have sent.
#
# nsqd takes a message back ``msg_timeout`` after it was sent, unless a TOUCH has moved its deadline, and delivers it
# again (nsqio/nsq: nsqd/channel.go, processInFlightQueue; youzan/nsq: nsqd/channel.go, processInFlightQueue). From then
# on it is in flight no more, whether or not anybody here still means to answer it. ``expire`` finds these messages.
#
# Order of arrival is order of deadlines, except for messages that were touched: these are looked at one by one.


SLACK = 16
"""Answered messages that were touched may be kept, beside as many as are in flight."""


class InFlight(HeldMessages):
    """The ledger of one connection. Times are in seconds, on the clock of ``Session.receive``."""

    late: int

    def __init__(self) -> None:
        super().__init__()
        self._touched: list[Message] = []  # those whose first deadline is over, but not the one that TOUCH has set
        self._deadlines: dict[Message, float] = {}  # of all that were touched
        self.identified(ServerInfo())

    def identified(self, info: ServerInfo) -> None:
        """Take the timeouts that the server has granted."""
        self.msg_timeout: float = info.msg_timeout
        self._max_msg_timeout = info.max_msg_timeout

    def touched(self, message: Message, now: float) -> None:
        """TOUCH of a message is about to be sent."""
        if message.has_responded() or message.has_expired():
            return
        # nsqio/nsq and youzan/nsq: nsqd/channel.go, TouchMessage
        self._deadlines[message] = min(now + self.msg_timeout, message.received_at + self._max_msg_timeout)
        if len(self._deadlines) > 2 * self.count + SLACK:
            self._drop_touched()

    def deadline(self, message: Message) -> float:
        """When the server takes a message back, as far as is known now."""
        return self._deadlines.get(message, message.received_at + self.msg_timeout)

    def expire(self, now: float) -> list[Message]:
        """Take out and return the messages whose deadline is over, marked as expired; oldest first.

        Before ``next_deadline`` there is none.
        """
        if now < self.next_deadline:
            return []
        # In order of arrival, which is that of first deadlines: those that are over are at the front.
        messages = self.unanswered()
        due = 0
        while due < len(messages) and messages[due].received_at + self.msg_timeout <= now:
            due += 1
        self._drop_touched()
        waiting = self._touched + messages[:due]
        self._touched = [message for message in waiting if self.deadline(message) > now]
        expired = [message for message in waiting if self.deadline(message) <= now]
        return self._expired(expired, messages[due:])

    def expire_excess(self, rdy: int, now: float) -> list[Message]:
        """As ``expire``, after messages came that the server may only send if it has taken others back before.

        That is sure when more are in flight here than ``rdy``, the highest RDY that the server may act upon. The
        deadlines of the oldest are not over here, because they were read late. Messages that are younger than half of
        their timeout stay: a server that sends more than RDY allows has another reason then.
        """
        messages = self.unanswered()
        taken, excess = 0, self.count - rdy
        while taken < min(excess, len(messages)) and self._may_be_taken_back(messages[taken], now):
            taken += 1
        return self._expired(messages[:taken], messages[taken:])

    def _may_be_taken_back(self, message: Message, now: float) -> bool:
        return message.received_at + self.msg_timeout / 2 <= now and message not in self._deadlines

    def _expired(self, messages: list[Message], others: list[Message]) -> list[Message]:
        for message in messages:
            message.mark_expired()  # so that a late answer, which the ledger still hears of, is not counted again
            self._deadlines.pop(message, None)
        self.count: int = max(0, self.count - len(messages))
        self.late += len(messages)
        self.keep(others)
        first = others[0].received_at + self.msg_timeout if others else inf
        self.next_deadline: float = min([first, *(self._deadlines[message] for message in self._touched)])
        return messages

    def pending(self) -> list[Message]:
        """The messages in flight, except such as are marked as responded and whose answer has not been sent yet."""
        self._drop_touched()
        return self._touched + self.unanswered()

    def abandoned(self) -> list[Message]:
        """The messages in flight that nothing refers to but this ledger: nobody can answer them any more."""
        self._drop_touched()
        return self.unreachable(self._deadlines, self._touched)

    def _drop_touched(self) -> None:
        """Drop those touched that are answered."""
        if self._deadlines:
            self._touched = [message for message in self._touched if not message.has_responded()]
            self._deadlines = {
                message: deadline for message, deadline in self._deadlines.items() if not message.has_responded()
            }


# Does a server send more messages than RDY allows? Pure: counts and times in, a verdict out.
#
# A correct server has at most RDY messages of a connection in flight, by its own
# count. What we have received and not answered can be more, since a server takes
# messages back when their time is over, and then sends others:
#
# - a message that waits for us, in buffers, for longer than ``msg_timeout`` is sent
#   again. It cannot wait longer than ``mute_time``: by then the server has closed
#   the connection, since it has not heard from us;
# - each ``msg_timeout``, a server may take back everything that is in flight;
# - an administrator who empties or resets a channel frees all of RDY at once.
#   nsqio/nsq: nsqd/channel.go, Empty; youzan/nsq: nsqd/channel.go, initPQ.
#
# So what is in flight leaks from a bucket, RDY messages each ``msg_timeout``. From
# the first message of any period to the last, a correct server sends at most
# ``RDY * (3 + mute_time / msg_timeout)`` more than were answered and leaked: RDY that
# were on the way, as often as they can time out there, RDY for what it had room for,
# and RDY for a round of time-outs that begins at once.

# Beside these three: for administrators who empty the channel, so many times before anything is answered.
RESETS = 5
# For the few that a server still sends while a lower RDY is on the way. nsqio/nsq: nsqd/protocol_v2.go, messagePump
STRAGGLERS = 50


class DeliveryLimit:
    """How many messages of one connection may be in flight.

    Args:
        msg_timeout: seconds after which the server takes an unanswered message back.
        mute_time: seconds of our silence after which the server closes the connection.
        now: the time; 0.0 where nobody tells it. Then no server is ever found to send too much.

    Attributes:
        most: in flight, up to which ``is_exceeded`` need not be asked.
    """

    def __init__(self, msg_timeout: float, mute_time: float, now: float) -> None:
        self.most: float = float(STRAGGLERS)
        self._msg_timeout = msg_timeout
        self._rounds = 3 + RESETS + mute_time / msg_timeout
        self._rdy = 0
        self._leaked = 0.0
        self._leaked_at = now

    def rdy_sent(self, count: int) -> None:
        """Note that RDY ``count`` is being sent. Nothing tells when it is in force, so the highest one counts."""
        if count > self._rdy:
            self._rdy = count
            self._set_most()

    def is_exceeded(self, in_flight: int, now: float) -> bool:
        """Whether so many messages, received by ``now`` and not answered, prove a fault of the server."""
        if in_flight > self.most and now:
            leak = self._rdy * (now - self._leaked_at) / self._msg_timeout
            self._leaked = min(in_flight, self._leaked + leak)
            self._leaked_at = now
            self._set_most()
        return in_flight > self.most and now > 0.0

    def _set_most(self) -> None:
        self.most = STRAGGLERS + self._rounds * self._rdy + self._leaked


SessionEvent: TypeAlias = "Message | Event"

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


if TYPE_CHECKING:

    class SubscribeOptions(TypedDict, total=False):
        """The options of ``Session.sub``, for those who hand them on."""

        partition: int | None
        ordered: bool
        advanced: bool


def _check_type(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {kind.__name__}, not {type(value).__name__}")


class Session(SessionPath):
    """The protocol state of one connection.

    Args:
        config: what to negotiate. ``hostname`` None leaves that field out of IDENTIFY.
        responder: put into every message; its ``finish``, ``requeue`` and ``touch`` answer them.

    The commands return bytes to write. They raise LocalProtocolError for what is not allowed now or what the server
    does not have, NameInvalid, TypeError or ValueError for arguments; nothing has changed then, and no reply is due.
    Those without a reply (FIN, REQ, TOUCH, RDY, NOP) are allowed once SUB was given, also when the stream has ended:
    what cleans up need not look whether it has.

    Attributes, for reading only, beside those of SessionPath:
        info: what the server said in IDENTIFY; its defaults before that.
        auth: the reply to AUTH, or None.
        dialect: known once Identified.
        rdy: the RDY last sent.
        ledger: the messages in flight, and when the server takes them back.
        is_subscribed: SUB was sent. One connection has one subscription at most.
        is_closing: CLS was sent.
    """

    stage: Stage
    dialect: Dialect
    ledger: InFlight
    _reader: FrameReader
    _limit: DeliveryLimit

    def __init__(self, config: ConnectionConfig, *, responder: object | None = None) -> None:
        _check_type("config", config, ConnectionConfig)
        super().__init__(Stage.NEW, READY, PUBLISHES, FrameReader(max_frame_size=MAX_HANDSHAKE_FRAME))
        self.config = config
        self.info: ServerInfo = ServerInfo()
        self.auth: AuthInfo | None = None
        self.dialect = ORIGINAL
        self.rdy: int = 0
        self.ledger = InFlight()
        self.is_subscribed: bool = False
        self.is_closing: bool = False
        self._responder = responder
        self._upgrades: list[UpgradeKind] = []
        self._had_fatal_error = False

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

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is on its way: commands are allowed, no reply is due, and no frame was received in part."""
        return self.stage is READY and not self.pending and not self._reader.buffered and self.failure is None

    @property
    def in_flight(self) -> int:
        """Messages received, not finished or requeued, and not expired."""
        return self.ledger.count

    def expire(self, now: float) -> list[Message]:
        """The messages whose deadline is over at ``now``, the clock of ``receive``: they are in flight no more.

        The server delivers them again, to this connection or another. They are marked as expired; a FIN that is still
        sent for one may be in time, or be answered with AnswerFailed. ``ledger.next_deadline`` says when to ask again.
        """
        return self.ledger.expire(now)

    if TYPE_CHECKING:

        def receive(self, data: bytes, now: float = 0.0) -> list[SessionEvent]: ...

    # The handshake

    def connect(self) -> bytes:
        """The first bytes of the conversation: the magic and IDENTIFY. Raises LocalProtocolError unless it is new."""
        if self.stage is not Stage.NEW:
            raise LocalProtocolError("connect: the conversation has begun already")
        self.stage = Stage.IDENTIFYING
        self.pending.append(("IDENTIFY", None))
        return _codec.MAGIC_V2 + _codec.identify(identify_body(self.config))

    def upgraded(self) -> None:
        """The transport is wrapped in the layer that UpgradeNeeded asked for; the server confirms inside it.

        Raises LocalProtocolError when no upgrade was asked for.
        """
        if self.stage is not Stage.UPGRADING:
            raise LocalProtocolError("upgraded: no upgrade was asked for")
        self.stage = Stage.CONFIRMING

    def _receive_handshake(self, data: bytes, now: float) -> list[Any]:
        if not data or self.stage is Stage.LOST:
            return self._end()
        if self.stage is Stage.OVER:
            self.message_count: int = 0
            return []
        if self.failure is not None:
            raise self.failure
        if self.stage in (Stage.NEW, Stage.UPGRADING):
            raise LocalProtocolError(f"receive: not allowed while {self.stage.name}")
        events: list[Any] = []
        self.message_count = 0
        try:
            # One frame at a time: what follows it may belong to a layer that is not there yet.
            while frames := self._reader.feed(data, now, 1):
                data = b""
                events += self._handshake_events(frames[0])
                stage = self.stage
                if stage is READY:
                    self._start_reading(events, now)
                if stage in (READY, Stage.UPGRADING):
                    break
        except RemoteProtocolError as error:
            self.failure: RemoteProtocolError | None = error
            if not events:
                raise
        return events

    def _handshake_events(self, frame: Any) -> list[Event]:
        if isinstance(frame, Message):
            raise RemoteProtocolError("a message before the handshake was over")
        if isinstance(frame, ErrorFrame):
            return [self._error(frame)]
        # Heartbeats may come from the first moment on: messagePump, which sends them, starts before IDENTIFY is read.
        # nsqio/nsq: nsqd/protocol_v2.go, IOLoop
        if frame.data == b"_heartbeat_":
            return [Heartbeat(send=_codec.NOP)]
        has_command = self.stage is not Stage.CONFIRMING  # the OK inside a layer is no reply to a command
        if has_command and not self.pending:
            raise RemoteProtocolError(f"{frame.data[:100]!r} after the handshake had been refused")
        events = self._handshake_reply(frame.data)
        if has_command:
            self.pending.popleft()  # not before: a command whose reply cannot be read is still without one
        return events

    def _handshake_reply(self, data: bytes) -> list[Event]:
        if self.stage is Stage.IDENTIFYING:
            return self._identified(data)
        if self.stage is Stage.AUTHENTICATING:
            return [self._authenticated(data)]
        if data != b"OK":
            raise RemoteProtocolError(f"{data[:100]!r} instead of OK after an upgrade")
        return [self._next_step()]

    def _identified(self, data: bytes) -> list[Event]:
        self.info = info = parse_identify(data, self.config)
        self.dialect = dialect_of(info.version)
        if info.tls_v1:
            self._upgrades.append("tls")
        if info.snappy:
            self._upgrades.append("snappy")
        elif info.deflate:
            self._upgrades.append("deflate")
        return [Identified(info=info), self._next_step()]

    def _next_step(self) -> Event:
        secret = self.config.auth_secret
        if self._upgrades:
            self.stage = Stage.UPGRADING
            # What came behind the reply is the beginning of the new layer, of a TLS handshake say, and no frame.
            return UpgradeNeeded(kind=self._upgrades.pop(0), leftover=self._reader.take_buffered())
        if self.info.auth_required and secret is not None:
            self.stage = Stage.AUTHENTICATING
            self.pending.append(("AUTH", None))
            return Authenticating(send=_codec.auth(secret.encode() if isinstance(secret, str) else secret))
        self.stage = Stage.READY
        return Ready(info=self.info)

    def _authenticated(self, data: bytes) -> Event:
        self.auth = parse_auth(data)
        self.stage = Stage.READY
        return Ready(info=self.info, auth=self.auth, auth_data=data)

    def _start_reading(self, events: list[Any], now: float) -> None:
        leftover = self._reader.take_buffered()
        self.ledger.identified(self.info)
        silence = self.dialect.mute_intervals * self.config.heartbeat_interval
        self._limit = DeliveryLimit(self.info.msg_timeout, silence, now)
        self._reader = FrameReader(
            max_frame_size=self.config.max_frame_size,
            skip_oversized=True,
            # The original server is told of extend_support, and ignores it.
            ext=self.config.extend_support and self.dialect.has_partitions,
            responder=self._responder,
        )
        if leftover:
            events.extend(self.receive(leftover, now))

    # Commands of a producer: each has one reply
    #
    # nsqio/nsq: nsqd/protocol_v2.go, PUB, MPUB, DPUB; youzan/nsq: nsqdserver/protocol_v2.go, Exec has those with a
    # trace id or a header, and the partition behind the topic. A name that is not allowed, or a body that no frame can
    # hold, is refused here: the server would close the connection, and with it fail what others have published.

    def pub(self, topic: str, body: bytes, *, partition: int | None = None, token: Any = None) -> bytes:
        """Publish one message."""
        return self._publish("PUB", partition, token, _codec.pub, topic, body)

    def mpub(self, topic: str, bodies: Iterable[bytes], *, partition: int | None = None, token: Any = None) -> bytes:
        """Publish several messages at once: all of them or none."""
        return self._publish("MPUB", partition, token, _codec.mpub, topic, bodies)

    def dpub(self, topic: str, delay_ms: int, body: bytes, *, token: Any = None) -> bytes:
        """Publish one message that is delivered after ``delay_ms`` at the earliest. Original servers only."""
        self._check("DPUB", None)
        data = _codec.dpub(check_topic(topic), delay_ms, body)
        self.pending.append(("DPUB", token))
        return data

    def pub_trace(
        self, topic: str, trace_id: int, body: bytes, *, partition: int | None = None, token: Any = None
    ) -> bytes:
        """Publish one message with a trace id; the Reply has a receipt. Redesigned servers only, as all below."""
        return self._publish("PUB_TRACE", partition, token, _codec.pub_trace, topic, trace_id, body)

    def mpub_trace(
        self, topic: str, pairs: Iterable[tuple[int, bytes]], *, partition: int | None = None, token: Any = None
    ) -> bytes:
        """Publish several (trace id, body) at once; the Reply has one receipt for all."""
        return self._publish("MPUB_TRACE", partition, token, _codec.mpub_trace, topic, pairs)

    def pub_ext(
        self, topic: str, header: bytes, body: bytes, *, partition: int | None = None, token: Any = None
    ) -> bytes:
        """Publish one message with a JSON header. The Reply has a receipt if the header holds a ``##trace_id``."""
        return self._publish("PUB_EXT", partition, token, _codec.pub_ext, topic, header, body)

    def mpub_ext(
        self, topic: str, pairs: Iterable[tuple[bytes, bytes]], *, partition: int | None = None, token: Any = None
    ) -> bytes:
        """Publish several (JSON header, body) at once. An error to it is always fatal: close the connection then."""
        return self._publish("MPUB_EXT", partition, token, _codec.mpub_ext, topic, pairs)

    def _publish(
        self, command: str, partition: int | None, token: Any, build: Callable[..., bytes], topic: str, *args: Any
    ) -> bytes:
        self._check(command, partition)
        data = build(check_topic(topic), *args, partition)
        # Only now: a command whose bytes could not be built is never sent, so no reply to it may be due.
        self.pending.append((command, token))
        return data

    # Commands of a consumer: only SUB and CLS have replies
    #
    # nsqio/nsq: nsqd/protocol_v2.go, SUB, RDY, FIN, REQ, TOUCH, CLS; youzan/nsq: nsqdserver/protocol_v2.go, SUBADVANCED
    # and SUBORDERED.

    def sub(
        self,
        topic: str,
        channel: str,
        *,
        partition: int | None = None,
        ordered: bool = False,
        advanced: bool = False,
        token: Any = None,
    ) -> bytes:
        """Subscribe. Once per connection.

        Args:
            partition: of a redesigned server; None leaves the choice to it.
            ordered: redesigned: one message at a time, in order; messages carry ``offset`` and ``raw_size``.
            advanced: redesigned: messages carry ``offset`` and ``raw_size``.
        """
        command = "SUB_ORDERED" if ordered else "SUB_ADVANCED" if advanced else "SUB"
        build = _codec.sub_ordered if ordered else _codec.sub_advanced if advanced else _codec.sub
        self._check(command, partition)
        if self.is_subscribed:
            raise LocalProtocolError(f"{command}: this connection has a subscription already")
        if ordered and self.config.sample_rate:
            raise LocalProtocolError(f"{command}: set sample_rate=0, ordered messages cannot be sampled")
        data = build(check_topic(topic), check_channel(channel), partition)
        self.pending.append((command, token))
        self.is_subscribed = True
        self._reader.detail = ordered or advanced  # these messages have a DETAIL between header and body
        return data

    def set_rdy(self, count: int) -> bytes:
        """RDY: let the server push while fewer than ``count`` messages are in flight.

        Raises LocalProtocolError above the server's ``max_rdy_count``: it would close the connection.
        """
        self._check_subscribed("RDY")
        _check_type("count", count, int)
        if not 0 <= count <= self.info.max_rdy_count:
            raise LocalProtocolError(f"RDY {count}: the server allows 0 to {self.info.max_rdy_count}")
        data = _codec.rdy(count)
        self.rdy = count
        self._limit.rdy_sent(count)
        return data

    def fin(self, message: Message) -> bytes:
        """Finish a message: it was processed."""
        return self.fin_many([message])

    def fin_many(self, messages: Sequence[Message]) -> bytes:
        """Finish several messages in one buffer."""
        if not self.is_subscribed:
            self._check_subscribed("FIN")
        return self.ledger.finish(messages)

    def req(self, message: Message, delay_ms: int) -> bytes:
        """Give a message back, to be delivered again after ``delay_ms``."""
        self._check_subscribed("REQ")
        _check_type("message", message, Message)
        data = _codec.req(message.id, delay_ms)
        message.mark_responded()
        self.ledger.answered([message])
        return data

    def touch(self, message: Message, now: float | None = None) -> bytes:
        """Ask for more time for a message.

        Args:
            now: the clock of ``receive``; moves the deadline after which ``expire`` finds the message.
        """
        self._check_subscribed("TOUCH")
        _check_type("message", message, Message)
        data = _codec.touch(message.id)
        if now is not None:
            self.ledger.touched(message, now)
        return data

    def cls(self, *, token: Any = None) -> bytes:
        """Ask the server to send no more messages; the Reply says ``CLOSE_WAIT``. Messages may come before it."""
        self._check_subscribed("CLS")
        if self.is_closing:
            raise LocalProtocolError("CLS: was sent already")
        self.expect("CLS", token)
        self.is_closing = True
        return _codec.cls()

    def _check_subscribed(self, command: str) -> None:
        if not self.is_subscribed:
            raise LocalProtocolError(f"{command}: not allowed without a subscription")

    # Commands of both

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

    # Receiving

    def _receive_otherwise(self, data: bytes, now: float) -> list[Any]:
        """What ``receive`` does before the handshake is over, at the end of the stream, and after a failure."""
        if self.stage is not READY:
            return self._receive_handshake(data, now)
        if not data:
            return self._end()
        assert self.failure is not None
        raise self.failure

    def _mixed(self, frames: list[Any], now: float) -> list[Any]:
        """What ``receive`` does with frames that are not all messages."""
        events = self._events(frames)
        if self.message_count:
            messages = [event for event in events if event.__class__ is Message]
            self.check_in_flight(self.ledger.received(messages), now)
        return events

    def column_reader(self) -> ColumnReader:
        """From now on the embedder decodes, into columns: with this reader, which has what was received so far.

        Hand the ``frames`` of its columns to ``interpret``, and to ``receive`` nothing but the end of the stream.
        ``in_flight`` stays as it is. Raises LocalProtocolError before SUB, which says how messages are laid out.
        """
        self._check_subscribed("columns")
        layout = self._reader
        reader = ColumnReader(
            detail=layout.detail,
            ext=layout.ext,
            max_frame_size=min(layout.max_frame_size, MAX_COLUMN_FRAME_SIZE),
            skip_oversized=True,
        )
        # Of a frame that has begun: what is whole was returned by ``receive``, so this completes none.
        reader.feed(layout.take_buffered())
        return reader

    def check_in_flight(self, in_flight: int, now: float) -> None:
        """Set ``failure``, and so end the conversation, if that is many more messages than RDY allows.

        ``receive`` does so by itself; this is for messages in columns.
        """
        if self.stage is READY and self._limit.is_exceeded(in_flight, now) and self.failure is None:
            self.failure = RemoteProtocolError(
                f"the server ignores RDY: {counted(in_flight, 'message')} unanswered, and the highest RDY sent to it"
                f" explains {self._limit.most:.0f}, with all time-outs until now; RDY is {self.rdy}"
            )

    def interpret(self, frames: Sequence[Response | ErrorFrame | TruncatedMessage]) -> list[SessionEvent]:
        """The events that frames of a column reader are; raises as ``receive`` does."""
        self.message_count = 0
        return self._events(frames)

    def _events(self, frames: Sequence[Any]) -> list[Any]:
        events: list[Any] = []
        pending = self.pending
        try:
            for frame in frames:
                kind = frame.__class__
                if kind is Message:
                    events.append(frame)
                # The reader has one object for all OKs, so this is a comparison of addresses: for pipelined publishes.
                elif frame is OK and pending and pending[0][0] != "CLS":
                    command, token = pending.popleft()
                    events.append(Reply(command=command, data=b"OK", token=token))
                elif kind is Response:
                    events.append(self._response(frame.data))
                elif kind is TruncatedMessage:
                    events.append(self._skipped(frame))
                else:
                    events.append(self._error(frame))
                    if getattr(events[-1], "fatal", False):
                        self._is_over(events)
                        break
        except RemoteProtocolError as error:
            self.failure = error
            self.message_count = sum(event.__class__ is Message for event in events)
            if not events:
                raise
        return events

    def _skipped(self, message: TruncatedMessage) -> Event:
        self.ledger.received([message])
        error = MessageTooLarge(message.id, message.attempts, message.body_size, message.max_frame_size)
        return MessageSkipped(message=message, error=error)

    def _is_over(self, events: list[Any]) -> None:
        # What still comes answers nothing of ours: the rest of an MPUB_EXT, say, that was taken for a command.
        self.stage = Stage.OVER
        self.failure = None  # nor is garbage behind it worth an error
        self.message_count = sum(event.__class__ is Message for event in events)

    def _end(self) -> list[Any]:
        if self.stage is Stage.LOST:
            return []
        self.stage = Stage.LOST
        self.message_count = 0
        pending = tuple(self.pending)
        self.pending.clear()
        # nsqd reads no further after a fatal error. nsqio/nsq: nsqd/protocol_v2.go, IOLoop
        executed = False if self._had_fatal_error else None
        return [Disconnected(pending=pending, executed=executed, truncated=self._reader.buffered > 0)]

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
