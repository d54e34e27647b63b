"""Positions in a topic, as Spark keeps them in its checkpoint.

A position maps partitions to offsets, each that of the next record in the
partition's log; in the checkpoint it is a JSON object with partitions as keys.
Spark asks for the initial position again when it repeats the first batch, and
*latest* would then be another position. So the end of the first batch also says
where that batch began (``begin``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from nsq_fast.errors import ConfigError

_INITIAL, _BEGIN = "initial", "begin"

Offsets = Mapping[int, int]


class Position(NamedTuple):
    """A position.

    Attributes:
        offsets: partition -> offset.
        is_initial: whether a query begins there.
        begin: in the end of the first batch, where that batch begins.
    """

    offsets: Offsets
    is_initial: bool = False
    begin: Offsets | None = None

    def to_json(self) -> dict[str, Any]:
        """The object that Spark keeps. Equal positions give equal text."""
        found: dict[str, Any] = keyed_by_text(self.offsets)
        if self.is_initial:
            found[_INITIAL] = True
        if self.begin is not None:
            found[_BEGIN] = keyed_by_text(self.begin)
        return found

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Position:
        """Read what ``to_json`` wrote. Raises ConfigError for what another source wrote, or the other reader."""
        begin = found.get(_BEGIN)
        try:
            return cls(
                {int(key): int(value) for key, value in found.items() if key not in (_INITIAL, _BEGIN)},
                bool(found.get(_INITIAL)),
                None if begin is None else {int(key): int(value) for key, value in begin.items()},
            )
        except (TypeError, ValueError, AttributeError):
            raise ConfigError(
                f"checkpointLocation: its offset {json.dumps(found)[:200]} is none of the replayable reader; did"
                " another source write it, or the journalled reader?"
            ) from None

    def until(self, offsets: Offsets) -> Position:
        """The end of a batch that begins here; this position itself when the batch would be empty."""
        if dict(offsets) == dict(self.offsets):
            return self
        return Position(offsets, begin=self.offsets if self.is_initial else None)


def start_of(start: Position, end: Position) -> Offsets:
    """Where the batch from ``start`` to ``end`` begins. An initial position may have been found anew meanwhile."""
    if not start.is_initial:
        return start.offsets
    if end.is_initial:
        return end.offsets
    return start.offsets if end.begin is None else end.begin


def keyed_by_text(offsets: Offsets) -> dict[str, int]:
    """With partitions as keys of JSON, in their order."""
    return {str(partition): offsets[partition] for partition in sorted(offsets)}
