"""One HTTP reply as it arrives: geventhttpclient's parser, with limits on the size of headers, body and framing."""

from __future__ import annotations

from geventhttpclient.response import HTTPParseError, HTTPResponse

from nsq_fast.errors import RemoteProtocolError

_PORTS = "an nsqd has HTTP at port 4151 and TCP at 4150, an nsqlookupd at 4161 and 4160"
_MAX_HEADER_SIZE = 64 * 1024
# Bytes on the wire for one byte of a body at most: a chunk of a single byte has a size and two line ends around it.
_MOST_FRAMING = 8


class Response(HTTPResponse):
    """One reply, of limited size. Raises RemoteProtocolError when it is no HTTP, or breaks a limit."""

    def __init__(self, max_size: int) -> None:
        super().__init__()
        self.body = bytearray()
        self._max_size = max_size
        self._head_size = 0
        self._size = 0

    @property
    def is_done(self) -> bool:
        """Whether the reply is complete; an interim one (1xx) is not the reply."""
        return bool(self.message_complete and self.get_code() >= 200)

    def feed(self, data: str | bytes) -> None:
        self._size += len(data)
        if not self._has_head():
            self._head_size += len(data)
        try:
            super().feed(data)
        except HTTPParseError as error:
            raise RemoteProtocolError(f"the answer is no HTTP ({error.args[0]}); {_PORTS}") from error
        if not self._has_head() and self._head_size > _MAX_HEADER_SIZE:
            raise RemoteProtocolError(f"headers of more than {_MAX_HEADER_SIZE} bytes")
        if len(self.body) > self._max_size:
            raise RemoteProtocolError(f"a reply of more than {self._max_size} bytes")
        if self._size > 2 * _MAX_HEADER_SIZE + _MOST_FRAMING * len(self.body):
            raise RemoteProtocolError(f"more than {_MAX_HEADER_SIZE} bytes of trailers or of chunk sizes")

    def _has_head(self) -> bool:
        return self.headers_complete and self.get_code() >= 200

    def _on_body(self, buf: bytearray) -> None:
        self.body += buf
