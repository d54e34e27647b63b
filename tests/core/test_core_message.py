"""Message: its fields, its answer-once rule, and what it refuses to be built from."""

from __future__ import annotations

import pickle
import weakref
from typing import Any

import pytest

from nsq_fast._codec import Message, encode_message, split_id
from nsq_fast._frame import FrameReader
from nsq_fast.errors import AlreadyResponded, RemoteProtocolError

ID = bytes(range(1, 17))


class Recorder:
    """A responder that writes down what it was asked, or refuses."""

    partition = 3

    def __init__(self, refusal: Exception | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refusal = refusal

    def _record(self, *call: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.calls.append(call)

    def finish(self, message: Message) -> None:
        self._record("finish", message)

    def requeue(self, message: Message, time_ms: int | None, backoff: bool) -> None:
        self._record("requeue", message, time_ms, backoff)

    def touch(self, message: Message) -> None:
        self._record("touch", message)


def make(**options: Any) -> Message:
    return Message(1_500_000_000_000_000_000, 2, ID, b"body", **options)


def received(ext: bytes | None, *, version: int = 4, responder: object = None) -> Message:
    frame = encode_message(1, 1, ID, b"body", ext_version=0 if ext is None else version, ext=ext or b"")
    (message,) = FrameReader(ext=True, responder=responder).feed(frame)
    assert isinstance(message, Message)
    return message


def test_fields_of_a_message_built_by_hand() -> None:
    message = make()
    assert (message.timestamp, message.attempts, message.id, message.body) == (
        1_500_000_000_000_000_000,
        2,
        ID,
        b"body",
    )
    assert (message.internal_id, message.trace_id) == (0x0102030405060708, 0x090A0B0C0D0E0F10) == split_id(ID)
    assert (message.ext, message.ext_version, message.headers) == (None, 0, {})
    assert (message.offset, message.raw_size, message.received_at) == (None, None, 0.0)
    assert (message.responder, message.partition) == (None, None)


def test_all_optional_fields() -> None:
    message = make(ext=bytearray(b'{"k": 1}'), offset=2**64 - 1, raw_size=2**32 - 1, received_at=1.5, responder=ID)
    assert (message.ext, message.ext_version, message.headers) == (b'{"k": 1}', 4, {"k": 1})
    assert (message.offset, message.raw_size, message.received_at) == (2**64 - 1, 2**32 - 1, 1.5)
    assert message.responder is ID


def test_reader_hands_over_responder_and_time() -> None:
    responder = Recorder()
    (message,) = FrameReader(responder=responder).feed(encode_message(1, 1, ID, b"x"), 12.25)
    assert isinstance(message, Message)
    assert message.responder is responder
    assert message.received_at == 12.25
    assert message.partition == 3


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"timestamp": "1"}, TypeError, "timestamp"),
        ({"timestamp": 1.5}, TypeError, "timestamp"),
        ({"timestamp": 2**63}, ValueError, "timestamp"),
        ({"attempts": -1}, ValueError, "attempts"),
        ({"attempts": 65536}, ValueError, "attempts"),
        ({"id": b"1234"}, ValueError, "id"),
        ({"id": "0123456789abcdef"}, TypeError, "id"),
        ({"body": "text"}, TypeError, "body"),
        ({"body": None}, TypeError, "body"),
        ({"ext": "{}"}, TypeError, "ext"),
        ({"ext_version": 256}, ValueError, "ext_version"),
        ({"offset": 1}, ValueError, "raw_size"),
        ({"offset": -1, "raw_size": 1}, ValueError, "offset"),
        ({"offset": 1, "raw_size": 2**32}, ValueError, "raw_size"),
    ],
)
def test_a_bad_argument_is_named(options: dict[str, Any], error: type[Exception], name: str) -> None:
    arguments = {"timestamp": 1, "attempts": 1, "id": ID, "body": b"", **options}
    with pytest.raises(error, match=name):
        Message(**arguments)


@pytest.mark.parametrize("answer", ["finish", "requeue"])
@pytest.mark.parametrize("again", ["finish", "requeue", "touch"])
def test_a_message_is_answered_once(answer: str, again: str) -> None:
    responder = Recorder()
    message = make(responder=responder)
    message.touch()
    getattr(message, answer)()
    assert message.has_responded()
    with pytest.raises(AlreadyResponded, match=ID.hex()):
        getattr(message, again)()
    assert [call[0] for call in responder.calls] == ["touch", answer]


def test_requeue_passes_its_arguments_on() -> None:
    responder = Recorder()
    make(responder=responder).requeue(1500, backoff=False)
    make(responder=responder).requeue()
    assert [call[2:] for call in responder.calls] == [(1500, False), (None, True)]


@pytest.mark.parametrize("answer", ["finish", "requeue"])
def test_an_answer_that_could_not_be_sent_may_be_tried_again(answer: str) -> None:
    responder = Recorder(refusal=OSError("closed"))
    message = make(responder=responder)
    with pytest.raises(OSError, match="closed"):
        getattr(message, answer)()
    assert not message.has_responded()
    responder.refusal = None
    getattr(message, answer)()
    assert message.has_responded()


@pytest.mark.parametrize(
    ("ext", "version", "headers"),
    [
        (b'{"##trace_id":"77","k":"v"}', 4, {"##trace_id": "77", "k": "v"}),
        (None, 0, {}),
        (b"", 4, {}),
        (b"123", 4, {}),
        (b"[1]", 4, {}),
        (b"a tag, not JSON", 2, {}),
        (b"whatever comes later", 9, {}),
    ],
)
def test_headers(ext: bytes | None, version: int, headers: dict[str, Any]) -> None:
    message = received(ext, version=version)
    assert message.headers == headers
    assert message.headers is message.headers
    assert (message.ext, message.ext_version) == (ext, version)


@pytest.mark.parametrize("ext", [b"{", b"\xff\xfe{}", b"[" * 60_000, b"{" * 10 + b"}"])
def test_headers_that_are_not_json(ext: bytes) -> None:
    message = received(ext)
    with pytest.raises(RemoteProtocolError, match="not JSON"):
        _ = message.headers
    assert message.ext == ext


def test_what_came_from_the_server_cannot_be_changed() -> None:
    message = make()
    for name in ("timestamp", "attempts", "id", "body", "ext", "offset", "raw_size", "internal_id", "trace_id"):
        with pytest.raises(AttributeError):
            setattr(message, name, getattr(message, name))


def test_repr_shows_what_one_looks_for() -> None:
    message = Message(7, 2, b"18a271187ba69000", b"hello", offset=9, raw_size=35)
    assert repr(message) == "<Message 18a271187ba69000 attempts=2 timestamp=7 body=5 bytes offset=9>"
    message.finish()
    assert repr(message).endswith(" responded>")
    assert ID.hex() in repr(make())


def test_it_may_be_subclassed() -> None:
    class Mine(Message):
        def finish(self) -> None:
            self.done = True
            super().finish()

    message = Mine(1, 1, ID, b"x")
    message.finish()
    assert message.done
    assert message.has_responded()
    assert repr(message).startswith("<Mine ")


def test_a_subclass_that_never_calls_init_is_harmless() -> None:
    message = Message.__new__(Message)
    assert message.id == bytes(16)
    assert message.body is None
    assert message.headers == {}
    assert "0 bytes" in repr(message)


def test_no_weak_references_and_no_pickles() -> None:
    with pytest.raises(TypeError):
        weakref.ref(make())
    with pytest.raises(TypeError):
        pickle.dumps(make())
