"""`nsq-fast admin`: what an operator does to topics and channels, on all their partitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from nsq_fast.client.admin import PartitionResult
from nsq_fast.client.http import Endpoint
from nsq_fast.errors import HttpError, NsqError

from . import options
from .console import warnings_shown
from .options import Security, security_options
from .servers import Lookup

Decorated = Callable[..., Any]


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
    """Administer topics and channels; nsqlookupd says where they are.

    A change of a topic or channel is made on all of its nsqds or partitions, or on the one that --partition names. The
    exit code is 1 when a server refuses.
    """


Subcommand = Callable[[Decorated], click.Command]
_TOPIC = click.argument("topic", type=options.topic, metavar="TOPIC")
_CHANNEL = click.argument("channel", type=options.channel, metavar="CHANNEL")
_MAYBE_CHANNEL = click.argument("channel", type=options.channel, metavar="[CHANNEL]", required=False)
_PARTITION = click.option("--partition", type=click.IntRange(min=0), help="This partition only.")


def _subcommand(name: str, help: str, *parts: Decorated) -> Subcommand:
    """A subcommand with these arguments and options, and those that say which servers are meant.

    Its function gets the nsqlookupds; the results that it returns are reported.
    """

    def decorate(function: Decorated) -> click.Command:
        def run(lookupds: Sequence[Endpoint], security: Security, **rest: Any) -> None:
            _, lookupds = options.find_servers([], lookupds, None)
            results = function(Lookup(lookupds, security), **rest)
            if results is not None:
                _report(results, name)

        decorated: Any = run
        for part in reversed([*parts, options.lookupd_http_option, security_options]):
            decorated = part(decorated)
        made: click.Command = command.command(name, help=help)(decorated)
        return made

    return decorate


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


def _of_either(name: str, help: str, *parts: Decorated) -> Subcommand:
    """A subcommand about a topic, or about a channel where one is named."""
    return _subcommand(name, help, _TOPIC, _MAYBE_CHANNEL, *parts)


@_of_either(
    "create",
    "Create TOPIC, or CHANNEL of it. An nsqd of the original NSQ creates a topic with its first message, and all"
    " channels that its nsqlookupds know with it.",
    click.option(
        "--partitions", type=click.IntRange(1, 1023), help="Partitions of a redesigned topic; 1 if not given."
    ),
    click.option("--replicas", type=click.IntRange(1, 9), help="Replicas of each partition; 1 if not given."),
    click.option("--ordered", is_flag=True, help="Make a redesigned topic that is consumed in order."),
    click.option("--extend", is_flag=True, help="Make a redesigned topic whose messages have headers."),
)
def _create(
    lookup: Lookup,
    topic: str,
    channel: str | None,
    partitions: int | None,
    replicas: int | None,
    ordered: bool,
    extend: bool,
) -> Sequence[PartitionResult] | None:
    of_topic = {"--partitions": partitions, "--replicas": replicas, "--ordered": ordered, "--extend": extend}
    given = [name for name, value in of_topic.items() if value]
    if given and (channel or not lookup.is_redesigned):
        what = "a channel" if channel else "a topic of the original NSQ"
        raise click.UsageError(f"{given[0]}: {what} has none")
    if not lookup.is_redesigned:
        lookup.tell_all("create", topic, channel)
        places = lookup.places_or_none(topic)
        if not places:
            click.echo("the nsqlookupds know it; nsqds create it with its first message", err=True)
        return [place.call("create", topic, channel) for place in places]
    if channel:
        return [place.call("create", topic, channel) for place in lookup.places(topic)]
    query = {"partition_num": partitions or 1, "replicator": replicas or 1}
    query |= {"orderedmulti": True} if ordered else {}
    lookup.tell_leader("create", topic, **query, **({"extend": True} if extend else {}))
    click.echo(f"{topic}: created")
    return None


@_of_either("delete", "Delete TOPIC with its channels, or CHANNEL of it. Messages that wait there are lost.")
def _delete(lookup: Lookup, topic: str, channel: str | None) -> Sequence[PartitionResult] | None:
    if lookup.is_redesigned and not channel:
        lookup.tell_leader("delete", topic, partition="**")
        click.echo(f"{topic}: deleted")
        return None
    places = lookup.places(topic)
    if not lookup.is_redesigned:
        # First, or an nsqd that creates the topic in between would have the channel from there again.
        lookup.tell_all("delete", topic, channel)
    return [place.call("delete", topic, channel) for place in places]


def _on_each(name: str, help: str) -> None:
    """A subcommand that every nsqd of a topic is told, or that of one partition."""

    @_of_either(name, help, _PARTITION)
    def run(lookup: Lookup, topic: str, channel: str | None, partition: int | None) -> Sequence[PartitionResult]:
        if lookup.is_redesigned and not channel:
            raise click.UsageError(f"a redesigned cluster cannot {name} a topic as a whole: name a CHANNEL")
        places = lookup.places(topic, partition)
        if not places:
            which = "" if partition is None else f" that leads partition {partition}"
            raise NsqError(f"{topic}: lookup names no nsqd{which}")
        return [place.call(name, topic, channel) for place in places]


_on_each("empty", "Drop the messages that wait in CHANNEL. Without CHANNEL: those in TOPIC that no channel has got.")
_on_each("pause", "Stop delivery of CHANNEL. Without CHANNEL: delivery from TOPIC to all its channels.")
_on_each("unpause", "Start the delivery that `pause` stopped.")


# --- on a redesigned cluster -----------------------------------------------------------------------------------------


def _of_channel(name: str, help: str, *arguments: Decorated) -> Subcommand:
    """A subcommand about a channel, on all partitions or on one."""
    return _subcommand(name, help, _TOPIC, _CHANNEL, *arguments, _PARTITION)


@_of_channel("skip", "Skip the messages that wait and those that come. They count as finished: the channel loses them.")
def _skip(lookup: Lookup, **where: Any) -> Sequence[PartitionResult]:
    return lookup.skip(**where)


@_of_channel("unskip", "End `skip`: deliver the messages that come from now on.")
def _unskip(lookup: Lookup, **where: Any) -> Sequence[PartitionResult]:
    return lookup.unskip(**where)


@_of_channel(
    "set-offset",
    "Continue CHANNEL at POSITION. It is end, offset:BYTES, count:MESSAGES, or timestamp:SECONDS.",
    click.argument("position", metavar="POSITION"),
)
def _set_offset(
    lookup: Lookup, topic: str, channel: str, partition: int | None, position: str
) -> Sequence[PartitionResult]:
    with warnings_shown():  # of a position beyond the end
        return lookup.set_offset(topic, channel, position, partition=partition)


@_of_channel(
    "set-order",
    "Deliver CHANNEL in order (on), or not (off). In order, each partition delivers one message at a time.",
    click.argument("order", type=click.Choice(["on", "off"])),
)
def _set_order(
    lookup: Lookup, topic: str, channel: str, partition: int | None, order: str
) -> Sequence[PartitionResult]:
    return lookup.set_order(topic, channel, order == "on", partition=partition)


@_of_channel(
    "rate-limit",
    "Limit how much each partition delivers to CHANNEL: KILOBYTES a second.",
    click.argument("kilobytes", type=click.IntRange(min=1)),
)
def _rate_limit(
    lookup: Lookup, topic: str, channel: str, partition: int | None, kilobytes: int
) -> Sequence[PartitionResult]:
    return lookup.limit_rate(topic, channel, kilobytes, partition=partition)


_THIS_PARTITION = click.argument("partition", type=click.IntRange(min=0))


@_subcommand(
    "expand",
    "Expand TOPIC to PARTITIONS partitions. From then on keys go to other partitions.",
    _TOPIC,
    click.argument("partitions", type=click.IntRange(min=1)),
)
def _expand(lookup: Lookup, topic: str, partitions: int) -> None:
    lookup.expand(topic, partitions)


@_subcommand(
    "move-leader",
    "Make NODE the leader of PARTITION. It is a distributed_id, as nsqlookupd lists them.",
    _TOPIC,
    _THIS_PARTITION,
    click.argument("node"),
)
def _move_leader(lookup: Lookup, topic: str, partition: int, node: str) -> None:
    lookup.move_leader(topic, partition, node)


@_subcommand(
    "move-replica",
    "Move the replica of PARTITION from ORIGIN to NODE. Both are distributed_ids, as nsqlookupd lists them.",
    _TOPIC,
    _THIS_PARTITION,
    click.argument("origin"),
    click.argument("node"),
)
def _move_replica(lookup: Lookup, topic: str, partition: int, origin: str, node: str) -> None:
    lookup.move_replica(topic, partition, origin, node)


@_subcommand(
    "cluster",
    "Show whether the cluster is stable, and its nodes' load. The exit code is 1 while it is not stable.",
)
def _cluster(lookup: Lookup) -> None:
    stats = lookup.stats()
    click.echo("stable" if stats.is_stable else "not stable: moves are refused")
    for node in stats.nodes:
        click.echo(f"{node.address}: load {node.leader_load:.1f} as leader, {node.node_load:.1f} in all")
    if not stats.is_stable:
        raise SystemExit(1)
