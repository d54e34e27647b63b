"""The journalled reader: between their FIN and Spark's commit, messages are kept in files of ours.

It is for channels that cannot be read again: those of the original NSQ, and
those that other consumers share.
"""

from __future__ import annotations

from .stream import JournalBatchReader, JournalStreamReader

__all__ = ["JournalBatchReader", "JournalStreamReader"]
