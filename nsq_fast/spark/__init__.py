"""NSQ as a source and a sink of PySpark: ``spark.read``, ``readStream``, ``write`` and ``writeStream`` of format "nsq".

    nsq_fast.spark.register(spark)
    spark.readStream.format("nsq").option("topic", "orders").option("channel", "spark")...

Spark finds the format by itself too, where the package is installed, through
the module ``pyspark_nsq``. It needs the extra ``nsq-fast[spark]``: importing
this package does not, using a name of it does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .extra import names_of_extra

if TYPE_CHECKING:
    from .lag import lags as lags
    from .options import SinkOptions as SinkOptions
    from .options import SourceOptions as SourceOptions
    from .sink.foreach import foreach_batch_sink as foreach_batch_sink
    from .source import NsqDataSource as NsqDataSource
    from .workers import check_workers as check_workers

_HOME = {
    "NsqDataSource": "source",
    "check_workers": "workers",
    "foreach_batch_sink": "sink.foreach",
    "lags": "lag",
    "SinkOptions": "options",
    "SourceOptions": "options",
}

__all__ = ["register", *_HOME]

__getattr__ = names_of_extra(__name__, _HOME)


def register(spark: Any) -> None:
    """Make the format "nsq" known to a session, one of Spark Connect too. A second call for a session has no effect.

    Raises ConfigError when the Python that Spark starts for its workers has no nsq_fast, and says what to set.
    """
    source = __getattr__("NsqDataSource")
    __getattr__("check_workers")(spark)
    try:
        spark.dataSource.register(source)
    except Exception as error:  # of 4.0 and 4.1, which had found the format by itself
        if "DATA_SOURCE_ALREADY_EXISTS" not in str(error):
            raise


def __dir__() -> list[str]:
    return sorted(__all__)
