"""The pages of the documentation are true: their programs run as they stand, and nothing is left out.

Only the addresses are changed, to those of an embedded broker. Each code block of each page either runs here, or stands
in `ELSEWHERE` with the test that has it, or in `NOT_RUN` with the reason.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
from support.kinds import REAL_PARAMETERS
from support.waiting import until

from nsq_fast import Message, NsqdHTTPClient, Producer, errors
from nsq_fast.broker import BrokerProcess
from nsq_fast.cli import main
from nsq_fast.client.give_up import WriteToFolder

TESTS = Path(__file__).parent
ROOT = TESTS.parent
DOCS = ROOT / "docs"
PROGRAMS = {"python", "cython", "sql"}
# Blocks by page and first line.
ELSEWHERE = {
    ("README", "import signal"): "cli/test_cli_commands.py::test_the_consumer_prints_what_the_producer_publishes",
    ("README", "import asyncio"): "cli/test_cli_commands.py::test_the_consumer_prints_what_the_producer",
    ("README", "import os"): "spark/test_spark_docs.py::test_the_programs_bring_orders_into_a_table_and_back",
    ("embedding", 'session = Session(ConnectionConfig(hostname="worker-1", heartbeat_interval=10))'): (
        "protocol/test_protocol_conversations.py::test_the_program_of_the_page"
    ),
    ("embedding", "class Responder:"): (
        "protocol/test_protocol_conversations.py::test_the_responder_of_the_page_has_signals"
    ),
    ("embedding", "from nsq_fast._codec cimport Message, MessageView, new_message, read_layout, read_u64"): (
        "test_docs.py::test_the_declarations_of_embedding_compile"
    ),
    (
        "redesigned",
        "from nsq_fast import Producer",
    ): "servers/test_redesigned_production.py::test_the_programs_publish_consume_and_trace",
    (
        "redesigned",
        "from nsq_fast import Consumer",
    ): "servers/test_redesigned_production.py::test_the_programs_publish_consume_and_trace",
    (
        "redesigned",
        "from nsq_fast import ClusterAdmin",
    ): "servers/test_redesigned_production.py::test_the_programs_publish_consume_and_trace",
    (
        "redesigned",
        "from nsq_fast import trace_log",
    ): "servers/test_redesigned_production.py::test_the_programs_publish_consume_and_trace",
    ("spark-examples", "from pyspark import pipelines"): (
        "spark/test_spark_options.py::test_a_declarative_pipeline_reads_what"
    ),
    ("spark-examples", "import nsq_fast.spark"): (
        "spark/test_spark_docs.py::test_the_programs_bring_orders_into_a_table_and"
    ),
    ("spark-examples", "import json"): (
        "spark/test_spark_driver_kills.py::test_a_driver_that_is_killed_anywhere_loses_and_doubles_nothing"
    ),
    ("spark-operations", "import nsq_fast.spark"): (
        "spark/test_spark_source.py::test_the_figures_of_queries_of_both_kinds"
    ),
    ("spark", "import nsq_fast.spark"): "spark/test_spark_docs.py::test_the_programs_bring_orders_into_a_table_and",
    ("production", "# app.py"): "test_docs.py::test_the_app_of_production_runs",
}
NOT_RUN = {
    ("spark", "CREATE TABLE orders USING nsq OPTIONS (topic 'orders', channel 'spark', lookupd_http_addresses '127."): (
        "tests/spark/test_spark_source.py runs such statements, on topics of its own"
    ),
    (
        "spark-operations",
        "from nsq_fast.spark import trace",
    ): "reads logs that are the reader's: tests/spark/test_spark_trace*.py",
    ("spark-operations", 'records = trace.stream_logs(spark, "/var/log/traces")  # files that appear there'): (
        "shows calls and has parts left out: tests/spark/test_spark_trace.py"
    ),
}
# Languages of blocks that are no programs: commands, whose options are checked below, and how files and output look.
NO_PROGRAMS = {"sh", "text", "json", "ini", "toml", "yaml", ""}
LIMIT = 60.0


class Block(NamedTuple):
    page: str
    language: str
    text: str

    @property
    def place(self) -> tuple[str, str]:
        return self.page, self.text.partition("\n")[0][:100]

    @property
    def is_recipe(self) -> bool:
        """Whether it is a file that tests/test_cookbook.py or tests/examples have."""
        return self.page.startswith(("cookbook/", "tutorial")) and bool(re.match(r"# \w+\.py$", self.place[1]))

    @property
    def is_test(self) -> bool:
        """Whether it is for pytest to run."""
        return "def test_" in self.text

    def write(self, path: Path, broker: BrokerProcess) -> Path:
        """As it stands, but for addresses."""
        tcp = broker.nsqds[0].tcp
        text = self.text.replace("127.0.0.1:4161", str(broker.lookupd.http)).replace("127.0.0.1:4150", str(tcp))
        text = text.replace('"127.0.0.1", 4150', f'"{tcp.host}", {tcp.port}')
        path.write_text(text.replace("start_http_server(9151)", "start_http_server(0)"))
        return path


def blocks() -> Iterator[Block]:
    """Every code block of every page, and of what stands beside the pages."""
    for path in [*sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("*.md"))]:
        for language, text in re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE):
            page = path.relative_to(DOCS).with_suffix("") if DOCS in path.parents else path.stem
            yield Block(str(page), language, text)


def programs(are_tests: bool) -> list[Block]:
    """The blocks of Python that run here: all but those that are named, and recipes."""
    found = [each for each in blocks() if each.language == "python" and each.is_test is are_tests]
    return [each for each in found if not each.is_recipe and each.place not in {**ELSEWHERE, **NOT_RUN}]


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess() as process:
        with NsqdHTTPClient.from_url(str(process.nsqds[0].http)) as client:
            client.create_topic("greetings")
        yield process


@pytest.mark.slow
@pytest.mark.parametrize("program", programs(are_tests=False), ids=lambda each: each.page)
def test_the_programs_of_the_pages_run(program: Block, broker: BrokerProcess, tmp_path: Path) -> None:
    is_of_gnsq = program.page == "gnsq-migration"  # which need not be installed
    starter = ["-m", "nsq_fast", "run-as-gnsq"] if is_of_gnsq else []
    command = [sys.executable, *starter, program.write(tmp_path / "program.py", broker)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        if "consumer.start()\n" in program.text:  # it runs until it gets a signal
            until(lambda: _has_client(broker), LIMIT, 0.1)
            process.send_signal(signal.SIGINT)
        shown = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert process.returncode == 0, shown


@pytest.mark.slow
def test_the_tests_of_the_pages_pass(broker: BrokerProcess, tmp_path: Path) -> None:
    """Each block is a file of its own; they run together, since pytest takes longer to start than they take."""
    found = programs(are_tests=True)
    files = [each.write(tmp_path / f"test_of_page_{number}.py", broker) for number, each in enumerate(found)]
    assert files
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(re.findall(r"^PASSED \S*?(test_\w+\.py)::", done.stdout, re.M)) == {file.name for file in files}


@pytest.mark.slow
def test_the_declarations_of_embedding_compile(tmp_path: Path) -> None:
    pytest.importorskip("Cython")
    (text,) = [each.text for each in blocks() if each.language == "cython"]
    (tmp_path / "outside.pyx").write_text(text)
    command = [sys.executable, "-m", "cython", "-3", "-I", str(ROOT), "outside.pyx"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_app_of_production_runs(broker: BrokerProcess, tmp_path: Path) -> None:
    (app,) = [each.text for each in blocks() if each.place == ("production", "# app.py")]
    (tmp_path / "app.py").write_text(app)
    command = [sys.executable, "-m", "nsq_fast", "run", "app", "--lookupd", str(broker.lookupd.http)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with NsqdHTTPClient.from_url(str(broker.nsqds[0].http)) as client:
        with suppress(errors.HttpError):  # what programs of other pages have left there
            client.delete_topic("orders")
        client.create_topic("orders")
        for channel in ("billing", "search"):  # there before the message: each gets one
            client.create_channel("orders", channel)
    with Producer(nsqd_tcp_addresses=str(broker.nsqds[0].tcp)) as producer:
        producer.publish("orders", b"a book")
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(LIMIT, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        shown = "".join(process.stdout.readline() for _ in range(2))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LIMIT)
    finally:
        process.kill()
        timer.cancel()
    # Two threads that print at once mix what they print, down to the words.
    assert sorted(shown) == sorted("a book\nindexed a book\n")
    assert process.returncode == 0


def test_every_code_block_runs_somewhere_or_says_why_not() -> None:
    named = {**ELSEWHERE, **NOT_RUN}
    unknown = [each.place for each in blocks() if each.language in PROGRAMS - {"python"} and each.place not in named]
    assert unknown == [], "say in ELSEWHERE or NOT_RUN what becomes of them"
    assert {each.language for each in blocks()} <= PROGRAMS | NO_PROGRAMS
    assert set(named) <= {each.place for each in blocks()}, "a block that is named is no more"
    for test in ELSEWHERE.values():
        module, _, name = test.partition("::")
        assert f"def {name}" in (TESTS / module).read_text(), test


def commands() -> Iterator[tuple[str, str]]:
    for each in blocks():
        if each.language == "sh":
            lines = re.sub(r"\\\n\s*", " ", each.text).splitlines()
            ours = (re.split(r"  #| -- ", line)[0] for line in lines if line.startswith("nsq-fast "))
            yield from ((each.page, line) for line in ours)


@pytest.mark.parametrize(("page", "line"), list(commands()))
def test_the_commands_of_the_pages_have_their_options(page: str, line: str) -> None:
    command: click.Command = main
    words = iter(shlex.split(line)[1:])
    for word in words:
        if not isinstance(command, click.Group):
            break
        found = command.get_command(click.Context(command), word)
        assert found is not None, f"{page}: nsq-fast has no command {word}"
        command = found
    options = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
    assert {word for word in shlex.split(line) if word.startswith("-") and len(word) > 1} <= options, page


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
    assert "attempt_<wbr>timeout" in (tmp_path / "site" / "options.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_row_of_the_broker_page_names_a_test_that_runs_on_both_servers() -> None:
    page = (DOCS / "broker.md").read_text()
    tables = [table for table in page.split("\n\n") if table.partition("\n")[0].endswith("| test |")]
    rows = [row for table in tables for row in table.splitlines()[1:] if row.startswith("| ")]
    assert [row for row in rows if not re.search(r"`test_\w+` \|$", row)] == []
    named = re.findall(r"`(test_\w+)`", page)
    assert named
    rooms = (ROOT / "tests" / room for room in ("broker", "servers"))
    texts = {path: path.read_text() for room in rooms for path in room.glob("test_*.py")}
    places = {name: [path for path, text in texts.items() if f"def {name}(" in text] for name in named}
    assert [name for name, paths in places.items() if len(paths) != 1] == []
    files = sorted({str(path) for paths in places.values() for path in paths})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280).stdout
    ids = re.findall(r"::(test_\w+)\[(.+)\]$", listed, re.MULTILINE)
    ran_on = {name: {part for test, id in ids if test == name for part in id.split("-")} for name in named}
    assert {name for name, on in ran_on.items() if "embedded" not in on or not on & REAL_PARAMETERS} == set()


# Pages that name the tests which show what they say


NAMED = re.compile(r"`(?:[\w/]+/)?(test_\w+)(?:\.py)?::(\w+)`")


def test_every_test_that_a_page_names_exists() -> None:
    named = {found for page in [*DOCS.rglob("*.md"), *ROOT.glob("*.md")] for found in NAMED.findall(page.read_text())}
    assert len(named) > 200
    texts = {module: "".join(path.read_text() for path in TESTS.rglob(f"{module}.py")) for module, _ in named}
    assert [
        (module, name) for module, name in named if not re.search(rf"^(async )?def {name}\(", texts[module], re.M)
    ] == []


@pytest.mark.parametrize("page", ["docs/guarantees.md", "THREAT_MODEL.md"])
def test_every_promise_names_what_shows_it(page: str) -> None:
    for line in (ROOT / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        is_promise = line.startswith("|") and cells[-1] not in ("", "shown by", "-") and not set(line) <= set("|-")
        if is_promise and "tested by" not in line:
            assert NAMED.search(cells[-1]), line


# The pages on which others decide whether to trust nsq_fast, and where newcomers begin


ENTRIES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "THREAT_MODEL.md", "AGENTS.md", "llms.txt"]
GENERATED = {"options.md", "cli.md", "changes.md"}  # pages of docs/hooks.py


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page, as GitHub and mkdocs make them."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_a_workflow_installs_what_it_tests_and_tools_by_hash() -> None:
    """What a release is made with is known to the byte, and is no code that runs while it is installed."""
    files = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    if not files:
        pytest.skip("an sdist has no workflows")
    installs = [each for path in files for each in re.findall(r"pip install (.*)", path.read_text())]
    tools = "--require-hashes --only-binary :all: -r .github/tools.txt"
    assert installs.count(tools) == 2
    assert [each for each in installs if each != tools and not each.startswith(("-e ", "dist/"))] == []


def test_changes_without_a_release_have_names_by_which_they_are_found() -> None:
    names = {path.name for path in (ROOT / "changes").glob("*")} - {"README.md", "template.md.jinja"}
    assert [name for name in names if not re.fullmatch(r"[a-z0-9-]+\.(added|changed|removed|fixed)\.md", name)] == []


@pytest.mark.parametrize("name", ENTRIES)
def test_every_link_leads_to_something(name: str) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", (ROOT / name).read_text()):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = ROOT / path if path else ROOT / name
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_in_the_navigation_and_in_llms_txt() -> None:
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert pages | GENERATED == set(re.findall(r"[:-] ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert pages == set(re.findall(r"\(docs/([\w/-]+\.md)\)", (ROOT / "llms.txt").read_text()))


def test_the_overview_has_every_command() -> None:
    table = (DOCS / "overview.md").read_text().partition("## Command line")[2]
    assert set(re.findall(r"`nsq-fast ([\w-]+)", table)) == set(main.list_commands(click.Context(main)))


def test_the_files_that_one_is_told_to_open_are_there() -> None:
    folders = (ROOT / "nsq_fast", TESTS, ROOT, ROOT / "fuzz")
    for page in (ROOT / "CONTRIBUTING.md", DOCS / "internals.md"):
        named = re.findall(r"`([\w/]+\.pyx?)`", page.read_text())
        assert named
        assert [name for name in named if not any((folder / name).exists() for folder in folders)] == [], page


class Stand:
    """As much of a consumer as a give-up policy asks for."""

    topic, channel = "topic", "channel"

    def apart(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


@pytest.mark.parametrize(
    "id", [b"../../../escaped", b"/tmp/escaped\0\0\0\0", b"..\\..\\..\\escaped", b"0123456789abcdef"]
)
def test_an_id_that_looks_like_a_path_stays_in_the_folder_of_what_was_given_up(id: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "some" / "where" / "deep" / "given-up"
    WriteToFolder(folder)(Stand(), Message(1700000000000000000, 6, id, b"body"))  # type: ignore[arg-type]
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.parent for path in written} == {folder}
    assert {path.suffix: path.read_bytes() for path in written}[".body"] == b"body"


@pytest.mark.parametrize(
    "name",
    ["nsq_fast", *(f"nsq_fast.{part}" for part in ("aio", "threads", "otel", "worker", "broker", "spark"))],
)
def test_the_api_page_has_every_public_name(name: str) -> None:
    """Those of gnsq it names, and leaves to the page of gnsq."""
    if name == "nsq_fast.spark":
        pytest.importorskip("pyspark")
    page = (DOCS / "api.md").read_text()
    found: list[object] = []
    entry = r"^::: ([\w.]+)\n(?:    options:\n      members: \[(.*)\]\n)?"
    for identifier, members in re.findall(entry, page, re.MULTILINE):
        if identifier.startswith("nsq_fast.spark") and name != "nsq_fast.spark":
            continue
        described = _resolved(identifier)
        if members:
            found += [getattr(described, member) for member in members.split(", ")]
        else:
            found += vars(described).values() if inspect.ismodule(described) else [described]
    module = importlib.import_module(name)
    for public in set(module.__all__) - {"__version__"}:
        value = getattr(module, public)
        is_of_gnsq = getattr(value, "__module__", "").startswith("nsq_fast.gnsq") and f"`{public}`" in page
        assert is_of_gnsq or any(value is each for each in found), f"{name}.{public}"


def _resolved(identifier: str) -> Any:
    """The module, or what stands in one, of this name."""
    with suppress(ImportError):
        return importlib.import_module(identifier)
    module, _, name = identifier.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_nothing_installs_the_package_from_an_index_which_has_none() -> None:
    """Where it is installed, ``pip install 'nsq-fast[extra]'`` adds the extra: ``docs/index.md`` says so."""
    dockerfile = ROOT / "examples" / "production" / "Dockerfile"
    files = [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md"), dockerfile]
    bare = re.compile(r"pip install [^`\n]*(?<![\w/-])nsq-fast(?![\w\[-])")
    assert [path for path in files if bare.search(path.read_text())] == []
    assert "nsq-fast[" not in dockerfile.read_text(), "an image has nothing installed"
