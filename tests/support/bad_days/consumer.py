"""A program that consumes messages, and keeps rows of each one begun and finished. See ``clients.ConsumerProcess``."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from time import monotonic_ns
from typing import Any

from gevent import sleep
from gevent.fileobject import FileObjectPosix

from nsq_fast import Consumer, Message

from .records import HEAD, NO_NODE, Kind, Log, Row

SLOW = 50
"""One message of so many takes some time, so that some are in a handler when something happens."""


class Handling:
    """A handler, and what it keeps."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._nodes = {address: number for number, address in enumerate(given["nodes"])}
        self._log = Log(Path(given["log"]))

    def handle(self, _consumer: Consumer, message: Message) -> None:
        """Keep that the message is begun, and that it is finished."""
        _, number = HEAD.unpack_from(message.body)
        self._keep(Kind.BEGUN, message)
        sleep(0.005 if number % SLOW == 0 else 0)  # sleep: the work; others run meanwhile
        self._keep(Kind.FINISHED, message)

    def went_back(self, _consumer: Consumer, message: Message, **_: Any) -> None:
        """Keep that the partition went back."""
        self._keep(Kind.ROLLBACK, message)

    def _keep(self, kind: Kind, message: Message) -> None:
        key, number = HEAD.unpack_from(message.body)
        node = self._nodes.get(str(message.responder.address), NO_NODE)
        offset = -1 if message.offset is None else message.offset
        partition = -1 if message.partition is None else message.partition
        self._log.add(Row(kind, node, partition, key, number, monotonic_ns(), 0, message.internal_id, offset))


def main() -> None:
    """Read what to consume from stdin; end when it ends."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    lines = FileObjectPosix(sys.stdin.fileno(), "r", closefd=False)
    given = json.loads(lines.readline())
    handling = Handling(given)
    consumer = Consumer(
        given["topic"],
        given["channel"],
        lookupd_http_addresses=given["lookupds"],
        message_handler=handling.handle,
        **given["options"],
    )
    consumer.on_order_violation.connect(handling.went_back)
    consumer.start(block=False)
    lines.readline()
    consumer.close()


if __name__ == "__main__":
    main()
