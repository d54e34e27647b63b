"""What the handshake puts between the socket and the frames: TLS, with its options, snappy and deflate.

A layer transforms bytes and does no I/O: ``encode`` what goes out, ``feed`` what came in, ``read`` what that amounts
to, a bounded piece at a time, so that a compressed bomb never takes more memory than one piece.
"""

from __future__ import annotations

import ssl
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ssl import SSLContext
from typing import Any, Protocol

from nsq_fast._snappy_chunks import SnappyChunks
from nsq_fast.config import refuse_unknown
from nsq_fast.errors import ConfigError, RemoteProtocolError

PIECE_SIZE = 64 * 1024
"""Largest piece that one read returns."""


class Layer(Protocol):
    """One transformation of the byte stream.

    Attributes:
        is_ended: the peer has said that nothing follows.
    """

    is_ended: bool

    def encode(self, data: bytes) -> bytes:
        """The bytes that carry ``data``, complete: nothing is held back for more."""

    def feed(self, data: bytes) -> None:
        """Take encoded bytes."""

    def read(self) -> bytes:
        """The next decoded piece; ``b""`` when more must be fed first. Raises RemoteProtocolError."""


class DeflateLayer:
    """Raw deflate, flushed after each write. The server's empty blocks decode to nothing, as they should."""

    # nsqio/nsq: nsqd/client_v2.go, UpgradeDeflate and Flush

    def __init__(self, level: int) -> None:
        self.is_ended = False
        self._compressor = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._decompressor = zlib.decompressobj(-zlib.MAX_WBITS)
        self._input = b""
        self._is_cut = False  # the decompressor may have kept some of what the last piece had no room for

    def encode(self, data: bytes) -> bytes:
        return self._compressor.compress(data) + self._compressor.flush(zlib.Z_SYNC_FLUSH)

    def feed(self, data: bytes) -> None:
        self._input += data

    def read(self) -> bytes:
        if not self.holds_more():
            return b""
        try:
            data = self._decompressor.decompress(self._input, PIECE_SIZE)
        except zlib.error as error:
            raise RemoteProtocolError(f"broken deflate stream: {error}") from error
        self._input = self._decompressor.unconsumed_tail
        self._is_cut = len(data) == PIECE_SIZE
        if self._decompressor.eof:
            raise RemoteProtocolError("the deflate stream ended")
        return data

    def holds_more(self) -> bool:
        """Whether ``read`` may have something to give before more is fed."""
        return bool(self._input) or self._is_cut


class SnappyLayer(SnappyChunks):
    """The snappy framing format."""

    # nsqio/nsq: nsqd/client_v2.go, UpgradeSnappy; the format: google/snappy, framing_format.txt

    def __init__(self) -> None:
        import cramjam
        import snappy  # type: ignore[import-untyped]

        super().__init__(cramjam.snappy.decompress_raw_into)
        self.is_ended = False
        self._compressor = snappy.StreamCompressor()

    def encode(self, data: bytes) -> bytes:
        return bytes(self._compressor.compress(data))


