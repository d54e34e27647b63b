"""`nsq-fast exporter` as a process, and what it shows."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from gevent import get_hub
from prometheus_client.parser import text_string_to_metric_families

from .waiting import WAIT

ROOT = Path(__file__).parent.parent.parent


class Shown:
    """The series of a scrape."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}

    def __call__(self, name: str, **labels: str) -> float | None:
        """The sum of the series of a metric that have these labels; None where there is none."""
        samples = [
            sample
            for family in self.families.values()
            for sample in family.samples
            if sample.name == f"nsq_fast_{name}" and labels.items() <= sample.labels.items()
        ]
        return sum(sample.value for sample in samples) if samples else None


@contextmanager
def exporter(*flags: str) -> Iterator[Callable[[str], str]]:
    """The command as a process; gives what reads a page of it."""
    command = [sys.executable, "-m", "nsq_fast", "exporter", "--http", "127.0.0.1:0", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found, line

        def read(path: str) -> str:
            with urlopen(found[0] + path, timeout=WAIT) as answer:
                return str(answer.read().decode())

        yield lambda path: get_hub().threadpool.apply(read, (path,))
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT) == 0
    finally:
        process.kill()
        process.communicate()
