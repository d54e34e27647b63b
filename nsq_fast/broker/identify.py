"""What IDENTIFY settles for a connection, and the layers that it may get then: TLS, snappy, deflate."""

from __future__ import annotations

import zlib
from typing import Any

import msgspec
import snappy  # type: ignore[import-untyped]
from gevent import Timeout
from gevent.ssl import CERT_NONE, CERT_REQUIRED, PROTOCOL_TLS_SERVER, SSLContext, TLSVersion

from nsq_fast.broker.go import Int32, Int64
from nsq_fast.broker.message import FatalError
from nsq_fast.broker.net import Faults
from nsq_fast.broker.options import NsqdOptions
from nsq_fast.errors import ConfigError

# --- IDENTIFY --------------------------------------------------------------------------------------------------------
# What a client asks for, the limits of each value, and the reply.
# nsqio/nsq: nsqd/client_v2.go, Identify (the limits); nsqd/protocol_v2.go, IDENTIFY (the reply).
# The texts of the errors are the original's; all of them are fatal.


DEFAULT_DEFLATE_LEVEL = 6
DEFAULT_OUTPUT_BUFFER_SIZE = 16 * 1024
_UNBUFFERED = 1


class Request(msgspec.Struct):
    """The body of IDENTIFY. Unknown fields are ignored, null is as good as absent."""

    client_id: str | None = None
    hostname: str | None = None
    user_agent: str | None = None
    feature_negotiation: bool | None = None
    heartbeat_interval: Int64 | None = None
    output_buffer_size: Int64 | None = None
    output_buffer_timeout: Int64 | None = None
    tls_v1: bool | None = None
    deflate: bool | None = None
    deflate_level: Int64 | None = None
    snappy: bool | None = None
    sample_rate: Int32 | None = None
    msg_timeout: Int64 | None = None
    topology_region: str | None = None
    topology_zone: str | None = None


class Profile(msgspec.Struct):
    """What holds for one connection: the server's defaults, and what IDENTIFY changed. Durations in seconds."""

    client_id: str
    hostname: str
    heartbeat_interval: float
    output_buffer_timeout: float
    msg_timeout: float
    user_agent: str = ""
    output_buffer_size: int = DEFAULT_OUTPUT_BUFFER_SIZE
    sample_rate: int = 0
    topology_region: str = ""
    topology_zone: str = ""


class Upgrades(msgspec.Struct, frozen=True):
    """Which layers a connection gets after the reply to IDENTIFY."""

    tls: bool = False
    snappy: bool = False
    deflate: bool = False
    deflate_level: int = DEFAULT_DEFLATE_LEVEL


def _invalid(what: str, value: int) -> FatalError:
    """A value is out of range; the text is the original's."""
    return FatalError("E_BAD_BODY", f"IDENTIFY {what} ({value}) is invalid")


