"""The programs under proof as child processes: one that publishes, some that consume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gevent.subprocess

from .records import ROW_SIZE

_TESTS = Path(__file__).parents[2]


@dataclass(frozen=True)
class Job:
    """What clients have to do.

    Attributes:
        nodes: TCP addresses of the nsqds: the place of each is how rows name it.
        folder: for their rows and what they log.
    """

    lookupds: list[str]
    topic: str
    channel: str
    nodes: list[str]
    folder: Path


class Client:
    """One program; it is running when it has been made."""

    def __init__(self, module: str, job: Job, name: str, **given: Any) -> None:
        self.log = job.folder / f"{name}.rows"
        self._errors = (job.folder / f"{name}.log").open("w")
        self._process = gevent.subprocess.Popen(
            [sys.executable, "-m", f"support.bad_days.{module}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(_TESTS), str(_TESTS.parent)))},
        )
        topic = {"lookupds": job.lookupds, "topic": job.topic, "channel": job.channel, "nodes": job.nodes}
        self._say(json.dumps({**topic, "log": str(self.log), **given}))

    @property
    def rows(self) -> int:
        """How many rows it has kept so far."""
        return self.log.stat().st_size // ROW_SIZE if self.log.exists() else 0

    def kill(self) -> None:
        """SIGKILL; nothing happens when it has ended already."""
        if self._process.poll() is None:
            self._process.kill()
            self._end()

    def end(self) -> str:
        """Have it end in good order; what it said."""
        self._say("")
        return self._end()

    def _say(self, line: str) -> None:
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def _end(self) -> str:
        """Wait for the end of the program; what it said."""
        said: str = self._process.stdout.read()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            pipe.close()
        return said


class Publisher(Client):
    """Publishes ``keys`` keys at ``rate`` messages a second until ``finish``; ``options`` are those of its Producer."""

    def __init__(self, job: Job, *, keys: int, rate: float, size: int, **options: Any) -> None:
        super().__init__("publisher", job, "publisher", keys=keys, rate=rate, size=size, options=options)

    def finish(self, messages: int) -> dict[str, int]:
        """Have it publish until there are so many; the texts of the errors that it got, with their numbers."""
        self._say(str(messages))
        errors: dict[str, int] = json.loads(self._end())
        return errors


class Consumers:
    """``count`` instances that consume one channel; one that is killed is replaced by ``restart``."""

    def __init__(self, job: Job, count: int, **options: Any) -> None:
        self._job, self._options = job, options
        self._running: list[Client] = []
        self.all: list[Client] = []
        for _ in range(count):
            self.start_one()

    def start_one(self) -> None:
        """Start one more."""
        name = f"consumer{len(self.all)}"
        client = Client("consumer", self._job, name, options=self._options)
        self._running.append(client)
        self.all.append(client)

    def kill_one(self) -> None:
        """SIGKILL the one that runs longest."""
        self._running.pop(0).kill()

    @property
    def kept(self) -> int:
        """How many rows there are."""
        return sum(client.rows for client in self.all)

    def close(self) -> None:
        """End those that run, in good order."""
        for client in self._running:
            client.end()
        self._running.clear()
