"""Every exception of nsq_fast, and each server error code with its policy.

When a program meets which of them, and what to do then, is in docs/errors.md. Policy is data on the class (``fatal``,
``retriable``, ``stale_topology``, ``outcome_unknown``), so that callers never branch on the text of an error.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar, TypeAlias


class NsqError(Exception):
    """Base of every exception that nsq_fast raises on purpose."""


class ConfigError(NsqError, ValueError):
    """An option or argument is wrong. The message names it, its value and what is allowed."""


class TypeInvalid(ConfigError, TypeError):
    """An argument is of a wrong type."""


class CallInvalid(NsqError, RuntimeError):
    """A method does not fit how its object was made: a consumer with a handler is iterated, one without is started."""


class NameInvalid(NsqError, ValueError):
    """A topic or channel name breaks NSQ's naming rule."""


class BodyInvalid(NsqError, ValueError):
    """A message body that a server would refuse: empty where forbidden, or too large."""


class RowInvalid(NsqError, ValueError):
    """A row of a table cannot be published: a null, a value out of range, a body that a server would refuse."""


class ProtocolError(NsqError):
    """The wire conversation went wrong. See the two subclasses for whose fault it is."""


class LocalProtocolError(ProtocolError):
    """We asked for a command that the connection's state does not allow."""


class RemoteProtocolError(ProtocolError):
    """The peer sent bytes that are not NSQ, or a frame beyond the size limit."""


class MessageTooLarge(NsqError):
    """A message whose frame is larger than ``max_frame_size``: its headers were read, its body was not.

    Attributes:
        message_id: its id, 16 bytes.
        attempts: deliveries so far, this one included.
        body_size: bytes of its body.
        max_frame_size: the limit, in bytes.
    """

    def __init__(self, message_id: bytes, attempts: int, body_size: int, max_frame_size: int) -> None:
        super().__init__(message_id, attempts, body_size, max_frame_size)
        self.message_id = message_id
        self.attempts = attempts
        self.body_size = body_size
        self.max_frame_size = max_frame_size

    def __str__(self) -> str:
        shown = self.message_id.decode() if self.message_id.isalnum() else self.message_id.hex()
        return (
            f"message {shown} (attempt {self.attempts}) has a body of {self.body_size} bytes: its frame is larger than"
            f" max_frame_size={self.max_frame_size}, so the body was not received; raise max_frame_size to receive it"
        )


class AlreadyResponded(NsqError):
    """FIN or REQ of a message that has been answered before."""


class NotRunning(NsqError):
    """The consumer or producer has not been started, or has been closed."""


class ConnectionLost(NsqError, OSError):
    """The TCP connection to an nsqd ended, or was never there.

    ``outcome_unknown``: the command this is the answer to may have been carried out all the same.
    ``is_abrupt``: the server closed the connection or reset it without a word, as one that crashes does; or it refused
    another command, and the connection had to end.
    ``was_first``: of the commands without a reply, the one this is the answer to was the oldest: the server was
    working on it, if on any.
    ``waited``: seconds, at least, for which it had been so; 0.0 where that was not watched.
    """

    outcome_unknown = True
    is_abrupt = False
    was_first = False
    waited: float = 0.0


class ConnectFailed(ConnectionLost):
    """No connection could be made: refused, timed out, TLS or AUTH failed."""


class HeartbeatMissed(ConnectionLost):
    """Nothing was received for two heartbeat intervals."""


class ConnectionClosed(ConnectionLost):
    """The connection was closed on our side."""


class HttpError(NsqError):
    """An HTTP request to nsqd or nsqlookupd failed.

    Attributes:
        status: None when there was no HTTP reply at all (refused, timed out, broken).
        text: what the server said, as it came; ``str()`` of the error shows it with control characters escaped.
    """

    def __init__(self, url: str, status: int | None, text: str) -> None:
        super().__init__(url, status, text)
        self.url = url
        self.status = status
        self.text = text

    def __str__(self) -> str:
        text = printable(self.text)
        return f"{self.url}: {text}" if self.status is None else f"{self.url}: {self.status} {text}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


class LookupFailed(NsqError):
    """No nsqlookupd gave a usable answer."""


