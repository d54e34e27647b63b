"""The trace log of a task: a file of its own in a folder that many tasks share."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from contextlib import suppress
from types import TracebackType

from nsq_fast.runtime import LOGGER_NAME, TraceLog, log_to_file


class TaskTrace:
    """Writes ``publish-HOST-PID-RANDOM.jsonl`` in a folder; the name begins with a dot until it is complete.

    So whoever watches the folder (Spark's file source does not see names with a dot) reads whole files. A process
    that is killed leaves the name with the dot.

    Args:
        folder: made when it is not there; None: nothing is written.

    Attributes:
        log: for a producer; it is on for all topics if there is a folder.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._handler: logging.Handler | None = None
        self._name = f"publish-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}.jsonl"
        # Not one of logging's own, so that two tasks in a process do not share it.
        self._logger = logging.Logger(LOGGER_NAME, logging.INFO)
        self.log = TraceLog(self._logger)

    def __enter__(self) -> TaskTrace:
        if self._folder is not None:
            os.makedirs(self._folder, exist_ok=True)
            self._handler = log_to_file(self._path(f".{self._name}"), 0, 0, log=self._logger)
            self.log.enable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handler is None:
            return
        self._logger.removeHandler(self._handler)
        self._handler.close()
        path = self._path(f".{self._name}")
        with suppress(FileNotFoundError):
            if os.path.getsize(path):
                os.replace(path, self._path(self._name))
            else:
                os.remove(path)

    def _path(self, name: str) -> str:
        assert self._folder is not None
        return os.path.join(self._folder, name)
