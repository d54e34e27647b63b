"""Set where a channel begins, once for each partition, before it is subscribed to.

Redesigned servers take a position in SUB_ADVANCED too, but then ignore the
partition; over HTTP they do not.
"""

from __future__ import annotations

from typing import Any

from nsq_fast.errors import ConfigError, HttpError
from nsq_fast.protocol.position import StartPositions
from nsq_fast.protocol.targets import Target
from nsq_fast.protocol.topology import Nsqd
from nsq_fast.runtime.admin import NsqdHTTPClient

STALE = "E_FAILED_ON_NOT_LEADER"


class Starter:
    """Sets positions by ``/channel/setoffset`` on the leader of a partition."""

    def __init__(self, topic: str, channel: str, positions: StartPositions, timeout: float) -> None:
        self._topic = topic
        self._channel = channel
        self._positions = positions
        self._timeout = timeout
        self._done: set[int | None] = set()

    def place(self, target: Target, nsqd: Nsqd | None) -> None:
        """Set the position for ``target`` unless that was done before; blocks.

        Raises HttpError when it may work later, ConfigError when the server does not take the position at all.
        """
        position = self._positions.of(target.partition)
        if position is None or target.partition in self._done:
            return
        if nsqd is None or nsqd.http is None or not nsqd.is_redesigned:
            raise ConfigError(f"start_position={position!r}: {target} is no redesigned nsqd found by lookup")
        query: dict[str, Any] = {"topic": self._topic, "channel": self._channel, "partition": target.partition}
        with NsqdHTTPClient(*nsqd.http, timeout=self._timeout) as client:
            try:
                client.call("POST", "/channel/create", **query)
                client.call("POST", "/channel/setoffset", position.encode(), **query)
            except HttpError as error:
                if error.status != 400 or error.text.startswith(STALE):
                    raise
                raise ConfigError(f"start_position={position!r}: refused by {target}: {error.text}") from error
        self._done.add(target.partition)
