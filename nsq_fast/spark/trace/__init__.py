"""Traces on Spark: from the logs of producers and consumers to tables, and to a report.

    records = read_logs(spark, ["producer.log", "consumers/*.log.gz"])
    write_tables(spark, records, "tables")
    write_report(spark, "tables", "report.html")

``stream_tables`` writes the same tables from a stream. All is Spark SQL: no record passes through Python, and nothing
but figures of the report comes to the driver. ``schema`` says what the tables hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsq_fast.spark import names_of_extra

if TYPE_CHECKING:
    from .local import local_figures as local_figures
    from .page import html as html
    from .page import write_report as write_report
    from .queries import figures_of as figures_of
    from .queries import parse_lines as parse_lines
    from .queries import read_logs as read_logs
    from .queries import read_table as read_table
    from .queries import stream_logs as stream_logs
    from .queries import write_tables as write_tables
    from .schema import TABLES as TABLES
    from .schema import Figures as Figures
    from .schema import TraceSettings as TraceSettings
    from .stream import stream_tables as stream_tables

_HOME = {
    "Figures": "schema",
    "TABLES": "schema",
    "TraceSettings": "schema",
    "figures_of": "queries",
    "html": "page",
    "local_figures": "local",
    "parse_lines": "queries",
    "read_logs": "queries",
    "read_table": "queries",
    "stream_logs": "queries",
    "stream_tables": "stream",
    "write_report": "page",
    "write_tables": "queries",
}

__all__ = list(_HOME)

if not TYPE_CHECKING:
    __getattr__ = names_of_extra(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted(__all__)
