"""`nsq-fast admin`: what an operator does to topics and channels, on all their partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import click

from nsq_fast.errors import HttpError, NsqError
from nsq_fast.protocol.topology import Nsqd, merge, parse_lookup
from nsq_fast.runtime import ClusterAdmin, Endpoint, LookupdHTTPClient, NsqdHTTPClient, PartitionResult

from . import options
from .options import Security, security_options

Decorated = Callable[..., Any]
ResultT = TypeVar("ResultT")


class _Admin(click.Group):
    """Explains what a server of the original NSQ answers to an order that it does not know."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HttpError as error:
            if error.status == 404 and "/listlookup" in error.url:
                text = f"{error.url}: this nsqlookupd is of the original NSQ, which has neither partitions nor leaders"
                raise click.ClickException(text) from error
            raise


@click.group("admin", cls=_Admin, short_help="Create, delete, empty, pause; move leaders, set offsets.")
def command() -> None:
    """Administer topics and channels, found by nsqlookupd.

    What is done to a topic or a channel is done on each of its nsqds, or partitions, or on one partition. The exit code
    is 1 when a server refuses.
    """


def _of_channel(name: str, help: str, *arguments: Decorated) -> Callable[[Decorated], click.Command]:
    """A subcommand about a channel: with its topic, its channel, a partition, and the arguments named."""

    def decorate(function: Decorated) -> click.Command:
        def run(
            lookupds: Sequence[Endpoint],
            security: Security,
            topic: str,
            channel: str,
            partition: int | None,
            **rest: Any,
        ) -> None:
            _report(function(_admin(lookupds, security), topic, channel, partition, **rest), name)

        channel = click.argument("channel", type=options.channel, metavar="CHANNEL")
        partition = click.option("--partition", type=click.IntRange(min=0), help="This partition only.")
        return _subcommand(name, help, run, channel, *arguments, partition)

    return decorate


def _subcommand(name: str, help: str, run: Decorated, *parts: Decorated) -> click.Command:
    """A subcommand about a topic, with these arguments and options, and those that say which servers are meant."""
    topic = click.argument("topic", type=options.topic, metavar="TOPIC")
    decorated: Any = run
    for part in reversed([topic, *parts, options.lookupd_http_option(), security_options()]):
        decorated = part(decorated)
    made: click.Command = command.command(name, help=help)(decorated)
    return made


def _admin(lookupds: Sequence[Endpoint], security: Security) -> ClusterAdmin:
    _, lookupds = options.find_servers([], lookupds, None)
    options.require_reachable("nsqlookupd", lookupds)
    return ClusterAdmin([str(lookupd) for lookupd in lookupds], **security.of_http)


def _report(results: Sequence[PartitionResult], order: str) -> None:
    for result in results:
        where = f"{result.nsqd.tcp}" + ("" if result.partition is None else f" partition {result.partition}")
        error = result.error
        if result.partition is None and _is_missing_route(error):
            cure = _INSTEAD.get(order, "it can create, delete, empty, pause and unpause")
            error = f"an nsqd of the original NSQ has no {order}: {cure}"
        click.echo(f"{where}: {error or 'done'}", err=bool(error))
    if not all(result.is_done for result in results):
        raise SystemExit(1)


_INSTEAD = {
    "skip": "`empty` drops what waits in a channel, and `pause` keeps what comes",
    "unskip": "nothing is skipped there; `unpause` goes on with delivery",
    "set-offset": "`empty` is the same as an offset at the end; it cannot go back",
    "set-order": "it has no order",
    "rate-limit": "`pause` stops delivery",
}


def _is_missing_route(error: str) -> bool:
    """Whether a server does not know the order, rather than the topic or the channel."""
    return error.endswith("NOT_FOUND") and not error.endswith(("TOPIC_NOT_FOUND", "CHANNEL_NOT_FOUND"))


# --- on both kinds of servers ----------------------------------------------------------------------------------------


class _Place:
    """Where a topic is: an nsqd, and the partition that it leads there; None on an nsqd of the original."""

    def __init__(self, partition: int | None, nsqd: Nsqd, options: dict[str, Any]) -> None:
        self._partition = partition
        self._nsqd = nsqd
        self._options = options

    def call(self, action: str, topic: str, channel: str | None) -> PartitionResult:
        """POST ``/topic/<action>``, or ``/channel/<action>``."""
        if self._nsqd.http is None:
            return PartitionResult(self._partition, self._nsqd, "lookup does not name its HTTP port")
        path = f"/channel/{action}" if channel else f"/topic/{action}"
        try:
            with NsqdHTTPClient(*self._nsqd.http, **self._options) as client:
                client.call("POST", path, topic=topic, channel=channel, partition=self._partition)
        except HttpError as error:
            return PartitionResult(self._partition, self._nsqd, str(error))
        return PartitionResult(self._partition, self._nsqd)


