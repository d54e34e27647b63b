"""The session against conversations recorded from real servers, whole and byte by byte."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nsq_fast._codec import Message, encode_frame
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import (
    BadPartition,
    ExtendSubRequired,
    ExtNotSupported,
    LocalProtocolError,
    NotLeader,
    NsqError,
    OrderedSubRequired,
    TopicNotExist,
)
from nsq_fast.protocol.dialect import ORIGINAL
from nsq_fast.protocol.events import AnswerFailed, CommandFailed, Disconnected, Reply
from nsq_fast.protocol.session import Session

DATA = Path(__file__).parent.parent / "data"
ANSWERS: dict[str, Any] = {"FIN": Session.fin, "REQ": Session.req, "TOUCH": Session.touch}


def transcripts(family: str) -> list[Any]:
    lines = (DATA / f"{family}.jsonl").read_text().splitlines()
    return [pytest.param(record, id=record["name"]) for record in map(json.loads, lines) if "steps" in record]


def replay(record: dict[str, Any], size: int) -> tuple[Session, list[Any]]:
    """Play the client's side through a session, feed the server's side in pieces of ``size`` bytes."""
    steps = [(kind, bytes.fromhex(rest[0]) if kind in ("send", "recv") else b"") for kind, *rest in record["steps"]]
    is_ext = any(b'"extend_support": true' in data for kind, data in steps if kind == "send")
    session = Session(ConnectionConfig(extend_support=is_ext))
    session.connect()
    events: list[Any] = []
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
    if session.dialect is ORIGINAL and is_redesigned(word, params):
        with pytest.raises(LocalProtocolError):
            SAY[word](session, params, body)
        session.expect("PUB")  # said all the same when it was recorded
    elif word in SAY and len(body) != 4 and "!" not in params[0] and "x" not in params[1:]:
        assert SAY[word](session, params, body[4:]) == data
    elif word == "RDY" and int(params[0]) > session.info.max_rdy_count:
        with pytest.raises(LocalProtocolError):
            session.set_rdy(int(params[0]))
    elif word == "RDY":
        assert session.set_rdy(int(params[0])) == data
    elif word in ANSWERS:
        id, rest = data[len(word) + 1 :][:16], data[len(word) + 17 :]  # the id may hold a space or a newline
        wanted = [event for event in events if isinstance(event, Message) and event.id == id]
        assert ANSWERS[word](session, wanted[-1], *map(int, rest.split())) == data
    elif word == "CLS":
        assert session.cls() == data
    elif word != "NOP":
        try:
            session.expect(word)
        except LocalProtocolError:
            session.expect("PUB")  # a command of the other family: sent all the same, to see the refusal


def partition_in(params: list[str]) -> int | None:
    return int(params[0]) if params else None


def is_redesigned(word: str, params: list[str]) -> bool:
    return word in SAY and ("_" in word or len(params) > (2 if word == "SUB" else 1))


def sub(session: Session, params: list[str], body: bytes, **form: bool) -> bytes:
    return session.sub(params[0], params[1], partition=partition_in(params[2:]), **form)


def pub(session: Session, params: list[str], body: bytes) -> bytes:
    return session.pub(params[0], body, partition=partition_in(params[1:]))


def pub_trace(session: Session, params: list[str], body: bytes) -> bytes:
    return session.pub_trace(params[0], int.from_bytes(body[:8], "big"), body[8:], partition=partition_in(params[1:]))


def pub_ext(session: Session, params: list[str], body: bytes) -> bytes:
    end = 2 + int.from_bytes(body[:2], "big")
    return session.pub_ext(params[0], body[2:end], body[end:], partition=partition_in(params[1:]))


SAY: dict[str, Any] = {
    "SUB": sub,
    "SUB_ADVANCED": partial(sub, advanced=True),
    "SUB_ORDERED": partial(sub, ordered=True),
    "PUB": pub,
    "PUB_TRACE": pub_trace,
    "PUB_EXT": pub_ext,
}


def described(events: list[Any]) -> list[Any]:
    """Events in a form that compares: objects that do not, by what they hold."""
    out: list[Any] = []
    for event in events:
        if isinstance(event, Message):
            out.append((event.timestamp, event.attempts, event.id, event.ext, event.offset, event.raw_size, event.body))
        else:
            out.append(repr(event))
    return out


@pytest.mark.parametrize("record", transcripts("original") + transcripts("redesigned"))
def test_conversation(record: dict[str, Any]) -> None:
    session, events = replay(record, 1 << 20)
    assert not [event for event in events if isinstance(event, NsqError)]
    was_cut_short = record["name"] in ("sub_plain", "sub_ext")  # the recording ends before CLOSE_WAIT
    assert session.pending_count == (1 if was_cut_short else 0)
    _, slow = replay(record, 1)
    assert described(slow) == described(events)


@pytest.mark.parametrize("record", transcripts("original") + transcripts("redesigned"))
def test_a_server_that_closes_had_said_why(record: dict[str, Any]) -> None:
    _, events = replay(record, 1 << 20)
    fatal = [event for event in events if getattr(event, "fatal", False)]
    is_closed = any(isinstance(event, Disconnected) for event in events)
    assert is_closed == (bool(fatal) or record["name"] == "heartbeat_unanswered")


def named(name: str, family: str = "original") -> dict[str, Any]:
    found: dict[str, Any] = next(param.values[0] for param in transcripts(family) if param.id == name)
    return found


def messages_of(name: str) -> list[Message]:
    _, events = replay(named(name, "redesigned"), 1 << 20)
    return [event for event in events if isinstance(event, Message)]


def replies_of(name: str) -> list[Reply]:
    _, events = replay(named(name, "redesigned"), 1 << 20)
    return [event for event in events if isinstance(event, Reply)]


def failure_of(name: str) -> CommandFailed:
    _, events = replay(named(name, "redesigned"), 1 << 20)
    (found,) = (event for event in events if isinstance(event, CommandFailed))
    return found


def test_subscription_of_the_transcript() -> None:
    session, events = replay(named("subscribe_consume_finish"), 1 << 20)
    messages = [event for event in events if isinstance(event, Message)]
    assert [message.body for message in messages[:2]] == [b"one", b"two"]
    assert [event.command for event in events if isinstance(event, Reply)] == ["SUB", "CLS"]
    assert [event.message_id for event in events if isinstance(event, AnswerFailed)] == [messages[0].id]
    assert len(messages) == 4
    assert session.in_flight == 1  # 4 received, one finished twice, one requeued: a FIN counts when it is sent


def test_ordered_messages_of_the_transcript_follow_each_other() -> None:
    messages = messages_of("sub_ordered")
    assert [message.body for message in messages] == [b"r1", b"r2", b"m0", b"m1"]
    assert [message.internal_id for message in messages] == [8, 9, 10, 11]
    for before, after in pairwise(messages):
        assert after.offset == before.offset + before.raw_size  # type: ignore[operator]


def test_headers_of_the_transcript() -> None:
    messages = messages_of("sub_ext")
    assert [message.headers for message in messages[:2]] == [{"##trace_id": "77", "k": "v"}, {}]
    assert [message.body for message in messages] == [b"EB", b"plain on ext", b"EB", b"EC", b"x1"]
    assert [message.trace_id for message in messages] == [77, 0, 77, 0, 0]


def test_advanced_messages_of_the_transcript_have_their_place_in_the_log() -> None:
    assert [(message.offset, message.raw_size, message.body) for message in messages_of("sub_advanced_detail")] == [
        (64, 32, b"q1"),
        (96, 32, b"q2"),
    ]


def test_receipts_of_the_transcript() -> None:
    assert [reply.receipt for reply in replies_of("pub_trace")] == [(12, 77, 342, 36)]
    assert [reply.receipt for reply in replies_of("pub_ext_with_trace")] == [(11, 77, 466, 62)]
    assert [reply.receipt for reply in replies_of("pub_ext_plain") + replies_of("pub_partition")] == [None, None]


@pytest.mark.parametrize(
    ("name", "error", "is_fatal", "hint"),
    [
        ("pub_not_here", TopicNotExist, True, ""),
        ("pub_ext_on_plain_topic", ExtNotSupported, False, "without headers"),
        ("sub_on_ordered_topic", OrderedSubRequired, True, "set ordered=True"),
        ("sub_ext_need", ExtendSubRequired, True, "set extend_support=True"),
        ("sub_ordered_wrong_node", NotLeader, True, ""),
        ("pub_ordered_without_partition", BadPartition, True, "set key or partition"),
    ],
)
def test_refusals_of_the_transcript_say_what_to_do(name: str, error: type, is_fatal: bool, hint: str) -> None:
    failed = failure_of(name)
    assert type(failed.error) is error
    assert failed.fatal is is_fatal
    assert hint in str(failed.error)
