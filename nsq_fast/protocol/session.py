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
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from typing import Any, TypeAlias

from nsq_fast import _codec
from nsq_fast._codec import Message, TruncatedMessage
from nsq_fast._frame import MAX_COLUMN_FRAME_SIZE, OK, ColumnReader, ErrorFrame, FrameReader, Response
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import LocalProtocolError, MessageTooLarge, NsqError, RemoteProtocolError
from nsq_fast.names import check_channel, check_topic

from .delivery_limit import DeliveryLimit
from .dialect import ANSWER_ERRORS, ORIGINAL, PUBLISHES, concerns_unanswered, dialect_of, message_id_in, receipt_in
from .events import (
    AnswerFailed,
    Authenticating,
    CommandFailed,
    Disconnected,
    Event,
    Heartbeat,
    Identified,
    MessageSkipped,
    Ready,
    Reply,
    ServerFailed,
    UpgradeKind,
    UpgradeNeeded,
)
from .identify import AuthInfo, ServerInfo, identify_body, parse_auth, parse_identify
from .in_flight import InFlight

# An IDENTIFY reply is about 300 bytes; more than this is no nsqd, and not worth the memory.
MAX_HANDSHAKE_FRAME = 64 * 1024
_OK_FRAME = _codec.encode_frame(0, b"OK")

SessionEvent: TypeAlias = "Message | Event"


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


_READY = Stage.READY  # on every command's path; an Enum looks its members up slowly


