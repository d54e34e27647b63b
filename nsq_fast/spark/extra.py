"""Say how to install the extra ``spark`` when a name that needs it is used and it is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nsq_fast._lazy import lazy_names

_MODULES = {"pyspark", "py4j", "pyarrow", "pandas", "numpy", "duckdb"}


def names_of_extra(package: str, home: Mapping[str, str]) -> Callable[[str], Any]:
    """As ``lazy_names``; an ImportError says how to install what is missing of the extra."""
    resolve = lazy_names(package, home)

    def find(name: str) -> Any:
        try:
            return resolve(name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in _MODULES:
                raise
            raise ImportError(_missing(package, error.name or "")) from error

    return find


def _missing(package: str, name: str) -> str:
    if name == "pyspark.sql.datasource":
        import pyspark

        return (
            f"{package} needs PySpark 4.0 or newer for this; PySpark {pyspark.__version__} has no Python data sources:"
            " nsq_fast.spark.foreach_batch_sink writes there, and docs/spark.md says how to read"
        )
    extra = "trace" if name == "duckdb" else "spark"
    return f"{package} needs {name}: pip install 'nsq-fast[{extra}]'"
