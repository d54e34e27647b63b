"""From an offset to the tasks of its batch: which server each slot reads from now. For the driver."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import HttpError, LookupFailed
from nsq_fast.names import Address
from nsq_fast.spark.discovery import TopicServers
from nsq_fast.spark.options import SourceOptions

from .backlog import Backlog
from .collect import Slot
from .folder import About, JournalFolder
from .plan import Depth, Offset, parse_source, plan_rows, plan_slots, source_of

_UNKNOWN = TopicServers((), {}, None, False)


def about(options: SourceOptions) -> About:
    """What the journal of these options is of."""
    return About(options.topic, options.channel)


def plan_batch(options: SourceOptions, depths: Mapping[str, int], limit: int | None) -> dict[str, int]:
    """The slots of a batch of what waits."""
    return plan_slots(plan_rows(depths, limit), options.min_partitions)


def ready(depths: Mapping[str, Depth]) -> dict[str, int]:
    """What could be read at once."""
    return {source: depth.ready for source, depth in depths.items()}


def make_slots(options: SourceOptions, folder: JournalFolder, offset: Offset, backlog: Backlog, run: str) -> list[Slot]:
    """The tasks of a batch. A slot whose partition nobody leads has no address."""
    servers = _UNKNOWN
    if len(folder.seals(offset.batch)) < len(offset.slots):
        with contextlib.suppress(HttpError, LookupFailed, OSError):  # what is in the journal needs no server
            servers = backlog.servers()
    connection = options.connection
    if servers.has_ext:
        connection = connection.replace(extend_support=True)
    return [
        _slot(options, folder, offset, servers, connection, run, number, name, rows)
        for number, name, rows in offset.numbered()
    ]


def _slot(
    options: SourceOptions,
    folder: JournalFolder,
    offset: Offset,
    servers: TopicServers,
    connection: ConnectionConfig,
    run: str,
    number: int,
    name: str,
    rows: int,
) -> Slot:
    source = parse_source(source_of(name))
    leader = servers.leaders.get(source) if isinstance(source, int) else None
    address: Address | None = leader.tcp if leader else None
    if not isinstance(source, int):
        address = source
    return Slot(
        path=folder.batch_path(offset.batch),
        number=number,
        name=name,
        rows=rows,
        topic=options.topic,
        channel=options.channel,
        connection=connection,
        address=address,
        partition=source if isinstance(source, int) else None,
        is_redesigned=servers.is_redesigned,
        suspects=folder.suspects.folder if options.suppress_duplicates else None,
        run=run,
    )
