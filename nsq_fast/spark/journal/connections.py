"""The connections of one task: how the first is opened, and when there are more."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from ssl import SSLError

from gevent import sleep

from nsq_fast.errors import ConnectFailed, ConnectionLost, ProtocolError, ServerError

from .connection import JournalConnection
from .quota import Quota

CONNECT_PATIENCE = 10.0
"""Seconds for which an unreachable server is retried; then the slot stays empty."""
_CONNECT_PAUSE = 0.2


class Connections:
    """In the order in which they were opened; those that are lost stay among them.

    Args:
        open_one: opens a connection. Raises ConnectFailed, or the server's refusal.
        quota: of the task; each connection is granted its share.
        most: of them there may be.
    """

    def __init__(self, open_one: Callable[[], JournalConnection], quota: Quota, most: int) -> None:
        self._open_one = open_one
        self._quota = quota
        self._most = most
        self._opened: list[JournalConnection] = []

    def __iter__(self) -> Iterator[JournalConnection]:
        return iter(self._opened)

    def __len__(self) -> int:
        return len(self._opened)

    def working(self) -> list[JournalConnection]:
        """Those from which messages are to come, or whose messages are being written."""
        return [each for each in self._opened if each.outstanding or each.work]

    def open_first(self) -> None:
        """Open one. Raises ConnectFailed after `CONNECT_PATIENCE`, or the server's refusal."""
        until = time.monotonic() + CONNECT_PATIENCE
        while True:
            try:
                self._add()
                return
            except (ConnectFailed, ServerError) as error:
                if time.monotonic() > until or not is_passing(error):
                    raise
            sleep(_CONNECT_PAUSE)

    def open_more(self, wanted: int) -> None:
        """So many in all, or fewer: one is enough, and a server that has refused one is not asked again."""
        wanted = min(wanted, self._most)
        try:
            while self._quota.left and not self._quota.is_over and len(self._opened) < wanted:
                self._add()
        except (ConnectFailed, ServerError):
            self._most = len(self._opened)

    def _add(self) -> None:
        connection = self._open_one()
        self._opened.append(connection)
        with contextlib.suppress(ConnectionLost):
            self._quota.grant(connection)


def is_passing(error: BaseException) -> bool:
    """Whether the server is merely not there now, or leads no more, as opposed to settings that are wrong."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ServerError):
            return cause.retriable
        if isinstance(cause, (ProtocolError, ValueError, SSLError)):
            return False
        cause = cause.__cause__
    return True
