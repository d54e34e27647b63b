"""nsq_fast.threads as a measured client: consume, publish, idle."""

import time
from threading import Lock, Thread

from meter import Meter, connection_options, settings

from nsq_fast.threads import Consumer, Producer

job = settings()
meter = Meter(job)
topic = job["topic"]
body = b"x" * job["size"]
NSQDS = [tuple(address) for address in job["nsqds"]]
OPTIONS = connection_options(job)
HANDLER_THREADS = 4
LOCK = Lock()


def make_consumer(handle):
    threads = job["concurrency"] if job["concurrency"] > 1 else HANDLER_THREADS
    options = {"max_in_flight": job["max_in_flight"], "handler_threads": threads, **OPTIONS}
    return Consumer(topic, job["channel"], NSQDS, message_handler=handle, **options)


def handler(take=meter.take, marks=meter.marks, lock=LOCK):
    pause = job["handler_sleep"]

    def handle(consumer, message):
        if pause:
            time.sleep(pause)
        if take() in marks:
            with lock:
                is_over = meter.mark()
            if is_over:
                consumer.close(drain=False)

    return handle


def consume():
    make_consumer(handler()).start()


def publish():
    with Producer(NSQDS[:1], **OPTIONS) as producer:
        publish_some(producer, job["warmup"])
        meter.start()
        publish_some(producer, job["count"])
        meter.report(job["count"])


def publish_some(producer, count):
    if job["mode"] == "single":
        for _ in range(count):
            start = time.time_ns()
            producer.publish(topic, body)
            meter.seen(start)
    elif job["mode"] == "concurrent":
        share = count // job["concurrency"]
        threads = [Thread(target=one_by_one, args=(producer, share)) for _ in range(job["concurrency"])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        batch = [body] * job["batch"]
        for _ in range(count // job["batch"]):
            producer.multipublish(topic, batch)


def one_by_one(producer, count):
    for _ in range(count):
        producer.publish(topic, body)


def idle():
    with make_consumer(handler()):
        time.sleep(job["settle"])
        meter.start()
        time.sleep(job["duration"])
        meter.report(0)


{"consume": consume, "publish": publish, "idle": idle}[job["kind"]]()
