"""The rules of the house: who may import whom, checked on the source and in a fresh interpreter.

A folder is a layer, and imports go downwards only. The compiled core knows
`errors` alone; `protocol/` knows the core and the data modules and does no I/O;
`client/` and its faces own sockets and clocks; everything above uses the names
that `runtime.py` lists.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from support.compiled import NAMES
from support.sources import parsed
from support.waiting import PROCESS

from nsq_fast import runtime
from nsq_fast.broker import BrokerProcess, client

PACKAGE = Path(__file__).parent.parent / "nsq_fast"
SOURCES = sorted(PACKAGE.rglob("*.py"))

DATA = {
    "errors", "config", "config_source", "header_patterns", "keywords", "names", "log_events", "printable", "_lazy",
    "_per_interpreter", "_record", "_version", "_built",
}  # fmt: skip
CORE = {"_codec", "_frame", "_publish"}
COMPILED_FOR_CLIENT = set(NAMES) - CORE
CLIENT = DATA | CORE | COMPILED_FOR_CLIENT | {"protocol", "client"}
GEVENT_FACE = {"bridge", "columns", "consumer", "handler_threads", "producer"}
# Layer -> the layers it may import besides itself. The package's __init__ resolves its names lazily.
ALLOWED = {
    "__init__": DATA,
    "__main__": {"cli"},
    "errors": {"printable"},
    "printable": set(),
    "_lazy": {"_per_interpreter"},
    "_record": set(),
    "_per_interpreter": set(),
    "_version": {"_built"},
    "_built": set(),
    "names": DATA,
    "config": DATA,
    "header_patterns": set(),
    "log_events": set(),
    "logs": DATA,
    "config_source": set(),
    "protocol": DATA | CORE,
    "client": CLIENT,
    "bridge": CLIENT,
    "handler_threads": CLIENT,
    "producer": CLIENT,
    "consumer": CLIENT | {"handler_threads", "producer"},
    "columns": CLIENT | {"producer"},
    "aio": CLIENT,
    "threads": CLIENT | {"bridge", "consumer", "handler_threads", "producer"},
    "runtime": CLIENT | GEVENT_FACE,
    "broker": DATA | CORE | {"protocol", "runtime"},
    "gnsq": DATA | CORE | {"protocol", "runtime", "__init__"},
    "integrations": DATA | CORE | {"aio", "threads", "__init__"},
    "metrics": DATA | {"runtime"},
    "otel": DATA | CORE,
    "page": set(),
    "spark": DATA | CORE | {"protocol", "runtime", "broker", "page", "__init__"},
    "testing": DATA | CORE | {"protocol", "runtime", "broker", "__init__"},
    "bench": DATA | CORE | {"aio", "threads", "protocol", "runtime", "broker", "page", "__init__"},
    "exporter": DATA | {"runtime"},
    "worker": DATA | CORE | {"aio", "threads", "runtime", "logs", "metrics", "__init__"},
    "cli": DATA | CORE | {"protocol", "runtime", "broker", "bench", "exporter", "worker", "__init__"},
}
# The one way up: commands that are Spark's, and import it when they run.
READY_ROWS = "bench/programs/ready_rows.py"  # a format of Spark, imported in processes of Spark's only
MAY_ALSO_IMPORT = {
    "cli/trace_report.py": {"spark"},
    "cli/journal.py": {"spark"},
    "cli/lag.py": {"spark"},
    READY_ROWS: {"spark"},
    "bench/programs/use_spark.py": {"spark"},
}
SPARK = {"numpy", "pandas", "pyarrow", "pyspark", "py4j"}
IMPURE = {
    "asyncio", "blinker", "click", "concurrent", "gevent", "greenlet", "h11", "http", "multiprocessing",
    "rich", "select", "selectors", "signal", "socket", "socketserver", "ssl", "subprocess", "threading", "time",
    "urllib",
}  # fmt: skip
ABOVE_RUNTIME = {
    "broker",
    "gnsq",
    "integrations",
    "metrics",
    "otel",
    "spark",
    "testing",
    "bench",
    "exporter",
    "worker",
    "cli",
}
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


def module_of(path: Path, package: Path = PACKAGE) -> str:
    parts = ("nsq_fast", *path.relative_to(package).with_suffix("").parts)
    return ".".join(parts)


def imports_of(path: Path, package: Path = PACKAGE) -> list[Import]:
    return list(_walk(parsed(path), module_of(path, package), True))


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
    return {name if name in inner else "__init__" for name in item.names} or {"__init__"}


def allowed(path: Path) -> set[str]:
    own = layer_of(path)
    return ALLOWED[own] | {own} | MAY_ALSO_IMPORT.get(path.relative_to(PACKAGE).as_posix(), set())


def imported_modules(package: Path = PACKAGE) -> dict[str, set[str]]:
    """Each module of the package, by its dotted name below it -> the modules of the package that it imports.

    Every import statement counts that runs, those inside functions, too; a type may be that of a module above.
    """
    named = {name_in(path, package): path for path in sorted(package.rglob("*.py"))}
    return {
        name: {target for item in imports_of(path, package) if item.at_run_time for target in _targets(item, named)}
        - {name}
        for name, path in named.items()
    }


def name_in(path: Path, package: Path) -> str:
    return module_of(path, package).removeprefix("nsq_fast.").removesuffix(".__init__")


def _targets(item: Import, modules: Collection[str]) -> Iterator[str]:
    """The modules that a statement imports: `from package import name` takes a module, where one has that name."""
    if item.module.partition(".")[0] != "nsq_fast":
        return
    for name in item.names or ("",):
        whole = f"{item.module}.{name}".removeprefix("nsq_fast.")
        target = whole if whole in modules else item.module.removeprefix("nsq_fast").removeprefix(".") or "__init__"
        if target in modules:
            yield target


def circles(graph: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """The groups of two modules or more of which each reaches each other one."""
    reach = {name: reachable(graph, name) for name in graph}
    return {frozenset(other for other in reach[name] if name in reach[other]) for name in graph if name in reach[name]}


def reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """What imports lead to from a module; with the module itself where they lead back to it."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting.extend(new)
    return found


