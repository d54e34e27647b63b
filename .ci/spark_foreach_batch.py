"""The sink for foreachBatch with the installed PySpark, 3.5 too: rows of a DataFrame, counted by an embedded nsqd."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Fail unless all rows arrive."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    from nsq_fast.broker import BrokerProcess
    from nsq_fast.client.admin import NsqdHTTPClient
    from nsq_fast.spark import foreach_batch_sink

    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    with BrokerProcess() as broker:
        sink = foreach_batch_sink(topic="rows", lookupd_http_addresses=str(broker.lookupd.http))
        sink(spark.range(0, 10_000, 1, 2).selectExpr("cast(id as string) body"), 0)
        with NsqdHTTPClient(*broker.nsqd.http) as client:
            (topic,) = client.stats("rows")["topics"]
    spark.stop()
    if topic["message_count"] != 10_000:
        sys.exit(f"{topic['message_count']} of 10000 rows arrived")


if __name__ == "__main__":
    main()
