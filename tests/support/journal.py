"""Servers and queries for the tests of the journalled reader: what Spark would call, called directly, step by step."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from nsq_fast.client.admin import NsqdHTTPClient
from nsq_fast.spark.journal import JournalStreamReader
from nsq_fast.spark.journal.collect import Collector
from nsq_fast.spark.options import SourceOptions
from nsq_fast.spark.versions import ReadLimit

from .journal_places import Placed, stand
from .servers import EMBEDDED_NSQD, RealNsqd
from .spark import python_path
from .waiting import WAIT, until

TOPIC, CHANNEL = "orders", "spark"


class Server:
    """One original nsqd, ours or the real one, with a topic and a channel."""

    def __init__(self, process: RealNsqd) -> None:
        self.process = process
        self.tcp, self.http = process.tcp_address, process.http_address
        self._published: Counter[str] = Counter()
        self.client = NsqdHTTPClient(*self.http, timeout=WAIT)  # it syncs to a disk that others use, too
        self.publish(0)

    @classmethod
    def start(cls, folder: Path, *flags: str, is_real: bool = False) -> Server:
        return cls(RealNsqd(folder, *flags, command=None if is_real else EMBEDDED_NSQD))

    @property
    def options(self) -> dict[str, str]:
        return {"nsqd_tcp_addresses": str(self.tcp), "nsqd_http_addresses": str(self.http)}

    def publish(self, count: int, prefix: str = "m", size: int = 0, topic: str = TOPIC) -> list[bytes]:
        """So many messages, in all channels of the topic; one that is not there is made with its channel."""
        if topic not in self._published:
            self.client.create_topic(topic)
            self.client.create_channel(topic, CHANNEL)
        bodies = [f"{prefix}{number}".encode().ljust(size, b".") for number in range(count)]
        for start in range(0, count, 10_000):
            self.client.multipublish(topic, bodies[start : start + 10_000], binary=True)
        self._published[topic] += count
        until(lambda: self._counted(topic) >= self._published[topic])
        return bodies

    def _counted(self, name: str) -> int:
        (topic,) = self.client.stats(name)["topics"]
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
        self._published.clear()

    def kill_and_start(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.start()

    def close(self) -> None:
        self.client.close()
        self.process.kill()


@contextmanager
def several_servers(count: int, folder: Path, *, is_real: bool = False) -> Iterator[list[Server]]:
    """Servers, each with a folder of its own."""
    with ExitStack() as stack:
        made = []
        for number in range(count):
            own = folder / f"nsqd{number}"
            own.mkdir(parents=True)
            made.append(Server.start(own, is_real=is_real))
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


FORKS = multiprocessing.get_context("forkserver")
"""Processes that have imported already what an attempt needs."""

FORKS.set_forkserver_preload(["support.journal_places", "nsq_fast.spark.journal.stream"])


def forked(work: Callable[..., None], *arguments: Any) -> tuple[BaseProcess, Connection]:
    """Such a process, at work with these arguments, and the test's end of a pipe to it."""
    test, theirs = FORKS.Pipe()
    process = FORKS.Process(target=work, args=(*arguments, theirs, dict(os.environ)), daemon=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", python_path())
        process.start()
    theirs.close()
    return process, test


class Attempt:
    """One attempt at a task that stands at ``place``, in a process of its own."""

    def __init__(self, task: Any, place: str) -> None:
        self._process, self._test = forked(stand, task, place)
        assert self._test.recv() == place

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def go_on(self) -> str:
        """Let it; the name of the error with which it ended."""
        self._test.send("go on")
        error: str = self._test.recv()
        self._process.join()
        return error


def _kept(offset: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(json.dumps(offset))
    return kept
