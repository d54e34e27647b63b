"""The compiled modules as Python sees them: their stubs, misuse, memory, and extensions of others."""

from __future__ import annotations

import gc
import inspect
import json
import os
import pickle
import re
import subprocess
import sys
import threading
import tracemalloc
from array import array
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from core.readers import pieces
from support.compiled import BUILT_TWICE, NAMES

import nsq_fast
from nsq_fast import _codec, errors
from nsq_fast._codec import (
    HeldMessages,
    Message,
    Records,
    encode_frame,
    encode_message,
    fin_many,
    group_rows,
    mpub_size,
)
from nsq_fast._frame import OK, ColumnReader, FrameReader, join_columns
from nsq_fast._snappy_chunks import SnappyChunks
from nsq_fast.errors import RemoteProtocolError

PACKAGE = Path(nsq_fast.__file__).parent
PROCESS = 120.0  # seconds: as in support.waiting, which needs gevent
MODULES = [import_module(f"nsq_fast.{name}") for name in NAMES]


def printed(*arguments: str, cwd: Path | None = None, **environment: str) -> str:
    """What a fresh Python prints that does this, or runs this code, and ends well."""
    command = [sys.executable, *(arguments if len(arguments) > 1 else ("-c", *arguments))]
    variables = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS, env=variables, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


# What the interpreter and Cython add to each class and module, and a class that nobody can derive from.
ADDED = r"""
nsq_fast\._\w+(\.\w+)?\.(__init__|__next__|__pyx_capi__|__test__)
nsq_fast\._codec\.Records
"""


@pytest.mark.slow
def test_stubs_have_the_names_signatures_and_defaults_of_what_was_compiled(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "added").write_text(ADDED)
    options = ("--concise", "--ignore-disjoint-bases", "--allowlist", "added")
    names = [module.__name__ for module in MODULES]
    printed("-m", "mypy.stubtest", *options, *names, cwd=tmp_path, MYPYPATH=str(PACKAGE.parent))


