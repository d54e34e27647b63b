"""examples/embedding/tornado_reader.py, a reader in pynsq's style, as a measured client: consume.

It runs in a checkout only, in an interpreter that has tornado, and what nsq_fast itself needs.
"""

import sys
from pathlib import Path

from meter import Meter, settings, stamp_of
from tornado.ioloop import IOLoop

ROOT = Path(__file__).parents[3]
sys.path += [str(ROOT), str(ROOT / "examples" / "embedding")]

from tornado_reader import Reader  # noqa: E402

job = settings()
meter = Meter(job)


def plain(message, take=meter.take, marks=meter.marks):
    if take() in marks and meter.mark():
        raise SystemExit
    return True


def timed(message):
    meter.seen(stamp_of(message.body))
    return plain(message)


Reader(
    job["topic"],
    job["channel"],
    timed if job["rate"] else plain,
    ["{}:{}".format(*address) for address in job["nsqds"]],
    max_in_flight=job["max_in_flight"],
)
IOLoop.current().start()
