"""``RedesignedCluster``: nsqds and nsqlookupds of the redesigned dialect together, in this process, ready to use."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gevent import sleep

from nsq_fast.broker.http import Router
from nsq_fast.broker.message import ClusterError
from nsq_fast.broker.options import (
    NODE_DEFAULTS,
    TIMINGS,
    ClusterOptions,
    LookupdOptions,
    NsqdOptions,
    check_count,
    check_switch,
    cluster_lookupd_options,
)
from nsq_fast.broker.redesigned.commands import REDESIGNED
from nsq_fast.broker.redesigned.coordinator import NO_NODE, Coordinator
from nsq_fast.broker.redesigned.http import NodeRoutes
from nsq_fast.broker.redesigned.keeper import DiskKeeper
from nsq_fast.broker.redesigned.lookup import ClusterLookupRoutes
from nsq_fast.broker.redesigned.partition import ClusterState, Node, Partition, TopicMeta
from nsq_fast.broker.servers import LookupdServer, NsqdServer, ServerGroup, check_arguments, counted
from nsq_fast.config import split_options
from nsq_fast.errors import ConfigError
from nsq_fast.names import check_channel, check_topic

_POLL = 0.005


class NodeServer(NsqdServer):
    """One nsqd of the cluster. It registers nowhere: lookups see what the coordinator knows."""

    dialect = REDESIGNED
    nsqd: Any

    def __init__(self, options: NsqdOptions, coordinator: Coordinator, worker_id: int) -> None:
        super().__init__(options)
        self._coordinator = coordinator
        self._worker_id = worker_id

    @property
    def id(self) -> str:
        """What the cluster knows it by: its ``distributed_id``. Known once it has been started."""
        # There is no RPC port; the port of HTTP stands where it would.
        host = self.options.broadcast_address
        return f"{host}:{self.http_address.port}:{self.tcp_address.port}:{self._worker_id}"

    def peer(self) -> dict[str, Any]:
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
        if self.is_running:
            for connection in list(self.nsqd.clients):
                connection.reset_on_close()
            self.nsqd.clients.clear()  # what closes them politely must not find them
        super().kill()

    def _make_nsqd(self) -> Any:
        return Node(self.options, self._coordinator)

    def _make_router(self) -> Router:
        return NodeRoutes(self.nsqd, lambda: (self.tcp_address, self.http_address), lambda lookupds: None).router()

    def _register(self) -> None:
        self.nsqd.id = self.id
        self._coordinator.node_started(self.id)

    def _leave(self) -> None:
        super()._leave()
        self._coordinator.node_ended(self.nsqd.id)

    def _push_stats(self) -> None:
        """Not to statsd: its keys are about the original's figures."""


class ClusterLookupdServer(LookupdServer):
    """One nsqlookupd of the cluster. Nsqds of the original may register at its TCP face."""

    def __init__(self, options: LookupdOptions, cluster: RedesignedCluster) -> None:
        super().__init__(options)
        self._cluster = cluster

    def listed(self) -> dict[str, Any]:
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
        return ClusterLookupRoutes(self, self._cluster).router()


