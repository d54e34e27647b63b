"""Virtual time, and the asyncio loop that runs in it.

The loop is asyncio's own, so that tasks, futures and ``wait_for`` are the real ones. Only what it waits with is ours: a
selector that knows no system, but asks the simulated sockets which of them are ready, and lets the time jump to the
next timer where none is. An hour of silence costs nothing.

All chance comes from one seed: the network's from ``Chance``, the client's from the module ``random``, which is seeded
with it. Names of nsq_fast that stand for the system's clock are replaced while a simulation runs; what is compiled asks
``_time_slice``.
"""

from __future__ import annotations

import asyncio
import pkgutil
import random
import selectors
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from nsq_fast import _time_slice, client
from nsq_fast._client import SpinReader
from nsq_fast.client import asyncio_loop, connection

EPOCH = 1_000_000.0
"""Where monotonic time begins: not at 0, which means "never" in places."""

WALL = 1.7e9
"""Seconds since 1970 then."""


class Stuck(AssertionError):
    """Something waits, and nothing is left that could end the wait."""


class Chance(random.Random):
    """What a scenario draws from."""

    def happens(self, probability: float) -> bool:
        return self.random() < probability

    def long_tailed(self, shortest: float, longest: float) -> float:
        """Mostly near ``shortest``, as delays of a network are."""
        return shortest + (longest - shortest) * self.random() ** 4


class _Sockets(selectors.BaseSelector):
    """Which of the simulated sockets are ready, and what to do while none is."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(fileobj, fileobj, events, data)
        if fileobj in self._keys:
            raise KeyError(f"{fileobj} is registered already")
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        self._keys.pop(fileobj)
        return self.register(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.check_turn()
        ready = []
        for number, key in self._keys.items():
            sock = self._loop.sockets.get(number)
            if sock is not None and (events := sock.readiness(key.events)):
                ready.append((key, events))
        if len(ready) > 1:
            self._loop.chance.shuffle(ready)
        if not ready:
            self._loop.let_time_pass(timeout)
        return ready


MOST_TURNS = 100_000
"""A scenario of more is one that turns in a circle."""


class SimLoop(asyncio.SelectorEventLoop):
    """An asyncio loop in virtual time.

    Attributes:
        sockets: those that are open, by their descriptors.
        chance: the seeded one.
        turns: how many the loop has made.
        checks: called in each turn; what one raises ends the simulation.
    """

    def __init__(self, chance: Chance) -> None:
        self.sockets: dict[int, Any] = {}
        self.chance = chance
        self.turns = 0
        self.network: Any = None
        self.books: Any = None
        self.watched: Any = None  # hears of connections that subscribe, and of each RDY
        self.checks: list[Callable[[], object]] = []
        self.resolve: Callable[[str, int], Coroutine[Any, Any, Any]] | None = None
        self._now = EPOCH
        super().__init__(_Sockets(self))
        self._clock_resolution = 1e-6

    # asyncio's own way to be woken by other threads, of which there are none

    def _make_self_pipe(self) -> None:
        self._internal_fds = 0

    def _close_self_pipe(self) -> None: ...

    def _write_to_self(self) -> None: ...

    def time(self) -> float:
        return self._now

    def wall(self) -> float:
        """``time.time()``."""
        return WALL + self._now - EPOCH

    def check_turn(self) -> None:
        self.turns += 1
        for check in self.checks:
            check()
        if self.turns > MOST_TURNS:
            raise Stuck("it goes on for ever")

    def let_time_pass(self, seconds: float | None) -> None:
        if seconds is None:
            raise Stuck("nothing is left that could happen")
        if seconds > 0:
            self._now += seconds
            _time_slice.hold_clock(self._now)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """The client has threads for host names only."""
        assert self.resolve is not None
        return self.create_task(self.resolve(*args))


class SimError(AssertionError):
    """A rule was broken."""


# What is imported late would come with the system's clock.
for _module in pkgutil.iter_modules(client.__path__, "nsq_fast.client."):
    if _module.name != "nsq_fast.client.gevent_loop":
        import_module(_module.name)


def _replaced(loop: SimLoop, new_socket: Callable[..., Any]) -> Iterator[tuple[Any, str, Any]]:
    clocks = {time.monotonic: loop.time, time.time: loop.wall}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "nsq_fast":
            for attribute in ("monotonic", "time"):
                held = getattr(module, attribute, None)
                if held.__class__ is type(time.time) and held in clocks:
                    yield module, attribute, clocks[held]
    yield asyncio_loop, "socket", new_socket

    def read_soon(descriptor: int, size: int, microseconds: int) -> bytes | None:
        try:
            return loop.sockets[descriptor].recv(size)  # type: ignore[no-any-return]
        except BlockingIOError:
            return None

    real_subscribe, real_rdy = connection.Connection.subscribe, connection.Connection.set_rdy

    async def subscribe(self: Any, *arguments: Any, **options: Any) -> None:
        await real_subscribe(self, *arguments, **options)
        if loop.watched is not None:
            loop.watched.opened(self)

    def set_rdy(self: Any, count: int) -> None:
        before = self.rdy
        real_rdy(self, count)
        if loop.watched is not None and self.rdy > before:
            loop.watched.raised()

    yield connection.Connection, "subscribe", subscribe
    yield connection.Connection, "set_rdy", set_rdy
    yield connection, "SpinReader", lambda sock: SpinReader(sock, read_soon)


@contextmanager
def _in_virtual_time(loop: SimLoop, new_socket: Callable[..., Any]) -> Iterator[None]:
    changed = [(module, name, getattr(module, name), new) for module, name, new in _replaced(loop, new_socket)]
    state = random.getstate()
    for module, name, _, new in changed:
        setattr(module, name, new)
    _time_slice.hold_clock(loop.time())
    try:
        yield
    finally:
        _time_slice.hold_clock(-1.0)
        for module, name, old, _ in changed:
            setattr(module, name, old)
        random.setstate(state)


def simulate(seed: str, scenario: Callable[[SimLoop], Any], new_socket: Callable[[SimLoop], Callable[..., Any]]) -> Any:
    """Run ``await scenario(loop)`` to its end in virtual time; what it returns.

    ``new_socket(loop)`` makes what stands for ``socket.socket``. Raises what the scenario and the checks raise, and
    SimError for what asyncio would only log.
    """
    loop = SimLoop(Chance(seed))
    faults: list[str] = []
    loop.set_exception_handler(lambda _, context: faults.append(f"{context['message']}: {context.get('exception')!r}"))
    with _in_virtual_time(loop, new_socket(loop)):
        random.seed(f"client {seed}")
        try:
            result = loop.run_until_complete(scenario(loop))
            if faults:
                raise SimError(f"asyncio was told of a fault: {faults[0]}")
            return result
        finally:
            _abandon(loop)


def _abandon(loop: SimLoop) -> None:
    """After a failure: let go of what still runs, in silence."""
    loop.set_exception_handler(lambda *_: None)
    loop.checks.clear()
    loop.turns = 0
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    for _ in range(5):
        loop.call_soon(loop.stop)
        loop.run_forever()
    loop.close()
