"""Places in the work of a task of the journalled reader, at which tests have it held, fail or die."""

from __future__ import annotations

from typing import Any

from nsq_fast.spark.journal.collect import Collector


class Placed(Collector):
    """Calls ``at(place)`` before and after it claims a segment, finishes its messages, and seals the slot."""

    connections, group = 2, 1  # segments are numbered alike, however slow the disk is

    def at(self, place: str) -> object:
        raise NotImplementedError

    def claim(self, index: int, head: Any, columns: Any) -> Any:
        self.at(f"before claim {index}")
        stored = super().claim(index, head, columns)
        self.at(f"after claim {index}")
        return stored

    def finish(self, connection: Any, ids: bytes) -> None:
        if connection.unsure:
            self.at(f"before finish {connection.unsure[-1].number}")
        super().finish(connection, ids)
        if connection.unsure:
            self.at(f"after finish {connection.unsure[-1].number}")

    def seal(self, index: int, head: Any) -> None:
        self.at("before seal")
        super().seal(index, head)
        self.at("after seal")
