"""The pages of the documentation are true: their programs run as they stand, and nothing is left out.

Only the addresses are changed, to those of an embedded broker. Each code block of each page either runs here, or stands
in `ELSEWHERE` with the test that has it, or in `NOT_RUN` with the reason.
"""

from __future__ import annotations

import ast
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
import yaml
from support.kinds import REAL_PARAMETERS
from support.waiting import until

from nsq_fast import Message, NsqdHTTPClient, Producer, errors
from nsq_fast.broker import BrokerProcess
from nsq_fast.cli import main
from nsq_fast.client.give_up import WriteToFolder

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
    "progress",
    "production",
    "logs",
    "tuning",
    "deployment",
    "embedding",
    "gnsq-migration",
    "tracing",
]
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
# Blocks that are no programs, by language.
NO_PROGRAMS = {
    "sh": "commands: their options are checked below",
    "text": "a diagram",
    "json": "output",
    "ini": "a unit of systemd",
    "toml": "a configuration",
    "yaml": "a workflow: tests/test_testing.py runs its command",
    "": "a tree of folders",
}
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

    @property
    def starter(self) -> list[str]:
        return ["-m", "nsq_fast", "run-as-gnsq"] if self.page == "gnsq-migration" else []  # gnsq need not be installed

    def write(self, path: Path, broker: BrokerProcess) -> Path:
        """As it stands, but for addresses."""
        tcp = broker.nsqds[0].tcp
        text = self.text.replace("127.0.0.1:4161", str(broker.lookupd.http)).replace("127.0.0.1:4150", str(tcp))
        text = text.replace('"127.0.0.1", 4150', f'"{tcp.host}", {tcp.port}')
        path.write_text(text.replace("start_http_server(9151)", "start_http_server(0)"))
        return path


class Block(NamedTuple):
    page: str
    language: str
    text: str

    @property
    def place(self) -> tuple[str, str]:
        return self.page, self.text.partition("\n")[0][:100]


def blocks() -> Iterator[Block]:
    """Every code block of every page, and of what stands beside the pages."""
    for path in [*sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("*.md"))]:
        for language, text in re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE):
            page = path.relative_to(DOCS).with_suffix("") if DOCS in path.parents else path.stem
            yield Block(str(page), language, text)


def programs() -> Iterator[Program]:
    for page in PAGES:
        found = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)
        for number, text in enumerate(found):
            if Block(page, "python", text).place not in ELSEWHERE:
                yield Program(page, number, text)


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess() as process:
        with NsqdHTTPClient.from_url(str(process.nsqds[0].http)) as client:
            client.create_topic("greetings")
        yield process


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [each for each in programs() if not each.is_test], ids=lambda each: f"{each.page}-{each.number}"
)
def test_the_programs_of_the_pages_run(program: Program, broker: BrokerProcess, tmp_path: Path) -> None:
    command = [sys.executable, *program.starter, str(program.write(tmp_path / "program.py", broker))]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        if program.blocks:
            until(lambda: _has_client(broker), LIMIT, 0.1)
            process.send_signal(signal.SIGINT)
        shown = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert process.returncode == 0, shown


@pytest.mark.slow
def test_the_tests_of_the_pages_pass(broker: BrokerProcess, tmp_path: Path) -> None:
    """Each block is a file of its own; they run together, since pytest takes longer to start than they take."""
    found = [each for each in programs() if each.is_test]
    files = [each.write(tmp_path / f"test_{each.page}_{each.number}.py", broker) for each in found]
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
    found = list(blocks())
    assert len(found) > 60
    here = [each for each in found if each.language == "python" and each.page in PAGES and each.place not in ELSEWHERE]
    recipes = [each for each in found if each.page.startswith(("cookbook/", "tutorial"))]
    assert [
        each.place for each in recipes if each.language == "python" and not re.match(r"# \w+\.py$", each.place[1])
    ] == []
    others = [each for each in found if each.language in PROGRAMS and each not in [*here, *recipes]]
    unknown = [each.place for each in others if each.place not in ELSEWHERE and each.place not in NOT_RUN]
    assert unknown == [], "run them in this module, or say in ELSEWHERE or NOT_RUN what becomes of them"
    assert {each.language for each in found} - PROGRAMS <= set(NO_PROGRAMS)
    assert set(ELSEWHERE) | set(NOT_RUN) <= {each.place for each in found}, "a block that is named is no more"


@pytest.mark.parametrize("place", ELSEWHERE, ids=lambda place: f"{place[0]}: {place[1]}"[:60])
def test_the_tests_that_have_blocks_of_the_pages_are_there(place: tuple[str, str]) -> None:
    module, _, name = ELSEWHERE[place].partition("::")
    assert f"def {name}" in (ROOT / "tests" / module).read_text()


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


TESTS = Path(__file__).parent
NAMING = {name: (ROOT / name).read_text() for name in ("docs/guarantees.md", "docs/reliability.md", "THREAT_MODEL.md")}
NAMED = {name: sorted(set(re.findall(r"`(test_\w+)::(\w+)`", page))) for name, page in NAMING.items()}


