"""JSON as the original's Go reads it: a null is as good as a key that is not there."""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_SURROGATE = re.compile("[\ud800-\udfff]")


def decode(data: bytes, kind: type[T]) -> T:
    """Decode into a Struct. Raises msgspec.MsgspecError (a ValueError) for other JSON, or none."""
    return msgspec.convert(_without_nulls(msgspec.json.decode(data)), kind)


def decode_lenient(data: bytes, kind: type[T]) -> T:
    """Decode into a Struct in which null is allowed. Text that is no Unicode is replaced as Go's encoding/json does.

    A null alone is an empty Struct. Raises msgspec.MsgspecError (a ValueError) for other JSON, or none.
    """
    try:
        if data.strip(b" \n\t\r") == b"null":
            return kind()
        return msgspec.json.decode(data, type=kind)
    except ValueError:
        return msgspec.json.decode(_with_replacements(data), type=kind)


def _with_replacements(data: bytes) -> bytes:
    """The JSON with U+FFFD for every byte that is no UTF-8 and every lone surrogate; as it is when it is no JSON."""
    try:
        value = json.loads(data.decode("utf-8", "replace"))
        text = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        return data
    return _SURROGATE.sub("\ufffd", text).encode()


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
