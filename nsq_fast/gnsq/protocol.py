"""The wire protocol as gnsq's functions: commands as bytes, and parsers of frames.

Publishes and frames are the compiled core's. The short commands are built
here, because gnsq's take text, and ids of any length.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from nsq_fast import _codec
from nsq_fast._codec import MAGIC_V2 as MAGIC_V2
from nsq_fast._frame import FrameReader
from nsq_fast.errors import NSQFrameError, printable
from nsq_fast.names import NAME_PATTERN, is_valid_name

VALID_NAME_RE = NAME_PATTERN
NEWLINE = b"\n"
SPACE = b" "
EMPTY = b""
HEARTBEAT = b"_heartbeat_"
OK = b"OK"

IDENTIFY = b"IDENTIFY"
AUTH = b"AUTH"
SUB = b"SUB"
PUB = b"PUB"
MPUB = b"MPUB"
DPUB = b"DPUB"
RDY = b"RDY"
FIN = b"FIN"
REQ = b"REQ"
TOUCH = b"TOUCH"
CLS = b"CLS"
NOP = b"NOP"

FRAME_TYPE_RESPONSE = 0
FRAME_TYPE_ERROR = 1
FRAME_TYPE_MESSAGE = 2

Text = str | bytes


valid_topic_name: Callable[[str], bool] = is_valid_name
valid_channel_name: Callable[[str], bool] = is_valid_name


def assert_valid_topic_name(topic: str) -> None:
    """Raise ValueError unless a topic may be called that."""
    if not valid_topic_name(topic):
        raise ValueError("invalid topic name")


def assert_valid_channel_name(channel: str) -> None:
    """Raise ValueError unless a channel may be called that."""
    if not valid_channel_name(channel):
        raise ValueError("invalid channel name")


# What servers send


def unpack_size(data: bytes) -> int:
    if len(data) != 4:
        raise NSQFrameError(f"a size has 4 bytes, not {len(data)}")
    return int.from_bytes(data, "big", signed=True)


def unpack_response(data: bytes) -> tuple[int, bytes]:
    """Frame type and data of a frame without its size."""
    return unpack_size(data[:4]), data[4:]


def unpack_message(data: bytes) -> tuple[int, int, bytes, bytes]:
    """Timestamp (ns), attempts, id and body of a message frame's data. Raises NSQFrameError when it is cut short."""
    reader = FrameReader(max_frame_size=max(len(data) + 4, 1024))
    frames = reader.feed(_codec.encode_frame(FRAME_TYPE_MESSAGE, data)) or reader.feed(b"")
    (message,) = frames
    if not isinstance(message, _codec.Message):
        raise NSQFrameError(f"not a message: {printable(repr(message))}")
    return message.timestamp, message.attempts, message.id, message.body


# Commands


def _command(word: bytes, *parameters: Text) -> bytes:
    return SPACE.join([word, *map(_encoded, parameters)]) + NEWLINE


def _encoded(value: Text) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


def _checked_body(body: Any) -> bytes:
    if not isinstance(body, bytes):
        raise TypeError("message body must be a byte string")
    return body


def identify(data: dict[str, Any]) -> bytes:
    return _codec.identify(json.dumps(data).encode())


def auth(secret: Text) -> bytes:
    return _codec.auth(_encoded(secret))


def subscribe(topic_name: str, channel_name: str) -> bytes:
    assert_valid_topic_name(topic_name)
    assert_valid_channel_name(channel_name)
    return _codec.sub(topic_name, channel_name)


def publish(topic_name: str, data: bytes) -> bytes:
    assert_valid_topic_name(topic_name)
    return _codec.pub(topic_name, _checked_body(data))


def multipublish_body(messages: Iterable[bytes]) -> bytes:
    """The body of MPUB, for any iterable of messages."""
    return _codec.mpub_body([_checked_body(message) for message in messages])


def multipublish(topic_name: str, messages: Iterable[bytes]) -> bytes:
    assert_valid_topic_name(topic_name)
    return _codec.mpub(topic_name, [_checked_body(message) for message in messages])


def deferpublish(topic_name: str, data: bytes, delay_ms: int) -> bytes:
    assert_valid_topic_name(topic_name)
    return _codec.dpub(topic_name, delay_ms, _checked_body(data))


def ready(count: int) -> bytes:
    if not isinstance(count, int):
        raise TypeError("ready count must be an integer")
    if count < 0:
        raise ValueError("ready count cannot be negative")
    return _codec.rdy(count)


def finish(message_id: Text) -> bytes:
    return _command(FIN, message_id)


def requeue(message_id: Text, timeout: int = 0) -> bytes:
    """REQ; timeout in ms."""
    if not isinstance(timeout, int):
        raise TypeError("requeue timeout must be an integer")
    return _command(REQ, message_id, str(timeout))


def touch(message_id: Text) -> bytes:
    return _command(TOUCH, message_id)


close: Callable[[], bytes] = _codec.cls
nop: Callable[[], bytes] = _codec.nop
