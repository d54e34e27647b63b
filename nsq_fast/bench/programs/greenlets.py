"""What the clients on gevent do alike: publish as they are told, and send what comes back to their own consumer."""

from time import time_ns

from gevent import joinall, sleep, spawn
from gevent.lock import Semaphore
from meter import STAMP_BYTES, seconds_until, stamp_of, stamped, ticks


class Load:
    """The publishing half of a measured client.

    ``producer`` has ``publish`` and ``multipublish``, which wait for nsqd. ``publish_nowait(producer, topic, body)``
    returns something with ``rawlink`` and ``get``.
    """

    def __init__(self, told, meter, producer, publish_nowait):
        self._told, self._meter, self._producer = told, meter, producer
        self._publish_nowait = publish_nowait
        self._topic = told["topic"]
        self._body = b"x" * told["size"]
        self._padding = b"x" * max(0, told["size"] - STAMP_BYTES)

    def run(self):
        """Publish the warm-up, then what is measured, and report."""
        self._publish(self._told["warmup"])
        self._meter.start()
        self._publish(self._told["count"])
        self._meter.report(self._told["count"])

    def _publish(self, count):
        told = self._told
        if told["rate"]:
            self._at_rate(count)
        elif told["mode"] == "single":
            self._timed(count)
        elif told["mode"] == "concurrent":
            share = count // told["concurrency"]
            joinall([spawn(self._one_by_one, share) for _ in range(told["concurrency"])])
        else:
            self._batches(count // told["batch"], [self._body] * told["batch"])

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

        for due, many in ticks(self._told["rate"], count):
            sleep(seconds_until(due))
            for _ in range(many):
                result = self._publish_nowait(self._producer, self._topic, self._body)
                result.rawlink(answered(due))
        result.get()

    def _batches(self, count, batch):
        for _ in range(count):
            self._producer.multipublish(self._topic, batch)

    def stamped(self, window):
        """Publish stamped messages, at the rate that was told, or as ``window`` lets them."""
        total = self._told["count"] + self._told["beyond"]
        if not self._told["rate"]:
            for _ in range(total):
                window.acquire()
                self._send_stamped(time_ns())
            return
        for due, many in ticks(self._told["rate"], total):
            sleep(seconds_until(due))
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


def roundtrip(told, meter, plain, make_consumer, load):
    """Consume what ``load`` publishes, with so many messages under way as were told."""
    window = Semaphore(told["concurrency"])
    consumer = make_consumer(timed(plain, meter, window.release))
    consumer.start(block=False)
    spawn(load.stamped, window)
    consumer.join()
