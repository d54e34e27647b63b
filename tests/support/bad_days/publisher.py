"""A program that publishes messages with keys, and keeps a row of each result. See ``clients.Publisher``."""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from pathlib import Path
from time import monotonic, monotonic_ns
from typing import Any

from gevent import joinall, sleep, spawn
from gevent.event import AsyncResult
from gevent.fileobject import FileObjectPosix

from nsq_fast import Producer, Receipt

from .records import HEAD, NO_NODE, Kind, Log, Row, key_name

PIPELINE = 5
"""Publishes of one key on their way at once."""


class Publishing:
    """Publishes all keys at a common pace; ``finish`` says how many messages it shall be in all."""

    def __init__(self, producer: Producer, given: dict[str, Any]) -> None:
        self.errors: Counter[str] = Counter()
        self._producer = producer
        self._topic, self._size, self._keys = given["topic"], given["size"], given["keys"]
        self._nodes = {address: number for number, address in enumerate(given["nodes"])}
        self._log = Log(Path(given["log"]))
        self._rate: float | None = given["rate"]
        self._limit: int | None = None
        self._published = 0

    def finish(self, messages: int) -> None:
        """Publish as fast as can be until there are so many, and end."""
        self._limit, self._rate = messages, None

    def publish_key(self, key: int) -> None:
        """Publish the messages of a key, some at once, until ``finish`` has its number."""
        number, due = 0, monotonic()
        while self._limit is None or self._published < self._limit:
            self._published += PIPELINE
            self._publish(key, range(number, number + PIPELINE))
            number += PIPELINE
            if self._rate is not None:
                due += PIPELINE * self._keys / self._rate
                sleep(max(0.0, due - monotonic()))  # sleep: the pace of the messages

    def _publish(self, key: int, numbers: range) -> None:
        began = monotonic_ns()
        results = [
            self._producer.publish_nowait(
                self._topic,
                HEAD.pack(key, number).ljust(self._size, b"."),
                key=key_name(key),
                trace_id=key << 40 | number,
            )
            for number in numbers
        ]
        for number, result in zip(numbers, results, strict=True):
            result.wait()
            self._note(key, number, began, result)

    def _note(self, key: int, number: int, began: int, result: AsyncResult[Any]) -> None:
        now = monotonic_ns()
        if not result.successful():
            error = result.exception
            self.errors[f"{type(error).__name__}: {error}"] += 1
            self._log.add(Row(Kind.FAILED, NO_NODE, -1, key, number, now, began, 0, -1))
            return
        receipt = result.value
        assert isinstance(receipt, Receipt)
        assert receipt.partition is not None
        node = self._nodes.get(str(receipt.nsqd), NO_NODE)
        offset = -1 if receipt.offset is None else receipt.offset
        self._log.add(Row(Kind.STORED, node, receipt.partition, key, number, now, began, receipt.internal_id, offset))


def main() -> None:
    """Read what to publish from stdin; then, from its second line, how many messages it shall be."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    lines = FileObjectPosix(sys.stdin.fileno(), "r", closefd=False)
    given = json.loads(lines.readline())
    with Producer((), given["lookupds"], **given["options"]) as producer:
        publishing = Publishing(producer, given)
        keys = [spawn(publishing.publish_key, key) for key in range(given["keys"])]
        publishing.finish(int(lines.readline() or 0))
        joinall(keys, raise_error=True)
    sys.stdout.write(json.dumps(publishing.errors))


if __name__ == "__main__":
    main()
