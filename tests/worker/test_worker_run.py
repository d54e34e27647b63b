"""`nsq-fast run` with real processes: what it starts, replaces and ends, and that no message is lost on the way."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import gevent
import pytest
from gevent import subprocess
from support.processes import kill_session, of_session
from support.waiting import WAIT, holds, promptly, until
from support.worker import NOTING, ROOT, START, Worker

from nsq_fast import NsqdHTTPClient, Producer
from nsq_fast.broker import BrokerProcess
from nsq_fast.worker.health import ECHO

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

HANDLER = """
@subscribe("orders", "billing", concurrency=4, max_in_flight=40)
def handle(consumer, message):
    note(message.body)
"""
BLOCKED = """
@subscribe("orders", "billing", handler_threads=1, max_in_flight=1)
def handle(consumer, message):
    note(message.body)
    time.sleep(3600)  # sleep: a handler that does not end
"""
TWO_LOOPS = """
@subscribe("orders", "greenlets")
def handle(consumer, message):
    note(message.body)

@subscribe("orders", "asyncio")
async def handle_there(consumer, message):
    note(message.body)
"""
TIMED = """
from gevent import sleep
from prometheus_client import Counter, Histogram

seen = Counter("seen", "Seen.", ["kind"])
size = Histogram("size", "Size.", buckets=[1, 10])

@subscribe("orders", "billing", max_in_flight=1, histograms=True)
def handle(consumer, message):
    sleep(0.02)  # sleep: longer than it is between two samples, so that each message is one
    seen.labels("any").inc()
    size.observe(5)
    note(message.body)
"""

Run = Callable[..., Worker]

answers: Any = partial(until, timeout=START, every=0.05)
"""Waits for what a worker says by HTTP; to ask more often would keep it busy."""


@pytest.fixture
def run(tmp_path: Path, nsqd_process: Any) -> Iterator[Run]:
    """A factory of workers on an nsqd in a process of its own, which are killed after the test."""
    made: list[Worker] = []

    def make(program: str, *flags: str, **environment: str) -> Worker:
        made.append(Worker(tmp_path, program, *flags, nsqd=nsqd_process.address, **environment))
        return made[-1]

    yield make
    for worker in made:
        worker.stop()


def embedded(test: Any) -> Any:
    """For what does not depend on the server."""
    return pytest.mark.parametrize("nsqd_process", ["embedded"], indirect=True)(test)


def channel(nsqd_process: Any) -> dict[str, Any]:
    """What nsqd says of the channel; counts are 0 where there is none yet."""
    with NsqdHTTPClient(*nsqd_process.http) as client:
        topics = client.stats("orders")["topics"]
    found: dict[str, Any] = next((each for topic in topics for each in topic["channels"]), {})
    return {"in_flight_count": 0, "depth": 0, "client_count": 0, **found}


def reasons(worker: Worker) -> dict[str, str]:
    """Channel -> why its consumer does nothing."""
    return {each.labels["channel"]: each.labels["reason"] for each in worker.samples("nsq_fast_consumer_stalled")}


def publish(nsqd_process: Any, *bodies: str) -> set[str]:
    with Producer(nsqd_process.address) as producer:
        for body in bodies:
            producer.publish("orders", body.encode())
    return set(bodies)


@embedded
def test_handlers_run_where_their_kind_says(run: Run, nsqd_process: Any) -> None:
    worker = run(
        """
import threading
from asyncio import create_task, sleep
main = threading.get_ident()
left = []

async def stay():
    try:
        await sleep(3600)  # sleep: until the loop ends
    finally:
        await sleep(0.01)  # sleep: what it does at its end may wait
        note(b"stayed")

@subscribe("orders", "greenlets")
def first(consumer, message):
    note(b"greenlet %d" % (threading.get_ident() == main))

@subscribe("orders", "threads", handler_threads=1)
def second(consumer, message):
    note(b"thread %d" % (threading.get_ident() == main))

@subscribe("orders", "loop")
async def third(consumer, message):
    left.append(create_task(stay()))
    await sleep(0)
    note(b"loop %d" % (threading.get_ident() == main))