class DataLost(NsqError):
    """Records that were to be read are not there any more.

    Attributes:
        topic, partition: where.
        offsets: the first that is lost, and the first behind them.
        reason: what the log is like now.
        remedy: what the caller may do about it; empty: nothing to say.
    """

    def __init__(self, topic: str, partition: int, offsets: tuple[int, int], reason: str, remedy: str = "") -> None:
        super().__init__(topic, partition, offsets, reason, remedy)
        self.topic = topic
        self.partition = partition
        self.offsets = offsets
        self.reason = reason
        self.remedy = remedy

    def __str__(self) -> str:
        first, behind = self.offsets
        remedy = f"; {self.remedy}" if self.remedy else ""
        return (
            f"topic {self.topic!r}, partition {self.partition}: offsets {first} up to {behind} are lost:"
            f" {self.reason}{remedy}"
        )


class OrderViolated(NsqError):
    """An ordered partition delivered a message that lies before one delivered earlier.

    Attributes:
        partition: which; None when the server was left to choose it.
        last, seen: (internal id, offset) of the message furthest on, and of this one.
    """

    def __init__(self, partition: int | None, last: tuple[int, int], seen: tuple[int, int]) -> None:
        super().__init__(partition, last, seen)
        self.partition = partition
        self.last = last
        self.seen = seen

    def __str__(self) -> str:
        return (
            f"partition {self.partition} went backwards: internal id {self.seen[0]} at offset {self.seen[1]}"
            f" after {self.last[0]} at {self.last[1]}"
        )


class PartitionBlocked(NsqError):
    """A message of an ordered partition exceeds ``attempts_threshold``, and ``blocked_policy`` is ``stop``."""


class JournalError(NsqError):
    """A journal is damaged, or belongs to something else."""


class JournalMissing(JournalError):
    """A journal, or a batch in it, is not there although messages may have been acknowledged for it."""


class JournalTaken(JournalError):
    """Another attempt of the same task has written this file of the journal. Nothing was acknowledged."""


class JournalClosed(JournalError):
    """The place of the batch is gone, or cannot be seen from here. Nothing was acknowledged."""


class JournalStorageFailed(JournalError):
    """The disk or the object store of a journal failed; whether it was carried out is unknown.

    No message was acknowledged for it.
    """


class PublishFailed(NsqError):
    """A publish failed for good; the last error is ``__cause__``.

    ``possibly_stored`` says that the outcome of at least one attempt is unknown:
    the server may have stored the message although no OK arrived.

    ``results``: of a batch, what became of each message, in order: ``b"OK"``, a Receipt, or the exception; None of a
    publish of one message.
    """

    results: list[Any] | None = None

    def __init__(self, message: str, *, attempts: int = 1, possibly_stored: bool = False) -> None:
        super().__init__(message)
        self.attempts = attempts
        self.possibly_stored = possibly_stored


class NoNsqd(PublishFailed):
    """No nsqd to publish to is known or reachable, or the topic does not exist. Nothing was sent."""

    def __init__(self, message: str, *, attempts: int = 0, possibly_stored: bool = False) -> None:
        super().__init__(message, attempts=attempts, possibly_stored=possibly_stored)


class NoLeader(NoNsqd):
    """The partition that a publish is bound to has no leader that is known and reachable. Nothing was sent."""


class PublishTimeout(PublishFailed, TimeoutError):
    """The deadline of a publish passed."""


class WriteFailed(PublishFailed):
    """A write of a table broke off. ``rows_stored`` were stored before, and ``rows_unknown`` may have been."""

    def __init__(
        self, message: str, *, rows_stored: int = 0, rows_unknown: int = 0, possibly_stored: bool = False
    ) -> None:
        super().__init__(message, possibly_stored=possibly_stored)
        self.rows_stored = rows_stored
        self.rows_unknown = rows_unknown


class RequeueMessage(NsqError):
    """Raised by a handler to requeue its message.

    Args:
        delay: seconds until redelivery, or a timedelta; None computes it from the attempts.
        backoff: whether this counts as a failure for backoff; None leaves it to the consumer's option.

    Raises ConfigError for a delay that is anything else. In a handler this is a failure like any other exception.

    Attributes:
        delay: seconds, or None.
    """

    def __init__(self, delay: float | timedelta | None = None, *, backoff: bool | None = None) -> None:
        if isinstance(delay, timedelta):
            delay = delay.total_seconds()
        if delay is not None and (isinstance(delay, bool) or not isinstance(delay, (int, float)) or not delay >= 0):
            raise ConfigError(
                f"RequeueMessage: delay={delay!r}: must be a number of seconds, 0 or more, a timedelta, or None"
            )
        super().__init__(delay, backoff)
        self.delay = delay
        self.backoff = backoff

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).__new__, (type(self), *self.args), vars(self)  # __init__ takes other arguments


