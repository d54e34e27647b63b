"""The HTTP routes of an nsqlookupd that are about nodes, and where partitions stand (youzan/nsq: nsqlookupd/http.go).

Beside the real server's there are those below ``/embedded``, which kill and
restart nodes, and move a leader without naming the nodes: for tests and demos.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from nsq_fast.broker.go_integer import parse_integer
from nsq_fast.broker.http.arguments import required
from nsq_fast.broker.http.router import Request, Router
from nsq_fast.errors import NotLeader

from .balancer import Balancer
from .coordinator import Coordinator
from .lookup import NO_TOPIC, Lookup
from .moves import SAME_NODE, ClusterError
from .state import ClusterState

MAX_PARTITION = 255
_NO_LOOKUPD = "lookup node id not found"


class Administration(Protocol):
    """What the routes need of the cluster."""

    def kill_node(self, node: int | str) -> None:
        """Kill a node, named by its number or its id."""

    def restart_node(self, node: int | str) -> None:
        """Start a node again."""


class ClusterRoutes:
    """Adds its routes to those of an nsqlookupd.

    Args:
        listed_lookupds: gives the answer to /listlookup.
        is_leader: called to know whether this one takes administrative calls.
    """

    def __init__(
        self,
        state: ClusterState,
        lookup: Lookup,
        coordinator: Coordinator,
        balancer: Balancer,
        cluster: Administration,
        listed_lookupds: Callable[[], dict[str, Any]],
        is_leader: Callable[[], bool],
    ) -> None:
        self._state = state
        self._lookup = lookup
        self._coordinator = coordinator
        self._balancer = balancer
        self._cluster = cluster
        self._listed_lookupds = listed_lookupds
        self._is_leader = is_leader

    def add_to(self, router: Router) -> None:
        """Add all routes."""
        router.add("GET", "/cluster/stats", self._cluster_stats)
        router.add("POST", "/cluster/node/remove", self._remove_node)
        router.add("POST", "/cluster/upgrade/begin", lambda request: self._upgrade(request, True))
        router.add("POST", "/cluster/upgrade/done", lambda request: self._upgrade(request, False))
        router.add("POST", "/cluster/balance/topn", lambda request: require_cluster_leader(request, self._is_leader))
        router.add("POST", "/cluster/lookupd/tombstone", self._tombstone_lookupd)
        router.add("POST", "/topic/partition/move", self._move_partition)
        router.add("POST", "/embedded/leader/move", self._move_leader)
        router.add("POST", "/embedded/node/kill", self._kill_node)
        router.add("POST", "/embedded/node/restart", self._restart_node)

    def _cluster_stats(self, request: Request) -> dict[str, Any]:
        if not self._is_leader():
            raise request.refuse(400, NotLeader.code)
        return {"stable": self._coordinator.is_stable, "node_stat_list": self._lookup.node_loads(), "topn_topics": []}

    def _remove_node(self, request: Request) -> None:
        """Whether there is such a node is not looked at."""
        require_cluster_leader(request, self._is_leader)
        self._balancer.empty(request.get("remove_node") or "")

    def _upgrade(self, request: Request, is_upgrading: bool) -> None:
        require_cluster_leader(request, self._is_leader)
        self._state.is_upgrading = is_upgrading

    def _tombstone_lookupd(self, request: Request) -> None:
        node = request.get("node")
        if not node:
            raise request.refuse(400, "MISSING_ARG_NODE")
        tombstones = self._state.lookupd_tombstones
        if request.get("restore"):
            if node not in tombstones:
                raise request.refuse(404, _NO_LOOKUPD)
            tombstones.remove(node)
        elif all(node != each["ID"] for each in self._listed_lookupds()["lookupdnodes"]):
            raise request.refuse(404, _NO_LOOKUPD)
        else:
            tombstones.add(node)

    def _move_partition(self, request: Request) -> None:
        topic, number = topic_of(request), _partition(request)
        origin, target = request.get("move_from") or "", request.get("move_to") or ""
        if origin == target:
            raise request.refuse(400, SAME_NODE)
        if self._state.partition(topic, number) is None:
            raise request.refuse(400, NO_TOPIC)
        require_cluster_leader(request, self._is_leader)
        with refusing(request):
            self._coordinator.require_stable()
            is_leader = request.get("move_leader") == "true"
            if is_leader:  # the move of a replica checks itself
                self._coordinator.moves.check(topic, number, origin, target, is_leader=True)
            self._coordinator.moves.move(topic, number, origin, target, is_leader=is_leader)

    def _move_leader(self, request: Request) -> None:
        with refusing(request):
            self._coordinator.moves.move_leader(topic_of(request), _partition(request))

    def _kill_node(self, request: Request) -> None:
        with refusing(request):
            self._cluster.kill_node(_node(request))

    def _restart_node(self, request: Request) -> None:
        with refusing(request):
            self._cluster.restart_node(_node(request))


def require_cluster_leader(request: Request, is_leader: Callable[[], bool], status: int = 400) -> None:
    """Refuse a request to an nsqlookupd that does not lead; other routes of the real server say it in other words."""
    if not is_leader():
        raise request.refuse(status, "Not nsqlookup leader")


@contextmanager
def refusing(request: Request, status: int = 400) -> Iterator[None]:
    """Refuse a request with the text of a ClusterError."""
    try:
        yield
    except ClusterError as error:
        raise request.refuse(status, str(error)) from error


def topic_of(request: Request) -> str:
    """The topic that a request names. Refuses the request."""
    topic = required(request, "topic")
    if not topic:
        raise request.refuse(400, "MISSING_ARG_TOPIC")
    return topic


def _partition(request: Request) -> int:
    value = request.get("partition")
    if not value:
        raise request.refuse(400, "MISSING_ARG_TOPIC_PARTITION")
    try:
        number = parse_integer(value.encode())
    except ValueError:
        number = -1
    if not 0 <= number < MAX_PARTITION:
        raise request.refuse(400, "INVALID_ARG_TOPIC_PARTITION_NUM")
    return number


def _node(request: Request) -> int | str:
    node = required(request, "node")
    return int(node) if node.isdecimal() else node