class Negotiation:
    """How a dialect settles with a client what holds for its connection.

    Attributes:
        request_type: what the body of IDENTIFY is decoded as.
        deflate_level: what a client gets that names none.
    """

    request_type: type[Request] = Request
    deflate_level = DEFAULT_DEFLATE_LEVEL

    def default_profile(self, host: str, options: NsqdOptions) -> Profile:
        return Profile(
            client_id=host,
            hostname=host,
            heartbeat_interval=options.client_timeout / 2,
            output_buffer_timeout=options.output_buffer_timeout,
            msg_timeout=options.msg_timeout,
            output_buffer_size=DEFAULT_OUTPUT_BUFFER_SIZE if options.output_buffer_timeout else _UNBUFFERED,
        )

    def apply(self, request: Request, profile: Profile, options: NsqdOptions) -> None:
        """Change ``profile`` as the client asks; raises FatalError at the first value that is out of range."""
        for name in ("client_id", "hostname", "user_agent", "topology_region", "topology_zone"):
            setattr(profile, name, getattr(request, name) or "")
        _apply_heartbeat(request.heartbeat_interval or 0, profile, options)
        self._apply_output_buffer(request.output_buffer_size or 0, request.output_buffer_timeout or 0, profile, options)
        sample_rate = request.sample_rate or 0
        if not 0 <= sample_rate <= 99:
            raise _invalid("sample rate", sample_rate)
        profile.sample_rate = sample_rate
        timeout = request.msg_timeout or 0
        if timeout:
            if not 1000 <= timeout <= options.max_msg_timeout * 1000:
                raise _invalid("msg timeout", timeout)
            profile.msg_timeout = timeout / 1000

    def _apply_output_buffer(self, size: int, timeout: int, profile: Profile, options: NsqdOptions) -> None:
        if timeout == -1:
            profile.output_buffer_timeout = 0.0
        elif timeout:
            low, high = options.min_output_buffer_timeout * 1000, options.max_output_buffer_timeout * 1000
            if not low <= timeout <= high:
                raise _invalid("output buffer timeout", timeout)
            profile.output_buffer_timeout = timeout / 1000
        if size == -1:
            profile.output_buffer_size = _UNBUFFERED
            profile.output_buffer_timeout = 0.0
        elif size:
            if not 64 <= size <= options.max_output_buffer_size:
                raise _invalid("output buffer size", size)
            profile.output_buffer_size = size

    def choose_upgrades(self, request: Request, options: NsqdOptions, *, has_tls: bool) -> Upgrades:
        """Which layers the client asks for and gets; raises FatalError for two compressions at once."""
        deflate = options.deflate and bool(request.deflate)
        snappy = options.snappy and bool(request.snappy)
        if deflate and snappy:
            raise FatalError("E_IDENTIFY_FAILED", "cannot enable both deflate and snappy compression")
        level = request.deflate_level or 0
        if not deflate or level <= 0:
            level = self.deflate_level
        return Upgrades(
            tls=has_tls and bool(request.tls_v1),
            snappy=snappy,
            deflate=deflate,
            deflate_level=min(level, options.max_deflate_level),
        )

    def reply(self, profile: Profile, upgrades: Upgrades, options: NsqdOptions) -> bytes:
        topology = {"topology_region": options.topology_region, "topology_zone": options.topology_zone}
        return msgspec.json.encode({**self._fields(profile, upgrades, options), **topology})

    def _fields(self, profile: Profile, upgrades: Upgrades, options: NsqdOptions) -> dict[str, Any]:
        return {
            "max_rdy_count": options.max_rdy_count,
            "version": options.version,
            "max_msg_timeout": round(options.max_msg_timeout * 1000),
            "msg_timeout": round(profile.msg_timeout * 1000),
            "tls_v1": upgrades.tls,
            "deflate": upgrades.deflate,
            "deflate_level": upgrades.deflate_level,
            "max_deflate_level": options.max_deflate_level,
            "snappy": upgrades.snappy,
            "sample_rate": profile.sample_rate,
            "auth_required": bool(options.auth_http_addresses),
            "output_buffer_size": profile.output_buffer_size,
            "output_buffer_timeout": round(profile.output_buffer_timeout * 1000),
        }


def _apply_heartbeat(interval: int, profile: Profile, options: NsqdOptions) -> None:
    if interval == -1:
        profile.heartbeat_interval = 0.0
    elif interval:
        if not 1000 <= interval <= options.max_heartbeat_interval * 1000:
            raise _invalid("heartbeat interval", interval)
        profile.heartbeat_interval = interval / 1000


# --- the layers a connection may get after IDENTIFY, from the server's side ------------------------------------------
# TLS, snappy, deflate.
# A layer is a stream: ``recv(size)``, ``sendall(data)``, ``settimeout``, ``shutdown``, ``close``, as a socket has
# them. ``sendall`` flushes: what was sent can be read whole by the peer.


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


class SnappyCodec:
    """The framed snappy format, with its checksums.

    Both codecs flush as they compress. ``decompress`` gives what can be read so far, ``more`` what there is without
    more input; either raises OSError for a stream that is broken.
    """

    def __init__(self) -> None:
        self._due = _SNAPPY_BEGINS
        self._compressor = snappy.StreamCompressor()
        self._decompressor = snappy.StreamDecompressor()

    def compress(self, data: bytes) -> bytes:
        return bytes(self._compressor.add_chunk(data))

    def decompress(self, data: bytes) -> bytes:
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
        return b""


class DeflateCodec:
    """Raw deflate, flushed after every write. What is inflated at once is bounded."""

    def __init__(self, level: int) -> None:
        self._compressor = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._decompressor = zlib.decompressobj(-zlib.MAX_WBITS)

    def compress(self, data: bytes) -> bytes:
        return self._compressor.compress(data) + self._compressor.flush(zlib.Z_SYNC_FLUSH)

    def decompress(self, data: bytes) -> bytes:
        try:
            return self._decompressor.decompress(self._decompressor.unconsumed_tail + data, _MAX_INFLATED)
        except zlib.error as error:
            raise OSError(f"deflate stream is broken: {error}") from error

    def more(self) -> bytes:
        return self.decompress(b"") if self._decompressor.unconsumed_tail else b""


class CompressedStream:
    """A compression over a stream. ``leftover`` is what was read past the command that asked for it."""

    def __init__(self, stream: Any, codec: SnappyCodec | DeflateCodec, leftover: bytes = b"") -> None:
        self._stream = stream
        self._codec = codec
        self._ready = codec.decompress(leftover) if leftover else b""
        self.settimeout: Any = stream.settimeout
        self.setsockopt: Any = stream.setsockopt
        self.shutdown: Any = stream.shutdown
        self.close: Any = stream.close

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

    def sendall(self, data: bytes, timeout: float | None = None) -> None:
        """Send, so that the peer can read all of it."""
        self._stream.sendall(self._codec.compress(data), timeout)
