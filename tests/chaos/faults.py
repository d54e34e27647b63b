"""What goes wrong when, made of a seed alone, so that a run can be repeated; and the proxies that do it.

Time goes in cycles: a storm, in which faults come and go, then a calm, in which nothing is wrong and the state of the
clients is looked at.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
from gevent import Timeout, subprocess
from gevent.fileobject import FileObjectPosix
from gevent.lock import RLock

from nsq_fast.broker import FaultyLink
from nsq_fast.errors import NsqError
from nsq_fast.names import Address

STORM, CALM = 20.0, 12.0
MOST_AT_ONCE = 2
_GAP = (0.3, 2.5)
_FIRST = 2.0


class Kind(NamedTuple):
    """A kind of fault: how long it lasts, in seconds, and how often it is chosen relative to others."""

    name: str
    shortest: float
    longest: float
    weight: int = 1


class Fault(NamedTuple):
    """One thing that goes wrong: ``at`` seconds after the start, for ``seconds``."""

    at: float
    seconds: float
    kind: str
    target: str

    @property
    def until(self) -> float:
        return self.at + self.seconds

    def __str__(self) -> str:
        return f"{self.at:8.1f} s  {self.kind:<10} {self.target:<14} {self.seconds:5.1f} s"


class Schedule(NamedTuple):
    """All faults in the order of their beginnings, and the calms as (beginning, end)."""

    seed: int
    seconds: float
    faults: tuple[Fault, ...]
    calms: tuple[tuple[float, float], ...]


def plan(seed: int, seconds: float, menu: Sequence[tuple[Kind, Sequence[str]]]) -> Schedule:
    """The faults of a run.

    Args:
        seconds: how long it is; its end is a calm.
        menu: the kinds of faults, each with what it may befall. A target has one fault at a time.
    """
    chance = random.Random(seed)
    faults: list[Fault] = []
    calms: list[tuple[float, float]] = []
    start = 0.0
    while seconds - start > 2 * CALM:
        end = min(start + STORM + CALM, seconds)
        if seconds - end <= 2 * CALM:
            end = seconds  # what is left is too short for a cycle of its own
        faults += _storm(chance, start + _FIRST, end - CALM, menu)
        calms.append((end - CALM, end))
        start = end
    return Schedule(seed, seconds, tuple(sorted(faults)), tuple(calms))


def _storm(chance: random.Random, start: float, end: float, menu: Sequence[tuple[Kind, Sequence[str]]]) -> list[Fault]:
    faults: list[Fault] = []
    now = start
    while now < end:
        kind, targets = chance.choices(menu, [kind.weight for kind, _ in menu])[0]
        length = min(round(chance.uniform(kind.shortest, kind.longest), 1), end - now)
        target = chance.choice(targets)
        running = [fault for fault in faults if fault.until > now]
        if len(running) < MOST_AT_ONCE and all(fault.target != target for fault in running):
            faults.append(Fault(round(now, 1), round(length, 1), kind.name, target))
        now += chance.uniform(*_GAP)
    return faults


# The proxies between clients and servers, in a process of their own: their work is not the clients'. The child
# (``python -m chaos.faults``) takes one JSON command a line and answers each with a line. It ends with its input, so
# it never outlives its parent.


KINDS: dict[str, Callable[[FaultyLink], object]] = {
    "delay": lambda link: setattr(link, "delay", 0.15),
    "split": lambda link: setattr(link, "chunk", 3),
    "blackhole": FaultyLink.stall,
    "refuse": lambda link: (link.refuse(), link.cut()),
    "cut": FaultyLink.cut,
    "garble": FaultyLink.garble,
}
"""What a proxy can do wrong."""

ANSWER_TIMEOUT = 20.0


class Links:
    """Named proxies. Use it in a ``with``."""

    def __init__(self) -> None:
        self._turn = RLock()
        self._process: Any = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the parent
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def __enter__(self) -> Links:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe.close()

    def open(self, name: str, target: Address, listen: tuple[str, int] = ("127.0.0.1", 0)) -> Address:
        return Address(*self._ask("open", name, list(target), list(listen)))

    def fault(self, name: str, kind: str) -> None:
        self._ask("fault", name, kind)

    def clear(self, name: str) -> None:
        """End every fault of a proxy. A connection that was garbled stays so until its client gives it up."""
        self._ask("clear", name)

    def _ask(self, *command: Any) -> Any:
        with self._turn, Timeout(ANSWER_TIMEOUT, NsqError("the process of the proxies does not answer")):
            self._process.stdin.write(msgspec.json.encode(command) + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            raise NsqError("the process of the proxies ended")
        answer = msgspec.json.decode(line)
        if "error" in answer:
            raise NsqError(f"proxy {command[1]}: {answer['error']}")
        return answer["result"]


class _Child:
    """The other side of ``Links``."""

    def __init__(self) -> None:
        self._links: dict[str, FaultyLink] = {}

    def open(self, name: str, target: list[Any], listen: list[Any]) -> Address:
        link = self._links[name] = FaultyLink(Address(*target), (listen[0], listen[1]))
        return link.address

    def fault(self, name: str, kind: str) -> None:
        KINDS[kind](self._links[name])

    def clear(self, name: str) -> None:
        link = self._links[name]
        link.delay, link.chunk = 0.0, 0
        link.flow()


def main() -> None:
    child = _Child()
    for line in FileObjectPosix(sys.stdin.fileno(), "rb", closefd=False):
        method, *arguments = msgspec.json.decode(line)
        try:
            answer = {"result": getattr(child, method)(*arguments)}
        except OSError as error:
            answer = {"error": str(error)}
        os.write(sys.stdout.fileno(), msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    main()
