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
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import msgspec

from nsq_fast import __version__

from .results import SPARK_MODES, Settings

PROGRAMS = Path(__file__).parent / "_programs"
EXAMPLES = Path(__file__).parents[2] / "examples" / "embedding"
OURS = "nsq_fast"
KEYED = "nsq_fast keyed"
CORE_FLOOR = "floor: core"
DROP_IN = "nsq_fast as gnsq"
SPARK = "nsq_fast Spark"
SPARK_FLOOR = "floor: ready rows"
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
            ``partitions``; connect with the ``options`` of our clients for TLS and AUTH.
        needs_cluster: it takes part in nothing else.
    """

    name: str
    command: tuple[str, ...]
    version: str = ""
    variant: str = ""
    kinds: frozenset[str] = _BOTH
    modes: frozenset[str] = frozenset({"single", "concurrent", "batch"})
    can: frozenset[str] = frozenset({"rate"})
    needs_cluster: bool = False

    @property
    def takes_options(self) -> bool:
        return "options" in self.can

    def takes_part(self, settings: Settings) -> bool:
        """Whether it can do what a scenario asks."""
        if settings.kind not in self.kinds or (settings.mode and settings.mode not in self.modes):
            return False
        return settings.asks <= self.can and (settings.needs_cluster or not self.needs_cluster)


_ALL = "single concurrent batch"
_CLIENTS = (
    # name, where it runs, its program, variant, kinds, modes, what it can
    (OURS, "here", "use_nsq_fast", "", _EVERYTHING, _ALL, "negotiate rate spread sleep partitions options"),
    ("nsq_fast batches", "here", "use_nsq_fast", "batches", _CONSUME, _ALL, "negotiate options"),
    ("nsq_fast columns", "here", "use_nsq_fast", "columns", _CONSUME, _ALL, "negotiate options"),
    ("nsq_fast linger", "here", "use_nsq_fast", "linger", _PUBLISH, "concurrent", "negotiate rate options"),
    ("nsq_fast separate", "here", "use_nsq_fast", "separate", _PUBLISH, "concurrent", "negotiate rate options"),
    (KEYED, "here", "use_nsq_fast", "keyed", _PUBLISH, "concurrent", "partitions options"),
    ("nsq_fast aio", "here", "use_asyncio aio", "", _EVERYTHING - {"ordered", "start"}, _ALL,
     "negotiate rate spread sleep options"),
    ("nsq_fast threads", "here", "use_nsq_fast threads", "", _BOTH | {"idle"}, _ALL, "negotiate spread sleep options"),
    ("tornado example", "tornado", "use_reader tornado", "", _CONSUME, _ALL, "rate"),
    (DROP_IN, "here", "use_gnsq", "", _THERE_AND_BACK, _ALL, "negotiate rate"),
    ("go-nsq", "go", "", "", _EVERYTHING - {"ordered", "start"}, _ALL, "negotiate rate spread sleep"),
    ("go-nsq async", "go", "", "async", _PUBLISH, "concurrent", "negotiate rate"),
    ("gnsq", "gnsq", "use_gnsq", "", _THERE_AND_BACK, _ALL, "negotiate rate"),
    ("pynsq", "pynsq", "use_reader", "", _CONSUME, _ALL, "rate"),
    ("pynsq on nsq_fast", "pynsq", "use_pynsq_embedded", "", _CONSUME, _ALL, "rate"),  # with our parser
    ("ansq", "ansq", "use_asyncio ansq", "", _BOTH, _ALL, ""),
    ("asyncnsq", "asyncnsq", "use_asyncio asyncnsq", "", _BOTH, _ALL, ""),
    (CORE_FLOOR, "here", "floor_core", "core", _THERE_AND_BACK | {"start"}, "single batch", "negotiate rate spread"),
    ("floor: batches", "here", "floor_core", "batches", _CONSUME, _ALL, ""),
    ("floor: ready bytes", "here", "floor_core", "ready bytes", _PUBLISH, "batch", ""),
    ("floor: pipelined", "here", "floor_core", "pipelined", _PUBLISH, "concurrent", ""),
    ("floor: ordered", "here", "floor_core", "ordered", frozenset({"ordered"}), _ALL, "partitions"),
    ("floor: Python", "here", "floor_core", "Python", _CONSUME, _ALL, ""),
    (SPARK, "spark", "use_spark", "Spark", frozenset({"spark"}), " ".join(SPARK_MODES), ""),
    (SPARK_FLOOR, "spark", "use_spark", "ready rows", frozenset({"spark"}), " ".join(SPARK_MODES), ""),
)  # fmt: skip
_MODULES = {"gnsq": "gnsq", "pynsq": "nsq", "ansq": "ansq", "asyncnsq": "asyncnsq"}


def names() -> tuple[str, ...]:
    return tuple(name for name, *_ in _CLIENTS)


def available(peer_python: str | None = None) -> list[Client]:
    """Every client that can run here, ours first."""
    python = peer_python or os.environ.get("NSQ_FAST_PEER_PYTHON", sys.executable)
    peers, go = _peer_versions(python), build_go_client()
    versions = {"here": __version__, **peers}
    if (EXAMPLES / "tornado_reader.py").exists() and find_spec("tornado"):
        versions["tornado"] = __version__
    if _has_spark():
        versions["spark"] = __version__
    if go is not None:
        versions["go"] = _go_module_version()
    found = []
    for name, where, program, variant, kinds, modes, can in _CLIENTS:
        if where in versions:
            file, *arguments = program.split() or [""]
            command = (python if where in peers else sys.executable, str(PROGRAMS / f"{file}.py"), *arguments)
            if name == DROP_IN:
                command = (sys.executable, "-m", "nsq_fast", "run-as-gnsq", *command[1:])
            client = Client(
                name=name,
                command=(str(go),) if where == "go" else command,
                version=versions[where],
                variant=variant,
                kinds=kinds,
                modes=frozenset(modes.split()),
                can=frozenset(can.split()),
                needs_cluster=name == KEYED,
            )
            found.append(client)
    return found


def needed_by(name: str) -> str:
    """What has to be installed for a client that ``available`` does not have."""
    module = next(where for client, where, *_ in _CLIENTS if client == name)
    return {
        "go": "Go, and its module proxy",
        "tornado": f"a checkout of nsq_fast, and tornado in {sys.executable}: pip install tornado",
        "spark": "PySpark 4.2 or newer, and Java: pip install 'nsq-fast[spark]'",
    }.get(module, f"an interpreter that has {module}: pip install {module}, and --peer-python")


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