class TlsLayer:
    """TLS over memory buffers."""

    def __init__(self, context: SSLContext, hostname: str) -> None:
        self.is_ended: bool = False
        self._is_drained = True  # what was fed has been read
        self._failure: RemoteProtocolError | None = None
        self._piece = memoryview(bytearray(PIECE_SIZE))
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=hostname)

    def try_handshake(self) -> bool:
        """Go as far as what was fed allows; whether the handshake is done. Raises SSLError."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            error.strerror = _explained(error)
            raise
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
        except ssl.SSLWantReadError:
            self._is_drained = True
        except ssl.SSLZeroReturnError:
            self._is_drained = self.is_ended = True
        except ssl.SSLError as error:
            self._failure = RemoteProtocolError(f"broken TLS stream: {_explained(error)}")
            self._failure.__cause__ = error
            if not size:  # else what came before it is read first
                raise self._failure from error
        return bytes(piece[:size])


_WRONG_NAME = frozenset({62, 64})
"""X509_V_ERR_HOSTNAME_MISMATCH and its sister for IP addresses, openssl/x509_vfy.h."""

_DATES = frozenset({9, 10})
"""X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED."""


def _explained(error: ssl.SSLError) -> str:
    """What OpenSSL says, whose certificate it means, and what to do."""
    reason, text = error.reason or "", ""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _WRONG_NAME:
            text = (
                "where the server's certificate has another name than its host, server_hostname in tls_options is that"
            )
        elif error.verify_code in _DATES:
            text = "it is the server's certificate, by the clock of this machine"
        else:
            text = "cafile in tls_options names what signed the server's certificate; without it the system's count"
    elif "CERTIFICATE_REQUIRED" in reason:
        text = "the server asks for a client certificate: name it in tls_options, as certfile"
    elif "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        text = "so the server says of the client certificate, certfile in tls_options"
    elif "WRONG_VERSION_NUMBER" in reason:
        text = "what the peer sends is no TLS"
    return f"{error}; {text}" if text else str(error)


# The options of TLS, with verification unless it is switched off

# gnsq's names: ca_certs and cert_reqs say what cafile and verify say; ssl_version is taken and not needed, since the
# two ends agree on the best version that both have.
_OPTIONS = frozenset(
    {"cafile", "certfile", "keyfile", "server_hostname", "verify", "ca_certs", "cert_reqs", "ssl_version"}
)


def client_context(options: Any = None) -> SSLContext:
    """Make the context for ``options``: None, an ``ssl.SSLContext``, or a mapping.

    The mapping may have ``cafile`` (default: the system's authorities), ``certfile`` and ``keyfile`` (a client
    certificate), ``verify`` (default True) and ``server_hostname``; gnsq's ``ca_certs``, ``cert_reqs`` and
    ``ssl_version`` are understood. Raises ConfigError for anything else and for files that cannot be read.
    """
    if isinstance(options, SSLContext):  # gevent's is a subclass
        return options
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(f"TLS options must be an ssl.SSLContext or a mapping, not {type(options).__name__}")
    options = options or {}
    refuse_unknown(options, _OPTIONS)
    context = SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load_files(context, options)
    verify = options.get("verify", options.get("cert_reqs", ssl.CERT_REQUIRED) != ssl.CERT_NONE)
    if not isinstance(verify, bool):
        raise ConfigError(f"verify={verify!r}: must be True or False")
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def renewed_context(options: Any) -> SSLContext:
    """The context for another connection, of options that were good once, with their files read anew.

    A file may just be renewed. So one that cannot be used is an OSError, and the connection is tried again.
    """
    try:
        return client_context(options)
    except ConfigError as error:
        if isinstance(error.__cause__, OSError):
            raise OSError(str(error)) from error
        raise


def _load_files(context: SSLContext, options: Mapping[str, Any]) -> None:
    cafile = options.get("cafile") or options.get("ca_certs")
    if cafile:
        with _naming(f"cafile {cafile}"):
            context.load_verify_locations(cafile=cafile)
    else:
        context.load_default_certs()
    certificate, key = options.get("certfile"), options.get("keyfile")
    if certificate:
        with _naming(f"certfile {certificate} {f'with keyfile {key}' if key else 'with its key in the same file'}"):
            context.load_cert_chain(certificate, key, password=_refuse_encrypted)
    elif key:
        raise ConfigError(f"keyfile {key} has no effect without certfile: name the certificate too")


def _refuse_encrypted() -> str:
    """In place of OpenSSL's question for the passphrase on the terminal, for which everything would wait."""
    raise OSError(
        "the key is encrypted: decrypt it, or give an ssl.SSLContext that has loaded it in place of the mapping"
    )


@contextmanager
def _naming(files: str) -> Iterator[None]:
    """What OpenSSL says of files, as a ConfigError that says of which."""
    try:
        yield
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"TLS files cannot be used: {files}: {error.strerror or error}") from error


def server_hostname(options: Any, host: str) -> str:
    """The name to send (SNI) and to verify: the one in the options, otherwise ``host``; a Unix socket has none."""
    name = options.get("server_hostname") if isinstance(options, Mapping) else None
    return str(name or ("localhost" if host.startswith("/") else host))
