"""Publish with gnsq: one at a time, from many greenlets, or as MPUB."""

import gevent
import gnsq
from meter import Meter, settings

told = settings()
body = b"x" * told["size"]
meter = Meter(told["count"])
topic = told["topic"]
producer = gnsq.Producer(["{}:{}".format(*told["nsqd"])])
producer.start()
producer.publish(topic, body)


def publish_many(count):
    for _ in range(count):
        producer.publish(topic, body)


meter.start()
if told["mode"] == "single":
    publish_many(told["count"])
elif told["mode"] == "greenlets":
    gevent.joinall([gevent.spawn(publish_many, told["count"] // 100) for _ in range(100)])
else:
    batch = [body] * 200
    for _ in range(told["count"] // 200):
        producer.multipublish(topic, batch)
meter.report()
