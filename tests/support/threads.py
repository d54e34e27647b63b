"""Threads that begin at the same time, and what they raised."""

from __future__ import annotations

import threading
from collections.abc import Callable

THREADS = 4


def in_threads(work: Callable[[int], object]) -> list[BaseException]:
    """Call ``work(number)`` in several threads at once; what they raised."""
    failures: list[BaseException] = []
    ready = threading.Barrier(THREADS)

    def run(number: int) -> None:
        ready.wait()
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures
