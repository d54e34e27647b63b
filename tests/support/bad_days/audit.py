"""Whether the servers have what was answered OK: what they have a client has lost, and what they have not, a server."""

from __future__ import annotations

from collections.abc import Iterable

from nsq_fast.client.admin import LookupdHTTPClient, NsqdHTTPClient
from nsq_fast.errors import HttpError, NsqError

from .records import Row


def gone(lookupd: str, topic: str, stored: Iterable[Row]) -> list[Row]:
    """Those messages that the leaders of a topic do not have any more.

    ``stored`` are rows of publishes that were answered OK. Each is looked for by its
    id; another message may have that by now, so its trace id has to be the one that
    it was published with.
    """
    with LookupdHTTPClient.from_url(lookupd) as client:
        leaders = client.lookup(topic, metainfo=True)["partitions"]
    clients = {
        int(number): NsqdHTTPClient(node["broadcast_address"], node["http_port"]) for number, node in leaders.items()
    }
    try:
        return [row for row in stored if not _has(clients[row.partition], topic, row)]
    finally:
        for each in clients.values():
            each.close()


def _has(nsqd: NsqdHTTPClient, topic: str, row: Row) -> bool:
    query = {"topic": topic, "partition": row.partition, "search_mode": "id", "search_pos": row.internal_id}
    try:
        found = nsqd.call_json("GET", "/message/get", **query)
    except HttpError:
        return False
    except NsqError as error:
        raise AssertionError(f"{nsqd} does not say whether it has {row}") from error
    return int(found["trace_id"]) == row.key << 40 | row.number
