"""The servers of the cluster: an nsqd and an nsqlookupd of the original with another dialect and other routes."""

from __future__ import annotations

import socket
from collections.abc import Callable, Container, Sequence
from typing import Any, cast

from nsq_fast.broker.http.router import Router
from nsq_fast.broker.options import LookupdOptions, NsqdOptions
from nsq_fast.broker.servers.lookupd import LookupdServer
from nsq_fast.broker.servers.nsqd import NsqdServer

from .commands import REDESIGNED
from .coordinator import Coordinator
from .node import Node
from .nsqd_http import NodeRoutes
from .settings import NodeSettings


class NodeServer(NsqdServer):
    """One nsqd of the cluster. It registers nowhere: lookups see what the coordinator knows."""

    dialect = REDESIGNED

    def __init__(self, options: NsqdOptions, coordinator: Coordinator, worker_id: int) -> None:
        super().__init__(options)
        self._coordinator = coordinator
        self._worker_id = worker_id

    @property
    def node(self) -> Node:
        """Its state, while it runs."""
        return cast(Node, self.nsqd)

    @property
    def id(self) -> str:
        """What the cluster knows it by: its ``distributed_id``. Known once it has been started."""
        # There is no RPC port; the port of HTTP stands where it would.
        host = self.options.broadcast_address
        return f"{host}:{self.http_address.port}:{self.tcp_address.port}:{self._worker_id}"

    def peer(self) -> dict[str, Any]:
        """The node as lookups show it."""
        connection = f"{self.options.broadcast_address}:{self.tcp_address.port}"
        return {
            "id": connection,
            "remote_address": connection,
            "hostname": socket.gethostname(),
            "broadcast_address": self.options.broadcast_address,
            "tcp_port": self.options.broadcast_tcp_port or self.tcp_address.port,
            "http_port": self.options.broadcast_http_port or self.http_address.port,
            "version": self.options.version,
            "distributed_id": self.id,
        }

    def kill(self) -> None:
        """End as SIGKILL would: connections are reset. It may be started again."""
        if self._tcp is not None:
            self._tcp.reset()
        super().kill()

    def _make_nsqd(self) -> Any:
        return Node(self.options, self._coordinator.state, self._coordinator.recovery.replica_failed)

    def _make_router(self) -> Router:
        settings = NodeSettings(self.nsqd)
        return NodeRoutes(self.node, lambda: (self.tcp_address, self.http_address), settings).router()

    def _register(self) -> None:
        self.node.id = self.id
        self._coordinator.node_started(self.id)

    def _leave(self) -> None:
        super()._leave()
        self._coordinator.node_ended(self.node.id)

    def _push_stats(self) -> None:
        """Not to statsd: its keys are about the original's figures."""


class ClusterLookupdServer(LookupdServer):
    """One nsqlookupd of the cluster. Nsqds of the original may register at its TCP face."""

    def __init__(self, options: LookupdOptions, make_router: Callable[[ClusterLookupdServer], Router]) -> None:
        super().__init__(options)
        self._make_cluster_router = make_router

    def listed(self) -> dict[str, Any]:
        """How /listlookup shows it: ports are strings."""
        host, port = self.options.broadcast_address, self.http_address.port
        return {
            "ID": f"{host}:{port}:{self.tcp_address.port}:nsqlookup",
            "NodeIP": host,
            "TcpPort": str(self.tcp_address.port),
            "HttpPort": str(port),
            "RpcPort": str(port),
            "Epoch": 0,
        }

    def _make_router(self) -> Router:
        return self._make_cluster_router(self)


def listed_lookupds(lookupds: Sequence[ClusterLookupdServer], tombstones: Container[str]) -> dict[str, Any]:
    """The answer to /listlookup: those that run, but for those with a tombstone; the first that runs leads."""
    running = [lookupd.listed() for lookupd in lookupds if lookupd.is_running]
    shown = [listed for listed in running if listed["ID"] not in tombstones]
    return {"lookupdnodes": shown, "lookupdleader": running[0] if running else {}}
