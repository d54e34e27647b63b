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
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from nsq_fast._version import __version__

from .results import SPARK_MODES, Settings

PROGRAMS = Path(__file__).parent / "programs"
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
_EVERYTHING = frozenset({"consume", "publish", "roundtrip", "ordered", "idle", "start"})
_ONLY_CONSUME = frozenset({"consume"})
_ONLY_PUBLISH = frozenset({"publish"})


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """A client: its name, the command line that runs its program, and what it takes part in.

    Attributes:
        can_negotiate: its program asks for compression, TLS, and an nsqd that does not buffer.
        can_open_loop: it measures latency at a rate.
        can_spread: it holds several connections.
        can_sleep: its handlers may sleep.
        can_look_up: it finds the servers of a topic with partitions; needs_cluster: it takes part in nothing else.
        takes_options: it connects with the options of our clients for TLS and AUTH.
    """

    name: str
    command: tuple[str, ...]
    version: str = ""
    variant: str = ""
    kinds: frozenset[str] = frozenset({"consume", "publish"})
    modes: frozenset[str] = frozenset({"single", "concurrent", "batch"})
    can_negotiate: bool = False
    can_open_loop: bool = True
    can_spread: bool = False
    can_sleep: bool = False
    can_look_up: bool = False
    needs_cluster: bool = False
    takes_options: bool = False

    def takes_part(self, settings: Settings) -> bool:
        """Whether it can do what a scenario asks."""
        if settings.kind not in self.kinds or (settings.mode and settings.mode not in self.modes):
            return False
        if (settings.compression or settings.tls or settings.unbuffered) and not self.can_negotiate:
            return False
        if (settings.rate or settings.rate_share) and not self.can_open_loop:
            return False
        if not (self.can_look_up if settings.needs_cluster else not self.needs_cluster):
            return False
        if settings.handler_sleep and not self.can_sleep:
            return False
        return self.can_spread or settings.connections == 1


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
    """The names that clients can have."""
    ours = (OURS, BATCHES, COLUMNS, "nsq_fast linger", SEPARATE, KEYED, ASYNCIO, THREADS, DROP_IN, SPARK)
    floors = (CORE_FLOOR, BATCH_FLOOR, READY_FLOOR, PIPELINED_FLOOR, ORDERED_FLOOR, "floor: Python", SPARK_FLOOR)
    return (*ours, "go-nsq", "go-nsq async", *_MODULES, EMBEDDED, TORNADO, *floors)


def _program(name: str, python: str = sys.executable) -> tuple[str, ...]:
    return python, str(PROGRAMS / f"{name}.py")


_PEER_PROGRAMS: dict[str, Callable[[str], tuple[str, ...]]] = {
    "gnsq": lambda python: _program("use_gnsq", python),
    "pynsq": lambda python: _program("use_reader", python),
    "ansq": lambda python: (*_program("use_asyncio_peer", python), "ansq"),
    "asyncnsq": lambda python: (*_program("use_asyncio_peer", python), "asyncnsq"),
}


def _ours() -> Iterator[Client]:
    yield from _ours_on_gevent()
    able: dict[str, Any] = {"can_negotiate": True, "takes_options": True, "can_spread": True, "can_sleep": True}
    asyncio_kinds = _EVERYTHING - {"ordered", "start"}
    program = _program("use_aio")
    yield Client(name=ASYNCIO, command=program, version=__version__, kinds=asyncio_kinds, **able)
    yield Client(
        name=THREADS,
        command=_program("use_threads"),
        version=__version__,
        kinds=frozenset({"consume", "publish", "idle"}),
        can_open_loop=False,
        **able,
    )
    if (EXAMPLES / "tornado_reader.py").exists() and find_spec("tornado"):
        command = (*_program("use_reader"), "tornado")
        yield Client(name=TORNADO, command=command, version=__version__, kinds=_ONLY_CONSUME)
    if _has_drop_in():
        command = (sys.executable, "-m", "nsq_fast", "run-as-gnsq", str(PROGRAMS / "use_gnsq.py"))
        kinds = frozenset({"consume", "publish", "roundtrip"})
        yield Client(name=DROP_IN, command=command, version=__version__, kinds=kinds, can_negotiate=True)


