"""Logs for programs that run day and night: JSON lines, and repeats that are counted instead of written.

    import logging
    from nsq_fast.logs import make_handler

    logging.basicConfig(level=logging.INFO, handlers=[make_handler("json")])

The loggers of nsq_fast are those below ``nsq_fast``. Each of their records has an ``event``: see ``log_events``.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, TextIO

import msgspec

from ._lazy import get_original
from .errors import ConfigError, printable

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s %(event)s: %(message)s"
NO_EVENT = "-"
"""What ``TEXT_FORMAT`` shows for records that are not of nsq_fast."""

MOST_KINDS = 10_000
"""Kinds of records that a ``RepeatLimiter`` counts at once; what is beyond that passes uncounted."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def make_handler(
    format: str = "text", stream: TextIO | None = None, *, first: int = 10, interval: float = 10.0
) -> logging.Handler:
    """A handler that writes to ``stream`` (None: stderr), and limits repeats.

    Args:
        format: ``text``, one line for each record and more for its stack, or ``json``, one line for each record.
        first, interval: see ``RepeatLimiter``; ``first=0`` limits nothing.

    Raises ConfigError for an argument that is wrong.
    """
    if format not in ("text", "json"):
        raise ConfigError(f"format={format!r}: must be 'text' or 'json'")
    handler = logging.StreamHandler(stream)
    text = logging.Formatter(TEXT_FORMAT, defaults={"event": NO_EVENT})
    handler.setFormatter(JsonFormatter() if format == "json" else text)
    return RepeatLimiter(handler, first, interval) if first else handler


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON.

    Its keys: ``time`` (UTC, ISO 8601, microseconds), ``level``, ``logger``, ``event`` (null for records of others),
    ``message``; ``exception`` and ``stack`` with several lines of text, where there is one; ``repeats``, see
    ``RepeatLimiter``; and what the log call gave as ``extra``, as far as its name is none of these.

    Args:
        fields: added to each line, ``{"service": "billing"}`` say.
    """

    def __init__(self, fields: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._fields = dict(fields or {})

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="microseconds"),
            "level": record.levelname,
            "logger": record.name,
            "event": getattr(record, "event", None),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = record.exc_text or self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        more = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        return _encoded({**self._fields, **more, **line})


def _encoded(line: dict[str, Any]) -> str:
    """JSON, whatever the values are."""
    try:
        return msgspec.json.encode(line, enc_hook=_shown).decode()
    except (TypeError, ValueError, RecursionError):  # half a surrogate; keys that JSON cannot have; a circle
        return msgspec.json.encode({str(key): _plain(value) for key, value in line.items()}).decode()


def _plain(value: object) -> str | int | float | bool | None:
    """A value without parts."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return str(value).encode("utf-8", "backslashreplace").decode()


def _shown(value: object) -> str:
    return printable(repr(value))


@dataclass
class _Kind:
    """Records of one kind since ``began``: how many passed, how many were left out, and the last of those."""

    began: float
    passed: int = 0
    left_out: int = 0
    last: logging.LogRecord | None = None


class RepeatLimiter(logging.Handler):
    """Hands records on to another handler, and counts those that repeat.

    In each interval the first records of a kind pass. The others are left out; at its end the last of them passes,
    with "... and 1,204 more in 10 s" behind its text and their number as its attribute ``repeats``: nothing is left
    out unsaid. Of one kind are records of one logger and level with the same text before its arguments are filled in.
    Records whose message is no string, those of the trace log say, always pass.

    Any thread may log. ``close``, which ``logging`` calls when the program ends, says what has been left out so far.

    Args:
        target: the handler; it is closed together with this one.
        first: how many records of a kind pass in an interval.
        interval: seconds.
        clock: seconds that never go back.

    Raises ConfigError for numbers that are not positive.
    """

    def __init__(
        self,
        target: logging.Handler,
        first: int = 10,
        interval: float = 10.0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value in (("first", first), ("interval", interval)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ConfigError(f"{name}={value!r}: must be a number above 0")
        super().__init__()
        self.formatter = target.formatter
        self._target = target
        self._first = first
        self._interval = interval
        self._clock = clock
        self._begin()

    def setFormatter(self, fmt: logging.Formatter | None) -> None:
        """The target's."""
        self.formatter = fmt
        self._target.setFormatter(fmt)

    def _begin(self) -> None:
        # Native, whatever is patched: records come from native threads, too. Nothing waits while it is held.
        self._lock = get_original("_thread", "allocate_lock")()
        self._process = os.getpid()
        self._kinds: dict[tuple[str, int, str], _Kind] = {}
        self._next_end = float("inf")
        self._is_awaited = False

    def handle(self, record: logging.LogRecord) -> bool:
        """Hand the record on, or count it; the lock is the target's, and only those take it whose record passes."""
        passed = self.filter(record)
        if passed:
            self.emit(passed if isinstance(passed, logging.LogRecord) else record)
        return bool(passed)

    def emit(self, record: logging.LogRecord) -> None:
        """The same, without the filters."""
        if self._process != os.getpid():  # the child of a fork: its parent says what the parent left out
            self._begin()
        if self._clock() >= self._next_end:
            self.report()
        if self._passes(record):
            self._target.handle(record)

    def report(self, is_end: bool = False) -> None:
        """Say what was left out in the intervals that are over; with ``is_end``, in those that are not, too."""
        now = self._clock()
        with self._lock:
            over = {key: kind for key, kind in self._kinds.items() if is_end or now - kind.began >= self._interval}
            for key in over:
                del self._kinds[key]
            self._next_end = min((kind.began + self._interval for kind in self._kinds.values()), default=float("inf"))
        for kind in over.values():
            if kind.last is not None:
                self._target.handle(_summary(kind.last, kind.left_out, now - kind.began))

    def flush(self) -> None:
        """Have the target write what it has."""
        self._target.flush()

    def close(self) -> None:
        """Say what was left out, and close the target."""
        self.report(is_end=True)
        self._target.close()
        super().close()

    def _passes(self, record: logging.LogRecord) -> bool:
        if not isinstance(record.msg, str):
            return True
        key = record.name, record.levelno, record.msg
        with self._lock:
            kind = self._kinds.get(key)
            if kind is None:
                if len(self._kinds) >= MOST_KINDS:
                    return True
                kind = self._kinds[key] = _Kind(self._clock())
                self._next_end = min(self._next_end, kind.began + self._interval)
            if kind.passed < self._first:
                kind.passed += 1
                return True
            kind.left_out += 1
            kind.last = record
            is_first, self._is_awaited = not self._is_awaited, True
        if is_first:
            get_original("_thread", "start_new_thread")(self._report_in_time, ())
        return False

    def _report_in_time(self) -> None:
        """In a native thread, which lives as long as something is left out: report although nothing more comes."""
        sleep = get_original("time", "sleep")
        is_awaited = True
        while is_awaited:
            sleep(self._interval)
            self.report()
            with self._lock:
                is_awaited = self._is_awaited = any(kind.left_out for kind in self._kinds.values())


def _summary(last: logging.LogRecord, count: int, seconds: float) -> logging.LogRecord:
    """The last of the records that were left out, saying how many there were."""
    record = logging.makeLogRecord(vars(last))
    record.msg, record.args = f"{last.getMessage()} ... and {count:,} more in {seconds:.3g} s", ()
    record.repeats = count
    return record
