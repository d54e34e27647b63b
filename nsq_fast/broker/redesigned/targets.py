"""What a request to a node is about: the partition and the channel that it names.

youzan/nsq: internal/http_api/topic_channel_args.go; nsqdserver/http.go, getExistingTopicChannelFromQuery.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from nsq_fast.broker.go_integer import parse_integer
from nsq_fast.broker.http.router import Request
from nsq_fast.errors import ServerError
from nsq_fast.names import is_valid_name

from .channel import PartitionChannel
from .node import NO_PARTITION, Node
from .state import Partition


class Target(NamedTuple):
    """A channel of a partition that the node leads."""

    partition: Partition
    channel: PartitionChannel


@contextmanager
def refusing(request: Request, *, status: int = 400) -> Iterator[None]:
    """Refuse a request with the code of a ServerError."""
    try:
        yield
    except ServerError as error:
        raise request.refuse(status, error.code) from error


def topic_of(request: Request) -> str:
    """The topic that a request names. Refuses the request."""
    return _name_of(request, "topic")


def channel_of(request: Request) -> str:
    """The channel that a request names. Refuses the request."""
    return _name_of(request, "channel")


def _name_of(request: Request, kind: str) -> str:
    name = request.get(kind)
    if not name:
        raise request.refuse(400, f"MISSING_ARG_{kind.upper()}")
    if not is_valid_name(name):
        raise request.refuse(400, f"INVALID_ARG_{kind.upper()}")
    return name


def find_partition(request: Request, node: Node) -> Partition:
    """The partition that a request names, or the default one of its topic. Refuses the request."""
    return _find(request, node, topic_of(request), _number_of(request))


def find_named(request: Request, node: Node) -> tuple[Partition, str]:
    """The partition, and the name of the channel that a request names. Refuses the request."""
    topic, number = topic_of(request), _number_of(request)
    channel = channel_of(request)
    return _find(request, node, topic, number), channel


def find_led(request: Request, node: Node) -> tuple[Partition, str]:
    """As ``find_named``, and the node must lead the partition."""
    partition, channel = find_named(request, node)
    require_leader(request, node, partition)
    return partition, channel


def find_channel(request: Request, node: Node) -> Target:
    """The channel that a request names, whether the node leads its partition or not. Refuses the request."""
    partition, name = find_named(request, node)
    channel = partition.channels.get(name)
    if channel is None:
        raise request.refuse(404, "CHANNEL_NOT_FOUND")
    return Target(partition, channel)


def find_target(request: Request, node: Node) -> Target:
    """As ``find_channel``, and the node must lead the partition."""
    target = find_channel(request, node)
    require_leader(request, node, target.partition)
    return target


def require_leader(request: Request, node: Node, partition: Partition) -> None:
    """Refuse the request unless the node leads the partition."""
    with refusing(request):
        node.require_leader(partition)


def _number_of(request: Request) -> int:
    try:
        return parse_integer((request.get("partition") or str(NO_PARTITION)).encode())
    except ValueError as error:
        raise request.refuse(400, str(error)) from error


def _find(request: Request, node: Node, topic: str, number: int) -> Partition:
    with refusing(request, status=404):
        return node.find(topic, node.default_partition(topic) if number == NO_PARTITION else number)