def _ours_on_gevent() -> Iterator[Client]:
    program = _program("use_nsq_fast")

    def variant(name: str, kinds: frozenset[str], **more: Any) -> Client:
        return Client(
            name=name,
            command=program,
            version=__version__,
            variant=name.rpartition(" ")[2],
            kinds=kinds,
            takes_options=True,
            **more,
        )

    yield Client(
        name=OURS,
        command=program,
        version=__version__,
        kinds=_EVERYTHING,
        can_negotiate=True,
        can_spread=True,
        can_sleep=True,
        can_look_up=True,
        takes_options=True,
    )
    yield variant(BATCHES, _ONLY_CONSUME, can_open_loop=False, can_negotiate=True)
    yield variant(COLUMNS, _ONLY_CONSUME, can_open_loop=False, can_negotiate=True)
    concurrent = frozenset({"concurrent"})
    yield variant("nsq_fast linger", _ONLY_PUBLISH, modes=concurrent, can_negotiate=True)
    yield variant(SEPARATE, _ONLY_PUBLISH, modes=concurrent, can_negotiate=True)
    yield variant(KEYED, _ONLY_PUBLISH, modes=concurrent, can_look_up=True, needs_cluster=True)


def _has_drop_in() -> bool:
    return (Path(__file__).parents[1] / "gnsq" / "__init__.py").exists()


def _go() -> Iterator[Client]:
    program = build_go_client()
    if program is None:
        return
    version = _go_module_version()
    yield Client(
        name="go-nsq",
        command=(str(program),),
        version=version,
        kinds=_EVERYTHING - {"ordered", "start"},
        can_negotiate=True,
        can_spread=True,
        can_sleep=True,
    )
    yield Client(
        name="go-nsq async",
        command=(str(program),),
        version=version,
        variant="async",
        kinds=frozenset({"publish"}),
        modes=frozenset({"concurrent"}),
        can_negotiate=True,
    )


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
    versions = _peer_versions(python)
    for name in versions:
        kinds = frozenset({"consume"}) if name == "pynsq" else frozenset({"consume", "publish"})
        if name == "gnsq":
            kinds |= {"roundtrip"}
        yield Client(
            name=name,
            command=_PEER_PROGRAMS[name](python),
            version=versions[name],
            kinds=kinds,
            can_negotiate=name == "gnsq",
            can_open_loop=name in ("gnsq", "pynsq"),
        )
    if "pynsq" in versions:  # with our parser
        program = _program("use_pynsq_embedded", python)
        yield Client(name=EMBEDDED, command=program, version=versions["pynsq"], kinds=_ONLY_CONSUME)


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
    def floor(name: str, kinds: frozenset[str], **more: Any) -> Client:
        return Client(
            name=name,
            command=_program("floor_core"),
            version=__version__,
            variant=name.removeprefix("floor: "),
            kinds=kinds,
            **more,
        )

    kinds = frozenset({"consume", "publish", "roundtrip", "start"})
    modes = frozenset({"single", "batch"})
    yield floor(CORE_FLOOR, kinds, modes=modes, can_spread=True, can_negotiate=True)
    yield floor(BATCH_FLOOR, _ONLY_CONSUME, can_open_loop=False)
    yield floor(READY_FLOOR, _ONLY_PUBLISH, modes=frozenset({"batch"}), can_open_loop=False)
    yield floor(PIPELINED_FLOOR, _ONLY_PUBLISH, modes=frozenset({"concurrent"}), can_open_loop=False)
    yield floor(ORDERED_FLOOR, frozenset({"ordered"}), can_look_up=True, can_open_loop=False)
    yield Client(name="floor: Python", command=_program("floor_socket"), kinds=_ONLY_CONSUME, can_open_loop=False)


def _spark() -> Iterator[Client]:
    if not _has_spark():
        return
    able: dict[str, Any] = {
        "command": _program("use_spark"),
        "version": __version__,
        "kinds": frozenset({"spark"}),
        "modes": frozenset(SPARK_MODES),
        "can_open_loop": False,
    }
    yield Client(name=SPARK, variant="Spark", **able)
    yield Client(name=SPARK_FLOOR, variant=SPARK_FLOOR.removeprefix("floor: "), **able)


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