def functions(module: str) -> set[str]:
    """The names of the functions of a test module, wherever it stands."""
    (path,) = TESTS.rglob(f"{module}.py")
    return {
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize("module", sorted({module for named in NAMED.values() for module, _ in named}))
def test_every_test_that_is_named_exists(module: str) -> None:
    names = {name for named in NAMED.values() for where, name in named if where == module}
    assert names - functions(module) == set()


@pytest.mark.parametrize(
    ("page", "least"), [("docs/guarantees.md", 60), ("docs/reliability.md", 10), ("THREAT_MODEL.md", 50)]
)
def test_every_promise_names_what_shows_it(page: str, least: int) -> None:
    assert len(NAMED[page]) > least
    for line in NAMING[page].splitlines() if page != "docs/reliability.md" else ():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        is_promise = line.startswith("|") and cells[-1] not in ("", "shown by", "-") and not set(line) <= set("|-")
        if is_promise and "tested by" not in line:
            assert re.search(r"`test_\w+::\w+`", cells[-1]), line


# The pages on which others decide whether to trust nsq_fast, and where newcomers begin


ENTRIES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "THREAT_MODEL.md", "AGENTS.md", "llms.txt"]
GENERATED = {"options.md", "cli.md", "changes.md"}  # pages of docs/hooks.py


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page, as GitHub and mkdocs make them."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_changes_without_a_release_have_names_that_say_their_kind_and_are_short() -> None:
    for path in sorted((ROOT / "changes").glob("*")):
        if path.name in {"README.md", "template.md.jinja"}:
            continue
        assert re.fullmatch(r"[a-z0-9-]+\.(added|changed|removed|fixed)\.md", path.name), path.name
        text = path.read_text()
        assert re.fullmatch(r"[^#\s-][^\0]*\n", text), f"{path.name}: sentences, without heading or list"
        assert len(text) < 1000, path.name


def workflows() -> list[Path]:
    found = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    if not found:
        pytest.skip("an sdist has no workflows")
    return found


def test_actions_of_others_are_pinned_by_hash_and_nothing_is_allowed_unless_it_is_said() -> None:
    files = [*workflows(), *(ROOT / ".github").glob("actions/*/*.yml"), DOCS / "testing.md"]
    used = [each for path in files for each in re.findall(r"uses: (.*)", path.read_text())]
    assert len(used) > 20
    assert [
        each for each in used if not each.startswith("./") and not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", each)
    ] == []
    for path in workflows():
        assert yaml.safe_load(path.read_text())["permissions"] == {}, path.name


def test_a_workflow_installs_what_it_tests_and_tools_by_hash() -> None:
    """What a release is made with is known to the byte, and is no code that runs while it is installed."""
    steps = [
        step["run"]
        for path in workflows()
        for job in yaml.safe_load(path.read_text())["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]
    installs = re.findall(r"pip install (.*)", "\n".join(steps))
    tools = "--require-hashes --only-binary :all: -r .github/tools.txt"
    assert installs.count(tools) == 2
    assert [each for each in installs if each != tools and not each.startswith(("-e ", "dist/"))] == []


def test_the_lock_of_the_tools_has_hashes_and_names_no_registry() -> None:
    workflows()
    wanted, locked = ((ROOT / ".github" / name).read_text() for name in ("tools.in", "tools.txt"))
    blocks = re.split(r"^(?=[a-z])", locked, flags=re.M)[1:]
    for block in blocks:
        assert re.match(r"[\w.-]+==\S+( ; .*)? \\\n( +--hash=sha256:[0-9a-f]{64}( \\)?\n)+", block), block
    names = {block.partition("==")[0] for block in blocks}
    assert names >= {each.lower() for each in re.findall(r"^([\w-]+)", wanted, re.M)}
    assert "://" not in locked
    (needs,) = re.findall(r"^requires = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.M)
    assert set(re.findall(r'"([^"]+)"', needs)) <= set(wanted.splitlines())


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


def test_what_one_is_told_to_open_is_there() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("### To change X, open Y")[2].partition("\n## ")[0]
    rows = [row.strip("|").split("|") for row in table.splitlines() if row.startswith("| ")][1:]
    assert len(rows) > 20
    for _, code, tests in rows:
        for path in re.findall(r"`([\w/]+(?:\.\w+|/)?)`", code):
            assert (ROOT / "nsq_fast" / path).exists() or (ROOT / path).exists(), path
        for path in re.findall(r"`([\w/]+(?:\.py)?)`", tests):
            assert (ROOT / "tests" / path).exists(), path


def test_the_files_that_the_tour_names_are_there() -> None:
    text = (DOCS / "internals.md").read_text().partition("## A tour")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w/]+\.pyx?)`", text)
    assert len(named) > 15
    assert [name for name in named if not (ROOT / "nsq_fast" / name).exists()] == []


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
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in files}
    bare = re.compile(r"pip install [^`\n]*(?<![\w/-])nsq-fast(?![\w\[-])")
    assert [(name, found[0]) for name, text in texts.items() if (found := bare.search(text))] == []
    assert "no package index" in texts["docs/index.md"]
    assert "nsq-fast[" not in texts["examples/production/Dockerfile"], "an image has nothing installed"
