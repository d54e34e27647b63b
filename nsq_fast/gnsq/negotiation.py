"""The middle of NsqdTCPClient: IDENTIFY, the upgrades of the stream, and AUTH."""

from __future__ import annotations

import json
from typing import Any

from nsq_fast.errors import NSQException
from nsq_fast.printable import printable

from . import protocol
from .frameclient import FrameClient


class NegotiatingClient(FrameClient):
    """A connection that agrees with its nsqd on what it carries. See NsqdTCPClient."""

    def identify(self) -> dict[str, Any] | None:
        """IDENTIFY, with the upgrades and the AUTH that follow from it; the reply, None when it is a bare OK."""
        self.send(protocol.identify(self._identity()))
        reply = self._reply()
        if reply == protocol.OK:
            return None
        data = self._parsed(reply, "IDENTIFY")
        self.max_ready_count = data.get("max_rdy_count", self.max_ready_count)
        if self.tls_v1 and data.get("tls_v1"):
            self.upgrade_to_tls()
        if self.snappy and data.get("snappy"):
            self.upgrade_to_snappy()
        elif self.deflate and data.get("deflate"):
            self.deflate_level = data.get("deflate_level", self.deflate_level)
            self.upgrade_to_defalte()
        if self.auth_secret and data.get("auth_required"):
            self.auth()
        return data

    def _identity(self) -> dict[str, Any]:
        names = (
            "client_id", "hostname", "heartbeat_interval", "output_buffer_size", "output_buffer_timeout", "tls_v1",
            "snappy", "deflate", "deflate_level", "sample_rate", "user_agent",
        )  # fmt: skip
        return {"feature_negotiation": True, **{name: getattr(self, name) for name in names}}

    def _parsed(self, data: bytes, command: str) -> dict[str, Any]:
        try:
            reply = json.loads(data)
        except ValueError as error:
            self.close_stream()
            raise NSQException(f"failed to parse {command} response JSON from nsqd: {printable(data)}") from error
        return dict(reply)

    def upgrade_to_tls(self) -> None:
        """TLS from now on."""
        self.stream.upgrade_to_tls(**(self.tls_options or {}))
        self.check_ok()

    def upgrade_to_snappy(self) -> None:
        """Snappy from now on."""
        self.stream.upgrade_to_snappy()
        self.check_ok()

    def upgrade_to_defalte(self) -> None:
        """Deflate from now on."""
        self.stream.upgrade_to_defalte(self.deflate_level)
        self.check_ok()

    def auth(self) -> dict[str, Any]:
        """AUTH; the reply."""
        self.send(protocol.auth(self.auth_secret or b""))
        response = self._parsed(self._reply(), "AUTH")
        self.on_auth.send(self, response=response)
        return response
