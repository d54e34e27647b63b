"""Where the ordered part of the demo runs: an embedded cluster of its own, or the redesigned cluster of somebody."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any, NamedTuple
from uuid import uuid4

from gevent import sleep

from nsq_fast.broker import ClusterProcess
from nsq_fast.errors import HttpError, NsqError
from nsq_fast.runtime import LookupdHTTPClient, NsqdHTTPClient

from .orderedjob import CHANNEL
from .security import Security

_PARTITIONS = 3
_READY_TIMEOUT = 120.0
_POLL = 0.2


class Place(NamedTuple):
    """A topic that is ready, and how to give one of its partitions another leader, where that may be done."""

    name: str
    lookupds: tuple[str, ...]
    topic: str
    move: Callable[[], None] | None


def new_topic() -> str:
    """A name that nobody uses."""
    return f"demo-ordered-{uuid4().hex[:8]}"


@contextmanager
def embedded() -> Iterator[Place]:
    """A cluster of three nsqds and two nsqlookupds, in a process of its own."""
    topic = new_topic()
    with ClusterProcess(nodes=3, lookupds=2) as cluster:
        cluster.create_topic(topic, _PARTITIONS, 2, channels=[CHANNEL], ordered=True)
        lookupds = tuple(f"http://{lookupd.http}" for lookupd in cluster.lookupds)
        yield Place("embedded redesigned cluster", lookupds, topic, lambda: cluster.move_leader(topic, 0))


@contextmanager
def existing(lookupds: Sequence[str], security: Security) -> Iterator[Place]:
    """A topic of its own on a cluster in use, deleted afterwards. Leaders stay where they are.

    Raises NsqError when the topic cannot be created, or is not ready in time.
    """
    topic = new_topic()
    with leading_lookupd(lookupds, security) as lookupd:
        nodes = len(lookupd.nodes()["producers"])
        lookupd.create_topic(topic, partition_num=_PARTITIONS, replicator=min(2, nodes), orderedmulti="true")
        try:
            _create_channels(lookupd, topic, security)
            yield Place(f"nsqlookupd {', '.join(lookupds)}", tuple(lookupds), topic, None)
        finally:
            with suppress(NsqError):
                lookupd.delete_topic(topic, partition="**")


def is_redesigned(lookupds: Sequence[str], security: Security) -> bool:
    """Whether these nsqlookupds belong to a redesigned cluster. Raises NsqError when none answers."""
    error: NsqError | None = None
    for address in lookupds:
        with LookupdHTTPClient.from_url(address, **security.of_http) as client:
            try:
                return bool(client.list_lookupds().get("lookupdleader"))
            except HttpError as failed:
                if failed.status == 404:
                    return False
                error = failed
    raise error or NsqError("no nsqlookupd")


@contextmanager
def leading_lookupd(lookupds: Sequence[str], security: Security) -> Iterator[LookupdHTTPClient]:
    """The nsqlookupd that takes administrative calls."""
    with LookupdHTTPClient.from_url(lookupds[0], **security.of_http) as client:
        leader: dict[str, Any] = client.list_lookupds()["lookupdleader"]
    with LookupdHTTPClient(leader["NodeIP"], int(leader["HttpPort"]), timeout=30.0, **security.of_http) as client:
        yield client


def _create_channels(lookupd: LookupdHTTPClient, topic: str, security: Security) -> None:
    """Create the channel on each leader; without one a partition takes no publishes."""
    leaders = _wait_for_partitions(lookupd, topic, "r")
    for partition, node in leaders.items():
        with NsqdHTTPClient(node["broadcast_address"], node["http_port"], **security.of_http) as nsqd:
            nsqd.create_channel(topic, CHANNEL, partition=int(partition))
    _wait_for_partitions(lookupd, topic, "w")


def _wait_for_partitions(lookupd: LookupdHTTPClient, topic: str, access: str) -> dict[str, Any]:
    deadline = monotonic() + _READY_TIMEOUT
    while monotonic() < deadline:
        with suppress(HttpError):  # 404 as long as there is no channel
            partitions: dict[str, Any] = lookupd.lookup(topic, access=access, metainfo=True).get("partitions") or {}
            if len(partitions) == _PARTITIONS:
                return partitions
        sleep(_POLL)
    raise NsqError(f"topic {topic}: not all of its partitions had a leader after {_READY_TIMEOUT:.0f} s")
