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

    def read(self) -> bytes:
        try:
            return self._tls.read(PIECE_SIZE)
        except SSLWantReadError:
            return b""
        except SSLZeroReturnError:
            self.is_ended = True
            return b""
        except SSLError as error:
            raise RemoteProtocolError(f"broken TLS stream: {error}") from error
