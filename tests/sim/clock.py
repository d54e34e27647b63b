"""Virtual time, and the asyncio loop that runs in it.

The loop is asyncio's own, so that tasks, futures and ``wait_for`` are the real ones. Only what it waits with is ours: a
selector that knows no system, but asks the simulated sockets which of them are ready, and lets the time jump to the
next timer where none is. An hour of silence costs nothing.

All chance comes from one seed: the network's from ``Chance``, the client's from the module ``random``, which is seeded
with it. Names of nsq_fast that stand for the system's clock are replaced while a simulation runs; what is compiled asks
``_dispatch``.
"""

from __future__ import annotations

import asyncio
import pkgutil
import random
import selectors
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from heapq import heappop, heappush
from importlib import import_module
from typing import Any

from nsq_fast import _dispatch, client
from nsq_fast._client import SpinReader
from nsq_fast.client import asyncio_loop, connection, http
from nsq_fast.protocol import session

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
    """The simulated sockets that are watched, and those of them that may be ready: only these are looked at."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._keys: dict[int, selectors.SelectorKey] = {}
        self._stirred: dict[int, None] = {}  # a set that keeps its order

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(fileobj, fileobj, events, data)
        if fileobj in self._keys:
            raise KeyError(f"{fileobj} is registered already")
        self._keys[fileobj] = key
        self._stirred[fileobj] = None
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        self._stirred.pop(fileobj, None)
        return self._keys.pop(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        self._keys.pop(fileobj)
        return self.register(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys

    def stir(self, descriptor: int) -> None:
        """Something has happened to this socket."""
        if descriptor in self._keys:
            self._stirred[descriptor] = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not self._stirred:
            return []
        ready = []
        for number in tuple(self._stirred):
            key = self._keys[number]
            sock = self._loop.sockets.get(number)
            if sock is not None and (events := sock.readiness(key.events)):
                ready.append((key, events))
            else:
                del self._stirred[number]
        if len(ready) > 1:
            self._loop.chance.shuffle(ready)
        return ready


RESOLUTION = 1e-6
"""Seconds; timers so close to each other ring in one turn."""


class SimLoop(asyncio.SelectorEventLoop):
    """An asyncio loop in virtual time.

    Its turns are its own, since they are most of what a scenario costs: timers wait in a heap of tuples, which compare
    faster than asyncio's, and in the order of their making where the time is the same.

    Attributes:
        sockets: those that are open, by their descriptors.
        stir: called with the descriptor of a socket that something has happened to.
        chance: the seeded one.
        most_turns: a scenario of more is one that turns in a circle.
        broken: a rule that was broken in a callback, where the client might catch what it raises.
    """

    def __init__(self, chance: Chance) -> None:
        self.sockets: dict[int, Any] = {}
        self.chance = chance
        self.network: Any = None
        self.books: Any = None
        self.watched: Any = None  # hears of connections that subscribe, and of each RDY
        self.broken: str | None = None
        self.most_turns = 100_000
        self._turns = 0
        self._now = EPOCH
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers_made = 0
        selector = _Sockets(self)
        self.stir = selector.stir
        super().__init__(selector)

    # asyncio's own way to be woken by other threads, of which there are none

    def _make_self_pipe(self) -> None:
        self._internal_fds = 0

    def _close_self_pipe(self) -> None: ...

    def _write_to_self(self) -> None: ...

    def time(self) -> float:
        return self._now

    def hold_up(self, seconds: float) -> None:
        """As what blocks the loop: what comes meanwhile comes late, and timers that are due ring together."""
        self._now += seconds
        _dispatch.hold_clock(self._now)

    def wall(self) -> float:
        """``time.time()``."""
        return WALL + self._now - EPOCH

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._timers_made += 1
        heappush(self._timers, (when, self._timers_made, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None: ...

    @property
    def waiting(self) -> list[asyncio.TimerHandle]:
        """The timers that are still to ring."""
        return [timer for _, _, timer in self._timers if not timer.cancelled()]

    def _run_once(self) -> None:
        self._turns += 1
        if self.broken is not None:
            raise SimError(self.broken)
        if self._turns > self.most_turns:
            raise Stuck("it goes on for ever")
        ready, timers = self._ready, self._timers
        if events := self._selector.select():
            self._process_events(events)
        while timers and timers[0][2]._cancelled:
            heappop(timers)
        if not ready:
            if not timers:
                raise Stuck("nothing is left that could happen")
            if timers[0][0] > self._now:
                self._now = timers[0][0]
                _dispatch.hold_clock(self._now)
        end = self._now + RESOLUTION
        while timers and timers[0][0] < end:
            ready.append(heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()


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

    # What is said of the program, or of the machine, changes where the network cuts the bytes.
    yield connection, "gethostname", lambda: "simulated"
    yield session, "USER_AGENT", "nsq_fast/simulated"
    yield http, "__version__", "simulated"

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
    _dispatch.hold_clock(loop.time())
    try:
        yield
    finally:
        _dispatch.hold_clock(-1.0)
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
    loop.broken = None
    loop._turns = 0
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    for _ in range(5):
        loop.call_soon(loop.stop)
        loop.run_forever()
    loop.close()
