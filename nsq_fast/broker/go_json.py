"""JSON as the original's Go reads it: a null is as good as a key that is not there."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def decode(data: bytes, kind: type[T]) -> T:
    """Decode into a Struct. Raises msgspec.MsgspecError (a ValueError) for other JSON, or none."""
    return msgspec.convert(_without_nulls(msgspec.json.decode(data)), kind)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
