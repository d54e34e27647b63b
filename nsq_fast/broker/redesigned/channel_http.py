"""The HTTP routes of a node that are about channels and about single messages (youzan/nsq: nsqdserver/http.go)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nsq_fast.broker.http.arguments import topic_and_channel
from nsq_fast.broker.http.router import Request, Router
from nsq_fast.errors import ServerError

from .arguments import parse_integer
from .channel import PartitionChannel, finish_anywhere
from .log import PARTITION_SHIFT, Record
from .node import Node
from .positions import COUNT, OFFSET, Position, parse_position, sequence_of
from .state import Partition
from .targets import find_led_partition, find_target

_SWITCHES: Mapping[str, Callable[[PartitionChannel], None]] = {
    "pause": lambda channel: channel.set_paused(True),
    "unpause": lambda channel: channel.set_paused(False),
    "skip": lambda channel: channel.set_skipped(True),
    "unskip": lambda channel: channel.set_skipped(False),
    "empty": lambda channel: channel.empty(),
}
_SEARCH_MODES = {"count": COUNT, "virtual_offset": OFFSET}


class ChannelRoutes:
    """Adds its routes to those of a node."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def add_to(self, router: Router) -> None:
        """Add all routes."""
        router.add("GET", "/message/get", self._get_message)
        router.add("POST", "/message/finish", self._finish_message)
        router.add("POST", "/channel/create", self._create_channel)
        router.add("POST", "/channel/delete", self._delete_channel)
        router.add("POST", "/channel/setoffset", self._set_offset)
        router.add("POST", "/channel/setorder", self._set_order)
        router.add("POST", "/channel/ratelimit", self._limit_rate)
        for name, switch in _SWITCHES.items():
            router.add("POST", f"/channel/{name}", self._switch(switch))

    # --- channels ----------------------------------------------------------------------------------------------------

    def _create_channel(self, request: Request) -> None:
        _, name = topic_and_channel(request)
        partition = find_led_partition(request, self._node)
        if partition.meta.disable_channel_auto_create:
            text = f"channel {name} not registered. channel should be initialized before use."
            raise request.refuse(403, text)
        partition.channel(name)

    def _delete_channel(self, request: Request) -> None:
        target = find_target(request, self._node)
        target.partition.delete_channel(target.channel.name)

    def _switch(self, switch: Callable[[PartitionChannel], None]) -> Callable[[Request], None]:
        return lambda request: switch(find_target(request, self._node).channel)

    def _set_offset(self, request: Request) -> None:
        target = find_target(request, self._node)
        body = request.body(self._node.options.max_msg_size, "MSG_TOO_BIG")
        if not body:
            raise request.refuse(406, "MSG_EMPTY")
        try:
            position = parse_position(body.decode("utf-8", "replace"))
        except ValueError as error:
            raise request.refuse(400, str(error)) from error
        try:
            target.channel.set_position(sequence_of(position, target.partition.log))
        except ValueError as error:
            raise request.refuse(500, str(error)) from error

    def _set_order(self, request: Request) -> None:
        target = find_target(request, self._node)
        order = request.get("order")
        if order not in ("true", "false"):
            raise request.refuse(400, "INVALID_OPTION")
        target.channel.set_ordered(order == "true")

    def _limit_rate(self, request: Request) -> None:
        """The limit is checked, and has no effect."""
        find_target(request, self._node)
        try:
            parse_integer((request.get("ratekilobytes") or "").encode())
        except ValueError as error:
            raise request.refuse(400, "INVALID_OPTION") from error

    # --- messages ----------------------------------------------------------------------------------------------------

    def _get_message(self, request: Request) -> dict[str, Any]:
        mode = request.get("search_mode") or ""
        try:
            value = parse_integer((request.get("search_pos") or "").encode(), "ParseInt")
            number = (
                value >> PARTITION_SHIFT if mode == "id" else parse_integer((request.get("partition") or "").encode())
            )
            partition = self._node.find(request.get("topic") or "", number)
        except (ValueError, ServerError) as error:
            raise request.refuse(400, str(error)) from error
        record = self._search(request, partition, mode, value)
        if record is None:
            raise request.refuse(404, "commit log EOF")
        return {
            "id": record.internal_id,
            "trace_id": record.trace_id,
            "body": record.body.decode("utf-8", "replace"),
            "timestamp": record.timestamp,
            "attempts": 0,
            "offset": record.offset,
            "queue_cnt_index": record.sequence + 1,
            "ext": record.header.decode() if request.get("needext") == "true" else "",
        }

    def _search(self, request: Request, partition: Partition, mode: str, value: int) -> Record | None:
        if mode == "id":
            sequence = partition.log.at_id(value)
        elif mode in _SEARCH_MODES:
            sequence = sequence_of(Position(_SEARCH_MODES[mode], value), partition.log)
        else:
            raise request.refuse(400, "search mode should be one of id/count/virtual_offset")
        records = partition.log.read(sequence, 1)
        return records[0] if records else None

    def _finish_message(self, request: Request) -> None:
        target = find_target(request, self._node)
        try:
            internal_id = parse_integer((request.get("msgid") or "").encode(), "ParseInt")
        except ValueError as error:
            raise request.refuse(400, str(error)) from error
        if not finish_anywhere(target.channel, internal_id):
            raise request.refuse(400, "Message ID not in flight")
