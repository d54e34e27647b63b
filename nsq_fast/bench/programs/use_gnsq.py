"""gnsq as a measured client, or whatever answers to its name: consume, publish, roundtrip."""

from ssl import CERT_REQUIRED
from time import time_ns

import gnsq
from gevent import joinall, sleep, spawn
from gevent.lock import Semaphore
from meter import STAMP_BYTES, Meter, seconds_until, settings, stamp_of, stamped, ticks

told = settings()
meter = Meter(told)
topic = told["topic"]
body = b"x" * told["size"]
padding = b"x" * max(0, told["size"] - STAMP_BYTES)
NSQDS = ["{}:{}".format(*address) for address in told["nsqds"]]
OPTIONS = {told["compression"]: True} if told["compression"] else {}
if told["tls"]:
    OPTIONS["tls_v1"] = True
    OPTIONS["tls_options"] = {"ca_certs": told["cafile"], "cert_reqs": CERT_REQUIRED}
if told["unbuffered"]:
    OPTIONS["output_buffer_size"] = -1


def make_consumer(handle):
    return gnsq.Consumer(
        topic,
        told["channel"],
        nsqd_tcp_addresses=NSQDS,
        max_in_flight=told["max_in_flight"],
        message_handler=handle,
        **OPTIONS,
    )


def plain(consumer, message, take=meter.take, marks=meter.marks):
    if take() in marks and meter.mark():
        consumer.close()


def timed(consumer, message):
    meter.seen(stamp_of(message.body))
    plain(consumer, message)


def consume():
    make_consumer(timed if told["rate"] else plain).start()


def publish_many(producer, count):
    for _ in range(count):
        producer.publish(topic, body)


def publish_timed(producer, count):
    for _ in range(count):
        start = time_ns()
        producer.publish(topic, body)
        meter.seen(start)


def publish_at_rate(producer, count):
    def answered(due):
        return lambda _: meter.seen(due)

    for due, many in ticks(told["rate"], count):
        sleep(seconds_until(due))
        for _ in range(many):
            result = producer.publish(topic, body, raise_error=False)
            result.rawlink(answered(due))
    result.get()


def publish_mode(producer, count):
    if told["rate"]:
        publish_at_rate(producer, count)
    elif told["mode"] == "single":
        publish_timed(producer, count)
    elif told["mode"] == "concurrent":
        share = count // told["concurrency"]
        joinall([spawn(publish_many, producer, share) for _ in range(told["concurrency"])])
    else:
        batch = [body] * told["batch"]
        for _ in range(count // told["batch"]):
            producer.multipublish(topic, batch)


def make_producer():
    producer = gnsq.Producer(NSQDS[:1], **OPTIONS)
    producer.start()
    return producer


def publish():
    producer = make_producer()
    publish_mode(producer, told["warmup"])
    meter.start()
    publish_mode(producer, told["count"])
    meter.report(told["count"])


def roundtrip():
    total = told["count"] + told["beyond"]
    window = Semaphore(told["concurrency"])

    def handle(consumer, message):
        meter.seen(stamp_of(message.body))
        window.release()
        plain(consumer, message)

    def send(producer):
        if told["rate"]:
            for due, many in ticks(told["rate"], total):
                sleep(seconds_until(due))
                for _ in range(many):
                    producer.publish(topic, stamped(due, padding), raise_error=False)
            return
        for _ in range(total):
            window.acquire()
            producer.publish(topic, stamped(time_ns(), padding), raise_error=False)

    consumer = make_consumer(handle)
    consumer.start(block=False)
    spawn(send, make_producer())
    consumer.join()


{"consume": consume, "publish": publish, "roundtrip": roundtrip}[told["kind"]]()
