"""One client of a node of the cluster: what it has beyond a client of the original."""

from __future__ import annotations

from typing import Any, cast

from nsq_fast.broker.tcp.connection import Connection

from .channel import PartitionChannel
from .filters import make_filter
from .identify import NodeProfile
from .node import Node
from .state import Partition

DEFAULT_LIMITED_RDY = 50000  # youzan/nsq: nsqd/client_v2.go, defaultLimitedRdy


class NodeConnection(Connection):
    """One client.

    Attributes:
        partition: the one it has subscribed to.
        tag: of the messages that it wants; empty for those without one.
        matches: its filter.
        gets_ext, gets_detail: whether its frames have the ext field, and the detail header.
        limited_rdy: it has no more messages in flight than this, whatever its RDY says.
    """

    silent_intervals = 3
    delays_messages = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.partition: Partition | None = None
        self.tag = ""
        self.matches = make_filter(None)
        self.gets_ext = False
        self.gets_detail = False
        self.limited_rdy = DEFAULT_LIMITED_RDY

    @property
    def node(self) -> Node:
        """The node that serves it."""
        return cast(Node, self.nsqd)

    @property
    def partition_channel(self) -> PartitionChannel:
        """The channel that it has subscribed to."""
        return cast(PartitionChannel, self.channel)

    @property
    def node_profile(self) -> NodeProfile:
        """What IDENTIFY has settled."""
        return cast(NodeProfile, self.profile)

    def prepare(self, partition: Partition, *, detail: bool) -> None:
        """Get ready to subscribe to a partition: its frames depend on the topic."""
        self.partition = partition
        self.gets_detail = detail
        self.gets_ext = partition.meta.ext
        if partition.meta.ext:
            self.tag = self.node_profile.desired_tag
            self.matches = make_filter(self.node_profile.ext_filter)
        self.in_flight.timeout = self.profile.msg_timeout

    def set_rdy(self, count: int) -> None:
        """As that of the base, within the limit."""
        super().set_rdy(count)
        self.max_in_flight = min(count, self.limited_rdy)

    def limit_rdy(self, limit: int) -> None:
        """From now on it has no more messages in flight than this."""
        self.limited_rdy = limit
        self.set_rdy(self.rdy)

    def stats(self) -> dict[str, Any]:
        """Figures under the server's JSON names; durations in nanoseconds (youzan/nsq: nsqd/stats.go, ClientStats)."""
        profile = self.node_profile
        shown = {key: value for key, value in super().stats().items() if not key.startswith("topology_")}
        return {
            **shown,
            "name": profile.client_id,
            "desired_tag": profile.desired_tag,
            "timeout_count": 0,
            "deferred_count": 0,
            "output_buffer_size": profile.output_buffer_size,
            "output_buffer_timeout": round(profile.output_buffer_timeout * 1e9),
            "msg_timeout": round(profile.msg_timeout * 1e9),
            "ext_filter": profile.ext_filter or {},
            "limited_rdy": self.limited_rdy,
        }
