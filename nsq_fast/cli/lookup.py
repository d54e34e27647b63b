"""`nsq-fast lookup`: where a topic lives, as all the nsqlookupds together see it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import click
import msgspec

from nsq_fast.names import Address
from nsq_fast.printable import printable
from nsq_fast.protocol.topology import Nsqd, Topology
from nsq_fast.runtime import Endpoint, LookupPoller

from . import console, options
from .security import Security, security_options


@click.command("lookup", short_help="Show where a topic lives.")
@click.argument("topic", type=options.topic, metavar="TOPIC")
@options.lookupd_http_option()
@security_options()
@click.option(
    "--timeout", type=options.duration, metavar="DURATION", default=5.0, show_default=True, help="Limit for an answer."
)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def command(topic: str, lookupds: Sequence[Endpoint], timeout: float, as_json: bool, security: Security) -> None:
    """Show the nsqds that have TOPIC, its partitions where it has any, and its channels.

    The exit code is 1 when no nsqd has it.
    """
    _, lookupds = options.find_servers([], lookupds, None, quiet=as_json)
    options.require_reachable("nsqlookupd", lookupds)
    poller = LookupPoller([str(lookupd) for lookupd in lookupds], security.of_lookup(timeout))
    poller.start()
    try:
        topology = poller.wait_topology(topic, timeout)
    finally:
        poller.stop()
    if as_json:
        click.echo(json.dumps(_as_json(topic, topology)))
    elif topology.is_empty:
        click.echo(f"no nsqd has {topic}", err=True)
    else:
        _show(topic, topology)
    if topology.is_empty:
        raise SystemExit(1)


def _placed(topology: Topology) -> Iterator[tuple[int | None, Nsqd]]:
    """Each partition with its leader, then the nsqds that hold the topic without partitions."""
    yield from sorted(topology.partitions.items())
    for nsqd in topology.unpartitioned:
        yield None, nsqd


def _show(topic: str, topology: Topology) -> None:
    rows = [
        ["" if partition is None else str(partition), str(nsqd.tcp), str(nsqd.http or ""), nsqd.version]
        for partition, nsqd in _placed(topology)
    ]
    output = console.output()
    head = ("partition", "nsqd", "http", "version")
    output.print(console.grid(head, rows, output.width, title=topic, names=2, numbers=False))
    output.print(f"channels: {', '.join(map(printable, topology.channels)) or 'none'}", markup=False)
    if not topology.is_complete:
        output.print("some partitions have no leader now")


def _as_json(topic: str, topology: Topology) -> dict[str, Any]:
    def text(address: Address | None) -> str | None:
        return str(address) if address else None

    nsqds = [
        {"partition": partition, "tcp": text(nsqd.tcp), "http": text(nsqd.http), "version": nsqd.version}
        for partition, nsqd in _placed(topology)
    ]
    meta = msgspec.structs.asdict(topology.meta) if topology.meta else None
    return {"topic": topic, "nsqds": nsqds, "channels": list(topology.channels), "meta": meta}
