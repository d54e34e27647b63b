"""What Go, and the libraries of the servers, read otherwise than Python: numbers, JSON, globs; and how they quote."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, TypeVar

import msgspec

T = TypeVar("T")

Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]

_LIMIT = 1 << 63
_INTEGER = re.compile(rb"([+-]?)0*([0-9]+)\Z")
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPES = {"\a": "\\a", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\v": "\\v"}


# --- text and numbers ------------------------------------------------------------------------------------------------


def text(data: bytes) -> str:
    """Bytes of a command as they may stand in an error."""
    return data.decode("utf-8", "surrogateescape")


def quote(data: bytes) -> str:
    """Bytes in quotes as the original prints names."""
    parts = []
    for char in text(data):
        if char in '"\\':
            parts.append("\\" + char)
        elif char.isprintable():
            parts.append(char)
        elif "\udc80" <= char <= "\udcff":
            parts.append(f"\\x{ord(char) - 0xDC00:02x}")
        else:
            parts.append(_ESCAPES.get(char) or (f"\\x{ord(char):02x}" if ord(char) < 0x80 else f"\\u{ord(char):04x}"))
    return '"' + "".join(parts) + '"'


def parse_integer(data: bytes, function: str = "Atoi") -> int:
    """A whole number of 64 bits; ValueError with the text of the function of strconv that parses it there."""
    found = _INTEGER.match(data)
    if found is None:
        raise ValueError(f"strconv.{function}: parsing {quote(data)}: invalid syntax")
    sign, digits = found.groups()
    value = int(sign + digits[:20])  # more than 19 are too many, however many there are
    if not -_LIMIT <= value < _LIMIT:
        raise ValueError(f"strconv.{function}: parsing {quote(data)}: value out of range")
    return value


def as_int64(value: int) -> int:
    """What is left of a result in 64 bits: Go's int64 wraps around."""
    return (value + _LIMIT) % (2 * _LIMIT) - _LIMIT


# --- JSON ------------------------------------------------------------------------------------------------------------


def decode_json(data: bytes, kind: type[T]) -> T:
    """Decode into a Struct with names in lower case; ValueError for other JSON, or none.

    As encoding/json does: a null is as good as a key that is not there, the case of keys is ignored, and what is no
    Unicode is replaced.
    """
    try:
        value = json.loads(
            data.decode("utf-8", "replace"), object_pairs_hook=_without_nulls, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"JSON is malformed: {error}") from error
    return msgspec.convert({} if value is None else value, kind)


def _without_nulls(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        name = key.lower()
        if value is not None:
            if type(values.get(name, value)) is not type(value):
                raise ValueError(f"{key} has two types")  # a wrong one is refused although a right one follows it
            values[name] = _SURROGATE.sub("\ufffd", value) if isinstance(value, str) else value
    return values


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_LENIENT = re.compile(rb'true|false|null|"((?:[^"\\]|\\.)*)"|[+-]?(?:inf|nan)|[0-9.eE+-]+', re.DOTALL | re.IGNORECASE)
_ESCAPE = re.compile(rb"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPED = {b'"': b'"', b"\\": b"\\", b"/": b"/", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t"}


def decode_json_header(data: bytes) -> Any:
    """The header of a message; ValueError for what the redesigned server takes for no JSON.

    Its parser (valyala/fastjson 1.6.1) takes more than JSON: strings may hold any bytes, escapes that mean nothing stay
    as they are, and a number is any run of the characters that numbers have; what it is worth matters nowhere.
    """
    try:
        return msgspec.json.decode(data)
    except (ValueError, RecursionError):
        pass
    try:
        return json.loads(_LENIENT.sub(_as_json, data))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cannot parse JSON: {error}") from error


def _as_json(found: re.Match[bytes]) -> bytes:
    if found[1] is not None:
        return json.dumps(_ESCAPE.sub(_unescape, found[1]).decode("utf-8", "replace")).encode()
    return found[0] if found[0] in (b"true", b"false", b"null") else b"0"


def _unescape(found: re.Match[bytes]) -> bytes:
    code: bytes = found[1]
    if len(code) > 1:
        number = int(code[1:], 16)
        return found[0] if 0xD800 <= number < 0xE000 else chr(number).encode()
    return _ESCAPED.get(code, found[0])


# --- globs -----------------------------------------------------------------------------------------------------------

_GLOB = re.compile(r"\\(.?)|\[(!|(?!!))(?:(.)-(.)|(?!.-)((?:\\.|[^\\\]])+))\]|([^\[])", re.DOTALL)


def translate_glob(pattern: str) -> str:
    """A regular expression that matches the same texts in full; ValueError where the server refuses the glob.

    As gobwas/glob v0.2.3 reads it (syntax/lexer, syntax/ast): ``*`` and ``**`` are any text, ``?`` any character,
    ``[abc]``, ``[a-z]``, ``[!abc]`` one of some, ``{a,b}`` one of several. Braces need no end, nor does a backslash;
    brackets do.
    """
    parts: list[str] = []
    depth = at = 0
    while at < len(pattern):
        found = _GLOB.match(pattern, at)
        if found is None:
            raise ValueError(f"glob {pattern!r}: brackets that are empty, or not closed")
        at = found.end()
        escaped, negation, low, high, chars, char = found.groups()
        if escaped is not None:
            parts.append(re.escape(escaped))
        elif char is None:
            if low is not None and high < low:
                raise ValueError(f"glob {pattern!r}: a range ends before it begins")
            some = re.escape(re.sub(r"\\(.)", r"\1", chars, flags=re.DOTALL)) if chars else _range(low, high)
            parts.append(f"[{'^' if negation else ''}{some}]")
        elif char == "{":
            depth += 1
            parts.append("(?:")
        elif char == "}" and depth:
            depth -= 1
            parts.append(")")
        elif char == "," and depth:
            parts.append("|")
        else:
            parts.append({"*": ".*", "?": "."}.get(char) or re.escape(char))
    if depth and parts[-1] == "(?:":
        raise ValueError(f"glob {pattern!r}: an empty brace at the end, which makes the real server panic")
    # A pattern of one character alone matches an empty text, too (gobwas/glob: match/single.go, list.go, range.go).
    is_one_of_many = len(parts) == 1 and (parts[0] == "." or parts[0].startswith("[^"))
    return f"(?s:{''.join(parts)}{')' * depth}){'?' if is_one_of_many else ''}"


def _range(low: str, high: str) -> str:
    return f"{re.escape(low)}-{re.escape(high)}"