@subscribe("orders", "batches", batch=True)
def fourth(consumer, messages):
    note(b"batch %d" % len(messages))
"""
    ).ready()
    publish(nsqd_process, "message")
    expected = {"greenlet 1", "thread 0", "loop 0", "batch 1"}
    until(lambda: worker.handled() == expected, START, about=worker.log)
    answers(lambda: worker.figure("nsq_fast_consumer_messages_finished_total") == 4, about=worker.log)
    shown = [f'data-name="topic/channel">orders/{channel}<' for channel in ("greenlets", "threads", "loop", "batches")]
    answers(
        lambda: (page := worker.asked("/")[1]).count('data-name="finished">1<') == 4 and all(map(page.count, shown))
    )
    assert 'class="well">ready<' in worker.asked("/")[1]
    worker.terminated()
    assert "orders/greenlets: closed: 1 finished, 0 requeued" in worker.log()
    assert "stayed" in worker.handled(), "what a handler has left running is cancelled"


@embedded
def test_a_function_may_make_the_consumers_and_a_program_shows_its_producers_beside_them(
    run: Run, nsqd_process: Any
) -> None:
    program = f"""
from nsq_fast.metrics import ClientCollector
from nsq_fast.threads import Consumer, Producer

producer = Producer({nsqd_process.address!r})
audit = Consumer("orders", "audit", {nsqd_process.address!r}, message_handler=lambda consumer, message: None)
shown = ClientCollector()
shown.add_producer("out", producer)
shown.add_consumer("audit", audit)

@subscribe("orders", "billing")
def handle(consumer, message):
    note(message.body)

class workers:
    def consumers():
        return [handle, audit]
"""
    worker = run(program)
    worker.target = "app:workers.consumers"
    worker.ready()
    (producer,) = worker.samples("nsq_fast_producer_connections")
    assert producer.labels == {"producer": "out"}
    running = worker.samples("nsq_fast_consumer_running")
    assert {each.labels["consumer"] for each in running} == {"orders/billing", "audit"}
    bodies = publish(nsqd_process, "one")
    until(lambda: worker.handled() == bodies, about=worker.log)
    worker.terminated(signal.SIGINT)


@pytest.mark.kill
def test_a_rolling_restart_under_load_loses_nothing_and_leaves_no_gap(run: Run, nsqd_process: Any) -> None:
    worker = run(HANDLER, "--processes", "2").ready()
    first = set(worker.children().values())
    published: set[str] = set()
    clients: list[int] = []

    def load() -> None:
        with Producer(nsqd_process.address) as producer:
            while first & set(current) or len(published) < 500:
                body = str(len(published))
                producer.publish("orders", body.encode())
                published.add(body)
                gevent.sleep(0.002)  # sleep: a load, and not as much as there is room for

    def watch() -> None:
        while True:
            clients.append(channel(nsqd_process)["client_count"])
            gevent.sleep(0.05)  # sleep: looks again and again

    current = list(first)
    loader, watcher = gevent.spawn(load), gevent.spawn(watch)
    worker.send(signal.SIGHUP)
    until(lambda: "all processes are replaced" in worker.log(), 3 * START, 0.1, about=worker.log)
    current = list(worker.children().values())
    loader.get(timeout=WAIT)
    watcher.kill()
    assert not first & set(current)
    until(lambda: worker.handled() == published, START, about=worker.log)
    until(lambda: channel(nsqd_process)["in_flight_count"] == 0)
    assert min(clients) >= 2
    assert {pid for pid, _ in worker.noted()} >= set(current)
    found = channel(nsqd_process)
    assert (found["depth"], found["timeout_count"]) == (0, 0)
    worker.terminated()


@pytest.mark.kill
def test_a_killed_process_is_started_again_and_what_it_held_is_handled(run: Run, nsqd_process: Any) -> None:
    program = """
@subscribe("orders", "billing", msg_timeout=2, max_in_flight=10)
def handle(consumer, message):
    note(message.body)
    if message.body == b"deadly" and message.attempts == 1:
        os.kill(os.getpid(), 9)
