"""What nsqlookupds of either kind know of a topic, and orders to them and to its nsqds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from nsq_fast.client.admin import ClusterAdmin, LookupdHTTPClient, NsqdHTTPClient, PartitionResult
from nsq_fast.client.http import Endpoint
from nsq_fast.errors import HttpError
from nsq_fast.protocol.topology import Nsqd, Topology, merge, parse_lookup

from .options import Security


def placed(topology: Topology) -> Iterator[tuple[int | None, Nsqd]]:
    """Each partition with its leader, then the nsqds that hold the topic without partitions."""
    yield from sorted(topology.partitions.items())
    for nsqd in topology.unpartitioned:
        yield None, nsqd


def _path(action: str, channel: str | None) -> str:
    return f"/channel/{action}" if channel else f"/topic/{action}"


class Lookup(ClusterAdmin):
    """The nsqlookupds that are given, and the nsqds of a topic that they know, of either kind of NSQ."""

    def __init__(self, lookupds: Sequence[Endpoint], security: Security) -> None:
        self.lookupds = lookupds
        super().__init__([str(lookupd) for lookupd in lookupds], **security.of_http)

    @cached_property
    def is_redesigned(self) -> bool:
        """Those of the original do not know each other: what one is told, all must be told. Raises HttpError."""
        try:
            return bool(self._ask("list_lookupds"))
        except HttpError as error:
            if error.status == 404:
                return False
            raise

    def count_nodes(self) -> int:
        return len(self._ask("nodes")["producers"])

    def _clients(self) -> Iterator[LookupdHTTPClient]:
        for lookupd in self.lookupds:
            with LookupdHTTPClient.from_url(str(lookupd), **self._options) as client:
                yield client

    def places(self, topic: str, partition: int | None = None) -> list[Place]:
        """Each nsqd of a topic, or each partition. Raises HttpError when no nsqlookupd knows the topic."""
        found, failure = [], None
        for client in self._clients():
            try:
                found.append(parse_lookup(client.call("GET", "/lookup", topic=topic, access="r", metainfo=True)))
            except HttpError as error:  # noqa: PERF203
                failure = error
        if not found and failure is not None:
            raise failure
        return [Place(*each, self._options) for each in placed(merge(found)) if partition in (None, each[0])]

    def places_or_none(self, topic: str) -> list[Place]:
        """The same; none of a topic that is not known."""
        try:
            return self.places(topic)
        except HttpError as error:
            if error.status == 404:
                return []
            raise

    def tell_all(self, action: str, topic: str, channel: str | None) -> None:
        """Tell all nsqlookupds of the original. Raises HttpError; one that does not know the name is content."""
        for client in self._clients():
            try:
                client.call("POST", _path(action, channel), topic=topic, channel=channel)
            except HttpError as error:  # noqa: PERF203
                if action != "delete" or error.status != 404:
                    raise

    def tell_leader(self, action: str, topic: str, **query: Any) -> None:
        """Tell the leading nsqlookupd of a redesigned cluster. Raises HttpError."""
        self._post_lookupd(f"/topic/{action}", topic=topic, **query)


class Place:
    """Where a topic is: an nsqd, and the partition that it leads there; None on an nsqd of the original."""

    def __init__(self, partition: int | None, nsqd: Nsqd, options: dict[str, Any]) -> None:
        self._partition = partition
        self._nsqd = nsqd
        self._options = options

    def call(self, action: str, topic: str, channel: str | None) -> PartitionResult:
        """POST ``/topic/<action>``, or ``/channel/<action>``."""
        if self._nsqd.http is None:
            return PartitionResult(self._partition, self._nsqd, "lookup does not name its HTTP port")
        try:
            with NsqdHTTPClient(*self._nsqd.http, **self._options) as client:
                client.call("POST", _path(action, channel), topic=topic, channel=channel, partition=self._partition)
        except HttpError as error:
            return PartitionResult(self._partition, self._nsqd, str(error))
        return PartitionResult(self._partition, self._nsqd)
