"""IDENTIFY: what a client asks for, the limits of each value, and the reply.

nsqio/nsq: nsqd/client_v2.go, Identify (the limits); nsqd/protocol_v2.go, IDENTIFY (the reply).

The texts of the errors are the original's; all of them are fatal.
"""

from __future__ import annotations

from typing import Any

import msgspec

from nsq_fast.broker.go_json import Int32, Int64
from nsq_fast.broker.options import NsqdOptions

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


class IdentifyError(ValueError):
    """A value is out of range; the text is the original's."""


class Negotiation:
    """How a dialect settles with a client what holds for its connection.

    Attributes:
        request_type: what the body of IDENTIFY is decoded as.
        deflate_level: what a client gets that names none.
    """

    request_type: type[Request] = Request
    deflate_level = DEFAULT_DEFLATE_LEVEL

    def default_profile(self, host: str, options: NsqdOptions) -> Profile:
        """What holds for a client at ``host`` that has not sent IDENTIFY."""
        return Profile(
            client_id=host,
            hostname=host,
            heartbeat_interval=options.client_timeout / 2,
            output_buffer_timeout=options.output_buffer_timeout,
            msg_timeout=options.msg_timeout,
            output_buffer_size=DEFAULT_OUTPUT_BUFFER_SIZE if options.output_buffer_timeout else _UNBUFFERED,
        )

    def apply(self, request: Request, profile: Profile, options: NsqdOptions) -> None:
        """Change ``profile`` as the client asks; raises IdentifyError at the first value that is out of range."""
        profile.client_id = request.client_id or ""
        profile.hostname = request.hostname or ""
        profile.user_agent = request.user_agent or ""
        profile.topology_region = request.topology_region or ""
        profile.topology_zone = request.topology_zone or ""
        _apply_heartbeat(request.heartbeat_interval or 0, profile, options)
        self._apply_output_buffer(request.output_buffer_size or 0, request.output_buffer_timeout or 0, profile, options)
        sample_rate = request.sample_rate or 0
        if not 0 <= sample_rate <= 99:
            raise IdentifyError(f"sample rate ({sample_rate}) is invalid")
        profile.sample_rate = sample_rate
        timeout = request.msg_timeout or 0
        if timeout:
            if not 1000 <= timeout <= options.max_msg_timeout * 1000:
                raise IdentifyError(f"msg timeout ({timeout}) is invalid")
            profile.msg_timeout = timeout / 1000

    def _apply_output_buffer(self, size: int, timeout: int, profile: Profile, options: NsqdOptions) -> None:
        if timeout == -1:
            profile.output_buffer_timeout = 0.0
        elif timeout:
            low, high = options.min_output_buffer_timeout * 1000, options.max_output_buffer_timeout * 1000
            if not low <= timeout <= high:
                raise IdentifyError(f"output buffer timeout ({timeout}) is invalid")
            profile.output_buffer_timeout = timeout / 1000
        if size == -1:
            profile.output_buffer_size = _UNBUFFERED
            profile.output_buffer_timeout = 0.0
        elif size:
            if not 64 <= size <= options.max_output_buffer_size:
                raise IdentifyError(f"output buffer size ({size}) is invalid")
            profile.output_buffer_size = size

    def choose_upgrades(self, request: Request, options: NsqdOptions, *, has_tls: bool) -> Upgrades:
        """Which layers the client asks for and gets; raises IdentifyError for two compressions at once."""
        deflate = options.deflate and bool(request.deflate)
        snappy = options.snappy and bool(request.snappy)
        if deflate and snappy:
            raise IdentifyError("cannot enable both deflate and snappy compression")
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
        """The JSON reply to a client that negotiates features."""
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
            raise IdentifyError(f"heartbeat interval ({interval}) is invalid")
        profile.heartbeat_interval = interval / 1000
