"""The session against conversations: recorded from real servers, random ones, and those of docs/embedding.md."""

from __future__ import annotations

import inspect
import json
import random
import re
import runpy
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import blinker
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nsq_fast.protocol as protocol
from nsq_fast._codec import Message, encode_frame, encode_message
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import (
    BadPartition,
    ExtendSubRequired,
    ExtNotSupported,
    LocalProtocolError,
    NotLeader,
    NsqError,
    OrderedSubRequired,
    RemoteProtocolError,
    TopicNotExist,
)
from nsq_fast.protocol import Event, Stage
from nsq_fast.protocol.dialect import ORIGINAL
from nsq_fast.protocol.session import AnswerFailed, CommandFailed, Disconnected, Reply, Session

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
    is_fatal = any(getattr(event, "fatal", False) for event in events)
    is_closed = any(isinstance(event, Disconnected) for event in events)
    assert is_closed == (is_fatal or record["name"] == "heartbeat_unanswered"), "a server that closes had said why"


def events_of(kind: type, name: str, family: str = "redesigned") -> list[Any]:
    (record,) = (param.values[0] for param in transcripts(family) if param.id == name)
    return [event for event in replay(record, 1 << 20)[1] if isinstance(event, kind)]


def test_subscription_of_the_transcript() -> None:
    conversation = "subscribe_consume_finish", "original"
    messages = events_of(Message, *conversation)
    assert [message.body for message in messages[:2]] == [b"one", b"two"]
    assert [event.command for event in events_of(Reply, *conversation)] == ["SUB", "CLS"]
    assert [event.message_id for event in events_of(AnswerFailed, *conversation)] == [messages[0].id]
    assert len(messages) == 4


def test_messages_of_the_transcripts_have_their_place_in_the_log_and_their_headers() -> None:
    messages = events_of(Message, "sub_ordered")
    assert [message.body for message in messages] == [b"r1", b"r2", b"m0", b"m1"]
    assert [message.internal_id for message in messages] == [8, 9, 10, 11]
    for before, after in pairwise(messages):
        assert after.offset == before.offset + before.raw_size
    found = [(message.offset, message.raw_size, message.body) for message in events_of(Message, "sub_advanced_detail")]
    assert found == [(64, 32, b"q1"), (96, 32, b"q2")]
    messages = events_of(Message, "sub_ext")
    assert [message.headers for message in messages[:2]] == [{"##trace_id": "77", "k": "v"}, {}]
    assert [message.body for message in messages] == [b"EB", b"plain on ext", b"EB", b"EC", b"x1"]
    assert [message.trace_id for message in messages] == [77, 0, 77, 0, 0]


@pytest.mark.parametrize(
    ("name", "receipt"),
    [
        ("pub_trace", (12, 77, 342, 36)),
        ("pub_ext_with_trace", (11, 77, 466, 62)),
        ("pub_ext_plain", None),
        ("pub_partition", None),
    ],
)
def test_receipts_of_the_transcript(name: str, receipt: Any) -> None:
    assert [reply.receipt for reply in events_of(Reply, name)] == [receipt]


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
    (failed,) = events_of(CommandFailed, name)
    assert type(failed.error) is error
    assert failed.fatal is is_fatal
    assert hint in str(failed.error)


# Whatever a server sends, a session gives events or one RemoteProtocolError, the same however the bytes are cut.


FRAMES = [
    encode_frame(0, b'{"version":"1.3.0","max_rdy_count":2500}'),
    encode_frame(0, b"OK"),
    encode_frame(0, b"_heartbeat_"),
    encode_frame(0, b"CLOSE_WAIT"),
    encode_frame(1, b"E_FIN_FAILED FIN 0123456789abcdef failed"),
    encode_frame(1, b"E_BAD_TOPIC no"),
    encode_frame(1, b""),
    encode_message(1, 1, b"0123456789abcdef", b"body"),
    encode_message(1, 1, b"0123456789abcdef", b""),
    b"\xff\xff\xff\xff",
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"\0\0\0\x03\0\0\0",
]


def drive(chunks: list[bytes], is_ready: bool) -> tuple[list[str], str]:
    """Everything a session says to these chunks, commands being pending, and the error that ended it."""
    session = Session(ConnectionConfig())
    session.connect()
    if is_ready:
        session.receive(FRAMES[0])
        session.sub("t", "c", token=0)
        for number in range(1, 4):
            session.pub("t", b"x", token=number)
    said: list[str] = []
    try:
        for chunk in chunks:
            said += map(words, session.receive(chunk))
        if session.failure is not None:
            session.receive(b"more")
    except RemoteProtocolError as error:
        return said, str(error)
    return said, ""


def words(event: Any) -> str:
    return f"{event.id!r} {event.body!r}" if isinstance(event, Message) else repr(event)


