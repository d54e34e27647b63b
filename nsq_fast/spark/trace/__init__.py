"""Traces on Spark: from the logs of producers and consumers to tables, and to a report.

    records = read_logs(spark, ["producer.log", "consumers/*.log.gz"])
    write_tables(spark, records, "tables")
    write_report(spark, "tables", "report.html")

``stream_tables`` writes the same tables from a stream. All is Spark SQL: no record passes through Python, and nothing
but figures of the report comes to the driver. ``schema`` says what the tables hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsq_fast.spark.extra import names_of_extra

if TYPE_CHECKING:
    from .figures import figures_of as figures_of
    from .local import local_figures as local_figures
    from .records import parse_lines as parse_lines
    from .records import read_logs as read_logs
    from .records import stream_logs as stream_logs
    from .report import html as html
    from .report import write_report as write_report
    from .schema import TABLES as TABLES
    from .settings import TraceSettings as TraceSettings
    from .shown import Figures as Figures
    from .stream import stream_tables as stream_tables
    from .tables import read_table as read_table
    from .tables import write_tables as write_tables

_HOME = {
    "Figures": "shown",
    "TABLES": "schema",
    "TraceSettings": "settings",
    "figures_of": "figures",
    "html": "report",
    "local_figures": "local",
    "parse_lines": "records",
    "read_logs": "records",
    "read_table": "tables",
    "stream_logs": "records",
    "stream_tables": "stream",
    "write_report": "report",
    "write_tables": "tables",
}

__all__ = list(_HOME)

__getattr__ = names_of_extra(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted(__all__)
