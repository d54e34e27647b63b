"""JSON headers as the server's parser reads them, which takes more than JSON, and says in its own words what it cannot.

The parser is valyala/fastjson 1.6.1 (parser.go): strings may hold any bytes, and escapes that mean nothing stay as
they are; a number is any run of the characters that numbers have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from nsq_fast.broker.tcp.command_set import quote

MAX_DEPTH = 300
_SPACE = b" \n\t\r"
_STRING = re.compile(rb'((?:[^"\\]|\\.)*)"', re.DOTALL)
_NUMBER = re.compile(rb"[0-9.eE+-]+")
_NAMED_NUMBER = re.compile(rb"[+-]?(?:inf|nan)", re.IGNORECASE)
_WORDS = {b"t": (b"true", True), b"f": (b"false", False), b"n": (b"null", None)}
_ESCAPE = re.compile(rb"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPED = {b'"': b'"', b"\\": b"\\", b"/": b"/", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t"}
_LONGEST_SHOWN = 80


class _Error(ValueError):
    """What is wrong, and what stands there."""

    def __init__(self, reason: str, tail: bytes) -> None:
        super().__init__(reason)
        self.reason = reason
        self.tail = tail


def decode(data: bytes) -> Any:
    """The value; numbers are as they come. Raises ValueError with the text of the server's parser."""
    try:
        return msgspec.json.decode(data)
    except (ValueError, RecursionError):
        return _decode(data)


def _decode(data: bytes) -> Any:
    try:
        value, rest = _value(data.lstrip(_SPACE), 1)
    except _Error as error:
        raise ValueError(f"cannot parse JSON: {error.reason}; unparsed tail: {_shown(error.tail)}") from error
    if rest := rest.lstrip(_SPACE):
        raise ValueError(f"unexpected tail: {_shown(rest)}")
    return value


def _shown(tail: bytes) -> str:
    if len(tail) > _LONGEST_SHOWN:
        tail = tail[: _LONGEST_SHOWN // 2] + b"..." + tail[-_LONGEST_SHOWN // 2 :]
    return quote(tail)


def _value(data: bytes, depth: int) -> tuple[Any, bytes]:
    """The value that ``data`` begins with, and the rest."""
    first = data[:1]
    if not first:
        raise _Error("cannot parse empty string", data)
    if depth > MAX_DEPTH:
        raise _Error(f"too big depth for the nested JSON; it exceeds {MAX_DEPTH}", data)
    for opening, kind, parse in ((b"{", "object", _object), (b"[", "array", _array), (b'"', "string", _string)):
        if first == opening:
            with _inside(kind):
                return parse(data[1:], depth)
    if first in _WORDS and data.startswith(_WORDS[first][0]):
        word, value = _WORDS[first]
        return value, data[len(word) :]
    if first in _WORDS and data[:3].lower() != b"nan":
        raise _Error(f"unexpected value found: {quote(data)}", data)
    found = _NAMED_NUMBER.match(data) or _NUMBER.match(data)
    if found is None or (found[0] in (b"+", b"-") and found.end() < len(data)):
        raise _Error(f"cannot parse number: unexpected char: {quote(first)}", data)
    return found[0], data[found.end() :]


@contextmanager
def _inside(kind: str) -> Iterator[None]:
    """Say of an error in what it is."""
    try:
        yield
    except _Error as error:
        raise _Error(f"cannot parse {kind}: {error.reason}", error.tail) from error


def _array(data: bytes, depth: int) -> tuple[list[Any], bytes]:
    data = data.lstrip(_SPACE)
    if not data:
        raise _Error("missing ']'", data)
    values: list[Any] = []
    if data.startswith(b"]"):
        return values, data[1:]
    while True:
        with _inside("array value"):
            value, data = _value(data.lstrip(_SPACE), depth + 1)
        values.append(value)
        has_more, data = _after_value(data, "array", b"]")
        if not has_more:
            return values, data


def _object(data: bytes, depth: int) -> tuple[dict[str, Any], bytes]:
    data = data.lstrip(_SPACE)
    if not data:
        raise _Error("missing '}'", data)
    values: dict[str, Any] = {}
    if data.startswith(b"}"):
        return values, data[1:]
    while True:
        data = data.lstrip(_SPACE)
        if not data.startswith(b'"'):
            raise _Error('cannot find opening \'"" for object key', data)
        with _inside("object key"):
            key, data = _string(data[1:], depth)
        data = data.lstrip(_SPACE)
        if not data.startswith(b":"):
            raise _Error("missing ':' after object key", data)
        with _inside("object value"):
            value, data = _value(data[1:].lstrip(_SPACE), depth + 1)
        values.setdefault(key, value)
        has_more, data = _after_value(data, "object", b"}")
        if not has_more:
            return values, data


def _after_value(data: bytes, kind: str, closing: bytes) -> tuple[bool, bytes]:
    """Whether another value follows, and the rest."""
    data = data.lstrip(_SPACE)
    if not data:
        raise _Error(f"unexpected end of {kind}", data)
    if data.startswith(closing):
        return False, data[1:]
    if not data.startswith(b","):
        raise _Error(f"missing ',' after {kind} value", data)
    return True, data[1:]


def _string(data: bytes, depth: int) -> tuple[str, bytes]:
    found = _STRING.match(data)
    if found is None:
        raise _Error("missing closing '\"'", b"")
    return _ESCAPE.sub(_unescape, found[1]).decode("utf-8", "replace"), data[found.end() :]


def _unescape(found: re.Match[bytes]) -> bytes:
    text: bytes = found[1]
    if len(text) > 1:
        code = int(text[1:], 16)
        return found[0] if 0xD800 <= code < 0xE000 else chr(code).encode()
    return _ESCAPED.get(text, found[0])