def cut(data: bytes, seed: int) -> list[bytes]:
    source = random.Random(seed)
    chunks: list[bytes] = []
    while data:
        size = source.choice((1, 2, 5, 9, 40))
        chunks.append(data[:size])
        data = data[size:]
    return chunks


@settings(max_examples=300)
@given(st.lists(st.sampled_from(FRAMES), max_size=8), st.binary(max_size=4), st.booleans(), st.integers(0, 1000))
def test_same_story_however_it_is_cut(frames: list[bytes], tail: bytes, is_ready: bool, seed: int) -> None:
    data = b"".join(frames) + tail
    if data:
        assert drive(cut(data, seed), is_ready) == drive([data], is_ready)


@settings(max_examples=300)
@given(st.lists(st.sampled_from(FRAMES[:9]), min_size=1, max_size=8), st.integers(0, 100_000), st.integers(1, 255))
def test_damaged_streams(frames: list[bytes], place: int, damage: int) -> None:
    data = bytearray(b"".join(frames))
    data[place % len(data)] ^= damage
    drive([bytes(data)], True)
    drive([bytes(data)], False)


def test_each_fuzzer_has_seeds_and_a_target(tmp_path):
    """Seeds are made of what is a conversation; tests/data holds other records, too."""
    fuzz = Path(__file__).parents[2] / "fuzz"
    subprocess.run([sys.executable, fuzz / "corpus.py", tmp_path], check=True)
    seeds = {folder.name: len(list(folder.iterdir())) for folder in tmp_path.iterdir()}
    assert set(runpy.run_path(str(fuzz / "run.py"))["TARGETS"]) == set(seeds)
    assert min(seeds.values()) > 5
    targets = (fuzz / "targets.py").read_text()
    assert all(f"def {target}(data: bytes)" in targets for target in seeds if target != "readers")


# docs/embedding.md is the contract of embedders: its tables, its names and its program are held to the code here.


DOCS = (Path(__file__).parents[2] / "docs" / "embedding.md").read_text()
OK = encode_frame(0, b"OK")
REFUSED = encode_frame(1, b"E_INVALID no")
PLAIN = b'{"version":"1.3.0","max_rdy_count":2500}'
LAYERS = b'{"version":"1.3.0","tls_v1":true,"deflate":true,"auth_required":true}'
AUTH = b'{"version":"1.3.0","auth_required":true}'
ONE_LAYER = b'{"version":"1.3.0","tls_v1":true}'


def new_session() -> Session:
    return Session(ConnectionConfig(tls_v1=False, auth_secret="s"))


def layered_session() -> Session:
    return Session(ConnectionConfig(tls_v1=True, deflate=True, auth_secret="s"))


def connect(session: Session) -> None:
    session.connect()


def reading(data: bytes) -> Callable[[Session], object]:
    return lambda session: session.receive(data)


def upgraded(session: Session) -> None:
    session.upgraded()


def identified(reply: bytes) -> Callable[[Session], object]:
    return reading(encode_frame(0, reply))


def fatal_error(session: Session) -> None:
    session.pub("t", b"x")
    session.receive(REFUSED)


CONVERSATIONS: list[tuple[Callable[[], Session], list[Callable[[Session], object]]]] = [
    (new_session, [connect, identified(PLAIN), fatal_error]),
    (new_session, [connect, identified(AUTH), identified(b'{"identity":"me"}')]),
    (layered_session, [connect, identified(LAYERS), upgraded, reading(OK), upgraded, reading(OK), identified(b"{}")]),
    (layered_session, [connect, identified(ONE_LAYER), upgraded, reading(OK)]),
]


def walks() -> Iterator[tuple[Session, list[Stage]]]:
    """Sessions in each stage, made by the beginnings of all conversations, and their ends; the stages on the way."""
    for make, steps in CONVERSATIONS:
        for count in range(len(steps) + 1):
            for ends in ([], [reading(b"")]):
                session = make()
                stages = [session.stage]
                for step in [*steps[:count], *ends]:
                    step(session)
                    stages.append(session.stage)
                yield session, stages


def sessions() -> dict[Stage, list[Session]]:
    found: dict[Stage, list[Session]] = defaultdict(list)
    for session, _ in walks():
        found[session.stage].append(session)
    return found


def transitions() -> dict[Stage, set[Stage]]:
    pairs = {pair for _, stages in walks() for pair in pairwise(stages)}
    return {stage: {after for before, after in pairs if before is stage is not after} for stage in Stage}


def table() -> dict[str, dict[str, str]]:
    text = DOCS.partition("<!-- states -->\n")[2].partition("<!-- end -->")[0]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


ACTIONS: dict[str, Callable[[Session], object]] = {
    "connect": connect,
    "receive data": lambda session: "yes" if session.receive(b"\0") or session.stage.value < Stage.OVER.value else [],
    "upgraded": upgraded,
    "commands": lambda session: session.pub("t", b"x"),
}