"""
    worker = run(program, "--processes", "2", "--restart-delay", "0.1").ready()
    bodies = publish(nsqd_process, *map(str, range(20)), "deadly", *map(str, range(20, 40)))
    # When a message times out, nsqd takes it off the in-flight count before it delivers it again.
    until(lambda: sum(text == "deadly" for _, text in worker.noted()) >= 2, START, about=worker.log)
    until(lambda: worker.handled() == bodies and channel(nsqd_process)["in_flight_count"] == 0, START, about=worker.log)
    answers(worker.is_ready, about=worker.log)
    assert channel(nsqd_process)["depth"] == 0
    assert "was killed by SIGKILL" in worker.log()
    assert "is started again in 0.1 s\n" in worker.log()
    assert worker.figure("nsq_fast_worker_restarts_total") == 1
    worker.terminated()


@pytest.mark.parametrize(
    ("place", "nsqd_process"),
    [("threads", "original"), ("threads", "embedded"), ("gevent", "embedded"), ("asyncio", "embedded")],
    indirect=["nsqd_process"],
)
def test_a_handler_that_does_not_end_ends_readiness_and_at_the_end_of_the_drain_its_message_is_requeued(
    run: Run, nsqd_process: Any, place: str
) -> None:
    program = {
        "threads": BLOCKED,
        "gevent": BLOCKED.replace("handler_threads=1, ", "").replace("time.sleep", "__import__('gevent').sleep"),
        "asyncio": "from asyncio import sleep\n"
        + BLOCKED.replace("handler_threads=1, ", "").replace("def h", "async def h").replace("time.", "await "),
    }[place]
    worker = run(program, "--drain-timeout", "0.5", "--stall-after", "1").ready()
    publish(nsqd_process, "long")
    answers(lambda: worker.handled() == {"long"} and not worker.is_ready(), about=worker.log)
    (reason,) = worker.probed("/readyz")["reasons"]
    assert "orders/billing does nothing: handlers_busy for" in reason
    assert worker.asked("/healthz")[0] == 200
    worker.terminated()
    assert "requeued 1 message that handlers have not finished" in worker.log()
    # Long before nsqd would take it back by itself, after 60 s.
    until(lambda: channel(nsqd_process)["depth"] == 1)
    assert channel(nsqd_process)["in_flight_count"] == 0


@embedded
def test_a_handler_that_blocks_its_loop_ends_readiness_too(run: Run, nsqd_process: Any) -> None:
    blocking = "note(message.body)\n    time.sleep(3600)  # sleep: a handler that does not end"
    worker = run(TWO_LOOPS.replace("note(message.body)", blocking), "--stall-after", "1").ready()
    publish(nsqd_process, "long")

    def said() -> list[str]:
        return [each.partition(": ")[2] for each in worker.probed("/readyz")["reasons"]]

    for channel in ("greenlets", "asyncio"):
        start = f"orders/{channel} does nothing: handlers_busy for"
        answers(lambda start=start: any(each.startswith(start) for each in said()), about=worker.log)


@embedded
def test_a_process_whose_consumer_closes_by_itself_is_replaced_after_the_others_have_drained(
    run: Run, nsqd_process: Any
) -> None:
    closing = """
@subscribe("orders", "{channel}")
{kind} {channel}(consumer, message):
    if message.body == b"close {channel}" and message.attempts == 1:
        {close}
    note(b"{channel} " + message.body)
"""
    ways = {
        "greenlets": ("def", "consumer.close()"),
        "exiting": ("def", "raise SystemExit(4)"),
        "loop": ("async def", "await consumer.close()"),
        "leaving": ("async def", "raise SystemExit(5)"),
    }
    program = "".join(
        closing.format(channel=channel, kind=kind, close=close) for channel, (kind, close) in ways.items()
    )
    worker, restarts = run(program, "--restart-delay", "0").ready(), "nsq_fast_worker_restarts_total"
    for number, channel in enumerate(ways, 1):
        publish(nsqd_process, f"close {channel}")
        answers(lambda wanted=number: worker.figure(restarts) == wanted, about=worker.log)
        answers(worker.is_ready, about=worker.log)
        until(lambda wanted=f"{channel} close {channel}": wanted in worker.handled(), about=worker.log)
    log = worker.log()
    assert log.count("has closed: the program closed it") >= 2
    for code in (4, 5):
        assert f"has closed: SystemExit: {code}; the process ends" in log
    assert log.count("orders/greenlets: closed: ") == len(ways)
    assert "Traceback" not in log


@embedded
@pytest.mark.parametrize(
    ("define", "module", "pause"), [("def", "gevent", "sleep"), ("async def", "asyncio", "await sleep")]
)
def test_a_handler_that_exits_while_the_process_drains_leaves_the_others_their_time(
    run: Run, nsqd_process: Any, define: str, module: str, pause: str
) -> None:
    worker = run(
        f"""
from {module} import sleep

@subscribe("orders", "billing", concurrency=2)
{define} handle(consumer, message):
    note(b"has " + message.body)
    while not os.path.exists(message.body):
        {pause}(0.01)  # sleep: until the test says
    note(b"did " + message.body)
    if message.body == b"exit":
        raise SystemExit(3)
"""
    ).ready()
    publish(nsqd_process, "exit", "long")
    until(lambda: worker.handled() == {"has exit", "has long"}, START, about=worker.log)
    worker.send(signal.SIGTERM)
    until(lambda: "draining for" in worker.log(), START, about=worker.log)
    for body in ("exit", "long"):
        (worker.folder / body).touch()
        until(lambda body=body: f"did {body}" in worker.handled(), START, about=worker.log)  # type: ignore[misc]
    assert worker.ended() == 0, worker.log()
    assert "orders/billing: closed: 1 finished, 1 requeued" in worker.log()


def test_consumers_of_greenlets_and_of_asyncio_have_their_nsqds_asked_what_waits(tmp_path: Path) -> None:
    with BrokerProcess() as broker:
        with NsqdHTTPClient.from_url(str(broker.nsqds[0].http)) as nsqd:
            nsqd.create_topic("orders")
            for channel in ("greenlets", "asyncio"):
                nsqd.create_channel("orders", channel)
                nsqd.pause_channel("orders", channel)
            nsqd.publish("orders", b"body")
        worker = Worker(tmp_path, TWO_LOOPS, "--lookupd", str(broker.lookupd.http), "--stall-after", "0.1")
        try:
            worker.ready()
            until(
                lambda: reasons(worker) == {"greenlets": "paused_by_server", "asyncio": "paused_by_server"},
                about=worker.log,
            )
            assert worker.is_ready(), "what is paused has nothing to do"
        finally:
            worker.stop()


@embedded
def test_an_idle_consumer_is_looked_at_once_a_second(run: Run, nsqd_process: Any) -> None:
    program = f"""
from nsq_fast import Consumer, aio

def timed(kind, handler):
    class Timed(kind):
        def progress(self):
            note(b"%s %f" % (self.channel.encode(), time.monotonic()))
            return super().progress()

    return Timed("orders", kind.__module__.replace(".", "_"), {nsqd_process.address!r}, message_handler=handler)

