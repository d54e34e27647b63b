"""A node's /config route: more can be changed than of an nsqd of the original (youzan/nsq: nsqdserver/http.go)."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from nsq_fast.broker.http.router import Request
from nsq_fast.broker.nsqd.config import Settings
from nsq_fast.broker.nsqd.host import Host

from . import log_level

_Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
_Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_KINDS: dict[str, Any] = {
    "log_level": _Int32,
    "verbose": bool,
    "allow_ext_compatible": bool,
    "allow_sub_ext_compatible": bool,
    "max_conn_for_client": _Int64,
    "max_pub_waiting_size": _Int64,
}


class NodeSettings(Settings):
    """The options of a node; of those that only it has the log level has an effect."""

    def __init__(self, node: Host) -> None:
        super().__init__(node, lambda addresses: None)
        self._own: dict[str, Any] = {
            **dict.fromkeys(_KINDS, False),
            "log_level": log_level.DEFAULT,
            "max_conn_for_client": 500_000,
            "max_pub_waiting_size": 200 * 1024 * 1024,
        }

    def put(self, request: Request, body: bytes) -> None:
        """Change the option that the request names."""
        kind = _KINDS.get(request.argument)
        if kind is None or not body:
            super().put(request, body)
            return
        try:
            value = msgspec.json.decode(body, type=kind | None)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise request.refuse(400, "INVALID_VALUE") from error
        if value is not None:
            self._own[request.argument] = value
        if request.argument == "log_level":
            log_level.apply_log_level(self._own["log_level"])

    def _values(self) -> dict[str, Any]:
        return {**super()._values(), **self._own}
