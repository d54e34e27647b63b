"""`nsq-fast run` as a process, with the programs that tests give it; `nsq-fast exporter`, and what it shows."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from gevent import get_hub, subprocess
from prometheus_client.parser import text_string_to_metric_families

from support.processes import kill_session, of_session
from support.waiting import WAIT, until

ROOT = Path(__file__).parent.parent.parent
START = 2 * WAIT
"""Seconds for processes to be there: each is an interpreter that imports everything."""

NOTING = """
import os, time
from nsq_fast.worker import subscribe

def note(text):
    with open(os.environ["LEDGER"], "ab", buffering=0) as ledger:
        ledger.write(b"%d %s\\n" % (os.getpid(), text))
"""


class Shown:
    """The series of a scrape."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}

    def samples(self, name: str) -> list[Any]:
        """Of a metric, with ``labels`` and ``value``."""
        return [each for family in self.families.values() for each in family.samples if each.name == name]

    def __call__(self, name: str, **labels: str) -> float | None:
        """The sum of the series of a metric of ours that have these labels; None where there is none."""
        samples = [each for each in self.samples(f"nsq_fast_{name}") if labels.items() <= each.labels.items()]
        return sum(sample.value for sample in samples) if samples else None


class Worker:
    """One run in a session of its own, so that nothing of it is left after the test."""

    def __init__(self, folder: Path, program: str, *flags: str, nsqd: str = "", **environment: str) -> None:
        self.folder = folder
        self.ledger = folder / "ledger"
        self.target = "app"
        self.lines: list[str] = []
        self._flags = [*flags, "--http", "127.0.0.1:0", *(["--nsqd", nsqd] if nsqd else [])]
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT), "LEDGER": str(self.ledger), **environment}
        self._process: subprocess.Popen[bytes] | None = None
        self.write(program)

    def write(self, program: str) -> None:
        path = self.folder / "app.new"
        path.write_text(NOTING + program)
        path.rename(self.folder / "app.py")

    def start(self) -> Worker:
        command = [sys.executable, "-m", "nsq_fast", "run", self.target, *self._flags]
        output, stderr = os.pipe()  # not gevent's, which only one thread could read
        # gevent's: once any test has used that, its loop takes the exit codes of all children.
        self._process = subprocess.Popen(
            command, cwd=self.folder, env=self._environment, stderr=stderr, start_new_session=True
        )
        os.close(stderr)
        self._follower = threading.Thread(target=self._follow, args=(output,), daemon=True)
        self._follower.start()
        until(lambda: self._port() or self._process.poll() is not None, START, about=self.log)  # type: ignore[union-attr]
        return self

    def ready(self) -> Worker:
        """As ``start``, and wait until messages can arrive at each consumer of each process."""
        self.start()
        until(self.is_ready, START, 0.05, about=self.log)
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def log(self) -> str:
        return "\n".join(self.lines)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def ended(self) -> int:
        """Wait for the end; return the exit code. No process may be left, and all that was written is in ``lines``.

        Other greenlets run meanwhile.
        """
        process = self._process
        assert process is not None
        until(lambda: process.poll() is not None, START, about=self.log)
        code: int = process.returncode
        until(lambda: not of_session(self.pid), about=self.log)
        self._follower.join(START)
        return code

    def terminated(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.send(number)
        assert self.ended() == 0, self.log()

    def stop(self) -> None:
        if self._process is not None:
            kill_session(self.pid)
            self._process.wait()

    # What it answers

    def is_ready(self) -> bool:
        return self.asked("/readyz")[0] == 200

    def asked(self, path: str) -> tuple[int, str]:
        try:
            with urlopen(f"http://127.0.0.1:{self._port()}{path}", timeout=WAIT) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()

    def probed(self, path: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.asked(path)[1])
        return answer

    def children(self) -> dict[int, int]:
        """The process of each number, without those that are leaving."""
        found = self.probed("/healthz")["processes"]
        return {each["number"]: each["pid"] for each in found if not each["leaving"]}

    def figure(self, name: str, **labels: str) -> float:
        """The sum of the samples of a metric that have these labels."""
        return sum(each.value for each in self.samples(name) if labels.items() <= each.labels.items())

    def samples(self, name: str) -> list[Any]:
        """The samples of a metric, with ``labels`` and ``value``."""
        return Shown(self.asked("/metrics")[1]).samples(name)

    def noted(self) -> list[tuple[int, str]]:
        """What handlers noted, with the process in which they ran."""
        if not self.ledger.exists():
            return []
        return [(int(pid), text) for pid, text in (line.split(" ", 1) for line in self.ledger.read_text().splitlines())]

    def handled(self) -> set[str]:
        """What handlers noted, wherever they ran."""
        return {text for _, text in self.noted()}

    def _port(self) -> str:
        found = re.search(r"http://[^ ]*:(\d+) has", self.log())
        return found[1] if found else ""

    def _follow(self, output: int) -> None:
        with os.fdopen(output, errors="replace") as lines:
            for line in lines:
                self.lines.append(line.rstrip())


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
