"""What the TCP and HTTP servers of an nsqd need of its state, original or redesigned."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

from nsq_fast.broker.options import NsqdOptions


class Host(ABC):
    """The state behind the faces of an nsqd.

    Attributes:
        options: replaced as a whole by ``set_options``.
        clients: every TCP connection.
        started_at: seconds since the epoch.
        error: the last error of the disk, until a write succeeds again.
    """

    def __init__(self, options: NsqdOptions) -> None:
        self.options = options
        self.clients: set[Any] = set()
        self.started_at = time.time()
        self.error: Exception | None = None

    @abstractmethod
    def start(self) -> None:
        """Begin to work."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect everybody and write down where everything is."""

    @abstractmethod
    def kill(self) -> None:
        """Stop as SIGKILL would: nothing more is written."""

    def set_options(self, **changes: Any) -> None:
        """Change options; those of topics that exist already stay as they were. Raises ConfigError."""
        self.options = self.options.replace(**changes)