class NSQRequeueMessage(RequeueMessage):
    """RequeueMessage with gnsq's argument: ``NSQRequeueMessage(backoff=None)``. The consumer's delay is used."""

    def __init__(self, backoff: bool | None = None) -> None:
        super().__init__(None, backoff=backoff)


class WrongThread(NsqError, RuntimeError):
    """A method was called in another thread than the one in which its object runs, or in that thread's hub, where
    nothing can wait. Nothing was done."""


class HandlerDeferred(NsqError, TypeError):
    """A handler returned a coroutine, a generator or another awaitable: it has not run, and its message is requeued."""


class InternalError(NsqError):
    """A background greenlet of nsq_fast failed in a way that nobody foresaw, which is ``__cause__``. It goes on."""


class ServerError(NsqError):
    """An error frame. Unknown codes give a plain ServerError, which counts as fatal.

    Attributes:
        code: first token of the frame, e.g. ``E_BAD_TOPIC``.
        detail: the text after the code as it came, possibly empty. ``str()`` of the error shows it with control
            characters escaped, and its beginning only when it is long.
        fatal: the original server closes the connection after it (``protocol.dialect`` knows the exceptions).
        retriable: a publish that failed with it may be tried again.
        stale_topology: what we know of leaders is out of date; look up before trying again.
        outcome_unknown: the message may have been stored all the same.
        hint: what to change in the program or on the server; shown with the error. Empty when it depends.
    """

    code: ClassVar[str] = ""
    fatal: ClassVar[bool] = True
    retriable: ClassVar[bool] = False
    stale_topology: ClassVar[bool] = False
    outcome_unknown: ClassVar[bool] = False
    hint: ClassVar[str] = ""

    def __init__(self, detail: str = "", *, code: str = "") -> None:
        super().__init__(detail)
        self.detail = detail
        if code:
            self.code = code  # type: ignore[misc]  # an unknown code lives on the instance

    def __str__(self) -> str:
        said = printable(f"{self.code} {self.detail}".rstrip())
        return f"{said} ({self.hint})" if self.hint else said

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


# The codes, and which of them are fatal (NewFatalClientErr) and which not (NewClientErr):
# nsqio/nsq: nsqd/protocol_v2.go; youzan/nsq: nsqdserver/protocol_v2.go


class Invalid(ServerError):
    """The command is unknown, malformed, or not allowed in the connection's state."""

    code = "E_INVALID"

    @property
    def hint(self) -> str:  # type: ignore[override]
        # nsqio/nsq: nsqd/protocol_v2.go, enforceTLSPolicy; youzan/nsq: the same
        return "this nsqd takes connections with TLS only: set tls_v1=True" if "TLS required" in self.detail else ""


class BadBody(ServerError):
    """A command body has a wrong size, or holds a value out of range."""

    code = "E_BAD_BODY"


class BadTopic(ServerError):
    """The topic name is not legal."""

    code = "E_BAD_TOPIC"


class BadChannel(ServerError):
    """The channel name is not legal."""

    code = "E_BAD_CHANNEL"


class BadMessage(ServerError):
    """A message body is empty or larger than the server's limit."""

    code = "E_BAD_MESSAGE"


class BadProtocol(ServerError):
    """The server does not know the protocol magic."""

    code = "E_BAD_PROTOCOL"


class IdentifyFailed(ServerError):
    """Feature negotiation failed (snappy together with deflate, an upgrade that broke)."""

    code = "E_IDENTIFY_FAILED"


class AuthDisabled(ServerError):
    """AUTH was sent to a server without an auth server."""

    code = "E_AUTH_DISABLED"


class AuthFailed(ServerError):
    """The auth server could not be asked, or refused the secret."""

    code = "E_AUTH_FAILED"
    hint = "its auth server refuses auth_secret, or gives nsqd no good answer: the log of nsqd says which"


class AuthFirst(ServerError):
    """The command needs AUTH before it."""

    code = "E_AUTH_FIRST"


class AuthError(ServerError):
    """The AUTH exchange failed on the server's side."""

    code = "E_AUTH_ERROR"


class Unauthorized(ServerError):
    """The identity may not do this on that topic or channel."""

    code = "E_UNAUTHORIZED"
    hint = "the auth server does not allow that with this auth_secret"


class SubFailed(ServerError):
    """The subscription was refused: too many consumers, or the server is exiting."""

    code = "E_SUB_FAILED"
    retriable = True


