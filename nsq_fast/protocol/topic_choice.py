"""Which topics a consumer takes: one, several, or all that match a pattern. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeAlias

from nsq_fast.errors import ConfigError
from nsq_fast.names import check_topic, is_valid_name

TopicArgument: TypeAlias = str | Iterable[str] | re.Pattern[str]


class TopicChoice:
    """The topics that the argument ``topic`` of a consumer names.

    Args:
        topic: the name of a topic, several names, or a compiled regular expression that the whole name of a topic has
            to match. A string is always a name.

    Attributes:
        names: those that were named, each once; empty for a pattern.
        pattern: None where topics are named.

    Raises NameInvalid for a name that no topic can have, ConfigError for what chooses nothing.
    """

    def __init__(self, topic: TopicArgument) -> None:
        self.pattern = topic if isinstance(topic, re.Pattern) else None
        self.names = () if isinstance(topic, re.Pattern) else _names(topic)
        if self.pattern is not None and not isinstance(self.pattern.pattern, str):
            raise ConfigError(f"topic={topic!r}: the names of topics are str: compile the pattern from a str, too")

    def __str__(self) -> str:
        return ",".join(self.names) if self.pattern is None else self.pattern.pattern

    @property
    def label(self) -> str:
        """A short name for the choice, in the names of loggers."""
        return str(self) if len(self.names) < 2 else f"{self.names[0]}+{len(self.names) - 1}"

    def matching(self, listed: Iterable[str]) -> list[str]:
        """The topics of a list that the pattern chooses, in order. Names that no topic can have are left out."""
        if self.pattern is None:
            return []
        return sorted({name for name in listed if is_valid_name(name) and self.pattern.fullmatch(name)})


def _names(topic: str | Iterable[str]) -> tuple[str, ...]:
    if isinstance(topic, (str, bytes)) or not isinstance(topic, Iterable):
        return (check_topic(topic),)
    ordered = sorted(topic, key=str) if isinstance(topic, (set, frozenset)) else topic
    names = tuple(dict.fromkeys(check_topic(name) for name in ordered))
    if not names:
        raise ConfigError(f"topic={topic!r}: names no topic: give one name at least, or a pattern")
    return names
