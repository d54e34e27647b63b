"""Size and shape of the main job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """Size and shape of the job, and its servers: nsqds over TCP, or lookupds over HTTP.

    ``security`` holds the options of clients for TLS and AUTH.
    """

    nsqds: tuple[str, ...] = ()
    lookupds: tuple[str, ...] = ()
    messages: int = 200_000
    topics: int = 4
    body_size: int = 200
    batch: int = 100
    max_in_flight: int = 2000
    max_tries: int = 3
    window: int = 20_000
    stall_timeout: float = 30.0
    security: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def servers(self) -> dict[str, Any]:
        """The servers as arguments of a Consumer or Producer, with what TLS and AUTH need."""
        return {"nsqd_tcp_addresses": self.nsqds, "lookupd_http_addresses": self.lookupds, **self.security}
