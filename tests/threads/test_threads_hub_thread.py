"""The hub thread: what is called in it, what ends it in another way than the interpreter, and forks in the middle."""

from __future__ import annotations

from typing import Any

import pytest
from support.processes import run_python, run_quietly

ENDS = {
    "the loop is broken off": "gevent.get_hub().loop.break_()",
    "an error reaches the thread": "gevent.get_hub().parent.throw(OSError('of the loop'))",
}
"""What a callback in the hub thread can do to end it."""


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_whoever_waits_for_a_hub_thread_that_fails_is_told_and_the_next_call_has_another(
    nsqd_process: Any, end: str
) -> None:
    done = run_python(f"""
import threading
import gevent
import nsq_fast
from nsq_fast.errors import NotRunning, PublishFailed
from nsq_fast.threads import Consumer, Producer
of_this_thread = nsq_fast.Producer({nsqd_process.address!r})  # which has a hub of its own
of_this_thread.start()
of_this_thread.publish("w", b"0")
told = []
def wait_in_vain(function, error):
    try:
        function()
    except error as raised:
        told.append((function.__name__, getattr(raised, "possibly_stored", None)))
nobody = Producer("127.0.0.1:1", max_pending=1)  # what is published there waits
nobody.start()
first = nobody.publish_nowait("t", b"1")
consumer = Consumer("t", "c", {nsqd_process.address!r})
handling = Consumer("u", "c", {nsqd_process.address!r}, message_handler=print, handler_threads=2)
handling.start(block=False)
def publish():
    nobody.publish("t", b"2")
def take():
    for message in consumer:
        raise AssertionError(message)
def join():
    handling.join()
threads = [
    threading.Thread(target=wait_in_vain, args=arguments)
    for arguments in ((publish, PublishFailed), (take, NotRunning), (join, NotRunning))
]
for thread in threads:
    thread.start()
consumer.stats()
producer = Producer({nsqd_process.address!r})
producer.start()
producer.publish("v", b"0")
ending = producer.publish_nowait("v", b"1")
ending.add_done_callback(lambda future: {end})
for thread in threads:
    thread.join(50)
    assert not thread.is_alive()
wait_in_vain(lambda: first.result(50), PublishFailed)
assert sorted(told) == [("<lambda>", False), ("join", None), ("publish", False), ("take", None)], told
assert producer.publish("v", b"2") == b"OK"
bodies = []
with Consumer("v", "c", {nsqd_process.address!r}) as another:
    for message in another:
        bodies.append(message.body)
        if len(bodies) == 3:
            message.finish()
            break
assert sorted(bodies) == [b"0", b"1", b"2"]
producer.close()
assert of_this_thread.publish("w", b"1") == b"OK"
of_this_thread.close()
print("done")
""")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert done.stderr.count("the hub thread of nsq_fast has ended") >= 1


def test_callbacks_of_futures_harm_nobody_whatever_they_do(nsqd_process: Any) -> None:
    """They destroy the hub, would wait for themselves, or exit."""
    done = run_python(f"""
import sys, threading
import gevent
from nsq_fast.errors import WrongThread
from nsq_fast.threads import Producer
refused, stored, held, go_on = (threading.Event() for _ in range(4))
def destroy(future):
    try:
        gevent.get_hub().destroy()
    except WrongThread:
        refused.set()
raised = []
def publish_more(future):
    try:
        producer.publish("t", b"2")
    except WrongThread as error:
        raised.append(str(error))
    producer.publish_nowait("t", b"3").add_done_callback(lambda future: stored.set())
def hold(future):
    if threading.current_thread() is not threading.main_thread():  # else it was done before it had a callback
        held.set()
        go_on.wait(50)
with Producer({nsqd_process.address!r}) as producer:
    producer.publish_nowait("t", b"1").add_done_callback(destroy)
    assert refused.wait(50)
    producer.publish_nowait("t", b"1").add_done_callback(publish_more)
    assert stored.wait(50)
    assert len(raised) == 1 and "publish_nowait" in raised[0]
    while not held.wait(0.1):
        producer.publish_nowait("t", b"0").add_done_callback(hold)
    # The hub thread stands still: none of these is done before it has its callback.
    futures = [producer.publish_nowait("t", b"1") for _ in range(100)]
    futures += [producer.publish_nowait("t", b"1", defer=5, key="k") for _ in range(10)]  # refused
    for future in futures:
        future.add_done_callback(lambda future: sys.exit(3))
    go_on.set()
    assert all(future.exception(50) is None for future in futures[:100])
    assert all(future.exception(50) is not None for future in futures[100:])
    assert producer.publish("t", b"2") == b"OK"
""")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_a_process_without_descriptors_is_told_so() -> None:
    run_quietly("""
import os, resource
from nsq_fast.errors import NotRunning
from nsq_fast.threads import Producer  # imports what there is
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
opened = len(os.listdir("/proc/self/fd")) - 1
for room in range(3):
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + room, limits[1]))
    try:
        Producer("127.0.0.1:1")
    except NotRunning as error:
        assert "Too many open files" in str(error)
    else:
        raise AssertionError("it has begun")
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
Producer("127.0.0.1:1")  # what was wrong is over
""")


def test_a_result_for_a_thread_whose_hub_is_gone_harms_nobody(nsqd_process: Any) -> None:
    run_quietly(f"""
import threading
import gevent
from nsq_fast.threads import Consumer
consumer = Consumer("t", "c", {nsqd_process.address!r}, message_handler=print)
consumer.start(block=False)
def give_up():
    gevent.get_hub()
    with gevent.Timeout(0.01, False):
        consumer.join()
    gevent.get_hub().destroy(destroy_loop=True)
thread = threading.Thread(target=give_up)
thread.start()
thread.join(50)
consumer.close()  # which is what was waited for
""")