def shown(path: Path, item: Import) -> str:
    return f"{path.relative_to(PACKAGE.parent)}:{item.line} imports {item.module} {' '.join(item.names)}".rstrip()


def test_every_source_belongs_to_a_known_layer() -> None:
    assert {layer_of(path) for path in SOURCES} <= set(ALLOWED)


def test_imports_go_downwards_only() -> None:
    wrong = [
        shown(path, item) for path in SOURCES for item in imports_of(path) if layers_imported(item) - allowed(path)
    ]
    assert wrong == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert sorted(map(sorted, circles(imported_modules()))) == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("from .b import Name", "from .a import other"),
        ("from . import b", "from nsq_fast import a"),
        ("def later():\n    import nsq_fast.b", "from .a import x"),
    ],
)
def test_a_circle_is_seen_through_every_form_of_import(tmp_path: Path, first: str, second: str) -> None:
    for name, text in {"a": first, "b": second, "c": "from . import a, b"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert circles(imported_modules(tmp_path)) == {frozenset({"a", "b"})}


def test_pure_layers_do_no_input_or_output() -> None:
    wrong = [
        shown(path, item)
        for path in SOURCES
        if layer_of(path) in PURE_LAYERS
        for item in imports_of(path)
        if item.module.split(".")[0] in IMPURE
    ]
    assert wrong == []


def test_pure_layers_take_their_random_source_as_an_argument() -> None:
    wrong = [
        shown(path, item)
        for path in SOURCES
        if layer_of(path) in PURE_LAYERS
        for item in imports_of(path)
        if item.module == "random" and item.at_run_time
    ]
    assert wrong == []


def test_nothing_monkey_patches_and_gevent_is_imported_by_name() -> None:
    wrong = [
        shown(path, item)
        for path in SOURCES
        for item in imports_of(path)
        if (item.module == "gevent.monkey" and item.names != ("get_original",))
        or (item.module == "gevent" and ("monkey" in item.names or not item.names))
    ]
    assert wrong == []


def test_the_upper_layers_use_public_names_of_the_others() -> None:
    wrong = [
        shown(path, item)
        for path in SOURCES
        if layer_of(path) in {"broker", "cli", "gnsq", "integrations", "metrics", "spark", "testing"}
        for item in imports_of(path)
        if layers_imported(item) - {layer_of(path)}
        and any(name.startswith("_") and not name.startswith("__") and name not in CORE for name in item.names)
    ]
    assert wrong == []


def test_the_upper_layers_use_what_is_listed_for_them() -> None:
    """They import from `nsq_fast.runtime`, whose names are the list of what they may use."""
    wrong = [
        shown(path, item)
        for path in SOURCES
        if layer_of(path) in ABOVE_RUNTIME
        for item in imports_of(path)
        if layers_imported(item) & (GEVENT_FACE | {"client"})
    ]
    assert wrong == []


def test_the_list_for_the_upper_layers_holds_what_is_used() -> None:
    used = {
        name
        for path in SOURCES
        if layer_of(path) in ABOVE_RUNTIME
        for item in imports_of(path)
        if item.module == "nsq_fast.runtime"
        for name in item.names
    }
    assert used == set(runtime.__all__)


def test_the_broker_takes_from_the_client_what_one_module_lists() -> None:
    wrong = [
        shown(path, item)
        for path in SOURCES
        if layer_of(path) == "broker" and path != PACKAGE / "broker" / "client.py"
        for item in imports_of(path)
        if layers_imported(item) & (CORE | {"protocol", "runtime"})
    ]
    assert wrong == []


def test_the_list_of_what_the_broker_takes_holds_what_is_used() -> None:
    items = [item for path in SOURCES if layer_of(path) == "broker" for item in imports_of(path)]
    used = {name for item in items if item.module == "nsq_fast.broker.client" for name in item.names}
    assert used == set(client.__all__)


def test_only_the_sides_of_the_port_know_a_loop() -> None:
    loops = {"asyncio", "gevent", "greenlet", "uvloop", "selectors"}
    knowing = {
        path.name
        for path in SOURCES
        if layer_of(path) == "client"
        for item in imports_of(path)
        if item.module.split(".")[0] in loops
    }
    assert knowing == {"asyncio_loop.py", "gevent_loop.py", "greenlets.py"}


@pytest.mark.parametrize("package", ["aio", "runtime", "broker", "spark", "threads", "worker"])
def test_lazy_names_are_the_same_for_type_checkers_as_at_run_time(package: str) -> None:
    path = PACKAGE / f"{package}.py" if package == "runtime" else PACKAGE / package / "__init__.py"
    typed = {
        name: item.module.removeprefix(f"nsq_fast.{package}.").removeprefix("nsq_fast")
        for item in imports_of(path)
        if not item.at_run_time
        for name in item.names
    }
    assert typed == importlib.import_module(f"nsq_fast.{package}")._HOME


def test_every_name_of_the_interface_is_there() -> None:
    assert [name for name in runtime.__all__ if not hasattr(runtime, name)] == []


def test_only_the_spark_layer_imports_spark() -> None:
    wrong = [
        shown(path, item)
        for path in SOURCES
        if layer_of(path) != "spark" and path.relative_to(PACKAGE).as_posix() != READY_ROWS
        for item in imports_of(path)
        if item.module.split(".")[0] in SPARK and item.at_run_time
    ]
    assert wrong == []


@pytest.mark.parametrize("module", ["nsq_fast.cli", "nsq_fast.cli.trace_report", "nsq_fast.spark", "nsq_fast.bench"])
def test_spark_is_loaded_only_by_those_who_use_it(module: str) -> None:
    assert loaded_after(f"import {module}") & SPARK == set()


def test_the_lower_layers_know_no_option_of_spark() -> None:
    options = re.findall(r'"([a-z]+[A-Z]\w+)"', (PACKAGE / "spark" / "options.py").read_text())
    assert len(options) > 10
    wrong = [
        f"{path.relative_to(PACKAGE.parent)} knows {name}"
        for path in SOURCES
        if layer_of(path) in {"protocol", "client", "broker", *DATA, *GEVENT_FACE}
        for name in set(options)
        if re.search(rf"\b{name}\b", path.read_text())
    ]
    assert wrong == []


def test_public_exceptions_live_in_errors() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE.parent)}:{node.lineno} {node.name}"
        for path in SOURCES
        if layer_of(path) in {"protocol", "client", "config", "names", *GEVENT_FACE}
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        if any(re.search(r"(Error|Exception|Lost|Failed|Invalid)$", ast.unparse(base)) for base in node.bases)
    ]
    assert wrong == []


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


