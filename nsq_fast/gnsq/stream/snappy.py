"""Snappy, in its framing format."""

from __future__ import annotations

from typing import Any

from nsq_fast.runtime import SnappyLayer

from .compression import CompressionSocket


class SnappySocket(CompressionSocket):
    """A socket with snappy."""

    def __init__(self, socket: Any) -> None:
        super().__init__(socket, SnappyLayer())
