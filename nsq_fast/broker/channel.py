"""A channel: a queue of messages, those in flight, those deferred, and the clients that share them."""

from __future__ import annotations

from typing import Any


class Channel:
    name: str
    topic_name: str
    is_ephemeral: bool
    is_paused: bool
    clients: dict[int, Any]  # client.stats() -> dict with the original's JSON names
    message_count: int
    requeue_count: int
    timeout_count: int

    @property
    def depth(self) -> int: ...
    @property
    def backend_depth(self) -> int: ...
    @property
    def in_flight_count(self) -> int: ...
    @property
    def deferred_count(self) -> int: ...
    def pause(self) -> None: ...
    def unpause(self) -> None: ...
    def empty(self) -> None: ...
