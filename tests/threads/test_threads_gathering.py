"""Publishes of many threads at once: each has one end, and what the server has is what the callers were told."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

import pytest
from support.waiting import WAIT, block_until, holds

from nsq_fast.errors import NoNsqd, NotRunning, NsqError, PublishFailed
from nsq_fast.threads import Producer

OK = struct.pack(">ii", 6, 0) + b"OK"


class Nsqd:
    """One that runs in threads, and does with each PUB and MPUB what ``what_to_do`` says.

    Attributes:
        commands: the bodies of each PUB and MPUB that it has stored.
    """

    def __init__(self, what_to_do: Callable[[Nsqd, socket.socket], object]) -> None:
        self.commands: list[list[bytes]] = []
        self._what_to_do = what_to_do
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def stored(self) -> Counter[bytes]:
        return Counter(body for command in self.commands for body in command)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._sockets.append(sock)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with suppress(OSError, struct.error), sock, sock.makefile("rb") as stream:
            stream.read(4)
            while line := stream.readline():
                self._command(sock, stream, line.split())

    def _command(self, sock: socket.socket, stream: BinaryIO, words: list[bytes]) -> None:
        if words[0] == b"IDENTIFY":
            self._sized(stream)
            sock.sendall(OK)
        elif words[0] in (b"PUB", b"MPUB"):
            body = self._sized(stream)
            bodies = [body]
            if words[0] == b"MPUB":
                bodies, at = [], 4
                while at < len(body):
                    (size,) = struct.unpack_from(">i", body, at)
                    bodies.append(body[at + 4 : at + 4 + size])
                    at += 4 + size
            self.commands.append(bodies)
            self._what_to_do(self, sock)

    def _sized(self, stream: BinaryIO) -> bytes:
        return stream.read(struct.unpack(">i", stream.read(4))[0])

    def stop(self) -> None:
        self._listener.close()
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


@contextmanager
def nsqd_that(what_to_do: Callable[[Nsqd, socket.socket], object]) -> Iterator[Nsqd]:
    nsqd = Nsqd(what_to_do)
    yield nsqd
    nsqd.stop()


def start(count: int, function: Callable[[int], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=function, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    return threads


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()


def test_a_server_that_does_not_reply_keeps_no_publish_back() -> None:
    replies = threading.Event()

    def hold_back(_: Nsqd, sock: socket.socket) -> None:
        threading.Thread(target=lambda: (replies.wait(WAIT), sock.sendall(OK)), daemon=True).start()

    with nsqd_that(hold_back) as nsqd, Producer(nsqd.address) as producer:
        threads: list[threading.Thread] = []
        for number in range(1, 21):  # each when all before it are there
            threads += start(1, lambda _, body=b"%d" % number: producer.publish("t", body))
            block_until(lambda number=number: nsqd.stored.total() == number, f"publish {number}")
        replies.set()
        join(threads)


def test_what_is_published_while_replies_to_threads_are_due_leaves_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsq_fast.runtime.crossing.gathering.LONGEST", WAIT)
    sockets: list[socket.socket] = []
    with nsqd_that(lambda _, sock: sockets.append(sock)) as nsqd, Producer(nsqd.address) as producer:
        threads: list[threading.Thread] = []
        for number in range(1, 5):
            threads += start(1, lambda _: producer.publish("t", b"early"))
            block_until(lambda number=number: len(sockets) == number, f"publish {number}")
        late = [producer.publish_nowait("t", b"late") for _ in range(8)]
        holds(lambda: producer.stats()["pending"] == 4)
        assert nsqd.commands == [[b"early"]] * 4
        sockets[0].sendall(OK)
        block_until(lambda: len(sockets) == 5, "the others")
        assert nsqd.commands[4] == [b"late"] * 8
        sockets[0].sendall(OK * 4)
        join(threads)
        assert [future.result(WAIT) for future in late] == [b"OK"] * 8


@pytest.mark.parametrize("seed", range(4))
def test_each_publish_has_one_end_whatever_happens(seed: int) -> None:
    chance = random.Random(seed)

    def misbehave(nsqd: Nsqd, sock: socket.socket) -> None:
        luck = chance.random()
        if luck < 0.02:
            sock.close()  # stored, and nobody is told
            raise OSError
        if luck < 0.04:
            nsqd.commands.pop()  # it is lost with the connection
            sock.close()
            raise OSError
        if luck < 0.1:
            threading.Event().wait(0.005)  # longer than requests gather
        sock.sendall(OK)

    ends: dict[bytes, list[object]] = {}
    options = {"retry_unknown_outcome": False, "publish_timeout": WAIT, "max_pending": 12}
    with nsqd_that(misbehave) as nsqd:
        producer = Producer(nsqd.address, **options)
        producer.start()

        def publish(number: int) -> None:
            own = random.Random(seed * 100 + number)
            for each in range(60):
                body = b"%d-%d" % (number, each)
                outcome: object = None
                try:
                    if own.random() < 0.1:
                        producer.publish_nowait("t", body).add_done_callback(
                            lambda future, body=body: ends.setdefault(body, []).append(future.exception())
                        )
                        continue
                    producer.publish("t", body, block=own.random() < 0.9)
                except (NsqError, NoNsqd) as error:
                    outcome = error
                ends.setdefault(body, []).append(outcome)

        threads = start(12, publish)
        block_until(lambda: len(ends) > 500 or not any(thread.is_alive() for thread in threads), "most publishes")
        producer.close()  # while some still publish
        join(threads)
        block_until(lambda: len(ends) == 12 * 60, "every end")
        stored = nsqd.stored
    assert all(len(outcomes) == 1 for outcomes in ends.values())
    for body, (outcome,) in ends.items():
        if outcome is None:
            assert stored[body] == 1, body
        elif isinstance(outcome, PublishFailed) and outcome.possibly_stored:
            assert stored[body] <= 1, body
        else:
            assert isinstance(outcome, (PublishFailed, NoNsqd, NotRunning)), outcome
            assert stored[body] == 0, (body, outcome)
