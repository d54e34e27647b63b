"""Positions in topics, as Spark keeps them in its checkpoint.

A position maps the partitions of each topic to offsets, each that of the next
record in the partition's log:

    {"channel": "spark", "servers": ["10.0.0.1:4161"], "offsets": {"orders": {"0": 1234, "1": 560}}}

The servers, the channel and the topics are there so that a checkpoint is not
taken for that of another query. Older versions of nsq_fast kept ``{"0": 1234}``
alone, of the one topic that they read; that is read, too.

Spark asks for the initial position again when it repeats the first batch, and
*latest* would then be another position. So the end of the first batch also says
where that batch began (``begin``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from nsq_fast.errors import ConfigError
from nsq_fast.spark.options import SourceOptions

_CHANNEL, _SERVERS, _OFFSETS, _INITIAL, _BEGIN = "channel", "servers", "offsets", "initial", "begin"

Offsets = Mapping[int, int]
"""Partition -> offset."""

TopicOffsets = Mapping[str, Offsets]
"""Topic -> partition -> offset."""


class Identity(NamedTuple):
    """What a query reads from: the servers that it asks (``host:port``), and its channel."""

    servers: tuple[str, ...] = ()
    channel: str = ""


class Position(NamedTuple):
    """A position.

    Attributes:
        offsets: topic -> partition -> offset.
        is_initial: whether a query begins there.
        begin: in the end of the first batch, where that batch begins.
        identity: of the query that made it; None in those of older versions.
    """

    offsets: TopicOffsets
    is_initial: bool = False
    begin: TopicOffsets | None = None
    identity: Identity | None = None

    def to_json(self) -> dict[str, Any]:
        """The object that Spark keeps. Equal positions give equal text."""
        found: dict[str, Any] = {}
        if self.identity is not None:
            found[_CHANNEL] = self.identity.channel
            found[_SERVERS] = sorted(self.identity.servers)
        found[_OFFSETS] = by_topic(self.offsets)
        if self.is_initial:
            found[_INITIAL] = True
        if self.begin is not None:
            found[_BEGIN] = by_topic(self.begin)
        return found

    @classmethod
    def from_json(cls, found: Mapping[str, Any], options: SourceOptions) -> Position:
        """Read what ``to_json`` wrote, of this version or an older one, which knew the topic of the options alone.

        Raises ConfigError for what another source wrote, or the other reader.
        """
        try:
            if _OFFSETS in found:
                return _decoded(found)
            position = _decoded_without_topics(found, options.topic)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ConfigError(
                f"checkpointLocation: its offset {json.dumps(found)[:200]} is none of the replayable reader; did"
                " another source write it, or the journalled reader?"
            ) from None
        if options.reads_several:
            raise ConfigError(
                "checkpointLocation: an older version made it, which read one topic and did not write down which. Run"
                " the query once with that topic alone, then with several"
            )
        return position

    def until(self, offsets: TopicOffsets) -> Position:
        """The end of a batch that begins here; this position itself when the batch would be empty."""
        if by_topic(offsets) == by_topic(self.offsets):
            return self
        return self._replace(offsets=offsets, is_initial=False, begin=self.offsets if self.is_initial else None)

    def check(self, wanted: Identity, options: SourceOptions) -> None:
        """Raise ConfigError when another query made it: of other topics, another channel, or none of these servers."""
        others = sorted(topic for topic in self.offsets if not options.names_topic(topic))
        if others:
            raise ConfigError(
                f"checkpointLocation: it was made with the topic {', '.join(map(repr, others))}, which the options do"
                f" not name: they say {options.topic!r}. Name it, or use a new checkpoint"
            )
        if self.identity is None:
            return
        channel, servers = self.identity.channel, self.identity.servers
        if channel != wanted.channel:
            raise ConfigError(
                f"checkpointLocation: it was made with channel={channel!r}, and the option is"
                f" channel={wanted.channel!r}; use that channel, or a new checkpoint"
            )
        if not set(servers) & set(wanted.servers):
            raise ConfigError(
                f"checkpointLocation: it was made with the servers {', '.join(servers)}, and the options name"
                f" {', '.join(wanted.servers)}: offsets of one cluster mean nothing in another. Use a new checkpoint;"
                " if it is the same cluster at new addresses, name an old one beside the new ones once"
            )


def _decoded(found: Mapping[str, Any]) -> Position:
    begin = found.get(_BEGIN)
    return Position(
        _read_topics(found[_OFFSETS]),
        bool(found.get(_INITIAL)),
        None if begin is None else _read_topics(begin),
        Identity(tuple(map(str, found[_SERVERS])), str(found[_CHANNEL])) if _CHANNEL in found else None,
    )


def _decoded_without_topics(found: Mapping[str, Any], topic: str) -> Position:
    begin = found.get(_BEGIN)
    return Position(
        {topic: _read_offsets({key: value for key, value in found.items() if key not in (_INITIAL, _BEGIN)})},
        bool(found.get(_INITIAL)),
        None if begin is None else {topic: _read_offsets(begin)},
    )


def _read_topics(found: Mapping[str, Any]) -> TopicOffsets:
    return {str(topic): _read_offsets(offsets) for topic, offsets in found.items()}


def _read_offsets(found: Mapping[str, Any]) -> Offsets:
    return {int(partition): int(offset) for partition, offset in found.items()}


def start_of(start: Position, end: Position) -> TopicOffsets:
    """Where the batch from ``start`` to ``end`` begins. An initial position may have been found anew meanwhile."""
    if not start.is_initial:
        return start.offsets
    if end.is_initial:
        return end.offsets
    return start.offsets if end.begin is None else end.begin


def distance(start: TopicOffsets, end: TopicOffsets) -> int:
    return sum(
        offset - start.get(topic, {}).get(partition, 0)
        for topic, offsets in end.items()
        for partition, offset in offsets.items()
    )


def by_topic(offsets: TopicOffsets) -> dict[str, dict[str, int]]:
    """With topics and partitions as keys of JSON, in their order."""
    return {topic: {str(each): own[each] for each in sorted(own)} for topic, own in sorted(offsets.items())}
