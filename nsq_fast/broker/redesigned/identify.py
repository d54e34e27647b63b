"""IDENTIFY of the redesigned dialect: ext support, tags and filters, and other limits.

youzan/nsq: nsqd/client_v2.go, Identify; nsqdserver/protocol_v2.go, IDENTIFY.
"""

from __future__ import annotations

import msgspec

from nsq_fast.broker.options import NsqdOptions
from nsq_fast.broker.tcp.identify import IdentifyError, Negotiation, Profile, Request, Upgrades

from .filters import FilterRequest

MAX_TAG = 100
DEFAULT_OUTPUT_BUFFER_SIZE = 100
_SHORTEST_BUFFER_TIMEOUT = 10
"""Milliseconds."""


class NodeRequest(Request):
    """The body of IDENTIFY."""

    short_id: str | None = None
    long_id: str | None = None
    desired_tag: str | None = None
    extend_support: bool | None = None
    ext_filter: FilterRequest | None = None


class NodeProfile(Profile):
    """What holds for one connection."""

    desired_tag: str = ""
    extend_support: bool = False
    ext_filter: FilterRequest | None = None


class NodeNegotiation(Negotiation):
    """How a node of the cluster settles with a client what holds for its connection."""

    request_type = NodeRequest
    deflate_level = 0

    def default_profile(self, host: str, options: NsqdOptions) -> NodeProfile:
        """What holds for a client at ``host`` that has not sent IDENTIFY."""
        defaults = msgspec.structs.asdict(super().default_profile(host, options))
        return NodeProfile(**{**defaults, "output_buffer_size": DEFAULT_OUTPUT_BUFFER_SIZE})

    def apply(self, request: Request, profile: Profile, options: NsqdOptions) -> None:
        """Change ``profile`` as the client asks; raises IdentifyError at the first value that is out of range."""
        assert isinstance(request, NodeRequest)
        assert isinstance(profile, NodeProfile)
        super().apply(request, profile, options)
        profile.client_id = profile.client_id or request.short_id or ""
        profile.hostname = profile.hostname or request.long_id or ""
        tag = request.desired_tag or ""
        if len(tag.encode()) > MAX_TAG:
            raise IdentifyError(f"invalid tag len {len(tag.encode())}, exceed limit {MAX_TAG}")
        profile.desired_tag = tag or profile.desired_tag
        profile.extend_support = profile.extend_support or bool(request.extend_support)
        profile.ext_filter = request.ext_filter

    def reply(self, profile: Profile, upgrades: Upgrades, options: NsqdOptions) -> bytes:
        """The JSON reply to a client that negotiates features."""
        assert isinstance(profile, NodeProfile)
        tag = {"desired_tag": profile.desired_tag} if profile.desired_tag else {}
        return msgspec.json.encode({**self._fields(profile, upgrades, options), **tag})

    def _apply_output_buffer(self, size: int, timeout: int, profile: Profile, options: NsqdOptions) -> None:
        """As the original, but for a size that is too large, which is cut, and for -1, which keeps the timeout."""
        own_timeout = profile.output_buffer_timeout
        super()._apply_output_buffer(min(size, options.max_output_buffer_size), 0, profile, options)
        profile.output_buffer_timeout = own_timeout
        super()._apply_output_buffer(
            0, max(timeout, _SHORTEST_BUFFER_TIMEOUT) if timeout > 0 else timeout, profile, options
        )
