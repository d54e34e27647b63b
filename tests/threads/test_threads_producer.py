"""The Producer of threads: any number of threads publish, and each call blocks its own thread alone."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.processes import FORKING_PYTHON
from support.waiting import PROCESS, until

import nsq_fast
from nsq_fast.errors import WrongThread
from nsq_fast.threads import Consumer, Producer

ROOT = Path(__file__).parent.parent.parent
WAIT = 30.0


def in_threads(count: int, function: Callable[[int], object]) -> list[BaseException]:
    """Call ``function(number)`` in so many native threads; return what they raised."""
    raised: list[BaseException] = []

    def run(number: int) -> None:
        try:
            function(number)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()
    return raised


def bodies_of(address: str, topic: str, count: int) -> list[bytes]:
    """The bodies of so many messages, each finished."""
    found: list[bytes] = []
    with Consumer(topic, "c", address, max_in_flight=200) as consumer:
        for message in consumer:
            found.append(message.body)
            if len(found) == count:
                message.finish()
                break
    return found


def test_a_greenlet_of_a_thread_with_a_hub_lets_the_others_run(nsqd_process: Any) -> None:
    import gevent

    with Producer(nsqd_process.address) as producer:
        producer.publish("t", b"first")
        nsqd_process.freeze()
        ran: list[int] = []
        publishing = gevent.spawn(producer.publish, "t", b"x")
        gevent.spawn(ran.append, 1)
        until(lambda: ran)
        nsqd_process.thaw()
        assert publishing.get(timeout=WAIT) == b"OK"


def test_the_gevent_producer_names_it_and_stores_nothing(nsqd_process: Any) -> None:
    with nsq_fast.Producer(nsqd_process.address) as producer:
        errors = in_threads(5, lambda number: producer.publish("t", b"no"))
        assert [type(error) for error in errors] == 5 * [WrongThread]
        assert all("nsq_fast.threads" in str(error) for error in errors)
        producer.publish("t", b"yes")
    assert bodies_of(nsqd_process.address, "t", 1) == [b"yes"]
    with nsq_fast.NsqdHTTPClient(*nsqd_process.http) as client:
        (topic,) = client.stats()["topics"]
    assert topic["message_count"] == 1


def test_the_end_of_the_interpreter_tells_in_one_line_what_was_not_delivered(nsqd_process: Any) -> None:
    nsqd_process.freeze()
    done = _run(
        f"""
from nsq_fast.threads import Producer
producer = Producer({nsqd_process.address!r})
producer.start()
futures = [producer.publish_nowait("t", b"x") for _ in range(3)]
"""
    )
    nsqd_process.thaw()
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert "before 3 publishes were confirmed" in line


def test_the_end_of_the_interpreter_counts_what_waits_for_room(nsqd_process: Any) -> None:
    nsqd_process.freeze()
    done = _run(
        f"""
from nsq_fast.threads import Producer
producer = Producer({nsqd_process.address!r}, max_pending=1)
producer.start()
futures = [producer.multipublish("t", bodies, raise_error=False) for bodies in ([b"x"], [b"x"], [b"x", b"x"])]
"""
    )
    nsqd_process.thaw()
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert "before 4 publishes were confirmed" in line


def test_the_end_of_the_interpreter_counts_what_a_stuck_hub_thread_has_not_taken(nsqd_process: Any) -> None:
    done = _run(
        f"""
import threading
from nsq_fast import bridge as hub_thread
from nsq_fast.threads import Producer
hub_thread.END_TIMEOUT = 0.1
producer = Producer({nsqd_process.address!r})
producer.start()
stuck = threading.Event()
producer.publish_nowait("t", b"x").add_done_callback(lambda _: (stuck.set(), threading.Event().wait()))
assert stuck.wait(50)
futures = [producer.publish_nowait("t", b"x"), producer.multipublish("t", [b"x", b"x"], raise_error=False)]
"""
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert "before 3 publishes were confirmed" in line


def test_the_end_of_the_interpreter_delivers_what_is_pending(nsqd_process: Any) -> None:
    done = _run(
        f"""
from nsq_fast.threads import Producer
producer = Producer({nsqd_process.address!r})
producer.start()
for number in range(100):
    producer.publish_nowait("t", b"%d" % number)
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(bodies_of(nsqd_process.address, "t", 100)) == 100


@pytest.mark.fork
def test_a_child_of_a_fork_publishes_with_a_thread_of_its_own(nsqd_process: Any) -> None:
    done = _run(
        f"""
import os
from nsq_fast.threads import Producer
producer = Producer({nsqd_process.address!r})
producer.start()
producer.publish("t", b"parent")
child = os.fork()
if not child:
    producer.publish("t", b"child")
    producer.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
producer.publish("t", b"parent again")
producer.close()
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(bodies_of(nsqd_process.address, "t", 3)) == [b"child", b"parent", b"parent again"]


def test_it_works_in_native_threads_and_greenlets_of_a_patched_program(nsqd_process: Any) -> None:
    done = _run(
        f"""
from gevent import monkey; monkey.patch_all()
import gevent
from gevent.threadpool import ThreadPool
from nsq_fast.threads import Producer
with Producer({nsqd_process.address!r}) as producer:
    greenlets = [gevent.spawn(producer.publish, "t", b"g%d" % n) for n in range(20)]
    pool = ThreadPool(4)
    natives = [pool.spawn(producer.publish, "t", b"n%d" % n) for n in range(20)]
    futures = [producer.publish_nowait("t", b"f%d" % n) for n in range(20)]
    assert [each.get(timeout=20) for each in (*greenlets, *natives)] == 40 * [b"OK"]
    assert [each.result(20) for each in futures] == 20 * [b"OK"]
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(bodies_of(nsqd_process.address, "t", 60)) == 60


def _run(program: str) -> subprocess.CompletedProcess[str]:
    command = [*FORKING_PYTHON, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=PROCESS, check=False, cwd=ROOT)


TWO_FIRST_CLIENTS = """
import time
from gevent import joinall, spawn
from nsq_fast import threads
from nsq_fast import bridge as hub_thread

start = hub_thread._start_thread

def start_late(function, arguments):
    def late(*arguments):
        time.sleep(0.2)  # sleep: the second greenlet has its turn before the thread is there
        function(*arguments)
    return start(late, arguments)

hub_thread._start_thread = start_late
producers = [spawn(threads.Producer, "127.0.0.1:1") for _ in range(2)]
joinall(producers, raise_error=True)
print("made")
"""


def test_two_greenlets_may_make_the_first_clients_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", TWO_FIRST_CLIENTS], capture_output=True, text=True, timeout=WAIT)
    assert done.stdout == "made\n", done.stderr
