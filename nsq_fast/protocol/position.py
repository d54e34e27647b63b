"""Where a channel of a redesigned topic shall begin: at its end, at a moment, or at an offset. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from nsq_fast.errors import ConfigError

END = "special:-1"
MAX_NUMBER = 2**63 - 1

_WIRE_KINDS = {
    "timestamp": "timestamp",
    "offset": "virtual_queue",
    "virtual_queue": "virtual_queue",
    "count": "msgcount",
    "msgcount": "msgcount",
}
_ALLOWED = "must be 'end', a datetime, 'timestamp:<unix seconds>', 'offset:<bytes>' or 'count:<messages>'"


class StartPositions(NamedTuple):
    """The position of each partition, in the words of the server. ``others`` is for partitions not named."""

    others: str | None = None
    by_partition: Mapping[int, str] = {}

    def of(self, partition: int | None) -> str | None:
        """The position for ``partition``; None leaves its channel where it is."""
        return self.others if partition is None else self.by_partition.get(partition, self.others)


def parse_start(value: Any) -> StartPositions | None:
    """Read the option ``start_position``: one position for all partitions, or a mapping by partition number.

    Offsets and counts differ from partition to partition, moments and the end do not. Raises ConfigError.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        return StartPositions(_position(value))
    if not value or any(type(number) is not int or number < 0 for number in value):
        raise ConfigError(f"start_position={value!r}: must map partition numbers to positions")
    return StartPositions(None, {number: _position(each) for number, each in value.items()})


def _position(value: Any) -> str:
    if isinstance(value, datetime):
        return f"timestamp:{max(0, int(value.timestamp()))}"
    if value in ("end", END):
        return END
    kind, _, number = value.partition(":") if isinstance(value, str) else ("", "", "")
    if kind not in _WIRE_KINDS or not (number.isascii() and number.isdigit()) or int(number) > MAX_NUMBER:
        raise ConfigError(f"start_position={value!r}: {_ALLOWED}")
    return f"{_WIRE_KINDS[kind]}:{int(number)}"
