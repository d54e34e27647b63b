"""Names of NSQ for what has a name in AMQP."""

from __future__ import annotations

import re
from hashlib import blake2b

EPHEMERAL = "#ephemeral"
"""Ends the name of a topic or channel that nsqd keeps in memory only, and deletes when nobody uses it any more."""

MAX_LENGTH = 64
"""Of a topic's or a channel's name, the suffix included (nsqio/nsq: internal/protocol/names.go)."""

_ALLOWED = re.compile(r"[.a-zA-Z0-9_-]+")
_DIGEST_BYTES = 6


def nsq_name(name: str, is_ephemeral: bool = False) -> str:
    """A legal name of a topic or channel: ``name`` itself if that is one.

    Else other characters become ``_``, what is too long is cut off, and a digest of the whole name follows, so that
    no two names are mapped to one.
    """
    suffix = EPHEMERAL if is_ephemeral else ""
    if _ALLOWED.fullmatch(name) and len(name) + len(suffix) <= MAX_LENGTH:
        return name + suffix
    digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).hexdigest()
    beginning = re.sub(r"[^.a-zA-Z0-9_-]", "_", name)[: MAX_LENGTH - len(suffix) - len(digest) - 1]
    return f"{beginning}-{digest}{suffix}"


def queue_topic(queue: str) -> str:
    """The topic of a queue. That of a queue for replies to remote control ends with its consumer."""
    return nsq_name(queue, is_ephemeral=is_reply_queue(queue))


def exchange_topic(exchange: str, is_ephemeral: bool) -> str:
    """The topic of an exchange whose messages go to each queue that is bound to it."""
    return nsq_name(f"exchange.{exchange}", is_ephemeral)


def reply_queue(exchange: str, routing_key: str) -> str | None:
    """The queue that kombu binds to an exchange for replies; None if this is none (kombu: pidbox.py, Mailbox)."""
    is_for_replies = exchange.startswith("reply.") and exchange.endswith(".pidbox")
    return f"{routing_key}.{exchange}" if is_for_replies else None


def is_reply_queue(queue: str) -> bool:
    """Whether a queue is one that ``reply_queue`` gives."""
    return ".reply." in queue and queue.endswith(".pidbox")
