"""What the driver gives one task of the journalled reader to do."""

from __future__ import annotations

from dataclasses import dataclass, field

from pyspark.sql.datasource import InputPartition

from nsq_fast.config import ConnectionConfig
from nsq_fast.names import Address
from nsq_fast.spark.options import ObjectStore

from .segment import Head


@dataclass
class Slot(InputPartition):
    """What a task is to do. Pickled.

    Attributes:
        path: where the files of the batch lie.
        number: of the slot.
        rows: how many messages at most.
        address: of the nsqd; None when nobody leads the partition now.
        suspects: where the suspects lie; None to let them pass.
        object_store: where both are, when they are not files.
        run: which run of the query this is.
    """

    path: str
    number: int
    name: str
    rows: int
    topic: str
    channel: str
    connection: ConnectionConfig
    address: Address | None
    partition: int | None = None
    is_redesigned: bool = False
    suspects: str | None = None
    object_store: ObjectStore = field(default_factory=ObjectStore)
    run: str = ""

    def head(self) -> Head:
        """What the heads of its segments have in common."""
        return Head(run=self.run, nsqd=str(self.address), partition=self.partition, is_redesigned=self.is_redesigned)