class Session:
    """The protocol state of one connection.

    Args:
        config: what to negotiate. ``hostname`` None leaves that field out of IDENTIFY.
        responder: put into every message; its ``finish``, ``requeue`` and ``touch`` answer them.

    Attributes:
        info: what the server said in IDENTIFY; its defaults before that.
        auth: the reply to AUTH, or None.
        dialect: the server's family, known once Identified.
        rdy: the RDY last sent.
        ledger: the messages in flight, and when the server takes them back.
        message_count: messages in the list that ``receive`` returned last. When it equals the
            length of the list, the list holds messages only.
        failure: the error that the next ``receive`` raises, if there is one.
    """

    def __init__(self, config: ConnectionConfig, *, responder: object | None = None) -> None:
        self.config = config
        self.info = ServerInfo()
        self.auth: AuthInfo | None = None
        self.dialect = ORIGINAL
        self.rdy = 0
        self.ledger = InFlight()
        self.message_count = 0
        self.failure: NsqError | None = None
        self._stage = Stage.NEW
        self._responder = responder
        self._reader = FrameReader(max_frame_size=MAX_HANDSHAKE_FRAME)
        self._pending: deque[tuple[str, Any]] = deque()
        self._limit: DeliveryLimit
        self._upgrades: list[UpgradeKind] = []
        self._is_subscribed = False
        self._is_closing = False
        self._had_fatal_error = False

    # What has happened

    @property
    def stage(self) -> Stage:
        """How far the conversation has come."""
        return self._stage

    @property
    def is_ready(self) -> bool:
        """Whether commands are allowed: the handshake is over and the stream has not ended."""
        return self._stage is Stage.READY

    @property
    def is_subscribed(self) -> bool:
        """Whether SUB was sent."""
        return self._is_subscribed

    @property
    def is_closing(self) -> bool:
        """Whether CLS was sent."""
        return self._is_closing

    @property
    def is_idle(self) -> bool:
        """Whether commands are allowed and no reply is due."""
        return self._stage is _READY and not self._pending

    @property
    def in_flight(self) -> int:
        """Messages received, not finished or requeued, and not expired."""
        return self.ledger.count

    @property
    def pending_count(self) -> int:
        """Commands that wait for their reply."""
        return len(self._pending)

    def tokens(self) -> list[Any]:
        """The tokens of the commands that wait for their reply, in order."""
        return [token for _, token in self._pending]

    # Receiving

    def receive(self, data: bytes, now: float = 0.0) -> list[Any]:
        """Take bytes from the server; return what they complete: messages and events, in order.

        Args:
            data: what was read; ``b""`` for the end of the stream.
            now: a monotonic time in seconds. It becomes ``received_at`` of the messages, and is needed to notice a
                server that ignores RDY.

        Raises:
            RemoteProtocolError: the server broke the protocol, or sends many more messages than RDY allows.
            LocalProtocolError: called before ``connect()``, or between UpgradeNeeded and ``upgraded()``.
        """
        if self._stage is not Stage.READY:
            return self._receive_handshake(data, now)
        if not data:
            return self._end()
        if self.failure is not None:
            raise self.failure
        reader = self._reader
        frames = reader.feed(data, now)
        self.message_count = count = reader.message_count
        if reader.error is not None:
            self.failure = reader.error
        if count and count == len(frames):
            self.ledger.received(frames)
            if self.ledger.count > self._limit.most:
                self.check_in_flight(self.ledger.count, now)
            return frames
        events = self._events(frames)
        if self.message_count:
            self.ledger.received([event for event in events if event.__class__ is Message])
            self.check_in_flight(self.ledger.count, now)
        return events

    def expire(self, now: float) -> list[Message]:
        """The messages whose deadline is over at ``now``, the clock of ``receive``: they are in flight no more.

        The server delivers them again, to this connection or another. They are marked as expired; a FIN that is still
        sent for one may be in time, or be answered with AnswerFailed. ``ledger.next_deadline`` says when to ask again.
        """
        return self.ledger.expire(now)

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
        reader.feed(layout.take_buffered())
        return reader

    def check_in_flight(self, in_flight: int, now: float) -> None:
        """Set ``failure``, and so end the conversation, if that is many more messages than RDY allows.

        ``receive`` does so by itself; this is for messages in columns.
        """
        if self._stage is _READY and self._limit.is_exceeded(in_flight, now) and self.failure is None:
            self.failure = RemoteProtocolError(
                f"the server ignores RDY: {in_flight} messages are unanswered, and the highest RDY that was sent to it"
                f" explains {self._limit.most:.0f}, with all time-outs until now; RDY is {self.rdy}"
            )

    def interpret(self, frames: Sequence[Response | ErrorFrame | TruncatedMessage]) -> list[Any]:
        """The events that frames of a column reader are; raises as ``receive`` does."""
        self.message_count = 0
        return self._events(frames)

    def receive_ok(self, data: bytes) -> Any:
        """Take the usual answer to a publish, and return its token: ``data`` is one OK and nothing else.

        Otherwise returns None, and nothing happened: ``receive`` takes everything.
        """
        pending = self._pending
        if (data == _OK_FRAME and pending and pending[0][0] in PUBLISHES) and (
            self._stage is _READY and not self._reader.buffered and self.failure is None
        ):
            return pending.popleft()[1]
        return None

    def _events(self, frames: Sequence[Any]) -> list[Any]:
        events: list[Any] = []
        pending = self._pending
        try:
            for frame in frames:
                kind = frame.__class__
                if kind is Message:
                    events.append(frame)
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
        self._stage = Stage.OVER
        self.failure = None  # nor is garbage behind it worth an error
        self.message_count = sum(event.__class__ is Message for event in events)

    def _response(self, data: bytes) -> Event:
        if data == b"_heartbeat_":
            return Heartbeat(send=_codec.NOP)
        if not self._pending:
            raise RemoteProtocolError(f"a reply that no command waits for: {data[:100]!r}")
        command, token = self._pending[0]
        if (command == "CLS") != (data == b"CLOSE_WAIT"):
            raise RemoteProtocolError(f"{data[:100]!r} in reply to {command}")
        receipt = receipt_in(data) if command in PUBLISHES else None
        self._pending.popleft()  # not before: a command whose reply cannot be read is still without one
        return Reply(command=command, data=data, token=token, receipt=receipt)

    def _error(self, frame: ErrorFrame) -> Event:
        error = frame.error
        if error.code in ANSWER_ERRORS:
            return AnswerFailed(error=error, message_id=message_id_in(error))
        if not self._pending or concerns_unanswered(error, self._pending[0][0]):
            fatal = self.dialect.is_fatal(error, None)
            self._had_fatal_error |= fatal
            return ServerFailed(error=error, fatal=fatal)
        command, token = self._pending.popleft()
        fatal = self.dialect.is_fatal(error, command)
        self._had_fatal_error |= self.dialect.is_last_word(error, command)
        return CommandFailed(command=command, error=error, token=token, fatal=fatal)

    def _end(self) -> list[Any]:
        if self._stage is Stage.LOST:
            return []
        self._stage = Stage.LOST
        self.message_count = 0
        pending = tuple(self._pending)
        self._pending.clear()
        executed = False if self._had_fatal_error else None
        return [Disconnected(pending=pending, executed=executed, truncated=self._reader.buffered > 0)]

    # The handshake

    def connect(self) -> bytes:
        """The first bytes of the conversation: the magic and IDENTIFY."""
        if self._stage is not Stage.NEW:
            raise LocalProtocolError("connect: the conversation has begun already")
        self._stage = Stage.IDENTIFYING
        self._pending.append(("IDENTIFY", None))
        return _codec.MAGIC_V2 + _codec.identify(identify_body(self.config))

    def upgraded(self) -> None:
        """The transport is wrapped in the layer that UpgradeNeeded asked for; the server confirms inside it."""
        if self._stage is not Stage.UPGRADING:
            raise LocalProtocolError("upgraded: no upgrade was asked for")
        self._stage = Stage.CONFIRMING

    def _receive_handshake(self, data: bytes, now: float) -> list[Any]:
        if not data or self._stage is Stage.LOST:
            return self._end()
        if self._stage is Stage.OVER:
            self.message_count = 0
            return []
        if self.failure is not None:
            raise self.failure
        if self._stage in (Stage.NEW, Stage.UPGRADING):
            raise LocalProtocolError(f"receive: not allowed while {self._stage.name}")
        events: list[Any] = []
        self.message_count = 0
        try:
            # One frame at a time: what follows it may belong to a layer that is not there yet.
            while frames := self._reader.feed(data, now, 1):
                data = b""
                self._handshake_frame(frames[0], events)
                stage = self.stage
                if stage is Stage.READY:
                    self._start_reading(events, now)
                if stage in (Stage.READY, Stage.UPGRADING):
                    break
        except RemoteProtocolError as error:
            self.failure = error
            if not events:
                raise
        return events

    def _handshake_frame(self, frame: Any, events: list[Any]) -> None:
        if isinstance(frame, Message):
            raise RemoteProtocolError("a message before the handshake was over")
        if isinstance(frame, ErrorFrame):
            events.append(self._error(frame))
        elif frame.data == b"_heartbeat_":
            events.append(Heartbeat(send=_codec.NOP))
        elif not self._pending and self._stage is not Stage.CONFIRMING:
            raise RemoteProtocolError(f"{frame.data[:100]!r} after the handshake had been refused")
        elif self._stage is Stage.IDENTIFYING:
            self._identified(frame.data, events)
        elif self._stage is Stage.CONFIRMING:
            if frame.data != b"OK":
                raise RemoteProtocolError(f"{frame.data[:100]!r} instead of OK after an upgrade")
            self._next_step(events)
        else:
            self._authenticated(frame.data, events)

    def _identified(self, data: bytes, events: list[Any]) -> None:
        self.info = info = parse_identify(data, self.config)
        self._pending.popleft()
        self.ledger.identified(info)
        self.dialect = dialect_of(info.version)
        if info.tls_v1:
            self._upgrades.append("tls")
        if info.snappy:
            self._upgrades.append("snappy")
        elif info.deflate:
            self._upgrades.append("deflate")
        events.append(Identified(info=info))
        self._next_step(events)

    def _next_step(self, events: list[Any]) -> None:
        if self._upgrades:
            self._stage = Stage.UPGRADING
            events.append(UpgradeNeeded(kind=self._upgrades.pop(0), leftover=self._reader.take_buffered()))
        elif self.info.auth_required and self.config.auth_secret is not None:
            self._stage = Stage.AUTHENTICATING
            self._pending.append(("AUTH", None))
            secret = self.config.auth_secret
            events.append(Authenticating(send=_codec.auth(secret.encode() if isinstance(secret, str) else secret)))
        else:
            self._stage = Stage.READY
            events.append(Ready(info=self.info))

    def _authenticated(self, data: bytes, events: list[Any]) -> None:
        self.auth = parse_auth(data)
        self._pending.popleft()
        self._stage = Stage.READY
        events.append(Ready(info=self.info, auth=self.auth, auth_data=data))

    def _start_reading(self, events: list[Any], now: float) -> None:
        leftover = self._reader.take_buffered()
        mute_time = self.dialect.mute_intervals * self.config.heartbeat_interval
        self._limit = DeliveryLimit(self.info.msg_timeout, mute_time, now)
        self._reader = FrameReader(
            max_frame_size=self.config.max_frame_size,
            skip_oversized=True,
            # the original server is told of extend_support, and ignores it
            ext=self.config.extend_support and self.dialect.has_partitions,
            responder=self._responder,
        )
        if leftover:
            events.extend(self.receive(leftover, now))

    # Commands

    def expect(self, command: str, token: Any = None) -> None:
        """Register a command whose bytes the caller has built; its reply will carry ``token``.

        The bytes must be written in the order of the ``expect`` calls. Raises LocalProtocolError
        when no command is allowed now, or when the server's dialect does not have it.
        """
        if self._stage is not _READY or command not in self.dialect.commands:
            self._refuse(command)
        self._pending.append((command, token))

    def _refuse(self, command: str) -> None:
        if self._stage is not Stage.READY:
            raise LocalProtocolError(f"{command}: not allowed while {self._stage.name}")
        instead = self.dialect.refusals.get(command)
        raise LocalProtocolError(
            f"{command}: unknown to {self.dialect.name} servers ({self.info.version})"
            + (f"; {instead}" if instead else "")
        )

    def _check(self, command: str, partition: int | None) -> None:
        if self._stage is not Stage.READY or command not in self.dialect.commands:
            self._refuse(command)
        if partition is not None and not self.dialect.has_partitions:
            raise LocalProtocolError(
                f"{command}: {self.dialect.name} servers ({self.info.version}) have no partitions;"
                f" leave partition={partition} out"
            )

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
        if self._is_subscribed:
            raise LocalProtocolError(f"{command}: this connection has a subscription already")
        if ordered and self.config.sample_rate:
            raise LocalProtocolError(f"{command}: set sample_rate=0, ordered messages cannot be sampled")
        data = build(check_topic(topic), check_channel(channel), partition)
        self._pending.append((command, token))
        self._is_subscribed = True
        self._reader.detail = ordered or advanced
        return data

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
        self._pending.append(("DPUB", token))
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
        self._pending.append((command, token))
        return data

    def set_rdy(self, count: int) -> bytes:
        """RDY: let the server push while fewer than ``count`` messages are in flight.

        Raises LocalProtocolError above the server's ``max_rdy_count``: it would close the connection.
        """
        self._check_subscribed("RDY")
        if not 0 <= count <= self.info.max_rdy_count:
            raise LocalProtocolError(f"RDY {count}: the server allows 0 to {self.info.max_rdy_count}")
        data = _codec.rdy(count)
        self.rdy = count
        self._limit.rdy_sent(count)
        return data

    def fin(self, message: Message) -> bytes:
        """Finish a message: it was processed."""
        return self.fin_many((message,))

    def fin_many(self, messages: Sequence[Message]) -> bytes:
        """Finish several messages in one buffer."""
        if not self._is_subscribed:
            self._check_subscribed("FIN")
        data = _codec.fin_many(messages)
        self._answered(messages)
        return data

    def req(self, message: Message, delay_ms: int) -> bytes:
        """Give a message back, to be delivered again after ``delay_ms``."""
        self._check_subscribed("REQ")
        data = _codec.req(message.id, delay_ms)
        message.mark_responded()
        self._answered((message,))
        return data

    def touch(self, message: Message, now: float | None = None) -> bytes:
        """Ask for more time for a message.

        Args:
            now: the clock of ``receive``; moves the deadline after which ``expire`` finds the message.
        """
        self._check_subscribed("TOUCH")
        data = _codec.touch(message.id)
        if now is not None:
            self.ledger.touched(message, now)
        return data

    def cls(self, *, token: Any = None) -> bytes:
        """Ask the server to send no more messages; the Reply says ``CLOSE_WAIT``. Messages may come before it."""
        self._check_subscribed("CLS")
        if self._is_closing:
            raise LocalProtocolError("CLS: was sent already")
        self.expect("CLS", token)
        self._is_closing = True
        return _codec.cls()

    def nop(self) -> bytes:
        """A sign of life."""
        return _codec.NOP

    def _check_subscribed(self, command: str) -> None:
        if not self._is_subscribed:
            raise LocalProtocolError(f"{command}: not allowed without a subscription")

    def _answered(self, messages: Sequence[Message]) -> None:
        self.ledger.answered(messages)
