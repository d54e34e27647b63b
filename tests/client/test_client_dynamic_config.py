"""Documents of dynamic configuration: what may stand in one, and what is said of one that is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nsq_fast.client.dynamic import NOTHING, DynamicConfig, changes, parse
from nsq_fast.errors import ConfigError

WHOLE = {
    "trace": {"orders": True, "payments": 0.05, "*": False},
    "lookupds": {"add": ["new:4161", "https://two"], "remove": ["http://old:4161/"]},
}
TOML = """
[trace]
orders = true
payments = 0.05
"*" = false

[lookupds]
add = ["new:4161", "https://two"]
remove = ["http://old:4161/"]
"""


def test_json_toml_and_mappings_say_the_same() -> None:
    found = parse(json.dumps(WHOLE))
    assert found == parse(TOML, "toml") == parse(TOML.encode(), "toml") == parse(WHOLE)
    assert [found.share(topic) for topic in ("orders", "payments", "else")] == [1.0, 0.05, 0.0]
    assert parse("{}") == NOTHING
    assert NOTHING.share("orders") is None
    assert "DynamicConfig" in DynamicConfig.schema()["$defs"]


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"tarce": {}}, "unknown field `tarce`"),
        ({"trace": {"orders": 1.5}}, "trace.orders=1.5: must be true, false, or a share of 0 to 1"),
        ({"trace": {"orders": "on"}}, r"\$.trace"),
        ({"trace": {"or ders": True}}, "trace: invalid topic name 'or ders'"),
        ({"lookupds": {"add": ["a b"]}}, r"lookupds.add: invalid address 'a b'"),
        ({"lookupds": {"remove": ["a:0"]}}, "lookupds.remove: invalid address 'a:0'"),
        ({"lookupds": {"add": ["ftp://a"]}}, "lookupds.add: invalid address 'ftp://a'"),
        ({"lookupds": {"add": ["a"], "remove": ["a"]}}, "a is in add and in remove"),
    ],
)
def test_a_wrong_document_is_refused_with_what_is_wrong(document: dict[str, Any], said: str) -> None:
    for content in (document, json.dumps(document)):
        with pytest.raises(ConfigError, match=said):
            parse(content)


@pytest.mark.parametrize(
    ("content", "form"),
    [
        (b"", "json"),
        (b"\xff", "json"),
        (b"{", "json"),
        (b"[]", "json"),
        (b"a = ", "toml"),
        (b"{}", "xml"),
        (5, "json"),
        (b'{"trace":' * 100_000, "json"),
        (b" " * (1024 * 1024 + 1), "json"),
    ],
    ids=["empty", "no-text", "half", "list", "half-toml", "form", "number", "deep", "large"],
)
def test_what_is_no_document_is_refused(content: Any, form: str) -> None:
    with pytest.raises(ConfigError, match="not a document of dynamic configuration"):
        parse(content, form)


def test_changes_are_one_line() -> None:
    assert changes(NOTHING, NOTHING) == ""
    assert changes(NOTHING, parse(WHOLE)) == (
        "trace *: as the program says -> off; trace orders: as the program says -> on;"
        " trace payments: as the program says -> 5 %;"
        " lookupds.add: none -> new:4161, https://two; lookupds.remove: none -> http://old:4161/"
    )
    assert changes(parse(WHOLE), parse({**WHOLE, "lookupds": {}})) == (
        "lookupds.add: new:4161, https://two -> none; lookupds.remove: http://old:4161/ -> none"
    )
