"""What is installed: stubs, declarations and the marker for type checkers are there, sources of C are not.

Type checkers see every public name through the installed wheel: they find the
mistakes that are planted in a program, and nothing else.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support.compiled import BUILT_TWICE
from support.compiled import NAMES as COMPILED
from support.keywords import STUB, stub
from support.waiting import PROCESS

import nsq_fast

ROOT = Path(__file__).parent.parent
COMPILED_AGAIN = [f"_per_interpreter/{name}" for name in BUILT_TWICE] if sys.version_info >= (3, 12) else []
EXTRA_FILES = {
    "nsq_fast/py.typed",
    "nsq_fast/__init__.pyi",
    "nsq_fast/bench/report.jinja",
    "nsq_fast/bench/method.md",
} | {f"nsq_fast/{name}.{suffix}" for name in COMPILED for suffix in ("pxd", "pyi")}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a copy: a build leaves files behind. Those that earlier ones have left there must not get into it."""
    copy = tmp_path_factory.mktemp("checkout") / "nsq_fast"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__"))
    generated = [copy / f"nsq_fast/{name}.c" for name in COMPILED]
    for each in generated:
        each.unlink(missing_ok=True)
    built = build("sdist", copy, tmp_path_factory.mktemp("sdist"))
    assert not any(each.exists() for each in generated), "an sdist has no C, and need not wait for it"
    return built


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as an installer would: what the sdist lacks is missed here."""
    source = tmp_path_factory.mktemp("source")
    with tarfile.open(sdist) as archive:
        archive.extractall(source, filter="data")
    return build("wheel", next(source.iterdir()), tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment in which pip has installed the wheel, with no compiler and no network.

    The libraries it runs on are those of this environment; what that has of nsq_fast comes behind the wheel's.
    """
    home = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True, timeout=PROCESS)
    python = home / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps", wheel]
    without = {"PATH": str(python.parent), "CC": "/no/compiler", "HOME": str(home)}
    subprocess.run(install, check=True, timeout=PROCESS, env=without)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def build(kind: str, source: Path, target: Path) -> Path:
    """Build without a network: whatever asks a proxy finds none. And without optimisation, which takes
    longer than all else."""
    compiler = target / "cc"
    compiler.write_text(f'#!/bin/sh\nexec {sysconfig.get_config_var("CC")} "$@" -O0\n')
    compiler.chmod(0o755)
    code = f"import setuptools.build_meta as b, sys; b.build_{kind}(sys.argv[1])"
    command = [sys.executable, "-c", code, str(target)]
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:1")
    offline = {**os.environ, **proxies, "PIP_NO_INDEX": "1", "CC": str(compiler)}
    offline.pop("PYTHONPATH", None)  # what is built is what lies in the folder
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=300, env=offline)
    compiler.unlink()
    (built,) = target.iterdir()
    return built


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_sdist_has_every_file_of_the_repository_and_nothing_that_a_build_makes(sdist: Path) -> None:
    """But those of git and of CI: the documentation, the examples and the tests are whole. It builds: see the wheel."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    generated = {f"nsq_fast/{name}.c" for name in COMPILED}
    assert not [name for name in names if name in generated or name.endswith((".so", ".pyc"))]
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("there is no repository")
    kept = {name for name in git(ROOT, "ls-files").splitlines() if not name.startswith(".") and (ROOT / name).exists()}
    assert kept - names == set()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_wheel_runs_the_demo_where_there_is_no_compiler_and_says_its_version(installed: Path, wheel: Path) -> None:
    without = {"PATH": str(installed.parent), "CC": "/no/compiler", "HOME": str(installed.parent)}
    asked: dict[str, Any] = {"env": without, "cwd": installed.parent, "capture_output": True, "text": True}
    code = """
