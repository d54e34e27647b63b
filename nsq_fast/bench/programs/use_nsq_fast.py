"""nsq_fast as a measured client: consume, publish, roundtrip, ordered, idle."""

from connecting import connection_options
from gevent import sleep
from greenlets import Load, timed
from greenlets import roundtrip as there_and_back
from meter import Meter, settings

from nsq_fast import Consumer, Producer

job = settings()
meter = Meter(job)
NSQDS = [tuple(address) for address in job["nsqds"]]


def make_consumer(handle):
    options = connection_options(job)
    servers = {"lookupd_http_addresses": job["lookupds"]} if job["lookupds"] else {"nsqd_tcp_addresses": NSQDS}
    if job["kind"] == "ordered":
        options["ordered"] = True
    if job["variant"] == "batch":
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
    return Producer(nsqd_tcp_addresses=NSQDS[:1], **options, **connection_options(job))


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


def batch_handler():
    plain = plain_handler()

    def handle(consumer, messages):
        for message in messages:
            plain(consumer, message)

    return handle


def consume():
    if job["handler_sleep"]:
        handle = sleeping_handler()
    elif job["rate"]:
        handle = timed(plain_handler(), meter)
    else:
        handle = batch_handler() if job["variant"] == "batch" else plain_handler()
    make_consumer(handle).start()


def make_load(producer):
    return Load(job, meter, producer, Producer.publish_nowait)


def publish():
    with make_producer() as producer:
        make_load(producer).run()


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


{"consume": consume, "ordered": consume, "publish": publish, "roundtrip": roundtrip, "idle": idle}[job["kind"]]()
