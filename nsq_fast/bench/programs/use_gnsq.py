"""gnsq as a measured client, or whatever answers to its name: consume, publish, roundtrip."""

from ssl import CERT_REQUIRED

import gnsq
from greenlets import Load, timed
from greenlets import roundtrip as there_and_back
from meter import Meter, settings

told = settings()
meter = Meter(told)
NSQDS = ["{}:{}".format(*address) for address in told["nsqds"]]
OPTIONS = {told["compression"]: True} if told["compression"] else {}
if told["tls"]:
    OPTIONS["tls_v1"] = True
    OPTIONS["tls_options"] = {"ca_certs": told["cafile"], "cert_reqs": CERT_REQUIRED}
if told["unbuffered"]:
    OPTIONS["output_buffer_size"] = -1


def make_consumer(handle):
    return gnsq.Consumer(
        told["topic"],
        told["channel"],
        nsqd_tcp_addresses=NSQDS,
        max_in_flight=told["max_in_flight"],
        message_handler=handle,
        **OPTIONS,
    )


def plain(consumer, message, take=meter.take, marks=meter.marks):
    if take() in marks and meter.mark():
        consumer.close()


def publish_nowait(producer, topic, body):
    return producer.publish(topic, body, raise_error=False)


def make_load():
    producer = gnsq.Producer(NSQDS[:1], **OPTIONS)
    producer.start()
    return Load(told, meter, producer, publish_nowait)


def consume():
    make_consumer(timed(plain, meter) if told["rate"] else plain).start()


def publish():
    make_load().run()


def roundtrip():
    there_and_back(told, meter, plain, make_consumer, make_load())


{"consume": consume, "publish": publish, "roundtrip": roundtrip}[told["kind"]]()
