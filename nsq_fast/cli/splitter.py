"""Cut a stream of bytes at a delimiter, whatever way the stream comes in chunks."""

from __future__ import annotations

from nsq_fast.errors import BodyInvalid


class Splitter:
    """Feed chunks, take messages. Empty messages are left out.

    Args:
        delimiter: one byte or more.
        limit: longest message, in bytes; more without a delimiter raises BodyInvalid.
    """

    def __init__(self, delimiter: bytes, limit: int) -> None:
        self._delimiter = delimiter
        self._limit = limit
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The messages that this chunk completes."""
        *messages, self._rest = (self._rest + chunk).split(self._delimiter)
        if len(self._rest) > self._limit + len(self._delimiter):
            raise BodyInvalid(f"more than {self._limit} bytes without the delimiter {self._delimiter!r}")
        return [message for message in messages if message]

    def end(self) -> list[bytes]:
        """What is left when the stream ends; the splitter can be used again."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []
