"""Polling of the lookup services: where do my topics live, now?

One greenlet polls. In each poll every lookupd is asked at once, each request
under a total timeout, and the good answers are merged into one `Topology` a
topic. Bad answers are ignored and logged when a lookupd begins to fail, not at
every poll; one that keeps failing is asked less often until it answers again.
When all of them fail, what was known stays, and polls come quicker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from ..config import LookupConfig
from ..protocol.topology import Nsqd, Topology

Access = Literal["r", "w"]
Listener = Callable[[str, Topology], None]


class LookupPoller:
    """Keeps the topology of some topics up to date.

    Args:
        lookupds: ``host``, ``host:port``, ``http://...``, ``https://...`` or (host, port) pairs; a string may
            hold several, separated by commas. Default port 4161.
        config: intervals, timeout, Authorization header.
        access: ``"r"`` for consumers, ``"w"`` for producers. Original lookupds ignore it.
        listener: called as ``listener(topic, topology)`` in the poller's greenlet after each poll that at least
            one lookupd answered, whether something changed or not. It should not block.

    Raises ConfigError for an address that cannot be used.
    """

    def __init__(
        self,
        lookupds: str | Iterable[str | tuple[str, int]],
        config: LookupConfig | None = None,
        access: Access = "r",
        listener: Listener | None = None,
    ) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Begin to poll, at once. Does nothing when it runs already."""
        raise NotImplementedError

    def stop(self) -> None:
        """End polling and give up requests under way. Returns soon; may be called from the listener."""
        raise NotImplementedError

    def add_topic(self, topic: str) -> None:
        """Poll for ``topic`` too; a running poller asks for it at once."""
        raise NotImplementedError

    def remove_topic(self, topic: str) -> None:
        """Forget ``topic``."""
        raise NotImplementedError

    def refresh(self, topic: str | None = None) -> None:
        """Ask again soon, for one topic or all: what we know proved stale. Never blocks; a burst of calls is one poll."""
        raise NotImplementedError

    def topology(self, topic: str) -> Topology | None:
        """What the last good poll said of ``topic``; None before there was one. Empty when the topic is unknown."""
        raise NotImplementedError

    def wait_topology(self, topic: str, timeout: float | None = None) -> Topology:
        """Return the topology of ``topic``, waiting for the first good poll if need be; adds the topic.

        Raises LookupFailed when ``timeout`` seconds (None: no limit) pass first.
        """
        raise NotImplementedError

    def nodes(self, timeout: float | None = None) -> tuple[Nsqd, ...]:
        """Ask for every nsqd the lookupds know, whatever its topics: original nsqds create topics on publish.

        Raises LookupFailed when no lookupd answers.
        """
        raise NotImplementedError
