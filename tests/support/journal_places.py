"""Places in the work of a task of the journalled reader, at which tests hold or fail it; what processes do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from nsq_fast.errors import JournalTaken
from nsq_fast.spark.journal.collect import Collector
from nsq_fast.spark.journal.files import open_storage
from nsq_fast.spark.options import ObjectStore


class Placed(Collector):
    """Calls ``at(place)`` before and after it claims a segment, finishes its messages, and seals the slot."""

    connections, windows = 2, 1  # segments are numbered alike, however slow the server is

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


def stand(task: Any, place: str, test: Connection, environment: Mapping[str, str]) -> None:
    """Work on a task up to a place, say so to the test, and go on when it says so; what it gets then is the error."""
    os.environ.update(environment)

    to_come = [place]

    class Standing(Placed):
        def at(self, place: str) -> None:
            if place in to_come:
                to_come.remove(place)
                test.send(place)
                test.recv()

    try:
        Standing(task).run()
    except Exception as error:
        test.send(type(error).__name__)


def race(path: str, store: ObjectStore, name: str, test: Connection, environment: Mapping[str, str]) -> None:
    """Claim the first segment of each of 40 slots, against another process; how many it got."""
    os.environ.update(environment)
    storage = open_storage(path, store)
    test.send("ready")
    test.recv()
    won = 0
    for slot in range(40):
        with suppress(JournalTaken):
            storage.claim(f"s{slot}-0", [name.encode()])
            won += 1
    test.send(won)
