"""What clients have in common whose calls block, in greenlets or in threads: they publish what the job asks for, and
consume, also what they have published themselves.
"""

from threading import Lock
from time import time_ns

from gevent import get_hub, joinall, sleep, spawn
from gevent.lock import Semaphore
from meter import STAMP_BYTES, Alarm, stamp_of, stamped, ticks

READ = 1
LOCK = Lock()


class Blocking:
    """One client. ``kind()`` does what the job is about.

    A subclass has ``make_consumer(handler)``, ``make_producer()``, and for an open loop and a roundtrip
    ``publish_nowait(producer, topic, body)``, whose result has ``rawlink`` and ``get``; where it is not of greenlets
    also ``sleep`` and ``run_all(functions)``.
    """

    sleep = staticmethod(sleep)

    def __init__(self, job, meter):
        self.job, self.meter = job, meter
        self.topic = job["topic"]
        self.body = b"x" * job["size"]
        self.padding = b"x" * max(0, job["size"] - STAMP_BYTES)

    @staticmethod
    def close(consumer):
        consumer.close(drain=False)

    # Consuming

    def consume(self):
        self.make_consumer(self.handler()).start()

    ordered = consume

    def handler(self):
        pause, sleep, plain = self.job["handler_sleep"], self.sleep, self.plain_handler()
        if pause:

            def handle(consumer, message):
                sleep(pause)
                plain(consumer, message)

            return handle
        return self.timed(plain) if self.job["rate"] else plain

    def plain_handler(self):
        take, marks, mark, close = self.meter.take, self.meter.marks, self.meter.mark, self.close

        def handle(consumer, message):
            if take() in marks:
                with LOCK:
                    is_over = mark()
                if is_over:
                    close(consumer)

        return handle

    def timed(self, plain, answered=lambda: None):
        """A handler that notes the latency of a stamped message before ``plain`` counts it."""
        seen = self.meter.seen

        def handle(consumer, message):
            seen(stamp_of(message.body))
            answered()
            plain(consumer, message)

        return handle

    def idle(self):
        consumer = self.make_consumer(self.plain_handler())
        consumer.start(block=False)
        self.sleep(self.job["settle"])
        self.meter.start()
        self.sleep(self.job["duration"])
        self.meter.report(0)
        consumer.close()

    # Publishing

    def publish(self):
        """Publish the warm-up, then what is measured, and report."""
        producer = self.make_producer()
        producer.start()
        self._publish(producer, self.job["warmup"])
        self.meter.start()
        self._publish(producer, self.job["count"])
        self.meter.report(self.job["count"])
        producer.close()

    def _publish(self, producer, count):
        job = self.job
        if job["rate"]:
            self._at_rate(producer, count)
        elif job["mode"] == "single":
            publish, topic, body, seen = producer.publish, self.topic, self.body, self.meter.seen
            for _ in range(count):
                start = time_ns()
                publish(topic, body)
                seen(start)
        elif job["mode"] == "concurrent":
            share = count // job["concurrency"]
            self.run_all([lambda: self.one_by_one(producer, share)] * job["concurrency"])
        else:
            batch = [self.body] * job["batch"]
            for _ in range(count // job["batch"]):
                producer.multipublish(self.topic, batch)

    def one_by_one(self, producer, count):
        publish, topic, body = producer.publish, self.topic, self.body
        for _ in range(count):
            publish(topic, body)

    def _at_rate(self, producer, count):
        def answered(due):
            return lambda _: self.meter.seen(due)

        for due, many in self.punctual_ticks(count):
            for _ in range(many):
                result = self.publish_nowait(producer, self.topic, self.body)
                result.rawlink(answered(due))
        result.get()

    @staticmethod
    def run_all(functions):
        joinall([spawn(function) for function in functions], raise_error=True)

    def punctual_ticks(self, count):
        """``ticks``, each when it is due; greenlets run meanwhile."""
        alarm = Alarm()
        watcher = get_hub().loop.io(alarm.descriptor, READ)
        for due, many in ticks(self.job["rate"], count):
            if time_ns() < due:
                alarm.set(due)
                get_hub().wait(watcher)
                alarm.clear()
            else:
                sleep(0)
            yield due, many

    def roundtrip(self):
        """Consume what is published, with as many messages under way as the job says, or at its rate."""
        window = Semaphore(self.job["concurrency"])
        producer = self.make_producer()
        producer.start()
        consumer = self.make_consumer(self.timed(self.plain_handler(), window.release))
        consumer.start(block=False)
        spawn(self._send_stamped, producer, window)
        consumer.join()

    def _send_stamped(self, producer, window):
        total = self.job["count"] + self.job["beyond"]
        if not self.job["rate"]:
            for _ in range(total):
                window.acquire()
                self.publish_nowait(producer, self.topic, stamped(time_ns(), self.padding))
            return
        for due, many in self.punctual_ticks(total):
            for _ in range(many):
                self.publish_nowait(producer, self.topic, stamped(due, self.padding))
