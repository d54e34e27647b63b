"""NSQ as a source and a sink of PySpark: ``spark.read``, ``readStream``, ``write`` and ``writeStream`` of format "nsq".

    nsq_fast.spark.register(spark)
    spark.readStream.format("nsq").option("topic", "orders").option("channel", "spark")...

Spark finds the format by itself too, where the package is installed, through
the module ``pyspark_nsq``. It needs the extra ``nsq-fast[spark]``: importing
this package does not, using a name of it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nsq_fast._lazy import lazy_names

if TYPE_CHECKING:
    from nsq_fast.spark.sink import foreach_batch_sink as foreach_batch_sink

    from .lag import lags as lags
    from .listener import MetricsListener as MetricsListener
    from .options import SinkOptions as SinkOptions
    from .options import SourceOptions as SourceOptions
    from .source import NsqDataSource as NsqDataSource
    from .source import read_batch as read_batch
    from .versions import check_workers as check_workers

_MODULES = {"pyspark", "py4j", "pyarrow", "pandas", "numpy", "duckdb", "prometheus_client"}


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
    extra = {"duckdb": "trace", "prometheus_client": "metrics"}.get(name.partition(".")[0], "spark")
    return f"{package} needs {name}: pip install 'nsq-fast[{extra}]'"


_HOME = {
    "MetricsListener": "listener",
    "NsqDataSource": "source",
    "check_workers": "versions",
    "foreach_batch_sink": "sink",
    "lags": "lag",
    "read_batch": "source",
    "SinkOptions": "options",
    "SourceOptions": "options",
}

__all__ = ["register", *_HOME]

__getattr__: Callable[[str], Any] = names_of_extra(__name__, _HOME)


def register(spark: Any) -> None:
    """Make the format "nsq" known to a session, one of Spark Connect too. A second call for a session has no effect.

    Raises ConfigError when the Python that Spark starts for its workers has no nsq_fast, and says what to set.
    """
    source = __getattr__("NsqDataSource")  # names the extra, where that is missing
    if not hasattr(spark, "dataSource"):
        raise ImportError(
            f"this needs PySpark 4.0 or newer; PySpark {spark.version} has no Python data sources: there"
            " nsq_fast.spark.read_batch reads, and nsq_fast.spark.foreach_batch_sink writes"
        )
    __getattr__("check_workers")(spark)
    try:
        spark.dataSource.register(source)
    except Exception as error:  # of 4.0 and 4.1, which had found the format by itself
        if "DATA_SOURCE_ALREADY_EXISTS" not in str(error):
            raise


def __dir__() -> list[str]:
    return sorted(__all__)
