"""A ``RedesignedCluster`` in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from nsq_fast.broker.servers.process import BrokerProcess, ServerAddresses, run

from .cluster import RedesignedCluster


class ClusterProcess(BrokerProcess):
    """A cluster as a child process. ``kill`` and ``restart`` are for all of it, ``kill_node`` for one nsqd.

    Args:
        nodes: how many nsqds.
        lookupds: how many nsqlookupds.
        data_path: where topics, messages and channels are kept; None keeps nothing.
        options: as for ``RedesignedCluster``.
    """

    _module = "nsq_fast.broker.redesigned.process"

    def __init__(
        self, nodes: int = 3, lookupds: int = 2, data_path: str | os.PathLike[str] | None = None, **options: Any
    ) -> None:
        super().__init__()
        path = None if data_path is None else os.fspath(data_path)
        self._settings = {"nodes": nodes, "lookupds": lookupds, "data_path": path, **options}

    @property
    def lookupds(self) -> list[ServerAddresses]:
        """The addresses of the nsqlookupds. Known once it has been started; the same after a restart."""
        return self._addresses.lookupds

    def create_topic(
        self, topic: str, partitions: int = 1, replicas: int = 1, *, channels: Sequence[str] = (), **flags: bool
    ) -> None:
        """As ``RedesignedCluster.create_topic``. Raises NsqError."""
        self._call("create_topic", topic, partitions, replicas, channels=list(channels), **flags)

    def move_leader(self, topic: str, number: int, to: int | str | None = None) -> None:
        """As ``RedesignedCluster.move_leader``. Raises NsqError."""
        self._call("move_leader", topic, number, to)

    def wait_stable(self) -> None:
        """As ``RedesignedCluster.wait_stable``. Raises NsqError."""
        self._call("wait_stable")

    def forget_log(self, topic: str, number: int, before: int) -> None:
        """As ``RedesignedCluster.forget_log``. Raises NsqError."""
        self._call("forget_log", topic, number, before)

    def kill_node(self, node: int | str) -> None:
        """As ``RedesignedCluster.kill_node``. Raises NsqError."""
        self._call("kill_node", node)

    def restart_node(self, node: int | str) -> None:
        """As ``RedesignedCluster.restart_node``. Raises NsqError."""
        self._call("restart_node", node)

    def remove_node(self, node: int | str) -> None:
        """As ``RedesignedCluster.remove_node``. Raises NsqError."""
        self._call("remove_node", node)

    def balance(self) -> None:
        """As ``RedesignedCluster.balance``. Raises NsqError."""
        self._call("balance")

    def isolate_node(self, node: int | str) -> None:
        """As ``RedesignedCluster.isolate_node``. Raises NsqError."""
        self._call("isolate_node", node)

    def heal_node(self, node: int | str) -> None:
        """As ``RedesignedCluster.heal_node``. Raises NsqError."""
        self._call("heal_node", node)


def main() -> None:
    """The child."""
    run(RedesignedCluster)


if __name__ == "__main__":
    main()
