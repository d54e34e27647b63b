"""The program of a worker of Celery that tests start, kill and count the tasks of.

``CELERY_BROKER`` is the URL, ``CELERY_FOLDER`` a folder: tasks write into its file ``ran``, and those that wait do so
until there is a file ``go``.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from celery import Celery

import nsq_fast.integrations.celery  # noqa: F401  # which makes nsq:// known

FOLDER = Path(os.environ.get("CELERY_FOLDER", "."))
OPTIONS = {"max_reconnect_delay": 0.2, "retry_max_delay": 0.2, "max_backoff_duration": 0.2}

app = Celery("tests", broker=os.environ.get("CELERY_BROKER", "nsq://"))
app.conf.update(
    broker_transport_options=OPTIONS,
    worker_hijack_root_logger=False,
    worker_prefetch_multiplier=2,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
)


@app.task
def note(number: int) -> None:
    with (FOLDER / "ran").open("a") as file:
        file.write(f"{number}\n")


@app.task
def note_when_told(number: int) -> None:
    while not (FOLDER / "go").exists():
        time.sleep(0.01)  # sleep: looks again and again
    note(number)


@app.task(bind=True, max_retries=3)
def note_at_second_try(self, number: int) -> None:  # type: ignore[no-untyped-def]
    if self.request.retries == 0:
        raise self.retry(countdown=0.5)
    note(number)


@app.task
def die_once(number: int) -> None:
    """End the process that runs the task, the first time."""
    mark = FOLDER / f"died-{number}"
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    note(number)
