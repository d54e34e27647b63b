"""A topic: takes what is published and hands it to its channels."""

from __future__ import annotations

from collections.abc import Iterable

from .channel import Channel


class Topic:
    name: str
    is_ephemeral: bool
    is_paused: bool
    channels: dict[str, Channel]
    message_count: int
    message_bytes: int

    def get_channel(self, name: str) -> Channel:  # creates
        ...

    def existing_channel(self, name: str) -> Channel:  # raises NotFound
        ...

    def delete_channel(self, name: str) -> None:  # raises NotFound
        ...

    def put(self, body: bytes, defer_ms: int = 0) -> None:  # raises Exiting
        ...

    def put_many(self, bodies: Iterable[bytes]) -> None: ...

    @property
    def depth(self) -> int: ...
    @property
    def backend_depth(self) -> int: ...
    def pause(self) -> None: ...
    def unpause(self) -> None: ...
    def empty(self) -> None: ...
