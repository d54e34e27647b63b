"""TLS as a layer of a byte stream. A connection without TLS does not import it, nor ``ssl`` with it."""

from __future__ import annotations

from gevent.ssl import MemoryBIO, SSLError, SSLWantReadError, SSLZeroReturnError

from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import RemoteProtocolError

from .layers import PIECE_SIZE
from .tls import client_context, server_hostname


class TlsLayer:
    """TLS over memory buffers."""

    def __init__(self, config: ConnectionConfig, host: str) -> None:
        self.is_ended = False
        self._is_drained = True  # what was fed has been read
        self._failure: RemoteProtocolError | None = None
        self._piece = memoryview(bytearray(PIECE_SIZE))
        self._incoming = MemoryBIO()
        self._outgoing = MemoryBIO()
        self._tls = client_context(config.tls_options).wrap_bio(
            self._incoming, self._outgoing, server_hostname=server_hostname(config.tls_options, host)
        )

    def try_handshake(self) -> bool:
        """Go as far as what was fed allows; whether the handshake is done. Raises SSLError."""
        try:
            self._tls.do_handshake()
        except SSLWantReadError:
            return False
        return True

    def take_outgoing(self) -> bytes:
        """What TLS itself wants to send."""
        return self._outgoing.read()

    def encode(self, data: bytes) -> bytes:
        view = memoryview(data)
        while view:
            view = view[self._tls.write(view) :]
        return self._outgoing.read()

    def feed(self, data: bytes) -> None:
        self._incoming.write(data)
        self._is_drained = False

    def read(self) -> bytes:
        """All records that were fed, up to a piece: one has 16 KiB at most, and each read costs what follows it."""
        size, piece, read = 0, self._piece, self._tls.read
        if self._failure is not None:
            raise self._failure
        try:
            while size < PIECE_SIZE and not self._is_drained:
                # typeshed does not know that it gives a number then
                size += read(PIECE_SIZE - size, piece[size:])  # type: ignore[operator]
        except SSLWantReadError:
            self._is_drained = True
        except SSLZeroReturnError:
            self._is_drained = self.is_ended = True
        except SSLError as error:
            self._failure = RemoteProtocolError(f"broken TLS stream: {error}")
            self._failure.__cause__ = error
            if not size:  # else what came before it is read first
                raise self._failure from error
        return bytes(piece[:size])
