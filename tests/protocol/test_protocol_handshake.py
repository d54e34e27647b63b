"""The handshake of a session: which stages it goes through, what it asks for, and what is refused."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import LocalProtocolError, RemoteProtocolError
from nsq_fast.protocol.dialect import REDESIGNED
from nsq_fast.protocol.events import Authenticating, Identified, Ready, UpgradeNeeded
from nsq_fast.protocol.session import Session, Stage


def response(data: bytes) -> bytes:
    return struct.pack(">ii", 4 + len(data), 0) + data


def identified(session: Session, rest: bytes = b"", **reply: Any) -> list[Any]:
    """What a new session makes of the reply to IDENTIFY, and of what comes right behind it."""
    session.connect()
    return list(session.receive(response(json.dumps(reply).encode()) + rest))


def test_a_plain_server_is_ready_after_one_reply() -> None:
    session = Session(ConnectionConfig())
    events = identified(session, version="0.3.7-HA.1.9.6", max_rdy_count=7)
    assert [type(event) for event in events] == [Identified, Ready]
    assert (session.stage, session.dialect) == (Stage.READY, REDESIGNED)
    assert session.info.max_rdy_count == 7
    assert not session.pending_count


def test_layers_are_confirmed_one_by_one_and_auth_comes_inside_them() -> None:
    session = Session(ConnectionConfig(tls_v1=True, snappy=True, auth_secret="secret"))
    upgrade = identified(session, rest=b"rest", tls_v1=True, snappy=True, auth_required=True)[1]
    kinds = []
    while isinstance(upgrade, UpgradeNeeded):
        kinds.append((upgrade.kind, upgrade.leftover))
        assert session.stage is Stage.UPGRADING
        session.upgraded()
        assert session.stage is Stage.CONFIRMING
        (upgrade,) = session.receive(response(b"OK"))
    assert kinds == [("tls", b"rest"), ("snappy", b"")]
    assert isinstance(upgrade, Authenticating)
    assert session.stage is Stage.AUTHENTICATING
    (ready,) = session.receive(response(b'{"identity":"me"}'))
    assert isinstance(ready, Ready)
    assert ready.auth is session.auth is not None
    assert not session.pending_count


def test_a_layer_that_is_not_confirmed_is_the_server_s_error() -> None:
    session = Session(ConnectionConfig(tls_v1=True))
    identified(session, tls_v1=True)
    session.upgraded()
    with pytest.raises(RemoteProtocolError, match="instead of OK after an upgrade"):
        session.receive(response(b"KO"))
    assert session.stage is Stage.CONFIRMING


@pytest.mark.parametrize("stage", [stage for stage in Stage if stage is not Stage.NEW])
def test_connect_begins_a_new_conversation_only(stage: Stage) -> None:
    session = Session(ConnectionConfig())
    session.stage = stage
    with pytest.raises(LocalProtocolError, match="has begun already"):
        session.connect()
    assert (session.stage, session.pending_count) == (stage, 0)
