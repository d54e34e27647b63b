"""What the broker's state refuses, for its TCP and HTTP servers to put into their words."""

from __future__ import annotations

from nsq_fast.errors import NsqError


class NotFound(NsqError):
    """There is no such topic or channel."""


class Exiting(NsqError):
    """The topic, channel or nsqd is closing, or takes no more clients."""


class NotOwner(NsqError):
    """The message is not in flight, or not with this client."""


class DataPathError(NsqError, OSError):
    """The data path cannot be used, or what is in it cannot be read."""
