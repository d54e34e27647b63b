"""pynsq as a measured client: consume."""

import nsq
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


nsq.Reader(
    topic=job["topic"],
    channel=job["channel"],
    nsqd_tcp_addresses=["{}:{}".format(*address) for address in job["nsqds"]],
    max_in_flight=job["max_in_flight"],
    message_handler=timed if job["rate"] else plain,
    **({job["compression"]: True} if job["compression"] else {}),
)
nsq.run()
