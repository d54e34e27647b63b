"""Celery on NSQ, with Celery's own worker in a process of its own: tasks run, wait, and survive kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.waiting import WAIT, until

from nsq_fast import NsqdHTTPClient

pytest.importorskip("celery")

from celery import Celery
from kombu import pools
from support import celery_app

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]  # workers take seconds to start, and more on a busy machine
ROOT = Path(__file__).parent.parent.parent


class Worker:
    """``celery worker`` as a process, which leads a group with its children."""

    def __init__(self, url: str, folder: Path, pool: str, number: int) -> None:
        self.name = f"w{number}@test"
        self._log = folder / f"worker{number}.log"
        paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
        environment = {**os.environ, "PYTHONPATH": paths, "CELERY_BROKER": url, "CELERY_FOLDER": str(folder)}
        options = ["-P", pool, "-c", "2", "-E", "-n", self.name, "-l", "INFO"]
        command = [sys.executable, "-m", "celery", "-A", "support.celery_app", "worker", *options]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        until(lambda: self._process.poll() is not None or " ready." in self.log, about=lambda: self.log)

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def received(self) -> int:
        """Tasks that it has taken from the server."""
        return self.log.count("] received")

    def kill(self) -> None:
        """SIGKILL, for its children, too."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(WAIT)

    def stop(self) -> int:
        """SIGTERM; returns its exit code."""
        self._process.terminate()
        return self._process.wait(WAIT)

    def end(self) -> None:
        """Kill what is left of it."""
        if self._process.poll() is None:
            self.kill()


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """``start_worker(url, pool="prefork")``; ended after the test."""
    workers: list[Worker] = []

    def start(url: str, pool: str = "prefork") -> Worker:
        workers.append(Worker(url, tmp_path, pool, len(workers)))
        return workers[-1]

    yield start
    for worker in workers:
        worker.end()


@pytest.fixture
def connect() -> Iterator[Callable[[str], Celery]]:
    """``connect(url)`` has the application of the tests use another broker; closed after the test."""
    app = celery_app.app

    def use(url: str) -> Celery:
        app.conf.broker_url = url
        return app

    yield use
    pools.reset()  # which closes the connections that publishing has left open
    app.close()
    app._pool = None  # the next test has another broker
    app.amqp._producer_pool = None


def ran(folder: Path) -> list[int]:
    path = folder / "ran"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def channel_of(nsqd: Any, topic: str = "celery") -> dict[str, Any]:
    with NsqdHTTPClient.from_url(str(nsqd.http)) as client:
        topics = {each["topic_name"]: each for each in client.stats()["topics"]}
    channels = topics[topic]["channels"] if topic in topics else []
    return dict(channels[0]) if channels else {}


def is_done(nsqd: Any) -> bool:
    """Whether nobody has a task any more."""
    channel = channel_of(nsqd)
    return bool(channel) and not (channel["depth"] or channel["in_flight_count"] or channel["deferred_count"])


@pytest.mark.parametrize(
    ("pool", "memory_nsqd"), [("prefork", "original"), ("gevent", "embedded")], indirect=["memory_nsqd"]
)
def test_tasks_run_and_wait_and_workers_are_controlled(
    pool: str, memory_nsqd: Any, start_worker: Any, connect: Any, tmp_path: Path
) -> None:
    url = f"nsq://{memory_nsqd.address}"
    app = connect(url)
    worker = start_worker(url, pool)
    for number in range(20):
        celery_app.note.delay(number)
    began = time.time()
    celery_app.note.apply_async((20,), countdown=1.0)
    celery_app.note_at_second_try.delay(21)
    until(lambda: len(ran(tmp_path)) >= 22, about=lambda: worker.log)
    assert sorted(ran(tmp_path)) == list(range(22))
    assert time.time() - began >= 1.0
    until(lambda: is_done(memory_nsqd))
    assert app.control.ping([worker.name], timeout=WAIT) == [{worker.name: {"ok": "pong"}}], worker.log
    assert events_of(app, lambda: celery_app.note.delay(22)) >= {"task-received", "task-succeeded"}
    assert worker.stop() == 0
    assert "Traceback" not in worker.log


def events_of(app: Celery, act: Callable[[], object]) -> set[str]:
    """The kinds of events that are seen, up to the success of a task; ``act`` is called when there is the first."""
    seen: set[str] = set()

    def note(event: dict[str, Any]) -> None:
        if not seen:
            act()
        seen.add(event["type"])
        receiver.should_stop = event["type"] == "task-succeeded"

    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"*": note})
        receiver.capture(timeout=WAIT)
    return seen


def test_a_countdown_waits_in_nsqd_and_not_in_the_worker(
    nsqd_process: Any, start_worker: Any, connect: Any, tmp_path: Path
) -> None:
    url = f"nsq://{nsqd_process.address}"
    connect(url)
    worker = start_worker(url)
    celery_app.note.delay(0)
    until(lambda: ran(tmp_path) == [0])
    celery_app.note.apply_async((1,), countdown=600)
    until(lambda: channel_of(nsqd_process)["deferred_count"] == 1)
    until(lambda: channel_of(nsqd_process)["in_flight_count"] == 0)  # the first one is acknowledged when it has run
    assert worker.received == 1


@pytest.mark.kill
def test_a_task_whose_child_was_killed_runs_again(
    nsqd_process: Any, start_worker: Any, connect: Any, tmp_path: Path
) -> None:
    url = f"nsq://{nsqd_process.address}"
    connect(url)
    worker = start_worker(url)
    celery_app.die_once.delay(1)
    until(lambda: ran(tmp_path) == [1], about=lambda: worker.log)
    until(lambda: is_done(nsqd_process))
    assert "WorkerLostError" in worker.log


@pytest.mark.kill
def test_the_tasks_of_a_killed_worker_run_in_another(
    nsqd_process: Any, start_worker: Any, connect: Any, tmp_path: Path
) -> None:
    url = f"nsq://{nsqd_process.address}?msg_timeout=3"
    connect(url)
    worker = start_worker(url)
    for number in range(6):
        celery_app.note_when_told.delay(number)
    until(lambda: worker.received == 4)  # two that run, and as many that wait
    worker.kill()
    (tmp_path / "go").touch()
    second = start_worker(url)
    until(lambda: set(ran(tmp_path)) == set(range(6)), about=lambda: second.log)
    until(lambda: is_done(nsqd_process))


@pytest.mark.kill
def test_an_nsqd_that_goes_down_and_comes_back_loses_no_task(
    nsqd_process: Any, start_worker: Any, connect: Any, tmp_path: Path
) -> None:
    url = f"nsq://{nsqd_process.address}"
    connect(url)
    worker = start_worker(url)
    for number in range(20):
        celery_app.note_when_told.delay(number)
    until(lambda: worker.received == 4)
    until(lambda: channel_of(nsqd_process)["depth"] == 16)  # none is on its way to the channel
    nsqd_process.go_down()
    with ThreadPoolExecutor(1) as threads:
        calls = [threads.submit(celery_app.note_when_told.delay, number) for number in range(20, 30)]
        nsqd_process.start()
        for call in calls:
            call.result(WAIT)
    (tmp_path / "go").touch()
    until(lambda: set(ran(tmp_path)) == set(range(30)), about=lambda: (sorted(ran(tmp_path)), worker.log))
    until(lambda: is_done(nsqd_process))
