"""What decides whether a client gets a message of an ext topic: tags, and the four types of ext filters.

Keys of filters are paths: a dot means nesting. Only values that are strings can
match, and messages without a JSON header never do (so an inverse filter lets
them through). Regular expressions and globs are read as the server's libraries read them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import msgspec

from nsq_fast.broker.client import TAG_KEY

from . import fast_json
from .go_glob import translate_glob
from .go_regexp import translate_regexp
from .log import Record

EXACT, REGEXP, GLOB, LIST = 1, 2, 3, 4

Matches = Callable[[Record], bool]


class FilterItem(msgspec.Struct, omit_defaults=True):
    """One condition of a filter of type 4."""

    filter_ext_key: str = ""
    filter_data: str = ""


class FilterRequest(msgspec.Struct, omit_defaults=True):
    """``ext_filter`` of IDENTIFY."""

    type: int = 0
    inverse: bool = False
    filter_ext_key: str = ""
    filter_data: str = ""
    filter_data_list: list[FilterItem] | None = None


def make_filter(request: FilterRequest | None) -> Matches | None:
    """The filter as a predicate; None when there is none, or one that is invalid: as the server, we ignore it."""
    if request is None or not request.filter_ext_key:
        return None
    match = _list_matcher(request) if request.type == LIST else _single_matcher(request)
    if match is None:
        return None
    inverse = request.inverse
    return lambda record: _matches(match, record) is not inverse


def tag_of(record: Record) -> str:
    """The tag of a message, or an empty string."""
    if TAG_KEY.encode() not in record.ext:
        return ""
    value = decode_header(record.header).get(TAG_KEY)
    return value if isinstance(value, str) else ""


@functools.lru_cache(maxsize=1024)
def decode_header(header: bytes) -> dict[str, Any]:
    """An ext header as a mapping; an empty one for JSON that is no object."""
    decoded = fast_json.decode(header) if header else {}
    return decoded if isinstance(decoded, dict) else {}


def _matches(match: Callable[[dict[str, Any]], bool], record: Record) -> bool:
    return bool(record.header) and match(decode_header(record.header))


def _single_matcher(request: FilterRequest) -> Callable[[dict[str, Any]], bool] | None:
    key, data = request.filter_ext_key, request.filter_data
    if not data:
        return None
    if request.type == EXACT:
        return lambda header: _value(header, key) == data
    try:
        pattern = re.compile(_TRANSLATE[request.type](data))
    except (KeyError, ValueError, re.error):
        return None
    test = pattern.search if request.type == REGEXP else pattern.fullmatch
    return lambda header: test(_value(header, key) or "") is not None


def _list_matcher(request: FilterRequest) -> Callable[[dict[str, Any]], bool] | None:
    items = request.filter_data_list or []
    if not items or not all(item.filter_ext_key and item.filter_data for item in items):
        return None
    combine = {"all": all, "any": any}.get(request.filter_ext_key)
    if combine is None:
        return lambda header: False
    return lambda header: combine(_value(header, item.filter_ext_key) == item.filter_data for item in items)


def _value(header: dict[str, Any], path: str) -> str | None:
    value: Any = header
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else None


_TRANSLATE = {REGEXP: translate_regexp, GLOB: translate_glob}
