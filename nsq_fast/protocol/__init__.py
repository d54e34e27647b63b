"""The protocol without I/O: no sockets, no clock, no gevent. What another client library embeds.

Exactly what ``__all__`` names is public here and described in docs/embedding.md;
the modules behind it are not.
"""

from __future__ import annotations

from nsq_fast._codec import Message, TracedReply, TruncatedMessage
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import LocalProtocolError, MessageTooLarge, ProtocolError, RemoteProtocolError, ServerError

from .dialect import ORIGINAL, REDESIGNED, Dialect
from .rdy import Backoff, BackoffStrategy, ExponentialBackoff, ReconnectDelay
from .session import (
    AnswerFailed,
    Authenticating,
    AuthInfo,
    CommandFailed,
    Disconnected,
    Event,
    Heartbeat,
    Identified,
    MessageSkipped,
    Ready,
    Reply,
    ServerFailed,
    ServerInfo,
    Session,
    Stage,
    UpgradeNeeded,
)
from .topology import LookupAnswer, Nsqd, parse_lookup

SESSION_API_VERSION = 1
"""Goes up when a program written against the names below could break. Additions do not change it."""

__all__ = [
    "ORIGINAL",
    "REDESIGNED",
    "SESSION_API_VERSION",
    "AnswerFailed",
    "AuthInfo",
    "Authenticating",
    "Backoff",
    "BackoffStrategy",
    "CommandFailed",
    "ConnectionConfig",
    "Dialect",
    "Disconnected",
    "Event",
    "ExponentialBackoff",
    "Heartbeat",
    "Identified",
    "LocalProtocolError",
    "LookupAnswer",
    "Message",
    "MessageSkipped",
    "MessageTooLarge",
    "Nsqd",
    "ProtocolError",
    "Ready",
    "ReconnectDelay",
    "RemoteProtocolError",
    "Reply",
    "ServerError",
    "ServerFailed",
    "ServerInfo",
    "Session",
    "Stage",
    "TracedReply",
    "TruncatedMessage",
    "UpgradeNeeded",
    "parse_lookup",
]
