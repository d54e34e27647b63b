"""What can be started and stopped, by calls or by a ``with``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TypeVar

T = TypeVar("T", bound="Startable")


class Startable(ABC):
    """A server, or several. A ``with`` starts it, and stops it at its end whatever happened inside."""

    @abstractmethod
    def start(self) -> None:
        """Start it, and return when it serves."""

    @abstractmethod
    def stop(self) -> None:
        """Stop it, saving what there is a data path for."""

    def __enter__(self: T) -> T:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
