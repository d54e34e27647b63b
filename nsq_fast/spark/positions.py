"""Where to begin and where to end, as the options say it: everywhere alike, by partition, or by topic and partition.

The JSON is that of Spark's Kafka connector: ``{"orders": {"0": 1234, "1": -2}}``.
Where one topic is read its name may be left out: ``{"0": 1234, "1": -2}``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

from nsq_fast.config import MAX_PARTITION
from nsq_fast.errors import ConfigError

EARLIEST = "earliest"
LATEST = "latest"
EARLIEST_NUMBER = -2
LATEST_NUMBER = -1

ByPartition = Mapping[int, int]
ByTopic = Mapping[str, ByPartition]
Positions = Literal["earliest", "latest"] | ByPartition | ByTopic
"""-2 is earliest there, -1 latest."""


def parse_positions(name: str, value: str) -> Positions:
    """``earliest``, ``latest``, or offsets. Raises ConfigError."""
    if value.strip().lower() == EARLIEST:
        return "earliest"
    if value.strip().lower() == LATEST:
        return "latest"
    found = _parsed(value, lambda offset: offset >= EARLIEST_NUMBER)
    if found is None:
        raise ConfigError(
            f'{name}={value!r}: must be earliest, latest, or JSON as {{"0": 1234, "1": -1}}, with several topics as'
            f' {{"orders": {{"0": 1234}}}}: an offset for each partition, {EARLIEST_NUMBER} for earliest,'
            f" {LATEST_NUMBER} for latest"
        )
    return found


def parse_times(name: str, value: str) -> ByPartition | ByTopic:
    """Milliseconds since the epoch for each partition. Raises ConfigError."""
    found = _parsed(value, lambda time: time >= 0)
    if found is None:
        raise ConfigError(
            f'{name}={value!r}: must be JSON as {{"orders": {{"0": 1700000000000}}}}: for each partition milliseconds'
            " since the epoch"
        )
    return found


def of_topic(name: str, positions: ByPartition | ByTopic, topic: str) -> ByPartition:
    """Those of one topic. Raises ConfigError when it is not named."""
    if not is_by_topic(positions):
        return cast(ByPartition, positions)
    found = cast(ByTopic, positions).get(topic)
    if found is None:
        raise ConfigError(f"{name}: names the topics {', '.join(map(str, sorted(positions)))}, and not {topic!r}")
    return found


def is_by_topic(positions: Any) -> bool:
    """Whether they name topics."""
    return isinstance(positions, Mapping) and any(isinstance(each, Mapping) for each in positions.values())


def _parsed(value: str, is_valid: Callable[[int], bool]) -> ByPartition | ByTopic | None:
    """None for what is neither."""
    try:
        given = json.loads(value)
        if given and all(isinstance(each, dict) for each in given.values()):
            by_topic = {str(topic): _by_partition(each, is_valid) for topic, each in given.items()}
            return None if None in by_topic.values() else by_topic  # type: ignore[return-value]
        return _by_partition(given, is_valid)
    except (ValueError, AttributeError):
        return None


def _by_partition(given: Mapping[str, Any], is_valid: Callable[[int], bool]) -> ByPartition | None:
    found = {int(partition): each for partition, each in given.items()}
    is_good = all(
        0 <= number <= MAX_PARTITION and type(each) is int and is_valid(each) for number, each in found.items()
    )
    return found if found and is_good else None
