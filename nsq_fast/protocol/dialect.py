"""What differs between the original and the redesigned servers, as data.

A connection learns its dialect from the version in the IDENTIFY reply. The
rest of the code asks the dialect instead of branching on the family: which
commands exist, which errors end the connection, how long the server bears a
silent client.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from nsq_fast._codec import TracedReply, traced_reply
from nsq_fast._record import Record
from nsq_fast.errors import ConfigError, ServerError

# What decoding of a peer's JSON raises, of whatever dialect; RecursionError where it is nested deeply.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

# In the versions of youzan/nsq only, as in 0.3.7-HA.1.9.6. youzan/nsq: internal/version/binary.go
REDESIGNED_MARK = "-HA."

# Keys of the ext header that mean something to redesigned servers; all that begin so are theirs.
RESERVED_PREFIX = "##"
TRACE_ID_KEY = "##trace_id"
TAG_KEY = "##client_dispatch_tag"

# Bytes that the record of a message on an extended topic has more than what was sent for it: the version of its ext
# header. The server's max_msg_size holds for the record too, and it finds that out only when it writes, which stops all
# publishes to the partition for a moment.
# youzan/nsq: nsqd/message.go, internalWriteTo; nsqd/diskqueue_writer.go, writeOne
EXT_RECORD_BYTES = 1

_COMMON = frozenset(
    {"IDENTIFY", "AUTH", "SUB", "PUB", "MPUB", "RDY", "FIN", "REQ", "TOUCH", "CLS", "NOP"},
)
_PLAIN_PUBLISHES = frozenset({"PUB", "MPUB"})
_TRACED_PUBLISHES = frozenset({"PUB_TRACE", "MPUB_TRACE"})
_EXT_PUBLISHES = frozenset({"PUB_EXT", "MPUB_EXT"})
_DELAYED_PUBLISHES = frozenset({"DPUB"})
PUBLISHES = _PLAIN_PUBLISHES | _DELAYED_PUBLISHES | _TRACED_PUBLISHES | _EXT_PUBLISHES
# Errors of commands that have no reply: they never belong to a command that waits for one.
ANSWER_ERRORS = frozenset({"E_FIN_FAILED", "E_REQ_FAILED", "E_TOUCH_FAILED"})
# Patterns of error texts are compiled when there is such an error.
# What E_INVALID says when it is about one of them. nsqio/nsq: nsqd/protocol_v2.go, FIN, REQ, TOUCH, RDY, getMessageID
# (which has changed its capitals); youzan/nsq: nsqdserver/protocol_v2.go, FIN, REQ, TOUCH
_UNANSWERED = r"(?:cannot )?(?:FIN|REQ|TOUCH|RDY)\b|(?i:invalid message id)|No channel"


class Dialect(Record, frozen=True):
    """One server family.

    Attributes:
        name: ``original`` or ``redesigned``.
        commands: the commands the server knows.
        publish_errors: codes that leave the connection open when a publish gets them.
        mute_intervals: heartbeat intervals of silence after which the server closes the connection.
        has_partitions: commands may name a partition; messages may carry extended headers.
        breaking_commands: commands after whose errors the place in the stream is lost.
        refusals: command the server does not know -> what to do instead.
    """

    name: str
    commands: frozenset[str]
    publish_errors: frozenset[str]
    mute_intervals: int
    has_partitions: bool = False
    breaking_commands: frozenset[str] = frozenset()
    refusals: Mapping[str, str] = msgspec.field(default_factory=dict)

    def supports(self, command: str) -> bool:
        """Whether the server knows ``command``."""
        return command in self.commands

    def require(self, command: str) -> None:
        """Raise ConfigError, with what to do instead, for a publish that the server does not know."""
        if command not in self.commands:
            raise ConfigError(f"{self.name} servers: {self.refusals[command]}")

    def is_fatal(self, error: ServerError, command: str | None) -> bool:
        """Whether the connection is over after ``error`` in reply to ``command``.

        ``command`` is None for an error that no pending command is waiting for.
        """
        return command in self.breaking_commands or self.is_last_word(error, command)

    def is_last_word(self, error: ServerError, command: str | None) -> bool:
        """Whether the server itself closes the connection, and carries out nothing that was sent after ``command``.

        After an error to a command in ``breaking_commands`` it may go on: with the next command, or with the middle
        of a body that it takes for one.
        """
        if error.code in self.publish_errors:
            return command not in PUBLISHES
        return error.fatal


_NEEDS_PARTITIONS = "only servers with partitions know it"
_SUB_INSTEAD = f"{_NEEDS_PARTITIONS}: leave ordered and advanced at False"

ORIGINAL = Dialect(
    "original",
    _COMMON | _DELAYED_PUBLISHES,
    frozenset(),
    2,
    refusals={
        "SUB_ORDERED": _SUB_INSTEAD,
        "SUB_ADVANCED": _SUB_INSTEAD,
        **dict.fromkeys(_TRACED_PUBLISHES, f"{_NEEDS_PARTITIONS}: leave trace_id out"),
        **dict.fromkeys(_EXT_PUBLISHES, f"{_NEEDS_PARTITIONS}: leave headers and tag out"),
    },
)
REDESIGNED = Dialect(
    "redesigned",
    _COMMON | _TRACED_PUBLISHES | _EXT_PUBLISHES | {"SUB_ADVANCED", "SUB_ORDERED", "INTERNAL_CREATE_TOPIC"},
    frozenset({"E_PUB_FAILED", "E_MPUB_FAILED", "E_FAILED_ON_NOT_LEADER", "E_FAILED_ON_NOT_WRITABLE"}),
    3,
    has_partitions=True,
    # Its errors come from the middle of the body, whose rest the server then takes for the next command.
    # youzan/nsq: nsqdserver/protocol_v2.go, internalMPUBEXTAndTrace
    breaking_commands=frozenset({"MPUB_EXT"}),
    refusals={"DPUB": "they cannot delay a publish: leave defer out"},
)


def dialect_of(version: str) -> Dialect:
    """The dialect of a server, by the version it reports."""
    return REDESIGNED if REDESIGNED_MARK in version else ORIGINAL


def concerns_unanswered(error: ServerError, command: str) -> bool:
    """Whether ``error`` is about a FIN, REQ, TOUCH or RDY, which have no reply, and not about the waiting ``command``.

    Its text tells; and CLS itself fails with E_INVALID only.
    """
    if error.code == "E_INVALID":
        return re.match(_UNANSWERED, error.detail) is not None
    return command == "CLS"


def receipt_in(data: bytes) -> TracedReply | None:
    """What the reply to a traced publish says of the stored record; None for a plain ``OK``.

    The length tells the two apart: both begin with ``OK``. Raises RemoteProtocolError for anything else.
    """
    return None if data == b"OK" else traced_reply(data)


# nsqio/nsq and youzan/nsq: FIN of protocol_v2.go prints the id with %s and with %v.
_HEX_ID = r"\b([0-9a-f]{16})\b"
_BYTES_ID = r"\[((?:\d{1,3} ){15}\d{1,3})\]"


def message_id_in(error: ServerError) -> bytes | None:
    """The 16-byte message id in the text of a failed FIN, REQ or TOUCH, if there is one.

    The original server prints the id as it is; the redesigned one as decimal bytes in brackets.
    """
    found = re.search(_HEX_ID, error.detail)
    if found:
        return found.group(1).encode()
    found = re.search(_BYTES_ID, error.detail)
    if not found:
        return None
    numbers = [int(number) for number in found.group(1).split()]
    return bytes(numbers) if max(numbers) < 256 else None
