"""Refuse to be the first channel of a topic by accident.

An original nsqd gives the first channel of a topic the whole backlog that the topic gathered while it had none
(nsqio/nsq: nsqd/topic.go, messagePump), and a redesigned cluster takes publishes as soon as there is a channel. What an
ephemeral channel gets, no consumer that subscribes later gets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import click

from nsq_fast.errors import NsqError
from nsq_fast.names import Address
from nsq_fast.protocol.topology import Topology
from nsq_fast.runtime import Endpoint, LookupPoller, NsqdHTTPClient

from .security import Security

_TIMEOUT = 5.0
_ANYWAY = "name a --channel, or say --take-backlog to print all the same"


class _Place(NamedTuple):
    """An nsqd that has a topic, or leads a partition of it."""

    topic: str
    http: str | Endpoint | Address
    partition: int | None = None


def refuse_first_channel(
    topics: Sequence[str],
    nsqds: Sequence[Address],
    nsqds_http: Sequence[Endpoint],
    lookupds: Sequence[Endpoint],
    security: Security,
) -> None:
    """Raise ClickException where a topic exists and has no channel, or where that cannot be seen.

    A topic that does not exist has no backlog, and passes.
    """
    if lookupds:
        places = list(_found_by_lookup(topics, lookupds, security))
    else:
        faces: Iterable[Endpoint | Address] = nsqds_http or [_http_beside(nsqd, security) for nsqd in nsqds]
        places = [_Place(topic, http) for http in faces for topic in topics]
    for place in places:
        if (missed := _missed(place, security)) is not None:
            raise click.ClickException(
                f"topic {place.topic} on nsqd {place.http} has no channel. The channel made here would be its first, "
                f"and no consumer that subscribes later would get {missed}: {_ANYWAY}"
            )


def _found_by_lookup(topics: Sequence[str], lookupds: Sequence[Endpoint], security: Security) -> Iterable[_Place]:
    poller = LookupPoller([str(lookupd) for lookupd in lookupds], security.of_lookup(_TIMEOUT))
    poller.start()
    try:
        for topic in topics:
            yield from _places(topic, poller.wait_topology(topic, _TIMEOUT))
    finally:
        poller.stop()


def _places(topic: str, topology: Topology) -> Iterable[_Place]:
    for partition, nsqd in (*topology.partitions.items(), *((None, nsqd) for nsqd in topology.unpartitioned)):
        if nsqd.http is None:
            raise _unseen(topic, f"nsqlookupd gives no HTTP address of nsqd {nsqd.tcp}")
        yield _Place(topic, nsqd.http, partition)


def _http_beside(nsqd: Address, security: Security) -> Address:
    """The HTTP address of an nsqd of which the TCP address is known: the port above, where the same nsqd answers."""
    http = Address(nsqd.host, nsqd.port + 1)
    try:
        with NsqdHTTPClient(*http, timeout=_TIMEOUT, **security.of_http) as client:
            is_same = client.info().get("tcp_port") == nsqd.port
    except NsqError:
        is_same = False
    if not is_same:
        raise _unseen("the topic", f"nsqd {nsqd} has no HTTP at port {http.port}: name it with --nsqd-http")
    return http


def _missed(place: _Place, security: Security) -> str | None:
    """What later consumers would miss at a place that has the topic and no channel; None when all is well."""
    try:
        with NsqdHTTPClient.from_url(str(place.http), timeout=_TIMEOUT, **security.of_http) as client:
            rows: list[dict[str, Any]] = client.stats(topic=place.topic).get("topics") or []
    except NsqError as error:
        raise _unseen(place.topic, str(error)) from error
    for row in rows:
        is_redesigned = "topic_partition" in row
        if row.get("channels") or (place.partition is not None and row.get("topic_partition") != str(place.partition)):
            continue
        # A new channel of a redesigned topic begins at the end (youzan/nsq: nsqd/diskqueue_reader.go).
        waiting = 0 if is_redesigned else row["depth"]
        return f"its {waiting:,} waiting messages" if waiting else "what is published meanwhile"
    return None


def _unseen(topic: str, reason: str) -> click.ClickException:
    return click.ClickException(f"cannot see whether {topic} has a channel: {reason}; else {_ANYWAY}")
