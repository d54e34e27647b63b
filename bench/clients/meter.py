"""Shared by the client programs: what they are told, and what they report.

A client gets its settings as one JSON object in argv[1], and prints one JSON
object: messages, seconds, CPU seconds (user + system, this process) between
its first and its last message, and peak memory.
"""

import json
import sys
import time


def settings() -> dict:
    """What to do: nsqd (host, port), topic, channel, count, max_in_flight, size, mode ..."""
    return json.loads(sys.argv[1])


class Meter:
    """Counts messages from the first one that follows a warm-up, to the last."""

    def __init__(self, count: int, warmup: int = 0) -> None:
        self.count = count
        self.seen = 0
        self._from = warmup
        self._wall = self._cpu = 0.0

    def tick(self) -> bool:
        """Count one message; True when it was the last."""
        self.seen += 1
        if self.seen == self._from + 1:
            self.start()
        return self.seen >= self.count

    def start(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def report(self, messages: int | None = None) -> None:
        """Print the result; call it once, right after the last message."""
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        messages = self.count - self._from if messages is None else messages
        result = {"messages": messages, "seconds": wall, "cpu_seconds": cpu, "peak_kib": peak_kib()}
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


def peak_kib() -> int:
    """Peak resident memory of this program. (getrusage would count its parent's before exec.)"""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
