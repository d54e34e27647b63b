"""SUB and its reply, on a transport whose handshake is over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nsq_fast._codec import Message
from nsq_fast.errors import ConnectionLost, LocalProtocolError, NsqError, RemoteProtocolError
from nsq_fast.protocol.events import CommandFailed, ServerFailed
from nsq_fast.protocol.session import Session
from nsq_fast.runtime.net.transport import Transport


def subscribe(
    transport: Transport, session: Session, topic: str, channel: str, options: Mapping[str, Any]
) -> NsqError | None:
    """Subscribe and wait for the reply; ``options`` are those of ``Session.sub``.

    Returns why the subscription was refused, by the server or by the session; None when it was not. Raises what the
    transport and the session raise, and ConnectionLost.
    """
    try:
        transport.send_all(session.sub(topic, channel, **options))
    except LocalProtocolError as error:
        return error
    while session.pending_count:
        data = transport.recv()
        for event in session.receive(data):
            if isinstance(event, Message):
                raise RemoteProtocolError("a message before RDY")
            if event.send:
                transport.send_all(event.send)
            if isinstance(event, (CommandFailed, ServerFailed)):
                return event.error
        if not data:
            raise ConnectionLost("closed by the server before its reply to SUB")
    return None
