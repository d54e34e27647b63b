"""The session against conversations recorded from real servers, whole and byte by byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nsq_fast._codec import Message, encode_frame
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import LocalProtocolError, NsqError
from nsq_fast.protocol.events import AnswerFailed, CommandFailed, Disconnected, Reply
from nsq_fast.protocol.session import Session

DATA = Path(__file__).parent.parent / "data"
ANSWERS: dict[str, Any] = {"FIN": Session.fin, "REQ": Session.req, "TOUCH": Session.touch}


def transcripts(family: str) -> list[Any]:
    lines = (DATA / f"{family}.jsonl").read_text().splitlines()
    return [pytest.param(record, id=record["name"]) for record in map(json.loads, lines)]


def replay(record: dict[str, Any], size: int) -> tuple[Session, list[Any]]:
    """Play the client's side through a session, feed the server's side in pieces of ``size`` bytes."""
    session = Session(ConnectionConfig())
    session.connect()
    events: list[Any] = []
    steps = [(kind, bytes.fromhex(rest[0]) if kind in ("send", "recv") else b"") for kind, *rest in record["steps"]]
    if not any(data.startswith(b"IDENTIFY") for kind, data in steps if kind == "send"):
        version = "0.3.7-HA.1.13.0" if record["dialect"] == "redesigned" else "1.3.0"
        session.receive(encode_frame(0, b'{"version":"%s"}' % version.encode()))
    for kind, data in steps:
        if kind == "send":
            send(session, data, events)
        elif kind == "recv":
            for start in range(0, len(data), size):
                events += session.receive(data[start : start + size], 0.0)
        elif kind == "closed":
            events += session.receive(b"")
    return session, events


def send(session: Session, data: bytes, events: list[Any]) -> None:
    """Make the session produce ``data``, or at least expect its reply where it refuses to say such a thing."""
    if data == b"  V2" or data.startswith(b"IDENTIFY"):
        return
    line, _, body = data.partition(b"\n")
    word, *params = line.decode("latin-1").split(" ")
    if word == "SUB":
        assert session.sub(*params[:2]).startswith(line[:4])
    elif word == "PUB" and len(params) == 1 and len(body) > 4 and "!" not in params[0]:
        assert session.pub(params[0], body[4:]) == data
    elif word == "RDY" and int(params[0]) > session.info.max_rdy_count:
        with pytest.raises(LocalProtocolError):
            session.set_rdy(int(params[0]))
    elif word == "RDY":
        assert session.set_rdy(int(params[0])) == data
    elif word in ANSWERS:
        wanted = [event for event in events if isinstance(event, Message) and event.id == params[0].encode()]
        assert ANSWERS[word](session, wanted[-1], *map(int, params[1:])) == data
    elif word == "CLS":
        assert session.cls() == data
    elif word != "NOP":
        try:
            session.expect(word)
        except LocalProtocolError:
            session.expect("PUB")  # a command of the other family: sent all the same, to see the refusal


def described(events: list[Any]) -> list[Any]:
    """Events in a form that compares: objects that do not, by what they hold."""
    out: list[Any] = []
    for event in events:
        if isinstance(event, Message):
            out.append((event.timestamp, event.attempts, event.id, event.body))
        else:
            out.append(repr(event))
    return out


@pytest.mark.parametrize("record", transcripts("original"))
def test_original_conversation(record: dict[str, Any]) -> None:
    session, events = replay(record, 1 << 20)
    assert not [event for event in events if isinstance(event, NsqError)]
    assert session.pending_count == 0
    _, slow = replay(record, 1)
    assert described(slow) == described(events)


@pytest.mark.parametrize("record", transcripts("original"))
def test_a_server_that_closes_had_said_why(record: dict[str, Any]) -> None:
    _, events = replay(record, 1 << 20)
    fatal = [event for event in events if getattr(event, "fatal", False)]
    is_closed = any(isinstance(event, Disconnected) for event in events)
    assert is_closed == (bool(fatal) or record["name"] == "heartbeat_unanswered")


def named(name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(param.values[0] for param in transcripts("original") if param.id == name)
    return found


def test_subscription_of_the_transcript() -> None:
    session, events = replay(named("subscribe_consume_finish"), 1 << 20)
    messages = [event for event in events if isinstance(event, Message)]
    assert [message.body for message in messages[:2]] == [b"one", b"two"]
    assert [event.command for event in events if isinstance(event, Reply)] == ["SUB", "CLS"]
    assert [event.message_id for event in events if isinstance(event, AnswerFailed)] == [messages[0].id]
    assert len(messages) == 4
    assert session.in_flight == 1  # 4 received, one finished twice, one requeued: a FIN counts when it is sent


def test_failures_of_the_transcript_are_events_of_their_own() -> None:
    events = [event for param in transcripts("original") for event in replay(param.values[0], 1 << 20)[1]]
    assert {event.error.code for event in events if isinstance(event, CommandFailed)} >= {
        "E_BAD_MESSAGE", "E_BAD_TOPIC", "E_INVALID",
    }  # fmt: skip
    assert all(event.error.code.endswith("_FAILED") for event in events if isinstance(event, AnswerFailed))
