"""Traces on Spark: from the logs of producers and consumers to tables, and to a report.

    records = read_logs(spark, ["producer.log", "consumers/*.log.gz"])
    write_tables(spark, records, "tables")
    write_report(spark, "tables", "report.html")

``stream_tables`` writes the same tables from a stream. All is Spark SQL: no record passes through Python, and nothing
but figures of the report comes to the driver. ``schema`` says what the tables hold.
"""

from __future__ import annotations

from .records import parse_lines as parse_lines
from .records import read_logs as read_logs
from .records import stream_logs as stream_logs
from .schema import TABLES as TABLES
from .settings import TraceSettings as TraceSettings
from .tables import read_table as read_table
from .tables import write_tables as write_tables

__all__ = ["TABLES", "TraceSettings", "parse_lines", "read_logs", "read_table", "stream_logs", "write_tables"]
