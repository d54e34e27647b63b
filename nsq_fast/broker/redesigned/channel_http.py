"""The HTTP routes of a node that are about channels and about single messages (youzan/nsq: nsqdserver/http.go)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nsq_fast.broker.go_integer import parse_integer
from nsq_fast.broker.http.router import Request, Router
from nsq_fast.errors import ServerError

from .channel import PartitionChannel, finish_anywhere, finish_deferred, limit_clients
from .log import PARTITION_SHIFT, Record
from .node import Node
from .positions import COUNT, OFFSET, Position, parse_position, sequence_of
from .state import Partition
from .targets import find_channel, find_led, find_named, find_target, require_leader

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
        router.add("POST", "/channel/setclientlimit", self._limit_clients)
        router.add("POST", "/channel/finishmemdelayed", self._finish_delayed)
        router.add("POST", "/channel/requeuedelayed", self._requeue_delayed)
        for name in ("fixconfirmed", "emptydelayed"):
            router.add("POST", f"/channel/{name}", self._check_target)
        for name in ("skipZanTest", "unskipZanTest"):
            router.add("POST", f"/channel/{name}", self._skip_test_messages)
        for name, switch in _SWITCHES.items():
            router.add("POST", f"/channel/{name}", self._switch(switch))

    # --- channels ----------------------------------------------------------------------------------------------------

    def _create_channel(self, request: Request) -> None:
        partition, name = find_led(request, self._node)
        if partition.meta.disable_channel_auto_create:
            text = f"channel {name} not registered. channel should be initialized before use."
            raise request.refuse(403, text)
        partition.channel(name)

    def _delete_channel(self, request: Request) -> None:
        """Nothing happens where there is no such channel."""
        partition, name = find_led(request, self._node)
        if partition.meta.disable_channel_auto_create:
            text = (
                f"topic {partition.topic} has channel auto create disabled. channel {name} cuold not be deleted localy"
            )
            raise request.refuse(403, f"{text} in nsqd.")
        partition.delete_channel(name)

    def _switch(self, switch: Callable[[PartitionChannel], None]) -> Callable[[Request], None]:
        return lambda request: switch(find_target(request, self._node).channel)

    def _check_target(self, request: Request) -> None:
        """There is nothing to do: confirmed positions need no mending, and no queue of delayed messages is on disk."""
        find_target(request, self._node)

    def _skip_test_messages(self, request: Request) -> None:
        """Checked, and without effect: no message is for tests only."""
        partition, name = find_named(request, self._node)
        if not partition.meta.ext:
            raise request.refuse(400, "INVALID_REQUEST")
        if name not in partition.channels:
            raise request.refuse(404, "CHANNEL_NOT_FOUND")

    def _finish_delayed(self, request: Request) -> None:
        finish_deferred(find_target(request, self._node).channel)

    def _requeue_delayed(self, request: Request) -> None:
        """Nothing is to be done: it is about delayed messages on disk, of which there are none."""
        find_target(request, self._node)

    def _set_offset(self, request: Request) -> None:
        target = find_channel(request, self._node)
        body = request.body(self._node.options.max_msg_size, "MSG_TOO_BIG")
        if not body:
            raise request.refuse(406, "MSG_EMPTY")
        try:
            position = parse_position(body.decode("utf-8", "replace"))
        except ValueError as error:
            raise request.refuse(400, str(error)) from error
        require_leader(request, self._node, target.partition)
        try:
            target.channel.set_position(sequence_of(position, target.partition.log))
        except ValueError as error:
            raise request.refuse(500, str(error)) from error

    def _set_order(self, request: Request) -> None:
        target = find_channel(request, self._node)
        order = request.get("order")
        if order not in ("true", "false"):
            raise request.refuse(400, "INVALID_OPTION")
        target.channel.set_ordered(order == "true")

    def _limit_rate(self, request: Request) -> None:
        """The limit is checked, and has no effect."""
        find_channel(request, self._node)
        _integer(request, "ratekilobytes")

    def _limit_clients(self, request: Request) -> None:
        """Of the clients that are there now (youzan/nsq: nsqd/channel.go, SetClientLimitedRdy)."""
        channel = find_channel(request, self._node).channel
        limit_clients(channel, request.get("client_prefix") or "", _integer(request, "ready"))

    # --- messages ----------------------------------------------------------------------------------------------------

    def _get_message(self, request: Request) -> dict[str, Any]:
        mode = request.get("search_mode") or ""
        try:
            value = parse_integer((request.get("search_pos") or "").encode(), "ParseInt")
            number = (
                value >> PARTITION_SHIFT if mode == "id" else parse_integer((request.get("partition") or "").encode())
            )
        except ValueError as error:
            raise request.refuse(400, str(error)) from error
        try:
            partition = self._node.find(request.get("topic") or "", number)
        except ServerError as error:
            raise request.refuse(400, "topic does not exist") from error
        record = self._search(request, partition, mode, value)
        if record is None:
            raise request.refuse(404, "commit log end of file")
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
            try:
                sequence = sequence_of(Position(_SEARCH_MODES[mode], value), partition.log)
            except ValueError as error:
                raise request.refuse(404, str(error)) from error
        else:
            raise request.refuse(400, "search mode should be one of id/count/virtual_offset")
        records = partition.log.read(sequence, 1)
        if not records and mode == "virtual_offset":
            raise request.refuse(500, "INTERNAL_ERROR")  # the real server panics
        return records[0] if records else None

    def _finish_message(self, request: Request) -> None:
        target = find_channel(request, self._node)
        try:
            internal_id = parse_integer((request.get("msgid") or "").encode(), "ParseInt")
        except ValueError as error:
            raise request.refuse(400, "INVALID_REQUEST") from error
        require_leader(request, self._node, target.partition)
        if not finish_anywhere(target.channel, internal_id):
            raise request.refuse(500, "ErrType:7 ErrCode:0 : Message ID not in flight")


def _integer(request: Request, name: str) -> int:
    try:
        return parse_integer((request.get(name) or "").encode())
    except ValueError as error:
        raise request.refuse(400, "INVALID_OPTION") from error
