"""Errors of ours reach the user as one line, where Spark lets a Python data source do that.

Spark sends the traceback of an exception from a Python worker to the driver,
with our message as its last line. It leaves the traceback out when
``SPARK_HIDE_TRACEBACK`` is in the environment of the worker, which ends after
an exception in any case (pyspark: ``util.py``, ``handle_worker_exception``).
The traceback goes to the log of the worker, at level INFO.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from nsq_fast.errors import NsqError
from nsq_fast.log_events import SPARK_ERROR

logger = logging.getLogger(__name__)

_HIDE = "SPARK_HIDE_TRACEBACK"
_OF_WORKERS = "PYTHON_WORKER_FACTORY_"

P = ParamSpec("P")
T = TypeVar("T")


def plain_errors(call: Callable[P, T]) -> Callable[P, T]:
    """A method that Spark calls in a worker. It does not fit generators: see ``plainly``."""

    @functools.wraps(call)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except NsqError as error:
            _hide_traceback(error)
            raise

    return wrapped


def plainly(items: Iterator[T]) -> Iterator[T]:
    """The items."""
    try:
        yield from items
    except NsqError as error:
        _hide_traceback(error)
        raise


def in_worker() -> bool:
    """Whether Spark has started this process."""
    return any(name.startswith(_OF_WORKERS) for name in os.environ)


def _hide_traceback(error: NsqError) -> None:
    if in_worker():
        logger.info("%s", error, exc_info=True, extra=SPARK_ERROR)
        os.environ[_HIDE] = "1"
