"""Consume with nsq_fast: a trivial handler, one FIN a message."""

from meter import Meter, settings

from nsq_fast import Consumer

told = settings()
meter = Meter(told["count"], told["warmup"])


def handle(consumer, message):
    if meter.tick():
        meter.report()
        consumer.close(drain=False)


Consumer(
    told["topic"],
    told["channel"],
    nsqd_tcp_addresses=[tuple(told["nsqd"])],
    message_handler=handle,
    max_in_flight=told["max_in_flight"],
).start()
