"""The rules of the house: who may import whom, checked on the source and in a fresh interpreter.

A folder is a layer, and imports go downwards only. The compiled core knows
`errors` alone; `protocol/` knows the core and the data modules and does no I/O;
`client/` and its faces own sockets and clocks; everything else stands on them.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from support.compiled import NAMES
from support.waiting import PROCESS

from nsq_fast.broker import BrokerProcess

PACKAGE = Path(__file__).parent.parent / "nsq_fast"
SOURCES = sorted(PACKAGE.rglob("*.py"))

DATA = {
    "errors", "config", "header_patterns", "keywords", "names", "log_events", "_lazy", "_record", "_built",
}  # fmt: skip
CORE = {"_codec", "_frame"}
COMPILED_FOR_CLIENT = set(NAMES) - CORE
CLIENT = DATA | CORE | COMPILED_FOR_CLIENT | {"protocol", "client"}
GEVENT_FACE = {"bridge", "columns", "consumer", "producer"}
ON_CLIENT = DATA | CORE | GEVENT_FACE | {"protocol", "client"}
# Layer -> the layers it may import besides itself. The package's __init__ resolves its names lazily.
ALLOWED = {
    "__init__": DATA,
    "__main__": {"cli"},
    "errors": set(),
    "_lazy": set(),
    "_record": set(),
    "_built": set(),
    "names": DATA,
    "config": DATA,
    "header_patterns": set(),
    "log_events": set(),
    "logs": DATA,
    "protocol": DATA | CORE,
    "client": CLIENT,
    "bridge": CLIENT,
    "producer": CLIENT,
    "consumer": CLIENT | {"bridge", "producer"},
    "columns": CLIENT | {"producer"},
    "aio": CLIENT,
    "threads": CLIENT | {"bridge", "consumer", "producer"},
    "broker": ON_CLIENT,
    "gnsq": ON_CLIENT | {"__init__"},
    "integrations": DATA | CORE | {"aio", "threads", "__init__"},
    "metrics": DATA | {"client"},
    "otel": DATA | CORE,
    "page": set(),
    "spark": ON_CLIENT | {"broker", "page", "__init__"},
    "testing": ON_CLIENT | {"broker", "__init__"},
    "bench": ON_CLIENT | {"aio", "threads", "broker", "page", "__init__"},
    "exporter": DATA | {"metrics", "client"},
    "worker": ON_CLIENT | {"aio", "threads", "logs", "metrics", "page", "__init__"},
    "cli": ON_CLIENT | {"broker", "bench", "exporter", "worker", "__init__"},
}
# The one way up: commands that are Spark's, and import it when they run.
READY_ROWS = "bench/_programs/ready_rows.py"
IN_SPARK = {READY_ROWS, "bench/_programs/spark_daemon.py"}  # in processes of Spark's only
MAY_ALSO_IMPORT = {
    "cli/trace_report.py": {"spark"},
    "cli/spark.py": {"spark"},
    READY_ROWS: {"spark"},
    "bench/_programs/use_spark.py": {"spark"},
}
SPARK = {"numpy", "pandas", "pyarrow", "pyspark", "py4j"}
IMPURE = {
    "asyncio", "blinker", "click", "concurrent", "gevent", "greenlet", "h11", "http", "multiprocessing",
    "rich", "select", "selectors", "signal", "socket", "socketserver", "ssl", "subprocess", "threading", "time",
    "urllib",
}  # fmt: skip
PURE_LAYERS = {"protocol", "page", *DATA}


class Import(NamedTuple):
    """One import statement: absolute dotted module, the names taken from it, and whether it runs."""

    module: str
    names: tuple[str, ...]
    line: int
    at_run_time: bool


def layer_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def module_of(path: Path) -> str:
    return ".".join(("nsq_fast", *path.relative_to(PACKAGE).with_suffix("").parts))


@cache
def imports_of(path: Path) -> list[Import]:
    return list(_walk(ast.parse(path.read_text()), module_of(path), True))


def _walk(node: ast.AST, module: str, at_run_time: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        runs = at_run_time and not _is_type_checking(child)
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, (), child.lineno, runs) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            names = tuple(alias.name for alias in child.names)
            yield Import(_absolute(child, module), names, child.lineno, runs)
        else:
            yield from _walk(child, module, runs)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def _absolute(node: ast.ImportFrom, module: str) -> str:
    if not node.level:
        return node.module or ""
    parent = module.split(".")[: -node.level]
    return ".".join([*parent, *([node.module] if node.module else [])])


def layers_imported(item: Import) -> set[str]:
    """The layers of nsq_fast that an import statement reaches into."""
    parts = item.module.split(".")
    if parts[0] != "nsq_fast":
        return set()
    if len(parts) > 1:
        return {parts[1]}
    inner = {path.stem for path in PACKAGE.iterdir()}
    return {name if name in inner else "__init__" for name in item.names if name != "__version__"}


def allowed(path: Path) -> set[str]:
    own = layer_of(path)
    return ALLOWED[own] | {own} | MAY_ALSO_IMPORT.get(path.relative_to(PACKAGE).as_posix(), set())


def wrong(rule: Callable[[Path, Import], object]) -> list[str]:
    """The imports that a rule is true of."""
    return [
        f"{path.relative_to(PACKAGE.parent)}:{item.line} imports {item.module} {' '.join(item.names)}"
        for path in SOURCES
        for item in imports_of(path)
        if rule(path, item)
    ]


def test_imports_go_downwards_only() -> None:
    assert wrong(lambda path, item: layers_imported(item) - allowed(path)) == []


def test_pure_layers_do_no_input_or_output_and_take_their_random_source_as_an_argument() -> None:
    def is_impure(path: Path, item: Import) -> bool:
        is_random = item.module == "random" and item.at_run_time
        return layer_of(path) in PURE_LAYERS and (is_random or item.module.split(".")[0] in IMPURE)

    assert wrong(is_impure) == []


def test_nothing_monkey_patches_and_gevent_is_imported_by_name() -> None:
    def patches(path: Path, item: Import) -> bool:
        if item.module == "gevent":
            return "monkey" in item.names or not item.names
        return item.module == "gevent.monkey" and item.names != ("get_original",)

    assert wrong(patches) == []


def test_the_upper_layers_use_public_names_of_the_others() -> None:
    upper = {"broker", "cli", "gnsq", "integrations", "metrics", "spark", "testing"}

    def is_private(path: Path, item: Import) -> bool:
        names = [name for name in item.names if name.startswith("_") and not name.startswith("__")]
        return layer_of(path) in upper and bool(layers_imported(item) - {layer_of(path)} and {*names} - CORE)

    assert wrong(is_private) == []


def test_the_broker_takes_from_the_client_what_one_module_lists() -> None:
    def is_elsewhere(path: Path, item: Import) -> bool:
        is_of_broker = layer_of(path) == "broker" and path != PACKAGE / "broker" / "client.py"
        return is_of_broker and bool(layers_imported(item) & (ON_CLIENT - DATA))

    assert wrong(is_elsewhere) == []


def test_only_the_sides_of_the_port_know_a_loop() -> None:
    loops = {"asyncio", "gevent", "greenlet", "uvloop", "selectors"}
    sides = {"asyncio_loop.py", "gevent_loop.py", "greenlets.py"}

    def knows(path: Path, item: Import) -> bool:
        return layer_of(path) == "client" and item.module.split(".")[0] in loops and path.name not in sides

    assert wrong(knows) == []


def test_only_the_spark_layer_imports_spark() -> None:
    def imports_spark(path: Path, item: Import) -> bool:
        is_sparks = layer_of(path) == "spark" or path.relative_to(PACKAGE).as_posix() in IN_SPARK
        return not is_sparks and item.module.split(".")[0] in SPARK and item.at_run_time

    assert wrong(imports_spark) == []


@pytest.mark.parametrize("name", sorted(CORE))
def test_the_compiled_core_imports_errors_only(name: str) -> None:
    lines = (PACKAGE / f"{name}.pyx").read_text().splitlines() + (PACKAGE / f"{name}.pxd").read_text().splitlines()
    pattern = re.compile(r"\s*(?:from\s+(\S+)\s+c?import|c?import\s+(\S+))\s*")
    found = {match[1] or match[2] for line in lines if (match := pattern.match(line))}
    stdlib = {"array", "collections", "json", "operator", "struct"}
    foreign = {"cython", "cpython", "libc", "errors", "nsq_fast", "_codec", "_frame", *stdlib}
    assert {module.lstrip(".").split(".")[0] or "nsq_fast" for module in found} <= foreign
    ours = {module for module in found if module.startswith((".", "nsq_fast"))}
    assert {module.lstrip(".").removeprefix("nsq_fast").lstrip(".") for module in ours} <= {"errors", *CORE, ""}


def run_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS, check=False, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules_after(statement: str) -> set[str]:
    """All modules in a fresh interpreter that the statement added, and the packages that they are in."""
    code = f"import sys; before = set(sys.modules)\n{statement}\nprint(*set(sys.modules) - before)"
    added = set(run_python(code).split())
    return added | {name.partition(".")[0] for name in added}


PURE_MODULES = [
    "nsq_fast",
    *(f"nsq_fast.{name}" for name in sorted(CORE | DATA - {"_built", "keywords"})),  # a build's file; a stub
    *(module_of(path) for path in SOURCES if layer_of(path) == "protocol" and path.stem != "__init__"),
]


def test_importing_the_pure_part_never_imports_gevent_or_a_socket() -> None:
    """What all of them load has what each loads."""
    heavy = {"gevent", "greenlet", "socket", "ssl", "_ssl", "asyncio", "h11", "blinker", "click"}
    assert modules_after(f"import {', '.join(PURE_MODULES)}") & heavy == set()


@pytest.mark.parametrize(
    ("statement", "unneeded"),
    [
        # Lookup, HTTP, TLS, compression, names of hosts, signals, threads, iteration, a misspelt option, start
        # positions, patterns of topics, dynamic configuration, filters: what a client may have, and many have not; what
        # only type checkers read; and `dataclasses`, which takes a millisecond to write and compile the methods of a
        # class.
        ("from nsq_fast import Consumer, Producer", {
            "asyncio", "blinker", "cramjam", "dataclasses", "difflib", "email", "gevent.monkey", "gevent.pool",
            "gevent.resolver.thread", "gevent.socket", "gevent.ssl", "h11", "hashlib", "http", "ipaddress", "json",
            "logging.handlers", "lz4", "nsq_fast._snappy_chunks",
            "nsq_fast.client.admin", "nsq_fast.client.dynamic", "nsq_fast.client.http", "nsq_fast.client.layers",
            "nsq_fast.client.lookup", "nsq_fast.header_patterns", "nsq_fast.bridge", "nsq_fast.otel", "opentelemetry",
            "secrets", "snappy", "ssl", "urllib.parse", "urllib.request",
        }),
        ("from nsq_fast import aio, logs, metrics, otel", {"gevent", "greenlet"}),
        ("import nsq_fast.cli.run, nsq_fast.cli.programs", {"gevent", "h11", "rich", "snappy"}),
        ("import nsq_fast.cli, nsq_fast.cli.trace_report, nsq_fast.spark, nsq_fast.bench", SPARK),
    ],
    ids=["clients", "asyncio", "commands that start others", "spark"],
)  # fmt: skip
def test_what_is_not_needed_is_not_imported(statement: str, unneeded: set[str]) -> None:
    assert modules_after(statement) & unneeded == set()


def test_the_package_alone_imports_next_to_nothing_of_its_own() -> None:
    ours = {name for name in modules_after("import nsq_fast") if name.startswith("nsq_fast")}
    always = {"nsq_fast", "nsq_fast._lazy"}
    assert always <= ours <= always | {"nsq_fast._built"}


def test_nothing_of_ours_is_imported_between_the_start_of_a_client_and_its_first_message() -> None:
    """What an import of the clients leaves out is there when one is made: no import holds up messages."""
    code = """
import sys
from nsq_fast import Consumer, Producer
def ours():
    return {name for name in sys.modules if name.startswith("nsq_fast")}
seen = []
def handle(consumer, message):
    seen.append(message.body)
    consumer.close(drain=False)
producer = Producer(lookupd_http_addresses=LOOKUPD)
consumer = Consumer("orders", "c", lookupd_http_addresses=LOOKUPD, message_handler=handle, max_in_flight=1)
made = ours()
with producer:
    producer.publish("orders", b"x")
    consumer.start()
assert seen == [b"x"]
print(*sorted(ours() - made))
"""
    with BrokerProcess() as broker:
        assert broker.lookupd is not None
        found = run_python(code.replace("LOOKUPD", repr(str(broker.lookupd.http))))
    assert found.split() == []


def test_the_library_patches_nothing() -> None:
    code = """
import socket, threading, time
before = socket.socket, threading.Lock, time.sleep
import nsq_fast
for name in nsq_fast.__all__:
    getattr(nsq_fast, name)
from gevent import monkey
assert (socket.socket, threading.Lock, time.sleep) == before
assert not monkey.saved
"""
    run_python(code)
