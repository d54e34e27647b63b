"""Which errors end a connection, by server family and command."""

from __future__ import annotations

import pytest

from nsq_fast.errors import server_error
from nsq_fast.protocol.dialect import ORIGINAL, REDESIGNED, dialect_of


@pytest.mark.parametrize(
    ("version", "dialect"),
    [("1.3.0", ORIGINAL), ("0.3.8", ORIGINAL), ("", ORIGINAL), ("0.3.7-HA.1.13.0", REDESIGNED)],
)
def test_family_by_version(version: str, dialect: object) -> None:
    assert dialect_of(version) is dialect


@pytest.mark.parametrize(
    ("text", "command", "original", "redesigned"),
    [
        (b"E_PUB_FAILED x", "PUB", True, False),
        (b"E_MPUB_FAILED x", "MPUB", True, False),
        (b"E_FAILED_ON_NOT_LEADER ", "PUB", True, False),
        (b"E_FAILED_ON_NOT_LEADER ", "SUB", True, True),
        (b"E_FAILED_ON_NOT_LEADER ", "SUB_ORDERED", True, True),
        (b"E_FAILED_ON_NOT_WRITABLE ", None, True, True),  # in answer to a FIN
        (b"E_FIN_FAILED x", None, False, False),
        (b"E_REQ_FAILED x", None, False, False),
        (b"E_TOUCH_FAILED x", None, False, False),
        (b"E_EXT_NOT_SUPPORT x", "PUB_EXT", False, False),
        (b"E_FAILED_ON_NOT_LEADER ", "CLS", True, True),  # in answer to a FIN before it
        (b"E_FAILED_ON_NOT_LEADER ", "MPUB_TRACE", True, False),
        (b"E_INVALID_JSON_HEADER x", "PUB_EXT", False, False),
        (b"INVALID_TRACE_ID x", "PUB_EXT", False, False),
        (b"E_CREATE_TOPIC_FAILED x", "INTERNAL_CREATE_TOPIC", False, False),
        (b"E_TOPIC_NOT_EXIST ", "PUB", True, True),
        (b"E_BAD_PARTITION x", "PUB", True, True),
        (b"E_PUB_TOO_MUCH_WAITING x", "PUB_TRACE", True, True),
        (b"E_SUB_ORDER_IS_MUST x", "SUB", True, True),
        (b"E_EXT_NOT_SUPPORT x", "MPUB_EXT", False, True),  # the rest of the body is taken for a command
        (b"E_BAD_TOPIC x", "PUB", True, True),
        (b"E_INVALID x", None, True, True),
        (b"too much client connections", "IDENTIFY", True, True),
    ],
)
def test_fatality(text: bytes, command: str | None, original: bool, redesigned: bool) -> None:
    assert ORIGINAL.is_fatal(server_error(text), command) is original
    assert REDESIGNED.is_fatal(server_error(text), command) is redesigned
