"""Parameters of commands, read as the server reads them."""

from __future__ import annotations

from nsq_fast.broker.go_integer import parse_integer
from nsq_fast.broker.tcp.frames import FatalError


def parse_partition(data: bytes) -> int:
    """The partition parameter of a command. Raises FatalError."""
    try:
        return parse_integer(data)
    except ValueError as error:
        raise FatalError("E_BAD_PARTITION", f"topic partition is not valid: {error}") from error
