"""Whatever a server sends, a session gives events or one RemoteProtocolError, the same however the bytes are cut."""

from __future__ import annotations

import random
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from nsq_fast._codec import Message, encode_frame, encode_message
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import RemoteProtocolError
from nsq_fast.protocol.session import Session

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
            said += map(described, session.receive(chunk))
        if session.failure is not None:
            session.receive(b"more")
    except RemoteProtocolError as error:
        return said, str(error)
    return said, ""


def described(event: Any) -> str:
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
    run = runpy.run_path(str(fuzz / "run.py"))
    assert sorted(run["TARGETS"]) == sorted(folder.name for folder in tmp_path.iterdir())
    assert all(len(list(folder.iterdir())) > 5 for folder in tmp_path.iterdir())
    targets = (fuzz / "targets.py").read_text()
    assert all(f"def {target}(data: bytes)" in targets for target in run["TARGETS"] if target != "readers")