import nsq_fast._frame
from importlib.metadata import version
print(nsq_fast._frame.__file__, nsq_fast.__version__, version("nsq-fast"))
"""
    shown = subprocess.run([installed, "-c", code], check=True, timeout=PROCESS, **asked).stdout
    place, here, recorded = shown.split()
    assert Path(place).is_relative_to(installed.parents[1])
    assert here == recorded == wheel.name.split("-")[1]
    command = [installed.parent / "nsq-fast", "demo", "--messages", "2000", "--json", "--no-traces"]
    demo = subprocess.run(command, timeout=PROCESS, **asked)
    assert demo.returncode == 0, demo.stderr
    assert json.loads(demo.stdout)["lost"] == 0


# The version: version.py

UNRELEASED = "# Changes\n\n## 1.3.0 (unreleased)\n\nNew.\n\n## 1.2.0 (2026-01-02)\n"
RELEASED = UNRELEASED.replace("unreleased", "2026-03-04")


def version_of(tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, tree / "version.py"], capture_output=True, text=True, timeout=PROCESS)


def git(tree: Path, *arguments: str) -> str:
    who = {f"GIT_{kind}_{part}": "a@b" for kind in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")}
    command = ["git", "-c", "init.defaultBranch=main", "-c", "commit.gpgsign=false", "-C", str(tree), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS, env={**os.environ, **who})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def commit(tree: Path, changes: str) -> str:
    (tree / "CHANGELOG.md").write_text(changes)
    git(tree, "add", ".")
    git(tree, "commit", "--quiet", "--allow-empty", "--message", "A change")
    return git(tree, "rev-parse", "--short", "HEAD")


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """The sources without a repository."""
    shutil.copy(ROOT / "version.py", tmp_path)
    (tmp_path / "CHANGELOG.md").write_text(UNRELEASED)
    return tmp_path


@pytest.fixture
def clone(archive: Path) -> Path:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    git(archive, "init", "--quiet")
    return archive


@pytest.mark.parametrize(
    ("commits", "tag", "expected"),
    [
        ([RELEASED], "v1.3.0", "1.3.0"),
        ([RELEASED, None], "v1.3.0", "1.3.0.post0+g{name}.dirty"),
        ([RELEASED.replace("1.3.0", "1.2.9"), UNRELEASED], "v1.2.9", "1.3.0.dev1+g{name}"),
        ([RELEASED, RELEASED], "v1.3.0", "1.3.0.post1+g{name}"),
        ([UNRELEASED, UNRELEASED], None, "1.3.0.dev2+g{name}"),
        ([RELEASED], "v1.4.0", "the tag is v1.4.0, and the newest heading of CHANGELOG.md is 1.3.0"),
        ([UNRELEASED], "v1.3.0", "the tag is v1.3.0, and the newest heading of CHANGELOG.md is 1.3.0"),
    ],
    ids=[
        "at a tag", "changed files at a tag", "between tags", "behind a release", "without tags", "another tag",
        "a tag of what is unreleased",
    ],
)  # fmt: skip
def test_the_version_of_a_clone(clone: Path, commits: list[str | None], tag: str | None, expected: str) -> None:
    """The first commit is tagged."""
    for number, changes in enumerate(commits):
        if changes is None:  # changed, and not committed
            (clone / "CHANGELOG.md").write_text(RELEASED + "more\n")
            continue
        name = commit(clone, changes)
        if tag and number == 0:
            git(clone, "tag", tag)
    found = version_of(clone)
    if expected.startswith("the tag"):
        assert found.returncode == 1
        assert expected in found.stderr
    else:
        assert found.stdout.rstrip() == expected.format(name=name)


def test_an_archive_of_the_sources_and_an_sdist_have_a_version(archive: Path) -> None:
    assert version_of(archive).stdout == "1.3.0.dev0\n"
    (archive / "CHANGELOG.md").write_text(RELEASED)
    assert version_of(archive).stdout == "1.3.0\n"
    (archive / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: nsq-fast\nVersion: 1.2.7\n")
    assert version_of(archive).stdout == "1.2.7\n"


def test_the_changes_of_this_tree_name_a_version() -> None:
    done = version_of(ROOT)
    newest = re.search(r"^## ([0-9.]+) ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert re.match(rf"{re.escape(newest[1])}($|\n|\.dev|\.post)", done.stdout), done.stderr


def test_classifiers_wheels_and_ci_name_the_same_pythons() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    ci = ROOT / ".github" / "workflows" / "ci.yml"
    if not ci.exists():
        pytest.skip("an sdist has no workflows")
    classified = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    (wheels,) = re.findall(r'^build = "(.*)"', project, re.MULTILINE)
    (tested,) = re.findall(r"python: \[(.*)\]", ci.read_text())
    assert wheels.split() == [f"cp{each.replace('.', '')}-*" for each in classified]
    assert re.findall(r"3\.\d+", tested) == classified


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_wheel_has_stubs_and_declarations_and_no_c_sources_or_tests_and_is_small(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        sizes = {each.filename: each.file_size for each in archive.infolist()}
    names = set(sizes)
    assert max(sizes.values()) < 600_000  # with debug information one of the compiled modules had 1.3 MB
    assert names >= EXTRA_FILES | {"nsq_fast/spark/trace/log4j2.properties"}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "nsq_fast").rglob("*.py")}
    assert names >= sources
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"nsq_fast", "pyspark_nsq.py"}
    assert not [name for name in names if name.endswith(".c")]
    compiled = {name.partition(".")[0] for name in names if name.endswith(".so")}
    assert compiled == {f"nsq_fast/{name}" for name in (*COMPILED, *COMPILED_AGAIN)}


NEEDS = {
    "integrations.celery": ("kombu", "pip install 'nsq-fast[celery]'"),
    "integrations.faststream": ("faststream", "pip install 'nsq-fast[faststream]'"),
    "integrations.taskiq": ("taskiq", "pip install 'nsq-fast[taskiq]'"),
    "metrics": ("prometheus_client", "pip install 'nsq-fast[metrics]'"),
    "testing": ("pytest", "pip install pytest"),
}
WITHOUT = """
import importlib, sys
for module, library in zip(sys.argv[1::2], sys.argv[2::2]):
    sys.modules[library] = None
    try:
        importlib.import_module(module)
    except ImportError as error:
        print(error)
