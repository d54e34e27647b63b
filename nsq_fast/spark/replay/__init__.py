"""The replayable reader: a batch is a range of offsets of a redesigned cluster, and can be read again at any time."""

from .batch import FilteringBatchReader, ReplayBatchReader
from .stream import ReplayStreamReader

__all__ = ["FilteringBatchReader", "ReplayBatchReader", "ReplayStreamReader"]
