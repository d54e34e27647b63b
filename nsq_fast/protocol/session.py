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

from collections.abc import Sequence
from itertools import islice
from typing import Any, TypeAlias

from nsq_fast import _codec
from nsq_fast._codec import Message, TruncatedMessage
from nsq_fast._frame import MAX_COLUMN_FRAME_SIZE, OK, ColumnReader, ErrorFrame, FrameReader, Response
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import LocalProtocolError, MessageTooLarge, NsqError, RemoteProtocolError

from .consume_commands import ConsumeCommands
from .conversation import READY, Stage
from .dialect import PUBLISHES
from .events import Disconnected, Event, Heartbeat, MessageSkipped, Reply
from .handshake import Handshake
from .publish_commands import PublishCommands

_OK_FRAME = _codec.encode_frame(0, b"OK")

SessionEvent: TypeAlias = "Message | Event"


class Session(PublishCommands, ConsumeCommands):
    """The protocol state of one connection: what is received. What is sent is in its bases, how it begins in Handshake.

    Args:
        config: what to negotiate. ``hostname`` None leaves that field out of IDENTIFY.
        responder: put into every message; its ``finish``, ``requeue`` and ``touch`` answer them.

    Attributes:
        message_count: messages in the list that ``receive`` returned last. When it equals the
            length of the list, the list holds messages only.
        failure: the error that the next ``receive`` raises, if there is one.
    The others are those of Conversation and of ConsumeCommands.
    """

    def __init__(self, config: ConnectionConfig, *, responder: object | None = None) -> None:
        super().__init__(config)
        self.message_count = 0
        self.failure: NsqError | None = None
        self._responder = responder
        self._handshake = Handshake(self, self.pending.append, self._reader.take_buffered)

    def connect(self) -> bytes:
        """The first bytes of the conversation: the magic and IDENTIFY."""
        return self._handshake.connect()

    def upgraded(self) -> None:
        """The transport is wrapped in the layer that UpgradeNeeded asked for; the server confirms inside it."""
        self._handshake.upgraded()

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
        if self.stage is not READY:
            return self._receive_handshake(data, now)
        if not data:
            return self._end()
        if self.failure is not None:
            raise self.failure
        reader = self._reader
        frames = reader.feed(data, now)
        self.message_count = count = reader.message_count
        if reader.error is not None:
            self.failure = reader.error  # behind frames that were whole, which are returned first
        if count and count == len(frames):
            in_flight = self.ledger.received(frames)
            if in_flight > self._limit.most:
                self.check_in_flight(in_flight, now)
            return frames
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
                f"the server ignores RDY: {in_flight} messages are unanswered, and the highest RDY that was sent to it"
                f" explains {self._limit.most:.0f}, with all time-outs until now; RDY is {self.rdy}"
            )

    def interpret(self, frames: Sequence[Response | ErrorFrame | TruncatedMessage]) -> list[Any]:
        """The events that frames of a column reader are; raises as ``receive`` does."""
        self.message_count = 0
        return self._events(frames)

    def receive_oks(self, data: bytes) -> list[Any] | None:
        """Take the usual answers to publishes, and return their tokens: ``data`` is OKs, one or more, and nothing else.

        Otherwise returns None, and nothing happened: ``receive`` takes everything.
        """
        pending = self.pending
        # Bytes of a partial frame before them would make it something else; a failure has to be raised first.
        if not pending or self.stage is not READY or self._reader.buffered or self.failure is not None:
            return None
        if data == _OK_FRAME:  # as for a publisher that waits for each
            return [pending.popleft()[1]] if pending[0][0] in PUBLISHES else None
        count = len(data) // len(_OK_FRAME)
        if not 0 < count <= len(pending) or data != _OK_FRAME * count:
            return None
        if any(command not in PUBLISHES for command, _ in islice(pending, count)):
            return None
        return [pending.popleft()[1] for _ in range(count)]

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is on its way: commands are allowed, no reply is due, and no frame was received in part."""
        return self.stage is READY and not self.pending and not self._reader.buffered and self.failure is None

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

    # The handshake

    def _receive_handshake(self, data: bytes, now: float) -> list[Any]:
        if not data or self.stage is Stage.LOST:
            return self._end()
        if self.stage is Stage.OVER:
            self.message_count = 0
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
            self.failure = error
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
        events = self._handshake.replied(frame.data)
        if has_command:
            self.pending.popleft()  # not before: a command whose reply cannot be read is still without one
        return events

    def _start_reading(self, events: list[Any], now: float) -> None:
        leftover = self._reader.take_buffered()
        self._server_known(now)
        self._reader = FrameReader(
            max_frame_size=self.config.max_frame_size,
            skip_oversized=True,
            # The original server is told of extend_support, and ignores it.
            ext=self.config.extend_support and self.dialect.has_partitions,
            responder=self._responder,
        )
        if leftover:
            events.extend(self.receive(leftover, now))