class _Servers:
    """The nsqlookupds that are given, and the nsqds of a topic that they know."""

    def __init__(self, lookupds: Sequence[Endpoint], security: Security) -> None:
        _, self._lookupds = options.find_servers([], lookupds, None)
        options.require_reachable("nsqlookupd", self._lookupds)
        self._options = security.of_http
        # The lookupds of the original do not know each other: what they are told, all must be told.
        self.is_redesigned = self._first(_lists_lookupds)

    def _clients(self) -> Iterator[LookupdHTTPClient]:
        for lookupd in self._lookupds:
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

    def places(self, topic: str, partition: int | None = None) -> list[_Place]:
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
        return [_Place(*each, self._options) for each in places if partition in (None, each[0])]

    def tell_lookupds(self, action: str, topic: str, channel: str | None) -> None:
        """Tell all nsqlookupds of the original. Raises HttpError; one that does not know the name is content."""
        for client in self._clients():
            path = f"/channel/{action}" if channel else f"/topic/{action}"
            try:
                client.call("POST", path, topic=topic, channel=channel)
            except HttpError as error:
                if action != "delete" or error.status != 404:
                    raise

    def tell_leader(self, action: str, topic: str, **query: Any) -> None:
        """Tell the leading nsqlookupd of a redesigned cluster. Raises HttpError."""
        leader = self._first(lambda client: client.list_lookupds()).get("lookupdleader") or {}
        if not leader.get("HttpPort"):
            raise NsqError("no nsqlookupd leads just now: try again")
        with LookupdHTTPClient(leader["NodeIP"], int(leader["HttpPort"]), **self._options) as client:
            client.call("POST", f"/topic/{action}", topic=topic, **query)


def _lists_lookupds(client: LookupdHTTPClient) -> bool:
    try:
        return bool(client.list_lookupds())
    except HttpError as error:
        if error.status == 404:
            return False
        raise


def _of_either(name: str, help: str, *arguments: Decorated) -> Callable[[Decorated], click.Command]:
    """A subcommand about a topic, or about a channel where one is named."""

    def decorate(function: Decorated) -> click.Command:
        def run(lookupds: Sequence[Endpoint], security: Security, **rest: Any) -> None:
            function(_Servers(lookupds, security), **rest)

        channel = click.argument("channel", type=options.channel, metavar="[CHANNEL]", required=False)
        return _subcommand(name, help, run, channel, *arguments)

    return decorate


@_of_either(
    "create",
    "Create TOPIC, or CHANNEL of it. An nsqd of the original creates a topic with its first message, and then has all"
    " channels that its nsqlookupds know.",
    click.option("--partitions", type=click.IntRange(1, 1023), help="Of a redesigned topic; 1 if not given."),
    click.option("--replicas", type=click.IntRange(1, 9), help="Of each partition; 1 if not given."),
    click.option("--ordered", is_flag=True, help="A redesigned topic that is consumed in order."),
    click.option("--extend", is_flag=True, help="A redesigned topic whose messages have headers."),
)
def _create(
    servers: _Servers,
    topic: str,
    channel: str | None,
    partitions: int | None,
    replicas: int | None,
    ordered: bool,
    extend: bool,
) -> None:
    of_topic = {"--partitions": partitions, "--replicas": replicas, "--ordered": ordered, "--extend": extend}
    given = [name for name, value in of_topic.items() if value]
    if given and (channel or not servers.is_redesigned):
        what = "a channel" if channel else "a topic of the original NSQ"
        raise click.UsageError(f"{given[0]}: {what} has none")
    if not servers.is_redesigned:
        servers.tell_lookupds("create", topic, channel)
        places = _places_or_none(servers, topic)
        _report([place.call("create", topic, channel) for place in places], "create")
        if not places:
            click.echo("the nsqlookupds know it; nsqds create it with its first message", err=True)
    elif channel:
        _report([place.call("create", topic, channel) for place in servers.places(topic)], "create")
    else:
        query = {"partition_num": partitions or 1, "replicator": replicas or 1}
        query |= {"orderedmulti": True} if ordered else {}
        servers.tell_leader("create", topic, **query, **({"extend": True} if extend else {}))
        click.echo(f"{topic}: created")


@_of_either("delete", "Delete TOPIC with its channels, or CHANNEL of it; messages that wait are lost.")
def _delete(servers: _Servers, topic: str, channel: str | None) -> None:
    if servers.is_redesigned and not channel:
        servers.tell_leader("delete", topic, partition="**")
        click.echo(f"{topic}: deleted")
        return
    places = servers.places(topic)
    if not servers.is_redesigned:
        # First, or an nsqd that creates the topic in between would have the channel from there again.
        servers.tell_lookupds("delete", topic, channel)
    _report([place.call("delete", topic, channel) for place in places], "delete")


def _places_or_none(servers: _Servers, topic: str) -> list[_Place]:
    try:
        return servers.places(topic)
    except HttpError as error:
        if error.status == 404:
            return []
        raise


def _on_each(servers: _Servers, action: str, topic: str, channel: str | None, partition: int | None) -> None:
    if servers.is_redesigned and not channel:
        raise click.UsageError(f"a redesigned cluster cannot {action} a topic as a whole: name a CHANNEL")
    places = servers.places(topic, partition)
    if not places:
        which = "" if partition is None else f" that leads partition {partition}"
        raise NsqError(f"{topic}: lookup names no nsqd{which}")
    _report([place.call(action, topic, channel) for place in places], action)


