"""A day of queries, in a minute or in five: publishers run, everything restarts in random order, ids are counted.

What happens is chosen by a seeded random, one thing at a time, and each has to
be followed by progress of each query before the next. The queries share a
driver, so that what happens to it happens to all.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import processes
from .spark_driver import BESIDE, Driver, Program
from .spark_ledger import Account, Delivered, account
from .spark_marks import LIMIT, poll
from .spark_publisher import Publisher

PROGRAM = """
from support.spark_program import Collector, arguments, marks, session

given, here = arguments(), marks()
rows = session().readStream.format("nsq").options(**given["options"]).load()
writer = rows.writeStream.foreachBatch(Collector(given["out"])).option("checkpointLocation", given["checkpoint"])
query = writer.trigger(processingTime="1 second").start()
while not here.count("end"):
    query.awaitTermination(0.2)
query.stop()
"""
SECONDS = float(os.environ.get("NSQ_FAST_DAY_SECONDS", "0"))
"""How long the day lasts; at least until each thing has happened."""
SEED = int(os.environ.get("NSQ_FAST_DAY_SEED", "1"))
Happening = Callable[[random.Random], object]


class Query:
    """One query of a day, those who publish for it, and what it has delivered.

    Attributes:
        program: for the driver; its options are those of the source, its files go below ``folder``.
        delivered: its rows.
    """

    def __init__(self, folder: Path, publishers: list[Publisher], **options: Any) -> None:
        paths = {"out": str(folder / "out"), "checkpoint": str(folder / "checkpoint")}
        given = {name: str(value) for name, value in options.items()}
        self.program = Program(PROGRAM, folder, options=given, **paths)
        self.delivered = Delivered(folder / "out")
        self._out = folder / "out"
        self._publishers = publishers

    def batches(self) -> int:
        """How often a batch has been run so far; its rows may still be about to be kept."""
        return len(self.delivered.runs())

    def kept(self) -> int:
        """How many batches have been kept so far: each adds rows to ``delivered``."""
        return len(list(self._out.glob("batch-*.arrow")))

    def end_publishing(self) -> None:
        """No publisher stores anything from now on."""
        for publisher in self._publishers:
            publisher.stop()

    def account(self) -> Account:
        """What was stored against what was delivered so far."""
        stored = [body for publisher in self._publishers for body in publisher.stored]
        unknown = [body for publisher in self._publishers for body in publisher.unknown]
        return account(stored, self.delivered.bodies(), unknown)

    def __str__(self) -> str:
        batches = len({run["batch"] for run in self.delivered.runs()})
        return f"{batches} batches, {len(self.delivered.replays())} replayed; {self.account()}"


class Day:
    """One day of queries that share a driver.

    Args:
        spark_driver: the fixture.
        happenings: what may happen to the servers, by name.

    Attributes:
        happened: how often what happened.
        failures: the logs of drivers in which a query failed, and that were started again.
    """

    def __init__(
        self,
        spark_driver: Callable[..., Driver],
        master: str,
        queries: Sequence[Query],
        happenings: Mapping[str, Happening],
        seed: int = SEED,
    ) -> None:
        self._driver = spark_driver(BESIDE, master, programs=[query.program.given for query in queries])
        self._queries = queries
        self._random = random.Random(seed)
        self._happenings = {
            "driver killed, with its executors": lambda _: self._driver.kill(),
            "driver killed, its executors not": lambda _: self._driver.kill_driver(),
            "executor killed": self._kill_executor,
            "python worker killed": self._kill_worker,
            **happenings,
        }
        self.happened: Counter[str] = Counter()
        self.failures: list[str] = []

    def run(self, seconds: float) -> None:
        """Live through it until each thing has happened, and so long, and end it well, with all messages delivered."""
        self._driver.start()
        self._progress()
        end = time.monotonic() + seconds
        waiting = self._all_happenings()
        while waiting or time.monotonic() < end:
            waiting = waiting or self._all_happenings()
            self._happen(waiting.pop())
        for query in self._queries:
            query.end_publishing()
        for query in self._queries:
            self._deliver_all(query)
        self._driver.marks.reach("end")
        for query in self._queries:
            query.program.marks.reach("end")
        self._keep_running()
        self._driver.wait()

    def __str__(self) -> str:
        what = ", ".join(f"{name}: {count}" for name, count in sorted(self.happened.items()))
        told = "\n".join(map(str, self._queries))
        return f"{what}; {len(self.failures)} drivers failed {[_reason(log) for log in self.failures]}\n{told}"

    def _all_happenings(self) -> list[str]:
        """In random order."""
        return self._random.sample(sorted(self._happenings), len(self._happenings))

    def _happen(self, name: str) -> None:
        self.happened[name] += 1
        self._happenings[name](self._random)
        self._progress()

    def _progress(self) -> None:
        """Return after one more batch of each query, and a random moment."""
        for query, before in [(query, query.batches()) for query in self._queries]:
            self._wait_more(query.batches, before)
        time.sleep(self._random.random())  # sleep: part of the story, not a wait for something

    def _deliver_all(self, query: Query) -> None:
        before = query.kept()
        while query.account().lost:
            self._wait_more(query.kept, before)
            before = query.kept()

    def _wait_more(self, count: Callable[[], int], before: int) -> None:
        """Return once there are more than before."""

        def more() -> bool:
            self._keep_running()
            return count() > before

        try:
            poll(more, LIMIT, "progress")
        except TimeoutError as error:
            raise AssertionError(f"{error}; {self}\n{self._driver.log()}") from None

    def _keep_running(self) -> None:
        if self._driver.is_running or (self._driver.marks.count("end") and self._driver.status == 0):
            return
        if self._driver.status > 0:
            self.failures.append(self._driver.log(None))
        self._driver.start()

    def _kill_executor(self, chance: random.Random) -> None:
        self._kill_one(self._driver.executors(), chance)

    def _kill_worker(self, chance: random.Random) -> None:
        self._kill_one(self._driver.workers(), chance)

    def _kill_one(self, pids: list[int], chance: random.Random) -> None:
        if pids:
            processes.kill(chance.choice(sorted(pids)))


def _reason(log: str) -> list[str]:
    """The lines of a log that say why."""
    return [line for line in log.splitlines() if re.match(r"[\w.]+(Exception|Error|Failed|Lost)\b", line)][-2:]
