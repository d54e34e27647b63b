"""The faces have the same names, arguments and defaults."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import nsq_fast
from nsq_fast import aio, threads

ASYNCIO_LACKS = {"raise_error"}  # a coroutine is a promise already


def arguments_of(call: Any) -> list[tuple[str, Any, Any]]:
    return [
        (each.name, each.kind, each.default)
        for each in inspect.signature(call).parameters.values()
        if each.name not in ASYNCIO_LACKS
    ]


@pytest.mark.parametrize("face", [threads, aio])
@pytest.mark.parametrize("kind", ["Producer", "Consumer"])
def test_a_client_is_made_with_the_same_arguments(face: Any, kind: str) -> None:
    assert inspect.signature(getattr(face, kind)).parameters == inspect.signature(getattr(nsq_fast, kind)).parameters


async def handler(message: object) -> None: ...


@pytest.mark.parametrize("face", [nsq_fast, threads, aio])
def test_arguments_in_the_wrong_place_are_told_in_names_that_people_know(face: Any) -> None:
    with pytest.raises(TypeError, match=r"^Consumer.__init__\(\) .*multiple values for argument 'nsqd_tcp_addresses'"):
        face.Consumer("t", "c", handler, nsqd_tcp_addresses=["127.0.0.1:4150"])
    with pytest.raises(TypeError, match="a handler is passed as message_handler="):
        face.Consumer("t", "c", handler)
    with pytest.raises(TypeError, match=r"^Producer.__init__\(\) .*positional"):
        face.Producer(["127.0.0.1:4150"], [], 5)


@pytest.mark.parametrize("face", [threads, aio])
@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("Producer", name)
        for name in (
            "publish",
            "publish_nowait",
            "multipublish",
            "start",
            "close",
            "join",
            "stats",
            "progress",
            "is_running",
        )
    ]
    + [("Consumer", name) for name in ("close", "join", "pause", "resume", "stats", "progress")],
)
def test_a_method_takes_the_same_arguments(face: Any, kind: str, method: str) -> None:
    ours, gevents = (getattr(getattr(package, kind), method) for package in (face, nsq_fast))
    if isinstance(gevents, property):
        assert isinstance(ours, property)
    else:
        assert arguments_of(ours) == arguments_of(gevents)