"""


def test_a_module_says_which_extra_it_needs() -> None:
    asked = [word for module, (library, _) in NEEDS.items() for word in (f"nsq_fast.{module}", library)]
    command = [sys.executable, "-c", WITHOUT, *asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS, cwd=ROOT)
    said = done.stdout.splitlines()
    assert len(said) == len(NEEDS), done.stdout + done.stderr
    for line, (_, install) in zip(said, NEEDS.values(), strict=True):
        assert install in line


DEV_MODE = """
import gc
from gevent.event import Event
import nsq_fast.aio, nsq_fast.cli, nsq_fast.gnsq, nsq_fast.threads, nsq_fast.worker
from nsq_fast import Consumer, Producer
from nsq_fast.broker import BrokerProcess

seen, all_seen = [], Event()

def handle(consumer, message):
    seen.append(message)
    if len(seen) == 100:
        all_seen.set()

with BrokerProcess() as broker:
    servers = {"lookupd_http_addresses": str(broker.lookupd.http)}
    with Producer(nsqd_tcp_addresses=str(broker.nsqds[0].tcp)) as producer:
        producer.multipublish("topic", [b"body"] * 100)
    consumer = Consumer("topic", "channel", message_handler=handle, **servers)
    consumer.start(block=False)
    assert all_seen.wait(40)
    consumer.close()
del producer, consumer, seen
gc.collect()
"""


def test_development_mode_has_nothing_to_warn_of() -> None:
    """No socket left open, no coroutine that nobody awaited, nothing deprecated: every warning is an error."""
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", DEV_MODE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


# Types

TYPED_PROGRAM = ROOT / "tests" / "data" / "typed_program.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("checker", "arguments", "pattern"),
    [
        ("mypy", ["--strict", "--python-executable"], r":(\d+): error"),
        ("pyright", ["--pythonpath"], r":(\d+):\d+ - error"),
    ],
)
def test_type_checkers_find_mistakes_in_a_program(
    installed: Path, tmp_path: Path, checker: str, arguments: list[str], pattern: str
) -> None:
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed: pip install 'nsq-fast[check]'")
    program = shutil.copy(TYPED_PROGRAM, tmp_path)
    command = [sys.executable, "-m", checker, *arguments, str(installed), str(program)]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    shown = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=240).stdout
    lines = TYPED_PROGRAM.read_text().splitlines()
    planted = {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert {int(number) for number in re.findall(pattern, shown)} == planted, shown


def test_type_checkers_see_every_public_name() -> None:
    tree = ast.parse((ROOT / "nsq_fast" / "__init__.pyi").read_text())
    typed = {alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    typed |= {ast.unparse(node.target) for node in tree.body if isinstance(node, ast.AnnAssign)}
    assert typed == {*nsq_fast.__all__, *nsq_fast._MODULES}


def test_type_checkers_see_the_options_as_they_are_declared() -> None:
    assert STUB.read_text() == stub(), "write it anew: PYTHONPATH=tests python tests/support/keywords.py"


@pytest.mark.slow
def test_pip_understands_what_make_asks_of_it(tmp_path: Path) -> None:
    """Of an environment that is not there yet: what would be installed, asked for help in place of that."""
    make = ["make", "-n", "setup", "demo", "demo-spark", "docs", f"VENV={tmp_path}/new"]
    told = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    asked = {each.split(" && ")[0] for each in re.findall(r"-m pip (.*)", told)}
    assert any("[spark]" in each for each in asked)
    for arguments in asked:
        command = [sys.executable, "-m", "pip", *shlex.split(arguments), "--help"]
        subprocess.run(command, capture_output=True, timeout=PROCESS, check=True)