def loaded_after(statement: str) -> set[str]:
    """The top-level modules in a fresh interpreter that the statement added."""
    return {name.partition(".")[0] for name in modules_after(statement)}


def modules_after(statement: str) -> set[str]:
    """All modules in a fresh interpreter that the statement added."""
    code = f"import sys; before = set(sys.modules)\n{statement}\nprint(*sorted(set(sys.modules) - before))"
    return set(run_python(code).split())


PURE_MODULES = [
    "nsq_fast",
    "nsq_fast._codec",
    "nsq_fast._frame",
    # The build writes _built, and keywords is a stub.
    *(f"nsq_fast.{name}" for name in sorted(DATA - {"_built", "keywords"})),
    *(module_of(path) for path in SOURCES if layer_of(path) == "protocol" and path.stem != "__init__"),
]


@pytest.mark.parametrize("module", PURE_MODULES)
def test_importing_the_pure_part_never_imports_gevent_or_a_socket(module: str) -> None:
    heavy = {
        "gevent",
        "greenlet",
        "socket",
        "ssl",
        "_ssl",
        "asyncio",
        "h11",
        "blinker",
        "click",
    }
    assert loaded_after(f"import {module}") & heavy == set()


def test_the_package_alone_imports_next_to_nothing_of_its_own() -> None:
    ours = {name for name in modules_after("import nsq_fast") if name.startswith("nsq_fast")}
    always = {"nsq_fast", "nsq_fast._lazy", "nsq_fast._per_interpreter", "nsq_fast._version"}
    assert always <= ours <= always | {"nsq_fast._built"}


