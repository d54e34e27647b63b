"""The readers and the commands against conversations recorded from real servers."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from support.core import Conversation, conversations, pieces, plain, read, read_columns
from support.oracle import OracleFrame, OracleMessage, decode

from nsq_fast import _codec
from nsq_fast._frame import FrameReader

CONVERSATIONS = list(conversations())
every_conversation = pytest.mark.parametrize(
    "conversation", CONVERSATIONS, ids=[f"{each.dialect}-{each.name}" for each in CONVERSATIONS]
)


def test_both_dialects_and_every_layout_are_there() -> None:
    assert {each.dialect for each in CONVERSATIONS} == {"original", "redesigned"}
    assert {(each.detail, each.ext) for each in CONVERSATIONS} >= {(False, False), (True, False), (False, True)}


@every_conversation
def test_whole(conversation: Conversation) -> None:
    stream = b"".join(conversation.received)
    expected = decode(stream, detail=conversation.detail, ext=conversation.ext)
    outcome = read([stream], detail=conversation.detail, ext=conversation.ext)
    assert len(outcome.frames) == len(conversation.received)
    assert outcome == (expected.frames, b"", None)


@every_conversation
def test_each_frame_alone(conversation: Conversation) -> None:
    reader = FrameReader(detail=conversation.detail, ext=conversation.ext)
    for received in conversation.received:
        (frame,) = reader.feed(received)
        expected = decode(received, detail=conversation.detail, ext=conversation.ext)
        assert [plain(frame)] == expected.frames


@every_conversation
def test_byte_by_byte(conversation: Conversation) -> None:
    stream = b"".join(conversation.received)
    layout = {"detail": conversation.detail, "ext": conversation.ext}
    assert read(pieces(stream, 1), **layout) == read([stream], **layout)
    assert read_columns(pieces(stream, 1), **layout) == read_columns([stream], **layout)


@every_conversation
def test_every_split_point(conversation: Conversation) -> None:
    stream = b"".join(conversation.received)
    layout = {"detail": conversation.detail, "ext": conversation.ext}
    whole, whole_columns = read([stream], **layout), read_columns([stream], **layout)
    for at in range(len(stream) + 1):
        halves = [stream[:at], stream[at:]]
        assert read(halves, **layout) == whole
        assert read_columns(halves, **layout) == whole_columns


@every_conversation
def test_columns_hold_the_same_messages(conversation: Conversation) -> None:
    stream = b"".join(conversation.received)
    expected = decode(stream, detail=conversation.detail, ext=conversation.ext)
    outcome, others = read_columns([stream], detail=conversation.detail, ext=conversation.ext)
    assert outcome.frames == [frame for frame in expected.frames if isinstance(frame, OracleMessage)]
    assert others == [frame for frame in expected.frames if isinstance(frame, OracleFrame)]


# what a client sends: each command line, and how to build it again from its words and its body

Builder = Callable[[list[str], bytes], bytes]


def _partition(words: list[str], at: int) -> int | None:
    return int(words[at]) if len(words) > at else None


def _bodies(body: bytes) -> list[bytes]:
    bodies, at = [], 4
    while at < len(body):
        end = at + 4 + int.from_bytes(body[at : at + 4], "big")
        bodies.append(body[at + 4 : end])
        at = end
    return bodies


def _pub_ext(words: list[str], body: bytes) -> bytes:
    end = 2 + int.from_bytes(body[:2], "big")
    return _codec.pub_ext(words[1], body[2:end], body[end:], _partition(words, 2))


BUILDERS: dict[str, Builder] = {
    "IDENTIFY": lambda words, body: _codec.identify(body),
    "SUB": lambda words, body: _codec.sub(words[1], words[2], _partition(words, 3)),
    "SUB_ADVANCED": lambda words, body: _codec.sub_advanced(words[1], words[2], _partition(words, 3)),
    "SUB_ORDERED": lambda words, body: _codec.sub_ordered(words[1], words[2], _partition(words, 3)),
    "PUB": lambda words, body: _codec.pub(words[1], body, _partition(words, 2)),
    "MPUB": lambda words, body: _codec.mpub(words[1], _bodies(body), _partition(words, 2)),
    "DPUB": lambda words, body: _codec.dpub(words[1], int(words[2]), body),
    "PUB_TRACE": lambda words, body: _codec.pub_trace(
        words[1], int.from_bytes(body[:8], "big"), body[8:], _partition(words, 2)
    ),
    "PUB_EXT": _pub_ext,
    "RDY": lambda words, body: _codec.rdy(int(words[1])),
    "CLS": lambda words, body: _codec.cls(),
}
# recorded to see what a server says to it: no function of ours builds them
REFUSED = {
    b"SUB_ORDER ord1 tape3 0\n",
    b"PUB t1 x\n\x00\x00\x00\x05hello",
    b"MPUB r1\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0]),
}
BY_ID = re.compile(rb"(FIN|TOUCH|REQ) (.{16})(?: (\d+))?\n\Z", re.DOTALL)


def _rebuild(data: bytes) -> bytes:
    if match := BY_ID.match(data):
        verb, id, delay = match.groups()
        if verb == b"REQ":
            return _codec.req(id, int(delay))
        return _codec.fin(id) if verb == b"FIN" else _codec.touch(id)
    line, _, rest = data.partition(b"\n")
    words = line.decode().split(" ")
    return BUILDERS[words[0]](words, rest[4:])


@every_conversation
def test_commands_are_the_bytes_that_were_sent(conversation: Conversation) -> None:
    commands = [data for data in conversation.sent if not data.startswith(b"  V")]
    for data in commands:
        if data not in REFUSED:
            assert _rebuild(data) == data
