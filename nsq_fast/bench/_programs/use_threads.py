"""nsq_fast.threads as a measured client: consume, publish, idle."""

import time
from threading import Thread

from blocking import Blocking
from meter import Meter, connection_options, settings

from nsq_fast.threads import Consumer, Producer

job = settings()
NSQDS = [tuple(address) for address in job["nsqds"]]
OPTIONS = connection_options(job)
HANDLER_THREADS = 4


class Threads(Blocking):
    sleep = staticmethod(time.sleep)

    def make_consumer(self, handle):
        threads = job["concurrency"] if job["concurrency"] > 1 else HANDLER_THREADS
        options = {"max_in_flight": job["max_in_flight"], "handler_threads": threads, **OPTIONS}
        return Consumer(job["topic"], job["channel"], NSQDS, message_handler=handle, **options)

    def make_producer(self):
        return Producer(NSQDS[:1], **OPTIONS)

    @staticmethod
    def run_all(functions):
        threads = [Thread(target=function) for function in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


getattr(Threads(job, Meter(job)), job["kind"])()