class PubFailed(ServerError):
    """The server failed to store the message; a replica or disk may hold it all the same."""

    code = "E_PUB_FAILED"
    retriable = True
    outcome_unknown = True


class PutFailed(PubFailed):
    """As PubFailed, of servers before 0.2.20."""

    code = "E_PUT_FAILED"


class MpubFailed(PubFailed):
    """As PubFailed, for MPUB."""

    code = "E_MPUB_FAILED"


class DpubFailed(PubFailed):
    """As PubFailed, for DPUB."""

    code = "E_DPUB_FAILED"


class FinFailed(ServerError):
    """A FIN came too late, or from a connection that does not own the message."""

    code = "E_FIN_FAILED"
    fatal = False


class ReqFailed(ServerError):
    """A REQ came too late, or from a connection that does not own the message."""

    code = "E_REQ_FAILED"
    fatal = False


class TouchFailed(ServerError):
    """A TOUCH came too late, or from a connection that does not own the message."""

    code = "E_TOUCH_FAILED"
    fatal = False


class BadPartition(ServerError):
    """The partition number is malformed, or missing where the topic demands one."""

    code = "E_BAD_PARTITION"
    hint = "publishes to an ordered topic name a partition: set key or partition"


class TopicNotExist(ServerError):
    """The topic or partition is not on this nsqd (redesigned servers create no topics by themselves)."""

    code = "E_TOPIC_NOT_EXIST"
    retriable = True
    stale_topology = True


class NotLeader(ServerError):
    """This nsqd does not lead the partition. Fatal on SUB and FIN, not on a publish."""

    code = "E_FAILED_ON_NOT_LEADER"
    retriable = True
    stale_topology = True


class NotWritable(ServerError):
    """The leader refuses writes now; a replica may have stored the message already."""

    code = "E_FAILED_ON_NOT_WRITABLE"
    retriable = True
    stale_topology = True
    outcome_unknown = True


class PubTooMuchWaiting(ServerError):
    """Too many bytes wait to be written on that partition; the body was not read."""

    code = "E_PUB_TOO_MUCH_WAITING"
    retriable = True


class OrderedSubRequired(ServerError):
    """The topic is ordered: subscribe with ``ordered=True``."""

    code = "E_SUB_ORDER_IS_MUST"
    hint = "the topic is ordered: set ordered=True"


class ExtendSubRequired(ServerError):
    """The topic carries extended headers: subscribe with ``extend_support=True``."""

    code = "E_SUB_EXTEND_NEED"
    hint = "the topic carries extended headers: set extend_support=True"


class ExtendSubForbidden(ServerError):
    """The topic carries no extended headers: subscribe with ``extend_support=False``."""

    code = "E_SUB_EXTEND_FORBIDDON"  # the server's spelling
    hint = "the topic carries no extended headers: set extend_support=False"


class ChannelNotRegistered(ServerError):
    """Channels of this topic must be created by an administrator first."""

    code = "E_SUB_CHANNEL_NOT_REGISTERED"
    hint = "create the channel first, with nsqlookupd's /channel/create"


class ExtNotSupported(ServerError):
    """Headers were published to a topic that carries none."""

    code = "E_EXT_NOT_SUPPORT"
    fatal = False
    hint = "the topic carries no extended headers: publish without headers and tag"


class HeaderInvalid(ServerError):
    """The extended header is not valid JSON."""

    code = "E_INVALID_JSON_HEADER"
    fatal = False


class TraceIdInvalid(ServerError):
    """The trace id in the extended header is not an unsigned 64-bit decimal number."""

    code = "INVALID_TRACE_ID"
    fatal = False


class BadTag(ServerError):
    """The tag is not legal."""

    code = "E_BAD_TAG"


class TagNotSupported(ServerError):
    """The topic carries no tags."""

    code = "E_TAG_NOT_SUPPORT"


class BadExt(ServerError):
    """INTERNAL_CREATE_TOPIC with an ext flag that is neither true nor false."""

    code = "E_BAD_EXT"


class CreateTopicFailed(ServerError):
    """INTERNAL_CREATE_TOPIC was refused, as it is on a cluster."""

    code = "E_CREATE_TOPIC_FAILED"
    fatal = False


def _by_code() -> dict[str, type[ServerError]]:
    table: dict[str, type[ServerError]] = {}
    pending = list(ServerError.__subclasses__())
    while pending:
        cls = pending.pop()
        pending.extend(cls.__subclasses__())
        if cls.code in table:
            raise RuntimeError(f"two classes for {cls.code}: {table[cls.code].__name__}, {cls.__name__}")
        table[cls.code] = cls
    return table