def of_ours(module: ModuleType) -> list[Any]:
    """What a compiled module has that is its own and public."""
    return [
        value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_what_came_from_a_peer_is_not_set(module: ModuleType) -> None:
    for value in of_ours(module):
        if not inspect.isclass(value) or issubclass(value, tuple):
            continue
        instance: Any = Records(bytes(4), b"") if value is Records else value.__new__(value)
        stub = (PACKAGE / f"{module.__name__.rpartition('.')[2]}.pyi").read_text()
        (own,) = (each for each in re.split(r"\n(?=\S)", stub) if re.match(rf"class {value.__name__}\b", each))
        for name in re.findall(r"@property\n    def (\w+)", own):
            with pytest.raises(AttributeError):
                setattr(instance, name, 0)
        for name in re.findall(r"^    (\w+): ", own, re.M):
            setattr(instance, name, getattr(instance, name))


CALL_ALL = """
import inspect, sys
from contextlib import suppress
from importlib import import_module

BLOCKING = {"wait"}

def try_all(get):
    for wrong in (None, 0, b"", "", [], (None,), [None]):
        for count in range(7):
            with suppress(Exception):
                get()(*[wrong] * count)

for module in map(import_module, sys.argv[1:]):
    for value in [each for each in vars(module).values() if getattr(each, "__module__", None) == module.__name__]:
        if not inspect.isclass(value):
            try_all(lambda: value)
            continue
        for name in {"__init__", *(name for name in dir(value) if not name.startswith("__"))} - BLOCKING:
            print(module.__name__, value.__name__, name, flush=True)
            try_all(lambda: getattr(value.__new__(value), name))
print("all were called")
"""


def test_whatever_is_called_on_what_was_not_initialised_is_an_exception() -> None:
    """A crash shows what was called last."""
    command = [sys.executable, "-c", CALL_ALL, *(module.__name__ for module in MODULES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS, check=False)
    last = (done.stdout.splitlines() or ["import"])[-1]
    assert (done.returncode, last) == (0, "all were called"), done.stderr[-2000:]


@pytest.mark.parametrize("name", ["received", "keep"])
def test_what_is_held_is_messages(name: str) -> None:
    """Whatever is held is taken for a Message later; an embedder's list is looked at before anything is kept."""
    held, good = HeldMessages(), Message(1, 1, b"x" * 16, b"body")
    for wrong in (None, object(), b"x" * 16, 1):
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


class Counting:
    """A responder that counts."""

    partition = "a partition"

    def __init__(self) -> None:
        self.calls: list[object] = []

    def finish(self, message: Message) -> None:
        self.calls.append(message)


def read_messages() -> None:
    reader = FrameReader(detail=True, ext=True, responder=Counting())
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
    responder, body = Counting(), b"a body of its own"
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
    printed("setup.py", "build_ext", "--inplace", cwd=tmp_path)
    assert json.loads(printed("-B", "use.py", cwd=tmp_path)) == [[21, 12, 3, ["OK", "E_X"]], 5, 7, 26, None]


def test_the_tests_of_this_folder_need_no_gevent() -> None:
    """They run on interpreters and machines for which there is none: ``make core``."""
    folder = Path(__file__).parent
    code = f"import sys\nsys.modules['gevent'] = None\nsys.path[:0] = {[str(folder), str(folder.parent)]}\n"
    printed(code + "".join(f"import {path.stem}\n" for path in sorted(folder.glob("test_*.py"))))


# In other interpreters of a process, and shared by threads that run at the same time

THREADS = 4


def in_threads(work: Callable[[int], object]) -> list[BaseException]:
    """Call ``work(number)`` in several threads at once; what they raised."""
    failures: list[BaseException] = []
    ready = threading.Barrier(THREADS)

    def run(number: int) -> None:
        ready.wait()
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


# What every interpreter does with the core: reading, answering, columns, errors.
WORK = r"""
from nsq_fast import _codec, _frame
from nsq_fast._codec import HeldMessages, Message, TruncatedMessage, encode_frame, encode_message, pub_trace, req
from nsq_fast._frame import ColumnReader, ErrorFrame, FrameReader, Response
from nsq_fast.errors import RemoteProtocolError

ID = b"0123456789abcdef"
MESSAGES = encode_message(1, 1, ID, b"body") * 10

def work(rounds):
    reader, short = FrameReader(), FrameReader(max_frame_size=100, skip_oversized=True)
    held = HeldMessages()
    for number in range(rounds):
        *messages, ok, error = reader.feed(MESSAGES + encode_frame(0, b"OK") + encode_frame(1, b"E_INVALID no"))
        assert len(messages) == 10
        assert ok is _frame.OK and type(ok) is Response
        assert type(error) is ErrorFrame and error.data == b"E_INVALID no"
        held.received(messages)
        assert held.finish(messages) == (b"FIN " + ID + b"\n") * 10
        (large,) = short.feed(encode_message(number, 1, ID, b"x" * 200))
        assert type(large) is TruncatedMessage and large.body_size == 200
        large.finish()
        columns = ColumnReader().feed(MESSAGES + encode_frame(0, b"OK"))
        assert columns.count == 10 and columns.frames == [_frame.OK]
        assert pub_trace("t", 2**64 - 1, b"b") and req(ID, 2**63 - 1)
        try:
            FrameReader().feed(b"\xff" * 20)
        except RemoteProtocolError:
            pass
        else:
            raise AssertionError("garbage was taken")
"""


# What an interpreter leaves behind when it ends is freed later than its modules.
BESIDE = r"""
import builtins, sys
assert "_per_interpreter" in _codec.__file__ and "_per_interpreter" in _frame.__file__
class Own(Message):
    pass
work(30)
short = FrameReader(max_frame_size=20, skip_oversized=True)
kept = [*FrameReader().feed(MESSAGES + encode_frame(0, b"OK")), *short.feed(MESSAGES), short, Own(1, 1, ID, b""), work]
kept.append(kept)
sys.kept, builtins.kept = kept, kept[:]
"""


INTERPRETERS = """
import threading
try:
    import _interpreters as interpreters
    run = interpreters.exec
except ImportError:  # Python 3.12
    import _xxsubinterpreters as interpreters
    run = interpreters.run_string

def create(kind):
    if hasattr(interpreters, "exec"):
        return interpreters.create(kind)
    return interpreters.create(isolated=kind == "isolated")

def checked(failure):
    assert failure is None, failure

def come_and_go(kind):
    try:
        for _ in range(2):
            first, second = create(kind), create(kind)
            checked(run(first, BESIDE))
            checked(run(second, BESIDE))
            checked(run(first, "work(30)"))
            interpreters.destroy(first)
            checked(run(second, "work(30)"))
            interpreters.destroy(second)
    except BaseException as error:
        failures.append(error)
        raise

failures = []
work(10)
threads = [threading.Thread(target=come_and_go, args=[kind]) for kind in KINDS]
for thread in threads:
    thread.start()
while any(thread.is_alive() for thread in threads):
    work(10)
work(10)
assert not failures
print("went on")
"""


CONSUMER = """
checked(run(create(KIND), '''
import nsq_fast
try:
    nsq_fast.Consumer
except ImportError as error:
    print(error, flush=True)
'''))
"""


# A session from connect to a publish that is answered, and a message.
SESSION = r"""
from nsq_fast import protocol
from nsq_fast._codec import encode_frame, encode_message

def work(rounds):
    for _ in range(rounds):
        session = protocol.Session(protocol.ConnectionConfig())
        assert session.connect().startswith(b"  V2IDENTIFY")
        session.receive(encode_frame(0, b'{"max_rdy_count": 2500}'))
        assert session.is_ready
        assert session.pub("t", b"body", token="first") == b"PUB t\n\0\0\0\x04body"
        message, reply = session.receive(encode_message(1, 1, b"0123456789abcdef", b"body") + encode_frame(0, b"OK"))
        assert message.body == b"body" and reply.token == "first"
"""


SESSIONS_BESIDE = """
import builtins
work(10)
builtins.kept = [protocol.Session(protocol.ConnectionConfig()), work]
"""


REFUSED = """
import _xxsubinterpreters as interpreters
for _ in range(3):
    other = interpreters.create()
    interpreters.run_string(other, '''
try:
    import nsq_fast._frame
except ImportError as error:
    print(error, flush=True)
''')
    interpreters.destroy(other)
    work(10)
print("went on")
"""


several = pytest.mark.skipif(sys.version_info < (3, 12), reason="before Python 3.12 the core is for one interpreter")


@several
@pytest.mark.parametrize("kinds", [["isolated"] * 4, ["legacy"] * 2, ["isolated", "legacy"]], ids="-".join)
def test_interpreters_run_the_core_beside_one_another(kinds: list[str]) -> None:
    """Isolated ones have a lock of their own each, so they run at the same time; the others share the main one's."""
    names = f"KINDS, BESIDE = {kinds}, {WORK + BESIDE!r}\n"
    assert printed(names + WORK + INTERPRETERS) == "went on\n"


@pytest.mark.skipif(sys.version_info < (3, 13), reason="before Python 3.13 msgspec is for one interpreter")
def test_interpreters_that_share_a_lock_have_sessions_beside_one_another() -> None:
    names = f"KINDS, BESIDE = {['legacy'] * 2}, {SESSION + SESSIONS_BESIDE!r}\n"
    assert printed(names + SESSION + INTERPRETERS) == "went on\n"


def test_all_compiled_modules_of_the_protocol_are_built_for_each_interpreter() -> None:
    """What was not is refused there: "this module can only be loaded into one interpreter per process"."""
    code = """
import sys, nsq_fast.protocol
for name, module in sys.modules.items():
    if name.startswith("nsq_fast.") and not module.__file__.endswith(".py"):
        print(name.rpartition("._")[2])
"""
    built = {path.stem for path in (PACKAGE / "_per_interpreter").glob("*.c")}
    assert set(printed(code).split()) == built == {name[1:] for name in BUILT_TWICE}


@several
@pytest.mark.parametrize("kind", ["isolated", "legacy"])
def test_a_consumer_says_that_this_is_not_the_main_interpreter(kind: str) -> None:
    helpers = INTERPRETERS.partition("def come_and_go")[0]
    told = printed(f"KIND = {kind!r}\n{helpers}{CONSUMER}")
    assert "main interpreter" in told
    assert "nsq_fast._frame" in told


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="from Python 3.12 on each interpreter has a core")
def test_another_interpreter_is_refused_with_a_reason_and_harms_nothing() -> None:
    *reasons, last = printed(WORK + REFUSED).splitlines()
    assert ["interpreter" in reason for reason in reasons] == [True] * 3
    assert last == "went on"


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT_TWICE)
def test_a_module_reads_no_object_from_a_variable_of_c(name: str, tmp_path: Path) -> None:
    """All interpreters of a process share those. Cython puts ``cdef`` variables of a module there, and builtins."""
    pytest.importorskip("Cython")
    written, source = PACKAGE / f"{name}.pyx", PACKAGE / f"{name}.c"
    if not source.exists() or source.stat().st_mtime < written.stat().st_mtime:  # what a build has left is taken
        source = tmp_path / f"{name}.c"
        command = [sys.executable, "-m", "cython", "-3", str(written), "-o", str(source)]
        subprocess.run(command, check=True, capture_output=True, timeout=PROCESS, cwd=PACKAGE.parent)
    text = source.read_text()
    assert "static PyObject *" in text
    kept = re.findall(r"^static [^(\n]*\*(__pyx_(?:v|builtin)_\w+)(?: = 0)?;$", text, re.MULTILINE)
    filled = [f"static PyObject *{each};" for each in kept] + [f"{each} = __Pyx_GetBuiltinName(" for each in kept]
    lines = [line for line in text.splitlines() if any(each in line for each in kept)]
    assert [line for line in lines if not any(each in line for each in filled)] == []


