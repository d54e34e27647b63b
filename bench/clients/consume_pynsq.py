"""Consume with pynsq: a trivial handler, one FIN a message."""

import nsq
from meter import Meter, settings

told = settings()
meter = Meter(told["count"], told["warmup"])


def handle(message):
    if meter.tick():
        meter.report()
        raise SystemExit
    return True


nsq.Reader(
    topic=told["topic"],
    channel=told["channel"],
    nsqd_tcp_addresses=["{}:{}".format(*told["nsqd"])],
    max_in_flight=told["max_in_flight"],
    message_handler=handle,
)
nsq.run()
