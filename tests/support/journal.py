"""Servers and queries for the tests of the journalled reader: what Spark would call, called directly, step by step."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from nsq_fast.broker import BrokerProcess
from nsq_fast.client.admin import NsqdHTTPClient
from nsq_fast.names import Address
from nsq_fast.spark.journal import JournalStreamReader
from nsq_fast.spark.journal.collect import Collector
from nsq_fast.spark.options import SourceOptions
from nsq_fast.spark.versions import ReadLimit

from .journal_places import Placed
from .servers import RealNsqd
from .spark import python_path
from .waiting import WAIT, until

TOPIC, CHANNEL = "orders", "spark"


class Server:
    """One original nsqd, ours or the real one."""

    def __init__(self, tcp: Address, http: Address, process: Any) -> None:
        self.tcp, self.http, self.process = tcp, http, process
        self._published = 0
        self.client = NsqdHTTPClient(*http)
        self.client.create_topic(TOPIC)
        self.client.create_channel(TOPIC, CHANNEL)

    @classmethod
    def broker(cls, folder: Path) -> Server:
        process = BrokerProcess(lookupd=False, data_path=folder)
        process.start()
        return cls(process.nsqd.tcp, process.nsqd.http, process)

    @classmethod
    def real(cls, folder: Path, *flags: str) -> Server:
        process = RealNsqd(folder, *flags)
        return cls(process.tcp_address, process.http_address, process)

    @property
    def options(self) -> dict[str, str]:
        return {"nsqd_tcp_addresses": str(self.tcp), "nsqd_http_addresses": str(self.http)}

    def publish(self, count: int, prefix: str = "m", size: int = 0) -> list[bytes]:
        bodies = [f"{prefix}{number}".encode().ljust(size, b".") for number in range(count)]
        for start in range(0, count, 10_000):
            self.client.multipublish(TOPIC, bodies[start : start + 10_000], binary=True)
        self._published += count
        until(lambda: self._counted() >= self._published)  # from the topic into the channel
        return bodies

    def _counted(self) -> int:
        (topic,) = self.client.stats(TOPIC)["topics"]
        return min(int(channel["message_count"]) for channel in topic["channels"])

    def depth(self) -> tuple[int, int, int]:
        """Messages that wait, are in flight, and are deferred."""
        (topic,) = self.client.stats(TOPIC)["topics"]
        (channel,) = topic["channels"]
        return channel["depth"], channel["in_flight_count"], channel["deferred_count"]

    def timeouts(self) -> int:
        (topic,) = self.client.stats(TOPIC)["topics"]
        (channel,) = topic["channels"]
        return int(channel["timeout_count"])

    def wait_depth(self, *depth: int) -> None:
        until(lambda: self.depth() == depth)

    def restart(self) -> None:
        self.client.close()
        self.process.stop()
        self.process.start()
        self._published = 0

    def kill_and_start(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.start()

    def close(self) -> None:
        self.client.close()
        self.process.kill()


@contextmanager
def several_servers(count: int, folder: Path, make: Callable[[Path], Server]) -> Iterator[list[Server]]:
    """Servers, each with a folder of its own."""
    with ExitStack() as stack:
        made = []
        for number in range(count):
            own = folder / f"nsqd{number}"
            own.mkdir()
            made.append(make(own))
            stack.callback(made[-1].close)
        yield made


class Query:
    """A streaming query without Spark. ``rows`` are those of its committed batches, as a sink would have them."""

    def __init__(
        self, journal: Path | str, options: dict[str, str], kind: type[JournalStreamReader] = JournalStreamReader
    ) -> None:
        self._given = {
            "topic": TOPIC,
            "channel": CHANNEL,
            "journal": str(journal),
            "reader": "journalled",
            "columns": "body",
        }
        self._set(options)
        self._kind = kind
        self.rows: list[bytes] = []
        self.offset: dict[str, Any] | None = None
        self.planned: dict[str, Any] | None = None
        self.start()

    @property
    def folder(self) -> str:
        """The name of its folder in the journal."""
        assert self.offset is not None
        return str(self.offset["j"])

    def start(self, kind: type[JournalStreamReader] | None = None) -> None:
        """A new driver; it goes on from its checkpoint."""
        self._kind = kind or self._kind
        self.reader = self._kind(self._options)
        if self.offset is None:
            self.offset = _kept(self.reader.initialOffset())
            assert _kept(self.reader.initialOffset()) == self.offset

    def move(self, folder: Path) -> None:
        """Start again, with the journal at another path."""
        self._options = replace(self._options, journal=str(folder))
        self.start()

    def change(self, **options: str) -> None:
        self._set(options)
        self.start()

    def _set(self, options: dict[str, str]) -> None:
        if options.keys() & {"topic", "topicPattern"}:
            self._given = {name: value for name, value in self._given.items() if not name.startswith("topic")}
        self._given = {**self._given, **options}
        self._options = SourceOptions.parse(self._given)

    def plan(self, limit: ReadLimit | None = None) -> bool:
        """Plan a batch, if there is anything to read."""
        assert self.offset is not None
        self.reader.backlog.fresh()
        self.planned = _kept(self.reader.latestOffset(self.offset, limit or self.reader.getDefaultReadLimit()))
        return self.planned != self.offset

    def tasks(self) -> Sequence[Any]:
        """The tasks of the batch that is planned, as executors get them."""
        assert self.offset is not None
        assert self.planned is not None
        return [pickle.loads(pickle.dumps(each)) for each in self.reader.partitions(self.offset, self.planned)]

    def plan_task(self) -> Any:
        """The task of a batch that is one."""
        self.plan()
        (task,) = self.tasks()
        return task

    def run_task(self, task: Any, kind: type[JournalStreamReader] | None = None) -> list[bytes]:
        """One attempt."""
        reader = (kind or self._kind)(self._options)
        return [row for batch in reader.read(task) for row in batch["body"].to_pylist()]

    def run(self) -> list[bytes]:
        """All tasks of the batch that is planned, one after another."""
        return [row for task in self.tasks() for row in self.run_task(task)]

    def done(self, rows: list[bytes]) -> None:
        """The sink has them; the source is told, as Spark tells it, when the next batch is planned."""
        assert self.planned is not None
        self.rows += rows
        self.offset = self.planned
        self.reader.commit(self.offset)

    def batch(self, limit: ReadLimit | None = None) -> list[bytes]:
        if not self.plan(limit):
            return []
        rows = self.run()
        self.done(rows)
        return rows

    def drain(self, server: Server) -> None:
        """Batches until nothing is left at the server, in flight neither."""
        until(lambda: (self.batch(), server.depth() == (0, 0, 0))[1], every=0.05)


def reading(kind: type[Collector]) -> type[JournalStreamReader]:
    """A reader whose tasks are worked on by this collector."""
    return type("Reader", (JournalStreamReader,), {"make_collector": lambda self, slot: kind(slot)})


def reading_once(place: str, action: Callable[[Any], object]) -> type[JournalStreamReader]:
    """A reader that does this, given the collector, when a task of it first comes to the place."""
    left = [action]

    def at(collector: Any, here: str) -> None:
        if here == place and left:
            left.pop()(collector)

    return reading(type("Once", (Placed,), {"at": at}))


# An attempt in a process of its own, which stands where it is told to, and goes on when a line comes.
_ATTEMPT = """
import pickle, sys
from support.journal_places import Placed

class Standing(Placed):
    def at(self, place):
        if place == sys.argv[2]:
            print(place, flush=True)
            sys.stdin.readline()

with open(sys.argv[1], "rb") as file:
    task = pickle.load(file)
try:
    Standing(task).run()
except Exception as error:
    print(type(error).__name__, flush=True)
"""


class Attempt:
    """One attempt at a task that stands at ``place``, in a process of its own."""

    def __init__(self, task: Any, place: str, folder: Path) -> None:
        path = folder / f"{uuid.uuid4().hex}.task"
        path.write_bytes(pickle.dumps(task))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ATTEMPT, str(path), place],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": python_path()},
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == place

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def go_on(self) -> str:
        """Let it; what it said at its end."""
        said, _ = self._process.communicate("go\n", timeout=WAIT)
        return said.strip().rpartition("\n")[2]


def _kept(offset: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(json.dumps(offset))
    return kept
