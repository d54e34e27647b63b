"""gnsq, or nsq_fast in its place, as a measured client: consume, publish, roundtrip."""

from ssl import CERT_REQUIRED

import gnsq
from blocking import Blocking
from meter import Meter, connection_options, settings

job = settings()
NSQDS = ["{}:{}".format(*address) for address in job["nsqds"]]
OPTIONS = connection_options(job)
if job["tls"]:  # as gnsq has it
    OPTIONS["tls_options"] = {"ca_certs": job["cafile"], "cert_reqs": CERT_REQUIRED}


class Gnsq(Blocking):
    def make_consumer(self, handle):
        options = {"max_in_flight": job["max_in_flight"], "message_handler": handle, **OPTIONS}
        return gnsq.Consumer(job["topic"], job["channel"], nsqd_tcp_addresses=NSQDS, **options)

    def make_producer(self):
        return gnsq.Producer(NSQDS[:1], **OPTIONS)

    @staticmethod
    def publish_nowait(producer, topic, body):
        return producer.publish(topic, body, raise_error=False)

    @staticmethod
    def close(consumer):
        consumer.close()


getattr(Gnsq(job, Meter(job)), job["kind"])()