_PARTITION = click.option("--partition", type=click.IntRange(min=0), help="This partition only.")


@_of_either(
    "empty",
    "Drop the messages that wait in CHANNEL; without one, those in TOPIC that no channel has got.",
    _PARTITION,
)
def _empty(servers: _Servers, topic: str, channel: str | None, partition: int | None) -> None:
    _on_each(servers, "empty", topic, channel, partition)


@_of_either("pause", "Stop delivery of CHANNEL; without one, from TOPIC to all its channels.", _PARTITION)
def _pause(servers: _Servers, topic: str, channel: str | None, partition: int | None) -> None:
    _on_each(servers, "pause", topic, channel, partition)


@_of_either("unpause", "Go on with delivery of CHANNEL, or of TOPIC.", _PARTITION)
def _unpause(servers: _Servers, topic: str, channel: str | None, partition: int | None) -> None:
    _on_each(servers, "unpause", topic, channel, partition)


# --- on a redesigned cluster -----------------------------------------------------------------------------------------


@_of_channel("skip", "Count what waits and what comes as done, undelivered: the channel loses those messages.")
def _skip(admin: ClusterAdmin, topic: str, channel: str, partition: int | None) -> Sequence[PartitionResult]:
    return admin.skip(topic, channel, partition=partition)


@_of_channel("unskip", "Deliver what comes from now on.")
def _unskip(admin: ClusterAdmin, topic: str, channel: str, partition: int | None) -> Sequence[PartitionResult]:
    return admin.unskip(topic, channel, partition=partition)


@_of_channel(
    "set-offset",
    "Let the channel go on at POSITION: end, offset:BYTES, count:MESSAGES, or timestamp:SECONDS.",
    click.argument("position", metavar="POSITION"),
)
def _set_offset(
    admin: ClusterAdmin, topic: str, channel: str, partition: int | None, position: str
) -> Sequence[PartitionResult]:
    return admin.set_offset(topic, channel, position, partition=partition)


@_of_channel(
    "set-order",
    "Deliver in order, one message at a time (on), or not (off).",
    click.argument("order", type=click.Choice(["on", "off"])),
)
def _set_order(
    admin: ClusterAdmin, topic: str, channel: str, partition: int | None, order: str
) -> Sequence[PartitionResult]:
    return admin.set_order(topic, channel, order == "on", partition=partition)


@_of_channel(
    "rate-limit",
    "Let each partition deliver at most so many kilobytes a second.",
    click.argument("kilobytes", type=click.IntRange(min=1)),
)
def _rate_limit(
    admin: ClusterAdmin, topic: str, channel: str, partition: int | None, kilobytes: int
) -> Sequence[PartitionResult]:
    return admin.limit_rate(topic, channel, kilobytes, partition=partition)


@command.command("expand")
@click.argument("topic", type=options.topic, metavar="TOPIC")
@click.argument("partitions", type=click.IntRange(min=1))
@options.lookupd_http_option()
@security_options()
def _expand(lookupds: Sequence[Endpoint], security: Security, topic: str, partitions: int) -> None:
    """Give TOPIC more partitions. Keys go to other partitions from then on."""
    _admin(lookupds, security).expand(topic, partitions)


@command.command("move-leader")
@click.argument("topic", type=options.topic, metavar="TOPIC")
@click.argument("partition", type=click.IntRange(min=0))
@click.argument("node")
@options.lookupd_http_option()
@security_options()
def _move_leader(lookupds: Sequence[Endpoint], security: Security, topic: str, partition: int, node: str) -> None:
    """Let NODE, a distributed_id as lookup shows it, lead PARTITION of TOPIC."""
    _admin(lookupds, security).move_leader(topic, partition, node)


@command.command("move-replica")
@click.argument("topic", type=options.topic, metavar="TOPIC")
@click.argument("partition", type=click.IntRange(min=0))
@click.argument("origin")
@click.argument("node")
@options.lookupd_http_option()
@security_options()
def _move_replica(
    lookupds: Sequence[Endpoint], security: Security, topic: str, partition: int, origin: str, node: str
) -> None:
    """Let NODE have what ORIGIN has of PARTITION of TOPIC; both are distributed_ids."""
    _admin(lookupds, security).move_replica(topic, partition, origin, node)


@command.command("cluster")
@options.lookupd_http_option()
@security_options()
def _cluster(lookupds: Sequence[Endpoint], security: Security) -> None:
    """Say whether the cluster is stable, and how much its nodes have to do. The exit code is 1 while it is not."""
    stats = _admin(lookupds, security).stats()
    click.echo("stable" if stats.is_stable else "not stable: moves are refused")
    for node in stats.nodes:
        click.echo(f"{node.address}: load {node.leader_load:.1f} as leader, {node.node_load:.1f} in all")
    if not stats.is_stable:
        raise SystemExit(1)
