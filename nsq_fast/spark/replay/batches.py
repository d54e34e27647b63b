"""Runs of records, gathered into Arrow batches that are large enough to be cheap for Spark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

import pyarrow as pa

from nsq_fast._frame import join_columns
from nsq_fast.spark.options import SourceOptions
from nsq_fast.spark.schema import to_batch

from .assembly import Run

MAX_ROWS = 10_000
MAX_BYTES = 8 * 1024 * 1024


class Batches:
    """Takes runs in order, gives batches in order. ``is_full``: it should be emptied."""

    def __init__(self, options: SourceOptions, partition: int) -> None:
        self._options = options
        self._partition = partition
        self._runs: list[tuple[Run, str]] = []
        self._rows = self._bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether it holds enough."""
        return self._rows >= MAX_ROWS or self._bytes >= MAX_BYTES

    def add(self, runs: Iterable[Run], nsqd: str) -> None:
        """Runs that were read from an nsqd."""
        for run in runs:
            self._runs.append((run, nsqd))
            self._rows += run.rows
            self._bytes += len(run.columns.body)

    def take(self) -> Iterator[pa.RecordBatch]:
        """All of it; it is empty then."""
        runs, self._runs = self._runs, []
        self._rows = self._bytes = 0
        for (is_whole, nsqd), group in groupby(runs, lambda each: (each[0].is_whole, each[1])):
            parts = [run for run, _ in group]
            if is_whole:
                columns = join_columns([run.columns for run in parts])
                yield self._batch(Run(columns, 0, columns.count), nsqd)
            else:
                yield from (self._batch(run, nsqd) for run in parts)

    def _batch(self, run: Run, nsqd: str) -> pa.RecordBatch:
        return to_batch(
            run.columns,
            self._options.columns,
            self._options.headers_as,
            topic=self._options.topic,
            partition=self._partition,
            nsqd=nsqd,
            is_redesigned=True,
            first=run.first,
            count=run.rows,
        )
