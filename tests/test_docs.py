"""The pages of the documentation are true: their programs run as they stand, and nothing is left out.

Only the addresses are changed, to those of an embedded broker.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support.waiting import until

from nsq_fast import NsqdHTTPClient, errors
from nsq_fast.broker import BrokerProcess

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    "index",
    "consumer",
    "producer",
    "discovery",
    "dynamic-configuration",
    "asyncio",
    "threads",
    "integrations",
    "tls",
    "testing",
    "metrics",
    "logs",
]
LIMIT = 60.0


class Program(NamedTuple):
    page: str
    number: int
    text: str

    @property
    def blocks(self) -> bool:
        """Whether it runs until it gets a signal."""
        return "consumer.start()\n" in self.text

    @property
    def is_test(self) -> bool:
        """Whether it is for pytest to run."""
        return "def test_" in self.text


def programs() -> Iterator[Program]:
    for page in PAGES:
        found = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)
        yield from (Program(page, number, text) for number, text in enumerate(found))


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess() as process:
        with NsqdHTTPClient.from_url(str(process.nsqds[0].http)) as client:
            client.create_topic("greetings")
        yield process


@pytest.mark.slow
@pytest.mark.parametrize("program", list(programs()), ids=lambda each: f"{each.page}-{each.number}")
def test_the_programs_of_the_pages_run(program: Program, broker: BrokerProcess, tmp_path: Path) -> None:
    text = program.text.replace("127.0.0.1:4161", str(broker.lookupd.http))
    text = text.replace("127.0.0.1:4150", str(broker.nsqds[0].tcp))
    text = text.replace("start_http_server(9151)", "start_http_server(0)")
    path = tmp_path / "test_program.py"
    path.write_text(text)
    command = [
        sys.executable,
        *(["-m", "pytest", "-q", "-p", "no:cacheprovider"] if program.is_test else []),
        str(path),
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        if program.blocks:
            until(lambda: _has_client(broker), LIMIT, 0.1)
            process.send_signal(signal.SIGINT)
        shown = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert process.returncode == 0, shown


def _has_client(broker: BrokerProcess) -> bool:
    with NsqdHTTPClient.from_url(str(broker.nsqds[0].http)) as client:
        topics = client.stats()["topics"]
    return any(channel["clients"] for topic in topics for channel in topic["channels"])


def test_the_page_of_errors_has_every_exception() -> None:
    page = (DOCS / "errors.md").read_text()
    classes = [each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, Exception)]
    names = {each.__name__ for each in classes} - {"Exception", "NsqError"}  # of aliases, the name itself
    assert {name for name in names if f"`{name}`" not in page} == set()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: make docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "attempt_timeout" in (tmp_path / "site" / "options.html").read_text()


def test_every_row_of_the_broker_page_names_a_test() -> None:
    named = re.findall(r"`(test_\w+)` \|", (DOCS / "broker.md").read_text())
    assert named
    defined = (ROOT / "tests" / "broker" / "test_broker_redesigned_differences.py").read_text()
    assert [name for name in named if f"def {name}(" not in defined] == []
