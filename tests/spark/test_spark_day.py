"""A day in a minute: publishers run while everything around queries restarts in random order; then ids are counted.

One query of each reader, side by side in one driver, so that it is started once for both, and what happens to it
happens to both. What happens is chosen by a seeded random, one thing at a time, and each has to be followed by progress
of each query before the next. NSQ_FAST_DAY_SECONDS=300 makes the day as long as five minutes, NSQ_FAST_DAY_SEED another
one.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support import processes
from support.servers import EMBEDDED_NSQD, RealLookupd, RealNsqd, find_server
from support.spark import BESIDE, Driver, Program
from support.spark_ledger import Account, account
from support.spark_marks import LIMIT, poll
from support.spark_publisher import Publisher
from support.spark_replay_program import check_order

from nsq_fast.broker import BrokerProcess, ClusterProcess

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
MASTER, SETTINGS = "local-cluster[1,2,1024]", {"spark.executor.cores": "2"}
"""One executor for both queries: whoever kills it has no other one go on. Of two, see test_spark_cluster_kills."""
SECONDS = float(os.environ.get("NSQ_FAST_DAY_SECONDS", "0"))
"""How long the day lasts; at least until each thing has happened."""
SEED = int(os.environ.get("NSQ_FAST_DAY_SEED", "1"))
Happening = Callable[[random.Random], object]


class Query(Program):
    """One query of a day, those who publish for it, and what it has delivered; ``options`` are those of the source."""

    def __init__(self, folder: Path, publishers: list[Publisher], **options: Any) -> None:
        super().__init__(PROGRAM, folder, options={name: str(value) for name, value in options.items()})
        self._out = folder / "out"
        self._publishers = publishers

    def batches(self) -> int:
        """How often a batch has been run so far; its rows may still be about to be kept."""
        return len(self.delivered.runs())

    def kept(self) -> int:
        """How many batches have been kept so far: each adds rows to ``delivered``."""
        return len(list(self._out.glob("batch-*.arrow")))

    def end_publishing(self) -> None:
        for publisher in self._publishers:
            publisher.stop()

    def account(self) -> Account:
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
        queries: Sequence[Query],
        happenings: Mapping[str, Happening],
        seed: int = SEED,
    ) -> None:
        self._driver = spark_driver(BESIDE, MASTER, SETTINGS, programs=[query.given for query in queries])
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
            query.marks.reach("end")
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


RATE = 100
MSG_TIMEOUT = 5
OTHER_TIME = 900  # before and after the day: JVMs, and what was in flight when something died
Cleanup = ExitStack


@pytest.fixture
def cleanup() -> Iterator[Cleanup]:
    with ExitStack() as stack:
        yield stack


class Original:
    """Two nsqds and an nsqlookupd, each a process of its own; real ones where there are any."""

    def __init__(self, folder: Path, cleanup: Cleanup) -> None:
        is_real = find_server("nsqd") is not None
        self.lookupd: Any = RealLookupd() if is_real else BrokerProcess(nsqds=0)
        cleanup.callback(self.lookupd.kill)
        if not is_real:
            self.lookupd.start()
        found = self.lookupd if is_real else self.lookupd.lookupd
        self.lookupd_address = str(found.http_address)
        self.nsqds = []
        for number in range(2):
            path = folder / f"nsqd{number}"
            path.mkdir()
            flags = (f"-lookupd-tcp-address={found.tcp_address}", f"-msg-timeout={MSG_TIMEOUT}s", f"-node-id={number}")
            self.nsqds.append(RealNsqd(path, *flags, command=None if is_real else EMBEDDED_NSQD))
            cleanup.callback(self.nsqds[-1].kill)


class Redesigned:
    """A cluster of three, each partition on two of them."""

    def __init__(self, cleanup: Cleanup) -> None:
        self.cluster = cleanup.enter_context(ClusterProcess(nodes=3, msg_timeout=MSG_TIMEOUT, kind=True))
        self.cluster.create_topic("day", partitions=2, replicas=2, multi_part=True, channels=["spark"])
        self.lookupd_address = ",".join(str(each.http) for each in self.cluster.lookupds)

    def restart_node(self, chance: random.Random) -> None:
        node = chance.randrange(3)
        self.cluster.kill_node(node)
        self.cluster.restart_node(node)

    def move_leader(self, chance: random.Random) -> None:
        self.cluster.move_leader("day", chance.randrange(2))

    def fail_lookupd(self, _: random.Random) -> None:
        self.cluster.set_faults("lookupd0.http", refuse_connections=True)
        self.cluster.set_faults("lookupd0.http", refuse_connections=False)


def make_query(folder: Path, cleanup: Cleanup, lookupd: str, **options: Any) -> Query:
    """A query of the topic ``day``, for which two publish from now on."""
    folder.mkdir()
    publishers = [Publisher(folder, f"p{n}", "day", RATE, lookupd_http_addresses=lookupd) for n in range(2)]
    for publisher in publishers:
        cleanup.callback(publisher.kill)
    options = {"topic": "day", "channel": "spark", "lookupd_http_addresses": lookupd, "columns": "*", **options}
    return Query(folder, publishers, maxOffsetsPerTrigger=20000, **options)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + OTHER_TIME)
def test_a_day_loses_and_doubles_nothing_and_keeps_order(
    spark_driver: Callable[..., Driver], tmp_path: Path, cleanup: Cleanup
) -> None:
    """On original servers and on a redesigned cluster."""
    original = Original(tmp_path, cleanup)
    redesigned = Redesigned(cleanup)

    def restart_nsqd(chance: random.Random) -> None:
        nsqd = chance.choice(original.nsqds)
        nsqd.stop()  # SIGTERM: an original nsqd that is killed forgets what it held in memory
        nsqd.start()

    happenings = {
        "original nsqd restarted": restart_nsqd,
        "original lookupd restarted": lambda _: original.lookupd.restart(),
        "redesigned nsqd killed and restarted": redesigned.restart_node,
        "leader moved": redesigned.move_leader,
        "redesigned lookupd gone for a moment": redesigned.fail_lookupd,
    }
    journalled = make_query(
        tmp_path / "journalled", cleanup, original.lookupd_address, journal=tmp_path / "journalled" / "journal"
    )
    replayable = make_query(tmp_path / "replayable", cleanup, redesigned.lookupd_address, startingOffsets="earliest")
    day = Day(spark_driver, [journalled, replayable], happenings)
    day.run(SECONDS)
    print(f"\n{day}")  # noqa: T201  # figures of a long day are wanted
    for query in (journalled, replayable):
        query.account().check()
        query.delivered.check_replays()
    check_order(replayable.delivered)
