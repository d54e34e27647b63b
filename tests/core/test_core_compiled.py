"""The compiled modules as Python sees them: their stubs, misuse, memory, and extensions of others."""

from __future__ import annotations

import ast
import gc
import inspect
import json
import os
import pickle
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.compiled import NAMES
from support.core import pieces
from support.waiting import PROCESS

import nsq_fast
from nsq_fast import _codec
from nsq_fast._codec import HeldMessages, Message, Records, encode_frame, encode_message
from nsq_fast._frame import ColumnReader, FrameReader, join_columns
from nsq_fast._snappy_chunks import SnappyChunks
from nsq_fast.errors import RemoteProtocolError

PACKAGE = Path(nsq_fast.__file__).parent
MODULES = [import_module(f"nsq_fast.{name}") for name in NAMES]


# made by the interpreter or by Cython for every class
MACHINERY = set(dir(object)) | {"__pyx_vtable__", "__setstate_cython__", "__reduce_cython__", "__test__", "__next__"}


IMPORTED = {"json", "namedtuple", "deque", "server_error"}
Scope = dict[str, ast.stmt]


def stub_of(module: ModuleType) -> Scope:
    name = module.__name__.rpartition(".")[2]
    return scope_of(ast.parse((PACKAGE / f"{name}.pyi").read_text()).body)


