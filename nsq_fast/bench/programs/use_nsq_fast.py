"""nsq_fast as a measured client: consume, publish, roundtrip, ordered, idle."""

from time import time_ns

from gevent import joinall, sleep, spawn
from gevent.lock import Semaphore
from meter import STAMP_BYTES, Meter, seconds_until, settings, stamp_of, stamped, ticks

from nsq_fast import Consumer, Producer

told = settings()
meter = Meter(told)
topic = told["topic"]
body = b"x" * told["size"]
padding = b"x" * max(0, told["size"] - STAMP_BYTES)
NSQDS = [tuple(address) for address in told["nsqds"]]


def connection_options():
    options = {told["compression"]: True} if told["compression"] else {}
    if told["tls"]:
        options |= {"tls_v1": True, "tls_options": {"cafile": told["cafile"]}}
    if told["unbuffered"]:
        options["output_buffer_size"] = -1
    return options


def make_consumer(handle):
    options = connection_options()
    servers = {"lookupd_http_addresses": told["lookupds"]} if told["lookupds"] else {"nsqd_tcp_addresses": NSQDS}
    if told["kind"] == "ordered":
        options["ordered"] = True
    if told["variant"] == "batch":
        options["batch_handler"] = handle
    else:
        options["message_handler"] = handle
    if told["kind"] == "consume" and told["concurrency"] > 1:
        options["concurrency"] = told["concurrency"]
    return Consumer(topic, told["channel"], max_in_flight=told["max_in_flight"], **servers, **options)


def make_producer():
    options = {}
    if told["variant"] == "linger":  # a batch leaves when every caller has its message in it
        options = {"linger": told["linger"], "linger_max_messages": told["concurrency"]}
    return Producer(nsqd_tcp_addresses=NSQDS[:1], **options, **connection_options())


def plain_handler(take=meter.take, marks=meter.marks):
    def handle(consumer, message):
        if take() in marks and meter.mark():
            consumer.close(drain=False)

    return handle


def sleeping_handler():
    plain, pause = plain_handler(), told["handler_sleep"]

    def handle(consumer, message):
        sleep(pause)
        plain(consumer, message)

    return handle


def timed_handler():
    plain = plain_handler()

    def handle(consumer, message):
        meter.seen(stamp_of(message.body))
        plain(consumer, message)

    return handle


def batch_handler():
    plain = plain_handler()

    def handle(consumer, messages):
        for message in messages:
            plain(consumer, message)

    return handle


def consume():
    if told["handler_sleep"]:
        handle = sleeping_handler()
    elif told["rate"]:
        handle = timed_handler()
    else:
        handle = batch_handler() if told["variant"] == "batch" else plain_handler()
    make_consumer(handle).start()


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
            result = producer.publish_nowait(topic, body)
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


def publish():
    with make_producer() as producer:
        publish_mode(producer, told["warmup"])
        meter.start()
        publish_mode(producer, told["count"])
        meter.report(told["count"])


def roundtrip():
    total = told["count"] + told["beyond"]
    window = Semaphore(told["concurrency"])
    plain = plain_handler()

    def handle(consumer, message):
        meter.seen(stamp_of(message.body))
        window.release()
        plain(consumer, message)

    def send(producer):
        if told["rate"]:
            for due, many in ticks(told["rate"], total):
                sleep(seconds_until(due))
                for _ in range(many):
                    producer.publish_nowait(topic, stamped(due, padding))
            return
        for _ in range(total):
            window.acquire()
            producer.publish_nowait(topic, stamped(time_ns(), padding))

    consumer = make_consumer(handle)
    consumer.start(block=False)
    with make_producer() as producer:
        spawn(send, producer)
        consumer.join()


def idle():
    consumer = make_consumer(plain_handler())
    consumer.start(block=False)
    sleep(told["settle"])
    meter.start()
    sleep(told["duration"])
    meter.report(0)
    consumer.close()


{"consume": consume, "ordered": consume, "publish": publish, "roundtrip": roundtrip, "idle": idle}[told["kind"]]()
