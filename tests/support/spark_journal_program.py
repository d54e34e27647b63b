"""A query of the journalled reader that holds, fails or dies where a test wants it, and what must be true then."""

from __future__ import annotations

from pathlib import Path

from .journal import CHANNEL, TOPIC, Server
from .spark import Program
from .spark_ledger import account

PROGRAM = """
import time
from pyspark import TaskContext
from support.journal_places import Placed
from support.spark_marks import LIMIT
from support.spark_program import Collector, Places, arguments, marks, register_faulty, run_to_end, say, session
from nsq_fast.client.admin import NsqdHTTPClient
from nsq_fast.spark.journal import JournalStreamReader

HERE, ARGUMENTS = marks(), arguments()
PLACES = ARGUMENTS["places"]
at = Places(PLACES, HERE).at

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
    run_to_end(lambda: writer.trigger(availableNow=True).start().awaitTermination())

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


def while_it_may(program: str = PROGRAM) -> str:
    """The program from the mark ``begin`` on; in runs of the driver after the mark ``over`` it does nothing."""
    return f"""
from support.spark_program import marks

marks().wait("begin")
if not marks().count("over"):
    exec({program!r})
"""


class Journalled(Program):
    """One for a driver.

    Args:
        bodies: what the test has published.
        places: see ``Places``.
        text: the program.
    """

    def __init__(
        self,
        server: Server,
        folder: Path,
        bodies: list[bytes],
        places: dict[str, str],
        text: str = PROGRAM,
        **options: str,
    ) -> None:
        self._server, self._bodies = server, bodies
        given = {
            "topic": TOPIC,
            "channel": CHANNEL,
            "journal": str(folder / "journal"),
            "maxOffsetsPerTrigger": "8000",
            "nsq.msg_timeout": "3",
            **server.options,
            **options,
        }
        super().__init__(text, folder, options=given, places=places, http=str(server.http))

    def check(self, replays: int = 0) -> None:
        """Nothing was lost, nothing is there twice, and so many batches were run again, with the same rows."""
        assert self._server.depth() == (0, 0, 0)
        more = [b"%d.%d" % (turn + 1, each) for turn in range(self.marks.count("more")) for each in range(8000)]
        account(self._bodies + more, self.delivered.bodies()).check()
        self.delivered.check_replays()
        assert len(self.delivered.replays()) >= replays
