"""What differs between the original and the redesigned servers, as data.

A connection learns its dialect from the version in the IDENTIFY reply. The
rest of the code asks the dialect instead of branching on the family: which
commands exist, which errors end the connection, how long the server bears a
silent client.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from nsq_fast.errors import ServerError

REDESIGNED_MARK = "-HA."

_COMMON = frozenset(
    {"IDENTIFY", "AUTH", "SUB", "PUB", "MPUB", "RDY", "FIN", "REQ", "TOUCH", "CLS", "NOP"},
)
# Errors of commands that have no reply: they never belong to a command that waits for one.
ANSWER_ERRORS = frozenset({"E_FIN_FAILED", "E_REQ_FAILED", "E_TOUCH_FAILED"})
_UNANSWERED = re.compile(r"(?:cannot )?(FIN|REQ|TOUCH|RDY)\b")


@dataclass(frozen=True)
class Dialect:
    """One server family.

    Attributes:
        name: ``original`` or ``redesigned``.
        commands: the commands the server knows.
        publish_errors: codes that leave the connection open when a publish gets them.
        mute_intervals: heartbeat intervals of silence after which the server closes the connection.
    """

    name: str
    commands: frozenset[str]
    publish_errors: frozenset[str]
    mute_intervals: int
    breaking_commands: frozenset[str] = field(default=frozenset())

    def supports(self, command: str) -> bool:
        """Whether the server knows ``command``."""
        return command in self.commands

    def is_fatal(self, error: ServerError, command: str | None) -> bool:
        """Whether the server closes the connection after ``error`` in reply to ``command``.

        ``command`` is None for an error that no pending command is waiting for.
        After an error to a command in ``breaking_commands`` the server has lost its
        place in the stream: that counts as fatal too.
        """
        if command in self.breaking_commands:
            return True
        if error.code in self.publish_errors:
            return command is None or command == "SUB" or command.startswith("SUB_")
        return error.fatal


ORIGINAL = Dialect("original", _COMMON | {"DPUB"}, frozenset(), 2)
REDESIGNED = Dialect(
    "redesigned",
    _COMMON
    | {"SUB_ADVANCED", "SUB_ORDERED", "PUB_TRACE", "MPUB_TRACE", "PUB_EXT", "MPUB_EXT", "INTERNAL_CREATE_TOPIC"},
    frozenset({"E_PUB_FAILED", "E_MPUB_FAILED", "E_FAILED_ON_NOT_LEADER", "E_FAILED_ON_NOT_WRITABLE"}),
    3,
    breaking_commands=frozenset({"MPUB_EXT"}),
)


def dialect_of(version: str) -> Dialect:
    """The dialect of a server, by the version it reports."""
    return REDESIGNED if REDESIGNED_MARK in version else ORIGINAL


def concerns_unanswered(error: ServerError) -> bool:
    """Whether the text of ``error`` says that it is about a FIN, REQ, TOUCH or RDY, which have no reply."""
    return error.code in ANSWER_ERRORS or (error.code == "E_INVALID" and _UNANSWERED.match(error.detail) is not None)


_HEX_ID = re.compile(r"\b([0-9a-f]{16})\b")
_BYTES_ID = re.compile(r"\[((?:\d{1,3} ){15}\d{1,3})\]")


def message_id_in(error: ServerError) -> bytes | None:
    """The 16-byte message id in the text of a failed FIN, REQ or TOUCH, if there is one.

    The original server prints the id as it is; the redesigned one as decimal bytes in brackets.
    """
    found = _HEX_ID.search(error.detail)
    if found:
        return found.group(1).encode()
    found = _BYTES_ID.search(error.detail)
    if not found:
        return None
    numbers = [int(number) for number in found.group(1).split()]
    return bytes(numbers) if max(numbers) < 256 else None
