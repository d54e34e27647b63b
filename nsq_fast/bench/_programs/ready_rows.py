"""The format "ready": rows as those of the format "nsq", in Arrow batches that were made before. What is left is Spark.

Options: ``rows`` of a table; of a stream ``rows`` in all, and ``perbatch`` in each micro-batch.
"""

from functools import cache

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition

from nsq_fast.spark.arrow_rows import arrow_schema
from nsq_fast.spark.options import COLUMNS, DEFAULT_COLUMNS
from nsq_fast.spark.versions import SupportsTriggerAvailableNow

BATCH_ROWS = 10_000


class ReadySource(DataSource):
    @classmethod
    def name(cls):
        return "ready"

    def schema(self):
        return ", ".join(f"{name} {COLUMNS[name]}" for name in DEFAULT_COLUMNS)

    def reader(self, schema):
        return ReadyReader(int(self.options["rows"]))

    def streamReader(self, schema):
        return ReadyStreamReader(int(self.options["rows"]), int(self.options["perbatch"]))


class ReadyReader(DataSourceReader):
    def __init__(self, rows):
        self.rows = rows

    def partitions(self):
        return [InputPartition(self.rows)]

    def read(self, partition):
        return ready_batches(partition.value)


class ReadyStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, rows, per_batch):
        self.rows, self.per_batch = rows, per_batch

    def prepareForTriggerAvailableNow(self):
        pass

    def initialOffset(self):
        return {"at": 0}

    def latestOffset(self, start, limit):
        return {"at": min(self.rows, start["at"] + self.per_batch)}

    def partitions(self, start, end):
        return [InputPartition(end["at"] - start["at"])]

    def read(self, partition):
        return ready_batches(partition.value)

    def commit(self, end):
        pass


def ready_batches(rows):
    """So many rows, in batches of ``BATCH_ROWS``; ``rows`` is a multiple of that."""
    for _ in range(rows // BATCH_ROWS):
        yield ready_batch()


@cache
def ready_batch():
    values = {"timestamp": 0, "body": b"x" * 200, "topic": "bench", "attempts": 1}
    rows = {name: [values[name]] * BATCH_ROWS for name in DEFAULT_COLUMNS}
    return pa.RecordBatch.from_pydict(rows, schema=arrow_schema(DEFAULT_COLUMNS))
