"""Publishes of several threads that left as one command: each has the end that it would have had alone."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.held_publishes import OK, PublishNsqd
from support.waiting import PROCESS, WAIT, block_until, until

from nsq_fast.broker.redesigned.cluster import RedesignedCluster
from nsq_fast.errors import PublishFailed, PublishTimeout
from nsq_fast.threads import Producer

ROOT = Path(__file__).parent.parent.parent
THREADS = 8


class Calls:
    """Publishes, each in a thread of its own, and what became of each body."""

    def __init__(self, producer: Producer) -> None:
        self.ends: dict[bytes, object] = {}
        self._producer = producer
        self._threads: list[threading.Thread] = []

    def publish(self, body: bytes) -> None:
        thread = threading.Thread(target=self._publish, args=(body,), daemon=True)
        thread.start()
        self._threads.append(thread)

    def _publish(self, body: bytes) -> None:
        try:
            self.ends[body] = self._producer.publish("t", body)
        except Exception as error:
            self.ends[body] = error

    def join(self) -> None:
        for thread in self._threads:
            thread.join(WAIT)
            assert not thread.is_alive()


BODIES = [b"%d" % number for number in range(THREADS)]


@contextmanager
def joined(bodies: list[bytes] = BODIES, **options: Any) -> Iterator[tuple[Any, ...]]:
    """An nsqd that has ``bodies`` as one command."""
    nsqd = PublishNsqd()
    producer = Producer(nsqd.address, linger=WAIT, linger_max_messages=len(bodies), **options)
    producer.start()
    try:
        calls = Calls(producer)
        for body in bodies:
            calls.publish(body)
        block_until(lambda: nsqd.commands, "the command")
        assert nsqd.bodies == [sorted(bodies)]
        yield nsqd, producer, calls
    finally:
        nsqd.stop()
        producer.close(WAIT)


def test_they_count_as_what_they_are() -> None:
    with joined() as (nsqd, producer, calls):
        assert (producer.stats()["pending"], producer.stats()["held"]) == (THREADS, THREADS)
        nsqd.reply(0)
        calls.join()
        assert calls.ends == dict.fromkeys(BODIES, b"OK")
        stats = producer.stats()
        assert (stats["stored"], stats["pending"], stats["held"]) == (THREADS, 0, 0)


@pytest.mark.parametrize("code", [b"E_BAD_MESSAGE MPUB message", b"E_BAD_BODY too big"])
def test_one_that_is_refused_fails_alone(code: bytes) -> None:
    with joined([*BODIES, b"bad"]) as (nsqd, producer, calls):

        def refuse_the_bad(sock: socket.socket, bodies: list[bytes]) -> None:
            if b"bad" in bodies:
                nsqd.refuse(sock, code)
            else:
                sock.sendall(OK)

        nsqd.react = refuse_the_bad
        nsqd.refuse(nsqd.commands[0][0], code)
        calls.join()
        error = calls.ends.pop(b"bad")
        assert isinstance(error, PublishFailed)
        assert code.split()[0].decode() in str(error)
        assert not error.possibly_stored
        assert calls.ends == dict.fromkeys(BODIES, b"OK")
        assert all(len(bodies) == 1 for bodies in nsqd.bodies[1:])
        stats = producer.stats()
        assert (stats["stored"], stats["refused"], stats["held"]) == (THREADS, 1, 0)


def test_each_has_an_error_of_its_own_when_the_connection_is_lost() -> None:
    with joined(retry_unknown_outcome=False) as (nsqd, producer, calls):
        nsqd.commands[0][0].shutdown(socket.SHUT_RDWR)
        calls.join()
        errors = [calls.ends[body] for body in BODIES]
        assert all(isinstance(error, PublishFailed) and error.possibly_stored for error in errors)
        assert len({id(error) for error in errors}) == THREADS
        assert (producer.stats()["unknown"], producer.stats()["held"]) == (THREADS, 0)


def test_each_is_sent_again_when_the_connection_is_lost() -> None:
    with joined() as (nsqd, _, calls):
        nsqd.react = lambda sock, _: sock.sendall(OK)
        nsqd.commands[0][0].shutdown(socket.SHUT_RDWR)
        calls.join()
        assert calls.ends == dict.fromkeys(BODIES, b"OK")
        assert sorted(body for bodies in nsqd.bodies[1:] for body in bodies) == sorted(BODIES)


def test_each_times_out_and_the_late_reply_gives_their_room_back() -> None:
    with joined(publish_timeout=1.0) as (nsqd, producer, calls):
        calls.join()
        errors = [calls.ends[body] for body in BODIES]
        assert all(isinstance(error, PublishTimeout) and error.possibly_stored for error in errors)
        assert len({id(error) for error in errors}) == THREADS
        assert (producer.stats()["unknown"], producer.stats()["held"]) == (THREADS, THREADS)
        nsqd.reply(-1)  # it was sent once more: a new connection to a server that is silent may work
        block_until(lambda: producer.stats()["held"] == 0, "room")


def test_each_hears_that_the_producer_was_closed() -> None:
    with joined() as (_, producer, calls):
        producer.close(0.01)
        calls.join()
        errors = [calls.ends[body] for body in BODIES]
        assert all(isinstance(error, PublishFailed) and error.possibly_stored for error in errors)
        assert "closed" in str(errors[0])


def test_one_whose_caller_is_interrupted_leaves_the_others_alone() -> None:
    """In a process of its own: its main thread, where signals are handled, has no hub of gevent."""
    program = f"""
