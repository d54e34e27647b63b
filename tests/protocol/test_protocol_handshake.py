"""Handshake alone: which stages it goes through, what it asks for, and what it leaves to its conversation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import LocalProtocolError, RemoteProtocolError
from nsq_fast.protocol.conversation import Conversation, Stage
from nsq_fast.protocol.dialect import REDESIGNED
from nsq_fast.protocol.events import Authenticating, Identified, Ready, UpgradeNeeded
from nsq_fast.protocol.handshake import Handshake


class Talk:
    """A handshake, the conversation that it moves, and the commands whose replies it expects."""

    def __init__(self, rest: bytes = b"", **options: Any) -> None:
        self.conversation = Conversation(ConnectionConfig(**options))
        self.expected: list[tuple[str, Any]] = []
        self.handshake = Handshake(self.conversation, self.expected.append, lambda: rest)

    def identified(self, **reply: Any) -> list[Any]:
        self.handshake.connect()
        return list(self.handshake.replied(json.dumps(reply).encode()))


def test_a_plain_server_is_ready_after_one_reply() -> None:
    talk = Talk()
    events = talk.identified(version="0.3.7-HA.1.9.6", max_rdy_count=7)
    assert [type(event) for event in events] == [Identified, Ready]
    assert (talk.conversation.stage, talk.conversation.dialect) == (Stage.READY, REDESIGNED)
    assert talk.conversation.info.max_rdy_count == 7
    assert talk.expected == [("IDENTIFY", None)]


def test_layers_are_confirmed_one_by_one_and_auth_comes_inside_them() -> None:
    talk = Talk(rest=b"rest", tls_v1=True, snappy=True, auth_secret="secret")
    upgrade = talk.identified(tls_v1=True, snappy=True, auth_required=True)[1]
    kinds = []
    while isinstance(upgrade, UpgradeNeeded):
        kinds.append((upgrade.kind, upgrade.leftover))
        assert talk.conversation.stage is Stage.UPGRADING
        talk.handshake.upgraded()
        assert talk.conversation.stage is Stage.CONFIRMING
        (upgrade,) = talk.handshake.replied(b"OK")
    assert kinds == [("tls", b"rest"), ("snappy", b"rest")]
    assert isinstance(upgrade, Authenticating)
    assert talk.conversation.stage is Stage.AUTHENTICATING
    (ready,) = talk.handshake.replied(b'{"identity":"me"}')
    assert isinstance(ready, Ready)
    assert ready.auth is talk.conversation.auth is not None
    assert talk.expected == [("IDENTIFY", None), ("AUTH", None)]


def test_a_layer_that_is_not_confirmed_is_the_server_s_error() -> None:
    talk = Talk(tls_v1=True)
    talk.identified(tls_v1=True)
    talk.handshake.upgraded()
    with pytest.raises(RemoteProtocolError, match="instead of OK after an upgrade"):
        talk.handshake.replied(b"KO")
    assert talk.conversation.stage is Stage.CONFIRMING


@pytest.mark.parametrize("stage", [stage for stage in Stage if stage is not Stage.NEW])
def test_connect_begins_a_new_conversation_only(stage: Stage) -> None:
    talk = Talk()
    talk.conversation.stage = stage
    with pytest.raises(LocalProtocolError, match="has begun already"):
        talk.handshake.connect()
    assert (talk.conversation.stage, talk.expected) == (stage, [])
