"""The sink as a function for ``foreachBatch``: for PySpark 3.5, which has no Python data sources, and every other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from nsq_fast.log_events import SPARK_BATCH_WRITTEN
from nsq_fast.spark.options import SinkOptions

from .row_keys import keys_of_batch, new_write
from .schema import column_names
from .task import TaskWriter

logger = logging.getLogger(__name__)


def foreach_batch_sink(**options: Any) -> Callable[[Any, int], None]:
    """What ``writeStream.foreachBatch`` takes: it publishes each row of a micro-batch, checked as by the sink.

        df.writeStream.foreachBatch(foreach_batch_sink(topic="orders", lookupd_http_addresses="...")).start()

    Options are those of the sink; write one with a dot as ``**{"nsq.publish_timeout": 30}``. For a batch that is no
    stream: ``foreach_batch_sink(...)(df, 0)``. Raises ConfigError for the options at once, and for the columns when
    called; the error of a task otherwise. The guarantee is the sink's: at least once.
    """
    parsed = SinkOptions.parse({name.lower(): _text(value) for name, value in options.items()})

    def write(frame: Any, batch: int) -> None:
        names = column_names(frame.schema, topic=parsed.topic, key_strategy=parsed.producer.key_strategy)
        write_name = new_write()

        def publish(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            keys = keys_of_batch(write_name) if parsed.idempotence_key else None
            report = TaskWriter(parsed, names, keys).write(iter(batches))
            yield pa.record_batch({"rows": pa.array([report.rows], pa.int64())})

        tasks = frame.mapInArrow(publish, "rows long").collect()
        logger.info(
            "batch-%d: %d rows by %d tasks",
            batch,
            sum(task.rows for task in tasks),
            len(tasks),
            extra=SPARK_BATCH_WRITTEN,
        )

    return write


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