import sys
sys.path[:0] = {[str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "threads")]!r}
from test_threads_joined import interrupted_while_joined

interrupted_while_joined()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PROCESS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


class Interrupted(BaseException):
    pass


def interrupted_while_joined() -> None:
    def interrupt(*_: object) -> None:
        raise Interrupted

    def interrupt_main(nsqd: PublishNsqd) -> None:
        block_until(lambda: nsqd.commands, "the command")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    signal.signal(signal.SIGALRM, interrupt)
    nsqd = PublishNsqd()
    with Producer(nsqd.address, linger=WAIT, linger_max_messages=THREADS + 1) as producer:
        calls = Calls(producer)
        for body in BODIES:
            calls.publish(body)
        threading.Thread(target=interrupt_main, args=(nsqd,)).start()
        try:
            producer.publish("t", b"interrupted")
        except Interrupted:
            sys.stdout.write("interrupted\n")
        assert nsqd.bodies == [sorted([*BODIES, b"interrupted"])]
        nsqd.react = lambda sock, _: sock.sendall(OK)
        nsqd.reply(0)
        calls.join()
        assert calls.ends == dict.fromkeys(BODIES, b"OK")
        after = [producer.publish_nowait("t", b"after") for _ in range(THREADS + 1)]
        assert [each.result(WAIT) for each in after] == [b"OK"] * (THREADS + 1)


@pytest.fixture
def cluster() -> Iterator[RedesignedCluster]:
    with RedesignedCluster(nodes=3, kind=True) as running:
        yield running


def test_none_is_lost_while_the_leaders_of_partitions_move(cluster: RedesignedCluster) -> None:
    cluster.create_topic("t", 3, 2, ordered=True, channels=["c"])
    lookupds = [str(lookupd.http_address) for lookupd in cluster.lookupds]
    ends: dict[bytes, object] = {}

    def publish(number: int) -> None:
        for each in range(25):
            body = b"%d-%d" % (number, each)
            try:
                ends[body] = producer.publish("t", body)
            except Exception as error:
                ends[body] = error

    with Producer(lookupd_http_addresses=lookupds, lookupd_refresh_interval=0.05) as producer:
        threads = [threading.Thread(target=publish, args=(number,), daemon=True) for number in range(12)]
        for thread in threads:
            thread.start()
        for number in range(3):
            until(lambda number=number: len(ends) > 60 * number)
            cluster.move_leader("t", number)
        until(lambda: not any(thread.is_alive() for thread in threads))
    stored = {record.body for number in range(3) for record in cluster.partition("t", number).log.read(0, 1_000_000)}
    assert ends == dict.fromkeys((b"%d-%d" % (number, each) for number in range(12) for each in range(25)), b"OK")
    assert stored == set(ends)
