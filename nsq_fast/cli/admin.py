"""`nsq-fast admin`: what an operator does to topics and channels, on all their partitions; and for other commands what
nsqlookupds of either kind know of a topic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from typing import Any

import click

from nsq_fast.client.admin import (
    ClusterAdmin,
    LookupdHTTPClient,
    PartitionResult,
    Place,
    order_path,
    placed,
    posting,
)
from nsq_fast.errors import HttpError, NsqError

from . import options
from .options import argument, flag, number, say, warnings_shown
from .servers import Servers, named_servers

# Where topics are


class Lookup(ClusterAdmin):
    """The nsqlookupds that are given, and the nsqds of a topic that they know, of either kind of NSQ."""

    def __init__(self, servers: Servers) -> None:
        super().__init__(list(map(str, servers.lookupds)), **servers.of_http)

    @cached_property
    def is_redesigned(self) -> bool:
        """Those of the original do not know each other: what one is told, all must be told. Raises HttpError."""
        try:
            return bool(self._ask(LookupdHTTPClient.list_lookupds))
        except HttpError as error:
            if error.status == 404:
                return False
            raise

    def count_nodes(self) -> int:
        return len(self._ask(LookupdHTTPClient.nodes)["producers"])

    def places(self, topic: str) -> list[Place]:
        """Each nsqd of a topic, or each partition. Raises HttpError when no nsqlookupd knows the topic."""
        return list(placed(self._topology(topic)))

    def places_or_none(self, topic: str) -> list[Place]:
        """The same; none of a topic that is not known."""
        try:
            return self.places(topic)
        except HttpError as error:
            if error.status == 404:
                return []
            raise

    def tell(self, places: Iterable[Place], action: str, topic: str, channel: str | None) -> list[PartitionResult]:
        """POST ``/topic/<action>``, or ``/channel/<action>``, at each of these places."""
        return [self._on_partition(topic, channel, *place, posting(action, channel)) for place in places]

    def order(self, action: str, topic: str, channel: str | None, partition: int | None) -> Iterator[PartitionResult]:
        """The same at each place that the topic has, or at a partition of it. Raises NsqError where there is none, and
        at last where there are partitions that nobody leads."""
        yield from self._post(action, topic, channel, partition)
        found = self._topology(topic)
        if partition is None and not found.is_complete:
            assert found.meta is not None
            others = ", ".join(str(each) for each in range(found.meta.partition_num) if each not in found.partitions)
            raise NsqError(f"{topic}: not done, for want of a leader: partition {others}")

    def tell_all(self, action: str, topic: str, channel: str | None) -> None:
        """Tell all nsqlookupds of the original. Raises HttpError; one that does not know the name is content."""
        path = order_path(action, channel)
        for answer in self._ask_each(lambda lookupd: lookupd.call("POST", path, topic=topic, channel=channel)):
            is_unknown = action == "delete" and isinstance(answer, HttpError) and answer.status == 404
            if isinstance(answer, NsqError) and not is_unknown:
                raise answer

    def tell_leader(self, action: str, topic: str, **query: Any) -> None:
        """Tell the leading nsqlookupd of a redesigned cluster. Raises HttpError."""
        self._post_lookupd(f"/topic/{action}", topic=topic, **query)


# The commands


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


_INSTEAD = {
    "skip": "`empty` drops what waits in a channel, and `pause` keeps what comes",
    "unskip": "nothing is skipped there; `unpause` goes on with delivery",
    "set-offset": "`empty` is the same as an offset at the end; it cannot go back",
    "set-order": "it has no order",
    "rate-limit": "`pause` stops delivery",
}


@command.result_callback()
@click.pass_context
def _report(context: click.Context, results: Results) -> None:
    """Say what became of an order at each of its places, where it has any."""
    order = str(context.invoked_subcommand)
    is_done = True
    for result in results or ():
        is_done &= result.is_done
        where = f"{result.nsqd.tcp}" + ("" if result.partition is None else f" partition {result.partition}")
        error = result.error
        if result.partition is None and _is_missing_route(error):
            cure = _INSTEAD.get(order, "it can create, delete, empty, pause and unpause")
            error = f"an nsqd of the original NSQ has no {order}: {cure}"
        click.echo(f"{where}: {error or 'done'}", err=bool(error))
    if not is_done:
        raise SystemExit(1)


def _is_missing_route(error: str) -> bool:
    """Whether a server does not know the order, rather than the topic or the channel."""
    return error.endswith("NOT_FOUND") and not error.endswith(("TOPIC_NOT_FOUND", "CHANNEL_NOT_FOUND"))


Results = Iterable[PartitionResult] | None
_subcommand = partial(options.command, group=command)
_TOPIC: Any = argument(type=options.topic)
_CHANNEL: Any = argument(type=options.channel)
_MAYBE_CHANNEL: Any = argument(type=options.channel, required=False)
_PARTITION: Any = number(least=0, help="This partition only.")
_THIS_PARTITION: Any = argument(type=click.IntRange(min=0))
_LOOKUP: Any = named_servers(None, lambda servers: Lookup(servers.found()))


# --- on both kinds of servers ----------------------------------------------------------------------------------------


@_subcommand("create")
def _create(
    topic: str = _TOPIC,
    channel: str | None = _MAYBE_CHANNEL,
    partitions: int | None = number(most=1023, help="Partitions of a redesigned topic; 1 if not given."),
    replicas: int | None = number(most=9, help="Replicas of each partition; 1 if not given."),
    ordered: bool = flag(help="Make a redesigned topic that is consumed in order."),
    extend: bool = flag(help="Make a redesigned topic whose messages have headers."),
    lookup: Lookup = _LOOKUP,
) -> Results:
    """Create TOPIC, or CHANNEL of it. An nsqd of the original NSQ creates a topic with its first message, and all
    channels that its nsqlookupds know with it."""
    of_topic = {"--partitions": partitions, "--replicas": replicas, "--ordered": ordered, "--extend": extend}
    given = [name for name, value in of_topic.items() if value]
    if given and (channel or not lookup.is_redesigned):
        what = "a channel" if channel else "a topic of the original NSQ"
        raise click.UsageError(f"{given[0]}: {what} has none")
    if lookup.is_redesigned and not channel:
        marks = {name: True for name, is_wanted in (("orderedmulti", ordered), ("extend", extend)) if is_wanted}
        lookup.tell_leader("create", topic, partition_num=partitions or 1, replicator=replicas or 1, **marks)
        click.echo(f"{topic}: created")
        return None
    if lookup.is_redesigned:
        return lookup.order("create", topic, channel, None)
    lookup.tell_all("create", topic, channel)
    places = lookup.places_or_none(topic)
    if not places:
        say("the nsqlookupds know it; nsqds create it with its first message")
    return lookup.tell(places, "create", topic, channel)


@_subcommand("delete")
def _delete(topic: str = _TOPIC, channel: str | None = _MAYBE_CHANNEL, lookup: Lookup = _LOOKUP) -> Results:
    """Delete TOPIC with its channels, or CHANNEL of it. Messages that wait there are lost."""
    if lookup.is_redesigned and not channel:
        lookup.tell_leader("delete", topic, partition="**")
        click.echo(f"{topic}: deleted")
        return None
    if lookup.is_redesigned:
        return lookup.order("delete", topic, channel, None)
    places = lookup.places(topic)
    # First, or an nsqd that creates the topic in between would have the channel from there again.
    lookup.tell_all("delete", topic, channel)
    return lookup.tell(places, "delete", topic, channel)


def _on_each(name: str, help: str) -> None:
    """A subcommand that every nsqd of a topic is told, or that of one partition."""

    @_subcommand(name, help=help)
    def run(
        topic: str = _TOPIC,
        channel: str | None = _MAYBE_CHANNEL,
        partition: int | None = _PARTITION,
        lookup: Lookup = _LOOKUP,
    ) -> Results:
        if lookup.is_redesigned and not channel:
            raise click.UsageError(f"a redesigned cluster cannot {name} a topic as a whole: name a CHANNEL")
        return lookup.order(name, topic, channel, partition)


_on_each("empty", "Drop the messages that wait in CHANNEL. Without CHANNEL: those in TOPIC that no channel has got.")
_on_each("pause", "Stop delivery of CHANNEL. Without CHANNEL: delivery from TOPIC to all its channels.")
_on_each("unpause", "Start the delivery that `pause` stopped.")


# --- on a redesigned cluster -----------------------------------------------------------------------------------------


def _of_channel(name: str, tell: Callable[..., Results], help: str, **more: Any) -> None:
    """A subcommand about a channel, on all partitions or on one; ``more`` is a further argument."""

    @_subcommand(name, help=help, more=more)
    def run(
        topic: str = _TOPIC,
        channel: str = _CHANNEL,
        partition: int | None = _PARTITION,
        lookup: Lookup = _LOOKUP,
        **given: Any,
    ) -> Results:
        with warnings_shown():  # of a position beyond the end
            return tell(lookup, topic, channel, *given.values(), partition=partition)


_of_channel(
    "skip",
    Lookup.skip,
    "Skip the messages that wait and those that come. They count as finished: the channel loses them.",
)
_of_channel("unskip", Lookup.unskip, "End `skip`: deliver the messages that come from now on.")
_of_channel(
    "set-offset",
    Lookup.set_offset,
    "Continue CHANNEL at POSITION. It is end, offset:BYTES, count:MESSAGES, or timestamp:SECONDS.",
    position=argument(),
)
_of_channel(
    "set-order",
    lambda lookup, topic, channel, order, **where: lookup.set_order(topic, channel, order == "on", **where),
    "Deliver CHANNEL in order (on), or not (off). In order, each partition delivers one message at a time.",
    order=argument(type=click.Choice(["on", "off"])),
)
_of_channel(
    "rate-limit",
    Lookup.limit_rate,
    "Limit how much each partition delivers to CHANNEL: KILOBYTES a second.",
    kilobytes=argument(type=click.IntRange(min=1)),
)


def _of_topic(name: str, tell: Callable[..., None], help: str, **more: Any) -> None:
    """A subcommand about a topic, for the leading nsqlookupd."""

    @_subcommand(name, help=help, more=more)
    def run(topic: str = _TOPIC, lookup: Lookup = _LOOKUP, **given: Any) -> None:
        tell(lookup, topic, **given)


_of_topic(
    "expand",
    Lookup.expand,
    "Expand TOPIC to PARTITIONS partitions. From then on keys go to other partitions.",
    partitions=argument(type=click.IntRange(min=1)),
)
_of_topic(
    "move-leader",
    lambda lookup, topic, partition, node: lookup.move_leader(topic, partition, node),
    "Make NODE the leader of PARTITION. It is a distributed_id, as nsqlookupd lists them.",
    partition=_THIS_PARTITION,
    node=argument(),
)
_of_topic(
    "move-replica",
    lambda lookup, topic, partition, origin, node: lookup.move_replica(topic, partition, origin, node),
    "Move the replica of PARTITION from ORIGIN to NODE. Both are distributed_ids, as nsqlookupd lists them.",
    partition=_THIS_PARTITION,
    origin=argument(),
    node=argument(),
)


@_subcommand("cluster")
def _cluster(lookup: Lookup = _LOOKUP) -> None:
    """Show whether the cluster is stable, and its nodes' load. The exit code is 1 while it is not stable."""
    stats = lookup.stats()
    click.echo("stable" if stats.is_stable else "not stable: moves are refused")
    for node in stats.nodes:
        click.echo(f"{node.address}: load {node.leader_load:.1f} as leader, {node.node_load:.1f} in all")
    if not stats.is_stable:
        raise SystemExit(1)
