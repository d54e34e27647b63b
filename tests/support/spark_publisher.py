"""A publisher in a process of its own that writes down what was stored, whatever happens to the servers.

Every body is unique, and is published once: what failed is not tried again, so
that each comes once or, if its outcome is unknown, at most once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .spark import spark_environment

ROUNDS = 10  # in a second
END_TIMEOUT = 30.0


class Publisher:
    """The child process. ``where`` are the addresses for the producer; ``rate`` is messages a second."""

    def __init__(self, folder: Path, name: str, topic: str, rate: int, **where: str) -> None:
        self._stored, self._unknown = folder / f"{name}.stored", folder / f"{name}.unknown"
        given = {"stored": str(self._stored), "unknown": str(self._unknown), "name": name, "topic": topic}
        command = [sys.executable, "-m", "support.spark_publisher", json.dumps({**given, "rate": rate, "where": where})]
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stderr=log, env=spark_environment(), start_new_session=True
            )

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(END_TIMEOUT) == 0, self._log.read_text()[-2000:]

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    @property
    def stored(self) -> list[bytes]:
        """What was answered OK so far."""
        return _lines(self._stored)

    @property
    def unknown(self) -> list[bytes]:
        """What may be stored, although no OK came."""
        return _lines(self._unknown)


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def main() -> None:
    """The child: publishes until the end of its input."""
    from gevent import sleep, spawn
    from gevent.os import tp_read

    from nsq_fast import Producer
    from nsq_fast.errors import NsqError, PublishFailed

    given: dict[str, Any] = json.loads(sys.argv[1])
    ended = spawn(tp_read, sys.stdin.fileno(), 1)
    number, size = 0, max(given["rate"] // ROUNDS, 1)
    producer = Producer(**given["where"], retry_unknown_outcome=False, publish_timeout=10.0)
    with producer, open(given["stored"], "ab", 0) as stored, open(given["unknown"], "ab", 0) as unknown:
        due = time.monotonic()
        while not ended.ready():
            bodies = [f"{given['name']}-{number + i:09d}".encode() for i in range(size)]
            number += size
            lines = b"".join(body + b"\n" for body in bodies)
            try:
                producer.multipublish(given["topic"], bodies)
                os.write(stored.fileno(), lines)
            except PublishFailed as error:
                if error.possibly_stored:
                    os.write(unknown.fileno(), lines)
            except NsqError:
                os.write(unknown.fileno(), lines)
            due = max(due + 1 / ROUNDS, time.monotonic())
            sleep(due - time.monotonic())  # sleep: so many rounds a second


if __name__ == "__main__":
    main()
