"""nsq_fast as a measured client: consume, publish, roundtrip, ordered, idle, start."""

# ruff: noqa: E402  (what the import of nsq_fast takes is measured, so it comes before those that import the same)

from time import perf_counter, process_time

BEFORE_IMPORT = process_time()
import nsq_fast  # noqa: F401

PACKAGE_SECONDS = process_time() - BEFORE_IMPORT
from nsq_fast import Consumer, Producer

IMPORT_SECONDS = process_time() - BEFORE_IMPORT

from itertools import cycle, islice

from gevent import sleep
from greenlets import Load, timed
from greenlets import roundtrip as there_and_back
from meter import Meter, client_options, connection_options, settings

job = settings()
meter = Meter(job)
NSQDS = [tuple(address) for address in job["nsqds"]]


def make_consumer(handle):
    options = connection_options(job)
    servers = {"lookupd_http_addresses": job["lookupds"]} if job["lookupds"] else {"nsqd_tcp_addresses": NSQDS}
    if job["kind"] == "ordered":
        options["ordered"] = True
    if job["variant"] == "batches":
        options["batch_handler"] = handle
    else:
        options["message_handler"] = handle
    if job["kind"] == "consume" and job["concurrency"] > 1:
        options["concurrency"] = job["concurrency"]
    return Consumer(job["topic"], job["channel"], max_in_flight=job["max_in_flight"], **servers, **options)


def make_producer():
    options = {}
    if job["variant"] == "linger":  # a batch leaves when every caller has its message in it
        options = {"linger": job["linger"], "linger_max_messages": job["concurrency"]}
    elif job["variant"] == "separate":  # each message is a command of its own
        options = {"coalesce": False}
    servers = {"lookupd_http_addresses": job["lookupds"]} if job["lookupds"] else {"nsqd_tcp_addresses": NSQDS[:1]}
    return Producer(**servers, **options, **connection_options(job))


def plain_handler(take=meter.take, marks=meter.marks):
    def handle(consumer, message):
        if take() in marks and meter.mark():
            consumer.close(drain=False)

    return handle


def sleeping_handler():
    plain, pause = plain_handler(), job["handler_sleep"]

    def handle(consumer, message):
        sleep(pause)
        plain(consumer, message)

    return handle


def batch_handler(take=meter.take, marks=meter.marks):
    def handle(consumer, messages):
        for _ in messages:
            if take() in marks and meter.mark():
                consumer.close(drain=False)

    return handle


def consume_columns():
    """A batch program: it asks for many at once, counts what came, and finishes it in one write."""
    from nsq_fast import Address, ColumnSubscription, ConnectionConfig

    config = ConnectionConfig(**connection_options(job))
    with ColumnSubscription(Address(*NSQDS[0]), job["topic"], job["channel"], config) as subscription:

        def take(least, in_flight):
            subscription.set_rdy(in_flight)
            many, taken = max(1, min(1000, in_flight // 2)), 0
            while taken < least:
                columns = subscription.fetch(1.0, at_least=many)
                subscription.finish(columns.ids)
                taken += columns.count
            return taken

        # No more in flight than the warm-up has: one read may bring all that there are in a short round.
        warmed = take(job["warmup"], min(job["max_in_flight"], job["warmup"]))
        meter.start()
        meter.report(take(job["count"] - warmed, job["max_in_flight"]))


def consume():
    if job["variant"] == "columns":
        consume_columns()
        return
    if job["handler_sleep"]:
        handle = sleeping_handler()
    elif job["rate"]:
        handle = timed(plain_handler(), meter)
    else:
        handle = batch_handler() if job["variant"] == "batches" else plain_handler()
    make_consumer(handle).start()


def make_load(producer):
    return Load(job, meter, producer, Producer.publish_nowait)


def publish():
    with make_producer() as producer:
        (KeyedLoad if job["variant"] == "keyed" else Load)(job, meter, producer, Producer.publish_nowait).run()


def roundtrip():
    with make_producer() as producer:
        there_and_back(job, meter, plain_handler(), make_consumer, make_load(producer))


def idle():
    consumer = make_consumer(plain_handler())
    consumer.start(block=False)
    sleep(job["settle"])
    meter.start()
    sleep(job["duration"])
    meter.report(0)
    consumer.close()


KEYS = [b"%d" % number for number in range(1000)]
"""Made beforehand: the publishes are measured, not the keys."""


class KeyedLoad(Load):
    """Publishes with keys, a thousand of them in turn."""

    def _one_by_one(self, count):
        publish, topic, body = self._producer.publish, self._topic, self._body
        for key in islice(cycle(KEYS), count):
            publish(topic, body, key=key)


def start():
    """From a program that begins to its first message, with lookup."""
    first = []

    def handle(consumer, message):
        first.append(perf_counter())
        consumer.close(drain=False)

    meter.start()
    consumer = Consumer(
        job["topic"], job["channel"], lookupd_http_addresses=job["lookupds"], message_handler=handle, **client_options()
    )
    began = perf_counter()
    consumer.start()
    imports = {"package_ms": PACKAGE_SECONDS * 1e3, "import_ms": IMPORT_SECONDS * 1e3}
    meter.report(1, **imports, first_ms=(first[0] - began) * 1e3)


KINDS = {
    "consume": consume,
    "ordered": consume,
    "publish": publish,
    "roundtrip": roundtrip,
    "idle": idle,
    "start": start,
}
KINDS[job["kind"]]()
