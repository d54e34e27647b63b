"""What an nsqd shows of its own process: nsqd's /debug routes, in the formats that Python has.

nsqio/nsq: nsqd/http.go, newHTTPServer. ``GET /debug/pprof/`` lists them.
"""

from __future__ import annotations

import gc
import itertools
import marshal
import sys
import threading
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from gevent import get_hub
from gevent.monkey import get_original
from gevent.util import format_run_info

from nsq_fast.broker.go_integer import parse_integer

from .router import Reply, Request, Router, style_text, style_v1

# Those of native threads, in programs that gevent has patched too.
_native_sleep = get_original("time", "sleep")
_native_ident = get_original("_thread", "get_ident")

_INTERVAL = 0.01
_SECONDS = 30.0
_LONGEST = 600.0
_ROWS = 60
_INDEX = """\
profile?seconds=30  where the thread of this server is, 100 times a second; for pstats.Stats or python -m pstats
heap                the objects that the garbage collector knows, by type; with lines where tracemalloc is on
goroutine           every greenlet, with its stack
threadcreate        every native thread, with its stack
cmdline             the command line
"""

Function = tuple[str, int, str]


def add_debug_routes(router: Router) -> None:
    """Add the routes to those of an nsqd."""
    add_profile_routes(router)
    router.add("POST", "/debug/freememory", _free_memory, style_text)


def add_profile_routes(router: Router, index: str = "/debug/pprof/") -> None:
    """Add those that show the process; ``index`` is the path of their list."""
    for name, handler in {
        "cmdline": lambda request: "\0".join(sys.orig_argv),
        "heap": lambda request: _text(_heap_lines()),
        "goroutine": lambda request: _text(_greenlet_lines()),
        "threadcreate": lambda request: _text(_thread_lines()),
    }.items():
        router.add("GET", f"/debug/pprof/{name}", handler, style_text)
    router.add("GET", "/debug/pprof/profile", _profile, _style_profile)
    router.add("GET", index, lambda request: _INDEX, style_text)


def add_block_rate_route(router: Router) -> None:
    """Add /debug/setblockrate of a server that panics when it has set the rate (nsqio/nsq: nsqd/http.go)."""
    router.add("PUT", "/debug/setblockrate", _set_block_rate, _style_of_block_rate)


def check_block_rate(request: Request) -> None:
    """Refuse a rate that is no number. There is no profile of what blocks."""
    try:
        parse_integer(request.form_value("rate").encode())
    except ValueError as error:
        raise request.refuse(400, f"invalid block rate : {error}") from error


def _set_block_rate(request: Request) -> None:
    check_block_rate(request)
    raise request.refuse(500, "INTERNAL_ERROR")


def _style_of_block_rate(request: Request, status: int, data: Any) -> Reply:
    return (style_v1 if status == 500 else style_text)(request, status, data)


def _free_memory(request: Request) -> str:
    gc.collect()
    return ""


def _text(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _greenlet_lines() -> Iterator[str]:
    lines: list[str] = format_run_info(thread_stacks=False)  # type: ignore[func-returns-value, assignment]
    return iter(lines)


def _thread_lines() -> Iterator[str]:
    frames = sys._current_frames()
    for thread in threading.enumerate():
        yield f"{thread.name}:"
        if thread.ident in frames:
            yield "".join(traceback.format_stack(frames[thread.ident]))


# --- heap ------------------------------------------------------------------------------------------------------------


def _heap_lines() -> Iterator[str]:
    """The types with the most bytes, of the objects themselves without what they refer to."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for each in gc.get_objects():
        name = f"{type(each).__module__}.{type(each).__qualname__}"
        counts[name] += 1
        sizes[name] += sys.getsizeof(each, 0)
    yield f"{'objects':>10} {'bytes':>12} type"
    for name, size in sizes.most_common(_ROWS):
        yield f"{counts[name]:>10} {size:>12} {name}"
    if tracemalloc.is_tracing():
        yield "\nlines that took the most memory:"
        yield from map(str, tracemalloc.take_snapshot().statistics("lineno")[:_ROWS])


# --- profile ---------------------------------------------------------------------------------------------------------


class Sampler:
    """Looks where a native thread is, again and again, from another one.

    It sees whichever greenlet runs: profilers that follow calls lose their way where greenlets are switched.
    """

    def __init__(self, thread_id: int) -> None:
        self._thread_id = thread_id
        self._is_ended = False
        self._own: Counter[Function] = Counter()
        self._total: Counter[Function] = Counter()
        self._calls: Counter[tuple[Function, Function]] = Counter()

    def run(self, seconds: float) -> None:
        """Look every 10 ms, for so long or until ``end``; blocks its native thread."""
        for _ in range(max(1, round(seconds / _INTERVAL))):
            _native_sleep(_INTERVAL)
            if self._is_ended:
                break
            self.look(sys._current_frames().get(self._thread_id))

    def end(self) -> None:
        """Look no more."""
        self._is_ended = True

    def look(self, frame: FrameType | None) -> None:
        """Count one stack, the innermost frame first."""
        stack = []
        while frame is not None:
            code = frame.f_code
            stack.append((code.co_filename, code.co_firstlineno, code.co_name))
            frame = frame.f_back
        self._own.update(stack[:1])
        self._total.update(set(stack))
        self._calls.update(set(itertools.pairwise(stack)))

    def dump(self) -> bytes:
        """What was counted, as ``cProfile`` writes it to a file: ``pstats`` reads it. Calls are counts of samples."""
        stats: dict[Function, Any] = {}
        for function, count in self._total.items():
            own = self._own[function]
            stats[function] = (count, count, own * _INTERVAL, count * _INTERVAL, {})
        for (callee, caller), count in self._calls.items():
            stats[callee][4][caller] = (count, count, 0.0, count * _INTERVAL)
        return marshal.dumps(stats)


def _profile(request: Request) -> bytes:
    sampler = Sampler(_native_ident())
    seconds = _seconds(request)
    try:
        get_hub().threadpool.apply(sampler.run, (seconds,))
    finally:
        sampler.end()
    return sampler.dump()


def _seconds(request: Request) -> float:
    text = request.get("seconds") or str(_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST:
        raise request.refuse(400, f"seconds={text}: must be a number above 0 and up to {_LONGEST:g}")
    return seconds


def _style_profile(request: Request, status: int, data: Any) -> Reply:
    if status != 200:
        return style_text(request, status, data)
    return Reply(200, [("Content-Type", "application/octet-stream")], data)
