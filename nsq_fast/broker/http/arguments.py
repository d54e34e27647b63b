"""Query arguments of requests, and how a request is refused that lacks one.

nsqio/nsq: internal/http_api/topic_channel_args.go, GetTopicChannelArgs.
"""

from __future__ import annotations

from nsq_fast.names import is_valid_name

from .router import Request


def required(request: Request, name: str) -> str:
    """A query argument that must be there."""
    value = request.get(name)
    if value is None:
        raise request.refuse(400, f"MISSING_ARG_{name.upper()}")
    return value


def topic_and_channel(request: Request) -> tuple[str, str]:
    """The topic and channel arguments; both must be there and legal."""
    topic = required(request, "topic")
    if not is_valid_name(topic):
        raise request.refuse(400, "INVALID_ARG_TOPIC")
    channel = required(request, "channel")
    if not is_valid_name(channel):
        raise request.refuse(400, "INVALID_ARG_CHANNEL")
    return topic, channel
