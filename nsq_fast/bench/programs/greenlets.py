"""What the clients on gevent have in common: they publish what the job asks for, and consume what they published."""

from time import time_ns

from gevent import get_hub, joinall, sleep, spawn
from gevent.lock import Semaphore
from meter import STAMP_BYTES, Alarm, seconds_until, stamp_of, stamped, ticks

READ = 1


def punctual_ticks(rate, count):
    """``ticks``, each when it is due; greenlets run meanwhile."""
    try:
        alarm = Alarm()
    except OSError:
        for due, many in ticks(rate, count):
            sleep(seconds_until(due))
            yield due, many
        return
    watcher = get_hub().loop.io(alarm.descriptor, READ)
    for due, many in ticks(rate, count):
        if time_ns() < due:
            alarm.set(due)
            get_hub().wait(watcher)
            alarm.clear()
        else:
            sleep(0)
        yield due, many


class Load:
    """The publishing half of a measured client.

    ``producer`` has ``publish`` and ``multipublish``, which wait for nsqd. ``publish_nowait(producer, topic, body)``
    returns something with ``rawlink`` and ``get``.
    """

    def __init__(self, job, meter, producer, publish_nowait):
        self._job, self._meter, self._producer = job, meter, producer
        self._publish_nowait = publish_nowait
        self._topic = job["topic"]
        self._body = b"x" * job["size"]
        self._padding = b"x" * max(0, job["size"] - STAMP_BYTES)

    def run(self):
        """Publish the warm-up, then what is measured, and report."""
        self._publish(self._job["warmup"])
        self._meter.start()
        self._publish(self._job["count"])
        self._meter.report(self._job["count"])

    def _publish(self, count):
        job = self._job
        if job["rate"]:
            self._at_rate(count)
        elif job["mode"] == "single":
            self._timed(count)
        elif job["mode"] == "concurrent":
            share = count // job["concurrency"]
            joinall([spawn(self._one_by_one, share) for _ in range(job["concurrency"])])
        else:
            self._batches(count // job["batch"], [self._body] * job["batch"])

    def _one_by_one(self, count):
        publish, topic, body = self._producer.publish, self._topic, self._body
        for _ in range(count):
            publish(topic, body)

    def _timed(self, count):
        publish, topic, body, seen = self._producer.publish, self._topic, self._body, self._meter.seen
        for _ in range(count):
            start = time_ns()
            publish(topic, body)
            seen(start)

    def _at_rate(self, count):
        def answered(due):
            return lambda _: self._meter.seen(due)

        for due, many in punctual_ticks(self._job["rate"], count):
            for _ in range(many):
                result = self._publish_nowait(self._producer, self._topic, self._body)
                result.rawlink(answered(due))
        result.get()

    def _batches(self, count, batch):
        for _ in range(count):
            self._producer.multipublish(self._topic, batch)

    def stamped(self, window):
        """Publish stamped messages, at the rate of the job, or as ``window`` lets them."""
        total = self._job["count"] + self._job["beyond"]
        if not self._job["rate"]:
            for _ in range(total):
                window.acquire()
                self._send_stamped(time_ns())
            return
        for due, many in punctual_ticks(self._job["rate"], total):
            for _ in range(many):
                self._send_stamped(due)

    def _send_stamped(self, due):
        self._publish_nowait(self._producer, self._topic, stamped(due, self._padding))


def timed(plain, meter, answered=lambda: None):
    """A handler that notes the latency of a stamped message before ``plain`` counts it."""

    def handle(consumer, message):
        meter.seen(stamp_of(message.body))
        answered()
        plain(consumer, message)

    return handle


def roundtrip(job, meter, plain, make_consumer, load):
    """Consume what ``load`` publishes, with as many messages under way as the job says."""
    window = Semaphore(job["concurrency"])
    consumer = make_consumer(timed(plain, meter, window.release))
    consumer.start(block=False)
    spawn(load.stamped, window)
    consumer.join()