class RedesignedCluster(ServerGroup):
    """An embedded cluster: nsqds and nsqlookupds of the redesigned dialect together, ready to use.

        with RedesignedCluster(nodes=3) as cluster:
            cluster.create_topic("orders", partitions=3, replicas=2, ordered=True, channels=["ch"])
            cluster.move_leader("orders", 0)
            cluster.kill_node(cluster.leader_of("orders", 1))

    Everything listens on free ports of loopback unless told otherwise. It runs in the hub of the thread that starts it:
    block that thread, and nothing is served. Each node has the messages of its replicas in memory, as if on a disk: it
    has them again when it is started after its death. Nothing outlives the process, unless there is a data path.

    Args:
        nodes: how many nsqds.
        lookupds: how many nsqlookupds; the first that runs takes administrative calls.
        lookupd_options: of every nsqlookupd.
        addresses: where to listen, as ``{"nsqds": [{"tcp": (host, port), "http": ...}], "lookupds": [...]}``.
        data_path: folder where topics, messages and channels survive, with a folder for each node below it.
        options: of the cluster (``ClusterOptions``) and of every nsqd; an address with a port of its own is for
            the first, others count up from it.

    Attributes:
        nsqds: the nodes.
        lookupds: the ``LookupdServer``s.
        state: what the cluster knows of topics and partitions.
        coordinator: decides who leads what.
    """

    def __init__(
        self,
        nodes: int = 3,
        lookupds: int = 2,
        *,
        lookupd_options: Mapping[str, Any] | None = None,
        addresses: Mapping[str, Any] | None = None,
        data_path: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        for name, count in (("nodes", nodes), ("lookupds", lookupds)):
            check_count(name, count, 1)
        check_arguments(data_path, {"lookupd_options": lookupd_options, "addresses": addresses})
        options = {**NODE_DEFAULTS, **TIMINGS.get(str(options.get("timings")), {}), **options}
        own, base = split_options(options, ClusterOptions, NsqdOptions)
        self.options: ClusterOptions = own
        self._data_path = data_path
        self._interval = base.sync_timeout
        self._keeper: DiskKeeper | None = None
        self.state: ClusterState = ClusterState()
        self.coordinator: Coordinator = Coordinator(self.state, self.options)
        self._base = base
        fixed = addresses or {}
        lookupd = cluster_lookupd_options(lookupd_options or {})
        self.nsqds: list[NodeServer] = [
            NodeServer(counted(base, n, fixed.get("nsqds", ())), self.coordinator, n + 1) for n in range(nodes)
        ]
        self.lookupds: list[ClusterLookupdServer] = [
            ClusterLookupdServer(counted(lookupd, n, fixed.get("lookupds", ())), self) for n in range(lookupds)
        ]

    @property
    def servers(self) -> Mapping[str, NsqdServer | LookupdServer]:
        nsqds: dict[str, NsqdServer | LookupdServer] = {f"nsqd{n}": nsqd for n, nsqd in enumerate(self.nsqds)}
        return {**nsqds, **{f"lookupd{n}": lookupd for n, lookupd in enumerate(self.lookupds)}}

    # --- topics ------------------------------------------------------------------------------------------------------

    def create_topic(
        self,
        topic: str,
        partitions: int = 1,
        replicas: int = 1,
        *,
        channels: Sequence[str] = (),
        ordered: bool = False,
        ext: bool = False,
        multi_part: bool = False,
        disable_channel_auto_create: bool = False,
    ) -> None:
        """Create a topic, with channels on each partition; returns when all have leaders.

        A topic that is neither ordered nor multi_part needs ``partitions * replicas`` nodes, another one ``replicas``.

        Raises ConfigError for values that do not fit, ClusterError when the cluster refuses.
        """
        check_topic(topic)
        check_count("partitions", partitions, 1)
        check_count("replicas", replicas, 1)
        if isinstance(channels, str):
            raise ConfigError(f"channels={channels!r}: must be several names, as a list")
        for channel in channels:
            check_channel(channel)
        flags: dict[str, Any] = {
            "ordered": ordered,
            "ext": ext,
            "multi_part": multi_part,
            "disable_channel_auto_create": disable_channel_auto_create,
        }
        for name, value in flags.items():
            check_switch(name, value)
        meta = TopicMeta(partitions, replicas, **flags)
        needed, there = meta.nodes_for(partitions), len(self.state.staying)
        if needed > there:
            raise ClusterError(f"{NO_NODE}: {topic!r} needs {needed} nodes, and there are {there}")
        if meta.disable_channel_auto_create:
            meta.channels = list(channels)
        self.coordinator.create(topic, meta)
        for partition in self.state.topics[topic]:
            for channel in channels:
                partition.channel(channel)
        self.coordinator.wait_leaders(topic)

    def wait_stable(self) -> None:
        """Return when the cluster is stable: when ``/cluster/stats`` says so, and leaders may be moved by HTTP."""
        while not self.coordinator.is_stable:
            sleep(_POLL)

    def partition(self, topic: str, number: int) -> Partition:
        """A partition's state. Raises ClusterError when there is none."""
        partition = self.state.partition(topic, number)
        if partition is None:
            raise ClusterError(f"there is no partition {number} of {topic!r}")
        return partition

    def forget_log(self, topic: str, number: int, before: int) -> None:
        """Drop the records of a partition that begin before an offset, as retention would.

        Raises ClusterError when there is no such partition.
        """
        self.partition(topic, number).forget(before)

    def unfinished(self, topic: str, channel: str | None = None) -> Iterator[tuple[bytes, bytes]]:
        """The id and the body of every message that a channel, or some channel, has not finished."""
        for partition in self.state.topics.get(topic, ()):
            channels = [each for each in partition.channels.values() if channel in (None, each.name)]
            for record in partition.log.read(partition.log.first, len(partition.log)):
                if any(each.confirmed.lacks(record.sequence) for each in channels) or not partition.channels:
                    yield record.id, record.body

    # --- nodes -------------------------------------------------------------------------------------------------------

    def leader_of(self, topic: str, number: int) -> NodeServer:
        """The node that leads a partition, which may be dead. Raises ClusterError when there is no partition."""
        return self.node(str(self.partition(topic, number).leader))

    def node(self, node: int | str | NodeServer) -> NodeServer:
        """A node by its number or its id. Raises ClusterError when there is none."""
        if isinstance(node, NodeServer):
            return node
        if isinstance(node, int):
            if not 0 <= node < len(self.nsqds):
                raise ClusterError(f"there is no node {node}")
            return self.nsqds[node]
        for server in self.nsqds:
            if server.id == node:
                return server
        raise ClusterError(f"there is no node {node!r}")

    def move_leader(self, topic: str, number: int, to: int | str | NodeServer | None = None) -> None:
        """Let another node lead a partition, by default some other replica; returns when lookups show it.

        Raises ClusterError when that cannot be.
        """
        self.coordinator.move_leader(topic, number, None if to is None else self.node(to).id)

    def kill_node(self, node: int | str | NodeServer) -> None:
        """End a node as SIGKILL would. After ``takeover_delay`` replicas lead what it led."""
        self.node(node).kill()

    def restart_node(self, node: int | str | NodeServer) -> None:
        """Start a node again on the ports it had; kill it first if it runs."""
        self.node(node).restart()

    def add_node(self) -> NodeServer:
        """Start one more nsqd, on free ports. It gets partitions of new topics, and those that are moved there."""
        number = len(self.nsqds)
        options = self._base.replace(**dict.fromkeys(("tcp_address", "http_address"), "127.0.0.1:0"))
        node = NodeServer(options, self.coordinator, number + 1)
        self.nsqds.append(node)
        _start_node(node, self.state)
        return node

    def remove_node(self, node: int | str | NodeServer) -> None:
        """Move all partitions of a node to others, and stop it. It waits where the others have no room for them."""
        server = self.node(node)
        self.coordinator.empty(server.id)
        while self.coordinator.has_partitions(server.id):
            sleep(_POLL)
        server.stop()

    def isolate_node(self, node: int | str | NodeServer) -> None:
        """Cut a node off from the rest of the cluster; its clients still reach it.

        It confirms no publish that has to be on other nodes, too. After ``takeover_delay`` others lead what it led.
        """
        self.coordinator.isolate(self.node(node).id)

    def heal_node(self, node: int | str | NodeServer) -> None:
        """Let the cluster reach a node again: its replicas drop what others have not confirmed, and catch up."""
        self.coordinator.heal(self.node(node).id)

    def listed_lookupds(self) -> dict[str, Any]:
        """The answer to /listlookup: those that run; the first of them leads."""
        running = [lookupd.listed() for lookupd in self.lookupds if lookupd.is_running]
        return {"lookupdnodes": running, "lookupdleader": running[0] if running else {}}

    def _start(self) -> None:
        for lookupd in self.lookupds:
            lookupd.start()
        for nsqd in self.nsqds:
            _start_node(nsqd, self.state)
        if self._data_path is not None:
            self._keeper = DiskKeeper(self.state, self._data_path, self.options, self._interval)
            self._keeper.restore()
            self.coordinator.restored()

    def stop(self) -> None:
        self._end(super().stop, save=True)

    def kill(self) -> None:
        self._end(super().kill, save=False)

    def _end(self, end: Callable[[], None], *, save: bool) -> None:
        self.coordinator.stop()
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.freeze()  # that all nodes end is nothing to write down
        end()
        if keeper is not None:
            keeper.close(save=save)


def _start_node(node: NodeServer, state: ClusterState) -> None:
    node.start()
    if node.id not in state.node_ids:
        state.node_ids.append(node.id)
