"""Administration of topics by name: what is done to every partition, and what the leading nsqlookupd does.

A ``ClusterAdmin`` asks nsqlookupds where a topic is, and calls the leader of each partition, or each nsqd of the
original. All methods block the calling greenlet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from nsq_fast.errors import ConfigError, HttpError, NsqError
from nsq_fast.names import check_channel, check_topic
from nsq_fast.protocol.position import parse_start
from nsq_fast.protocol.topology import Nsqd, Topology, merge, parse_lookup

from .admin import LookupdHTTPClient, NsqdHTTPClient
from .net.http import DEFAULT_TIMEOUT

Call = Callable[[NsqdHTTPClient, dict[str, Any]], None]
"""Calls one nsqd; the mapping names topic, channel and partition, as query arguments."""


class PartitionResult(NamedTuple):
    """What became of a call to one partition, or to one nsqd of the original.

    Attributes:
        partition: its number; None on an nsqd of the original.
        nsqd: who was called.
        error: why it failed; empty when it is done.
    """

    partition: int | None
    nsqd: Nsqd
    error: str = ""

    @property
    def is_done(self) -> bool:
        """Whether the server has done it."""
        return not self.error


class NodeLoad(NamedTuple):
    """How much a node of the cluster has to do, as the leading nsqlookupd reckons it."""

    address: str
    leader_load: float
    node_load: float


class ClusterStats(NamedTuple):
    """What the leading nsqlookupd says of its cluster. While it is not stable, moves are refused."""

    is_stable: bool
    nodes: tuple[NodeLoad, ...]


class ClusterAdmin:
    """Administration of topics.

    Args:
        lookupd_http_addresses: the nsqlookupds, as URLs or ``host:port``; one of them must answer.
        timeout: limit in seconds for each request.
        http_options: other options of ``LookupdHTTPClient`` and ``NsqdHTTPClient``: authorization, tls_options.
    """

    def __init__(
        self, lookupd_http_addresses: str | Iterable[str], *, timeout: float = DEFAULT_TIMEOUT, **http_options: Any
    ) -> None:
        addresses = lookupd_http_addresses
        self._lookupds: Sequence[str] = [addresses] if isinstance(addresses, str) else list(addresses)
        if not self._lookupds:
            raise ConfigError("lookupd_http_addresses: name at least one nsqlookupd")
        self._options = {"timeout": timeout, **http_options}

    # --- channels, on every partition --------------------------------------------------------------------------------

    def set_offset(
        self, topic: str, channel: str, position: Any, *, partition: int | None = None
    ) -> list[PartitionResult]:
        """Let a channel go on at ``position``, forward or back, for all its consumers.

        Args:
            position: as the option ``start_position``: ``'end'``, a datetime, ``'offset:...'``, ``'count:...'``,
                ``'timestamp:...'``, or a mapping by partition, which leaves the others alone.
        """
        positions = parse_start(position)
        if positions is None:
            raise ConfigError("position=None: name one")

        def call(client: NsqdHTTPClient, place: dict[str, Any]) -> None:
            client.call("POST", "/channel/setoffset", str(positions.of(place["partition"])).encode(), **place)

        return self._on_partitions(topic, channel, partition, call, lambda number: positions.of(number) is not None)

    def pause(self, topic: str, channel: str, *, partition: int | None = None) -> list[PartitionResult]:
        """Stop delivery."""
        return self._post("pause", topic, channel, partition)

    def unpause(self, topic: str, channel: str, *, partition: int | None = None) -> list[PartitionResult]:
        """Go on with delivery."""
        return self._post("unpause", topic, channel, partition)

    def skip(self, topic: str, channel: str, *, partition: int | None = None) -> list[PartitionResult]:
        """Be done with all that waits and all that comes, without delivering it: those messages are lost to it."""
        return self._post("skip", topic, channel, partition)

    def unskip(self, topic: str, channel: str, *, partition: int | None = None) -> list[PartitionResult]:
        """Deliver what comes from now on."""
        return self._post("unskip", topic, channel, partition)

    def set_order(
        self, topic: str, channel: str, ordered: bool, *, partition: int | None = None
    ) -> list[PartitionResult]:
        """Deliver in order, one message at a time, or not; its consumers are disconnected when it ends."""
        return self._post("setorder", topic, channel, partition, order=ordered)

    def limit_rate(
        self, topic: str, channel: str, kilobytes: int, *, partition: int | None = None
    ) -> list[PartitionResult]:
        """Let each partition deliver so many kilobytes a second."""
        if isinstance(kilobytes, bool) or not isinstance(kilobytes, int) or kilobytes < 1:
            raise ConfigError(f"kilobytes={kilobytes!r}: must be a whole number, at least 1")
        return self._post("ratelimit", topic, channel, partition, ratekilobytes=kilobytes)

    # --- topics and nodes, by the leading nsqlookupd -----------------------------------------------------------------

    def expand(self, topic: str, partitions: int) -> None:
        """Give a topic more partitions: keys go to other ones from then on. Raises HttpError."""
        self._post_lookupd("/topic/partition/expand", topic=check_topic(topic), partition_num=partitions)

    def move_leader(self, topic: str, partition: int, to: str, *, origin: str | None = None) -> None:
        """Let the node ``to`` lead a partition. Raises HttpError, also while the cluster is not stable.

        Args:
            to: the node's ``distributed_id``, as lookup shows it.
            origin: the node that must lead it now; by default whichever does.
        """
        origin = origin or self.leader_id(topic, partition)
        query = {"topic": topic, "partition": partition, "move_from": origin, "move_to": to, "move_leader": True}
        self._post_lookupd("/topic/partition/move", **query)

    def move_replica(self, topic: str, partition: int, origin: str, to: str) -> None:
        """Let the node ``to`` have what the node ``origin`` has of a partition. Raises HttpError."""
        query = {"topic": check_topic(topic), "partition": partition, "move_from": origin, "move_to": to}
        self._post_lookupd("/topic/partition/move", **query, move_leader=False)

    def leader_id(self, topic: str, partition: int) -> str:
        """The ``distributed_id`` of the node that leads a partition. Raises NsqError when none does."""
        peers = self._ask("lookup", check_topic(topic), access="r", metainfo=True).get("partitions") or {}
        if str(partition) not in peers:
            raise NsqError(f"{topic}: partition {partition} has no leader; there are leaders of {sorted(peers)}")
        return str(peers[str(partition)].get("distributed_id") or "")

    def stats(self) -> ClusterStats:
        """What the leading nsqlookupd says of the cluster. Raises HttpError."""
        with self._leading_lookupd() as lookupd:
            answer = lookupd.call_json("GET", "/cluster/stats") or {}
        nodes = [
            NodeLoad(
                f"{row.get('broadcast_address')}:{row.get('http_port')}",
                float(row.get("leader_load_factor") or 0),
                float(row.get("node_load_factor") or 0),
            )
            for row in answer.get("node_stat_list") or ()
        ]
        return ClusterStats(bool(answer.get("stable")), tuple(nodes))

    # --- how ---------------------------------------------------------------------------------------------------------

    def _post(
        self, action: str, topic: str, channel: str, partition: int | None, **query: Any
    ) -> list[PartitionResult]:
        def call(client: NsqdHTTPClient, place: dict[str, Any]) -> None:
            client.call("POST", f"/channel/{action}", **place, **query)

        return self._on_partitions(topic, channel, partition, call)

    def _on_partitions(
        self,
        topic: str,
        channel: str,
        partition: int | None,
        call: Call,
        is_wanted: Callable[[int | None], bool] = lambda number: True,
    ) -> list[PartitionResult]:
        """Call each partition in turn, or one; a failure does not keep the others from being called."""
        check_channel(channel)
        topology = self._topology(topic)
        places: list[tuple[int | None, Nsqd]] = [*sorted(topology.partitions.items())]
        places += [(None, nsqd) for nsqd in topology.unpartitioned]
        if partition is not None:
            places = [place for place in places if place[0] == partition]
        if not places:
            which = "" if partition is None else f" that leads partition {partition}"
            raise NsqError(f"{topic}: lookup names no nsqd{which}")
        return [self._on_partition(topic, channel, number, nsqd, call) for number, nsqd in places if is_wanted(number)]

    def _on_partition(self, topic: str, channel: str, number: int | None, nsqd: Nsqd, call: Call) -> PartitionResult:
        if nsqd.http is None:
            return PartitionResult(number, nsqd, "lookup does not name its HTTP port")
        with NsqdHTTPClient(*nsqd.http, **self._options) as client:
            try:
                call(client, {"topic": topic, "channel": channel, "partition": number})
            except HttpError as error:
                return PartitionResult(number, nsqd, str(error))
        return PartitionResult(number, nsqd)

    def _topology(self, topic: str) -> Topology:
        answer = self._ask("call", "GET", "/lookup", topic=check_topic(topic), access="r", metainfo=True)
        return merge([parse_lookup(answer)])

    def _ask(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """The answer of the first nsqlookupd that has one. Raises HttpError, that of the last."""
        for number, address in enumerate(self._lookupds, 1):
            with LookupdHTTPClient.from_url(address, **self._options) as client:
                try:
                    return getattr(client, method)(*arguments, **keywords)
                except HttpError:
                    if number == len(self._lookupds):
                        raise
        raise AssertionError("there is at least one")

    def _leading_lookupd(self) -> LookupdHTTPClient:
        leader = self._ask("list_lookupds").get("lookupdleader") or {}
        if not leader.get("HttpPort"):
            raise NsqError("no nsqlookupd leads: this is not a redesigned cluster, or it elects a leader just now")
        return LookupdHTTPClient(leader["NodeIP"], int(leader["HttpPort"]), **self._options)

    def _post_lookupd(self, path: str, **query: Any) -> None:
        with self._leading_lookupd() as lookupd:
            lookupd.call("POST", path, **query)
