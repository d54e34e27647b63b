"""`nsq-fast admin`: what an operator does to topics and channels, on all their partitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from nsq_fast.runtime import ClusterAdmin, Endpoint, PartitionResult

from . import options
from .security import Security, security_options

Decorated = Callable[..., Any]


@click.group("admin", short_help="Move leaders, set offsets, pause, skip, expand.")
def command() -> None:
    """Administer topics and channels, found by nsqlookupd.

    What is done to a channel is done on each partition of its topic, or on one. The exit code is 1 when a server
    refuses.
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
            _report(function(_admin(lookupds, security), topic, channel, partition, **rest))

        parts = [
            click.argument("topic", type=options.topic, metavar="TOPIC"),
            click.argument("channel", type=options.channel, metavar="CHANNEL"),
            *arguments,
            click.option("--partition", type=click.IntRange(min=0), help="This partition only."),
            options.lookupd_http_option(),
            security_options(),
        ]
        decorated: Any = run
        for part in reversed(parts):
            decorated = part(decorated)
        made: click.Command = command.command(name, help=help)(decorated)
        return made

    return decorate


def _admin(lookupds: Sequence[Endpoint], security: Security) -> ClusterAdmin:
    _, lookupds = options.find_servers([], lookupds, None)
    options.require_reachable("nsqlookupd", lookupds)
    return ClusterAdmin([str(lookupd) for lookupd in lookupds], **security.of_http)


def _report(results: Sequence[PartitionResult]) -> None:
    for result in results:
        where = f"{result.nsqd.tcp}" + ("" if result.partition is None else f" partition {result.partition}")
        click.echo(f"{where}: {result.error or 'done'}", err=not result.is_done)
    if not all(result.is_done for result in results):
        raise SystemExit(1)


@_of_channel("pause", "Stop delivery.")
def _pause(admin: ClusterAdmin, topic: str, channel: str, partition: int | None) -> Sequence[PartitionResult]:
    return admin.pause(topic, channel, partition=partition)


@_of_channel("unpause", "Go on with delivery.")
def _unpause(admin: ClusterAdmin, topic: str, channel: str, partition: int | None) -> Sequence[PartitionResult]:
    return admin.unpause(topic, channel, partition=partition)


@_of_channel("skip", "Be done with all that waits and all that comes: the channel loses those messages.")
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
