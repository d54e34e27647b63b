"""For tests of the replayable reader: topics of a redesigned cluster, filled and asked over HTTP, without gevent."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from nsq_fast._codec import mpub_body

if TYPE_CHECKING:
    from nsq_fast.broker import ClusterProcess

ACCEPT = {"Accept": "application/vnd.nsq; version=1.0"}
HTTP_TIMEOUT = 10.0


class Topic:
    """One topic. ``lookupd`` is an HTTP address."""

    def __init__(self, name: str, lookupd: str) -> None:
        self.name = name
        self.lookupd = lookupd

    @property
    def options(self) -> dict[str, str]:
        return {"topic": self.name, "channel": "spark", "lookupd_http_addresses": self.lookupd}

    def fill(self, count: int, partitions: Sequence[int] = (0, 1), label: str = "m", size: int = 0) -> list[bytes]:
        """Publish so many messages, unlike all others if the label is, to the partitions in turn; their bodies."""
        bodies = [f"{label}-{number:07d}".encode().ljust(size, b".") for number in range(count)]
        for place, partition in enumerate(partitions):
            own = bodies[place :: len(partitions)]
            for first in range(0, len(own), 1000):
                self.publish(partition, own[first : first + 1000])
        return bodies

    def publish(self, partition: int, bodies: Iterable[bytes]) -> None:
        self.call(partition, "POST", "/mpub", bytes(mpub_body(list(bodies))), binary="true")

    def stats(self, partition: int) -> dict[str, Any]:
        """The row of a partition, as its leader shows it."""
        rows = self.call(partition, "GET", "/stats", format="json")["topics"]
        found: dict[str, Any] = next(row for row in rows if row["topic_partition"] == str(partition))
        return found

    def channels(self, partition: int) -> dict[str, dict[str, Any]]:
        return {row["channel_name"]: row for row in self.stats(partition)["channels"]}

    def call(self, partition: int, method: str, path: str, body: bytes | None = None, **query: str) -> Any:
        """Ask the leader of a partition about this topic."""
        leader = self.leader(partition)
        asked = urllib.parse.urlencode({"topic": self.name, "partition": partition, **query})
        return ask(f"{leader['broadcast_address']}:{leader['http_port']}{path}?{asked}", method, body)

    def leader(self, partition: int) -> dict[str, Any]:
        found: dict[str, Any] = ask(f"{self.lookupd}/lookup?topic={self.name}&access=r")["partitions"][str(partition)]
        return found

    def leading_node(self, cluster: ClusterProcess, partition: int = 0) -> int:
        return [nsqd.tcp.port for nsqd in cluster.nsqds].index(self.leader(partition)["tcp_port"])


MakeTopic = Callable[..., Topic]
"""See ``make_topic`` of the conftest."""


def ask(target: str, method: str = "GET", body: bytes | None = None) -> Any:
    """The JSON of an HTTP reply; None when there is none."""
    data = body if body is not None or method == "GET" else b""
    request = urllib.request.Request(f"http://{target}", data, ACCEPT, method=method)
    with urllib.request.urlopen(request, timeout=HTTP_TIMEOUT) as reply:
        answer = reply.read()
    return json.loads(answer) if answer.startswith((b"{", b"[")) else None
