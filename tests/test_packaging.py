"""What is installed: stubs, declarations and the marker for type checkers are there, sources of C are not."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXTRA_FILES = {f"nsq_fast/{name}" for name in ("py.typed", "_codec.pxd", "_codec.pyi", "_frame.pxd", "_frame.pyi")}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a copy: a build leaves generated files behind."""
    copy = tmp_path_factory.mktemp("checkout") / "nsq_fast"
    shutil.copytree(
        ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "*.c", "*.so", "*.egg-info", "__pycache__")
    )
    return build("sdist", copy, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as an installer would: what the sdist lacks is missed here."""
    source = tmp_path_factory.mktemp("source")
    with tarfile.open(sdist) as archive:
        archive.extractall(source, filter="data")
    return build("wheel", next(source.iterdir()), tmp_path_factory.mktemp("wheel"))


def build(kind: str, source: Path, target: Path) -> Path:
    code = f"import setuptools.build_meta as b, sys; b.build_{kind}(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(target)], cwd=source, check=True, capture_output=True, timeout=300)
    (built,) = target.iterdir()
    return built


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_sdist_has_all_it_takes_to_build_and_test(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= EXTRA_FILES | {"nsq_fast/_codec.pyx", "nsq_fast/_frame.pyx", "setup.py", "LICENSE", "README.md"}
    assert names >= {
        "tests/conftest.py",
        "tests/support/log4j2-quiet.properties",
        "pyspark_nsq.py",
        "tests/data/original.jsonl",
        "tests/test_packaging.py",
        "Makefile",
    }
    assert not [name for name in names if name.endswith((".c", ".so", ".pyc"))]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_wheel_has_stubs_and_declarations_and_no_c_sources_or_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    assert names >= EXTRA_FILES | {"nsq_fast/spark/trace/log4j2.properties"}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "nsq_fast").rglob("*.py")}
    assert names >= sources
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"nsq_fast", "pyspark_nsq.py"}
    assert not [name for name in names if name.endswith(".c")]
    compiled = {name.partition(".")[0] for name in names if name.endswith(".so")}
    assert compiled == {"nsq_fast/_codec", "nsq_fast/_frame"}
    assert "nsq-fast = nsq_fast.cli:main" in entry_points


def test_every_compiled_module_has_its_stub_and_declarations() -> None:
    for source in (ROOT / "nsq_fast").rglob("*.pyx"):
        assert source.with_suffix(".pyi").exists()
        assert source.with_suffix(".pxd").exists()