ROUNDS = 300


def test_threads_that_read_columns_do_not_disturb_one_another() -> None:
    """They decode without the interpreter's lock, so at the same time."""

    def work(number: int) -> None:
        data = encode_message(number, 1, ID, b"%d" % number * 100) * 200
        for _ in range(ROUNDS // 6):
            columns = ColumnReader().feed(data)
            assert (columns.count, columns.body) == (200, b"%d" % number * 100 * 200)

    assert in_threads(work) == []


def message(**options: Any) -> Message:
    return Message(1, 1, ID, b"body", **options)


def test_importing_the_core_leaves_the_interpreters_lock_as_it_is() -> None:
    printed(
        "import sys; lock = getattr(sys, '_is_gil_enabled', lambda: True); before = lock()\n"
        f"import {', '.join(f'nsq_fast.{name}' for name in NAMES)}\n"
        "assert lock() == before, 'importing the core has enabled the lock again'"
    )


def test_of_threads_that_finish_a_message_one_does() -> None:
    responder = Counting()
    messages = [message(responder=responder) for _ in range(ROUNDS)]

    def work(_: int) -> None:
        for each in messages:
            with suppress(errors.AlreadyResponded):
                each.finish()

    assert in_threads(work) == []
    assert len(responder.calls) == ROUNDS


def test_a_responder_may_be_replaced_while_others_respond() -> None:
    one = message(responder=Counting())
    partitions: set[object] = set()

    def work(number: int) -> None:
        for _ in range(ROUNDS * 10):
            if number % 2:
                one.responder = Counting()
            else:
                partitions.add(one.partition)

    assert in_threads(work) == []
    assert partitions == {"a partition"}


def test_what_is_made_cannot_be_made_again() -> None:
    """Others may be reading it: __init__ of an object that is shared would take its bytes away."""
    with pytest.raises(TypeError, match="made once"):
        message().__init__(2, 2, ID, b"other")  # type: ignore[misc]
    with pytest.raises(TypeError, match="made once"):
        OK.__init__(b"other")  # type: ignore[misc]
    assert OK.data == b"OK"


def test_a_list_may_change_while_it_is_written() -> None:
    """Commands are built of what the list holds at one time."""
    shared = [message() for _ in range(50)]
    bodies = [b"body"] * 50
    sizes: list[int] = []
    totals: set[int] = set()

    def work(number: int) -> None:
        for _ in range(ROUNDS):
            if number % 2:
                shared.append(shared.pop())
                bodies.append(bodies.pop())
                del shared[40:], bodies[40:]
                shared.extend([message() for _ in range(10)])
                bodies.extend([b"body"] * 10)
            else:
                sizes.append(len(fin_many(shared)))
                totals.add(mpub_size(bodies, 10))

    assert in_threads(work) == []
    assert all(size % len(b"FIN 0123456789abcdef\n") == 0 for size in sizes)
    assert all((total - 4) % 8 == 0 for total in totals)


def test_threads_that_share_the_messages_held_lose_none() -> None:
    held = HeldMessages()
    held.msg_timeout = 60.0

    def work(_: int) -> None:
        for _ in range(ROUNDS):
            batch = [message() for _ in range(10)]
            held.received(batch)
            held.finish(batch)

    assert in_threads(work) == []
    assert held.count == 0
    assert held.unanswered() == []


def test_threads_that_share_a_reader_of_columns_are_told_or_served() -> None:
    """It decodes without the lock: whoever comes meanwhile is refused, and what is served is whole."""
    reader, data = ColumnReader(), encode_message(1, 1, ID, b"x" * 1000) * 500
    ends: list[tuple[int, bytes] | str] = []

    def feed() -> None:
        try:
            columns = reader.feed(data)
            ends.append((columns.count, columns.body))
        except errors.LocalProtocolError as error:
            ends.append(str(error))

    def work(_: int) -> None:
        for _ in range(ROUNDS // 10):
            feed()

    assert in_threads(work) == []
    assert len(ends) == THREADS * (ROUNDS // 10)
    served = (500, b"x" * 1000 * 500)
    assert served in ends
    assert all("another feed" in each for each in ends if each != served)


def test_arrays_may_change_while_commands_are_built_of_them() -> None:
    targets = array("i", [0] * 1000)
    rows = array("i", range(1000))
    records = Records(array("i", range(0, 4004, 4)), b"body" * 1000)
    lengths: set[int] = set()
    done = threading.Event()

    def work(number: int) -> None:
        if number == 0:
            while not done.is_set():
                for at in range(0, 1000, 7):
                    targets[at] = 1 - targets[at]
                    rows[at] = 0
                    rows[at] = at
            return
        try:
            for _ in range(ROUNDS):
                lengths.add(sum(map(len, group_rows(targets, 2))))
                lengths.add(len(records.mpub("topic", rows=rows)) - len(b"MPUB topic\n") - 8 - 4000)
        finally:
            done.set()

    assert in_threads(work) == []
    assert lengths == {4000}


@pytest.mark.parametrize("chunk", [bytes, bytearray])
def test_threads_that_share_a_reader_of_pieces_get_each_message_once(chunk: type) -> None:
    """Only whole messages, since nobody could say what pieces of two threads make together."""
    reader = FrameReader()
    seen: list[bytes] = []

    def work(number: int) -> None:
        for turn in range(ROUNDS):
            body = b"%d-%d" % (number, turn)
            seen.extend(each.body for each in reader.feed(chunk(encode_message(1, 1, ID, body))))

    assert in_threads(work) == []
    assert sorted(seen) == sorted(b"%d-%d" % (n, turn) for n in range(THREADS) for turn in range(ROUNDS))
