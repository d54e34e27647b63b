"""nsq_fast as a measured client: consume, publish, roundtrip, ordered, idle, start; with the argument ``threads`` its
face for threads: consume, publish, idle."""

# ruff: noqa: E402  (what the import of nsq_fast takes is measured, so it comes before those that import the same)

from time import perf_counter, process_time

BEFORE_IMPORT = process_time()
import nsq_fast  # noqa: F401

PACKAGE_SECONDS = process_time() - BEFORE_IMPORT
from nsq_fast import Consumer, Producer

IMPORT_SECONDS = process_time() - BEFORE_IMPORT

import sys
import time
from itertools import cycle, islice
from threading import Thread

from blocking import Blocking
from meter import Meter, client_options, connection_options, settings

job = settings()
NSQDS = [tuple(address) for address in job["nsqds"]]
LOOKUP = {"lookupd_http_addresses": job["lookupds"]} if job["lookupds"] else {}
HANDLER_THREADS = 4
KEYS = [b"%d" % number for number in range(1000)]
"""Made beforehand: the publishes are measured, not the keys."""


class NsqFast(Blocking):
    publish_nowait = staticmethod(Producer.publish_nowait)

    def make_consumer(self, handle):
        options = connection_options(job)
        if job["kind"] == "ordered":
            options["ordered"] = True
        options["batch_handler" if job["variant"] == "batches" else "message_handler"] = handle
        if "threads" in sys.argv:
            options["handler_threads"] = job["concurrency"] if job["concurrency"] > 1 else HANDLER_THREADS
        elif job["kind"] == "consume" and job["concurrency"] > 1:
            options["concurrency"] = job["concurrency"]
        servers = LOOKUP or {"nsqd_tcp_addresses": NSQDS}
        return Consumer(job["topic"], job["channel"], max_in_flight=job["max_in_flight"], **servers, **options)

    def make_producer(self):
        options = {}
        if job["variant"] == "linger":  # a batch leaves when every caller has its message in it
            options = {"linger": job["linger"], "linger_max_messages": job["concurrency"]}
        elif job["variant"] == "separate":  # each message is a command of its own
            options = {"coalesce": False}
        return Producer(**(LOOKUP or {"nsqd_tcp_addresses": NSQDS[:1]}), **options, **connection_options(job))

    def one_by_one(self, producer, count):
        """With the variant ``keyed`` with keys, a thousand of them in turn."""
        if job["variant"] != "keyed":
            super().one_by_one(producer, count)
            return
        publish, topic, body = producer.publish, self.topic, self.body
        for key in islice(cycle(KEYS), count):
            publish(topic, body, key=key)

    def handler(self):
        if job["variant"] != "batches":
            return super().handler()
        take, marks, mark = self.meter.take, self.meter.marks, self.meter.mark

        def handle(consumer, messages):
            for _ in messages:
                if take() in marks and mark():
                    consumer.close(drain=False)

        return handle

    def consume(self):
        if job["variant"] == "columns":
            self.consume_columns()
        else:
            super().consume()

    def consume_columns(self):
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
            self.meter.start()
            self.meter.report(take(job["count"] - warmed, job["max_in_flight"]))

    def start(self):
        """From a program that begins to its first message, with lookup."""
        first = []

        def handle(consumer, message):
            first.append(perf_counter())
            consumer.close(drain=False)

        self.meter.start()
        consumer = Consumer(job["topic"], job["channel"], message_handler=handle, **LOOKUP, **client_options())
        began = perf_counter()
        consumer.start()
        imports = {"package_ms": PACKAGE_SECONDS * 1e3, "import_ms": IMPORT_SECONDS * 1e3}
        self.meter.report(1, **imports, first_ms=(first[0] - began) * 1e3)


class Threads(NsqFast):
    sleep = staticmethod(time.sleep)

    @staticmethod
    def run_all(functions):
        threads = [Thread(target=function) for function in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


if "threads" in sys.argv:
    from nsq_fast.threads import Consumer, Producer
getattr((Threads if "threads" in sys.argv else NsqFast)(job, Meter(job)), job["kind"])()
