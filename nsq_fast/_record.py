"""Values with named fields that programs see: options, and snapshots of what a client has done.

They are structs of msgspec, which makes a class in a fiftieth of the time that ``dataclasses`` takes to write and
compile its methods, and whose fields are read as fast. ``tests/test_layering.py`` keeps ``dataclasses`` out of what a
client imports at its start.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from dataclasses import Field


class _FieldsWhenAsked:
    """What ``dataclasses`` looks for in a class, made when it does."""

    def __get__(self, record: object, owner: type[msgspec.Struct]) -> dict[str, Field[Any]]:
        return _dataclass_fields(owner)


class Record(msgspec.Struct, frozen=True):
    """Base of values that do not change; ``dataclasses.fields``, ``replace`` and ``asdict`` take them, too."""

    if not TYPE_CHECKING:
        __dataclass_fields__ = _FieldsWhenAsked()


class MutableRecord(msgspec.Struct):
    """The same for values that change."""

    if not TYPE_CHECKING:
        __dataclass_fields__ = _FieldsWhenAsked()


@functools.cache
def _dataclass_fields(owner: type[msgspec.Struct]) -> dict[str, Field[Any]]:
    import dataclasses
    from inspect import get_annotations

    annotations: dict[str, Any] = {}
    for base in reversed(owner.__mro__):
        annotations.update(get_annotations(base))
    names, described = owner.__struct_fields__, getattr(owner, "OPTIONS", {})
    defaults = dict(zip(reversed(names), reversed(owner.__struct_defaults__), strict=False))
    named = []
    for name in names:
        given = _default(defaults[name]) if name in defaults else {}
        metadata = msgspec.structs.asdict(described[name]) if name in described else None
        named.append((name, annotations[name], dataclasses.field(**given, metadata=metadata)))
    made: Any = dataclasses.make_dataclass(owner.__name__, named)
    return made.__dataclass_fields__  # type: ignore[no-any-return]


def _default(value: Any) -> dict[str, Any]:
    factory = getattr(value, "factory", None)
    return {"default": value} if factory is None else {"default_factory": factory}
