"""Publishes of many threads at once, of which the server answers none, one caller is interrupted, or leaders move."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.held_publishes import OK, PublishNsqd
from support.waiting import PROCESS, WAIT, block_until, until

from nsq_fast.broker.redesigned.cluster import RedesignedCluster
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


def test_a_server_that_does_not_reply_keeps_no_publish_back() -> None:
    replies = threading.Event()

    def hold_back(sock: socket.socket, _: list[bytes]) -> None:
        threading.Thread(target=lambda: (replies.wait(WAIT), sock.sendall(OK)), daemon=True).start()

    with PublishNsqd(hold_back) as nsqd, Producer(nsqd.address) as producer:
        calls = Calls(producer)
        for number in range(1, 21):  # each when all before it are there
            calls.publish(b"%d" % number)
            block_until(lambda number=number: sum(map(len, nsqd.bodies)) == number, f"publish {number}")
        replies.set()
        calls.join()


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
