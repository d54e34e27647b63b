"""A day of a stream, in a minute or in five: publishers run, everything restarts in random order, ids are counted.

What happens is chosen by a seeded random, one thing at a time, and each has to
be followed by progress of the stream before the next.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import processes
from .spark_driver import Driver
from .spark_ledger import Account, Delivered, account
from .spark_marks import LIMIT, poll
from .spark_publisher import Publisher

PROGRAM = """
from support.spark_program import Collector, arguments, marks, session

given, here = arguments(), marks()
rows = session().readStream.format("nsq").options(**given["options"]).load()
writer = rows.writeStream.foreachBatch(Collector(given["out"])).option("checkpointLocation", given["checkpoint"])
query = writer.start()
while not here.count("end"):
    query.awaitTermination(0.2)
query.stop()
"""
SECONDS = float(os.environ.get("NSQ_FAST_DAY_SECONDS", "0"))
"""How long each day lasts; 0: as short as the test likes."""
SEED = int(os.environ.get("NSQ_FAST_DAY_SEED", "1"))
Happening = Callable[[random.Random], object]


class Day:
    """One day of one query.

    Args:
        driver: a program as ``PROGRAM``, not started.
        happenings: what may happen to the servers, by name.

    Attributes:
        happened: how often what happened.
        failures: the logs of queries that failed, and were started again.
    """

    def __init__(
        self,
        driver: Driver,
        out: Path,
        publishers: list[Publisher],
        happenings: Mapping[str, Happening],
        seed: int = SEED,
    ) -> None:
        self._driver = driver
        self._delivered = Delivered(out)
        self._publishers = publishers
        self._random = random.Random(seed)
        self._happenings = {
            "driver killed, with its executors": lambda _: driver.kill(),
            "driver killed, its executors not": lambda _: driver.kill_driver(),
            "executor killed": self._kill_executor,
            "python worker killed": self._kill_worker,
            **happenings,
        }
        self.happened: Counter[str] = Counter()
        self.failures: list[str] = []

    def run(self, seconds: float) -> Account:
        """Live through it, end it well, and give account."""
        self._driver.start()
        self._progress(0)
        end = time.monotonic() + seconds
        waiting: list[str] = []
        while time.monotonic() < end:
            waiting = waiting or self._random.sample(sorted(self._happenings), len(self._happenings))
            self._happen(waiting.pop())
        for publisher in self._publishers:
            publisher.stop()
        before = self._batches()
        while self.account().lost:
            self._progress(before)
            before = self._batches()
        self._driver.marks.reach("end")
        self._keep_running()
        self._driver.wait()
        return self.account()

    def account(self) -> Account:
        """What was stored against what was delivered so far."""
        stored = [body for publisher in self._publishers for body in publisher.stored]
        unknown = [body for publisher in self._publishers for body in publisher.unknown]
        return account(stored, self._delivered.bodies(), unknown)

    def __str__(self) -> str:
        what = ", ".join(f"{name}: {count}" for name, count in sorted(self.happened.items()))
        batches = len({run["batch"] for run in self._delivered.runs()})
        return (
            f"{what}; {batches} batches, {len(self._delivered.replays())} replayed;"
            f" {len(self.failures)} queries failed {[_reason(log) for log in self.failures]}"
        )

    def _happen(self, name: str) -> None:
        self.happened[name] += 1
        self._happenings[name](self._random)
        self._progress(self._batches())

    def _batches(self) -> int:
        """How often a batch has been run so far."""
        return len(self._delivered.runs())

    def _progress(self, before: int) -> None:
        """Return after more batches than ``before``, and a random moment."""

        def more() -> bool:
            self._keep_running()
            return self._batches() > before

        poll(more, LIMIT, f"progress; {self}\n{self._driver.log()}")
        time.sleep(self._random.random())  # sleep: part of the story, not a wait for something

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


def day_program(spark_driver: Callable[..., Driver], master: str, folder: Path, **options: Any) -> Driver:
    """A driver of ``PROGRAM`` with these options of the source."""
    paths = {"out": str(folder / "out"), "checkpoint": str(folder / "checkpoint")}
    return spark_driver(PROGRAM, master, options={name: str(value) for name, value in options.items()}, **paths)
