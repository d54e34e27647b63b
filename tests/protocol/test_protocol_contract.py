"""docs/embedding.md is the contract of embedders: its tables, its names and its program are held to the code here."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import blinker
import pytest

import nsq_fast.protocol as protocol
from nsq_fast._codec import encode_frame, encode_message
from nsq_fast.protocol import ConnectionConfig, Event, LocalProtocolError, Message, Session, Stage

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


def read(data: bytes) -> Callable[[Session], object]:
    return lambda session: session.receive(data)


def upgraded(session: Session) -> None:
    session.upgraded()


def identified(reply: bytes) -> Callable[[Session], object]:
    return read(encode_frame(0, reply))


def fatal_error(session: Session) -> None:
    session.pub("t", b"x")
    session.receive(REFUSED)


CONVERSATIONS: list[tuple[Callable[[], Session], list[Callable[[Session], object]]]] = [
    (new_session, [connect, identified(PLAIN), fatal_error]),
    (new_session, [connect, identified(AUTH), identified(b'{"identity":"me"}')]),
    (layered_session, [connect, identified(LAYERS), upgraded, read(OK), upgraded, read(OK), identified(b"{}")]),
    (layered_session, [connect, identified(ONE_LAYER), upgraded, read(OK)]),
]


def sessions() -> dict[Stage, list[Session]]:
    """Sessions in each stage, made by the beginnings of all conversations, and their ends."""
    found: dict[Stage, list[Session]] = defaultdict(list)
    for make, steps in CONVERSATIONS:
        for count in range(len(steps) + 1):
            for is_over in (False, True):
                session = make()
                for step in steps[:count]:
                    step(session)
                if is_over:
                    session.receive(b"")
                found[session.stage].append(session)
    return found


def transitions() -> dict[Stage, set[Stage]]:
    found: dict[Stage, set[Stage]] = {stage: set() for stage in Stage}
    for make, steps in CONVERSATIONS:
        for count in range(len(steps) + 1):
            session = make()
            for step in steps[:count]:
                before = session.stage
                step(session)
                found[before].add(session.stage)
            before = session.stage
            session.receive(b"")
            found[before].add(session.stage)
    return {stage: after - {stage} for stage, after in found.items()}


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
    for step in (connect, identified(PLAIN), lambda session: session.sub("t", "c"), read(OK)):
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
