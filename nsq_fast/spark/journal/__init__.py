"""The journalled reader: what was read is kept in files of ours from its FIN until Spark has committed it.

For channels that cannot be read again: those of the original NSQ, and those
that others share.
"""

from __future__ import annotations

from .batch import JournalBatchReader
from .stream import JournalStreamReader

__all__ = ["JournalBatchReader", "JournalStreamReader"]
