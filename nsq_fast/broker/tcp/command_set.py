"""How commands are read from bytes, in all dialects (nsqio/nsq: nsqd/protocol_v2.go, IOLoop and Exec).

A ``CommandSet`` takes all that has been read and executes every whole command in it. A
handler gets the parameters of its line and where the line ended, and returns
where the next command begins, or ``INCOMPLETE`` after it has noted in
``conn.needed`` how many bytes of body it waits for. Ids are taken from fixed
places, never by splitting: a dialect may have any byte in them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from nsq_fast.broker.message import ID_SIZE

from .connection import Connection
from .frames import Dropped, FatalError

INCOMPLETE = -1

_FIN_SIZE = len("FIN ") + ID_SIZE + 1
_FIN_RUN = re.compile(rb"(?:FIN .{%d}\n)+" % ID_SIZE, re.DOTALL)
_FIN_RUN_OF_WORDS = re.compile(rb"(?:FIN [^ \r\n]{%d}\n)+" % ID_SIZE)
_WITH_ID = (b"FIN", b"REQ", b"TOUCH")

Handler = Callable[[Connection, list[bytes], bytes, int], int]


class CommandSet:
    """The commands of a dialect.

    Args:
        handlers: by name.
        finish: executes the FINs of these ids.
        show: an unknown command, from its words, as the error shows it.
        max_line: bytes of the longest line.
        has_binary_ids: whether an id may have any byte in it, also one that ends a line.
    """

    def __init__(
        self,
        handlers: Mapping[bytes, Handler],
        *,
        finish: Callable[[Connection, list[bytes]], None],
        show: Callable[[list[bytes]], str],
        max_line: int,
        has_binary_ids: bool,
    ) -> None:
        self._handlers = handlers
        self._finish = finish
        self._show = show
        self._max_line = max_line
        self._with_id = _WITH_ID if has_binary_ids else ()
        self._fin_run = _fin_run if has_binary_ids else _fin_run_of_words

    def execute(self, conn: Connection, data: bytes) -> int:
        """Execute the whole commands ``data`` begins with; returns the bytes they took. Raises FatalError, Dropped."""
        at, end = 0, len(data)
        conn.needed = 0
        while at < end:
            if data.startswith(b"FIN ", at) and conn.channel is not None:
                ids, stop = self._fin_run(data, at)
                if ids:
                    self._finish(conn, ids)
                    at = stop
                    continue
            has_id = data.startswith(self._with_id, at)
            line_end = _line_end_behind_id(data, at) if has_id else data.find(b"\n", at)
            if (end if line_end < 0 else line_end) - at >= self._max_line:
                raise Dropped("command line is too long")
            if line_end < 0:
                break
            # After a binary id nothing is stripped: the server takes all of it for the next parameter.
            if has_id:
                params = _params_with_id(data[at : line_end + 1])
            else:
                params = _params(data, at, line_end - (data[line_end - 1 : line_end] == b"\r"))
            after = self._handler(conn, params)(conn, params, data, line_end + 1)
            if after == INCOMPLETE:
                conn.needed = max(0, conn.needed - at)
                break
            at = after
        return at

    def _handler(self, conn: Connection, params: list[bytes]) -> Handler:
        name = params[0]
        is_tls_missing = conn.nsqd.options.tls_required != "false" and not conn.upgrades.tls
        if is_tls_missing and name != b"IDENTIFY":
            raise FatalError("E_INVALID", f"cannot {text(name)} in current state (TLS required)")
        handler = self._handlers.get(name)
        if handler is None:
            raise FatalError("E_INVALID", f"invalid command {self._show(params)}")
        return handler


def _fin_run(data: bytes, at: int) -> tuple[list[bytes], int]:
    """The ids of the FINs that follow each other from ``at`` on, and where they end. None if the first is not whole."""
    stop = data.rfind(b"\n", at) + 1
    ids = data[at + 4 : stop - 1].split(b"\nFIN ")
    if len(ids) * _FIN_SIZE != stop - at or max(map(len, ids)) != ID_SIZE:
        run = _FIN_RUN.match(data, at)
        if run is None:
            return [], at
        stop = run.end()
        ids = [data[n : n + ID_SIZE] for n in range(at + 4, stop, _FIN_SIZE)]
    return ids, stop


def _fin_run_of_words(data: bytes, at: int) -> tuple[list[bytes], int]:
    """As ``_fin_run``, where an id ends at a space and at the end of the line."""
    stop = data.rfind(b"\n", at) + 1
    ids = data[at + 4 : stop - 1].split(b"\nFIN ")
    # Ids that nsqd has given are alphanumeric: the only line ends are those behind them, one for each. When these are
    # in their places, each id has its length.
    if b"".join(ids).isalnum() and data[at + _FIN_SIZE - 1 : stop : _FIN_SIZE] == b"\n" * len(ids):
        return ids, stop
    run = _FIN_RUN_OF_WORDS.match(data, at)
    if run is None:
        return [], at
    return [data[n : n + ID_SIZE] for n in range(at + 4, run.end(), _FIN_SIZE)], run.end()


def _line_end_behind_id(data: bytes, at: int) -> int:
    """Where a line with an id ends, -1 if that has not come: the id has a place, whatever stands there.

    A line that ends before that goes on behind it; TOUCH ends with the byte after its id then, whatever that is
    (youzan/nsq: nsqdserver/protocol_v2.go, IOLoop).
    """
    line_end = data.find(b"\n", at)
    is_touch = data.startswith(b"TOUCH", at)
    id_end = at + (6 if is_touch else 4) + ID_SIZE
    if not 0 <= line_end < id_end:
        return line_end
    if is_touch:
        return id_end if len(data) > id_end else -1
    return data.find(b"\n", id_end)


def _params_with_id(line: bytes) -> list[bytes]:
    """The words of such a line, its last byte included; what stands between them is not looked at."""
    name = b"TOUCH" if line.startswith(b"TOUCH") else line[:3]
    id_end = len(name) + 1 + ID_SIZE
    params = [name, line[len(name) + 1 : id_end]]
    if name == b"REQ" and len(line) > id_end + 1:
        params.append(line[id_end + 1 : -1])
    return params


def _params(data: bytes, at: int, end: int) -> list[bytes]:
    """The words of a line."""
    return data[at:end].split(b" ")


def text(data: bytes) -> str:
    """Bytes of a command as they may stand in an error."""
    return data.decode("utf-8", "surrogateescape")


def quote(data: bytes) -> str:
    """Bytes in quotes as the original prints names."""
    parts = []
    for char in text(data):
        if char in '"\\':
            parts.append("\\" + char)
        elif char.isprintable():
            parts.append(char)
        elif "\udc80" <= char <= "\udcff":
            parts.append(f"\\x{ord(char) - 0xDC00:02x}")
        else:
            parts.append(_ESCAPES.get(char) or (f"\\x{ord(char):02x}" if ord(char) < 0x80 else f"\\u{ord(char):04x}"))
    return '"' + "".join(parts) + '"'


_ESCAPES = {"\a": "\\a", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\v": "\\v"}


def size_at(conn: Connection, data: bytes, at: int) -> int | None:
    """The signed size of a body at ``at``; None if it has not come yet."""
    if len(data) < at + 4:
        conn.needed = at + 4
        return None
    return int.from_bytes(data[at : at + 4], "big", signed=True)


def has(conn: Connection, data: bytes, end: int) -> bool:
    """Whether what ends at ``end`` has come whole."""
    if len(data) >= end:
        return True
    conn.needed = end
    return False
