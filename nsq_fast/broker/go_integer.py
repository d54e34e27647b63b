"""Whole numbers as Go's strconv reads them."""

from __future__ import annotations

import re

from nsq_fast.broker.tcp.command_set import quote

_INTEGER = re.compile(rb"[+-]?[0-9]+\Z")
_LIMIT = 1 << 63


def parse_integer(data: bytes, function: str = "Atoi") -> int:
    """A whole number of 64 bits; ValueError with the text of the Go function that parses it there."""
    if not _INTEGER.match(data):
        raise ValueError(f"strconv.{function}: parsing {quote(data)}: invalid syntax")
    value = int(data)
    if not -_LIMIT <= value < _LIMIT:
        raise ValueError(f"strconv.{function}: parsing {quote(data)}: value out of range")
    return value


def as_int64(value: int) -> int:
    """What is left of a result in 64 bits: Go's int64 wraps around."""
    return (value + _LIMIT) % (2 * _LIMIT) - _LIMIT
