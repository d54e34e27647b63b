"""Where a query is, by the checkpoint that Spark keeps of it: which batch it has committed, and which it has planned.

A checkpoint has a file ``offsets/7`` when batch 7 is planned, and ``commits/7``
when it is done. The first holds, behind a version and Spark's settings, a line
for each source of the query: where the batch ends in it, "-" where it has
nothing of it (apache/spark: OffsetSeqLog.scala).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nsq_fast.errors import ConfigError

_VERSION = "v1"
_SOURCES_FROM = 2

Encoded = Mapping[str, Any]
"""An offset as one of the readers has encoded it."""


class SourceState(NamedTuple):
    """Where one source of a query is. The same twice while no batch runs; ``committed`` is None before the first."""

    committed: Encoded | None
    planned: Encoded


def read_checkpoint(folder: Path) -> list[SourceState]:
    """Of each source that is ours. Raises ConfigError when there is none."""
    planned = _last(folder / "offsets")
    if planned is None:
        raise ConfigError(
            f"checkpoint {folder}: has no offsets: it is no checkpointLocation of this machine, or its query has"
            " planned no batch yet"
        )
    ends = _offsets(folder, planned)
    done = _last(folder / "commits")
    before = {} if done is None else _offsets(folder, done)
    found = [SourceState(before.get(number), end) for number, end in ends.items()]
    if not found:
        raise ConfigError(f"checkpoint {folder}: none of its offsets is of NSQ: another source wrote it")
    return found


def _last(folder: Path) -> int | None:
    names = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    return max((int(name) for name in names if name.isdecimal()), default=None)


def _offsets(folder: Path, batch: int) -> dict[int, Encoded]:
    """By the number of the source, those of ours."""
    path = folder / "offsets" / str(batch)
    lines = path.read_text().splitlines()
    if not lines or lines[0] != _VERSION:
        raise ConfigError(f"{path}: begins with {lines[:1]}, and only the layout {_VERSION} is known")
    decoded = {number: _decoded(line) for number, line in enumerate(lines[_SOURCES_FROM:])}
    return {number: offset for number, offset in decoded.items() if offset is not None}


def _decoded(line: str) -> Encoded | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    is_ours = isinstance(found, dict) and ({"j", "batch", "slots"} <= found.keys() or "offsets" in found)
    return found if is_ours else None
