"""PySpark without Python data sources (3.5): a DataFrame is published, and read again as a batch of either reader."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

ROWS = 10_000


def main() -> None:
    """Fail unless all rows arrive, and come back."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    from nsq_fast import NsqdHTTPClient
    from nsq_fast.broker import BrokerProcess, ClusterProcess

    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    with BrokerProcess() as broker, tempfile.TemporaryDirectory() as journal:
        with NsqdHTTPClient(*broker.nsqd.http) as client:
            client.create_topic("rows")
            client.create_channel("rows", "spark")
        check(spark, str(broker.lookupd.http), {"consume": True, "journal": journal})
    with ClusterProcess(nodes=1, lookupds=1) as cluster:
        cluster.create_topic("rows", 2, 1, multi_part=True, channels=["spark"])
        check(spark, str(cluster.lookupds[0].http), {"minPartitions": 4})
    spark.stop()


def check(spark: Any, lookupd: str, options: dict[str, Any]) -> None:
    from nsq_fast.spark import foreach_batch_sink, read_batch

    given = {"topic": "rows", "lookupd_http_addresses": lookupd}
    foreach_batch_sink(**given)(spark.range(0, ROWS, 1, 2).selectExpr("cast(id as string) body"), 0)
    rows = read_batch(spark, channel="spark", columns="body,timestamp", **given, **options)
    for _ in range(2):
        found = rows.selectExpr("count(*)", "count(distinct body)", "count(timestamp)").first()
        if tuple(found) != (ROWS, ROWS, ROWS):
            sys.exit(f"{found} of {ROWS} rows came back")


if __name__ == "__main__":
    main()
