"""The report without Spark: the same figures, computed by DuckDB in this process. Needs no Java.

``records`` reads the logs into a table, ``queries`` makes lives and violations of it, ``figures`` takes the figures.
"""

from __future__ import annotations

from .figures import local_figures as local_figures