async def handle(consumer, message): ...
consumers = [timed(Consumer, print), timed(aio.Consumer, handle)]
"""
    worker = run(program)
    worker.target = "app:consumers"
    worker.start()
    for name in ("nsq_fast_consumer", "nsq_fast_aio"):

        def looks(name: str = name) -> list[float]:
            return [float(text.split()[1]) for _, text in worker.noted() if text.split()[0] == name]

        until(lambda looks=looks: len(looks()) >= 6, about=worker.log)  # type: ignore[misc]
        assert looks()[5] - looks()[0] > 4.0


@embedded
def test_a_second_signal_waits_for_nobody(run: Run, nsqd_process: Any) -> None:
    worker = run(BLOCKED, "--drain-timeout", "3600").ready()
    publish(nsqd_process, "long")
    until(lambda: worker.handled() == {"long"}, about=worker.log)
    worker.send(signal.SIGTERM)
    until(lambda: "draining for 3600 s at most" in worker.log(), about=worker.log)
    assert worker.probed("/readyz")["ok"] is False
    gevent.sleep(2 * ECHO)  # sleep: what comes sooner is the first signal once more
    with promptly():
        worker.send(signal.SIGTERM)
        assert worker.ended() == 128 + signal.SIGTERM
    assert "nsqd delivers again what they held" in worker.log()


@embedded
def test_signals_that_come_at_once_are_one(run: Run, nsqd_process: Any) -> None:
    worker = run(HANDLER).ready()
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
        worker.send(number)
    assert worker.ended() == 0, worker.log()


@embedded
def test_a_worker_whose_stderr_is_closed_runs_and_ends(nsqd_process: Any, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(NOTING + HANDLER)
    ledger = tmp_path / "ledger"
    command = f"exec {sys.executable} -m nsq_fast run app --nsqd {nsqd_process.address} 2>&-"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LEDGER": str(ledger)}
    process = subprocess.Popen(["sh", "-c", command], cwd=tmp_path, env=environment, start_new_session=True)
    try:
        publish(nsqd_process, "heard")
        until(lambda: ledger.exists() or process.poll() is not None, START)
        process.terminate()
        assert process.wait() == 0
    finally:
        kill_session(process.pid)


@pytest.mark.parametrize("is_read", [False, True], ids=["never read", "read later"])
@embedded
def test_a_worker_whose_logs_nobody_reads_runs_and_ends(nsqd_process: Any, tmp_path: Path, is_read: bool) -> None:
    (tmp_path / "app.py").write_text(NOTING + HANDLER)
    ledger = tmp_path / "ledger"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LEDGER": str(ledger)}
    command = [sys.executable, "-m", "nsq_fast", "run", "app", "--nsqd", nsqd_process.address]
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=writer, start_new_session=True)
    os.close(writer)
    try:
        publish(nsqd_process, "heard")
        until(lambda: ledger.exists() or process.poll() is not None, START)
        log = b""

        def said() -> bool:
            nonlocal log
            with suppress(BlockingIOError):
                log += os.read(reader, 65536)
            return b" bytes of logs are left out here" in log

        if is_read:
            first = set(of_session(process.pid))
            process.send_signal(signal.SIGHUP)  # what it says of that is left out before it starts another process
            until(lambda: set(of_session(process.pid)) - first, START)
            until(said, START)
        process.terminate()
        until(lambda: process.poll() is not None, START)
        assert process.returncode == 0
        said()
        assert (b"SIGTERM: the processes drain" in log) is is_read
    finally:
        kill_session(process.pid)
        os.close(reader)


@pytest.mark.kill
@embedded
def test_no_process_outlives_a_killed_supervisor(run: Run, nsqd_process: Any) -> None:
    worker = run(HANDLER, "--processes", "2").ready()
    session = worker.pid
    assert len(of_session(session)) == 3
    worker.send(signal.SIGKILL)
    until(lambda: not of_session(session), START)
    bodies = publish(nsqd_process, "later")
    until(lambda: channel(nsqd_process)["depth"] == len(bodies))
    assert channel(nsqd_process)["client_count"] == 0


@pytest.mark.kill
@embedded
def test_no_process_outlives_a_killed_supervisor_for_a_handler_that_does_not_end(run: Run, nsqd_process: Any) -> None:
    worker = run(BLOCKED.replace("handler_threads=1, ", ""), "--drain-timeout", "0.2").ready()
    publish(nsqd_process, "long")
    until(lambda: worker.handled() == {"long"}, START, about=worker.log)
    session = worker.pid
    worker.send(signal.SIGKILL)
    until(lambda: not of_session(session), START)


@pytest.mark.kill
def test_readiness_follows_the_nsqds_and_liveness_does_not(run: Run, nsqd_process: Any) -> None:
    worker = run(HANDLER, "--consumer-opt", "max_reconnect_delay=0.1").ready()
    nsqd_process.kill()
    answers(lambda: not worker.is_ready(), about=worker.log)
    assert "orders/billing is connected to 0 of 1" in worker.probed("/readyz")["reasons"][0]
    assert worker.asked("/healthz")[0] == 200
    nsqd_process.start()
    answers(worker.is_ready, about=worker.log)


@embedded
def test_the_figures_of_three_processes_add_up_and_outlive_one_that_is_restarted(run: Run, nsqd_process: Any) -> None:
    worker = run(TIMED, "--processes", "3", "--restart-delay", "0").ready()
    assert worker.figure("nsq_fast_worker_processes_ready") == 3
    assert worker.figure("nsq_fast_consumer_connections", channel="billing") == 3
    seen: list[dict[float, float]] = [{}]

    def buckets(name: str) -> dict[float, float]:
        """Upper bound -> how many, those below included. They only grow."""
        found = worker.samples(f"nsq_fast_consumer_{name}_seconds_bucket")
        counts = {float(each.labels["le"]): each.value for each in found}
        assert list(counts) == sorted(counts)
        assert list(counts.values()) == sorted(counts.values())
        return counts

    def watch() -> None:
        while True:
            now = buckets("handler")
            assert all(now[bound] >= count for bound, count in seen[-1].items())
            seen.append(now)
            gevent.sleep(0.05)  # sleep: looks again and again

    def all_are_counted(bodies: int) -> bool:
        return worker.figure("nsq_fast_consumer_messages_finished_total", channel="billing") == bodies

    publish(nsqd_process, *map(str, range(30)))
    answers(lambda: all_are_counted(30), about=worker.log)
    watcher = gevent.spawn(watch)
    publish(nsqd_process, *map(str, range(30, 90)))
    os.kill(worker.children()[1], signal.SIGTERM)
    answers(lambda: worker.figure("nsq_fast_worker_restarts_total") == 1 and worker.is_ready(), about=worker.log)
    publish(nsqd_process, *map(str, range(90, 120)))
    answers(lambda: all_are_counted(120), about=worker.log)
    watcher.kill()
    assert watcher.exception is None
    assert len({pid for pid, _ in worker.noted()}) >= 3
    assert (worker.figure("seen_total", kind="any"), worker.figure("size_bucket", le="10.0")) == (120, 120)
    for name in ("handler", "message_age"):
        assert buckets(name)[float("inf")] == 120
        assert worker.figure(f"nsq_fast_consumer_{name}_seconds_count") == 120
    assert buckets("handler")[2.0**-6] == 0, "none was shorter than 0.016 s"
    assert worker.figure("nsq_fast_consumer_handler_seconds_sum") >= 120 * 0.02
    assert worker.figure("nsq_fast_consumer_message_age_seconds_sum") > 0


COLLECTOR = """
from prometheus_client import REGISTRY

