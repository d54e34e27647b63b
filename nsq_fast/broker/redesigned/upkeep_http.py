"""The HTTP routes of a node that are for those who look after it (youzan/nsq: nsqdserver/http.go).

What they would do to files or memory of the real server, and what needs no doing here, is checked and left.
"""

from __future__ import annotations

import gc
from typing import Any

from nsq_fast.broker.go_integer import parse_integer
from nsq_fast.broker.http.debug import add_debug_routes, check_block_rate
from nsq_fast.broker.http.router import Request, Router
from nsq_fast.errors import ServerError

from .log_level import set_log_level
from .node import Node
from .targets import find_named, find_partition, refusing

_HOURS = 22
"""So many hours of figures /message/historystats has."""


class UpkeepRoutes:
    """Adds its routes to those of a node."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def add_to(self, router: Router) -> None:
        """Add all routes."""
        router.add("POST", "/loglevel/set", set_log_level)
        router.add("GET", "/serverstats", self._server_stats)
        router.add("GET", "/message/stats", self._message_stats)
        router.add("GET", "/message/historystats", self._history_stats)
        router.add("PUT", "/delayqueue/enable", _check_query)
        router.add("PUT", "/filemeta_writer/enable", _check_query)
        router.add("GET", "/delayqueue/backupto", self._back_up_delayed)
        router.add("POST", "/topic/cleanunused", _check_query)
        router.add("POST", "/topic/greedyclean", self._clean_greedily)
        router.add("POST", "/topic/fixdata", self._fix_data)
        add_runtime_routes(router)
        router.add("POST", "/debug/freememory", _free_memory)

    def _server_stats(self, request: Request) -> dict[str, Any]:
        return {
            "version": self._node.options.version,
            "health": "OK" if self._node.error is None else f"NOK - {self._node.error}",
            "start_time": int(self._node.started_at),
            "server_pub_failed": sum(partition.failed_count for partition in self._node.partitions),
        }

    def _message_stats(self, request: Request) -> str | None:
        """A text for people; the real server shows more of its inside."""
        partition, name = find_named(request, self._node)
        channel = partition.channels.get(name)
        if channel is None:
            return None
        counts = f"inflight {channel.in_flight_count}, req {channel.requeue_count}, deferred: {len(channel.deferred)}"
        place = f"confirmed: {channel.confirmed.position} of {partition.log.end}"
        return f"topic {partition.topic} channel {name} \n{counts}\n{place}\n"

    def _history_stats(self, request: Request) -> dict[str, Any]:
        topic, number = request.get("topic") or "", request.get("partition") or ""
        if not topic and not number:
            rows = [
                {"topic_name": partition.topic, "topic_partition": str(partition.number), "hourly_pub_size": 0}
                for partition in self._node.partitions
                if partition.leader == self._node.id
            ]
            return {"node_hourly_pub_size_stats": rows or None}
        try:
            parsed = parse_integer(number.encode())
        except ValueError as error:
            if topic and number:
                raise request.refuse(400, "INVALID_REQUEST") from error
            parsed = 0
        with refusing(request, status=404):
            self._node.find(topic, parsed)
        return {"hourly_pub_size": [0] * _HOURS}

    def _back_up_delayed(self, request: Request) -> None:
        topic = request.get("topic") or ""
        try:
            self._node.find(topic, parse_integer((request.get("partition") or "").encode()))
        except ValueError as error:
            raise request.refuse(400, "INVALID_REQUEST") from error
        except ServerError as error:
            raise request.refuse(404, error.code) from error
        raise request.refuse(400, "No delayed queue on this topic")

    def _clean_greedily(self, request: Request) -> None:
        find_partition(request, self._node)

    def _fix_data(self, request: Request) -> None:
        find_partition(request, self._node)


def add_runtime_routes(router: Router) -> None:
    """Add what servers of both kinds have for their runtime."""
    add_debug_routes(router)
    router.add("PUT", "/debug/setblockrate", check_block_rate)


def _check_query(request: Request) -> None:
    request.get("")


def _free_memory(request: Request) -> None:
    gc.collect()