def scope_of(body: list[ast.stmt]) -> Scope:
    scope: Scope = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            scope[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            scope[node.target.id] = node
    return scope


def public_names(module: ModuleType) -> set[str]:
    def is_ours(value: Any) -> bool:
        return getattr(value, "__module__", module.__name__) == module.__name__ and not inspect.ismodule(value)

    return {name for name, value in vars(module).items() if not name.startswith("_") and is_ours(value)} - IMPORTED


def classes() -> list[Any]:
    return [
        pytest.param(getattr(module, name), node, id=f"{module.__name__}.{name}")
        for module in MODULES
        for name, node in stub_of(module).items()
        if isinstance(node, ast.ClassDef)
    ]


def functions() -> list[Any]:
    found = []
    for module in MODULES:
        for name, node in stub_of(module).items():
            if isinstance(node, ast.FunctionDef):
                found.append(pytest.param(getattr(module, name), node, id=f"{module.__name__}.{name}"))
            if isinstance(node, ast.ClassDef):
                cls = getattr(module, name)
                found += [
                    pytest.param(getattr(cls, each.name), each, id=f"{module.__name__}.{name}.{each.name}")
                    for each in node.body
                    if isinstance(each, ast.FunctionDef) and not is_property(each) and not each.name.startswith("__")
                ]
    return found


def is_property(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and any(
        isinstance(decorator, ast.Name) and decorator.id == "property" for decorator in node.decorator_list
    )


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_the_compiled_module_is_the_one_imported(module: ModuleType) -> None:
    assert module.__file__ is not None
    assert Path(module.__file__).suffix in {".so", ".pyd"}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_names_of_modules(module: ModuleType) -> None:
    assert set(stub_of(module)) == public_names(module)


@pytest.mark.parametrize(("cls", "node"), classes())
def test_names_of_classes(cls: type, node: ast.ClassDef) -> None:
    if issubclass(cls, tuple):
        assert tuple(scope_of(node.body)) == cls._fields  # type: ignore[attr-defined]
        return
    inherited = {name for base in cls.__bases__ for name in vars(base)}
    declared = {name for name in scope_of(node.body) if name != "__init__"} | inherited
    own = {name for name in vars(cls) if not name.startswith("_") or name in ("__len__", "__await__")} - MACHINERY
    assert declared == own | inherited


@pytest.mark.parametrize(("cls", "node"), classes())
def test_bases_and_what_may_be_set(cls: type, node: ast.ClassDef) -> None:
    if issubclass(cls, tuple):
        return
    assert [base.id for base in node.bases if isinstance(base, ast.Name)] == [
        base.__name__ for base in cls.__bases__ if base is not object
    ]
    instance: Any = Records(bytes(4), b"") if cls is Records else cls.__new__(cls)
    for name, each in scope_of(node.body).items():
        if isinstance(each, ast.AnnAssign):
            setattr(instance, name, getattr(instance, name))
        elif is_property(each):
            with pytest.raises(AttributeError):
                setattr(instance, name, 0)


@pytest.mark.parametrize(("function", "node"), functions())
def test_signatures(function: Any, node: ast.FunctionDef) -> None:
    declared = [
        (name, kind, None if default is None else ast.literal_eval(default)) for name, kind, default in _declared(node)
    ]
    actual = [
        (each.name, each.kind, None if each.default is each.empty else each.default)
        for each in inspect.signature(function).parameters.values()
    ]
    assert declared == actual


def _declared(node: ast.FunctionDef) -> list[tuple[str, Any, ast.expr | None]]:
    arguments = node.args
    missing: list[ast.expr | None] = [None] * (len(arguments.args) - len(arguments.defaults))
    kind = inspect.Parameter
    return (
        [
            (each.arg, kind.POSITIONAL_OR_KEYWORD, default)
            for each, default in zip(arguments.args, [*missing, *arguments.defaults], strict=True)
        ]
        + [(each.arg, kind.VAR_POSITIONAL, None) for each in (arguments.vararg,) if each is not None]
        + [
            (each.arg, kind.KEYWORD_ONLY, default)
            for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        ]
    )


@pytest.mark.parametrize(("function", "node"), functions())
def test_every_public_function_says_what_it_does(function: Any, node: ast.FunctionDef) -> None:
    assert function.__doc__


CALL_ALL = """
import inspect, sys
from contextlib import suppress
from importlib import import_module

BLOCKING = {"wait"}
module = import_module(sys.argv[1])
ours = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]

def try_all(get):
    for wrong in (None, 0, b"", "", [], (None,), [None]):
        for count in range(7):
            with suppress(Exception):
                get()(*[wrong] * count)

for value in ours:
    if not inspect.isclass(value):
        try_all(lambda: value)
        continue
    for name in {"__init__", *(name for name in dir(value) if not name.startswith("__"))} - BLOCKING:
        print(value.__name__, name, flush=True)
        try_all(lambda: getattr(value.__new__(value), name))
print("all were called")
"""


@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_called_on_what_was_not_initialised_is_an_exception(name: str) -> None:
    command = [sys.executable, "-c", CALL_ALL, f"nsq_fast.{name}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS, check=False)
    last = (done.stdout.splitlines() or ["import"])[-1]
    assert (done.returncode, last) == (0, "all were called"), done.stderr[-2000:]


@pytest.mark.parametrize("wrong", [None, object(), b"x" * 16, 1], ids=["None", "object", "id", "int"])
@pytest.mark.parametrize("name", ["received", "keep"])
def test_what_is_held_is_messages(name: str, wrong: object) -> None:
    """Whatever is held is taken for a Message later; an embedder's list is looked at before anything is kept."""
    held, good = HeldMessages(), Message(1, 1, b"x" * 16, b"body")
    for messages in ([wrong], [good, wrong], [wrong, good]):
        with pytest.raises(TypeError, match="messages must hold Message, not"):
            getattr(held, name)(messages)
    assert (held.count, len(held), held.unanswered(), held.unreachable()) == (0, 0, [], [])


def test_nothing_compiled_is_unpickled() -> None:
    """It has sizes and places that must be its own."""
    columns = ColumnReader().feed(b"")
    for each in (columns, HeldMessages(), ColumnReader(), SnappyChunks(print)):
        with pytest.raises(TypeError):
            pickle.dumps(each)
        with pytest.raises((TypeError, AttributeError)):
            each.__setstate_cython__(())  # type: ignore[union-attr]


COUNT = 10_000
ID = b"0123456789abcdef"


STREAM = b"".join(
    encode_message(n, 1, ID, b"x" * 200, ext_version=4, ext=b'{"k":"v"}', offset=n, raw_size=240) for n in range(COUNT)
) + encode_frame(1, b"E_FIN_FAILED x")


CHUNKS = pieces(STREAM, 65536)


class Responder:
    def finish(self, message: Message) -> None: ...


def read_messages() -> None:
    responder = Responder()
    reader = FrameReader(detail=True, ext=True, responder=responder)
    for chunk in CHUNKS:
        for frame in reader.feed(chunk):
            if isinstance(frame, Message):
                frame.finish()
                assert frame.headers == {"k": "v"}
    assert reader.buffered == 0


def read_columns() -> None:
    reader = ColumnReader(detail=True, ext=True)
    parts = [reader.feed(chunk) for chunk in CHUNKS]
    columns = join_columns(parts)
    assert columns.count == sum(part.count for part in parts) == COUNT
    assert len(_codec.fin_columns(columns.ids)) == 21 * COUNT
    assert _codec.req_columns(columns.ids, 0).endswith(b" 0\n")


def read_garbage() -> None:
    for n in range(COUNT // 10):
        for reader in (FrameReader(), ColumnReader()):
            reader.feed(STREAM[: 20 + n])
            reader.feed(STREAM[20 + n : 5000] + b"\xff" * 5000)
            with pytest.raises(RemoteProtocolError):
                reader.feed(b"")


def build_commands() -> None:
    bodies: list[Any] = [b"x" * 100, bytearray(100), memoryview(b"x" * 100)]
    for _ in range(COUNT // 10):
        _codec.mpub("t", bodies)
        _codec.mpub_ext("t", [(b"{}", body) for body in bodies])
        _codec.fin_many([ID] * 10)
        for bad in ([*bodies, None], None):
            with pytest.raises(TypeError):
                _codec.mpub("t", bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("work", [read_messages, read_columns, read_garbage, build_commands])
def test_nothing_stays(work: Callable[[], None]) -> None:
    work()  # caches fill
    gc.collect()
    before = len(gc.get_objects())
    tracemalloc.start()
    try:
        work()
        gc.collect()
        left = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(gc.get_objects()) - before < 50
    assert left < 20_000


def test_references_to_what_is_passed_around_balance() -> None:
    responder, body = Responder(), b"a body of its own"
    counts = sys.getrefcount(responder), sys.getrefcount(body), sys.getrefcount(None)
    frames = FrameReader(responder=responder).feed(STREAM[:65536])
    assert sys.getrefcount(responder) > counts[0] + 200
    del frames
    for _ in range(100):
        _codec.mpub("t", [body, body])
        _codec.pub_ext("t", body, body)
        Message(1, 1, ID, body, responder=responder)
    assert (sys.getrefcount(responder), sys.getrefcount(body)) == counts[:2]
    assert abs(sys.getrefcount(None) - counts[2]) < 50


OUTSIDE = '''
from libc.stdint cimport uint64_t

from nsq_fast._codec cimport LAYOUT_OK, MESSAGE_HEADER_SIZE, Message, MessageView, new_message, read_layout, read_u64
from nsq_fast._frame cimport ErrorFrame, FrameReader, Response


def summary(bytes stream):
    """Sum of the internal ids, bytes of bodies, and what else there was."""
    cdef FrameReader reader = FrameReader()
    cdef Message message
    cdef uint64_t total = 0
    cdef Py_ssize_t size = 0
    others = []
    for frame in reader.feed(stream, 1.5):
        if isinstance(frame, Message):
            message = frame
            total += read_u64(message._id)
            size += len(message.body)
            assert message.mark_responded() and not message.mark_responded()
        elif isinstance(frame, Response):
            others.append((<Response> frame).data.decode())
        else:
            others.append((<ErrorFrame> frame).data.decode())
    return total, size, reader.message_count, others


def decoded(const unsigned char[::1] data):
    cdef MessageView view
    if read_layout(&data[0], data.shape[0], False, True, &view) != LAYOUT_OK:
        return None
    return new_message(&view, True, None, 0.0), MESSAGE_HEADER_SIZE
'''


SETUP = """
from Cython.Build import cythonize
from setuptools import Extension, setup

extension = Extension("outside", ["outside.pyx"], extra_compile_args=["-O0"])
setup(ext_modules=cythonize([extension], compiler_directives={"language_level": 3}))
"""


USE = """
import json
import outside
from nsq_fast._codec import encode_frame, encode_message

id = (7).to_bytes(8, "big") + bytes(8)
frame = encode_message(1, 2, id, b"body", offset=5, raw_size=6)
stream = encode_message(1, 2, id, b"body") * 3 + encode_frame(0, b"OK") + encode_frame(1, b"E_X")
message, header = outside.decoded(frame[8:])
print(json.dumps([outside.summary(stream), message.offset, message.internal_id, header, outside.decoded(bytes(30))]))
"""


@pytest.mark.slow
def test_an_outside_extension(tmp_path: Path) -> None:
    pytest.importorskip("Cython")
    pytest.importorskip("setuptools")
    for name, text in (("outside.pyx", OUTSIDE), ("setup.py", SETUP), ("use.py", USE)):
        (tmp_path / name).write_text(text)
    root = str(Path(nsq_fast.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": root}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("setup.py", "build_ext", "--inplace")
    assert json.loads(run("use.py")) == [[21, 12, 3, ["OK", "E_X"]], 5, 7, 26, None]