# Lookup, HTTP, TLS, compression, signals, threads, iteration, a misspelt option, start positions, patterns of
# topics, dynamic configuration, filters: what a client may have, and many have not; what only type checkers read; and
# `dataclasses`, which takes a millisecond to write and compile the methods of a class (`nsq_fast/_record.py`).
LOADED_WHEN_USED = {
    "asyncio", "blinker", "cramjam", "dataclasses", "difflib", "email", "gevent.pool", "gevent.ssl", "h11", "hashlib",
    "http", "ipaddress", "json", "logging.handlers", "lz4", "nsq_fast._snappy_chunks", "nsq_fast.client.admin",
    "nsq_fast.client.dynamic", "nsq_fast.client.http", "nsq_fast.client.layers", "nsq_fast.client.lookup",
    "nsq_fast.config_source", "nsq_fast.header_patterns", "nsq_fast.bridge",
    "nsq_fast.handler_threads", "nsq_fast.client.trace_records", "secrets", "snappy", "ssl", "urllib.parse",
    "urllib.request",
}  # fmt: skip


def test_what_not_every_client_needs_is_imported_when_it_is_used() -> None:
    assert modules_after("from nsq_fast import Consumer, Producer") & LOADED_WHEN_USED == set()


def test_patterns_of_what_is_rare_are_not_compiled_by_an_import() -> None:
    """A pattern takes up to a millisecond to compile: at import those are compiled that every client needs."""
    code = """
import re, sys
from collections import Counter
made, compile = Counter(), re.compile
def counted(pattern, *flags):
    made[sys._getframe(1).f_globals["__name__"]] += 1
    return compile(pattern, *flags)
re.compile = counted
from nsq_fast import Consumer, Producer
print(*sorted(name for name in made if name.startswith("nsq_fast")))
"""
    found = set(run_python(code).split())
    assert found == {"nsq_fast.names", "nsq_fast.protocol.topology"}


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
