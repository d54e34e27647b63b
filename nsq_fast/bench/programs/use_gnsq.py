"""gnsq, or nsq_fast in its place, as a measured client: consume, publish, roundtrip."""

from ssl import CERT_REQUIRED

import gnsq
from greenlets import Load, timed
from greenlets import roundtrip as there_and_back
from meter import Meter, settings

job = settings()
meter = Meter(job)
NSQDS = ["{}:{}".format(*address) for address in job["nsqds"]]
OPTIONS = {job["compression"]: True} if job["compression"] else {}
if job["tls"]:
    OPTIONS["tls_v1"] = True
    OPTIONS["tls_options"] = {"ca_certs": job["cafile"], "cert_reqs": CERT_REQUIRED}
if job["unbuffered"]:
    OPTIONS["output_buffer_size"] = -1


def make_consumer(handle):
    return gnsq.Consumer(
        job["topic"],
        job["channel"],
        nsqd_tcp_addresses=NSQDS,
        max_in_flight=job["max_in_flight"],
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
    return Load(job, meter, producer, publish_nowait)


def consume():
    make_consumer(timed(plain, meter) if job["rate"] else plain).start()


def publish():
    make_load().run()


def roundtrip():
    there_and_back(job, meter, plain, make_consumer, make_load())


{"consume": consume, "publish": publish, "roundtrip": roundtrip}[job["kind"]]()
