"""The layers a connection may get after IDENTIFY, from the server's side: TLS, snappy, deflate.

A layer is a stream: ``recv(size)``, ``sendall(data)``, ``settimeout``, ``shutdown``,
``close``, as a socket has them. ``sendall`` flushes: what was sent can be read whole by the peer.
"""

from __future__ import annotations

import zlib
from typing import Any, Protocol

import snappy  # type: ignore[import-untyped]
from gevent import Timeout
from gevent.ssl import CERT_NONE, CERT_REQUIRED, PROTOCOL_TLS_SERVER, SSLContext, TLSVersion

from nsq_fast.broker.net.faults import Faults
from nsq_fast.broker.options import NsqdOptions
from nsq_fast.errors import ConfigError

TLS_HANDSHAKE_TIMEOUT = 5.0
_VERSIONS = {
    "tls1.2": TLSVersion.TLSv1_2,
    "tls1.3": TLSVersion.TLSv1_3,
}
_MAX_INFLATED = 1024 * 1024
_SNAPPY_BEGINS = b"\xff\x06\x00\x00sNaPpY"


def server_context(options: NsqdOptions) -> SSLContext | None:
    """The TLS side of the options; None without a certificate. Raises ConfigError for files that cannot be used.

    The lowest version that Python allows, 1.2 as a rule, is not lowered by ``tls_min_version``.

    A client certificate that is required is also verified, under either policy: OpenSSL offers nothing less.
    """
    if not (options.tls_cert and options.tls_key):
        return None
    context = SSLContext(PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(options.tls_cert, options.tls_key)
        if options.tls_root_ca_file:
            context.load_verify_locations(options.tls_root_ca_file)
    except OSError as error:
        raise ConfigError(f"tls_cert, tls_key, tls_root_ca_file: cannot be used: {error}") from error
    if options.tls_min_version in _VERSIONS:
        context.minimum_version = _VERSIONS[options.tls_min_version]
    context.verify_mode = CERT_REQUIRED if options.tls_client_auth_policy else CERT_NONE
    return context


def upgrade_tls(sock: Any, context: SSLContext | None, faults: Faults) -> Any:
    """TLS over a guarded socket, guarded again. Raises OSError when the handshake fails or takes too long."""
    if context is None:
        raise OSError("there is no certificate")
    with Timeout(TLS_HANDSHAKE_TIMEOUT, TimeoutError("TLS handshake timed out")):
        return faults.guard(context.wrap_socket(sock.sock, server_side=True))


class Codec(Protocol):
    """One direction each of a compression."""

    def compress(self, data: bytes) -> bytes:
        """Compress, and flush."""

    def decompress(self, data: bytes) -> bytes:
        """What can be read so far; raises OSError for a stream that is broken."""

    def more(self) -> bytes:
        """What there is to read without more input."""


class SnappyCodec:
    """The framed snappy format, with its checksums."""

    def __init__(self) -> None:
        self._due = _SNAPPY_BEGINS
        self._compressor = snappy.StreamCompressor()
        self._decompressor = snappy.StreamDecompressor()

    def compress(self, data: bytes) -> bytes:
        """Compress, and flush."""
        return bytes(self._compressor.add_chunk(data))

    def decompress(self, data: bytes) -> bytes:
        """What can be read so far; raises OSError for a stream that is broken."""
        self._check_begin(data)
        try:
            return bytes(self._decompressor.decompress(data))
        except Exception as error:  # the library has an exception of its own for each way to be broken
            raise OSError(f"snappy stream is broken: {error}") from error

    def _check_begin(self, data: bytes) -> None:
        # The library takes the first chunk for as long as it says, and waits for up to 16 MB of it; Go's refuses it.
        part = data[: len(self._due)]
        if not self._due.startswith(part):
            raise OSError("snappy stream is broken: it does not begin with the identifier of a stream")
        self._due = self._due[len(part) :]

    def more(self) -> bytes:
        """What there is to read without more input."""
        return b""


class DeflateCodec:
    """Raw deflate, flushed after every write. What is inflated at once is bounded."""

    def __init__(self, level: int) -> None:
        self._compressor = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._decompressor = zlib.decompressobj(-zlib.MAX_WBITS)

    def compress(self, data: bytes) -> bytes:
        """Compress, and flush."""
        return self._compressor.compress(data) + self._compressor.flush(zlib.Z_SYNC_FLUSH)

    def decompress(self, data: bytes) -> bytes:
        """What can be read so far; raises OSError for a stream that is broken."""
        try:
            return self._decompressor.decompress(self._decompressor.unconsumed_tail + data, _MAX_INFLATED)
        except zlib.error as error:
            raise OSError(f"deflate stream is broken: {error}") from error

    def more(self) -> bytes:
        """What there is to read without more input."""
        return self.decompress(b"") if self._decompressor.unconsumed_tail else b""


class CompressedStream:
    """A compression over a stream. ``leftover`` is what was read past the command that asked for it."""

    def __init__(self, stream: Any, codec: Codec, leftover: bytes = b"") -> None:
        self._stream = stream
        self._codec = codec
        self._ready = codec.decompress(leftover) if leftover else b""
        self.settimeout = stream.settimeout
        self.setsockopt = stream.setsockopt
        self.shutdown = stream.shutdown
        self.close = stream.close

    def recv(self, size: int) -> bytes:
        """The next bytes; b"" at the end."""
        data, self._ready = self._ready, b""
        data = data or self._codec.more()
        while not data:
            chunk = self._stream.recv(size)
            if not chunk:
                return b""
            data = self._codec.decompress(chunk)
        return data

    def sendall(self, data: bytes) -> None:
        """Send, so that the peer can read all of it."""
        self._stream.sendall(self._codec.compress(data))
