"""Shared by the client programs: the job they get, what they measure, and what they report.

A program gets its job as one JSON object in its last argument, and writes JSON lines: ``{"event": "started"}`` when its
warm-up is over, and ``{"event": "result", ...}`` at its end: messages, seconds, CPU seconds (user and system, this
process), peak memory, and quantiles of the latency where it was measured. It runs in interpreters that have no
nsq_fast, so it imports the standard library only.
"""

import array
import ctypes
import itertools
import json
import os
import struct
import sys
import time

QUANTILES = (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.5, 99.9, 100)
STAMP_BYTES = 8
TICK = 0.001


def settings():
    """What to do: nsqds (lists of host and port), topic, channel, count, warmup, max_in_flight, size, kind ..."""
    return json.loads(sys.argv[-1])


def client_options():
    """What the servers ask of clients of nsq_fast, TLS and AUTH; from the environment, since everybody on a machine can
    read the arguments of its processes."""
    return json.loads(os.environ.get("NSQ_FAST_BENCH_CLIENT_OPTIONS", "{}"))


def connection_options(job):
    """The same, with the compression and the buffering that the job asks for."""
    options = client_options()
    if job["compression"]:
        options[job["compression"]] = True
    if job["unbuffered"]:
        options["output_buffer_size"] = -1
    return options


def emit(**event):
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


class Meter:
    """The clock between the end of the warm-up and the last message.

    A handler counts with ``take() in marks``: the cheapest that Python has, and the same for every client. When that
    is true it calls ``mark``, which says whether the message was the last.
    """

    cpu = staticmethod(time.process_time)
    emit = staticmethod(emit)

    def __init__(self, job):
        self._measured = job["count"] - 1 - job["warmup"]
        self._wall = self._cpu = 0.0
        self._is_started = False
        self._latencies = array.array("q")
        self.take = itertools.count().__next__
        self.marks = frozenset((job["warmup"], job["count"] - 1))
        self.note = self._latencies.append

    def mark(self):
        if self._is_started:
            self.report(self._measured)
            return True
        self.start()
        return False

    def start(self):
        self.emit(event="started")
        del self._latencies[:]
        self._is_started = True
        self._cpu, self._wall = self.cpu(), time.perf_counter()

    def seen(self, stamp):
        """Note the latency of a message by its stamp (``time.time_ns`` when it was due)."""
        self.note(time.time_ns() - stamp)

    def report(self, messages, **more):
        """Write the result; call it once, right after the last message. ``more`` are other figures of the round."""
        wall, cpu = time.perf_counter() - self._wall, self.cpu() - self._cpu
        self.emit(
            event="result",
            messages=messages,
            seconds=wall,
            cpu_seconds=cpu,
            peak_kib=peak_kib(),
            latency_us=quantiles(self._latencies),
            **more,
        )


def quantiles(latencies):
    """Pairs of percentage and microseconds; none where nothing was measured."""
    if not latencies:
        return []
    ordered = sorted(latencies)
    last = len(ordered) - 1
    return [[share, ordered[round(last * share / 100)] / 1000] for share in QUANTILES]


def peak_kib():
    """Peak resident memory of this program. (getrusage would count its parent's before exec.)"""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def stamp_of(body):
    return int.from_bytes(body[:STAMP_BYTES], "big")


def stamped(stamp, padding):
    return stamp.to_bytes(STAMP_BYTES, "big") + padding


def ticks(rate, count):
    """The open loop: pairs of a due time (``time.time_ns``) and how many messages are due then, ``count`` in all.

    The times are fixed in advance: who is late does not move what is due next, so a stall counts in full.
    """
    start, sent, number = time.time_ns(), 0, 0
    step = max(TICK, 1 / rate)
    while sent < count:
        number += 1
        due = min(count, int(number * step * rate))
        if due > sent:
            yield start + int(number * step * 1e9), due - sent
        sent = due


def seconds_until(due):
    """How long to sleep before a due time; 0 when it has passed."""
    return max(0.0, (due - time.time_ns()) / 1e9)


class Alarm:
    """A descriptor that can be read at a due time.

    Event loops wait by the millisecond: who sleeps in them is late by half of one, which would be most of a latency.
    This is late by the time that the kernel takes to wake a program. Only Linux has it, as all that is measured here.
    """

    # <sys/timerfd.h>: CLOCK_REALTIME, which time.time_ns reads; TFD_NONBLOCK, TFD_CLOEXEC; TFD_TIMER_ABSTIME
    _CLOCK, _FLAGS, _ABSOLUTE = 0, os.O_NONBLOCK | os.O_CLOEXEC, 1

    def __init__(self):
        self._libc = ctypes.CDLL(None)
        self.descriptor = self._libc.timerfd_create(self._CLOCK, self._FLAGS)
        if self.descriptor < 0:
            raise OSError("timerfd_create failed")

    def set(self, due):
        """Be readable from ``due`` on (``time.time_ns``), until ``clear``."""
        spec = struct.pack("@4l", 0, 0, *divmod(due, 1_000_000_000))
        if self._libc.timerfd_settime(self.descriptor, self._ABSOLUTE, spec, None):
            raise OSError("timerfd_settime failed")

    def clear(self):
        """It has been seen."""
        os.read(self.descriptor, 8)
