"""pynsq as a measured client: consume."""

import nsq
from meter import Meter, settings, stamp_of

told = settings()
meter = Meter(told)


def plain(message, take=meter.take, marks=meter.marks):
    if take() in marks and meter.mark():
        raise SystemExit
    return True


def timed(message):
    meter.seen(stamp_of(message.body))
    return plain(message)


nsq.Reader(
    topic=told["topic"],
    channel=told["channel"],
    nsqd_tcp_addresses=["{}:{}".format(*address) for address in told["nsqds"]],
    max_in_flight=told["max_in_flight"],
    message_handler=timed if told["rate"] else plain,
    **({told["compression"]: True} if told["compression"] else {}),
)
nsq.run()
