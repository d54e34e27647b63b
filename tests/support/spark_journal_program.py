"""A query of the journalled reader that holds, fails or dies where a test wants it; and what must be true afterwards.

Each place is for once in all runs of the program: ``places`` says what happens
there (``hold``, ``raise``, ``exit``). Those that hold come one after the other.
"""

from __future__ import annotations

from pathlib import Path

from .journal import CHANNEL, TOPIC, Server
from .spark_ledger import Delivered, account
from .spark_marks import Marks

PROGRAM = """
import os, time
from pyspark import TaskContext
from support.journal_places import Placed
from support.spark_marks import LIMIT
from support.spark_program import Collector, arguments, marks, register_faulty, run_to_end, say, session
from nsq_fast.client.admin import NsqdHTTPClient
from nsq_fast.spark.journal import JournalStreamReader

HERE, ARGUMENTS = marks(), arguments()
PLACES = ARGUMENTS["places"]

def is_next(place):
    # a driver is killed at one place after the other
    order = list(PLACES)
    return all(PLACES[each] != "hold" or HERE.count(each) for each in order[:order.index(place)])

def at(place):
    # stand at a place of the plan once, in whatever process
    if place in PLACES and is_next(place) and HERE.once(place):
        action = PLACES[place]
        HERE.reach(place)
        if action == "raise":
            raise RuntimeError(place)
        if action == "exit":
            os._exit(3)
        HERE.hold(place + " go")

class Faulty(Placed):
    def at(self, place):
        if place.startswith("before claim") and TaskContext.get().attemptNumber():
            HERE.reach("tried again")
        at(place)

class Reader(JournalStreamReader):
    def make_collector(self, slot):
        return Faulty(slot)

spark = session()
register_faulty(spark, Reader)
collect = Collector(ARGUMENTS["out"])

def sink(batch, number):
    collect(batch, number)
    at("in the sink")

def run():
    reader = spark.readStream.format("faulty").options(**ARGUMENTS["options"])
    writer = reader.load().writeStream.foreachBatch(sink).option("checkpointLocation", ARGUMENTS["checkpoint"])
    run_to_end(writer.trigger(availableNow=True).start)

host, port = ARGUMENTS["http"].rsplit(":", 1)
client = NsqdHTTPClient(host, int(port))

def count(*names):
    (channel,) = client.stats("orders")["topics"][0]["channels"]
    return sum(channel[name] for name in names)

deadline = time.monotonic() + LIMIT
while time.monotonic() < deadline:
    run()
    while (left := count("depth", "in_flight_count", "deferred_count")) and not count("depth"):
        time.sleep(0.2)  # sleep: what a dead task held comes back when its time is up
    if left:
        continue
    if all(HERE.count(place) for place in PLACES):
        break
    # On a slow machine, slots end with their first segment: a place within a later one is still to come.
    HERE.reach("more")
    client.multipublish("orders", [b"%d.%d" % (HERE.count("more"), each) for each in range(8000)], binary=True)
say("left", count=left)
"""


def arguments(server: Server, folder: Path, places: dict[str, str], **options: str) -> dict[str, object]:
    """What the program is given; its files go below ``folder``."""
    given = {
        "topic": TOPIC,
        "channel": CHANNEL,
        "journal": str(folder / "journal"),
        "maxOffsetsPerTrigger": "8000",
        "nsq.msg_timeout": "3",
        **server.options,
        **options,
    }
    paths = {"out": str(folder / "out"), "checkpoint": str(folder / "checkpoint")}
    return {"options": given, "places": places, "http": str(server.http), **paths}


def check(server: Server, marks: Marks, bodies: list[bytes], folder: Path, replays: int) -> None:
    """``bodies`` are those of the test; the program may have published more."""
    assert server.depth() == (0, 0, 0)
    delivered = Delivered(folder / "out")
    more = [b"%d.%d" % (turn + 1, each) for turn in range(marks.count("more")) for each in range(8000)]
    account(bodies + more, delivered.bodies()).check()
    delivered.check_replays()
    assert len(delivered.replays()) >= replays
