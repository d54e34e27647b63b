"""The programs under proof, which keep rows of what they do: one publishes messages with keys, some consume them.

    python -m bad_days.programs publisher|consumer

What they have to do is a line of JSON on stdin. ``Publisher`` and ``Consumers`` start, kill and end them.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, monotonic_ns
from typing import Any

import gevent.subprocess
from gevent import joinall, sleep, spawn
from gevent.event import AsyncResult
from gevent.fileobject import FileObjectPosix
from support.ledger import HEAD, NO_NODE, ROW_SIZE, Kind, Log, Row, body

from nsq_fast import Consumer, Message, Producer, Receipt

PIPELINE = 5
"""Publishes of one key on their way at once."""

SLOW = 50
"""One message of so many takes some time, so that some are in a handler when something happens."""

_TESTS = Path(__file__).parents[1]


def key_name(key: int) -> str:
    return f"key{key}"


class Program:
    """What both have: what is given to them, and where they keep rows."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self._nodes = {address: number for number, address in enumerate(given["nodes"])}
        self._log = Log(Path(given["log"]))

    def keep(self, kind: Kind, key: int, number: int, nsqd: object = None, partition: int | None = None,
             internal_id: int = 0, offset: int | None = None, since: int = 0) -> None:  # fmt: skip
        node = self._nodes.get(str(nsqd), NO_NODE)
        place = [-1 if each is None else each for each in (partition, offset)]
        self._log.add(Row(kind, key, number, node, place[0], monotonic_ns(), since, internal_id, place[1]))


class Publishing(Program):
    """Publishes all keys at a common pace; ``finish`` says how many messages it shall be in all."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(given)
        self.errors: Counter[str] = Counter()
        self._rate: float | None = given["rate"]
        self._limit: int | None = None
        self._published = 0

    def run(self, lines: Any) -> None:
        """Until the second line says how many messages it shall be, and there are as many."""
        with Producer((), self.given["lookupds"], **self.given["options"]) as producer:
            keys = [spawn(self._publish_key, producer, key) for key in range(self.given["keys"])]
            self._limit, self._rate = int(lines.readline() or 0), None  # as fast as can be from now on
            joinall(keys, raise_error=True)
        sys.stdout.write(json.dumps(self.errors))

    def _publish_key(self, producer: Producer, key: int) -> None:
        number, due = 0, monotonic()
        while self._limit is None or self._published < self._limit:
            self._published += PIPELINE
            self._publish(producer, key, range(number, number + PIPELINE))
            number += PIPELINE
            if self._rate is not None:
                due += PIPELINE * self.given["keys"] / self._rate
                sleep(max(0.0, due - monotonic()))  # sleep: the pace of the messages

    def _publish(self, producer: Producer, key: int, numbers: range) -> None:
        began, topic, size = monotonic_ns(), self.given["topic"], self.given["size"]
        results = {
            number: producer.publish_nowait(
                topic, body(key, number, size), key=key_name(key), trace_id=key << 40 | number
            )
            for number in numbers
        }
        for number, result in results.items():
            result.wait()
            self._note(key, number, began, result)

    def _note(self, key: int, number: int, began: int, result: AsyncResult[Any]) -> None:
        if not result.successful():
            self.errors[f"{type(result.exception).__name__}: {result.exception}"] += 1
            self.keep(Kind.FAILED, key, number, since=began)
            return
        receipt = result.value
        assert isinstance(receipt, Receipt)
        assert receipt.partition is not None
        self.keep(
            Kind.STORED, key, number, receipt.nsqd, receipt.partition, receipt.internal_id, receipt.offset, began
        )  # fmt: skip


class Consuming(Program):
    """Keeps that messages are begun and finished, and that partitions went back."""

    def run(self, lines: Any) -> None:
        """Until there is another line, or none any more."""
        given = self.given
        consumer = Consumer(
            given["topic"],
            given["channel"],
            lookupd_http_addresses=given["lookupds"],
            message_handler=self._handle,
            **given["options"],
        )
        consumer.on_order_violation.connect(self._went_back)
        consumer.start(block=False)
        lines.readline()
        consumer.close()

    def _handle(self, _consumer: Consumer, message: Message) -> None:
        self._keep(Kind.BEGUN, message)
        number = HEAD.unpack_from(message.body)[1]
        sleep(0.005 if number % SLOW == 0 else 0)  # sleep: the work; others run meanwhile
        self._keep(Kind.FINISHED, message)

    def _went_back(self, _consumer: Consumer, message: Message, **_: Any) -> None:
        self._keep(Kind.ROLLBACK, message)

    def _keep(self, kind: Kind, message: Message) -> None:
        key, number = HEAD.unpack_from(message.body)
        nsqd = message.responder.address
        self.keep(kind, key, number, nsqd, message.partition, message.internal_id, message.offset)


# The other side


@dataclass(frozen=True)
class Job:
    """What clients have to do; ``nodes``: TCP addresses of the nsqds, as whose places rows name them."""

    lookupds: list[str]
    topic: str
    channel: str
    nodes: list[str]
    folder: Path


class Client:
    """One program; it is running when it has been made."""

    def __init__(self, program: str, job: Job, name: str, **given: Any) -> None:
        self.log = job.folder / f"{name}.rows"
        self._errors = (job.folder / f"{name}.log").open("w")
        self._process = gevent.subprocess.Popen(
            [sys.executable, "-m", __name__, program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(_TESTS), str(_TESTS.parent)))},
        )
        self._say(json.dumps({**asdict(job), "folder": str(job.folder), "log": str(self.log), **given}))

    @property
    def rows(self) -> int:
        return self.log.stat().st_size // ROW_SIZE if self.log.exists() else 0

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._end()

    def end(self, line: str = "") -> str:
        """Have it end in good order; what it said."""
        self._say(line)
        return self._end()

    def _say(self, line: str) -> None:
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def _end(self) -> str:
        said: str = self._process.stdout.read()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            pipe.close()
        return said


class Publisher(Client):
    """Publishes ``keys`` keys at ``rate`` messages a second until ``finish``; ``options`` are those of its Producer."""

    def __init__(self, job: Job, *, keys: int, rate: float, size: int, **options: Any) -> None:
        super().__init__("publisher", job, "publisher", keys=keys, rate=rate, size=size, options=options)

    def finish(self, messages: int) -> dict[str, int]:
        """Have it publish until there are so many; the texts of the errors that it got, with their numbers."""
        errors: dict[str, int] = json.loads(self.end(str(messages)))
        return errors


class Consumers:
    """``count`` instances that consume one channel; one that is killed is replaced by ``start_one``."""

    def __init__(self, job: Job, count: int, **options: Any) -> None:
        self._job, self._options = job, options
        self._running: list[Client] = []
        self.all: list[Client] = []
        for _ in range(count):
            self.start_one()

    def start_one(self) -> None:
        client = Client("consumer", self._job, f"consumer{len(self.all)}", options=self._options)
        self._running.append(client)
        self.all.append(client)

    def kill_one(self) -> None:
        """SIGKILL the one that runs longest."""
        self._running.pop(0).kill()

    @property
    def kept(self) -> int:
        return sum(client.rows for client in self.all)

    def close(self) -> None:
        while self._running:
            self._running.pop().end()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    told = FileObjectPosix(sys.stdin.fileno(), "r", closefd=False)
    kind = {"publisher": Publishing, "consumer": Consuming}[sys.argv[1]]
    kind(json.loads(told.readline())).run(told)
