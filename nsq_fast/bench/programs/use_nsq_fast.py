"""nsq_fast as a measured client: consume, publish, roundtrip, ordered, idle."""

from gevent import sleep
from greenlets import Load, timed
from greenlets import roundtrip as there_and_back
from meter import Meter, settings

from nsq_fast import Consumer, Producer

told = settings()
meter = Meter(told)
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
    return Consumer(told["topic"], told["channel"], max_in_flight=told["max_in_flight"], **servers, **options)


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
        handle = timed(plain_handler(), meter)
    else:
        handle = batch_handler() if told["variant"] == "batch" else plain_handler()
    make_consumer(handle).start()


def make_load(producer):
    return Load(told, meter, producer, Producer.publish_nowait)


def publish():
    with make_producer() as producer:
        make_load(producer).run()


def roundtrip():
    with make_producer() as producer:
        there_and_back(told, meter, plain_handler(), make_consumer, make_load(producer))


def idle():
    consumer = make_consumer(plain_handler())
    consumer.start(block=False)
    sleep(told["settle"])
    meter.start()
    sleep(told["duration"])
    meter.report(0)
    consumer.close()


{"consume": consume, "ordered": consume, "publish": publish, "roundtrip": roundtrip, "idle": idle}[told["kind"]]()
