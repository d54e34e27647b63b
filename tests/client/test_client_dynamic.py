"""Dynamic configuration: what a document may say, and sources of documents on either loop, which may block."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent.event
import pytest
from support.waiting import TURNS, WAIT, promptly

from nsq_fast import FileConfigSource
from nsq_fast.client.dynamic import NOTHING, ConfigKeeper, DynamicConfig, changes, parse
from nsq_fast.config_source import ConfigDocument
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


log = logging.getLogger("nsq_fast.test")


def document(*topics: str) -> bytes:
    return json.dumps({"trace": dict.fromkeys(topics, True)}).encode()


@contextlib.contextmanager
def keeping(loop: Any, source: Any) -> Iterator[tuple[ConfigKeeper, list[set[str]]]]:
    applied: list[set[str]] = []
    keeper = ConfigKeeper(source, lambda config: applied.append(set(config.trace)), "test")
    keeper.start(loop, loop.supervisor(log))
    try:
        yield keeper, applied
    finally:
        keeper.stop()


async def until(loop: Any, probe: Any) -> None:
    deadline = time.monotonic() + WAIT
    while not probe():
        assert time.monotonic() < deadline
        await loop.sleep(0.002)  # sleep: looks again and again


def test_a_source_that_cannot_be_read_holds_nobody_up(on_loop: Any, tmp_path: Path) -> None:
    async def test(loop: Any) -> None:
        with keeping(loop, FileConfigSource(tmp_path / "none", WAIT)) as (keeper, applied):
            with promptly():
                await keeper.wait_first(loop, WAIT)
            assert keeper.stats()["problem"]
            assert applied == []

    on_loop(test)


def test_a_source_is_read_no_more_after_the_end(on_loop: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.json"

    async def test(loop: Any) -> None:
        path.write_bytes(document("before"))
        with keeping(loop, FileConfigSource(path, 0.001)) as (keeper, applied):
            await keeper.wait_first(loop, WAIT)
            keeper.stop()
            path.write_bytes(document("after"))
            for _ in range(TURNS):
                await loop.sleep(0.005)  # sleep: for what must not happen
            assert applied == [{"before"}]

    on_loop(test)


def test_a_source_of_the_program_may_block(on_loop: Any) -> None:
    """On asyncio it does so in a thread: the loop goes on, and closing does not wait for it."""
    threads: list[int] = []

    class Blocking:
        def next(self, last: ConfigDocument | None) -> ConfigDocument:
            threads.append(threading.get_ident())
            if len(threads) == 2:
                raise OSError("away")
            if len(threads) > 3:
                waits.wait(WAIT)
            return ConfigDocument({"trace": {f"t{len(threads)}": True}}, len(threads))

    waits: Any

    async def test(loop: Any) -> None:
        nonlocal waits
        threads.clear()
        is_asyncio = not hasattr(loop, "is_of")
        waits = threading.Event() if is_asyncio else gevent.event.Event()
        with keeping(loop, Blocking()) as (keeper, applied):
            await keeper.wait_first(loop, WAIT)
            await until(loop, lambda: len(threads) >= 4)
            assert applied == [{"t1"}, {"t3"}]
            assert (threading.get_ident() in threads) is not is_asyncio
        if is_asyncio:
            waits.set()

    on_loop(test)


def test_a_source_on_asyncio_may_be_a_coroutine_function() -> None:
    from nsq_fast.client.asyncio_loop import AsyncioLoop

    class Native:
        async def next(self, last: ConfigDocument | None) -> ConfigDocument:
            if last is not None:
                await asyncio.Event().wait()
            return ConfigDocument(document("native"), 1)

    async def main() -> None:
        loop = AsyncioLoop()
        with keeping(loop, Native()) as (keeper, applied):
            await keeper.wait_first(loop, WAIT)
            assert applied == [{"native"}]

    asyncio.run(main())
