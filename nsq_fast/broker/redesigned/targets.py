"""What a request to a node is about: the partition and the channel that it names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from nsq_fast.broker.http.arguments import required, topic_and_channel
from nsq_fast.broker.http.router import Request
from nsq_fast.errors import NotLeader, ServerError
from nsq_fast.names import is_valid_name

from .arguments import parse_integer
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


def find_partition(request: Request, node: Node) -> Partition:
    """The partition that a request names, or the default one of its topic. Refuses the request."""
    topic = required(request, "topic")
    if not is_valid_name(topic):
        raise request.refuse(400, "INVALID_ARG_TOPIC")
    try:
        number = parse_integer((request.get("partition") or str(NO_PARTITION)).encode())
    except ValueError as error:
        raise request.refuse(400, str(error)) from error
    with refusing(request, status=404):
        return node.find(topic, node.default_partition(topic) if number == NO_PARTITION else number)


def find_led_partition(request: Request, node: Node) -> Partition:
    """As ``find_partition``, and the node must lead it."""
    partition = find_partition(request, node)
    with refusing(request):
        node.require_leader(partition)
    return partition


def find_target(request: Request, node: Node) -> Target:
    """The channel that a request names. Refuses the request."""
    _, name = topic_and_channel(request)
    partition = find_partition(request, node)
    channel = partition.channels.get(name)
    if channel is None:
        raise request.refuse(404, "CHANNEL_NOT_FOUND")
    if partition.leader != node.id:
        raise request.refuse(400, NotLeader.code)
    return Target(partition, channel)