ERROR_CODES = _by_code()


def server_error(data: bytes) -> ServerError:
    """Turn the data of an error frame into an exception.

    The code is the token before the first space: redesigned servers send a
    trailing space and no text, one code has no ``E_``, one error no code at all.
    """
    code, _, detail = data.decode("utf-8", "replace").partition(" ")
    cls = ERROR_CODES.get(code)
    return cls(detail) if cls is not None else ServerError(detail, code=code)


class PublishRefused(PublishFailed, ServerError):
    """A publish that a server answered with an error, which is ``__cause__``.

    Each is an instance of its cause's class as well: ``except BadTopic`` catches it, and so does
    ``except PublishFailed``.
    """

    def __init__(self, message: str, *, attempts: int = 1, possibly_stored: bool = False) -> None:
        super().__init__(message, attempts=attempts, possibly_stored=possibly_stored)

    def __str__(self) -> str:
        return NsqError.__str__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.cause_class, self.args), vars(self)  # the state apart: it may hold the error itself

    cause_class: ClassVar[type[ServerError]] = ServerError


def publish_failed_class(cause: BaseException) -> type[PublishFailed]:
    """What to raise for a publish that failed because of ``cause``."""
    return _refused_class(type(cause)) if isinstance(cause, ServerError) else PublishFailed


_refused_classes: dict[type[ServerError], type[PublishRefused]] = {ServerError: PublishRefused}


def _refused_class(kind: type[ServerError]) -> type[PublishRefused]:
    if kind not in _refused_classes:
        namespace = {"cause_class": kind, "__module__": __name__}
        _refused_classes[kind] = type(f"PublishRefused_{kind.__name__}", (PublishRefused, kind), namespace)
    return _refused_classes[kind]


def _rebuilt(kind: type[ServerError], args: tuple[Any, ...]) -> PublishRefused:
    return _refused_class(kind)(*args)


# What gnsq calls these classes.
NSQException: TypeAlias = NsqError
NSQNoConnections: TypeAlias = NoNsqd
NSQHttpError: TypeAlias = HttpError
NSQSocketError: TypeAlias = ConnectionLost
NSQFrameError: TypeAlias = RemoteProtocolError
NSQErrorCode: TypeAlias = ServerError
NSQInvalid: TypeAlias = Invalid
NSQBadBody: TypeAlias = BadBody
NSQBadTopic: TypeAlias = BadTopic
NSQBadChannel: TypeAlias = BadChannel
NSQBadMessage: TypeAlias = BadMessage
NSQPutFailed: TypeAlias = PutFailed
NSQPubFailed: TypeAlias = PubFailed
NSQMPubFailed: TypeAlias = MpubFailed
NSQAuthDisabled: TypeAlias = AuthDisabled
NSQAuthFailed: TypeAlias = AuthFailed
NSQUnauthorized: TypeAlias = Unauthorized
NSQFinishFailed: TypeAlias = FinFailed
NSQRequeueFailed: TypeAlias = ReqFailed
NSQTouchFailed: TypeAlias = TouchFailed


# Words for people: what a peer said, made safe to show (on one line, without control characters, of bounded length);
# and a number with its noun.


MAX_LENGTH = 500


def printable(said: str | bytes, limit: int = MAX_LENGTH) -> str:
    """Text of a peer for a log record, the message of an exception or a terminal.

    Whatever is not printable is escaped, so that it can neither begin a line of its own nor steer a terminal. What is
    longer than ``limit`` is cut, and ends with the number of characters (of bytes, if it came as bytes) left out.
    """
    shown = said[:limit]
    text = shown if isinstance(shown, str) else shown.decode("utf-8", "backslashreplace")
    if not text.isprintable():
        text = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
    left_out = len(said) - len(shown)
    return f"{text}... ({left_out} more)" if left_out else text


def said_at(address: object, error: object) -> str:
    """What an error says, without the address that it begins with: the line of a log has it in front already."""
    return str(error).removeprefix(f"{address}: ")


def counted(count: int, noun: str, plural: str = "") -> str:
    """``1 message``, ``2,000 messages``; ``plural`` where an s does not make it: ``2 queries``."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def seconds(value: float) -> str:
    """``0.25 s``, ``12.3 s``, ``10,800 s``: three digits, and no power of ten."""
    return f"{value:.3g} s" if value < 100 else f"{value:,.0f} s"
