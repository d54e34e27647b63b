"""How many messages a slot may still ask its server for, and how long it waits for them."""

from __future__ import annotations

from .connection import JournalConnection

MAX_WINDOW = 10_000
"""Most messages in flight on a connection, and so in a segment, where the server's max_rdy_count allows more."""

_FIRST_WAIT = 1.0
_IDLE_WAIT = 0.2
_LAST_WAIT = 0.05


class Quota:
    """The rows of a slot, granted to its connections.

    Attributes:
        is_over: whether nothing more is asked for, as the server has no more, or the disk is too slow.
    """

    def __init__(self, rows: int) -> None:
        self.left = rows
        self.is_over = False

    def grant(self, connection: JournalConnection) -> None:
        """Let a connection ask for as many messages as it may hold."""
        if self.is_over:
            connection.give_up()
        window = min(connection.subscription.info.max_rdy_count, MAX_WINDOW)
        rows = 0 if self.is_over else min(window - connection.outstanding, self.left)
        self.left -= rows
        connection.grant(rows)

    def patience(self, output_buffer_timeout: int, *, has_some: bool) -> float:
        """Seconds to wait for messages.

        Args:
            output_buffer_timeout: for how many ms the server may hold them; -1: until its buffer is full, or RDY is
                reached, which is as many as were asked for.
            has_some: whether some have come.
        """
        if self.is_over:
            return _LAST_WAIT
        return max(output_buffer_timeout, 0) / 1000 + (_IDLE_WAIT if has_some else _FIRST_WAIT)
