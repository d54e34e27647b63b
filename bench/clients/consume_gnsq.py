"""Consume with gnsq: a trivial handler, one FIN a message."""

import gnsq
from meter import Meter, settings

told = settings()
meter = Meter(told["count"], told["warmup"])
consumer = gnsq.Consumer(
    told["topic"],
    told["channel"],
    nsqd_tcp_addresses=["{}:{}".format(*told["nsqd"])],
    max_in_flight=told["max_in_flight"],
)


@consumer.on_message.connect
def handle(consumer, message):
    if meter.tick():
        meter.report()
        consumer.close()


consumer.start()
