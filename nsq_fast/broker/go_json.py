"""JSON as the original's Go reads it: a null is as good as a key that is not there, and the case of keys is ignored."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, TypeVar

import msgspec

T = TypeVar("T")

Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]

_SURROGATE = re.compile("[\ud800-\udfff]")


def decode(data: bytes, kind: type[T]) -> T:
    """Decode into a Struct. Raises msgspec.MsgspecError (a ValueError) for other JSON, or none."""
    return msgspec.convert(_without_nulls(msgspec.json.decode(data)), kind)


def decode_lenient(data: bytes, kind: type[T]) -> T:
    """Decode into a Struct, with lower case names, in which null is allowed. A null alone is an empty Struct.

    Text that is no Unicode is replaced as Go's encoding/json does.
    Raises msgspec.MsgspecError (a ValueError) for other JSON, or none.
    """
    try:
        if data.strip(b" \n\t\r") == b"null":
            return kind()
        return msgspec.json.decode(_with_known_keys(data, kind), type=kind)
    except ValueError:
        return msgspec.json.decode(_with_known_keys(_with_replacements(data), kind), type=kind)


def _with_known_keys(data: bytes, kind: type[Any]) -> bytes:
    """The JSON with the keys of a Struct in its own case; as it is when it is no object. Raises ValueError."""
    try:
        values = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except ValueError:
        return data
    known = kind.__struct_encode_fields__
    if all(key in known or key.lower() not in known for key in values):
        return data
    msgspec.json.decode(data, type=kind)  # refuses what another key would hide
    # A null changes nothing, the same key in another case included.
    given = {key: item for key, item in values.items() if bytes(item) != b"null"}
    return msgspec.json.encode({key.lower() if key.lower() in known else key: item for key, item in given.items()})


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
