"""Publish with nsq_fast: one at a time, from many greenlets, or as MPUB."""

import gevent
from meter import Meter, settings

from nsq_fast import Producer

told = settings()
body = b"x" * told["size"]
meter = Meter(told["count"])
topic = told["topic"]


def publish_many(producer, count):
    for _ in range(count):
        producer.publish(topic, body)


with Producer(nsqd_tcp_addresses=[tuple(told["nsqd"])], linger=told.get("linger", 0.0)) as producer:
    producer.publish(topic, body)
    meter.start()
    if told["mode"] == "single":
        publish_many(producer, told["count"])
    elif told["mode"] == "greenlets":
        gevent.joinall([gevent.spawn(publish_many, producer, told["count"] // 100) for _ in range(100)])
    else:
        batch = [body] * 200
        for _ in range(told["count"] // 200):
            producer.multipublish(topic, batch)
    meter.report()
