"""Deflate, under the name that gnsq gave it."""

from __future__ import annotations

from typing import Any

from nsq_fast.runtime import DeflateLayer

from .compression import CompressionSocket


class DefalteSocket(CompressionSocket):
    """A socket with raw deflate of the given level."""

    def __init__(self, socket: Any, level: int) -> None:
        super().__init__(socket, DeflateLayer(level))
