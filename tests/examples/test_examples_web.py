"""The recipes for web frameworks (docs/cookbook/web.md), each run by the real library."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from support.recipes import files_of
from support.waiting import until

from nsq_fast.threads import Consumer, Producer

ROOT = Path(__file__).parent.parent.parent
PROGRAMS = files_of("cookbook/web")
WAIT = 30.0
SOON = 15.0
"""Seconds that mean: gunicorn has not killed its workers, which it does after 30."""


@contextmanager
def running(*command: str, nsqd: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "NSQD": nsqd, "PYTHONPATH": f"{ROOT}:{cwd}"}
    process = subprocess.Popen(
        [sys.executable, *command], cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Send SIGTERM; return what it has written when it has ended well."""
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=WAIT)
    assert process.returncode == 0, errors
    return output, errors


@contextmanager
def listening() -> Iterator[tuple[int, str]]:
    """The descriptor of a socket that listens, which the server inherits, and its URL."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(64)
        sock.set_inheritable(True)
        yield sock.fileno(), f"http://127.0.0.1:{sock.getsockname()[1]}"


def asked(url: str, body: bytes | None = None) -> int:
    try:
        with urlopen(Request(url, data=body), timeout=WAIT) as answer:
            return int(answer.status)
    except URLError as error:
        return getattr(error, "code", 0)


def test_fastapi_publishes_consumes_and_says_how_it_is(nsqd_process: Any, tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    testing = pytest.importorskip("fastapi.testclient")
    program = f"""
import sys, time
from fastapi.testclient import TestClient
import fastapi_app
with TestClient(fastapi_app.app) as client:
    for number in range(20):
        answer = client.post("/orders", content=b"%d" % number)
        assert answer.status_code == 202, answer.text
    end = time.monotonic() + {WAIT}
    while client.get("/health").json()["handled"] < 20:
        assert time.monotonic() < end
        time.sleep(0.01)  # sleep: looks again and again
print(sorted(map(int, fastapi_app.handled)) == list(range(20)))
"""
    assert testing
    (tmp_path / "fastapi_app.py").write_text(PROGRAMS["fastapi_app.py"])
    with running("-c", program, nsqd=nsqd_process.address, cwd=tmp_path) as process:
        output, errors = process.communicate(timeout=2 * WAIT)
    assert (process.returncode, output) == (0, "True\n"), errors


def test_fastapi_says_503_while_nsqd_is_down(closed_port: int, tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("fastapi.testclient")
    program = """
from fastapi.testclient import TestClient
import fastapi_app
with TestClient(fastapi_app.app) as client:
    answers = [client.post("/orders", content=b"1"), client.get("/health")]
print(*(answer.status_code for answer in answers))
"""
    (tmp_path / "fastapi_app.py").write_text(PROGRAMS["fastapi_app.py"])
    with running("-c", program, nsqd=f"127.0.0.1:{closed_port}", cwd=tmp_path) as process:
        output, errors = process.communicate(timeout=2 * WAIT)
    assert (process.returncode, output) == (0, "503 503\n"), errors


@contextmanager
def gunicorn(folder: Path, nsqd: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Gunicorn with the example for Flask in threads, and its URL."""
    pytest.importorskip("flask")
    pytest.importorskip("gunicorn")
    (folder / "flask_app.py").write_text(PROGRAMS["flask_app.py"])
    with listening() as (descriptor, url):
        command = ["-m", "gunicorn", "-k", "gthread", "--threads", "4", "-b", f"fd://{descriptor}", *arguments]
        environment = {**os.environ, "NSQD": nsqd, "PYTHONPATH": f"{ROOT}:{folder}"}
        process = subprocess.Popen(
            [sys.executable, *command, "flask_app:app"], cwd=folder, env=environment, pass_fds=[descriptor],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            yield process, url
        finally:
            process.kill()
            process.communicate()


def test_flask_says_503_while_nsqd_is_down(closed_port: int, tmp_path: Path) -> None:
    with gunicorn(tmp_path, f"127.0.0.1:{closed_port}") as (process, url):
        assert asked(f"{url}/orders", b"1") == 503
        assert asked(f"{url}/health") == 503
        ended(process)


# With --preload the application, and with it the producer, is made before the workers are forked.
@pytest.mark.parametrize("arguments", [(), ("--preload", "--workers", "2")], ids=["plain", "preloaded"])
def test_flask_publishes_from_the_threads_of_gunicorn(
    nsqd_process: Any, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    with gunicorn(tmp_path, nsqd_process.address, *arguments) as (process, url):
        assert [asked(f"{url}/orders", b"%d" % number) for number in range(20)] == 20 * [202]
        until(lambda: asked(f"{url}/health") == 200)  # each worker connects when it is asked
        began = time.monotonic()
        ended(process)
        assert time.monotonic() - began < SOON
    found: set[bytes] = set()
    with Consumer("orders", "c", nsqd_process.address, max_in_flight=20) as consumer:
        for message in consumer:
            found.add(message.body)
            if len(found) == 20:
                message.finish()
                break


def test_a_command_of_django_consumes_until_it_gets_a_signal(nsqd_process: Any, tmp_path: Path) -> None:
    pytest.importorskip("django")
    commands = tmp_path / "shop" / "management" / "commands"
    commands.mkdir(parents=True)
    (commands / "consume.py").write_text(PROGRAMS["consume.py"])
    (tmp_path / "manage.py").write_text(
        "import sys\nfrom django.conf import settings\nfrom django.core.management import execute_from_command_line\n"
        "settings.configure(INSTALLED_APPS=['shop'])\nexecute_from_command_line(sys.argv)\n"
    )
    with Producer(nsqd_process.address) as producer:
        producer.multipublish("orders", [b"%d" % number for number in range(20)])
    command = ("-u", "manage.py", "consume", "orders", "--nsqd", nsqd_process.address)
    with running(*command, nsqd=nsqd_process.address, cwd=tmp_path) as process:
        assert process.stdout is not None
        lines = {process.stdout.readline() for _ in range(20)}
        ended(process)
    assert lines == {f"{number}\n" for number in range(20)}
