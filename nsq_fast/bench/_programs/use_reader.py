"""A reader in pynsq's style as a measured client: consume. pynsq itself, or with the argument ``tornado`` the reader of
examples/embedding/tornado_reader.py, which is there in a checkout only, and needs tornado and what nsq_fast needs."""

import sys
from pathlib import Path

from meter import Meter, settings, stamp_of

job = settings()
meter = Meter(job)


def plain(message, take=meter.take, marks=meter.marks):
    if take() in marks and meter.mark():
        raise SystemExit
    return True


def timed(message):
    meter.seen(stamp_of(message.body))
    return plain(message)


READING = {
    "topic": job["topic"],
    "channel": job["channel"],
    "nsqd_tcp_addresses": ["{}:{}".format(*address) for address in job["nsqds"]],
    "max_in_flight": job["max_in_flight"],
    "message_handler": timed if job["rate"] else plain,
}
if "tornado" in sys.argv:
    from tornado.ioloop import IOLoop

    ROOT = Path(__file__).parents[3]
    sys.path += [str(ROOT), str(ROOT / "examples" / "embedding")]
    from tornado_reader import Reader

    Reader(**READING)
    IOLoop.current().start()
else:
    import nsq

    nsq.Reader(**READING, **({job["compression"]: True} if job["compression"] else {}))
    nsq.run()
