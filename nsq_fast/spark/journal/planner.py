"""From an offset to the tasks of its batch: which server each slot reads from now. For the driver."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from nsq_fast.names import Address
from nsq_fast.spark.discovery import NO_ANSWER, TopicServers
from nsq_fast.spark.options import SourceOptions

from .backlogs import Backlogs
from .plan import Depth, Offset, parse_source, plan_rows, plan_slots, source_of, topic_of
from .query import About, QueryJournal
from .slot import Slot

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


def make_slots(
    options: SourceOptions, journal: QueryJournal, offset: Offset, backlogs: Backlogs, run: str
) -> list[Slot]:
    """The tasks of a batch. A slot whose partition nobody leads has no address."""
    topics = {topic_of(name) for name in offset.slots}
    servers = dict.fromkeys(topics, _UNKNOWN)
    if len(journal.seals(offset.batch)) < len(offset.slots):
        for topic in topics:
            with contextlib.suppress(*NO_ANSWER):  # what is in the journal needs no server
                servers[topic] = backlogs.servers(topic)
    return [
        _slot(options, journal, offset.batch, servers[topic_of(name)], run, number, name, rows)
        for number, name, rows in offset.numbered()
    ]


def _slot(
    options: SourceOptions,
    journal: QueryJournal,
    batch: int,
    servers: TopicServers,
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
        path=journal.batch(batch).path,
        number=number,
        name=name,
        rows=rows,
        topic=topic_of(name) or options.topic,
        channel=options.channel,
        connection=options.connection.replace(extend_support=True) if servers.has_ext else options.connection,
        address=address,
        partition=source if isinstance(source, int) else None,
        is_redesigned=servers.is_redesigned,
        object_store=options.object_store,
        suspects=journal.suspects.storage.path if options.suppress_duplicates else None,
        run=run,
    )
