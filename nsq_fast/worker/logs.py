"""Log records of a worker, on stderr: the supervisor and its processes write them in the same way."""

from __future__ import annotations

import logging
import os

from nsq_fast.config import WorkerConfig
from nsq_fast.logs import NO_EVENT, JsonFormatter, make_handler

TEXT = "%(asctime)s %(levelname)s [%(process)d] %(name)s %(event)s: %(message)s"


def write_logs(config: WorkerConfig) -> None:
    """Have all log records written to stderr, as the options say. Repeats are limited of those of nsq_fast only: what
    a program says is its own business."""
    ours, others = make_handler(config.log_format), make_handler(config.log_format, first=0)
    ours.addFilter(_is_ours)
    others.addFilter(lambda record: not _is_ours(record))
    for handler in (ours, others):
        handler.setFormatter(_formatter(config.log_format))
    logging.basicConfig(handlers=[ours, others], level=config.log_level.upper(), force=True)


def _formatter(log_format: str) -> logging.Formatter:
    if log_format == "json":
        return JsonFormatter({"process": os.getpid()})
    return logging.Formatter(TEXT, defaults={"event": NO_EVENT})


def _is_ours(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] == "nsq_fast"
