"""The programs that are measured, and which of them can run here.

``nsq_fast`` and the floors run in this interpreter, and so does our example for tornado, where that is installed;
gnsq, pynsq, ansq and asyncnsq in one that has them (NSQ_FAST_PEER_PYTHON, by default this one); go-nsq is built by Go
from the published module.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from nsq_fast._version import __version__

from .results import SPARK_MODES, Settings

PROGRAMS = Path(__file__).parent / "_programs"
EXAMPLES = Path(__file__).parents[2] / "examples" / "embedding"
OURS = "nsq_fast"
BATCHES = "nsq_fast batches"
COLUMNS = "nsq_fast columns"
SEPARATE = "nsq_fast separate"
KEYED = "nsq_fast keyed"
CORE_FLOOR = "floor: core"
BATCH_FLOOR = "floor: batches"
READY_FLOOR = "floor: ready bytes"
PIPELINED_FLOOR = "floor: pipelined"
ORDERED_FLOOR = "floor: ordered"
DROP_IN = "nsq_fast as gnsq"
ASYNCIO = "nsq_fast aio"
THREADS = "nsq_fast threads"
SPARK = "nsq_fast Spark"
SPARK_FLOOR = "floor: ready rows"
EMBEDDED = "pynsq on nsq_fast"
TORNADO = "tornado example"
_MODULES = {"gnsq": "gnsq", "pynsq": "nsq", "ansq": "ansq", "asyncnsq": "asyncnsq"}
_BUILD_TIMEOUT = 300
_OLDEST_PYSPARK = (4, 2)
_CONSUME, _PUBLISH = frozenset({"consume"}), frozenset({"publish"})
_BOTH = _CONSUME | _PUBLISH
_THERE_AND_BACK = _BOTH | {"roundtrip"}
_EVERYTHING = _THERE_AND_BACK | {"ordered", "idle", "start"}


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """A client: its name, the command line that runs its program, and what it takes part in.

    Attributes:
        can: ``negotiate`` compression, TLS, and an nsqd that does not buffer; measure latency at a ``rate``; ``spread``
            over several connections; ``sleep`` in its handlers; find by lookup the servers of a topic with
            ``partitions``.
        needs_cluster: it takes part in nothing else.
        takes_options: it connects with the options of our clients for TLS and AUTH.
    """

    name: str
    command: tuple[str, ...]
    version: str = ""
    variant: str = ""
    kinds: frozenset[str] = _BOTH
    modes: frozenset[str] = frozenset({"single", "concurrent", "batch"})
    can: frozenset[str] = frozenset({"rate"})
    needs_cluster: bool = False
    takes_options: bool = False

    def takes_part(self, settings: Settings) -> bool:
        """Whether it can do what a scenario asks."""
        if settings.kind not in self.kinds or (settings.mode and settings.mode not in self.modes):
            return False
        return settings.asks <= self.can and (settings.needs_cluster or not self.needs_cluster)


def available(peer_python: str | None = None) -> list[Client]:
    """Every client that can run here, ours first."""
    python = peer_python or os.environ.get("NSQ_FAST_PEER_PYTHON", sys.executable)
    return [*_ours(), *_go(), *_peers(python), *_floors(), *_spark()]


def needed_by(name: str) -> str:
    """What has to be installed for a client that ``available`` does not have."""
    if name.startswith("go-nsq"):
        return "Go, and its module proxy"
    if name == TORNADO:
        return f"a checkout of nsq_fast, and tornado in {sys.executable}: pip install tornado"
    if name in (SPARK, SPARK_FLOOR):
        return "PySpark 4.2 or newer, and Java: pip install 'nsq-fast[spark]'"
    module = "pynsq" if name == EMBEDDED else name
    return f"an interpreter that has {module}: pip install {module}, and --peer-python" if module in _MODULES else ""


def names() -> tuple[str, ...]:
    ours = (OURS, BATCHES, COLUMNS, "nsq_fast linger", SEPARATE, KEYED, ASYNCIO, THREADS, DROP_IN, SPARK)
    floors = (CORE_FLOOR, BATCH_FLOOR, READY_FLOOR, PIPELINED_FLOOR, ORDERED_FLOOR, "floor: Python", SPARK_FLOOR)
    return (*ours, "go-nsq", "go-nsq async", *_MODULES, EMBEDDED, TORNADO, *floors)


def _program(name: str, python: str = sys.executable) -> tuple[str, ...]:
    return python, str(PROGRAMS / f"{name}.py")


def _able(words: str) -> frozenset[str]:
    return frozenset(words.split())


def _variants(
    program: tuple[str, ...], version: str, rows: Iterable[tuple[str, str, frozenset[str], str, str]], **more: Any
) -> Iterator[Client]:
    """Clients of one program. A row: name, variant, kinds, modes ("" for all), what it can."""
    for name, variant, kinds, modes, can in rows:
        given: dict[str, Any] = {"modes": _able(modes)} if modes else {}
        yield Client(
            name=name, command=program, version=version, variant=variant, kinds=kinds, can=_able(can), **given, **more
        )


def _ours() -> Iterator[Client]:
    full = "negotiate rate spread sleep"
    on_gevent = (
        (OURS, "", _EVERYTHING, "", f"{full} partitions"),
        (BATCHES, "batches", _CONSUME, "", "negotiate"),
        (COLUMNS, "columns", _CONSUME, "", "negotiate"),
        ("nsq_fast linger", "linger", _PUBLISH, "concurrent", "negotiate rate"),
        (SEPARATE, "separate", _PUBLISH, "concurrent", "negotiate rate"),
    )
    yield from _variants(_program("use_nsq_fast"), __version__, on_gevent, takes_options=True)
    keyed = ((KEYED, "keyed", _PUBLISH, "concurrent", "partitions"),)
    yield from _variants(_program("use_nsq_fast"), __version__, keyed, takes_options=True, needs_cluster=True)
    aio = ((ASYNCIO, "", _EVERYTHING - {"ordered", "start"}, "", full),)
    yield from _variants((*_program("use_asyncio"), "aio"), __version__, aio, takes_options=True)
    threads = ((THREADS, "", _BOTH | {"idle"}, "", "negotiate spread sleep"),)
    yield from _variants(_program("use_threads"), __version__, threads, takes_options=True)
    if (EXAMPLES / "tornado_reader.py").exists() and find_spec("tornado"):
        tornado = ((TORNADO, "", _CONSUME, "", "rate"),)
        yield from _variants((*_program("use_reader"), "tornado"), __version__, tornado)
    drop_in = (sys.executable, "-m", "nsq_fast", "run-as-gnsq", str(PROGRAMS / "use_gnsq.py"))
    yield from _variants(drop_in, __version__, ((DROP_IN, "", _THERE_AND_BACK, "", "negotiate rate"),))


def _go() -> Iterator[Client]:
    program = build_go_client()
    if program is not None:
        rows = (
            ("go-nsq", "", _EVERYTHING - {"ordered", "start"}, "", "negotiate rate spread sleep"),
            ("go-nsq async", "async", _PUBLISH, "concurrent", "negotiate rate"),
        )
        yield from _variants((str(program),), _go_module_version(), rows)


@cache
def build_go_client() -> Path | None:
    """Build the Go program into the user's cache; None where there is no Go, or it cannot get the module."""
    go = shutil.which("go")
    if go is None:
        return None
    cache_home = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    target = Path(cache_home).expanduser() / "nsq-fast" / "bench" / f"go_nsq-{__version__}"
    command = [go, "build", "-o", str(target), "."]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            command, cwd=PROGRAMS / "go_nsq", capture_output=True, timeout=_BUILD_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return target if done.returncode == 0 else None


