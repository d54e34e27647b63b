"""What an nsqd shows of its process below /debug: the same routes as the original's, in Python's formats."""

from __future__ import annotations

import marshal
import pstats
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.http import ask

from nsq_fast.broker import NsqdServer
from nsq_fast.broker.http.debug import Sampler


@pytest.mark.parametrize(
    "path", ["", "cmdline", "heap", "goroutine", "threadcreate", "profile?seconds=1"], ids=lambda path: path or "index"
)
def test_routes_of_both(start_nsqd: Callable[..., Any], path: str) -> None:
    answer = ask(start_nsqd().http_address, "GET", f"/debug/pprof/{path}")
    assert answer.status == 200
    assert answer.body


@pytest.mark.parametrize("name", ["symbol", "block"])
def test_profiles_without_a_meaning_in_python_are_missing_here(start_nsqd: Callable[..., Any], name: str) -> None:
    server = start_nsqd()
    answer = ask(server.http_address, "GET", f"/debug/pprof/{name}")
    assert answer.status == (404 if isinstance(server, NsqdServer) else 200)


def test_memory_is_freed_on_demand(start_nsqd: Callable[..., Any]) -> None:
    server = start_nsqd()
    answer = ask(server.http_address, "POST", "/debug/freememory")
    # The original frees memory, and then fails to answer.
    assert answer.status == (200 if isinstance(server, NsqdServer) else 500)


def get(server: Any, name: str) -> str:
    return ask(server.http_address, "GET", f"/debug/pprof/{name}").body.decode()


def test_greenlets_are_shown_with_their_stacks(embedded: Callable[..., Any]) -> None:
    text = get(embedded(), "goroutine")
    assert "nsqd-scan" in text
    assert "_scan_loop" in text


def test_the_heap_is_shown_by_type(embedded: Callable[..., Any]) -> None:
    head, *rows = get(embedded(), "heap").splitlines()
    assert head.split() == ["objects", "bytes", "type"]
    sizes = [int(row.split()[1]) for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    assert any(row.split()[2] == "builtins.dict" for row in rows)


def test_threads_are_shown_with_their_stacks(embedded: Callable[..., Any]) -> None:
    text = get(embedded(), "threadcreate")
    assert f"{threading.main_thread().name}:" in text
    assert "_thread_lines" in text


def test_the_index_and_the_command_line(embedded: Callable[..., Any]) -> None:
    server = embedded()
    names = [line.split()[0] for line in get(server, "").splitlines()]
    assert "goroutine" in names
    assert get(server, "cmdline").split("\0") == sys.orig_argv


@pytest.mark.parametrize("seconds", ["0", "-1", "x", "nan", "1e9"])
def test_a_profile_takes_a_time_in_range(embedded: Callable[..., Any], seconds: str) -> None:
    answer = ask(embedded().http_address, "GET", f"/debug/pprof/profile?seconds={seconds}")
    assert answer.status == 400
    assert b"seconds=" in answer.body


def test_a_profile_is_one_of_pstats(embedded: Callable[..., Any]) -> None:
    data = ask(embedded().http_address, "GET", "/debug/pprof/profile?seconds=0.05").body
    stats: Any = pstats.Stats(SimpleNamespace(create_stats=lambda: None, stats=marshal.loads(data)))
    assert stats.total_calls > 0


def test_samples_are_counted_by_function_and_caller() -> None:
    sampler = Sampler(0)

    def inner() -> None:
        sampler.look(sys._getframe())

    def outer() -> None:
        inner()
        inner()

    outer()
    stats = marshal.loads(sampler.dump())
    [(name, figures)] = [(key, value) for key, value in stats.items() if key[2] == "inner"]
    assert name[0] == __file__
    assert figures[:4] == (2, 2, pytest.approx(0.02), pytest.approx(0.02))
    [caller] = figures[4]
    assert caller[2] == "outer"
    [own] = [value[2] for key, value in stats.items() if key[2] == "outer"]
    assert own == 0