def verdict(action: str, session: Session) -> str:
    try:
        done = ACTIONS[action](session)
    except LocalProtocolError:
        return "refused"
    return "nothing" if done == [] else "yes"


def test_the_table_of_states_has_every_stage() -> None:
    assert set(table()) == {stage.name for stage in Stage}
    assert set(sessions()) == set(Stage)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("stage", Stage)
def test_what_a_state_allows(stage: Stage, action: str) -> None:
    assert {verdict(action, session) for session in sessions()[stage]} == {table()[stage.name][action]}


@pytest.mark.parametrize("stage", Stage)
def test_answers_are_allowed_once_there_was_a_subscription_also_where_nobody_reads_them(stage: Stage) -> None:
    message = Message(1, 1, b"1" * 16, b"")
    answers: list[Callable[[Session], bytes]] = [
        lambda session: session.fin(message),
        lambda session: session.req(message, 0),
        lambda session: session.touch(message),
        lambda session: session.set_rdy(1),
    ]
    for session in sessions()[stage]:
        assert session.nop() == b"NOP\n"
        for answer in answers:
            if session.is_subscribed:
                assert answer(session).endswith(b"\n")
            else:
                with pytest.raises(LocalProtocolError):
                    answer(session)


@pytest.mark.parametrize("stage", Stage)
def test_where_a_state_leads(stage: Stage) -> None:
    documented = {name.strip() for name in table()[stage.name]["leads to"].split(",") if name.strip()}
    assert documented == {after.name for after in transitions()[stage]}


def words_of(text: str) -> set[str]:
    """The names in code spans."""
    return {
        word
        for span in re.findall(r"`([^`]+)`|```\w+\n(.*?)```", text, re.S)
        for word in re.findall(r"\w+", " ".join(span))
    }


def test_every_public_name_is_documented() -> None:
    assert set(protocol.__all__) - words_of(DOCS) - {"__all__"} == set()
    assert all(hasattr(protocol, name) for name in protocol.__all__)
    public = {name for name, _ in inspect.getmembers(Session) if not name.startswith("_")}
    attributes = {name for name in vars(new_session()) if not name.startswith("_")}
    assert (public | attributes) - words_of(DOCS) == set()


def test_every_field_of_every_event_is_documented() -> None:
    kinds = [kind for name in protocol.__all__ if isinstance(kind := getattr(protocol, name), type)]
    for kind in kinds:
        if issubclass(kind, Event) and kind is not Event:
            (row,) = [line for line in DOCS.splitlines() if line.startswith(f"| `{kind.__name__}`")]
            assert set(kind.__struct_fields__) - {"send"} == words_of(row.split("|")[2])


def test_the_program_of_the_page() -> None:
    program = re.findall(r"```python\n(.*?)```", DOCS, re.S)[0]
    message = encode_message(1, 1, b"0123456789abcdef", b"body")
    incoming = [encode_frame(0, PLAIN), OK + message[:9], message[9:], encode_frame(0, b"_heartbeat_"), b""]
    written: list[bytes] = []
    names = {**{name: getattr(protocol, name) for name in protocol.__all__}}
    exec(program, {**names, "write": written.append, "read": lambda: incoming.pop(0), "Message": Message})
    commands = [b"  V2IDENTIFY\n", b"SUB topic channel\n", b"RDY 100\n", b"FIN 0123456789abcdef\n", b"NOP\n"]
    assert [data.partition(b"\n")[0] + b"\n" for data in written] == commands


def test_the_responder_of_the_page_has_signals() -> None:
    (program,) = re.findall(r"```python\n(class Responder:.*?)```", DOCS, re.DOTALL)
    names: dict[str, Any] = {"SimpleNamespace": SimpleNamespace, "blinker": blinker}
    exec(program, names)
    written: list[bytes] = []
    heard: list[bytes] = []
    responder = names["Responder"](None, written.append)
    session = responder.session = Session(ConnectionConfig(), responder=responder)
    for step in (connect, identified(PLAIN), lambda session: session.sub("t", "c"), reading(OK)):
        step(session)
    first, second = session.receive(encode_message(1, 1, b"1" * 16, b"a") + encode_message(1, 1, b"2" * 16, b"b"))

    def receiver(message: Message) -> None:
        heard.append(message.body)

    first.on_finish.connect(receiver)
    first.finish()
    second.finish()
    assert written == [b"FIN " + b"1" * 16 + b"\n", b"FIN " + b"2" * 16 + b"\n"]
    assert heard == [b"a"]


def test_a_responder_without_signals_says_so() -> None:
    message = Message(1, 1, b"1" * 16, b"a", responder=object())
    with pytest.raises(AttributeError, match=r"on_finish: the responder .* has no signals_of\(message\)"):
        _ = message.on_finish