class Collector:
    def describe(self):
        return []

    def collect(self):
        {}
        return []

REGISTRY.register(Collector())
"""


@embedded
def test_a_collector_of_the_program_that_fails_costs_figures_and_nothing_else(run: Run) -> None:
    worker = run(COLLECTOR.format('raise RuntimeError("the database is away")') + HANDLER).ready()
    assert worker.probed("/healthz")["ok"]
    assert worker.asked("/metrics")[0] == 200
    until(lambda: "the database is away" in worker.log())
    worker.asked("/metrics")
    assert worker.log().count("the database is away") == 1


@embedded
def test_what_a_program_shows_is_read_when_somebody_asks_and_one_that_is_silent_is_not_waited_for(run: Run) -> None:
    worker = run(COLLECTOR.format('note(b"read")') + HANDLER, "--processes", "2").ready()
    holds(lambda: not worker.noted(), 2.5)  # longer than it is between two reports
    assert worker.figure("nsq_fast_consumer_connections") == 2
    assert sorted(worker.noted()) == sorted((pid, "read") for pid in worker.children().values())
    os.kill(worker.children()[0], signal.SIGSTOP)
    with promptly():
        assert worker.figure("nsq_fast_consumer_connections") == 2  # of the one as it was


@embedded
def test_a_restart_with_a_broken_program_leaves_the_old_processes_at_work(run: Run, nsqd_process: Any) -> None:
    worker = run(HANDLER, "--processes", "2").ready()
    before = worker.children()
    broken = {"import half_written\n": "No module named 'half_written'", "def bill(:\n": "SyntaxError: "}
    for number, (program, says) in enumerate(broken.items(), 1):
        seen = len(worker.lines)
        worker.write(program)
        worker.send(signal.SIGHUP)
        until(lambda wanted=number: worker.log().count("not all processes") == wanted, START, about=worker.log)
        lines = [line.strip() for line in worker.lines[seen:]]
        assert says in "\n".join(lines)
        traceback = {line.partition(",")[0] for line in lines if line.startswith("File ")}
        assert traceback == {f'File "{worker.folder}/app.py"'}, "from the program on"
        until(lambda: worker.children() == before, about=worker.log)  # the page may be a turn older than the record
    bodies = publish(nsqd_process, "still")
    until(lambda: worker.handled() == bodies, about=worker.log)
    worker.write(HANDLER)
    worker.send(signal.SIGHUP)
    until(lambda: "all processes are replaced" in worker.log().replace("not all", ""), START, about=worker.log)


@embedded
def test_a_restart_with_a_broken_program_fails_also_while_no_process_runs(run: Run) -> None:
    worker = run(HANDLER, "--restart-delay", "500", "--max-restart-delay", "500").ready()
    os.kill(worker.children()[0], signal.SIGKILL)
    until(lambda: "is started again in" in worker.log(), START, about=worker.log)
    for program, says in (("import half_written\n", "not all processes are"), (HANDLER, ": all processes are")):
        worker.write(program)
        worker.send(signal.SIGHUP)
        until(lambda said=says: said in worker.log(), START, about=worker.log)  # type: ignore[misc]
    worker.ready()


@embedded
def test_a_restart_reads_the_configuration_anew_and_keeps_what_runs_if_it_is_wrong(
    run: Run, nsqd_process: Any, tmp_path: Path
) -> None:
    file = tmp_path / "worker.toml"

    def configure(max_in_flight: object, processes: int = 1) -> None:
        of_consumer = f"[subscription.'orders/billing']\nmax_in_flight = {max_in_flight}\n"
        file.write_text(f"{of_consumer}[worker]\nprocesses = {processes}\n")

    configure(7)
    worker = run(HANDLER, "--config", str(file)).ready()
    assert worker.figure("nsq_fast_consumer_max_in_flight") == 7
    configure(9, processes=2)
    worker.send(signal.SIGHUP)
    answers(lambda: worker.figure("nsq_fast_consumer_max_in_flight") == 9, about=worker.log)
    until(lambda: "all processes are replaced" in worker.log(), START, about=worker.log)
    assert "processes: read at the start only" in worker.log()
    before = worker.children()
    assert list(before) == [0]
    configure("'many'")
    worker.send(signal.SIGHUP)
    until(lambda: "no process is replaced: " in worker.log(), START, about=worker.log)
    assert "max_in_flight='many'" in worker.log()
    assert worker.children() == before
    configure("11\nstart_position = 'nowhere'")  # only a process that makes the consumer finds that
    worker.send(signal.SIGHUP)
    until(lambda: "not all processes are replaced" in worker.log(), START, about=worker.log)
    assert worker.children() == before
    os.kill(before[0], signal.SIGKILL)
    until(lambda: worker.children() not in ({}, before) and worker.is_ready(), START, about=worker.log)
    assert worker.figure("nsq_fast_consumer_max_in_flight") == 9, "the configuration that was right"
    worker.terminated()


@embedded
def test_a_program_that_cannot_be_run_ends_the_worker_and_says_why(run: Run) -> None:
    worker = run("raise ValueError('no database')\n", "--processes", "2", "--log-format", "json").start()
    assert worker.ended() == 78
    assert "exit code 78: ValueError: no database" in worker.log()
    assert "app cannot be run: the worker ends" in worker.log()
    records = [json.loads(line) for line in worker.lines]
    assert {"worker_listening", "worker_process_died", "worker_program_failed"} <= {each["event"] for each in records}
    assert len({each["process"] for each in records}) == 3
    assert "ValueError: no database" in next(each["exception"] for each in records if "exception" in each)


@embedded
def test_a_module_that_is_missing_is_said_once_and_not_to_be_started_again(run: Run) -> None:
    worker = run("")
    (worker.folder / "app.py").unlink()
    worker.start()
    assert worker.ended() == 78
    _, started, died, ends = worker.lines
    assert "is started" in started
    assert f"there is no module 'app' in {worker.folder}" in died
    assert "--app-dir" in died
    assert "app cannot be run: the worker ends" in ends


@embedded
@pytest.mark.parametrize(("code", "flags"), [("0", []), ("'no database'", ["--check"])], ids=["run", "check"])
def test_a_program_that_ends_where_it_is_imported_ends_the_worker_and_says_where(
    run: Run, code: str, flags: list[str]
) -> None:
    worker = run(f"import sys\nsys.exit({code})\n", *flags).start()
    assert worker.ended() == 78
    where = f"sys.exit({code}) at {worker.folder / 'app.py'}:"
    assert f"ends the program where it should declare what runs: {where}" in worker.log()
    assert ("app cannot be run: the worker ends" in worker.log()) is (not flags)


@embedded
def test_reload_takes_what_was_edited(run: Run, nsqd_process: Any) -> None:
    pytest.importorskip("watchfiles")
    worker = run(HANDLER, "--reload").ready()
    before = worker.children()

    def edited() -> bool:
        # Until the watch has begun, which nothing outside can see, a change may go by unseen.
        worker.write(HANDLER.replace("note(message.body)", "note(b'new ' + message.body)"))
        return worker.children() != before

    until(edited, START, 1.0, about=worker.log)
    until(lambda: "all processes are replaced" in worker.log(), START, about=worker.log)
    publish(nsqd_process, "order")
    until(lambda: worker.handled() == {"new order"}, START, about=worker.log)


@embedded
@pytest.mark.parametrize("where", ["{}/notify", "@{}"])
def test_systemd_is_told(run: Run, tmp_path: Path, where: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        where = where.format(tmp_path)
        sock.bind(where.replace("@", "\0"))
        sock.setblocking(False)
        told: list[str] = []

        def has(word: str) -> bool:
            try:
                while True:
                    told.extend(sock.recv(4096).decode().split("\n"))
            except BlockingIOError:
                return word in told

        worker = run(HANDLER, NOTIFY_SOCKET=where, WATCHDOG_USEC="400000").start()
        until(lambda: has("READY=1"), START, about=worker.log)
        until(lambda: has("STATUS=ready") and has("WATCHDOG=1"), START, about=worker.log)
        told.clear()
        worker.send(signal.SIGHUP)
        until(lambda: has("RELOADING=1") and has("READY=1"), START, about=worker.log)
        worker.send(signal.SIGTERM)
        until(lambda: has("STOPPING=1"), about=worker.log)
        assert worker.ended() == 0


@embedded
def test_a_stopped_process_is_no_longer_alive(run: Run, nsqd_process: Any) -> None:
    worker = run(HANDLER, "--alive-timeout", "5").ready()
    assert worker.asked("/healthz")[0] == 200
    (pid,) = worker.children().values()
    os.kill(pid, signal.SIGSTOP)
    answers(lambda: worker.asked("/healthz")[0] == 503, about=worker.log)
    assert f"pid {pid}): its loop has not turned" in worker.probed("/healthz")["reasons"][0]
    os.kill(pid, signal.SIGCONT)
    answers(lambda: worker.asked("/healthz")[0] == 200, about=worker.log)
    holds(lambda: worker.children() == {0: pid})


@embedded
@pytest.mark.parametrize("options", [(), ("--log-format", "json")], ids=["text", "json"])
def test_the_last_line_of_a_killed_process_says_what_it_said(run: Run, options: tuple[str, ...]) -> None:
    """A line in JSON is not cut in its middle: its message is what is shown."""
    program = (
        "import logging, os, signal\n"
        "logging.getLogger('nsq_fast.app').error('the end is near %s', 'x' * 300)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    worker = run(program, "--processes", "2", *options).start()
    until(lambda: "was killed by SIGKILL" in worker.log(), START, about=worker.log)
    (line, *_) = [each for each in worker.lines if "was killed by SIGKILL" in each]
    text = json.loads(line)["message"] if options else line
    assert text.rpartition("its last line: ")[2].startswith(
        "the end is near xxx" if options else ("20", "ERROR", "the")
    )
    assert "x..." in text