def _go_module_version() -> str:
    lines = (PROGRAMS / "go_nsq" / "go.mod").read_text().split()
    return lines[lines.index("github.com/nsqio/go-nsq") + 1]


def _peers(python: str) -> Iterator[Client]:
    for name, version in _peer_versions(python).items():
        program, kinds, can = {
            "gnsq": (_program("use_gnsq", python), _THERE_AND_BACK, "negotiate rate"),
            "pynsq": (_program("use_reader", python), _CONSUME, "rate"),
            "ansq": ((*_program("use_asyncio", python), "ansq"), _BOTH, ""),
            "asyncnsq": ((*_program("use_asyncio", python), "asyncnsq"), _BOTH, ""),
        }[name]
        yield from _variants(program, version, ((name, "", kinds, "", can),))
        if name == "pynsq":  # with our parser
            embedded = ((EMBEDDED, "", _CONSUME, "", "rate"),)
            yield from _variants(_program("use_pynsq_embedded", python), version, embedded)


@cache
def _peer_versions(python: str) -> dict[str, str]:
    """The versions of those peers that an interpreter can import."""
    code = f"""
import importlib, importlib.metadata, json
found = {{}}
for name, module in {_MODULES!r}.items():
    try:
        importlib.import_module(module)
        found[name] = importlib.metadata.version(name)
    except Exception:
        pass
print(json.dumps(found))
"""
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, timeout=60, check=False)
        return msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=dict[str, str])
    except (OSError, subprocess.TimeoutExpired, IndexError, msgspec.DecodeError):
        return {}


def _floors() -> Iterator[Client]:
    rows = (
        (CORE_FLOOR, _THERE_AND_BACK | {"start"}, "single batch", "negotiate rate spread"),
        (BATCH_FLOOR, _CONSUME, "", ""),
        (READY_FLOOR, _PUBLISH, "batch", ""),
        (PIPELINED_FLOOR, _PUBLISH, "concurrent", ""),
        (ORDERED_FLOOR, frozenset({"ordered"}), "", "partitions"),
    )
    variants = ((name, name.removeprefix("floor: "), kinds, modes, can) for name, kinds, modes, can in rows)
    yield from _variants(_program("floor_core"), __version__, variants)
    yield Client(name="floor: Python", command=_program("floor_socket"), kinds=_CONSUME, can=frozenset())


def _spark() -> Iterator[Client]:
    if _has_spark():
        rows = (
            (name, variant, frozenset({"spark"}), " ".join(SPARK_MODES), "")
            for name, variant in ((SPARK, "Spark"), (SPARK_FLOOR, SPARK_FLOOR.removeprefix("floor: ")))
        )
        yield from _variants(_program("use_spark"), __version__, rows)


def _has_spark() -> bool:
    """Whether PySpark is here that tells a source where it goes on, and Java."""
    if not find_spec("pyspark") or not find_spec("pyarrow") or _pyspark_version() < _OLDEST_PYSPARK:
        return False
    home = os.environ.get("JAVA_HOME")
    return shutil.which("java", path=str(Path(home, "bin")) if home else None) is not None


def _pyspark_version() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall("[0-9]+", metadata.version("pyspark"))[:2])


def chosen(clients: Sequence[Client], wanted: Sequence[str]) -> list[Client]:
    """The wanted ones of the clients, in their order; all when nothing is wanted."""
    return [client for client in clients if not wanted or client.name in wanted]
