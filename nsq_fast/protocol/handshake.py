"""From the first byte to READY: the magic, IDENTIFY, upgrades of the stream, AUTH.

| stage          | what comes                            | next stage                                             |
|----------------|---------------------------------------|--------------------------------------------------------|
| NEW            | ``connect``                           | IDENTIFYING                                            |
| IDENTIFYING    | the reply to IDENTIFY                 | UPGRADING, AUTHENTICATING or READY                     |
| UPGRADING      | ``upgraded``                          | CONFIRMING                                             |
| CONFIRMING     | OK, inside the new layer              | UPGRADING (TLS comes first), AUTHENTICATING or READY   |
| AUTHENTICATING | the reply to AUTH                     | READY                                                  |

nsqio/nsq: nsqd/protocol_v2.go, IDENTIFY sends its reply and then an OK from inside each layer, TLS, then snappy or
deflate; youzan/nsq: nsqdserver/protocol_v2.go, identify does the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nsq_fast import _codec
from nsq_fast.errors import LocalProtocolError, RemoteProtocolError

from .conversation import Conversation, Stage
from .dialect import dialect_of
from .events import Authenticating, Event, Identified, Ready, UpgradeKind, UpgradeNeeded
from .identify import identify_body, parse_auth, parse_identify


class Handshake:
    """What is said before commands are allowed. It sees responses; errors and heartbeats are for the conversation.

    Args:
        conversation: whose ``stage``, ``info``, ``auth`` and ``dialect`` it sets.
        expect: called with the name and token of each command that it gives; the reply is handed to ``replied``.
        take_rest: takes what was received behind the frame that is being handled.
    """

    def __init__(
        self,
        conversation: Conversation,
        expect: Callable[[tuple[str, Any]], None],
        take_rest: Callable[[], bytes],
    ) -> None:
        self._conversation = conversation
        self._expect = expect
        self._take_rest = take_rest
        self._upgrades: list[UpgradeKind] = []

    def connect(self) -> bytes:
        """The first bytes. Raises LocalProtocolError unless the conversation is new."""
        if self._conversation.stage is not Stage.NEW:
            raise LocalProtocolError("connect: the conversation has begun already")
        self._conversation.stage = Stage.IDENTIFYING
        self._expect(("IDENTIFY", None))
        return _codec.MAGIC_V2 + _codec.identify(identify_body(self._conversation.config))

    def upgraded(self) -> None:
        """The stream is in the layer that UpgradeNeeded asked for. Raises LocalProtocolError when none was."""
        if self._conversation.stage is not Stage.UPGRADING:
            raise LocalProtocolError("upgraded: no upgrade was asked for")
        self._conversation.stage = Stage.CONFIRMING

    def replied(self, data: bytes) -> list[Event]:
        """The events that a response makes, in order. Raises RemoteProtocolError when it is not the one that is due.

        Allowed in IDENTIFYING, CONFIRMING and AUTHENTICATING: in no other stage a response is due.
        """
        if self._conversation.stage is Stage.IDENTIFYING:
            return self._identified(data)
        if self._conversation.stage is Stage.AUTHENTICATING:
            return [self._authenticated(data)]
        if data != b"OK":
            raise RemoteProtocolError(f"{data[:100]!r} instead of OK after an upgrade")
        return [self._next_step()]

    def _identified(self, data: bytes) -> list[Event]:
        conversation = self._conversation
        conversation.info = info = parse_identify(data, conversation.config)
        conversation.dialect = dialect_of(info.version)
        if info.tls_v1:
            self._upgrades.append("tls")
        if info.snappy:
            self._upgrades.append("snappy")
        elif info.deflate:
            self._upgrades.append("deflate")
        return [Identified(info=info), self._next_step()]

    def _next_step(self) -> Event:
        conversation = self._conversation
        secret = conversation.config.auth_secret
        if self._upgrades:
            conversation.stage = Stage.UPGRADING
            # What came behind the reply is the beginning of the new layer, of a TLS handshake say, and no frame.
            return UpgradeNeeded(kind=self._upgrades.pop(0), leftover=self._take_rest())
        if conversation.info.auth_required and secret is not None:
            conversation.stage = Stage.AUTHENTICATING
            self._expect(("AUTH", None))
            return Authenticating(send=_codec.auth(secret.encode() if isinstance(secret, str) else secret))
        conversation.stage = Stage.READY
        return Ready(info=conversation.info)

    def _authenticated(self, data: bytes) -> Event:
        conversation = self._conversation
        conversation.auth = parse_auth(data)
        conversation.stage = Stage.READY
        return Ready(info=conversation.info, auth=conversation.auth, auth_data=data)
