"""A byte stream to an nsqd, for code that reads and writes it by itself."""

from __future__ import annotations

from .stream import Stream

__all__ = ["Stream"]
