"""A stream that cannot be read, and says why when Spark first calls it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from nsq_fast.errors import NsqError

from .plain_errors import plain_errors


class RefusedStreamReader(DataSourceStreamReader):
    """Raises ``error``. An error of ``streamReader`` itself would be hidden by one of Spark's own: it calls ``stop``
    of the reader that it did not get (pyspark 4.0 to 4.3: ``python_streaming_source_runner.py``, ``main``)."""

    def __init__(self, error: NsqError) -> None:
        self.error = error

    def initialOffset(self) -> dict[str, Any]:
        """Raises."""
        self._refuse()

    def latestOffset(self, start: Any = None, limit: Any = None) -> dict[str, Any]:
        """Raises."""
        self._refuse()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Raises."""
        self._refuse()

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Raises."""
        self._refuse()

    @plain_errors
    def _refuse(self) -> NoReturn:
        raise self.error
