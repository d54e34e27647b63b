"""Idempotence keys of rows: those of a task that is tried again are the same, so that consumers can drop its copies.

A key names the write, the task and the row's number in the task, and holds a digest of what is published. Without the
digest a task that has other rows at its second attempt (a stage that is not deterministic, a stream that is split
differently after a restart) would publish new messages under keys that consumers know, and they would be lost.
"""

from __future__ import annotations

import json
import secrets
from hashlib import blake2b
from typing import Any

from pyspark import TaskContext

from nsq_fast.errors import ConfigError
from nsq_fast.protocol.idempotence import IDEMPOTENCE_HEADER

_SIZE = 8  # bytes of a name or digest
# What Spark tells each task of a streaming query. apache/spark: MicroBatchExecution, BATCH_ID_KEY; StreamExecution,
# QUERY_ID_KEY.
_QUERY_ID = "sql.streaming.queryId"
_BATCH_ID = "streaming.sql.batchId"


class RowKeys:
    """The keys of the rows of one task.

    Args:
        write: what all attempts at the write have in common, and no other write has.
        task: the number of the task's part of the rows.
    """

    def __init__(self, write: str, task: int) -> None:
        self._prefix = f"{write}-{task}-"

    def add_to(self, fields: dict[str, Any], row: int, body: bytes, tag: str | None) -> None:
        """Put the key of a row into its headers, in place of one that a message had which the row was made of.

        Args:
            row: its number in the task, from 0.
        """
        digest = blake2b(body, digest_size=_SIZE)
        digest.update(json.dumps([fields, tag], sort_keys=True).encode())
        fields[IDEMPOTENCE_HEADER] = f"{self._prefix}{row}-{digest.hexdigest()}"


def new_write() -> str:
    """The name of a write of a batch."""
    return secrets.token_hex(_SIZE)


def keys_of_batch(write: str) -> RowKeys:
    """The keys of the task that runs here, of a write of a batch."""
    return RowKeys(write, _context().partitionId())


def keys_of_stream() -> RowKeys:
    """The same of a micro-batch: a restart of the query from its checkpoint gives them again."""
    context = _context()
    query, batch = (context.getLocalProperty(name) for name in (_QUERY_ID, _BATCH_ID))
    if not query or batch is None:
        raise ConfigError("idempotenceKey=true: this Spark does not tell its tasks which micro-batch they belong to")
    write = blake2b(f"{query}/{batch}".encode(), digest_size=_SIZE).hexdigest()
    return RowKeys(write, context.partitionId())


def _context() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise ConfigError("idempotenceKey=true: there is no task of Spark here whose rows could have keys")
    return context


def check_headers(topic: str, is_ext: bool | None) -> None:
    """Raise ConfigError for a topic whose messages have no headers. ``is_ext``: None where nobody says."""
    if is_ext is False:
        raise ConfigError(
            f"idempotenceKey=true: messages of topic {topic} have no extended headers to hold a key; leave the option"
            " out, or create the topic with extend"
        )
