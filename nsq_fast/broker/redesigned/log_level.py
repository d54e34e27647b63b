"""How much the servers log, changed while they run (youzan/nsq: internal/levellogger, and doSetLogLevel of both)."""

from __future__ import annotations

import logging

from nsq_fast.broker.go_integer import parse_integer
from nsq_fast.broker.http.router import Request

DEFAULT = 2
_LEVELS = (logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG)


def apply_log_level(level: int) -> None:
    """Log from a level of the server's on: 0 is errors, 1 warnings, 2 what happens, 3 and more all there is."""
    logging.getLogger("nsq_fast.broker").setLevel(_LEVELS[max(0, min(level, len(_LEVELS) - 1))])


def set_log_level(request: Request) -> None:
    """POST /loglevel/set, which counts for all servers of the process."""
    level = request.get("loglevel")
    if not level:
        raise request.refuse(400, "MISSING_ARG_LEVEL")
    try:
        apply_log_level(parse_integer(level.encode()))
    except ValueError as error:
        raise request.refuse(400, "BAD_LEVEL_STRING") from error
