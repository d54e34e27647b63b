"""What nsqlookupds of either kind know of a topic, and orders to them and to its nsqds: for `admin` and `demo`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from nsq_fast.errors import HttpError, NsqError
from nsq_fast.protocol.topology import Nsqd, merge, parse_lookup
from nsq_fast.runtime import Endpoint, LookupdHTTPClient, NsqdHTTPClient, PartitionResult

from .options import Security

ResultT = TypeVar("ResultT")
LEADER_TIMEOUT = 30.0
"""Seconds: a topic is created when its nsqds have agreed on it."""


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


def _path(action: str, channel: str | None) -> str:
    return f"/channel/{action}" if channel else f"/topic/{action}"


class Lookup:
    """The nsqlookupds that are given, and the nsqds of a topic that they know. Raises HttpError when none answers.

    Attributes:
        is_redesigned: those of the original do not know each other: what one is told, all must be told.
    """

    def __init__(self, lookupds: Sequence[Endpoint], security: Security) -> None:
        self.lookupds = lookupds
        self._options = security.of_http
        self.is_redesigned = self._first(_lists_lookupds)

    def _clients(self) -> Iterator[LookupdHTTPClient]:
        for lookupd in self.lookupds:
            with LookupdHTTPClient.from_url(str(lookupd), **self._options) as client:
                yield client

    def _first(self, ask: Callable[[LookupdHTTPClient], ResultT]) -> ResultT:
        """The first answer that there is; raises the last HttpError where there is none."""
        failure: HttpError | None = None
        for client in self._clients():
            try:
                return ask(client)
            except HttpError as error:  # noqa: PERF203
                failure = error
        assert failure is not None
        raise failure

    def count_nodes(self) -> int:
        return self._first(lambda client: len(client.nodes()["producers"]))

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
        topology = merge(found)
        places: list[tuple[int | None, Nsqd]] = [*sorted(topology.partitions.items())]
        places += [(None, nsqd) for nsqd in topology.unpartitioned]
        return [Place(*each, self._options) for each in places if partition in (None, each[0])]

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
        leader = self._first(lambda client: client.list_lookupds()).get("lookupdleader") or {}
        if not leader.get("HttpPort"):
            raise NsqError("no nsqlookupd leads just now: try again")
        options = {"timeout": LEADER_TIMEOUT, **self._options}
        with LookupdHTTPClient(leader["NodeIP"], int(leader["HttpPort"]), **options) as client:
            client.call("POST", f"/topic/{action}", topic=topic, **query)


def _lists_lookupds(client: LookupdHTTPClient) -> bool:
    try:
        return bool(client.list_lookupds())
    except HttpError as error:
        if error.status == 404:
            return False
        raise
